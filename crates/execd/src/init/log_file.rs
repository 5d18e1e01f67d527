//! The entrypoint's output in a file of the host, its newest bytes only.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt as _;

use osb_protocol::boot::ENTRYPOINT_LOG_BYTES;
use rustix::fs::{FallocateFlags, OFlags};

/// When the file is full its older half goes, so that this costs little per byte.
const HALF: u64 = ENTRYPOINT_LOG_BYTES / 2;

/// A file that never grows beyond [`ENTRYPOINT_LOG_BYTES`]. A reader finds plain text in order.
#[derive(Debug)]
pub(super) struct LogFile {
    file: File,
    size: u64,
}

impl AsRawFd for LogFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl LogFile {
    /// Goes on behind what the file holds.
    pub(super) fn new(file: File) -> Self {
        // Writes go by offset, which the append flag would override.
        if let Ok(flags) = rustix::fs::fcntl_getfl(&file)
            && flags.contains(OFlags::APPEND)
        {
            let _ = rustix::fs::fcntl_setfl(&file, flags - OFlags::APPEND);
        }
        let size = file.metadata().map_or(0, |meta| meta.len());
        Self { file, size }
    }

    /// Appends. What cannot be written is lost: the entrypoint must not wait for the log.
    pub(super) fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.size >= ENTRYPOINT_LOG_BYTES {
                self.drop_half();
            }
            let room = usize::try_from(ENTRYPOINT_LOG_BYTES.saturating_sub(self.size)).unwrap_or(bytes.len());
            let (now, later) = bytes.split_at(bytes.len().min(room));
            if self.file.write_all_at(now, self.size).is_err() {
                return;
            }
            self.size += now.len() as u64;
            bytes = later;
        }
    }

    /// Drops the older half. File systems that can cut a file's head off do it at once, so that a reader sees
    /// either form; for the others the newer half is copied to the front.
    fn drop_half(&mut self) {
        let surplus = self.size - HALF;
        let aligned = surplus - surplus % HALF;
        if rustix::fs::fallocate(&self.file, FallocateFlags::COLLAPSE_RANGE, 0, aligned).is_ok() {
            self.size -= aligned;
            return;
        }
        if self.copy_to_front(surplus).is_err() {
            // Not readable for us: starting over is all that is left.
            self.size = 0;
        } else {
            self.size = HALF;
        }
        let _ = self.file.set_len(self.size);
    }

    fn copy_to_front(&self, from: u64) -> std::io::Result<()> {
        let mut piece = [0u8; 16 << 10];
        let mut at = 0;
        while at < HALF {
            self.file.read_exact_at(&mut piece, from + at)?;
            self.file.write_all_at(&piece, at)?;
            at += piece.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_bytes_are_kept() {
        for dir in ["/dev/shm", "/var/tmp"] {
            let Ok(mut file) = tempfile::NamedTempFile::new_in(dir) else { continue };
            let mut log = LogFile::new(file.reopen().unwrap());
            let written: Vec<u8> =
                (0..5_000_000u32).flat_map(|at| format!("{at}\n").into_bytes()).take(5 << 20).collect();
            for piece in written.chunks(10_000) {
                log.append(piece);
                assert!(file.as_file().metadata().unwrap().len() <= ENTRYPOINT_LOG_BYTES);
            }
            let mut kept = Vec::new();
            std::io::Read::read_to_end(&mut file, &mut kept).unwrap();
            assert!(kept.len() as u64 >= HALF && written.ends_with(&kept), "{dir}");
        }
    }

    #[test]
    fn a_write_only_file_in_append_mode_stays_bounded() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("log");
        let mut log = LogFile::new(File::options().append(true).create(true).open(&path).unwrap());
        for _ in 0..300 {
            log.append(&[b'x'; 10_000]);
        }
        let length = std::fs::metadata(&path).unwrap().len();
        assert!(length > 0 && length <= ENTRYPOINT_LOG_BYTES, "{length}");
    }
}
