//! A reader of `multipart/form-data` for bodies of any size.
//!
//! Pieces of a part are handed on as slices of what came from the network, without a copy and without waiting for
//! the part's end. Nothing but headers is held, and those are bounded, so a body without any boundary costs no
//! memory either. Of the headers only the field's name matters here; file names may hold any bytes.

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt as _};
use memchr::memmem::Finder;

/// Bound of the headers of one part.
const MAX_HEADERS: usize = 16 << 10;
/// Bound of a boundary; the standard allows 70.
const MAX_BOUNDARY: usize = 200;

/// Why a body cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MultipartError {
    #[error("the content type must be multipart/form-data with a boundary")]
    NotMultipart,
    #[error("the body ends before its last boundary; send it again")]
    Incomplete,
    #[error("the headers of a part are longer than {MAX_HEADERS} bytes")]
    HeadersTooLong,
    #[error("the body broke off: {0}")]
    Broken(String),
}

/// The boundary named by a content type.
pub(crate) fn boundary(content_type: &[u8]) -> Result<Vec<u8>, MultipartError> {
    let mut parameters = Parameters(content_type);
    let kind = parameters.word();
    if !kind.eq_ignore_ascii_case(b"multipart/form-data") {
        return Err(MultipartError::NotMultipart);
    }
    parameters
        .value("boundary")
        .filter(|boundary| (1..=MAX_BOUNDARY).contains(&boundary.len()))
        .ok_or(MultipartError::NotMultipart)
}

/// Reads parts one after the other.
pub(crate) struct Multipart<S> {
    body: S,
    /// Received and not yet handed on.
    buffer: Bytes,
    /// Finds the line break and dashes before a boundary, and the boundary.
    delimiter: Finder<'static>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In a part, or before the first one.
    Data,
    /// A boundary was read; a part's headers follow.
    Headers,
    /// The last boundary was read.
    End,
}

/// What follows a delimiter.
enum After {
    Part,
    End,
    Data,
}

impl<S, E> Multipart<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    /// Reads `body`, whose parts are parted by `boundary`.
    pub(crate) fn new(body: S, boundary: &[u8]) -> Self {
        let delimiter = [b"\r\n--", boundary].concat();
        Self {
            body,
            // The first boundary begins a line too, though no line break comes before it.
            buffer: Bytes::from_static(b"\r\n"),
            delimiter: Finder::new(&delimiter).into_owned(),
            state: State::Data,
        }
    }

    /// Goes to the next part, over the rest of this one, and returns its field name; `None` at the end.
    pub(crate) async fn next_part(&mut self) -> Result<Option<Vec<u8>>, MultipartError> {
        while self.chunk().await?.is_some() {}
        if self.state == State::End {
            return Ok(None);
        }
        let headers = self.headers().await?;
        self.state = State::Data;
        Ok(Some(field_name(&headers).unwrap_or_default()))
    }

    /// The next piece of the part; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, MultipartError> {
        while self.state == State::Data {
            let length = self.delimiter.needle().len();
            match self.delimiter.find(&self.buffer) {
                Some(0) => match self.after_delimiter().await? {
                    After::Part => self.state = State::Headers,
                    After::End => self.state = State::End,
                    After::Data => return Ok(Some(self.buffer.split_to(length))),
                },
                Some(at) => return Ok(Some(self.buffer.split_to(at))),
                None => {
                    let safe = self.buffer.len() - self.possible_start();
                    if safe > 0 {
                        return Ok(Some(self.buffer.split_to(safe)));
                    }
                    self.fill().await?;
                }
            }
        }
        Ok(None)
    }

    /// Reads what follows the last boundary, to be sure that the client has sent all it meant to.
    pub(crate) async fn finish(&mut self) -> Result<(), MultipartError> {
        while let Some(chunk) = self.body.next().await {
            chunk.map_err(|error| MultipartError::Broken(error.to_string()))?;
        }
        Ok(())
    }

    /// Reads on to the end, at most `limit` bytes, so that a client still sending sees the answer.
    pub(crate) async fn drain(&mut self, limit: usize) {
        let mut drained = 0;
        while drained < limit {
            match self.body.next().await {
                Some(Ok(chunk)) => drained += chunk.len(),
                Some(Err(_)) | None => return,
            }
        }
    }

    /// How many bytes at the end of the buffer may begin a delimiter.
    fn possible_start(&self) -> usize {
        let delimiter = self.delimiter.needle();
        let longest = self.buffer.len().min(delimiter.len() - 1);
        (1..=longest).rev().find(|length| self.buffer.ends_with(&delimiter[..*length])).unwrap_or(0)
    }

    /// Looks at what follows the delimiter at the start of the buffer, and takes both unless it is data after all.
    async fn after_delimiter(&mut self) -> Result<After, MultipartError> {
        let length = self.delimiter.needle().len();
        loop {
            let rest = &self.buffer[length..];
            if rest.starts_with(b"--") {
                self.buffer = self.buffer.slice(length + 2..);
                return Ok(After::End);
            }
            let padding = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
            let after = &rest[padding..];
            if after.starts_with(b"\r\n") {
                // The line break stays: with none but empty lines, the end of the headers begins with it.
                self.buffer = self.buffer.slice(length + padding..);
                return Ok(After::Part);
            }
            let undecided = after.is_empty() || after == b"\r" || (rest == b"-");
            if !undecided || padding > MAX_HEADERS {
                return Ok(After::Data);
            }
            self.fill().await?;
        }
    }

    /// The lines between the boundary and the empty line.
    async fn headers(&mut self) -> Result<Bytes, MultipartError> {
        loop {
            // The buffer begins with the line break after the boundary.
            if let Some(end) = memchr::memmem::find(&self.buffer, b"\r\n\r\n") {
                if end > MAX_HEADERS {
                    return Err(MultipartError::HeadersTooLong);
                }
                let headers = self.buffer.slice(..end);
                self.buffer = self.buffer.slice(end + 4..);
                return Ok(headers);
            }
            if self.buffer.len() > MAX_HEADERS {
                return Err(MultipartError::HeadersTooLong);
            }
            self.fill().await?;
        }
    }

    /// Appends what comes next; the end of the body is an error, since the last boundary was not read.
    async fn fill(&mut self) -> Result<(), MultipartError> {
        match self.body.next().await {
            Some(Ok(chunk)) if self.buffer.is_empty() => self.buffer = chunk,
            Some(Ok(chunk)) => {
                let mut joined = BytesMut::with_capacity(self.buffer.len() + chunk.len());
                joined.extend_from_slice(&self.buffer);
                joined.extend_from_slice(&chunk);
                self.buffer = joined.freeze();
            }
            Some(Err(error)) => return Err(MultipartError::Broken(error.to_string())),
            None => return Err(MultipartError::Incomplete),
        }
        Ok(())
    }
}

