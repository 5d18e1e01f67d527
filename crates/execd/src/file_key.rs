//! What tells whether a file that was read before is still the same.

use std::path::Path;

use rustix::fs::{AtFlags, CWD, Stat};

/// Device, inode, size, and time of the last change of anything, which nobody can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileKey(u64, u64, i64, i64, i64);

impl FileKey {
    /// The key of the file that a name leads to now; `None` where there is none.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let stat: Stat = rustix::fs::statat(CWD, path, AtFlags::empty()).ok()?;
        let nanos = i64::try_from(stat.st_ctime_nsec).unwrap_or(0);
        Some(Self(stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime, nanos))
    }
}
