//! Copies what a file holds and leaves out its holes.

use super::error::{Error, Result};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Steps in which contents are hashed; file systems rarely have holes that are smaller.
const BLOCK: usize = 4_096;
static ZEROS: [u8; BLOCK] = [0; BLOCK];

/// A file to copy.
pub(super) struct Content<'a> {
    pub(super) file: &'a File,
    /// For messages.
    pub(super) path: &'a Path,
    pub(super) size: u64,
    /// Bytes of disk that it takes.
    pub(super) stored: u64,
}

impl Content<'_> {
    /// Copies to the empty file `copy`. `spend` is asked before each write and told its bytes; `buffer` holds some
    /// blocks.
    ///
    /// Answers a digest that tells contents apart and does not depend on where the holes are.
    pub(super) fn copy(
        &self,
        copy: &File,
        copy_path: &Path,
        buffer: &mut [u8],
        mut spend: impl FnMut(u64) -> Result<()>,
    ) -> Result<[u8; 32]> {
        let written = |error| Error::io("write to", copy_path, error);
        let mut hasher = Sha256::new();
        let (mut at, mut end) = (0, self.size);
        let is_sparse = self.stored < self.size;
        while let Some((start, until)) = self.data(at, is_sparse)?.filter(|_| at < end) {
            at = start;
            while at < until {
                let wanted = buffer.len().min(usize::try_from(until - at).unwrap_or(usize::MAX));
                let count = fill(self.file, &mut buffer[..wanted], at)
                    .map_err(|error| Error::io("read", self.path, error))?;
                let data = &buffer[..count];
                spend(count as u64)?;
                hash(&mut hasher, at, data);
                copy.write_all_at(data, at).map_err(written)?;
                at += count as u64;
                if count < wanted {
                    // It was shortened meanwhile.
                    end = at;
                    break;
                }
            }
            at = at.max(until.min(end));
        }
        if is_sparse {
            copy.set_len(end).map_err(written)?;
        }
        hasher.update(end.to_le_bytes());
        Ok(hasher.finalize().into())
    }

    /// Where the next bytes lie that are no hole, at or behind `at`, in whole blocks.
    fn data(&self, at: u64, is_sparse: bool) -> Result<Option<(u64, u64)>> {
        let block = BLOCK as u64;
        if !is_sparse {
            return Ok(Some((at, self.size)));
        }
        let seek = |to| match rustix::fs::seek(self.file, to) {
            Ok(found) => Ok(Some(found)),
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => Err(Error::io("find the holes of", self.path, errno)),
        };
        let Some(start) = seek(SeekFrom::Data(at))?.filter(|start| *start < self.size) else {
            return Ok(None);
        };
        let until = seek(SeekFrom::Hole(start))?.unwrap_or(self.size);
        Ok(Some(((start / block * block).max(at), until.next_multiple_of(block).min(self.size))))
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Adds the blocks that are not all zeros, each with its place.
fn hash(hasher: &mut Sha256, at: u64, data: &[u8]) {
    let places = (at..).step_by(BLOCK);
    for (place, block) in places.zip(data.chunks(BLOCK)) {
        if *block != ZEROS[..block.len()] {
            hasher.update(place.to_le_bytes());
            hasher.update(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn copied(parts: &[(u64, Vec<u8>)], size: u64, stored: u64) -> (Vec<u8>, Vec<u8>, u64) {
        let (file, copy) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        for (at, data) in parts {
            file.write_all_at(data, *at).unwrap();
        }
        file.set_len(size).unwrap();
        let path = Path::new("x");
        let content = Content { file: &file, path, size, stored };
        let mut spent = 0;
        let spend = |bytes| {
            spent += bytes;
            Ok(())
        };
        let digest = content.copy(&copy, path, &mut [0; 4 * BLOCK], spend).unwrap();
        let mut bytes = vec![0; usize::try_from(copy.metadata().unwrap().len()).unwrap()];
        copy.read_exact_at(&mut bytes, 0).unwrap();
        (bytes, digest.to_vec(), spent)
    }

    proptest! {
        #[test]
        fn holes_change_neither_bytes_nor_digest(
            parts in proptest::collection::vec((0_u64..200_000, proptest::collection::vec(0_u8..3, 1..9_000)), 0..6),
            size in 1_u64..210_000,
        ) {
            let mut whole = vec![0; 210_000];
            for (at, data) in &parts {
                whole[usize::try_from(*at).unwrap()..][..data.len()].copy_from_slice(data);
            }
            whole.truncate(usize::try_from(size).unwrap());
            let (bytes, digest, spent) = copied(&parts, size, 0);
            prop_assert!(bytes == whole);
            prop_assert!(spent <= size);
            let dense = copied(&[(0, whole.clone())], size, size);
            prop_assert!(dense.0 == whole && dense.2 == size);
            prop_assert_eq!(&dense.1, &digest);
            *whole.last_mut().unwrap() ^= 1;
            prop_assert_ne!(&copied(&[(0, whole.clone())], size, size).1, &digest);
            whole.push(0);
            prop_assert_ne!(&copied(&[(0, whole)], size + 1, size + 1).1, &digest);
        }
    }

    #[test]
    fn a_hole_costs_nothing() {
        let (file, copy) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let size = 1 << 40;
        file.set_len(size).unwrap();
        file.write_all_at(b"end", size - 3).unwrap();
        let content = Content { file: &file, path: Path::new("x"), size, stored: 4_096 };
        let mut spent = 0;
        let spend = |bytes| {
            spent += bytes;
            Ok(())
        };
        content.copy(&copy, Path::new("y"), &mut [0; BLOCK], spend).unwrap();
        assert_eq!((spent, copy.metadata().unwrap().len()), (4_096, size));
        let mut found = [0; 3];
        copy.read_exact_at(&mut found, size - 3).unwrap();
        assert_eq!(&found, b"end");
    }
}
