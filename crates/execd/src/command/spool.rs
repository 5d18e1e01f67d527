//! Output of a background command, kept for whoever asks.
//!
//! Offsets count all bytes ever written. Little output stays in memory; more moves to files without a name, so
//! that nobody else sees it and nothing is left behind by a daemon that dies. The newest bytes are kept, in segments
//! of which the oldest goes as a whole: who is reading one holds it meanwhile, so a program that writes faster than
//! its log is read cannot pull the text away from under the reader. Where no file can be written (read-only or full
//! disk) fewer stay, in memory. All outputs together are counted in their [`Stock`], whose owner bounds them.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{CWD, Mode, OFlags};

/// Into so many segments the limit is divided; on disk is at most one more.
const SEGMENTS: u64 = 8;
/// Output up to this size needs no file…
const MEMORY_LIMIT: usize = 64 << 10;
/// …as long as all outputs take no more memory than this.
const MEMORY_TOTAL: u64 = 8 << 20;
/// Newest bytes kept when no file can be had…
const MEMORY_FALLBACK: u64 = 1 << 20;
/// …and when many others have none either, so that memory has taken this much.
const LEAST_FALLBACK: u64 = 64 << 10;
const FALLBACK_TOTAL: u64 = 24 << 20;

/// What many outputs take together.
#[derive(Debug, Default)]
pub struct Stock {
    memory: AtomicU64,
    disk: AtomicU64,
    files: AtomicU64,
}

impl Stock {
    /// Bytes in memory and on disk.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.memory() + self.disk.load(Ordering::Relaxed)
    }

    /// Files that are held open.
    #[must_use]
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    fn memory(&self) -> u64 {
        self.memory.load(Ordering::Relaxed)
    }
}

/// A bounded store of one output.
#[derive(Debug)]
pub struct Spool {
    directory: PathBuf,
    file_limit: u64,
    stock: Arc<Stock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Offset of the oldest byte kept.
    start: u64,
    /// Offset behind the newest byte.
    end: u64,
    store: Store,
    /// What the stock has been told that this takes.
    counted: Takes,
}

/// What a store takes of what all share.
#[derive(Debug, Clone, Copy, Default)]
struct Takes {
    memory: u64,
    disk: u64,
    files: u64,
}

#[derive(Debug)]
enum Store {
    /// All bytes since offset 0, until a file is needed.
    Memory(Vec<u8>),
    /// Oldest first, without gaps.
    Files(VecDeque<Segment>),
    /// The newest bytes, at most so many.
    Ring(VecDeque<u8>, u64),
    /// Given up; further bytes are counted and forgotten.
    Closed,
}

#[derive(Debug)]
struct Segment {
    file: Arc<File>,
    /// Offset of its first byte.
    start: u64,
    length: u64,
}

impl Store {
    fn takes(&self) -> Takes {
        match self {
            Self::Memory(bytes) => Takes { memory: bytes.len() as u64, ..Takes::default() },
            Self::Files(segments) => Takes {
                memory: 0,
                disk: segments.iter().map(|segment| segment.length).sum(),
                files: segments.len() as u64,
            },
            Self::Ring(_, most) => Takes { memory: *most, ..Takes::default() },
            Self::Closed => Takes::default(),
        }
    }
}

