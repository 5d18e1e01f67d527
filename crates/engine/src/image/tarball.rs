//! A reader of tar streams that trusts no length in them: names and attributes are bounded before they are read.
//!
//! Headers are decoded by the `tar` crate; its own iterator reads GNU long names and PAX records of any size into
//! memory, splits binary attribute values at line ends, and cannot be told to skip by seeking.

use super::error::{Error, Result};
use super::limits::Limits;
use super::sparse;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Read};
use tar::{EntryType, Header};

const BLOCK: u64 = 512;

/// Where a tar stream comes from; files can skip without reading.
pub(super) trait Source: Read + Sized {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let skipped = io::copy(&mut self.by_ref().take(bytes), &mut io::sink())?;
        if skipped < bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

impl Source for &[u8] {}

impl<S: Source> Source for &mut S {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        (**self).skip(bytes)
    }
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    BlockDevice,
    CharDevice,
    Directory,
    Fifo,
    File,
    HardLink,
    Symlink,
}

/// One entry, with PAX and GNU extensions applied.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) path: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: Kind,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Seconds and nanoseconds since the epoch.
    pub(super) mtime: (i64, u32),
    /// Bytes of the file, holes included.
    pub(super) size: u64,
    /// Of a sparse file, the parts that the archive holds.
    pub(super) sparse: Option<sparse::Map>,
    /// Name and value, in the order of the archive.
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Entry {
    /// Bytes that the archive holds of it: its size without the holes.
    pub(super) fn stored(&self) -> u64 {
        self.sparse.as_ref().map_or(self.size, |parts| parts.iter().map(|(_, length)| length).sum())
    }
}

/// Yields entries; between two calls of [`TarReader::next_entry`] it reads as the current entry's content.
pub(super) struct TarReader<'a, R> {
    source: R,
    what: &'a str,
    limits: &'a Limits,
    /// Unread content of the current entry, and the padding behind it.
    content: u64,
    padding: u64,
    /// Bytes consumed from `source`.
    position: u64,
    entries: u64,
    global: Records,
}

/// PAX records by key.
type Records = BTreeMap<Vec<u8>, Vec<u8>>;

impl<'a, R: Source> TarReader<'a, R> {
    pub(super) fn new(source: R, what: &'a str, limits: &'a Limits) -> Self {
        Self { source, what, limits, content: 0, padding: 0, position: 0, entries: 0, global: Records::new() }
    }

