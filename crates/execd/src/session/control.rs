//! What a session's shell says through its named pipe: words that end in a NUL byte.
//!
//! Programs of the session's user can write there too. Nothing here is believed that does not carry the mark of the
//! run, which they have no way to know.

/// Longest word that is kept.
const LONGEST: usize = 4 << 10;

/// A word of the shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// The run with this mark is about to begin.
    Begin(String),
    /// It has ended.
    Report {
        /// Mark of the run.
        mark: String,
        /// Exit code.
        status: i32,
        /// Options of the shell, as `$-` has them.
        options: String,
    },
}

/// Puts pieces together.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    buffer: Vec<u8>,
    overflown: bool,
}

impl Parser {
    /// Takes the next bytes and hands over each word they end.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut take: impl FnMut(Message)) {
        while let Some(end) = memchr::memchr(0, bytes) {
            self.keep(&bytes[..end]);
            bytes = &bytes[end + 1..];
            let word = std::mem::take(&mut self.buffer);
            if !std::mem::take(&mut self.overflown)
                && let Some(message) = parse(word)
            {
                take(message);
            }
        }
        self.keep(bytes);
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.buffer.len() + bytes.len() > LONGEST {
            self.overflown = true;
            self.buffer = Vec::new();
        } else if !self.overflown {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// Forgets a word that has not come to its end: its writer is gone.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }
}

fn parse(mut word: Vec<u8>) -> Option<Message> {
    match *word.first()? {
        b'B' => Some(Message::Begin(String::from_utf8(word.split_off(1)).ok()?)),
        b'R' => {
            let word = String::from_utf8(word).ok()?;
            let mut parts = word[1..].splitn(3, ' ');
            let mark = parts.next()?.to_owned();
            let status = parts.next()?.parse().ok()?;
            Some(Message::Report { mark, status, options: parts.next()?.to_owned() })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pieces: &[&[u8]]) -> Vec<Message> {
        let (mut parser, mut all) = (Parser::default(), Vec::new());
        for piece in pieces {
            parser.push(piece, |message| all.push(message));
        }
        all
    }

    #[test]
    fn words_may_come_in_pieces() {
        let text = b"Bm.1\0junk\0Rm.1 3 hBx\0R\0Rm 1\0Rm x y\0\0B\xff\0";
        let expected = vec![
            Message::Begin("m.1".into()),
            Message::Report { mark: "m.1".into(), status: 3, options: "hBx".into() },
        ];
        assert_eq!(all(&[text]), expected);
        for cut in 0..text.len() {
            assert_eq!(all(&[&text[..cut], &text[cut..]]), expected);
        }
    }

    #[test]
    fn a_word_without_end_takes_no_memory() {
        let mut parser = Parser::default();
        for _ in 0..100 {
            parser.push(&[b'x'; 64 << 10], |_| panic!("no word"));
            assert!(parser.buffer.capacity() <= 2 * LONGEST);
        }
        let mut seen = Vec::new();
        parser.push(b"x\0Bm\0", |message| seen.push(message));
        assert_eq!(seen, [Message::Begin("m".into())]);
    }
}
