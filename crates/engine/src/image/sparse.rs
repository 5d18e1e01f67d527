//! Maps of sparse files in tar archives: which parts of a file the archive holds. The rest are holes.

use std::collections::BTreeMap;

/// Parts of a file, in order: offset and length.
pub(super) type Map = Vec<(u64, u64)>;

const BAD: &str = "its map of a sparse file cannot be read";
/// Parts of one file at most: each costs 16 bytes of memory and a system call.
const MOST_PARTS: usize = 1 << 20;

/// Bytes of a header that GNU's first form uses: four parts, a flag for more, and the size of the whole.
const OLD_PARTS: usize = 386;
const OLD_MORE: usize = 482;
const OLD_SIZE: usize = 483;
/// In blocks that follow: twenty-one parts and the flag.
const NEXT_PARTS: usize = 21;
const NEXT_MORE: usize = 504;

/// Reads the parts in a header of GNU's first form; answers the whole size and whether a block with more follows.
pub(super) fn old_header(block: &[u8; 512], map: &mut Map) -> Result<(u64, bool), &'static str> {
    parts(&block[OLD_PARTS..OLD_MORE], map)?;
    Ok((number(&block[OLD_SIZE..OLD_SIZE + 12])?, block[OLD_MORE] != 0))
}

/// Reads the parts in a block that follows such a header; answers whether another follows.
pub(super) fn old_block(block: &[u8; 512], map: &mut Map) -> Result<bool, &'static str> {
    parts(&block[..NEXT_PARTS * 24], map)?;
    if map.len() > MOST_PARTS {
        return Err(BAD);
    }
    Ok(block[NEXT_MORE] != 0)
}

fn parts(bytes: &[u8], map: &mut Map) -> Result<(), &'static str> {
    for part in bytes.chunks_exact(24) {
        // Unused places are empty.
        if part[0] == 0 || part[12] == 0 {
            break;
        }
        map.push((number(&part[..12])?, number(&part[12..])?));
    }
    Ok(())
}

/// An octal field, or one in base 256.
fn number(field: &[u8]) -> Result<u64, &'static str> {
    if field[0] & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        if high[0] != 0x80 || high[1..].iter().any(|byte| *byte != 0) {
            return Err(BAD);
        }
        return low.try_into().map(u64::from_be_bytes).map_err(|_| BAD);
    }
    let text = std::str::from_utf8(field).map_err(|_| BAD)?;
    let text = text.trim_matches(|c| c == ' ' || c == '\0');
    if text.is_empty() { Ok(0) } else { u64::from_str_radix(text, 8).map_err(|_| BAD) }
}

/// What PAX records say of a sparse file.
pub(super) struct Pax {
    pub(super) name: Option<Vec<u8>>,
    pub(super) size: u64,
    /// `None` when the map is at the beginning of the content.
    pub(super) map: Option<Map>,
}

/// Reads the records of the second form (version 0.1) and the third (1.0). `None` where there are none.
pub(super) fn pax(records: &BTreeMap<Vec<u8>, Vec<u8>>) -> Result<Option<Pax>, &'static str> {
    let get = |key: &str| records.get(format!("GNU.sparse.{key}").as_bytes()).map(Vec::as_slice);
    let decimal =
        |text: &[u8]| std::str::from_utf8(text).ok().and_then(|text| text.parse::<u64>().ok()).ok_or(BAD);
    let name = get("name").map(<[u8]>::to_vec);
    match (get("major"), get("minor"), get("map")) {
        (Some(b"1"), Some(b"0"), _) => {
            let size = decimal(get("realsize").ok_or(BAD)?)?;
            Ok(Some(Pax { name, size, map: None }))
        }
        (None, None, Some(text)) => {
            let size = decimal(get("size").ok_or(BAD)?)?;
            let numbers = text.split(|byte| *byte == b',').map(decimal).collect::<Result<Vec<_>, _>>()?;
            if numbers.len() % 2 != 0 || numbers.len() / 2 > MOST_PARTS {
                return Err(BAD);
            }
            let map = numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
            Ok(Some(Pax { name, size, map: Some(map) }))
        }
        (None, None, None) if records.keys().any(|key| key.starts_with(b"GNU.sparse.")) => Err(
            "it holds a sparse file in the oldest PAX form; write it by a current tar, or without --sparse",
        ),
        (None, None, None) => Ok(None),
        _ => Err("it holds a sparse file in an unknown form; write the archive without --sparse"),
    }
}