fn field_name(headers: &[u8]) -> Option<Vec<u8>> {
    headers.split(|byte| *byte == b'\n').find_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = line.split_at(colon);
        name.trim_ascii().eq_ignore_ascii_case(b"content-disposition").then(|| {
            let mut parameters = Parameters(&value[1..]);
            parameters.word();
            parameters.value("name")
        })?
    })
}

/// `word; name=value; name="quoted \" value"`.
struct Parameters<'a>(&'a [u8]);

impl<'a> Parameters<'a> {
    /// Text up to the next semicolon.
    fn word(&mut self) -> &'a [u8] {
        let end = self.0.iter().position(|byte| *byte == b';').unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(end);
        self.0 = rest.get(1..).unwrap_or_default();
        word.trim_ascii()
    }

    /// The value of the first parameter of that name.
    fn value(&mut self, wanted: &str) -> Option<Vec<u8>> {
        while !self.0.is_empty() {
            let end = self.0.iter().position(|byte| matches!(byte, b'=' | b';')).unwrap_or(self.0.len());
            let name = self.0[..end].trim_ascii();
            let has_value = self.0.get(end) == Some(&b'=');
            self.0 = self.0.get(end + 1..).unwrap_or_default();
            if !has_value {
                continue;
            }
            self.0 = self.0.trim_ascii_start();
            let value = if self.0.first() == Some(&b'"') { self.quoted() } else { self.word().to_vec() };
            if name.eq_ignore_ascii_case(wanted.as_bytes()) {
                return Some(value);
            }
        }
        None
    }

    /// A quoted value and all up to the next semicolon.
    fn quoted(&mut self) -> Vec<u8> {
        let mut value = Vec::new();
        let mut at = 1;
        while let Some(byte) = self.0.get(at) {
            match byte {
                b'"' => break,
                // Browsers write `%22` and put backslashes of Windows paths in as they are: only `\"` and `\\`
                // are escapes.
                b'\\' if matches!(self.0.get(at + 1), Some(b'"' | b'\\')) => {
                    at += 1;
                    value.push(self.0[at]);
                }
                byte => value.push(*byte),
            }
            at += 1;
        }
        self.0 = self.0.get(at + 1..).unwrap_or_default();
        self.word();
        value
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use proptest::prelude::*;

    use super::*;

    type Parts = Vec<(String, Vec<u8>)>;

    fn read(boundary: &str, body: &[u8], sizes: &[usize]) -> Result<Parts, MultipartError> {
        let mut chunks = Vec::new();
        let mut rest = body;
        let mut sizes = sizes.iter().cycle();
        while !rest.is_empty() {
            let size = (*sizes.next().unwrap_or(&1)).clamp(1, rest.len());
            chunks.push(Ok::<_, std::convert::Infallible>(Bytes::copy_from_slice(&rest[..size])));
            rest = &rest[size..];
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut multipart = Multipart::new(stream::iter(chunks), boundary.as_bytes());
            let mut parts = Vec::new();
            while let Some(name) = multipart.next_part().await? {
                let mut content = Vec::new();
                while let Some(chunk) = multipart.chunk().await? {
                    assert!(!chunk.is_empty());
                    content.extend_from_slice(&chunk);
                }
                parts.push((String::from_utf8_lossy(&name).into_owned(), content));
            }
            Ok(parts)
        })
    }

    fn write(boundary: &str, parts: &[(&str, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (name, content) in parts {
            body.extend_from_slice(
                format!(
                    "--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"x\"\r\n\r\n"
                )
                .as_bytes(),
            );
            body.extend_from_slice(content);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
        body
    }

    #[test]
    fn boundaries() {
        for (content_type, expected) in [
            ("multipart/form-data; boundary=abc", Some("abc")),
            ("Multipart/Form-Data; charset=utf-8; Boundary=\"a b;c\"", Some("a b;c")),
            ("multipart/form-data;boundary=abc ; x=y", Some("abc")),
            ("multipart/form-data", None),
            ("multipart/form-data; boundary=", None),
            ("application/json; boundary=x", None),
            ("", None),
        ] {
            let found = boundary(content_type.as_bytes()).ok();
            assert_eq!(found.as_deref(), expected.map(str::as_bytes), "{content_type}");
        }
    }

    #[test]
    fn names_are_read_whatever_the_file_name_holds() {
        for (line, name) in [
            ("Content-Disposition: form-data; name=\"file\"; filename=\"a;name=\\\"x\\\".txt\"", "file"),
            ("content-disposition:form-data;filename=\"\\\\\"; name=file", "file"),
            (
                "X-Other: 1\r\nCONTENT-DISPOSITION: form-data; filename*=UTF-8''%e2; name=\"metadata\"",
                "metadata",
            ),
            ("Content-Type: text/plain", ""),
        ] {
            let body = [format!("--b\r\n{line}\r\n\r\n").as_bytes(), b"\xff\0", b"\r\n--b--"].concat();
            let parts = read("b", &body, &[3]).unwrap();
            assert_eq!(parts, [(name.to_owned(), b"\xff\0".to_vec())], "{line}");
        }
    }

    #[test]
    fn odd_but_legal_bodies() {
        let body = b"preamble\r\n--bx\r\n--b \t\r\nContent-Disposition: form-data; name=a\r\n\r\n--bnot\r\n--b-\r\n--b--x\r\n\r\n--b\r\n\r\nq\r\n--b--epilogue";
        let parts = read("b", body, &[1]);
        // `--b--x` ends the body: what begins with the last boundary is the last boundary.
        assert_eq!(parts.unwrap(), [("a".to_owned(), b"--bnot\r\n--b-".to_vec())]);
        assert_eq!(read("b", b"--b--", &[1]).unwrap(), []);
    }

    #[test]
    fn a_cut_body_is_an_error_wherever_it_is_cut() {
        let body = write("bound", &[("metadata", b"{}"), ("file", b"content\r\n--boun")]);
        let last = body.len() - 2;
        for end in 0..last {
            assert!(read("bound", &body[..end], &[7]).is_err(), "{end}");
        }
        assert!(read("bound", &body[..last], &[7]).is_ok());
        assert!(matches!(read("b", &[b'x'; 100_000], &[1000]), Err(MultipartError::Incomplete)));
        let long = [b"--b\r\nA: ".as_slice(), &vec![b'x'; 100_000]].concat();
        assert!(matches!(read("b", &long, &[1000]), Err(MultipartError::HeadersTooLong)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn any_split_gives_the_same_parts(
            contents in proptest::collection::vec(
                proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'b'), any::<u8>()], 0..40),
                0..4,
            ),
            sizes in proptest::collection::vec(1_usize..30, 1..8),
        ) {
            let boundary = "b-b";
            prop_assume!(contents.iter().all(|content| {
                let line = [b"\r\n".as_slice(), content].concat();
                memchr::memmem::find(&line, b"\r\n--b-b").is_none()
            }));
            let parts: Vec<(&str, &[u8])> = contents.iter().map(|content| ("f", content.as_slice())).collect();
            let read = read(boundary, &write(boundary, &parts), &sizes).unwrap();
            let expected: Parts = contents.iter().map(|content| ("f".to_owned(), content.clone())).collect();
            prop_assert_eq!(read, expected);
        }

        #[test]
        fn random_bodies_do_not_panic(body in proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'b'), Just(b';'), Just(b'"')], 0..200), size in 1_usize..20) {
            let _ = read("b", &body, &[size]);
        }
    }
}