    /// Offset of the next unread byte.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    fn malformed(&self, reason: impl Into<String>) -> Error {
        Error::Malformed { what: self.what.into(), reason: reason.into() }
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::stream(self.what, error)
    }

    /// The next entry, or `None` at the end of the archive.
    pub(super) fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut local = Records::new();
        let (mut long_path, mut long_link) = (None, None);
        loop {
            let Some(header) = self.next_header()? else {
                return Ok(None);
            };
            let kind = header.entry_type();
            let size = or_zero(&header.as_old().size, header.entry_size())
                .map_err(|error| self.malformed(error.to_string()))?;
            match kind {
                EntryType::XHeader => parse_records(&self.metadata(size)?, &mut local)
                    .map_err(|reason| self.malformed(reason))?,
                EntryType::XGlobalHeader => {
                    let data = self.metadata(size)?;
                    let mut global = std::mem::take(&mut self.global);
                    parse_records(&data, &mut global).map_err(|reason| self.malformed(reason))?;
                    let bytes: usize = global.iter().map(|(key, value)| key.len() + value.len()).sum();
                    Limits::check(self.what, "metadata_bytes", bytes as u64, self.limits.metadata_bytes)?;
                    self.global = global;
                }
                EntryType::GNULongName => long_path = Some(self.long_name(size)?),
                EntryType::GNULongLink => long_link = Some(self.long_name(size)?),
                _ => return self.entry(&header, size, &local, long_path, long_link).map(Some),
            }
        }
    }

    /// Skips what is left of the current entry and reads the next header.
    fn next_header(&mut self) -> Result<Option<Header>> {
        let rest = self.content + self.padding;
        self.source.skip(rest).map_err(|error| self.failed(error))?;
        self.position += rest;
        (self.content, self.padding) = (0, 0);
        let mut block = [0; BLOCK as usize];
        if !self.read_block(&mut block)? || block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        self.entries += 1;
        Limits::check(self.what, "entries", self.entries, self.limits.entries)?;
        let header = Header::from_byte_slice(&block).clone();
        // The sum counts its own field as spaces; old writers summed signed bytes.
        let summed =
            || block.iter().enumerate().map(|(at, byte)| if (148..156).contains(&at) { b' ' } else { *byte });
        let stored = header.cksum().map_err(|error| self.malformed(error.to_string()))?;
        let unsigned: u32 = summed().map(u32::from).sum();
        let signed: i32 = summed().map(|byte| i32::from(byte.cast_signed())).sum();
        if stored != unsigned && i64::from(stored) != i64::from(signed) {
            return Err(self.malformed(format!("no tar header at offset {}", self.position - BLOCK)));
        }
        Ok(Some(header))
    }

    /// Fills `block`; `false` when the stream ended before its first byte.
    fn read_block(&mut self, block: &mut [u8]) -> Result<bool> {
        let mut filled = 0;
        while filled < block.len() {
            match self.source.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(Error::Truncated { what: self.what.into() }),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        self.position += block.len() as u64;
        Ok(true)
    }

    fn set_content(&mut self, size: u64) -> Result<()> {
        let padding = (BLOCK - size % BLOCK) % BLOCK;
        if size.checked_add(padding).is_none_or(|all| all > i64::MAX as u64) {
            return Err(self.malformed("an entry has an impossible size"));
        }
        (self.content, self.padding) = (size, padding);
        Ok(())
    }

    /// Content of an entry that describes the next one.
    fn metadata(&mut self, size: u64) -> Result<Vec<u8>> {
        Limits::check(self.what, "metadata_bytes", size, self.limits.metadata_bytes)?;
        self.set_content(size)?;
        let mut data = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
        self.read_to_end(&mut data).map_err(|error| self.failed(error))?;
        Ok(data)
    }

    fn long_name(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut name = self.metadata(size)?;
        name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
        Ok(name)
    }

    fn entry(
        &mut self,
        header: &Header,
        size: u64,
        local: &Records,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Entry> {
        let old = header.as_old();
        // An empty value takes a global record back.
        let record =
            |key: &[u8]| local.get(key).or_else(|| self.global.get(key)).filter(|value| !value.is_empty());
        let number = |key: &[u8], field: io::Result<u64>| match record(key) {
            Some(value) => std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse::<u64>().ok())
                .ok_or_else(|| self.malformed("a PAX number is none")),
            None => field.map_err(|error| self.malformed(error.to_string())),
        };
        let pax = sparse::pax(if local.is_empty() { &self.global } else { local })
            .map_err(|reason| self.malformed(reason))?;
        let named = pax.as_ref().and_then(|pax| pax.name.clone());
        let path = named
            .or_else(|| record(b"path").cloned())
            .or(long_path)
            .unwrap_or_else(|| header.path_bytes().into_owned());
        let link = record(b"linkpath")
            .cloned()
            .or(long_link)
            .unwrap_or_else(|| header.link_name_bytes().map(Cow::into_owned).unwrap_or_default());
        let size = number(b"size", Ok(size))?;
        let id = |value: u64| {
            u32::try_from(value)
                .ok()
                .filter(|id| *id != u32::MAX)
                .ok_or_else(|| Error::entry(self.what, &path, "its owner is no valid user or group number"))
        };
        let uid = id(number(b"uid", or_zero(&old.uid, header.uid()))?)?;
        let gid = id(number(b"gid", or_zero(&old.gid, header.gid()))?)?;
        let mtime = match record(b"mtime") {
            Some(text) => parse_time(text).ok_or_else(|| self.malformed("a PAX time is none"))?,
            // Times before 1970 come as negative base-256 numbers that read as huge ones.
            None => (i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0), 0),
        };
        let kind = match header.entry_type() {
            // Writers before POSIX had no other way to tell a directory.
            EntryType::Regular | EntryType::Continuous if path.ends_with(b"/") && size == 0 => {
                Kind::Directory
            }
            EntryType::Regular | EntryType::Continuous if path.ends_with(b"/") => {
                return Err(Error::entry(self.what, &path, "it is a directory with content"));
            }
            EntryType::Regular | EntryType::Continuous => Kind::File,
            EntryType::Link => Kind::HardLink,
            EntryType::Symlink => Kind::Symlink,
            EntryType::Char => Kind::CharDevice,
            EntryType::Block => Kind::BlockDevice,
            EntryType::Directory => Kind::Directory,
            EntryType::Fifo => Kind::Fifo,
            EntryType::GNUSparse => Kind::File,
            other => {
                return Err(Error::entry(
                    self.what,
                    &path,
                    format!("its type {:?} is unknown", other.as_byte() as char),
                ));
            }
        };
        let xattrs = local
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix(b"SCHILY.xattr.")?.to_vec(), value.clone())))
            .collect();
        let mode =
            or_zero(&old.mode, header.mode()).map_err(|error| self.malformed(error.to_string()))? & 0o7777;
        // Only files have content; some writers repeat the size of a hard link's target.
        let size = if kind == Kind::File { size } else { 0 };
        self.set_content(size)?;
        let (size, sparse) = match (kind, header.entry_type(), pax) {
            (Kind::File, EntryType::GNUSparse, _) => self.old_sparse(header, size)?,
            (Kind::File, _, Some(pax)) => self.pax_sparse(pax)?,
            _ => (size, None),
        };
        Ok(Entry { path, link, kind, mode, uid, gid, mtime, size, sparse, xattrs })
    }

    /// The map of a sparse file in GNU's first form, and the file's size. Blocks of the map stand between header and
    /// content, and do not count as content.
    fn old_sparse(&mut self, header: &Header, stored: u64) -> Result<(u64, Option<sparse::Map>)> {
        let mut map = sparse::Map::new();
        let (size, mut more) =
            sparse::old_header(header.as_bytes(), &mut map).map_err(|reason| self.malformed(reason))?;
        while more {
            let mut block = [0; BLOCK as usize];
            if !self.read_block(&mut block)? {
                return Err(Error::Truncated { what: self.what.into() });
            }
            more = sparse::old_block(&block, &mut map).map_err(|reason| self.malformed(reason))?;
        }
        sparse::check(&map, size, stored).map_err(|reason| self.malformed(reason))?;
        Ok((size, Some(map)))
    }

    /// The same for the later forms; in the last one the map is the beginning of the content.
    fn pax_sparse(&mut self, pax: sparse::Pax) -> Result<(u64, Option<sparse::Map>)> {
        let map = match pax.map {
            Some(map) => map,
            None => {
                let mut leading = sparse::Leading::default();
                loop {
                    let mut block = [0; BLOCK as usize];
                    self.read_exact(&mut block).map_err(|error| self.failed(error))?;
                    if let Some(map) = leading.block(&block).map_err(|reason| self.malformed(reason))? {
                        break map;
                    }
                }
            }
        };
        sparse::check(&map, pax.size, self.content).map_err(|reason| self.malformed(reason))?;
        Ok((pax.size, Some(map)))
    }
}

