//! Runs of an isolated session that go on beside its shell.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use osb_protocol::execd::IsolatedRunStatus;
use osb_protocol::time::WireTime;
use tokio::sync::oneshot;

use crate::command::pipe::{Found, Pipe};
use crate::command::spool::{Spool, Stock};

/// Newest bytes kept of one run, and the most that one answer gives.
pub(super) const LOG_LIMIT: u64 = 16 << 20;
/// How long the shell's word about a run may come after the last writer to its output has gone.
const LAST_WORD: Duration = Duration::from_secs(2);
/// How long others may hold the output of a run that has ended until its end is told.
const QUIET: Duration = Duration::from_millis(50);
/// What is said of a run whose session has ended.
pub(super) const TERMINATED: &str = "session terminated";

/// A run that can be asked about.
#[derive(Debug)]
pub(super) struct BackgroundRun {
    session_id: String,
    pub(super) id: String,
    pub(super) spool: Spool,
    pub(super) started_at: WireTime,
    end: Mutex<Option<End>>,
}

#[derive(Debug, Clone)]
struct End {
    exit_code: Option<i32>,
    error: Option<String>,
    at: WireTime,
}

/// What becomes known of a run that is followed.
pub(super) type Told = oneshot::Sender<Result<i32, String>>;

impl BackgroundRun {
    pub(super) fn new(session_id: String, directory: std::path::PathBuf, stock: Arc<Stock>) -> Self {
        Self {
            session_id,
            id: crate::random::uuid().to_string(),
            spool: Spool::new(directory, LOG_LIMIT, stock),
            started_at: WireTime::now(),
            end: Mutex::new(None),
        }
    }

    fn end(&self) -> MutexGuard<'_, Option<End>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_running(&self) -> bool {
        self.end().is_none()
    }

    /// Notes how it ended; the first word counts.
    pub(super) fn ended(&self, result: Result<i32, String>) {
        let (exit_code, error) = match result {
            Ok(code) => (Some(code), None),
            Err(error) => (None, Some(error)),
        };
        self.end().get_or_insert(End { exit_code, error, at: WireTime::now() });
    }

    pub(super) fn status(&self) -> IsolatedRunStatus {
        let end = self.end().clone();
        IsolatedRunStatus {
            session_id: self.session_id.clone(),
            run_id: self.id.clone(),
            running: end.is_none(),
            exit_code: end.as_ref().and_then(|end| end.exit_code),
            error: end.as_ref().and_then(|end| end.error.clone()),
            started_at: self.started_at.to_string(),
            finished_at: end.map(|end| end.at.to_string()),
        }
    }
}

/// Keeps the output of a run and notes its end, which the session's task tells. Gives whether it succeeded.
pub(super) async fn follow(
    run: Arc<BackgroundRun>,
    output: Pipe,
    mut told: oneshot::Receiver<Result<i32, String>>,
) -> bool {
    let mut output = tokio::spawn(collect(output, Arc::clone(&run)));
    let result = tokio::select! {
        result = &mut told => {
            // What it wrote can be read before it is said to have ended; others may hold the output for ever.
            let _ = tokio::time::timeout(QUIET, &mut output).await;
            result
        }
        _ = &mut output => match tokio::time::timeout(LAST_WORD, told).await {
            Ok(result) => result,
            Err(_) => Ok(Err("the run was killed, or the shell's word about its end was".to_owned())),
        },
    };
    let result = result.unwrap_or_else(|_| Err(TERMINATED.to_owned()));
    let success = result == Ok(0);
    run.ended(result);
    success
}

async fn collect(pipe: Pipe, run: Arc<BackgroundRun>) {
    loop {
        let Ok(mut guard) = pipe.readable().await else { return };
        let mut late = Vec::new();
        let found = pipe.read(|piece| {
            if run.spool.may_block(piece.len()) {
                late.extend_from_slice(piece);
                return false;
            }
            run.spool.append(piece);
            true
        });
        if found == Found::Idle {
            guard.clear_ready();
        }
        drop(guard);
        if !late.is_empty() {
            let owner = Arc::clone(&run);
            let _ = tokio::task::spawn_blocking(move || owner.spool.append(&late)).await;
        }
        if found == Found::Closed {
            return;
        }
        tokio::task::consume_budget().await;
    }
}
