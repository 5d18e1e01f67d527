//! Reading a file by lines.

use std::io::Read;

use memchr::memchr;

/// Read at a time, and about what one piece of output holds.
const CHUNK: usize = 256 << 10;

/// Reads the lines from `offset` on (the first is 1), at most `limit`, joined by `\n`: carriage returns and line
/// feeds at the end of each line and the last line end are left off. Lines may have any length, and reading stops
/// with the last line wanted.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    source: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Lines to pass over.
    skip: u64,
    /// Lines still wanted, the current one included.
    left: u64,
    /// A line has ended; its `\n` is written when another one begins.
    between: bool,
    /// Carriage returns that belong to the text only if more of the line follows.
    held_back: u64,
    ended: bool,
}

impl<R: Read> Lines<R> {
    /// `limit` of `None` is all.
    pub(crate) fn new(source: R, offset: u64, limit: Option<u64>) -> Self {
        Self {
            source,
            buffer: vec![0; CHUNK],
            start: 0,
            end: 0,
            skip: offset.saturating_sub(1),
            left: limit.unwrap_or(u64::MAX),
            between: false,
            held_back: 0,
            ended: false,
        }
    }

    /// The next piece of text; `None` at the end.
    pub(crate) fn next_piece(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let mut piece = Vec::new();
        while piece.len() < CHUNK && !self.ended {
            if self.start == self.end && !self.fill()? {
                break;
            }
            if self.skip > 0 {
                self.pass_over();
            } else {
                self.take(&mut piece);
            }
        }
        Ok((!piece.is_empty()).then_some(piece))
    }

    /// Whether [`Lines::next_piece`] has nothing more to give.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    fn fill(&mut self) -> std::io::Result<bool> {
        self.start = 0;
        self.end = loop {
            match self.source.read(&mut self.buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                result => break result?,
            }
        };
        self.ended = self.end == 0;
        Ok(!self.ended)
    }

    fn pass_over(&mut self) {
        match memchr(b'\n', &self.buffer[self.start..self.end]) {
            Some(at) => {
                self.start += at + 1;
                self.skip -= 1;
            }
            None => self.start = self.end,
        }
    }

    fn take(&mut self, piece: &mut Vec<u8>) {
        if std::mem::take(&mut self.between) {
            piece.push(b'\n');
        }
        let rest = &self.buffer[self.start..self.end];
        let (line, ends) = match memchr(b'\n', rest) {
            Some(at) => (&rest[..at], true),
            None => (rest, false),
        };
        let text = &line[..line.len() - line.iter().rev().take_while(|byte| **byte == b'\r').count()];
        if !text.is_empty() && self.held_back > 0 {
            // A line may hold more carriage returns than one piece: write what fits and come back.
            let now = self.held_back.min(CHUNK as u64);
            piece.resize(piece.len() + now as usize, b'\r');
            self.held_back -= now;
            if self.held_back > 0 {
                return;
            }
        }
        piece.extend_from_slice(text);
        self.held_back += (line.len() - text.len()) as u64;
        self.start += line.len();
        if ends {
            self.start += 1;
            self.held_back = 0;
            self.left -= 1;
            self.between = true;
            self.ended = self.left == 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(source: impl Read, offset: u64, limit: Option<u64>) -> Vec<u8> {
        let mut lines = Lines::new(source, offset, limit);
        let mut all = Vec::new();
        while let Some(piece) = lines.next_piece().unwrap() {
            all.extend_from_slice(&piece);
        }
        all
    }

    #[test]
    fn cuts_where_asked() {
        let text = b"one\ntwo\r\nthree\n\nfive";
        for (offset, limit, expected) in [
            (1, None, "one\ntwo\nthree\n\nfive"),
            (1, Some(2), "one\ntwo"),
            (2, Some(1), "two"),
            (4, Some(1), ""),
            (4, Some(2), "\nfive"),
            (5, None, "five"),
            (5, Some(9), "five"),
            (6, None, ""),
            (99, Some(1), ""),
        ] {
            assert_eq!(read(&text[..], offset, limit), expected.as_bytes(), "{offset} {limit:?}");
        }
        assert_eq!(read(&b"a\nb\n"[..], 1, None), b"a\nb");
        assert_eq!(read(&b"a\rb\r\r\nc\r"[..], 1, None), b"a\rb\nc");
        assert_eq!(read(&b""[..], 1, None), b"");
        assert_eq!(read(&b"\n\n"[..], 1, None), b"\n");
    }

    #[test]
    fn lines_of_any_length() {
        let long = vec![b'x'; 2_000_000];
        let text = [b"first\n".as_slice(), &long, b"\nlast"].concat();
        assert_eq!(read(&text[..], 2, Some(1)), long);
        assert_eq!(read(&text[..], 3, None), b"last");
        let returns = [vec![b'\r'; 1_000_000], b"x\ny".to_vec()].concat();
        assert_eq!(read(&returns[..], 1, Some(1)), &returns[..1_000_001]);
    }

    /// Fails when more is read than one small piece.
    struct Once(Option<&'static [u8]>);

    impl Read for Once {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let text = self.0.take().ok_or_else(|| std::io::Error::other("read on"))?;
            buffer[..text.len()].copy_from_slice(text);
            Ok(text.len())
        }
    }

    #[test]
    fn reading_stops_with_the_last_line() {
        assert_eq!(read(Once(Some(b"a\nb\nc")), 1, Some(2)), b"a\nb");
    }

    struct Drip<'a>(&'a [u8], usize);

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let length = self.1.min(self.0.len());
            buffer[..length].copy_from_slice(&self.0[..length]);
            self.0 = &self.0[length..];
            Ok(length)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn agrees_with_the_plain_way(text in "[ab\r\n]{0,40}", offset in 1_usize..6, limit in 1_usize..6, step in 1_usize..7) {
            let body = text.strip_suffix('\n').unwrap_or(&text);
            let lines: Vec<&str> = if text.is_empty() { vec![] } else { body.split('\n').collect() };
            let chosen: Vec<&str> = lines.iter().skip(offset - 1).take(limit).map(|line| line.trim_end_matches('\r')).collect();
            let read = read(Drip(text.as_bytes(), step), offset as u64, Some(limit as u64));
            prop_assert_eq!(String::from_utf8(read).unwrap(), chosen.join("\n"));
        }
    }
}
