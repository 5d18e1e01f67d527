//! Idle connections, kept per sandbox and target for the next request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use osb_protocol::ids::SandboxId;
use osb_runtime::Target;
use tokio::time::Instant;

use super::upstream::Upstream;

const SWEEP_GAP: Duration = Duration::from_millis(500);

/// How many connections wait, and how long.
#[derive(Debug, Clone, Copy)]
pub struct Idle {
    /// At most so many for one target of one sandbox.
    pub per_target: usize,
    /// At most so many altogether.
    pub total: usize,
    /// So long for the daemon.
    pub daemon: Duration,
    /// So long for other ports. Short: a server with a single thread serves nobody else while it waits for our
    /// next request.
    pub port: Duration,
}

impl Default for Idle {
    fn default() -> Self {
        Self { per_target: 128, total: 1024, daemon: Duration::from_secs(60), port: Duration::from_secs(4) }
    }
}

/// Which end of which sandbox: the daemon, or a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    id: SandboxId,
    port: Option<u16>,
}

impl Key {
    pub(super) fn new(id: SandboxId, target: Target) -> Self {
        let port = match target {
            Target::Execd => None,
            Target::Port(port) => Some(port),
        };
        Self { id, port }
    }
}

/// The idle connections of all sandboxes.
pub(super) struct Pool {
    limits: Idle,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By sandbox, then newest last: the newest is the likeliest to be open.
    sandboxes: HashMap<SandboxId, Vec<Waiting>>,
    count: usize,
    /// Whether a task waits for the next one to grow too old.
    sweeping: bool,
}

struct Waiting {
    key: Key,
    upstream: Upstream,
    until: Instant,
}

impl Pool {
    pub(super) fn new(limits: Idle) -> Self {
        Self { limits, state: Mutex::default() }
    }

    /// An open connection that nobody uses.
    pub(super) fn take(&self, key: Key) -> Option<Upstream> {
        loop {
            let candidate = self.lock().pop(key)?;
            // A system call, so not under the lock.
            if candidate.is_fresh() {
                return Some(candidate);
            }
        }
    }

    /// Keeps a connection for later, or closes it when enough are kept.
    pub(super) fn put(self: &Arc<Self>, key: Key, upstream: Upstream) {
        let patience = if key.port.is_none() { self.limits.daemon } else { self.limits.port };
        let until = Instant::now() + patience;
        let mut state = self.lock();
        let has_room = state.count < self.limits.total;
        let waiting = state.sandboxes.entry(key.id).or_default();
        if !has_room || waiting.iter().filter(|other| other.key == key).count() >= self.limits.per_target {
            if waiting.is_empty() {
                state.sandboxes.remove(&key.id);
            }
            drop(state);
            return;
        }
        waiting.push(Waiting { key, upstream, until });
        state.count += 1;
        if !state.sweeping {
            state.sweeping = true;
            drop(state);
            tokio::spawn(sweep(Arc::downgrade(self), until));
        }
    }

    /// Closes what is idle of a sandbox.
    pub(super) fn forget(&self, id: SandboxId) {
        let mut state = self.lock();
        let closed = state.sandboxes.remove(&id);
        state.count -= closed.as_ref().map_or(0, Vec::len);
        drop(state);
        // `closed` is dropped here: closing sockets is not for under the lock.
    }

    /// Number of idle connections.
    pub(super) fn len(&self) -> usize {
        self.lock().count
    }

    /// Closes what has waited too long; tells when to look again.
    fn expire(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut closed = Vec::new();
        let mut next: Option<Instant> = None;
        let mut state = self.lock();
        state.sandboxes.retain(|_, waiting| {
            closed.extend(waiting.extract_if(.., |one| one.until <= now));
            for one in waiting.iter() {
                next = Some(next.map_or(one.until, |soonest| soonest.min(one.until)));
            }
            !waiting.is_empty()
        });
        state.count -= closed.len();
        state.sweeping = next.is_some();
        drop(state);
        next
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing between lock and unlock leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pop(&mut self, key: Key) -> Option<Upstream> {
        let waiting = self.sandboxes.get_mut(&key.id)?;
        let newest = waiting.iter().rposition(|one| one.key == key)?;
        let one = waiting.remove(newest);
        if waiting.is_empty() {
            self.sandboxes.remove(&key.id);
        }
        self.count -= 1;
        Some(one.upstream)
    }
}

/// Runs as long as connections wait; holds no pool alive.
async fn sweep(pool: Weak<Pool>, first: Instant) {
    let mut next = first;
    loop {
        tokio::time::sleep_until(next).await;
        let Some(pool) = pool.upgrade() else { return };
        let Some(soonest) = pool.expire() else { return };
        // Not one wake-up for each of many that grow old one after another.
        next = soonest.max(Instant::now() + SWEEP_GAP);
    }
}
