//! Streams of layers: compression found by magic bytes, digests taken on the way, bombs refused.

use super::archive::Section;
use super::error::{Error, Result};
use super::limits::Limits;
use super::tarball::Source;
use flate2::bufread::GzDecoder;
use sha2::{Digest, Sha256};
use std::cell::{Cell, RefCell};
use std::io::{self, BufRead, BufReader, Read};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

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
        Compression::Gzip => {
            Box::new(Members(Some(GzDecoder::new(BufReader::with_capacity(BUFFER, reader)))))
        }
        Compression::Zstd => {
            Box::new(zstd::stream::read::Decoder::new(reader).map_err(|error| Error::stream(what, error))?)
        }
    })
}

/// Gzip streams behind each other. The decoder of the library that reads several takes what is behind the last for
/// the head of another, and its errors say so.
struct Members<R>(Option<GzDecoder<R>>);

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.0 {
            let count = decoder.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let Some(mut reader) = self.0.take().map(GzDecoder::into_inner) else { break };
            match reader.fill_buf()? {
                [] => {}
                [0x1f] | [0x1f, 0x8b, ..] => self.0 = Some(GzDecoder::new(reader)),
                _ => return Err(io::Error::other(TRAILING)),
            }
        }
        Ok(0)
    }
}

const TRAILING: &str =
    "behind its compressed stream are bytes that do not belong to it; fetch or save it again";

const BUFFER: usize = 128 << 10;
/// Bytes handed over at a time, and how many times that may wait: two megabytes for each layer under way.
const CHUNK: usize = 256 << 10;
const WAITING: usize = 8;

/// Digests of a stored layer, taken while it was read.
#[derive(Debug)]
pub(super) struct Digests {
    /// Of the stored bytes.
    stored: String,
    /// Of the unpacked bytes.
    pub(super) unpacked: String,
}

impl Digests {
    /// Compares with what the manifest and the configuration say, where they say it.
    pub(super) fn check(&self, what: &str, blob: Option<&str>, diff_id: Option<&str>) -> Result<()> {
        for (expected, found) in [(blob, &self.stored), (diff_id, &self.unpacked)] {
            if let Some(expected) = expected.filter(|expected| expected != found) {
                return Err(Error::DigestMismatch {
                    blob: what.into(),
                    expected: expected.into(),
                    found: found.clone(),
                });
            }
        }
        Ok(())
    }
}

/// Reads, unpacks and hashes a stored layer on this thread while `consume` works on the unpacked bytes on another.
/// All of it is read, also what `consume` leaves. `progress` hears of stored bytes and may stop the reading.
pub(super) fn unpack<T: Send>(
    section: Section,
    what: &str,
    limits: &Limits,
    progress: &(dyn Fn(u64) -> io::Result<()> + Sync),
    consume: impl FnOnce(&mut Chunks) -> Result<T> + Send,
) -> Result<(T, Digests)> {
    let (sender, full) = mpsc::sync_channel(WAITING);
    let (used, empty) = mpsc::channel();
    let mut chunks = Chunks { full, used, chunk: Vec::new(), at: 0, ended: false, broken: false };
    std::thread::scope(|scope| {
        let work = move || {
            let value = consume(&mut chunks).and_then(|value| {
                chunks.drain().map_err(|error| Error::stream(what, error))?;
                Ok(value)
            });
            (value, chunks.broken)
        };
        let consumer = std::thread::Builder::new()
            .name("osb-layer".to_owned())
            .spawn_scoped(scope, work)
            .map_err(|error| Error::io("start a thread for", what, error))?;
        let produced = produce(section, what, limits, progress, &sender, &empty);
        let told = match &produced {
            Ok(_) => Message::End,
            Err(error) => Message::Failed(error.to_string()),
        };
        // The consumer is gone only when it has failed, and then its error is the one to tell.
        let _ = sender.send(told);
        drop(sender);
        let (consumed, broken) = match consumer.join() {
            Ok(consumed) => consumed,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        match (consumed, produced) {
            (Ok(value), Ok(digests)) => Ok((value, digests)),
            // What broke the stream, not that it broke. But what the consumer met by itself came before that.
            (Err(_), Err(Stopped::Failed(error))) if broken => Err(error),
            (Err(error), _) | (Ok(_), Err(Stopped::Failed(error))) => Err(error),
            (Ok(_), Err(Stopped::Unheard)) => {
                Err(Error::Malformed { what: what.into(), reason: "its reader left".into() })
            }
        }
    })
}

/// Why the unpacking ended early.
enum Stopped {
    Failed(Error),
    /// Nobody takes the bytes any more.
    Unheard,
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Unheard => f.write_str("stopped"),
        }
    }
}

