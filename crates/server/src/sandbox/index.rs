//! All sandboxes in memory: what get and list are served from.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use osb_protocol::ids::SandboxId;

use super::record::Record;

/// Sandboxes by id and by age. Nothing here waits for anything.
#[derive(Debug, Default)]
pub struct Index {
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    by_id: HashMap<SandboxId, Arc<Record>>,
    by_age: BTreeMap<(i64, SandboxId), Arc<Record>>,
}

impl Index {
    /// The sandbox with that id.
    #[must_use]
    pub fn get(&self, id: SandboxId) -> Option<Arc<Record>> {
        self.read().by_id.get(&id).cloned()
    }

    /// Adds a sandbox.
    pub fn insert(&self, record: Arc<Record>) {
        let mut inner = self.write();
        inner.by_age.insert(age(&record), Arc::clone(&record));
        inner.by_id.insert(record.id(), record);
    }

    /// Takes a sandbox out.
    pub fn remove(&self, id: SandboxId) -> Option<Arc<Record>> {
        let mut inner = self.write();
        let record = inner.by_id.remove(&id)?;
        inner.by_age.remove(&age(&record));
        Some(record)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.read().by_id.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Newest first: `limit` sandboxes after the first `skip`, and how many there are in all.
    #[must_use]
    pub fn page(&self, skip: usize, limit: usize) -> (Vec<Arc<Record>>, usize) {
        let inner = self.read();
        let page = inner.by_age.values().rev().skip(skip).take(limit).cloned().collect();
        (page, inner.by_id.len())
    }

    /// As [`Self::page`], of those that `keep` accepts.
    #[must_use]
    pub fn page_where(
        &self,
        skip: usize,
        limit: usize,
        keep: impl Fn(&Record) -> bool,
    ) -> (Vec<Arc<Record>>, usize) {
        let inner = self.read();
        let mut page = Vec::new();
        let mut total = 0;
        for record in inner.by_age.values().rev().filter(|record| keep(record)) {
            if total >= skip && page.len() < limit {
                page.push(Arc::clone(record));
            }
            total += 1;
        }
        (page, total)
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Inner> {
        // Nothing inside the lock can panic half way; the maps stay whole.
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Inner> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn age(record: &Record) -> (i64, SandboxId) {
    (record.origin.created_at.as_micros(), record.id())
}
