//! Cuts a program's output into one event per line, whatever pieces the pipe hands over.
//!
//! - `\n`, `\r` and `\r\n` end a line. With [`LineEndings::Keep`] the text carries the end, so that texts joined
//!   are the output; with [`LineEndings::Strip`] it does not, and an empty line is the text `"\n"`.
//! - A `\r` that is the last byte at hand ends its line without waiting for what may follow: progress bars depend
//!   on it. If a `\n` comes later, it is a text of its own (keep) or nothing (strip); joined texts stay exact. The
//!   caller says with [`LineSplitter::idle`] that nothing more is at hand; until then `\r` waits for its `\n`.
//! - A line without end waits for more, for the end of the output, or until it is about 1 MiB long.
//! - Bytes that are not UTF-8 become U+FFFD, one each. Characters are never cut.

use osb_protocol::boot::LineEndings;

use super::escape;
use super::event::{self, Source};

/// A line longer than this is sent in parts.
pub const MAX_LINE: usize = 1 << 20;

/// The same bound for the encoded text: a widely used client takes no more than 4 MiB of JSON at once, and a
/// control character is six bytes of JSON.
const MAX_ENCODED: usize = 3 << 20;

/// Control characters encoded between two looks at the bounds.
const SPECIAL_RUN: usize = 4096;

/// Memory for unfinished lines above this is given back after the line.
const KEEP_CAPACITY: usize = 64 << 10;

/// State between two pieces of one output.
#[derive(Debug)]
pub struct LineSplitter {
    prefix: &'static [u8],
    strip: bool,
    /// Encoded text of the unfinished line; its prefix is not in it.
    partial: Vec<u8>,
    /// Unencoded length of the unfinished line.
    length: usize,
    /// First bytes of a character whose rest has not come yet.
    carry: [u8; 4],
    carried: usize,
    /// The last piece ended in `\r`. With `Keep` its line is still unsent, with `Strip` it is sent.
    after_cr: bool,
    /// A part of the current line has been sent because of its length.
    cut: bool,
}

/// Why encoding stopped.
enum Stop {
    /// All bytes are consumed.
    Empty,
    /// At this line end, which is not consumed.
    LineEnd(u8),
    /// The text has reached its bound.
    Full,
}

impl LineSplitter {
    /// A splitter at the start of an output.
    #[must_use]
    pub fn new(source: Source, line_endings: LineEndings) -> Self {
        Self {
            prefix: event::prefix(source),
            strip: line_endings == LineEndings::Strip,
            partial: Vec::new(),
            length: 0,
            carry: [0; 4],
            carried: 0,
            after_cr: false,
            cut: false,
        }
    }

    /// Takes the next bytes and appends the events of all lines they end to `out`. `suffix` closes an event.
    pub fn push(&mut self, mut bytes: &[u8], suffix: &[u8], out: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        if self.after_cr {
            self.after_cr = false;
            let newline = bytes[0] == b'\n';
            bytes = &bytes[usize::from(newline)..];
            if !self.strip {
                self.finish_line(if newline { b"\\r\\n" } else { b"\\r" }, suffix, out);
            }
        }
        bytes = self.complete_character(bytes, suffix, out);
        while !bytes.is_empty() {
            bytes = self.line(bytes, suffix, out);
        }
    }

    /// No more bytes are at hand: a line that ends in `\r` is sent.
    pub fn idle(&mut self, suffix: &[u8], out: &mut Vec<u8>) {
        if self.after_cr && !self.strip {
            self.after_cr = false;
            self.finish_line(b"\\r", suffix, out);
        }
    }

    /// The output has ended: an unfinished line is sent.
    pub fn finish(&mut self, suffix: &[u8], out: &mut Vec<u8>) {
        self.idle(suffix, out);
        escape::push_replacement(&mut self.partial, self.carried);
        self.carried = 0;
        if !self.partial.is_empty() {
            self.send_partial(b"", suffix, out);
        }
    }

