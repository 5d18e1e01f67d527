//! Output of a background command, kept for whoever asks.
//!
//! Offsets count all bytes ever written. Little output stays in memory; more moves to a file without a name, so
//! that nobody else sees it and nothing is left behind by a daemon that dies. The newest [`FILE_LIMIT`] bytes are
//! kept. Where no file can be written (read-only or full disk) the newest [`MEMORY_FALLBACK`] stay in memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{CWD, Mode, OFlags};

/// Newest bytes kept of one command.
pub const FILE_LIMIT: u64 = 64 << 20;
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
    /// The byte of offset `n` is at `n` modulo the limit.
    File(File),
    /// The same ring in memory.
    Ring(Vec<u8>),
    /// Given up; further bytes are counted and forgotten.
    Closed,
}

impl Spool {
    /// An empty store, whose file will be in `directory`.
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

    /// Oldest offset kept, and the offset behind the newest byte.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        let state = self.lock();
        (state.start, state.end)
    }

    /// Whether reading, or appending `more` bytes, touches a file and may block.
    #[must_use]
    pub fn may_block(&self, more: usize) -> bool {
        match &self.lock().store {
            Store::Memory(bytes) => bytes.len() + more > MEMORY_LIMIT,
            Store::File(_) => true,
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
            state.store = match unnamed_file(&self.directory) {
                Ok(file) => Store::File(file),
                Err(_) => Store::Ring(Vec::new()),
            };
            state.end = 0;
            self.write(&mut state, &memory);
        }
        self.write(&mut state, bytes);
    }

    fn write(&self, state: &mut State, bytes: &[u8]) {
        if let Store::File(file) = &state.store
            && write_ring(file, self.file_limit, state.end, bytes).is_err()
        {
            // The disk is full: what the file holds can still be moved to memory, and its space is freed.
            let keep = (state.end - state.start).min(MEMORY_FALLBACK);
            let mut newest = Vec::new();
            let from = state.end - keep;
            if read_ring(file, self.file_limit, from, keep, &mut newest).is_err() {
                newest.clear();
            }
            state.start = state.end - newest.len() as u64;
            let at = state.start;
            let mut ring = Vec::new();
            push_ring(&mut ring, at, &newest);
            state.store = Store::Ring(ring);
        }
        let limit = match &mut state.store {
            Store::File(_) => self.file_limit,
            Store::Ring(ring) => {
                push_ring(ring, state.end, bytes);
                MEMORY_FALLBACK
            }
            Store::Memory(_) | Store::Closed => 0,
        };
        state.end += bytes.len() as u64;
        state.start = state.start.max(state.end.saturating_sub(limit));
    }

    /// Reads up to `most` bytes from `offset` on. `None` when the byte at `offset` is no longer kept.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, offset: u64, most: u64) -> io::Result<Option<Vec<u8>>> {
        let state = self.lock();
        if offset < state.start {
            return Ok(None);
        }
        let length = state.end.saturating_sub(offset).min(most);
        let mut out = Vec::new();
        match &state.store {
            Store::Memory(memory) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX).min(memory.len());
                let to = from.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
                out.extend_from_slice(&memory[from..to.min(memory.len())]);
            }
            Store::File(file) => read_ring(file, self.file_limit, offset, length, &mut out)?,
            Store::Ring(ring) => {
                let at = |offset: u64| usize::try_from(offset % MEMORY_FALLBACK).unwrap_or(0);
                out.extend((offset..offset + length).filter_map(|offset| ring.get(at(offset))));
            }
            Store::Closed => {}
        }
        Ok(Some(out))
    }

    /// Forgets the bytes for good and frees their space.
    pub fn close(&self) {
        let mut state = self.lock();
        state.store = Store::Closed;
        state.start = state.end;
    }
}

/// Where in a ring of `limit` bytes the piece of `length` bytes at `offset` lies: position and length of its first
/// part; the second part, if any, starts at 0.
fn place(limit: u64, offset: u64, length: usize) -> (u64, usize) {
    let position = offset % limit;
    let room = usize::try_from(limit - position).unwrap_or(usize::MAX);
    (position, length.min(room))
}

fn write_ring(file: &File, limit: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let most = usize::try_from(limit).unwrap_or(usize::MAX);
    let skipped = bytes.len().saturating_sub(most);
    let bytes = &bytes[skipped..];
    let (position, first) = place(limit, offset + skipped as u64, bytes.len());
    file.write_all_at(&bytes[..first], position)?;
    file.write_all_at(&bytes[first..], 0)
}

fn read_ring(file: &File, limit: u64, offset: u64, length: u64, out: &mut Vec<u8>) -> io::Result<()> {
    let length = usize::try_from(length.min(limit)).map_err(io::Error::other)?;
    out.resize(length, 0);
    let (position, first) = place(limit, offset, length);
    file.read_exact_at(&mut out[..first], position)?;
    file.read_exact_at(&mut out[first..], 0)
}

/// Appends to a ring of [`MEMORY_FALLBACK`] bytes that grows until it is full.
fn push_ring(ring: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let most = usize::try_from(MEMORY_FALLBACK).unwrap_or(usize::MAX);
    // Positions follow the offsets, so the ring is laid out in full at once.
    ring.resize(most, 0);
    let skipped = bytes.len().saturating_sub(most);
    let bytes = &bytes[skipped..];
    let (position, first) = place(MEMORY_FALLBACK, offset + skipped as u64, bytes.len());
    let position = usize::try_from(position).unwrap_or(0);
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

    fn all(spool: &Spool) -> Vec<u8> {
        let (start, end) = spool.range();
        spool.read(start, end - start).unwrap().unwrap()
    }

    #[test]
    fn no_place_for_a_file_keeps_the_newest_in_memory() {
        let spool = Spool::new("/proc/no/such".into());
        let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
        for piece in bytes.chunks(70_000) {
            spool.append(piece);
        }
        let (start, end) = spool.range();
        assert_eq!((start, end), (3_000_000 - MEMORY_FALLBACK, 3_000_000));
        assert!(all(&spool) == bytes[start as usize..]);
        assert!(spool.read(start - 1, 1).unwrap().is_none());
        spool.close();
        spool.append(b"more");
        assert_eq!(spool.range(), (3_000_004, 3_000_004));
        assert!(all(&spool).is_empty());
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
            let (start, end) = spool.range();
            prop_assert_eq!(end, written.len() as u64);
            prop_assert_eq!(start, end.saturating_sub(limit));
            prop_assert!(all(&spool) == written[start as usize..]);
            let middle = start + (end - start) / 2;
            prop_assert!(spool.read(middle, 1000).unwrap().unwrap()
                == written[middle as usize..(middle as usize + 1000).min(written.len())]);
        }
    }
}
