//! Downloads: whole files, byte ranges and lines.
//!
//! The first piece is read before the answer begins, so that failures have their status and small files, also
//! those whose size the kernel does not know beforehand (`/proc`), have their true length. Larger ones are read by
//! other threads piece by piece, one ahead of the client. A file that shrinks meanwhile breaks the answer off.

use std::fs::File;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::Timestamp;
use osb_protocol::execd::code;
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::task::JoinHandle;

use super::error::{FileError, Result};
use super::lines::Lines;
use super::path::{Query, Requested};
use super::range::{self, Condition};
use crate::app::App;
use crate::http::ApiError;

/// Read at a time.
const PIECE: usize = 256 << 10;

/// `GET /files/download`.
pub(crate) async fn download(
    State(app): State<App>,
    query: Query,
    headers: HeaderMap,
) -> std::result::Result<Response, ApiError> {
    query.get("path").ok_or_else(|| ApiError::missing_query("path"))?;
    let (offset, limit) = (query.number("offset", 1)?, query.number("limit", 1)?);
    if offset.is_some() || limit.is_some() {
        if headers.contains_key(header::RANGE) {
            return Err(ApiError::invalid(
                "'offset' and 'limit' count lines; they do not go with a Range header",
            ));
        }
        let read = move || {
            let (requested, file, _) = open(&query, &app)?;
            let mut lines = Lines::new(file, offset.unwrap_or(1), limit);
            let first = next_lines(&mut lines, &requested)?;
            Ok((requested, lines, first))
        };
        let (requested, lines, first) = super::blocking(read).await?;
        return Ok(answer_lines(requested, lines, first));
    }
    let opened = super::blocking(move || {
        let (requested, file, stat) = open(&query, &app)?;
        // One byte more than a small file has shows that it ends there. Files of the kernel claim zero or one
        // page whatever comes.
        let claimed = usize::try_from(stat.st_size).unwrap_or(PIECE);
        let mut first = vec![0; if claimed == 0 { PIECE } else { PIECE.min(claimed + 1) }];
        let length = read_at(&file, &mut first, 0)
            .map_err(|error| FileError::of_io(&requested.shown, "read the file", &error))?;
        let whole = length < first.len();
        first.truncate(length);
        Ok(Opened { requested, file, stat, first, whole })
    });
    opened.await?.answer(&headers)
}

/// Opens a regular file for reading.
fn open(query: &Query, app: &App) -> Result<(Requested, File, rustix::fs::Stat)> {
    let requested = Requested::new(query.get("path").unwrap_or_default(), app)?;
    let shown = &requested.shown;
    let not_regular =
        || FileError::Invalid(format!("{shown}: is not a regular file and cannot be downloaded"));
    // A pipe without a writer must not hold the request.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(CWD, &requested.path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NXIO | Errno::NODEV => not_regular(),
        errno => FileError::of(shown, "open the file", errno),
    })?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| FileError::of(shown, "read the file", errno))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            // A failed hint changes nothing.
            let _ = rustix::fs::fadvise(&fd, 0, None, rustix::fs::Advice::Sequential);
            Ok((requested, fd.into(), stat))
        }
        FileType::Directory => Err(FileError::Invalid(format!(
            "{shown}: is a directory; list it with GET /directories/list or download its files one by one"
        ))),
        _ => Err(not_regular()),
    }
}

/// Fills the buffer unless the file ends before.
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

struct Opened {
    requested: Requested,
    file: File,
    stat: rustix::fs::Stat,
    /// The file's beginning.
    first: Vec<u8>,
    /// Whether that is all.
    whole: bool,
}

impl Opened {
    fn answer(self, headers: &HeaderMap) -> std::result::Result<Response, ApiError> {
        let modified = i32::try_from(self.stat.st_mtime_nsec)
            .ok()
            .and_then(|nanoseconds| Timestamp::new(self.stat.st_mtime, nanoseconds).ok())
            .unwrap_or(Timestamp::UNIX_EPOCH);
        let mut answer = HeaderMap::new();
        if let Some(value) = range::format_date(modified).and_then(|date| HeaderValue::try_from(date).ok()) {
            answer.insert(header::LAST_MODIFIED, value);
        }
        answer.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        match range::condition(headers, modified) {
            Condition::Go => {}
            Condition::NotModified => return Ok((StatusCode::NOT_MODIFIED, answer).into_response()),
            Condition::Failed => {
                return Err(ApiError::new(
                    StatusCode::PRECONDITION_FAILED,
                    code::UNKNOWN,
                    "the file is not the one that the condition names",
                ));
            }
        }
        answer.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        answer.insert(header::CONTENT_DISPOSITION, disposition(&self.requested));
        let range = headers.get(header::RANGE).filter(|_| range::range_is_allowed(headers, modified));
        match (self.size(), range) {
            (Some(size), Some(range)) => self.answer_range(answer, range, size),
            // Nobody knows where a range of a file without a size ends: the whole is a right answer too.
            (size, _) => Ok(self.answer_span(StatusCode::OK, answer, 0, size)),
        }
    }