    /// Encodes up to and including the next line end; gives back what follows it.
    fn line<'b>(&mut self, mut bytes: &'b [u8], suffix: &[u8], out: &mut Vec<u8>) -> &'b [u8] {
        if self.length > 0 || self.cut {
            let mut partial = std::mem::take(&mut self.partial);
            let stop = self.encode(&mut bytes, &mut partial, 0);
            self.partial = partial;
            match stop {
                Stop::Empty => {}
                Stop::Full => {
                    self.send_partial(b"", suffix, out);
                    self.cut = true;
                }
                Stop::LineEnd(end) => bytes = self.line_end(end, bytes, suffix, out),
            }
            return bytes;
        }
        // The line starts in this piece, and mostly ends in it too: encode it where it is sent from.
        let start = out.len();
        out.extend_from_slice(self.prefix);
        let text = out.len();
        match self.encode(&mut bytes, out, text) {
            Stop::LineEnd(b'\n') => {
                if !self.strip || out.len() == text {
                    out.extend_from_slice(b"\\n");
                }
                out.extend_from_slice(suffix);
                self.length = 0;
                &bytes[1..]
            }
            stop => {
                self.partial.extend_from_slice(&out[text..]);
                out.truncate(start);
                match stop {
                    Stop::Empty => bytes,
                    Stop::Full => {
                        self.send_partial(b"", suffix, out);
                        self.cut = true;
                        bytes
                    }
                    Stop::LineEnd(end) => self.line_end(end, bytes, suffix, out),
                }
            }
        }
    }

    /// Consumes the line end at the start of `bytes` for the line in `partial`.
    fn line_end<'b>(&mut self, end: u8, bytes: &'b [u8], suffix: &[u8], out: &mut Vec<u8>) -> &'b [u8] {
        if end == b'\n' {
            self.finish_line(b"\\n", suffix, out);
            return &bytes[1..];
        }
        match bytes.get(1) {
            Some(b'\n') => {
                self.finish_line(b"\\r\\n", suffix, out);
                &bytes[2..]
            }
            Some(_) => {
                self.finish_line(b"\\r", suffix, out);
                &bytes[1..]
            }
            None => {
                self.after_cr = true;
                if self.strip {
                    self.finish_line(b"\\r", suffix, out);
                }
                &[]
            }
        }
    }

    /// Sends the line in `partial`, which has the (encoded) end `end`.
    fn finish_line(&mut self, end: &[u8], suffix: &[u8], out: &mut Vec<u8>) {
        if !self.strip {
            self.send_partial(end, suffix, out);
        } else if !self.partial.is_empty() {
            self.send_partial(b"", suffix, out);
        } else if !self.cut {
            self.send_partial(b"\\n", suffix, out);
        }
        self.cut = false;
    }

    fn send_partial(&mut self, end: &[u8], suffix: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(self.prefix);
        out.extend_from_slice(&self.partial);
        out.extend_from_slice(end);
        out.extend_from_slice(suffix);
        self.length = 0;
        self.partial.clear();
        if self.partial.capacity() > KEEP_CAPACITY {
            self.partial = Vec::new();
        }
    }

    /// Encodes text up to a line end, the bound or the end of `bytes`, which is moved past what was taken. The
    /// line's text starts at `start` in `dst`.
    fn encode(&mut self, bytes: &mut &[u8], dst: &mut Vec<u8>, start: usize) -> Stop {
        loop {
            let room = MAX_LINE.saturating_sub(self.length).min(bytes.len());
            let plain = escape::plain_prefix(&bytes[..room]);
            dst.extend_from_slice(&bytes[..plain]);
            self.length += plain;
            *bytes = &bytes[plain..];
            let Some(&byte) = bytes.first() else { return Stop::Empty };
            if self.length >= MAX_LINE || dst.len() - start >= MAX_ENCODED {
                return Stop::Full;
            }
            match byte {
                b'\n' | b'\r' => return Stop::LineEnd(byte),
                0x80.. => {
                    let run = escape::wide_prefix(bytes);
                    self.length += run;
                    self.encode_wide(&bytes[..run], run == bytes.len(), dst);
                    *bytes = &bytes[run..];
                }
                _ => {
                    let most = bytes.len().min(SPECIAL_RUN);
                    let run = bytes[..most].iter().take_while(|&&byte| escape::is_escaped(byte)).count();
                    escape::push_special(dst, &bytes[..run]);
                    self.length += run;
                    *bytes = &bytes[run..];
                }
            }
        }
    }

    /// Encodes a run of bytes outside ASCII. At the end of a piece an incomplete character is kept for later.
    fn encode_wide(&mut self, mut run: &[u8], last: bool, dst: &mut Vec<u8>) {
        while let Err(error) = std::str::from_utf8(run) {
            let valid = error.valid_up_to();
            dst.extend_from_slice(&run[..valid]);
            run = &run[valid..];
            match error.error_len() {
                Some(broken) => {
                    escape::push_replacement(dst, broken);
                    run = &run[broken..];
                }
                None if last => {
                    self.carry[..run.len()].copy_from_slice(run);
                    self.carried = run.len();
                    return;
                }
                None => {
                    escape::push_replacement(dst, run.len());
                    return;
                }
            }
        }
        dst.extend_from_slice(run);
    }

    /// Completes the character that the last piece began; gives back the bytes that do not belong to it.
    fn complete_character<'b>(&mut self, mut bytes: &'b [u8], suffix: &[u8], out: &mut Vec<u8>) -> &'b [u8] {
        while self.carried > 0 {
            let carry = self.carry;
            let known = &carry[..self.carried];
            let (replaced, taken) = match std::str::from_utf8(known) {
                Ok(_) => (0, known.len()),
                Err(error) if error.valid_up_to() > 0 => (0, error.valid_up_to()),
                Err(error) => match (error.error_len(), bytes.first()) {
                    (Some(broken), _) => (broken, broken),
                    // An incomplete character has at most three bytes, so the fourth fits.
                    (None, Some(&byte)) if !byte.is_ascii() => {
                        self.carry[self.carried] = byte;
                        self.carried += 1;
                        self.length += 1;
                        bytes = &bytes[1..];
                        continue;
                    }
                    (None, Some(_)) => (known.len(), known.len()),
                    (None, None) => return bytes,
                },
            };
            if replaced > 0 {
                escape::push_replacement(&mut self.partial, replaced);
            } else {
                self.partial.extend_from_slice(&known[..taken]);
            }
            self.carry.copy_within(taken.., 0);
            self.carried -= taken;
        }
        if self.length >= MAX_LINE || self.partial.len() >= MAX_ENCODED {
            self.send_partial(b"", suffix, out);
            self.cut = true;
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Texts of the events for an output that arrives in these pieces; `idle` says after which of them nothing
    /// more is at hand.
    fn texts(pieces: &[(&[u8], bool)], line_endings: LineEndings) -> Vec<String> {
        let mut lines = LineSplitter::new(Source::Stdout, line_endings);
        let suffix = event::suffix(1);
        let mut out = Vec::new();
        for (piece, idle) in pieces {
            lines.push(piece, &suffix, &mut out);
            if *idle {
                lines.idle(&suffix, &mut out);
            }
        }
        lines.finish(&suffix, &mut out);
        let out = String::from_utf8(out).unwrap();
        let events = out.split_terminator("\n\n");
        events
            .map(|event| serde_json::from_str::<osb_protocol::execd::Event>(event).unwrap().text.unwrap())
            .collect()
    }

    fn whole(output: &str, line_endings: LineEndings) -> Vec<String> {
        texts(&[(output.as_bytes(), true)], line_endings)
    }

    /// What decoding means here: one replacement per byte that is not UTF-8.
    fn lossy(bytes: &[u8]) -> String {
        let mut text = String::new();
        for chunk in bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            text.extend(std::iter::repeat_n('\u{fffd}', chunk.invalid().len()));
        }
        text
    }

    /// Strip mode said in another way.
    fn stripped(text: &str) -> Vec<String> {
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let mut lines: Vec<&str> = text.split('\n').collect();
        if lines.last() == Some(&"") {
            lines.pop();
        }
        let last_is_open = !text.ends_with('\n');
        let count = lines.len();
        lines
            .iter()
            .enumerate()
            .map(|(at, line)| match (line.is_empty(), last_is_open && at + 1 == count) {
                (true, false) => "\n".to_owned(),
                _ => (*line).to_owned(),
            })
            .collect()
    }

    #[test]
    fn one_event_per_line() {
        use LineEndings::{Keep, Strip};
        assert_eq!(whole("a\n\nb\n\n\nc\n", Strip), ["a", "\n", "b", "\n", "\n", "c"]);
        assert_eq!(whole("a\n\nb\n\n\nc\n", Keep), ["a\n", "\n", "b\n", "\n", "\n", "c\n"]);
        assert_eq!(whole("10%\r20%\r\ndone", Keep), ["10%\r", "20%\r\n", "done"]);
        assert_eq!(whole("10%\r20%\r\ndone", Strip), ["10%", "20%", "done"]);
        assert_eq!(whole("", Keep), Vec::<String>::new());
        assert_eq!(whole("hello", Strip), ["hello"]);
    }

    #[test]
    fn a_line_end_in_two_pieces_is_one() {
        use LineEndings::{Keep, Strip};
        let at_once: &[(&[u8], bool)] = &[(b"a\r", false), (b"\nb", true)];
        assert_eq!(texts(at_once, Keep), ["a\r\n", "b"]);
        assert_eq!(texts(at_once, Strip), ["a", "b"]);
        let apart: &[(&[u8], bool)] = &[(b"a\r", true), (b"\nb", true)];
        assert_eq!(texts(apart, Keep), ["a\r", "\n", "b"]);
        assert_eq!(texts(apart, Strip), ["a", "b"]);
        let nothing_after: &[(&[u8], bool)] = &[(b"a\r", false)];
        assert_eq!(texts(nothing_after, Keep), ["a\r"]);
    }

    #[test]
    fn long_lines_lose_nothing_and_stay_small() {
        for (byte, tail) in [(b'a', "\n"), (1, ""), (b'"', "\r\nx"), (0xff, "\n\n")] {
            let output = [vec![byte; 5 << 20], tail.as_bytes().to_vec()].concat();
            for line_endings in [LineEndings::Keep, LineEndings::Strip] {
                let pieces: Vec<(&[u8], bool)> = output.chunks(65536).map(|piece| (piece, false)).collect();
                let texts = texts(&pieces, line_endings);
                assert!(texts.iter().all(|text| serde_json::to_string(text).unwrap().len() < 4 << 20));
                if line_endings == LineEndings::Keep {
                    assert!(texts.concat() == lossy(&output), "{byte} {tail:?}");
                } else {
                    let (parts, rest): (Vec<_>, Vec<_>) = texts.iter().partition(|text| text.len() > 1000);
                    assert_eq!(parts.iter().map(|text| text.chars().count()).sum::<usize>(), 5 << 20);
                    assert_eq!(
                        rest,
                        match tail {
                            "\r\nx" => vec!["x"],
                            "\n\n" => vec!["\n"],
                            _ => vec![],
                        }
                    );
                }
            }
        }
    }

    /// Bytes in which line ends, quotes and broken characters are frequent.
    fn output() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            3 => prop::sample::select(vec![&b"\n"[..], b"\r", b"\r\n", b"a", b"\"", b"\\", b"\0"])
                .prop_map(<[u8]>::to_vec),
            2 => any::<char>().prop_map(|char| char.to_string().into_bytes()),
            1 => proptest::collection::vec(any::<u8>(), 0..6),
            1 => "[a-z]{0,40}".prop_map(String::into_bytes),
        ];
        proptest::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(output in output(), cuts in proptest::collection::vec((0usize..400, any::<bool>()), 0..30)) {
            let mut cuts: Vec<(usize, bool)> =
                cuts.into_iter().filter(|(at, _)| *at <= output.len()).collect();
            cuts.sort_unstable();
            cuts.push((output.len(), true));
            let mut start = 0;
            let pieces: Vec<(&[u8], bool)> = cuts
                .iter()
                .map(|&(end, idle)| (&output[std::mem::replace(&mut start, end)..end], idle))
                .collect();
            let decoded = lossy(&output);
            prop_assert_eq!(texts(&pieces, LineEndings::Keep).concat(), decoded.clone());
            prop_assert_eq!(texts(&pieces, LineEndings::Strip), stripped(&decoded));
        }
    }
}
