//! What the store may take on disk ([`super::Options::max_disk`]): a load asks before it writes, and older images make
//! room for it.

use super::error::{Error, Result};
use super::store::ImageStore;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The room that one load has.
pub(super) struct Budget<'a> {
    store: &'a ImageStore,
    what: String,
    state: Mutex<State>,
}

struct State {
    /// Bytes that may still be written; less than none when the limit was lowered.
    left: i128,
    written: u64,
    /// Images that are being loaded: those must not make room for themselves.
    spare: BTreeSet<String>,
}

impl<'a> Budget<'a> {
    pub(super) fn new(store: &'a ImageStore, source: &Path) -> Result<Self> {
        let left = match store.max_disk {
            Some(limit) => i128::from(limit) - i128::from(store.disk_usage()?.disk_bytes),
            None => i128::MAX,
        };
        let state = Mutex::new(State { left, written: 0, spare: BTreeSet::new() });
        Ok(Self { store, what: source.display().to_string(), state })
    }

    /// Images that must stay.
    pub(super) fn spare(&self, ids: impl IntoIterator<Item = String>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).spare.extend(ids);
    }

    /// Takes so much of the room; where there is not enough, unused images go first.
    pub(super) fn charge(&self, bytes: u64) -> Result<()> {
        let Some(limit) = self.store.max_disk else { return Ok(()) };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.written = state.written.saturating_add(bytes);
        state.left -= i128::from(bytes);
        if state.left >= 0 {
            return Ok(());
        }
        let (kept, holders) = self.store.unremovable(&state.spare)?;
        let full =
            || Err(Error::StoreFull { what: self.what.clone(), limit, kept, holders: holders.clone() });
        // Nothing is removed for what cannot fit in any case.
        if kept.saturating_add(state.written) > limit {
            return full();
        }
        let wanted = u64::try_from(-state.left).unwrap_or(u64::MAX);
        state.left += i128::from(self.store.evict(wanted, &state.spare)?);
        if state.left < 0 { full() } else { Ok(()) }
    }
}
