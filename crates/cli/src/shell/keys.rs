//! The keys that leave a terminal without ending it.

/// What is used when nothing is said; the same as with containers.
pub(crate) const USUAL: &str = "ctrl-p,ctrl-q";

/// A sequence of keys, and how much of it has been typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keys {
    sequence: Vec<u8>,
    typed: usize,
}

/// Reads keys such as `ctrl-p,ctrl-q` or `ctrl-],d`. An empty text is no sequence.
pub(crate) fn parse(text: &str) -> Result<Keys, String> {
    let wrong = |key: &str| {
        format!(
            "'{key}' is no key; use characters and ctrl-<letter, @, [, \\, ], ^ or _>, with commas between"
        )
    };
    let mut sequence = Vec::new();
    for key in text.split(',').filter(|_| !text.is_empty()) {
        sequence.push(match key.strip_prefix("ctrl-").map_or(key.as_bytes(), str::as_bytes) {
            [letter @ b'a'..=b'z'] if key.len() > 1 => letter - b'a' + 1,
            [sign @ (b'@' | b'['..=b'_')] if key.len() > 1 => sign - b'@',
            [plain @ 33..127] if key.len() == 1 => *plain,
            _ => return Err(wrong(key)),
        });
    }
    Ok(Keys { sequence, typed: 0 })
}

impl Keys {
    /// Takes what was typed, puts behind `out` what is to be passed on, and says whether the sequence is complete.
    /// Its beginning is held back until the next key shows what it was.
    pub(crate) fn take(&mut self, input: &[u8], out: &mut Vec<u8>) -> bool {
        for &key in input {
            while self.typed > 0 && self.sequence[self.typed] != key {
                // The longest end of what is held that is a beginning too stays held.
                let held = &self.sequence[..self.typed];
                let kept = (1..held.len()).rev().find(|&length| held.ends_with(&held[..length])).unwrap_or(0);
                out.extend_from_slice(&held[..held.len() - kept]);
                self.typed = kept;
            }
            if self.sequence.get(self.typed) == Some(&key) {
                self.typed += 1;
                if self.typed == self.sequence.len() {
                    self.typed = 0;
                    return true;
                }
            } else {
                out.push(key);
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_read() {
        assert_eq!(parse(USUAL).unwrap().sequence, [16, 17]);
        assert_eq!(parse("ctrl-],d").unwrap().sequence, [29, b'd']);
        assert_eq!(parse("ctrl-@,ctrl-_,~").unwrap().sequence, [0, 31, b'~']);
        assert!(parse("").unwrap().sequence.is_empty());
        for bad in ["ctrl-", "ctrl-P", "ctrl-1", "ab", "a,,b", ",", "ä", "ctrl-ab", " "] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    /// Takes `input` in pieces of each size; all must come to the same.
    fn take(keys: &str, input: &str) -> (String, bool) {
        let mut results = (1..=input.len()).map(|size| {
            let mut keys = parse(keys).unwrap();
            let mut out = Vec::new();
            let complete = input.as_bytes().chunks(size).any(|piece| keys.take(piece, &mut out));
            (String::from_utf8(out).unwrap(), complete)
        });
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "{input:?}");
        first
    }

    #[test]
    fn the_sequence_is_found_and_all_else_is_passed_on() {
        let cases = [
            ("a,b", "xyz", "xyz", false),
            ("a,b", "xab", "x", true),
            ("a,b", "xa", "x", false),
            ("a,b", "xaab", "xa", true),
            ("a,b", "acab", "ac", true),
            ("a,a,b", "aaab", "a", true),
            ("a,b,a,c", "ababac", "ab", true),
            ("a,b,a,c", "abax", "abax", false),
            ("a", "xay", "x", true),
            ("", "a\u{10}\u{11}", "a\u{10}\u{11}", false),
            (USUAL, "\u{10}\u{10}x\u{10}\u{11}", "\u{10}\u{10}x", true),
        ];
        for (keys, input, out, complete) in cases {
            assert_eq!(take(keys, input), (out.to_owned(), complete), "{keys} {input:?}");
        }
    }
}
