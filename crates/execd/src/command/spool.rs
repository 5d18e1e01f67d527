//! Output of a background command, kept for whoever asks.
//!
//! Offsets count all bytes ever written. Little output stays in memory; more moves to files without a name, so
//! that nobody else sees it and nothing is left behind by a daemon that dies. The newest [`FILE_LIMIT`] bytes are
//! kept, in segments of which the oldest goes as a whole: who is reading one holds it meanwhile, so a program that
//! writes faster than its log is read cannot pull the text away from under the reader. Where no file can be
//! written (read-only or full disk) the newest [`MEMORY_FALLBACK`] stay in memory.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{CWD, Mode, OFlags};

/// Newest bytes kept of one command.
pub const FILE_LIMIT: u64 = 64 << 20;
/// Into so many segments the limit is divided; on disk is at most one more.
const SEGMENTS: u64 = 8;
/// Output up to this size needs no file.
const MEMORY_LIMIT: usize = 64 << 10;
/// Newest bytes kept when no file can be had.
const MEMORY_FALLBACK: u64 = 1 << 20;

/// A bounded store of one output.
#[derive(Debug)]
pub struct Spool {
    directory: PathBuf,
    file_limit: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Offset of the oldest byte kept.
    start: u64,
    /// Offset behind the newest byte.
    end: u64,
    store: Store,
}

#[derive(Debug)]
enum Store {
    /// All bytes since offset 0, until a file is needed.
    Memory(Vec<u8>),
    /// Oldest first, without gaps.
    Files(VecDeque<Segment>),
    /// The byte of offset `n` is at `n` modulo [`MEMORY_FALLBACK`].
    Ring(Vec<u8>),
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

impl Spool {
    /// An empty store, whose files will be in `directory`.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self::with_limit(directory, FILE_LIMIT)
    }

    fn with_limit(directory: PathBuf, file_limit: u64) -> Self {
        let state = State { start: 0, end: 0, store: Store::Memory(Vec::new()) };
        Self { directory, file_limit, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change leaves the state whole before anything that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether appending `more` bytes touches a file and may block.
    #[must_use]
    pub fn may_block(&self, more: usize) -> bool {
        match &self.lock().store {
            Store::Memory(bytes) => bytes.len() + more > MEMORY_LIMIT,
            Store::Files(_) => true,
            Store::Ring(_) | Store::Closed => false,
        }
    }

    /// Bytes that the store occupies.
    #[must_use]
    pub fn size(&self) -> u64 {
        let state = self.lock();
        state.end - state.start
    }

    /// Appends; never fails, the oldest bytes go when there is no room.
    pub fn append(&self, bytes: &[u8]) {
        let mut state = self.lock();
        if let Store::Memory(memory) = &mut state.store {
            if memory.len() + bytes.len() <= MEMORY_LIMIT {
                memory.extend_from_slice(bytes);
                state.end += bytes.len() as u64;
                return;
            }
            let memory = std::mem::take(memory);
            state.store = Store::Files(VecDeque::new());
            state.end = 0;
            self.write(&mut state, &memory);
        }
        self.write(&mut state, bytes);
    }

    fn write(&self, state: &mut State, bytes: &[u8]) {
        let end = state.end + bytes.len() as u64;
        if let Store::Files(segments) = &mut state.store
            && self.write_files(segments, state.end, bytes).is_err()
        {
            // The disk is full: what the files hold can still be moved to memory, and their space is freed.
            let keep = (state.end - state.start).min(MEMORY_FALLBACK);
            let mut newest = Vec::new();
            let mut snapshot = Snapshot::of_files(segments, state.end - keep, state.end);
            while let Ok(Some(piece)) = snapshot.next(keep) {
                newest.extend(piece);
            }
            if newest.len() as u64 != keep {
                newest.clear();
            }
            state.start = state.end - newest.len() as u64;
            let mut ring = Vec::new();
            push_ring(&mut ring, state.start, &newest);
            state.store = Store::Ring(ring);
        }
        let limit = match &mut state.store {
            Store::Files(_) => self.file_limit,
            Store::Ring(ring) => {
                push_ring(ring, state.end, bytes);
                MEMORY_FALLBACK
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
        let span = |length: usize| {
            let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(length);
            at(start)..at(end)
        };
        match &state.store {
            Store::Memory(memory) => Snapshot::of_bytes(start, memory[span(memory.len())].to_vec()),
            Store::Files(segments) => Snapshot::of_files(segments, start, end),
            Store::Ring(ring) => {
                let at = |offset: u64| usize::try_from(offset % MEMORY_FALLBACK).unwrap_or(0);
                let bytes = (start..end).filter_map(|offset| ring.get(at(offset)).copied());
                Snapshot::of_bytes(start, bytes.collect())
            }
            Store::Closed => Snapshot::of_bytes(start, Vec::new()),
        }
    }

    /// Forgets the bytes for good and frees their space, once nobody reads them any more.
    pub fn close(&self) {
        let mut state = self.lock();
        state.store = Store::Closed;
        state.start = state.end;
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

/// Appends to a ring of [`MEMORY_FALLBACK`] bytes.
fn push_ring(ring: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let most = usize::try_from(MEMORY_FALLBACK).unwrap_or(usize::MAX);
    // Positions follow the offsets, so the ring is laid out in full at once.
    ring.resize(most, 0);
    let skipped = bytes.len().saturating_sub(most);
    let bytes = &bytes[skipped..];
    let position = usize::try_from((offset + skipped as u64) % MEMORY_FALLBACK).unwrap_or(0);
    let first = bytes.len().min(most - position);
    ring[position..position + first].copy_from_slice(&bytes[..first]);
    ring[..bytes.len() - first].copy_from_slice(&bytes[first..]);
}

/// A file that no name leads to.
fn unnamed_file(directory: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(fd) = rustix::fs::openat(CWD, directory, flags | OFlags::TMPFILE, mode) {
        return Ok(fd.into());
    }
    // Not every file system can do that; a name that nobody knows and that goes at once is nearly as good.
    let path = directory.join(format!(".execd-{}", uuid::Uuid::new_v4().simple()));
    let fd = rustix::fs::openat(CWD, &path, flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, mode)?;
    std::fs::remove_file(&path)?;
    Ok(fd.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
        let spool = Spool::new("/proc/no/such".into());
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
        let spool = Spool::with_limit(std::env::temp_dir(), 800_000);
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
        let spool = Spool::new(std::env::temp_dir());
        spool.append(b"abc");
        let snapshot = spool.snapshot(9);
        assert_eq!((snapshot.start, snapshot.length), (9, 0));
        spool.append(&[b'x'; 100_000]);
        let snapshot = spool.snapshot(u64::MAX);
        assert_eq!((snapshot.start, snapshot.length), (u64::MAX, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_newest_bytes_are_kept(pieces in proptest::collection::vec((0usize..90_000, any::<u8>()), 0..12)) {
            let limit = 200_000;
            let spool = Spool::with_limit(std::env::temp_dir(), limit);
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
