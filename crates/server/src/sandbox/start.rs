//! The server's start: rows and reality are brought together before anybody is served.

use std::collections::HashMap;

use osb_protocol::lifecycle::SandboxState;
use osb_protocol::time::WireTime;
use osb_runtime::{Adopted, Ended, RuntimeError, RuntimeEvent};
use tokio::sync::mpsc;

use super::end::status_of;
use super::record::Record;
use crate::state::AppState;
use crate::store::{Row, StoreError};

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The runtime cannot take its sandboxes back.
    #[error("the runtime cannot take its sandboxes back: {0}")]
    Adopt(RuntimeError),
    /// The listener cannot be used.
    #[error("the listening socket cannot be used: {0}")]
    Listener(std::io::Error),
}

impl AppState {
    /// Takes back the sandboxes of an earlier life, then follows what happens to them. Overdue ones are removed
    /// before this returns.
    ///
    /// # Errors
    /// The runtime refuses.
    pub async fn start(&self, rows: Vec<Row>) -> Result<(), StartError> {
        let known = rows.iter().map(|row| (row.origin.id, row.handle.clone())).collect();
        let mut found: HashMap<_, _> =
            self.runtime().adopt(known).await.map_err(StartError::Adopt)?.into_iter().collect();
        let mut overdue = tokio::task::JoinSet::new();
        for Row { origin, changing, .. } in rows {
            let adopted = found.remove(&origin.id).unwrap_or_else(|| Adopted::Ended(lost()));
            let record = Record::new(origin, changing);
            self.index().insert(std::sync::Arc::clone(&record));
            let passed = record.now().expires_at.is_some_and(|at| at <= WireTime::now());
            if passed || record.now().status.state == SandboxState::Stopping {
                let state = self.clone();
                overdue.spawn(async move {
                    // A failure is tried again by the timer.
                    let _ = state.remove(&record).await;
                });
                continue;
            }
            if let Adopted::Ended(ended) = adopted
                && !record.now().status.has_ended()
            {
                record.now().status = status_of(&ended, WireTime::now());
                let next = record.now().clone();
                if let Err(error) = self.store().update(record.id(), &next).await {
                    // What is known goes on; a later start finds the same.
                    tracing::error!(sandbox = %record.id(), %error, "state could not be stored");
                }
                tracing::warn!(sandbox = %record.id(), reason = ended.reason, "ended while the server was away");
            }
            self.schedule(&record);
        }
        while overdue.join_next().await.is_some() {}
        if let Some(events) = self.runtime().events() {
            let state = self.clone();
            self.background().spawn(state.follow(events));
        }
        let state = self.clone();
        self.background().spawn(async move {
            let fire = |id| {
                let state = state.clone();
                drop(state.tasks().clone().spawn(async move { state.expire(id).await }));
            };
            if let Err(error) = state.deadlines().run(fire).await {
                tracing::error!(%error, "timer failed: sandboxes no longer expire until a restart");
            }
        });
        Ok(())
    }

    async fn follow(self, mut events: mpsc::UnboundedReceiver<RuntimeEvent>) {
        while let Some(RuntimeEvent::Ended { id, ended }) = events.recv().await {
            // Kept first and looked for second, as a create does it the other way round: one of the two sees it.
            self.arrivals().keep(id, ended.clone());
            if let Some(record) = self.index().get(id) {
                self.arrivals().take(id);
                // In a task of its own: whoever holds this record must not hold up the events of others.
                let state = self.clone();
                self.tasks().spawn(async move { state.ended(&record, &ended).await });
            }
        }
    }
}

fn lost() -> Ended {
    Ended {
        failed: true,
        reason: "CONTAINER_LOST".to_owned(),
        message: "The sandbox was gone when the server came back.".to_owned(),
        exit_code: None,
    }
}
