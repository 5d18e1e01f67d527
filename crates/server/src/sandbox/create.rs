//! Making a sandbox: runtime and store, then index, then the answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::PlatformSpec;
use osb_protocol::time::WireTime;
use osb_runtime::{Created, Ended, ImageSource, SandboxSpec, Stages};
use tokio::sync::oneshot;

use super::record::{Changing, Origin, Record, Status};
use crate::error::ApiError;
use crate::state::AppState;

/// A sandbox to make, proven.
#[derive(Debug)]
pub(crate) struct Order {
    /// For the runtime.
    pub(crate) spec: SandboxSpec,
    /// What it is made of.
    pub(crate) image: ImageSource,
    /// What the server keeps of it.
    pub(crate) kept: Kept,
}

/// What is kept of a sandbox to make. The account at the registry is no part of it.
#[derive(Debug)]
pub(crate) struct Kept {
    /// When the call began.
    pub(crate) created_at: WireTime,
    /// When it shall be removed.
    pub(crate) expires_at: Option<WireTime>,
    /// Entrypoint as asked for; the spec's may have been split.
    pub(crate) entrypoint: Vec<String>,
    /// Platform as asked for.
    pub(crate) platform: Option<PlatformSpec>,
    /// Labels.
    pub(crate) metadata: BTreeMap<String, String>,
    /// Extensions that are kept.
    pub(crate) extensions: BTreeMap<String, String>,
    /// Limits as asked for.
    pub(crate) limits: BTreeMap<String, String>,
    /// Token that its endpoints demand.
    pub(crate) endpoint_token: Option<String>,
}

impl Kept {
    /// As a record holds it.
    pub(super) fn split(self, id: SandboxId, image: String, status: Status) -> (Origin, Changing) {
        let origin = Origin {
            id,
            created_at: self.created_at,
            image,
            platform: self.platform,
            entrypoint: self.entrypoint,
            extensions: self.extensions,
            limits: self.limits,
            endpoint_token: self.endpoint_token,
        };
        let changing = Changing { status, metadata: self.metadata, expires_at: self.expires_at, gone: false };
        (origin, changing)
    }
}

/// A sandbox on its way to whoever asked for it. Dropped without [`Delivery::accept`] the sandbox is deleted: the
/// client has gone, and nobody else knows its id.
pub(crate) struct Delivery {
    record: Arc<Record>,
    /// Where the time went: stage and microseconds.
    pub(crate) stages: Vec<(&'static str, u32)>,
    state: Option<AppState>,
}

impl Delivery {
    /// Hands the sandbox over.
    pub(crate) fn accept(mut self) -> Arc<Record> {
        self.state = None;
        Arc::clone(&self.record)
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let Some(state) = self.state.take() else { return };
        let record = Arc::clone(&self.record);
        tracing::info!(sandbox = %record.id(), "client left before its create was answered: deleting");
        let tasks = state.tasks().clone();
        tasks.spawn(async move {
            // A failure is tried again in the background.
            let _ = state.remove(&record).await;
        });
    }
}

/// Whether a hook may hold the start up for hours.
pub(super) fn is_held_up(spec: &SandboxSpec) -> bool {
    spec.lifecycle.as_ref().is_some_and(|hooks| hooks.pre_start.is_some())
}

impl AppState {
    /// Makes a sandbox. Runs to its end whatever becomes of the caller; a caller that has gone by then gets its
    /// sandbox deleted.
    ///
    /// # Errors
    /// Nothing is left of a sandbox that could not be made.
    pub(crate) async fn create(&self, order: Order) -> Result<Delivery, ApiError> {
        let (mut reply, answer) = oneshot::channel();
        let state = self.clone();
        self.tasks().spawn(async move {
            let result = state.make(order, &mut reply).await;
            // When the receiver is gone this drops the delivery, which deletes the sandbox.
            let _ = reply.send(result);
        });
        answer.await.map_err(|_| ApiError::Internal("create task ended without an answer".to_owned()))?
    }

    async fn make<T>(&self, order: Order, client: &mut oneshot::Sender<T>) -> Result<Delivery, ApiError> {
        let Some(image) = self.runtime().find_image(&order.image).await? else {
            // Rare and large: kept out of the future of every create.
            return Box::pin(self.make_later(order, client)).await;
        };
        let arrival = self.arrivals().begin();
        let hooked = is_held_up(&order.spec);
        let created = self.runtime().create(order.spec, image).await?;
        let status = Status::running(WireTime::now());
        let (origin, changing) = order.kept.split(created.id, order.image.name, status);
        let unwanted = async {
            // Without a hook the start takes less than it takes to give it up.
            if !hooked {
                return std::future::pending().await;
            }
            tokio::select! {
                () = client.closed() => ApiError::DeletedMeanwhile,
                () = self.stopping() => ApiError::Stopping,
            }
        };
        let stages = self.store_new(&origin, created, &changing, unwanted).await?;
        let record = Record::new(origin, changing);
        self.index().insert(Arc::clone(&record));
        self.schedule(&record);
        self.settle(&record).await;
        drop(arrival);
        Ok(self.delivery(&record, stages))
    }

