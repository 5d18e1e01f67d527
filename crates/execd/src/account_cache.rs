//! The account files as last read. Every command needs them, and they hardly ever change.

use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{CWD, Stat};

use crate::accounts::Accounts;

/// Parsed account files with what tells whether they are still the same.
#[derive(Debug, Default)]
pub struct AccountCache(Mutex<Option<(Key, Arc<Accounts>)>>);

/// Identity and state of both files; `None` for one that is absent.
type Key = [Option<FileKey>; 2];

/// Device, inode, size, and time of the last change of anything, which nobody can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileKey(u64, u64, i64, i64, i64);

impl AccountCache {
    /// The accounts as they are now.
    pub fn get(&self) -> Arc<Accounts> {
        let key = ["/etc/passwd", "/etc/group"].map(key);
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, accounts)) = &*cached
            && *known == key
        {
            return Arc::clone(accounts);
        }
        // The key is older than the text: a change in between is seen the next time.
        let accounts = Arc::new(Accounts::read());
        *cached = Some((key, Arc::clone(&accounts)));
        accounts
    }
}

fn key(path: &str) -> Option<FileKey> {
    let stat: Stat = rustix::fs::statat(CWD, path, rustix::fs::AtFlags::empty()).ok()?;
    let nanos = i64::try_from(stat.st_ctime_nsec).unwrap_or(0);
    Some(FileKey(stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unchanged_files_are_read_once() {
        let cache = AccountCache::default();
        assert!(Arc::ptr_eq(&cache.get(), &cache.get()));
        assert_eq!(*cache.get(), Accounts::read());
    }
}
