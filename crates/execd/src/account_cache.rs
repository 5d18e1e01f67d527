//! The account files as last read. Every command needs them, and they hardly ever change.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::accounts::Accounts;
use crate::file_key::FileKey;

/// Parsed account files with what tells whether they are still the same.
#[derive(Debug, Default)]
pub struct AccountCache(Mutex<Option<(Key, Arc<Accounts>)>>);

/// Identity and state of both files; `None` for one that is absent.
type Key = [Option<FileKey>; 2];

impl AccountCache {
    /// The accounts as they are now.
    pub fn get(&self) -> Arc<Accounts> {
        let key = ["/etc/passwd", "/etc/group"].map(|path| FileKey::of(Path::new(path)));
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