    /// The length, where it is known.
    fn size(&self) -> Option<u64> {
        if self.whole {
            return Some(self.first.len() as u64);
        }
        u64::try_from(self.stat.st_size).ok().filter(|size| *size > 0)
    }

    fn answer_range(
        self,
        mut answer: HeaderMap,
        range: &HeaderValue,
        size: u64,
    ) -> std::result::Result<Response, ApiError> {
        let Ok((start, length)) =
            range.to_str().map_err(|_| range::Unsatisfiable).and_then(|range| range::parse(range, size))
        else {
            let error = ApiError::new(
                StatusCode::RANGE_NOT_SATISFIABLE,
                code::UNKNOWN,
                format!(
                    "the Range header names no bytes of the file, which has {size}; write bytes=FIRST-LAST"
                ),
            );
            let mut response = error.into_response();
            set(response.headers_mut(), header::CONTENT_RANGE, format!("bytes */{size}"));
            return Ok(response);
        };
        set(&mut answer, header::CONTENT_RANGE, format!("bytes {start}-{}/{size}", start + length - 1));
        Ok(self.answer_span(StatusCode::PARTIAL_CONTENT, answer, start, Some(length)))
    }

    /// The bytes from `start` on; without a length all there are.
    fn answer_span(
        self,
        status: StatusCode,
        mut answer: HeaderMap,
        start: u64,
        length: Option<u64>,
    ) -> Response {
        let first_length = self.first.len() as u64;
        let end = length.map(|length| start + length);
        if let Some(length) = length {
            set(&mut answer, header::CONTENT_LENGTH, length.to_string());
        }
        let mut first = Bytes::from(self.first);
        // What of the span was read already.
        let from = start.min(first_length);
        let to = end.unwrap_or(u64::MAX).min(first_length).max(from);
        // Both lie within the piece in memory.
        first = first.slice(from as usize..to as usize);
        if end.is_some_and(|end| end <= first_length) || self.whole {
            return (status, answer, first).into_response();
        }
        let reader = Reader::new(self.file, self.requested.shown, start.max(first_length), end);
        let first = (!first.is_empty()).then_some(first);
        let body = stream::unfold((first, reader), |(first, mut reader)| async {
            match first {
                Some(first) => Some((Ok(first), (None, reader))),
                None => reader.next().await.map(|piece| (piece, (None, reader))),
            }
        });
        (status, answer, Body::from_stream(body)).into_response()
    }
}

fn set(headers: &mut HeaderMap, name: header::HeaderName, value: String) {
    // The texts are made of digits and ASCII letters, which no header refuses.
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(name, value);
    }
}

/// Reads a span piece by piece, one piece ahead.
struct Reader {
    file: Arc<File>,
    shown: String,
    next: u64,
    end: Option<u64>,
    /// How much was asked for, and the read in progress.
    ahead: Option<(usize, JoinHandle<std::io::Result<Vec<u8>>>)>,
    buffers: Buffers,
}

impl Reader {
    fn new(file: File, shown: String, start: u64, end: Option<u64>) -> Self {
        let file = Arc::new(file);
        let mut reader = Self { file, shown, next: start, end, ahead: None, buffers: Buffers::default() };
        reader.read_ahead();
        reader
    }

    fn read_ahead(&mut self) {
        let left = self.end.map_or(u64::MAX, |end| end.saturating_sub(self.next));
        if left == 0 {
            return;
        }
        let length = left.min(PIECE as u64) as usize;
        let (file, offset, mut buffer) = (self.file.clone(), self.next, self.buffers.take());
        self.next += length as u64;
        let read = tokio::task::spawn_blocking(move || {
            buffer.resize(length, 0);
            let read = read_at(&file, &mut buffer, offset)?;
            buffer.truncate(read);
            Ok(buffer)
        });
        self.ahead = Some((length, read));
    }

