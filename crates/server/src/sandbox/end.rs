//! Ends of sandboxes: deletion, expiry, entrypoints that end.

use std::sync::Arc;

use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::SandboxState;
use osb_protocol::time::WireTime;
use osb_runtime::Ended;

use super::record::{Record, Status};
use crate::error::ApiError;
use crate::state::AppState;

/// Microseconds until a removal that failed is tried again.
const RETRY_MICROS: i64 = 30_000_000;

impl AppState {
    /// Removes a sandbox, whatever it does. When this returns it is gone: from then on nobody finds it.
    ///
    /// # Errors
    /// 404 when somebody else removed it meanwhile; 500 when it could not be removed, which is then tried again
    /// until it succeeds.
    pub(crate) async fn remove(&self, record: &Arc<Record>) -> Result<(), ApiError> {
        let was_pending = record.now().status.state == SandboxState::Pending;
        if was_pending {
            // Whoever makes it has the turn, maybe for as long as a hook takes.
            record.give_up();
        }
        let _turn = record.turn.lock().await;
        match self.remove_in_turn(record).await {
            // Withdrawn by whoever made it, because of us.
            Err(ApiError::SandboxNotFound) if was_pending => Ok(()),
            result => result,
        }
    }

    async fn remove_in_turn(&self, record: &Arc<Record>) -> Result<(), ApiError> {
        let id = record.id();
        let before = {
            let mut now = record.now();
            if now.gone {
                return Err(ApiError::SandboxNotFound);
            }
            let before = now.status.clone();
            if before.state == SandboxState::Pending {
                drop(now);
                self.withdraw(record);
                return Ok(());
            }
            if before.state != SandboxState::Stopping {
                now.status = stopping(before.exit_code);
            }
            before
        };
        self.proxy().forget(id);
        let removed = match self.runtime().delete(id).await {
            Ok(()) | Err(osb_runtime::RuntimeError::NotFound) => {
                self.store().delete(id).await.map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        match removed {
            Ok(()) => {
                record.now().gone = true;
                self.index().remove(id);
                self.deadlines().set(id, None);
                Ok(())
            }
            Err(cause) => {
                tracing::error!(sandbox = %id, %cause, "removal failed; it is tried again");
                if before.state != SandboxState::Stopping {
                    let now = record.now().clone();
                    // After a restart the row says that it was on its way out.
                    if let Err(error) = self.store().update(id, &now).await {
                        tracing::error!(sandbox = %id, %error, "state could not be stored");
                    }
                }
                self.deadlines().set(id, Some(WireTime::now().as_micros() + RETRY_MICROS));
                Err(ApiError::DeleteFailed(cause))
            }
        }
    }

    /// Takes a pending sandbox away. Its create, which alone knows what the runtime has of it, undoes that.
    pub(super) fn withdraw(&self, record: &Record) {
        record.now().gone = true;
        record.give_up();
        self.index().remove(record.id());
        self.deadlines().set(record.id(), None);
    }

    /// Sets the moment at which the sandbox is to be removed: its expiry, or the end of its tombstone.
    pub(crate) fn schedule(&self, record: &Record) {
        self.deadlines().set(record.id(), self.deadline(record));
    }

    fn deadline(&self, record: &Record) -> Option<i64> {
        let now = record.now();
        if now.gone {
            return None;
        }
        let expiry = now.expires_at.map(WireTime::as_micros);
        let buried = now.status.has_ended().then(|| {
            let tombstone = i64::try_from(self.config().embedded.tombstone.as_micros()).unwrap_or(i64::MAX);
            now.status.since.as_micros().saturating_add(tombstone)
        });
        match now.status.state {
            // A removal that failed.
            SandboxState::Stopping => Some(0),
            _ => [expiry, buried].into_iter().flatten().min(),
        }
    }

    /// A deadline has come: looks again under the record's lock, since a renewal may have won, and removes.
    pub(crate) async fn expire(&self, id: SandboxId) {
        let Some(record) = self.index().get(id) else { return };
        let _turn = record.turn.lock().await;
        match self.deadline(&record) {
            Some(at) if at <= WireTime::now().as_micros() => {
                // A failure is logged and scheduled anew by the removal itself.
                if self.remove_in_turn(&record).await.is_ok() {
                    tracing::info!(sandbox = %id, "expired");
                }
            }
            later => self.deadlines().set(id, later),
        }
    }

    /// The runtime says that a sandbox ended by itself.
    pub(crate) async fn ended(&self, record: &Arc<Record>, ended: &Ended) {
        let _turn = record.turn.lock().await;
        let next = {
            let mut now = record.now();
            if now.gone || now.status.has_ended() || now.status.state == SandboxState::Stopping {
                return;
            }
            if now.status.state == SandboxState::Pending {
                // Its create looks once more as soon as it runs.
                self.arrivals().keep(record.id(), ended.clone());
                return;
            }
            now.status = status_of(ended, WireTime::now());
            now.clone()
        };
        self.proxy().forget(record.id());
        if let Err(error) = self.store().update(record.id(), &next).await {
            // What is shown is right; after a restart the runtime tells it again.
            tracing::error!(sandbox = %record.id(), %error, "the end of a sandbox could not be stored");
        }
        self.schedule(record);
        tracing::info!(sandbox = %record.id(), reason = ended.reason, exit_code = ended.exit_code, "ended");
    }
}

fn stopping(exit_code: Option<i32>) -> Status {
    Status {
        state: SandboxState::Stopping,
        reason: "DELETING".to_owned(),
        message: "The sandbox is being removed.".to_owned(),
        since: WireTime::now(),
        exit_code,
    }
}

/// The state that an ending leads to.
pub(crate) fn status_of(ended: &Ended, since: WireTime) -> Status {
    Status {
        state: if ended.failed { SandboxState::Failed } else { SandboxState::Terminated },
        reason: ended.reason.clone(),
        message: ended.message.clone(),
        since,
        exit_code: ended.exit_code,
    }
}