impl Spool {
    /// An empty store of at most `file_limit` bytes, whose files will be in `directory`.
    #[must_use]
    pub fn new(directory: PathBuf, file_limit: u64, stock: Arc<Stock>) -> Self {
        let state = State { start: 0, end: 0, store: Store::Memory(Vec::new()), counted: Takes::default() };
        Self { directory, file_limit, stock, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change leaves the state whole before anything that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the stock what has changed.
    fn count(&self, state: &mut State) {
        let takes = state.store.takes();
        let counted = std::mem::replace(&mut state.counted, takes);
        // Wraps as it should when less is taken than before.
        for (all, now, before) in [
            (&self.stock.memory, takes.memory, counted.memory),
            (&self.stock.disk, takes.disk, counted.disk),
            (&self.stock.files, takes.files, counted.files),
        ] {
            all.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    fn fits_memory(&self, memory: &[u8], more: usize) -> bool {
        memory.len() + more <= MEMORY_LIMIT && self.stock.memory() + more as u64 <= MEMORY_TOTAL
    }

    /// Whether appending `more` bytes touches a file and may block.
    #[must_use]
    pub fn may_block(&self, more: usize) -> bool {
        match &self.lock().store {
            Store::Memory(bytes) => !self.fits_memory(bytes, more),
            Store::Files(_) => true,
            Store::Ring(..) | Store::Closed => false,
        }
    }

    /// Bytes in its files.
    #[must_use]
    pub fn on_disk(&self) -> u64 {
        self.lock().counted.disk
    }

    /// Appends; never fails, the oldest bytes go when there is no room.
    pub fn append(&self, bytes: &[u8]) {
        let mut state = self.lock();
        if let Store::Memory(memory) = &mut state.store {
            if self.fits_memory(memory, bytes.len()) {
                memory.extend_from_slice(bytes);
                state.end += bytes.len() as u64;
                self.count(&mut state);
                return;
            }
            let memory = std::mem::take(memory);
            state.store = Store::Files(VecDeque::new());
            state.end = 0;
            self.write(&mut state, &memory);
        }
        self.write(&mut state, bytes);
        self.count(&mut state);
    }

    fn write(&self, state: &mut State, bytes: &[u8]) {
        let end = state.end + bytes.len() as u64;
        if let Store::Files(segments) = &mut state.store
            && self.write_files(segments, state.end, bytes).is_err()
        {
            let most = match self.stock.memory() {
                ..FALLBACK_TOTAL => MEMORY_FALLBACK,
                _ => LEAST_FALLBACK,
            };
            // The disk is full: what the files hold can still be moved to memory, and their space is freed.
            let keep = (state.end - state.start).min(most);
            let mut newest = VecDeque::new();
            let mut snapshot = Snapshot::of_files(segments, state.end - keep, state.end);
            while let Ok(Some(piece)) = snapshot.next(keep) {
                newest.extend(piece);
            }
            if newest.len() as u64 != keep {
                newest.clear();
            }
            state.start = state.end - newest.len() as u64;
            state.store = Store::Ring(newest, most);
        }
        let limit = match &mut state.store {
            Store::Files(_) => self.file_limit,
            Store::Ring(ring, most) => {
                push_ring(ring, *most, bytes);
                *most
            }
            Store::Memory(_) | Store::Closed => 0,
        };
        state.end = end;
        state.start = state.start.max(end.saturating_sub(limit));
    }

    fn write_files(&self, segments: &mut VecDeque<Segment>, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
        let full = (self.file_limit / SEGMENTS).max(1);
        while !bytes.is_empty() {
            if segments.back().is_none_or(|last| last.length >= full) {
                let file = Arc::new(unnamed_file(&self.directory)?);
                segments.push_back(Segment { file, start: at, length: 0 });
            }
            let Some(last) = segments.back_mut() else { continue };
            let room = usize::try_from(full - last.length).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            last.file.write_all_at(now, last.length)?;
            last.length += now.len() as u64;
            at += now.len() as u64;
            bytes = later;
            let oldest = at.saturating_sub(self.file_limit);
            while segments.front().is_some_and(|first| first.start + first.length <= oldest) {
                segments.pop_front();
            }
        }
        Ok(())
    }

    /// What is kept from `offset` on, as it is now: later output and later losses do not change it.
    #[must_use]
    pub fn snapshot(&self, offset: u64) -> Snapshot {
        let state = self.lock();
        let end = state.end;
        let start = offset.max(state.start);
        let skipped =
            |from: u64, length: usize| usize::try_from(start - from).unwrap_or(usize::MAX).min(length);
        match &state.store {
            Store::Memory(memory) => Snapshot::of_bytes(start, memory[skipped(0, memory.len())..].to_vec()),
            Store::Files(segments) => Snapshot::of_files(segments, start, end),
            Store::Ring(ring, _) => {
                let skipped = skipped(state.start, ring.len());
                Snapshot::of_bytes(start, ring.range(skipped..).copied().collect())
            }
            Store::Closed => Snapshot::of_bytes(start, Vec::new()),
        }
    }

    /// Forgets the oldest segment of its files and frees its space, once nobody reads it. `false` when there is none.
    pub fn shrink(&self) -> bool {
        let mut state = self.lock();
        let State { start, end, store, .. } = &mut *state;
        let Store::Files(segments) = store else { return false };
        let found = segments.pop_front().is_some();
        *start = segments.front().map_or(*end, |next| next.start).max(*start);
        self.count(&mut state);
        found
    }

    /// Forgets the bytes for good and frees their space, once nobody reads them any more.
    pub fn close(&self) {
        let mut state = self.lock();
        state.store = Store::Closed;
        state.start = state.end;
        self.count(&mut state);
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.close();
    }
}

/// The output of a command as it was at one moment.
#[derive(Debug)]
pub struct Snapshot {
    /// Offset of its first byte.
    pub start: u64,
    /// Number of its bytes.
    pub length: u64,
    pieces: VecDeque<Piece>,
}

#[derive(Debug)]
enum Piece {
    Bytes(Vec<u8>),
    File { file: Arc<File>, at: u64, length: u64 },
}

impl Snapshot {
    fn of_bytes(start: u64, bytes: Vec<u8>) -> Self {
        Self { start, length: bytes.len() as u64, pieces: VecDeque::from([Piece::Bytes(bytes)]) }
    }

    fn of_files(segments: &VecDeque<Segment>, start: u64, end: u64) -> Self {
        let pieces = segments.iter().filter_map(|segment| {
            let from = start.max(segment.start);
            let to = end.min(segment.start + segment.length);
            (from < to).then(|| Piece::File {
                file: Arc::clone(&segment.file),
                at: from - segment.start,
                length: to - from,
            })
        });
        Self { start, length: end.saturating_sub(start), pieces: pieces.collect() }
    }

    /// The next bytes, at most `most` of them unless they are in memory already; `None` at the end. May block.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn next(&mut self, most: u64) -> io::Result<Option<Vec<u8>>> {
        let Some(piece) = self.pieces.pop_front() else { return Ok(None) };
        let (file, at, length) = match piece {
            Piece::Bytes(bytes) => return Ok(Some(bytes)),
            Piece::File { file, at, length } => (file, at, length),
        };
        let now = length.min(most);
        let mut bytes = vec![0; usize::try_from(now).map_err(io::Error::other)?];
        file.read_exact_at(&mut bytes, at)?;
        if now < length {
            self.pieces.push_front(Piece::File { file, at: at + now, length: length - now });
        }
        Ok(Some(bytes))
    }

    /// Whether reading it touches a file and may block.
    #[must_use]
    pub fn may_block(&self) -> bool {
        self.pieces.iter().any(|piece| matches!(piece, Piece::File { .. }))
    }
}

/// Appends to a ring of at most `most` bytes.
fn push_ring(ring: &mut VecDeque<u8>, most: u64, bytes: &[u8]) {
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let bytes = &bytes[bytes.len().saturating_sub(most)..];
    ring.drain(..(ring.len() + bytes.len()).saturating_sub(most));
    ring.extend(bytes);
}

/// Start of the names of files that are about to lose them.
const PREFIX: &str = ".execd-";

/// A file that no name leads to.
fn unnamed_file(directory: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::openat(CWD, directory, flags | OFlags::TMPFILE, mode) {
        return Ok(fd.into());
    }
    // Not every file system can do that; a name that nobody knows and that goes at once is nearly as good.
    let path = directory.join(format!("{PREFIX}{}", crate::random::uuid().simple()));
    let fd = rustix::fs::openat(CWD, &path, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode)?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(fd.into()),
    }
}

/// Does [`remove_leftovers`] where a file system that does not answer holds nobody up.
pub fn remove_leftovers_aside(directory: PathBuf) {
    // Without a thread they stay until the next start.
    let _ = std::thread::Builder::new().spawn(move || remove_leftovers(&directory));
}

/// Removes the names that daemons before this one have died over, between making a file and taking its name away.
/// Only what could be such a file goes: empty or not, of that form, regular, and this user's.
fn remove_leftovers(directory: &Path) {
    use std::os::unix::fs::MetadataExt as _;
    let own = rustix::process::geteuid().as_raw();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let random = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if random.is_some_and(|random| random.len() == 32 && random.bytes().all(|b| b.is_ascii_hexdigit()))
            && entry.metadata().is_ok_and(|found| found.is_file() && found.uid() == own)
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spool(directory: PathBuf, limit: u64) -> Spool {
        Spool::new(directory, limit, Arc::default())
    }

    fn read(mut snapshot: Snapshot) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Some(piece) = snapshot.next(10_000).unwrap() {
            bytes.extend(piece);
        }
        assert_eq!(bytes.len() as u64, snapshot.length);
        bytes
    }

    #[test]
    fn no_place_for_a_file_keeps_the_newest_in_memory() {
        let spool = spool("/proc/no/such".into(), 64 << 20);
        let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
        for piece in bytes.chunks(70_000) {
            spool.append(piece);
        }
        let snapshot = spool.snapshot(0);
        assert_eq!(snapshot.start, 3_000_000 - MEMORY_FALLBACK);
        let start = snapshot.start as usize;
        assert!(read(snapshot) == bytes[start..]);
        spool.close();
        spool.append(b"more");
        assert_eq!(spool.snapshot(0).start, 3_000_004);
        assert!(read(spool.snapshot(0)).is_empty());
    }

    #[test]
    fn what_is_being_read_stays_however_much_is_written() {
        let spool = spool(std::env::temp_dir(), 800_000);
        let bytes: Vec<u8> = (0..1_000_000u32).map(|at| (at % 251) as u8).collect();
        spool.append(&bytes);
        let before = spool.snapshot(0);
        for _ in 0..5 {
            spool.append(&[0; 700_000]);
        }
        spool.close();
        assert_eq!(before.start, 200_000);
        assert!(read(before) == bytes[200_000..]);
    }

    #[test]
    fn an_offset_beyond_the_end_has_nothing() {
        let spool = spool(std::env::temp_dir(), 64 << 20);
        spool.append(b"abc");
        let snapshot = spool.snapshot(9);
        assert_eq!((snapshot.start, snapshot.length), (9, 0));
        spool.append(&[b'x'; 100_000]);
        let snapshot = spool.snapshot(u64::MAX);
        assert_eq!((snapshot.start, snapshot.length), (u64::MAX, 0));
    }

    #[test]
    fn many_outputs_take_little_memory() {
        for (directory, most) in [(std::env::temp_dir(), MEMORY_TOTAL), ("/proc/no/such".into(), 40 << 20)] {
            let stock = Arc::new(Stock::default());
            let one = || Spool::new(directory.clone(), 1 << 20, Arc::clone(&stock));
            let spools: Vec<Spool> = (0..300).map(|_| one()).collect();
            for spool in &spools {
                spool.append(&[b'x'; 60_000]);
            }
            assert!(stock.memory() <= most, "{}", stock.memory());
            for spool in &spools {
                assert_eq!(spool.snapshot(0).length, 60_000);
            }
            drop(spools);
            assert_eq!((stock.memory(), stock.total(), stock.files()), (0, 0, 0));
        }
    }

    #[test]
    fn shrinking_loses_the_oldest_and_keeps_offsets() {
        let spool = spool(std::env::temp_dir(), 800_000);
        let bytes: Vec<u8> = (0..500_000u32).map(|at| (at % 251) as u8).collect();
        spool.append(&bytes);
        assert!(spool.shrink() && spool.shrink());
        let rest = spool.snapshot(0);
        assert_eq!((rest.start, spool.on_disk()), (200_000, 300_000));
        assert!(read(rest) == bytes[200_000..]);
        while spool.shrink() {}
        assert_eq!((spool.snapshot(0).start, spool.on_disk()), (500_000, 0));
        spool.append(b"more");
        assert_eq!(read(spool.snapshot(0)), b"more");
        assert_eq!(spool.snapshot(0).start, 500_000);
    }

    #[test]
    fn what_a_dead_daemon_left_goes_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let name = |random: &str| dir.path().join(format!(".execd-{random}"));
        let left = name(&"0a".repeat(16));
        std::fs::write(&left, "secret").unwrap();
        std::fs::write(name("notes"), "").unwrap();
        std::fs::create_dir(name(&"0b".repeat(16))).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", name(&"0c".repeat(16))).unwrap();
        remove_leftovers(dir.path());
        assert!(!left.exists());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
        remove_leftovers(Path::new("/no/such"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_newest_bytes_are_kept(pieces in proptest::collection::vec((0usize..90_000, any::<u8>()), 0..12)) {
            let limit = 200_000;
            let spool = spool(std::env::temp_dir(), limit);
            let mut written = Vec::new();
            for (length, byte) in pieces {
                let piece: Vec<u8> = (0..length).map(|at| byte.wrapping_add((at % 253) as u8)).collect();
                spool.append(&piece);
                written.extend(piece);
            }
            let all = spool.snapshot(0);
            let (start, end) = (all.start, written.len() as u64);
            prop_assert_eq!(start, end.saturating_sub(limit));
            prop_assert!(read(all) == written[start as usize..]);
            let middle = start + (end - start) / 2;
            prop_assert!(read(spool.snapshot(middle)) == written[middle as usize..]);
        }
    }
}