impl<R: Read> Read for TarReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = buffer.len().min(usize::try_from(self.content).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        let count = self.source.read(&mut buffer[..wanted])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.content -= count as u64;
        self.position += count as u64;
        Ok(count)
    }
}

/// Some writers leave number fields empty for zero.
fn or_zero<T: Default>(field: &[u8], number: io::Result<T>) -> io::Result<T> {
    if field.iter().all(|byte| matches!(byte, 0 | b' ')) { Ok(T::default()) } else { number }
}

/// Records are `LENGTH KEY=VALUE\n`, the length counting all of it; values may hold any byte.
fn parse_records(mut data: &[u8], records: &mut Records) -> Result<(), &'static str> {
    const BAD: &str = "its PAX records cannot be read";
    while !data.is_empty() {
        let space = data.iter().take(20).position(|byte| *byte == b' ').ok_or(BAD)?;
        let length: usize =
            std::str::from_utf8(&data[..space]).ok().and_then(|text| text.parse().ok()).ok_or(BAD)?;
        if length <= space + 1 || length > data.len() || data[length - 1] != b'\n' {
            return Err(BAD);
        }
        let record = &data[space + 1..length - 1];
        let equals = record.iter().position(|byte| *byte == b'=').ok_or(BAD)?;
        records.insert(record[..equals].to_vec(), record[equals + 1..].to_vec());
        data = &data[length..];
    }
    Ok(())
}