/// Collects the map that stands before the content in the third form: decimal numbers, one a line, the first saying
/// how many parts there are.
#[derive(Default)]
pub(super) struct Leading {
    text: Vec<u8>,
    expected: Option<usize>,
    map: Map,
    offset: Option<u64>,
}

impl Leading {
    /// Takes one more block; the map when it is complete.
    pub(super) fn block(&mut self, block: &[u8; 512]) -> Result<Option<Map>, &'static str> {
        for byte in block {
            if *byte != b'\n' {
                self.text.push(*byte);
                if self.text.len() > 20 {
                    return Err(BAD);
                }
                continue;
            }
            let text = std::mem::take(&mut self.text);
            let number: u64 =
                std::str::from_utf8(&text).ok().and_then(|text| text.parse().ok()).ok_or(BAD)?;
            match (self.expected, self.offset.take()) {
                (None, _) => {
                    let count = usize::try_from(number).map_err(|_| BAD)?;
                    if count > MOST_PARTS {
                        return Err(BAD);
                    }
                    self.expected = Some(count);
                }
                (Some(_), None) => self.offset = Some(number),
                (Some(_), Some(offset)) => self.map.push((offset, number)),
            }
            if self.expected == Some(self.map.len()) {
                return Ok(Some(std::mem::take(&mut self.map)));
            }
        }
        Ok(None)
    }
}

/// Proves that the parts follow each other within the file and are as many bytes as the archive holds.
pub(super) fn check(map: &Map, size: u64, stored: u64) -> Result<(), &'static str> {
    let (mut end, mut sum) = (0_u64, 0_u64);
    for (offset, length) in map {
        if *offset < end {
            return Err(BAD);
        }
        end = offset.checked_add(*length).ok_or(BAD)?;
        sum = sum.checked_add(*length).ok_or(BAD)?;
    }
    if end > size || sum != stored || size > i64::MAX as u64 { Err(BAD) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers() {
        assert_eq!(number(b"00000000017\0"), Ok(15));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\0\0\0\x01\0"), Ok(256));
        assert!(number(b"\x80\x01\0\0\0\0\0\0\0\0\x01\0").is_err());
        assert!(number(b"0000000008 \0").is_err());
    }

    #[test]
    fn maps_must_fit() {
        assert!(check(&vec![(0, 5), (10, 5)], 20, 10).is_ok());
        assert!(check(&vec![], 20, 0).is_ok());
        for (map, size, stored) in [
            (vec![(5, 5), (0, 5)], 20, 10),
            (vec![(0, 5), (4, 5)], 20, 10),
            (vec![(0, 5)], 4, 5),
            (vec![(0, 5)], 20, 6),
            (vec![(u64::MAX, 5)], 20, 5),
            (vec![], u64::MAX, 0),
        ] {
            assert!(check(&map, size, stored).is_err(), "{map:?}");
        }
    }

    proptest! {
        #[test]
        fn no_block_upsets_it(bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'1'), any::<u8>()], 512)) {
            let block: [u8; 512] = bytes.try_into().unwrap();
            let mut map = Map::new();
            let _ = old_header(&block, &mut map);
            let _ = old_block(&block, &mut map);
            let mut leading = Leading::default();
            let _ = leading.block(&block);
            let _ = leading.block(&block);
        }
    }
}
