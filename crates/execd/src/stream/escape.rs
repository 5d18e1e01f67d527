//! Bytes of a program's output to the inside of a JSON string, fast.
//!
//! Nothing here asks the processor what it can: that question traps under virtualisation and would cost the first
//! command of a sandbox more than the encoding of a megabyte. The loops are written so that the compiler
//! vectorises them with what every x86-64 and arm64 has.

/// How many bytes are looked at as one when searching the end of plain text.
const BLOCK: usize = 32;

const fn is_special(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\' || byte >= 0x80
}

/// Length of the longest prefix that needs no escape: printable ASCII without quote and backslash.
#[must_use]
pub fn plain_prefix(bytes: &[u8]) -> usize {
    let mut at = 0;
    // Short lines are the usual case, and a block costs more than a few steps.
    while at < bytes.len().min(8) {
        if is_special(bytes[at]) {
            return at;
        }
        at += 1;
    }
    while let Some(block) = bytes.get(at..at + BLOCK) {
        if block.iter().fold(false, |found, &byte| found | is_special(byte)) {
            break;
        }
        at += BLOCK;
    }
    while at < bytes.len() && !is_special(bytes[at]) {
        at += 1;
    }
    at
}

/// Length of the prefix of bytes outside ASCII.
#[must_use]
pub fn wide_prefix(bytes: &[u8]) -> usize {
    bytes.iter().position(u8::is_ascii).unwrap_or(bytes.len())
}

/// Whether [`plain_prefix`] stops at this byte for another reason than a line's end or a character outside ASCII.
#[must_use]
pub fn is_escaped(byte: u8) -> bool {
    is_special(byte) && byte.is_ascii() && !matches!(byte, b'\n' | b'\r')
}

/// Appends ASCII bytes that [`plain_prefix`] stops at.
pub fn push_special(out: &mut Vec<u8>, bytes: &[u8]) {
    out.reserve(bytes.len() * 6);
    for &byte in bytes {
        let short = match byte {
            b'"' | b'\\' => byte,
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            0x08 => b'b',
            0x0c => b'f',
            _ => {
                out.extend_from_slice(&LONG_ESCAPES[usize::from(byte & 31)]);
                continue;
            }
        };
        out.extend_from_slice(&[b'\\', short]);
    }
}

/// The escapes of all control characters in their long form.
const LONG_ESCAPES: [[u8; 6]; 32] = {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut escapes = [*b"\\u0000"; 32];
    let mut byte = 0;
    while byte < 32 {
        escapes[byte][4] = HEX[byte >> 4];
        escapes[byte][5] = HEX[byte & 15];
        byte += 1;
    }
    escapes
};

/// Appends `count` replacement characters.
pub fn push_replacement(out: &mut Vec<u8>, count: usize) {
    for _ in 0..count {
        out.extend_from_slice("\u{fffd}".as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_plain_prefix_is_the_longest(bytes in proptest::collection::vec(any::<u8>(), 0..200), lead in 0usize..80) {
            let bytes = [vec![b'a'; lead], bytes].concat();
            let expected = bytes.iter().position(|&byte| is_special(byte)).unwrap_or(bytes.len());
            prop_assert_eq!(plain_prefix(&bytes), expected);
        }

        #[test]
        fn escapes_are_json(byte in (0u8..0x80).prop_filter("special", |byte| is_special(*byte))) {
            let mut out = vec![b'"'];
            push_special(&mut out, &[byte]);
            out.push(b'"');
            let text: String = serde_json::from_slice(&out).unwrap();
            prop_assert_eq!(text.as_bytes(), &[byte]);
        }
    }
}
