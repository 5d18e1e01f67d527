//! Streams of layers: compression found by magic bytes, digests taken on the way, bombs refused.

use super::archive::Section;
use super::error::{Error, Result};
use super::limits::Limits;
use super::tarball::Source;
use flate2::read::MultiGzDecoder;
use sha2::{Digest, Sha256};
use std::cell::{Cell, RefCell};
use std::io::{self, BufReader, Read};
use std::rc::Rc;

/// Compression of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    Gzip,
    None,
    Zstd,
}

impl Compression {
    /// Tells by the first bytes. Anything unknown counts as uncompressed; the tar reader will tell.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for bzip2, xz and lz4.
    pub(super) fn detect(start: &[u8], what: &str) -> Result<Self> {
        let unsupported = |name| {
            Err(Error::Unsupported {
                what: format!("{name} compression of {what}"),
                reason: "compress with gzip or zstd, or not at all",
            })
        };
        match start {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            // A frame, or a skippable frame, which some writers put first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [b'B', b'Z', b'h', ..] => unsupported("bzip2"),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => unsupported("xz"),
            [0x04, 0x22, 0x4d, 0x18, ..] => unsupported("lz4"),
            _ => Ok(Self::None),
        }
    }
}

/// Wraps `reader` in a decoder. `start` are its first bytes, still unread.
pub(super) fn decoder<'a>(reader: impl Read + 'a, start: &[u8], what: &str) -> Result<Box<dyn Read + 'a>> {
    Ok(match Compression::detect(start, what)? {
        Compression::None => Box::new(reader),
        Compression::Gzip => Box::new(MultiGzDecoder::new(BufReader::with_capacity(BUFFER, reader))),
        Compression::Zstd => {
            Box::new(zstd::stream::read::Decoder::new(reader).map_err(|error| Error::stream(what, error))?)
        }
    })
}

const BUFFER: usize = 128 << 10;

/// The unpacked bytes of one layer.
pub(super) struct LayerStream<'a> {
    reader: Box<dyn Read + 'a>,
    what: &'a str,
    limits: &'a Limits,
    packed: Rc<Packed>,
    unpacked: Sha256,
    bytes: u64,
    compressed: bool,
}

/// What has been read of the stored bytes.
#[derive(Default)]
struct Packed {
    bytes: Cell<u64>,
    digest: RefCell<Sha256>,
}

struct PackedReader<'a> {
    section: Section,
    packed: Rc<Packed>,
    hash: bool,
    progress: &'a (dyn Fn(u64) -> io::Result<()> + Sync),
}

impl Read for PackedReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.section.read(buffer)?;
        self.packed.bytes.set(self.packed.bytes.get() + count as u64);
        if self.hash {
            self.packed.digest.borrow_mut().update(&buffer[..count]);
        }
        (self.progress)(count as u64)?;
        Ok(count)
    }
}

impl<'a> LayerStream<'a> {
    /// Opens a stored layer. `progress` hears of packed bytes as they are read, and may stop the reading.
    pub(super) fn open(
        section: Section,
        what: &'a str,
        limits: &'a Limits,
        progress: &'a (dyn Fn(u64) -> io::Result<()> + Sync),
    ) -> Result<Self> {
        let mut start = [0; 8];
        let count = section.peek(&mut start).map_err(|error| Error::stream(what, error))?;
        let start = &start[..count];
        let compressed = Compression::detect(start, what)? != Compression::None;
        let packed = Rc::new(Packed::default());
        // Stored and unpacked bytes of an uncompressed layer are the same: hash them once.
        let reader = PackedReader { section, packed: Rc::clone(&packed), hash: compressed, progress };
        let reader = decoder(reader, start, what)?;
        Ok(Self { reader, what, limits, packed, unpacked: Sha256::new(), bytes: 0, compressed })
    }

    /// Reads what is left and compares digests: of the stored bytes when known, and of the unpacked ones.
    /// Returns the digest of the unpacked bytes.
    pub(super) fn finish(mut self, blob: Option<&str>, diff_id: Option<&str>) -> Result<String> {
        let mut buffer = vec![0; BUFFER];
        while self.read(&mut buffer).map_err(|error| Error::stream(self.what, error))? > 0 {}
        drop(self.reader);
        let unpacked = hex_digest(self.unpacked);
        let stored = if self.compressed { hex_digest(self.packed.digest.take()) } else { unpacked.clone() };
        for (expected, found) in [(blob, stored), (diff_id, unpacked.clone())] {
            if let Some(expected) = expected.filter(|expected| *expected != found) {
                return Err(Error::DigestMismatch {
                    blob: self.what.into(),
                    expected: expected.into(),
                    found,
                });
            }
        }
        Ok(unpacked)
    }
}

impl Read for LayerStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        self.bytes += count as u64;
        self.unpacked.update(&buffer[..count]);
        let exceeded = |setting, limit| {
            Err(io::Error::other(Error::LimitExceeded { what: self.what.into(), setting, limit }))
        };
        if self.bytes > self.limits.layer_bytes {
            return exceeded("layer_bytes", self.limits.layer_bytes);
        }
        let bomb = self.bytes > self.limits.ratio_from_bytes
            && self.bytes / self.limits.ratio.max(1) > self.packed.bytes.get();
        if bomb {
            return exceeded("ratio", self.limits.ratio);
        }
        Ok(count)
    }
}

impl Source for LayerStream<'_> {}

/// `sha256:…` of what a hasher has seen.
pub(super) fn hex_digest(hasher: Sha256) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(71);
    text.push_str("sha256:");
    for byte in hasher.finalize() {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// `sha256:…` of bytes.
pub(super) fn digest_of(bytes: &[u8]) -> String {
    hex_digest(Sha256::new_with_prefix(bytes))
}