/// Decimal seconds with an optional fraction.
fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let (whole, nanos): (i64, u32) = (seconds.parse().ok()?, digits.parse().ok()?);
    // -1.25 is one and a quarter second before the epoch: 2 seconds before and 0.75 after that.
    Some(if text.starts_with('-') && nanos > 0 {
        (whole.checked_sub(1)?, 1_000_000_000 - nanos)
    } else {
        (whole, nanos)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries(archive: &[u8]) -> Result<Vec<(Entry, Vec<u8>)>> {
        let limits = Limits { metadata_bytes: 1 << 16, ..Limits::default() };
        let mut reader = TarReader::new(archive, "test", &limits);
        let mut all = Vec::new();
        while let Some(entry) = reader.next_entry()? {
            let mut content = Vec::new();
            reader.read_to_end(&mut content).map_err(|error| Error::stream("test", error))?;
            all.push((entry, content));
        }
        Ok(all)
    }

    #[test]
    fn long_names_records_and_binary_values() {
        let mut builder = tar::Builder::new(Vec::new());
        let long = format!("{}/{}", "d".repeat(120), "f".repeat(130));
        let mut header = Header::new_gnu();
        header.set_size(3);
        builder.append_data(&mut header, &long, &b"abc"[..]).unwrap();
        builder
            .append_pax_extensions([
                ("mtime", &b"-1.25"[..]),
                ("uid", b"70000"),
                ("SCHILY.xattr.security.capability", b"\x01\n=\x00\n"),
                ("path", b"renamed\xff"),
            ])
            .unwrap();
        let mut header = Header::new_ustar();
        header.set_size(0);
        builder.append_data(&mut header, "plain", &b""[..]).unwrap();
        let found = entries(&builder.into_inner().unwrap()).unwrap();
        assert_eq!((found[0].0.path.as_slice(), found[0].1.as_slice()), (long.as_bytes(), &b"abc"[..]));
        let second = &found[1].0;
        assert_eq!(second.path, b"renamed\xff");
        assert_eq!((second.uid, second.mtime), (70_000, (-2, 750_000_000)));
        assert_eq!(second.xattrs, [(b"security.capability".to_vec(), b"\x01\n=\x00\n".to_vec())]);
    }

    #[test]
    fn large_metadata_is_refused_before_it_is_read() {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        let error = entries(header.as_bytes()).unwrap_err();
        assert!(matches!(error, Error::LimitExceeded { setting: "metadata_bytes", .. }), "{error}");
    }

    #[test]
    fn times() {
        for (text, time) in [
            ("0", Some((0, 0))),
            ("12.5", Some((12, 500_000_000))),
            ("12.0000000019", Some((12, 1))),
            ("-3", Some((-3, 0))),
            ("-0.5", Some((-1, 500_000_000))),
            ("x", None),
            ("1.x", None),
            ("", None),
        ] {
            assert_eq!(parse_time(text.as_bytes()), time, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_upset_it(mut bytes in proptest::collection::vec(any::<u8>(), 0..4096), fix in any::<bool>()) {
            if fix && bytes.len() >= 512 {
                // A valid sum lets the rest of the header through.
                let mut header = Header::from_byte_slice(&bytes[..512]).clone();
                header.set_cksum();
                bytes[..512].copy_from_slice(header.as_bytes());
            }
            let _ = entries(&bytes);
        }

        #[test]
        fn truncation_is_seen(cut in 1_usize..1535) {
            let mut builder = tar::Builder::new(Vec::new());
            let mut header = Header::new_gnu();
            header.set_size(1_000);
            builder.append_data(&mut header, "a", &[7_u8; 1_000][..]).unwrap();
            let archive = builder.into_inner().unwrap();
            let found = entries(&archive[..cut]);
            prop_assert!(matches!(found, Err(Error::Truncated { .. })), "{found:?}");
        }
    }
}