fn produce(
    section: Section,
    what: &str,
    limits: &Limits,
    progress: &(dyn Fn(u64) -> io::Result<()> + Sync),
    full: &SyncSender<Message>,
    empty: &Receiver<Vec<u8>>,
) -> Result<Digests, Stopped> {
    let failed = |error| Stopped::Failed(Error::stream(what, error));
    let mut start = [0; 8];
    let count = section.peek(&mut start).map_err(failed)?;
    let start = &start[..count];
    let compressed = Compression::detect(start, what).map_err(Stopped::Failed)? != Compression::None;
    let packed = Packed::default();
    // Stored and unpacked bytes of an uncompressed layer are the same: hash them once.
    let reader = PackedReader { section, packed: &packed, hash: compressed, progress };
    let mut reader = decoder(reader, start, what).map_err(Stopped::Failed)?;
    let mut hasher = Sha256::new();
    let mut bytes = 0_u64;
    loop {
        let mut chunk = empty.try_recv().unwrap_or_default();
        chunk.resize(CHUNK, 0);
        let count = fill(&mut reader, &mut chunk).map_err(|error| {
            // What libzstd says of bytes that begin no frame. The first ones do: that is how zstd was told.
            let trailing = error.to_string() == "Unknown frame descriptor";
            failed(if trailing { io::Error::other(TRAILING) } else { error })
        })?;
        chunk.truncate(count);
        if count == 0 {
            break;
        }
        bytes += count as u64;
        let exceeded =
            |setting, limit| Err(Stopped::Failed(Error::LimitExceeded { what: what.into(), setting, limit }));
        if bytes > limits.layer_bytes {
            return exceeded("layer_bytes", limits.layer_bytes);
        }
        if bytes > limits.ratio_from_bytes && bytes / limits.ratio.max(1) > packed.bytes.get() {
            return exceeded("ratio", limits.ratio);
        }
        hasher.update(&chunk);
        full.send(Message::Chunk(chunk)).map_err(|_| Stopped::Unheard)?;
    }
    drop(reader);
    let unpacked = hex_digest(hasher);
    let stored = if compressed { hex_digest(packed.digest.take()) } else { unpacked.clone() };
    Ok(Digests { stored, unpacked })
}

/// Reads until the buffer is full or the stream ends.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

enum Message {
    Chunk(Vec<u8>),
    /// The end that the stream itself has. A sender that vanishes is no such end.
    End,
    Failed(String),
}

/// The unpacked bytes of a layer, as another thread brings them.
pub(super) struct Chunks {
    full: Receiver<Message>,
    /// Gives chunks back to be filled again.
    used: Sender<Vec<u8>>,
    chunk: Vec<u8>,
    at: usize,
    ended: bool,
    /// Whether the stream failed, rather than whoever reads it.
    broken: bool,
}

impl Chunks {
    /// Makes unread bytes available; `false` at the end.
    fn fetch(&mut self) -> io::Result<bool> {
        while self.at == self.chunk.len() {
            if self.ended {
                return Ok(false);
            }
            match self.full.recv() {
                Ok(Message::Chunk(chunk)) => {
                    // Without anybody to fill it again the chunk is simply freed.
                    let _ = self.used.send(std::mem::replace(&mut self.chunk, chunk));
                    self.at = 0;
                }
                Ok(Message::End) => self.ended = true,
                Ok(Message::Failed(reason)) => {
                    self.broken = true;
                    return Err(io::Error::other(reason));
                }
                Err(_) => return Err(io::Error::other("its unpacking ended early")),
            }
        }
        Ok(true)
    }

    fn drain(&mut self) -> io::Result<()> {
        while self.fetch()? {
            self.at = self.chunk.len();
        }
        Ok(())
    }
}

impl Read for Chunks {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.fetch()? {
            return Ok(0);
        }
        let count = buffer.len().min(self.chunk.len() - self.at);
        buffer[..count].copy_from_slice(&self.chunk[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

impl Source for Chunks {
    fn skip(&mut self, mut bytes: u64) -> io::Result<()> {
        while bytes > 0 {
            if !self.fetch()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let here = (self.chunk.len() - self.at).min(usize::try_from(bytes).unwrap_or(usize::MAX));
            self.at += here;
            bytes -= here as u64;
        }
        Ok(())
    }
}

/// What has been read of the stored bytes.
#[derive(Default)]
struct Packed {
    bytes: Cell<u64>,
    digest: RefCell<Sha256>,
}

struct PackedReader<'a> {
    section: Section,
    packed: &'a Packed,
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
