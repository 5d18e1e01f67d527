//! Ending a command before its time: on request, or because its time is up.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::registry::{Command, Phase};
use crate::http::ApiError;
use crate::process::tree::{self, Marks};
use crate::process::watch;

/// An interrupted command has this long to end by itself.
const INTERRUPT_GRACE: Duration = Duration::from_secs(3);

/// Asks a command to end, and makes it after a while. Returns when all its processes have gone; at once when it
/// had ended already. Not cancel safe: run it in a task of its own.
pub async fn interrupt(command: Arc<Command>) -> Result<(), ApiError> {
    let mut phase = command.follow();
    let gone = |_| ApiError::runtime("the command was broken off");
    let started = phase.wait_for(|phase| *phase != Phase::Starting);
    let Ok(started) = tokio::time::timeout(INTERRUPT_GRACE, started).await else {
        return Err(ApiError::runtime("the program is still being loaded by the file system; try again"));
    };
    if matches!(*started.map_err(gone)?, Phase::Ended(_)) {
        return Ok(());
    }
    end(command.tag.into()).await?;
    phase.wait_for(|phase| matches!(phase, Phase::Ended(_))).await.map_err(gone)?;
    Ok(())
}

/// Asks processes to end, and makes them after a while. Not cancel safe.
pub(crate) async fn end(marks: Marks) -> Result<(), ApiError> {
    let members = blocking(move || tree::terminate(marks)).await?;
    let ended = async {
        for member in members {
            // A descriptor that cannot be waited for is left to the kill below.
            if let Ok(member) = watch::readable(member) {
                let _ = member.readable().await;
            }
        }
    };
    let _ = tokio::time::timeout(INTERRUPT_GRACE, ended).await;
    blocking(move || tree::kill(marks)).await
}

/// Does work that may block where it holds nobody up.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(|error| ApiError::runtime(error.to_string())),
        Err(error) => Err(ApiError::runtime(error.to_string())),
    }
}

/// The time limit of a run.
pub(crate) struct Timer {
    at: Option<Instant>,
    killer: Option<JoinHandle<io::Result<()>>>,
    /// Whether it has passed.
    pub(crate) killed: bool,
}

impl Timer {
    pub(crate) fn new(began: Instant, limit: Option<Duration>) -> Self {
        // A limit beyond the clock's reach is none.
        Self { at: limit.and_then(|limit| began.checked_add(limit)), killer: None, killed: false }
    }

    pub(crate) async fn expired(&self) {
        match self.at {
            Some(at) => sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Kills all processes with the mark, elsewhere.
    pub(crate) fn kill(&mut self, marks: impl Into<Marks>) {
        let marks = marks.into();
        self.at = None;
        self.killed = true;
        self.killer = Some(tokio::task::spawn_blocking(move || tree::kill(marks)));
    }

    /// Waits until a kill under way is done; tells what went wrong with it.
    pub(crate) async fn finish(&mut self) -> io::Result<()> {
        match self.killer.take() {
            Some(killer) => killer.await.map_err(io::Error::other)?,
            None => Ok(()),
        }
    }
}