    /// Writes the row of a sandbox while its entrypoint is started. Both must succeed, or neither is left. When
    /// `unwanted` comes first, the sandbox is given up with its error.
    pub(super) async fn store_new(
        &self,
        origin: &Origin,
        created: Created,
        changing: &Changing,
        unwanted: impl Future<Output = ApiError>,
    ) -> Result<Stages, ApiError> {
        let Created { id, handle, started } = created;
        let store = async {
            let began = Instant::now();
            let stored = self.store().insert(origin, &handle, changing).await;
            (stored, u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX))
        };
        let start = async {
            tokio::select! {
                biased;
                started = started => started.map_err(ApiError::from),
                why = unwanted => {
                    // The runtime gives up what nobody waits for; what has come to life by now is removed.
                    self.discard(id).await;
                    Err(why)
                }
            }
        };
        let (started, (stored, micros)) = tokio::join!(start, store);
        match (started, stored) {
            (Ok(mut stages), Ok(())) => {
                stages.push(("store", micros));
                Ok(stages)
            }
            (Ok(_), Err(error)) => {
                self.discard(id).await;
                Err(error.into())
            }
            (Err(error), stored) => {
                if stored.is_ok()
                    && let Err(left) = self.store().delete(id).await
                {
                    tracing::error!(sandbox = %id, %left, "the row of a sandbox that did not start is left");
                }
                Err(error)
            }
        }
    }

    /// Ends a sandbox that nobody knows yet.
    pub(super) async fn discard(&self, id: SandboxId) {
        if let Err(error) = self.runtime().delete(id).await {
            tracing::error!(sandbox = %id, %error, "sandbox without a record could not be removed");
        }
    }

    /// Shows an ending that came before the record did.
    pub(super) async fn settle(&self, record: &Arc<Record>) {
        if let Some(ended) = self.arrivals().take(record.id()) {
            self.ended(record, &ended).await;
        }
    }

    pub(super) fn delivery(&self, record: &Arc<Record>, stages: Vec<(&'static str, u32)>) -> Delivery {
        Delivery { record: Arc::clone(record), stages, state: Some(self.clone()) }
    }
}

/// Endings of sandboxes whose create is still under way: an entrypoint may end before its record is in the index.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    inner: Mutex<InFlight>,
}

#[derive(Debug, Default)]
struct InFlight {
    next: u64,
    running: BTreeSet<u64>,
    /// With the number that the next create would have had when the ending came.
    endings: HashMap<SandboxId, (u64, Ended)>,
}

impl Arrivals {
    /// Tells that a create has begun, until the answer is dropped.
    pub(super) fn begin(&self) -> Arrival<'_> {
        let mut inner = self.lock();
        let number = inner.next;
        inner.next += 1;
        inner.running.insert(number);
        Arrival { arrivals: self, number }
    }

    fn end(&self, number: u64) {
        let mut inner = self.lock();
        inner.running.remove(&number);
        // An ending that all creates of its time have passed by belongs to none of them.
        let oldest = inner.running.first().copied().unwrap_or(inner.next);
        inner.endings.retain(|_, (at, _)| *at > oldest);
    }

    /// Keeps an ending for a create that may be about to look for it.
    pub(crate) fn keep(&self, id: SandboxId, ended: Ended) {
        let mut inner = self.lock();
        if !inner.running.is_empty() {
            let at = inner.next;
            inner.endings.insert(id, (at, ended));
        }
    }

    /// Takes the ending of a sandbox.
    pub(crate) fn take(&self, id: SandboxId) -> Option<Ended> {
        self.lock().endings.remove(&id).map(|(_, ended)| ended)
    }

    fn lock(&self) -> MutexGuard<'_, InFlight> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A create under way.
pub(super) struct Arrival<'a> {
    arrivals: &'a Arrivals,
    number: u64,
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.arrivals.end(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended() -> Ended {
        Ended { failed: false, reason: "CONTAINER_EXITED".into(), message: String::new(), exit_code: Some(0) }
    }

    #[test]
    fn endings_wait_for_creates_of_their_time_only() {
        let arrivals = Arrivals::default();
        let (a, b) = (SandboxId::random(), SandboxId::random());
        arrivals.keep(a, ended());
        assert_eq!(arrivals.take(a), None, "no create was under way");
        let first = arrivals.begin();
        arrivals.keep(a, ended());
        let second = arrivals.begin();
        arrivals.keep(b, ended());
        assert_eq!(arrivals.take(a), Some(ended()));
        arrivals.keep(a, ended());
        drop(first);
        assert_eq!(arrivals.lock().endings.len(), 2, "the second create may still look");
        drop(second);
        assert_eq!(arrivals.lock().endings.len(), 0);
    }
}