    async fn next(&mut self) -> Option<std::io::Result<Bytes>> {
        let (length, read) = self.ahead.take()?;
        let buffer = match read.await {
            Ok(Ok(buffer)) => buffer,
            Ok(Err(error)) => return Some(Err(self.failed(&error))),
            Err(error) => return Some(Err(self.failed(&error))),
        };
        if buffer.len() == length {
            self.read_ahead();
        } else if self.end.is_some() {
            return Some(Err(self.failed(&"the file has become shorter")));
        } else if buffer.is_empty() {
            return None;
        }
        Some(Ok(self.buffers.lend(buffer)))
    }

    fn failed(&self, reason: &dyn std::fmt::Display) -> std::io::Error {
        tracing::warn!(path = self.shown, %reason, "a download was broken off");
        std::io::Error::other(format!("{}: {reason}", self.shown))
    }
}

/// Buffers of one download, used again when the connection has sent them: fresh ones would be mapped and cleared
/// by the kernel for each piece.
#[derive(Debug, Clone, Default)]
struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

impl Buffers {
    fn take(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn lend(&self, buffer: Vec<u8>) -> Bytes {
        Bytes::from_owner(Lent { buffer, home: self.clone() })
    }
}

struct Lent {
    buffer: Vec<u8>,
    home: Buffers,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        self.home.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

type FileLines = Lines<File>;

fn next_lines(lines: &mut FileLines, requested: &Requested) -> Result<Option<Vec<u8>>> {
    lines.next_piece().map_err(|error| FileError::of_io(&requested.shown, "read the file", &error))
}

fn answer_lines(requested: Requested, lines: FileLines, first: Option<Vec<u8>>) -> Response {
    let content_type = [(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"))];
    if lines.has_ended() {
        return (content_type, first.unwrap_or_default()).into_response();
    }
    let state = (first, Some((requested, lines)));
    let body = stream::unfold(state, |(first, rest)| async {
        if let Some(first) = first {
            return Some((Ok(Bytes::from(first)), (None, rest)));
        }
        let (requested, mut lines) = rest?;
        let read = super::blocking(move || {
            let piece = next_lines(&mut lines, &requested)?;
            Ok((piece, (requested, lines)))
        });
        match read.await {
            Ok((Some(piece), rest)) => Some((Ok(Bytes::from(piece)), (None, Some(rest)))),
            Ok((None, _)) => None,
            Err(error) => {
                tracing::warn!(error = %error, "a download was broken off");
                Some((Err(std::io::Error::other(error.to_string())), (None, None)))
            }
        }
    });
    (content_type, Body::from_stream(body)).into_response()
}

/// Names the file to the client's disk. A name that is more than plain ASCII comes percent-encoded, and once more
/// in the form that says so.
fn disposition(requested: &Requested) -> HeaderValue {
    let name = requested.path.file_name().unwrap_or_default().as_bytes();
    let plain = name.iter().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\'));
    let value = if plain {
        format!("attachment; filename=\"{}\"", String::from_utf8_lossy(name))
    } else {
        let encoded: String = name
            .iter()
            .map(|byte| match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    char::from(*byte).to_string()
                }
                byte => format!("%{byte:02X}"),
            })
            .collect();
        format!("attachment; filename=\"{encoded}\"; filename*=UTF-8''{encoded}")
    };
    HeaderValue::try_from(value).unwrap_or(HeaderValue::from_static("attachment"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names() {
        for (name, expected) in [
            ("a b.txt", "attachment; filename=\"a b.txt\""),
            ("50%.txt", "attachment; filename=\"50%.txt\""),
            ("ü.txt", "attachment; filename=\"%C3%BC.txt\"; filename*=UTF-8''%C3%BC.txt"),
            ("a\"b", "attachment; filename=\"a%22b\"; filename*=UTF-8''a%22b"),
            ("line\nbreak", "attachment; filename=\"line%0Abreak\"; filename*=UTF-8''line%0Abreak"),
        ] {
            let requested = Requested { shown: name.to_owned(), path: std::path::Path::new("/d").join(name) };
            assert_eq!(disposition(&requested), expected);
        }
    }
}
