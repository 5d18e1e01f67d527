//! The sessions that are open.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::StatusCode;
use osb_protocol::execd::code;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::life::{Ends, Job, Life, Running, busy};
use super::place::Place;
use super::shell::Recipe;
use super::unknown;
use crate::app::App;
use crate::command::stop;
use crate::http::ApiError;
use crate::process::tree;

/// How many may be open: each is a process, a few descriptors and up to half a MiB of saved state.
const MOST_SESSIONS: usize = 64;
/// Runs on their way to a session's task.
const QUEUE: usize = 16;

/// All sessions.
#[derive(Debug, Default)]
pub struct Registry(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    open: HashMap<String, Arc<Session>>,
    /// Places taken by those that are being opened.
    opening: usize,
}

/// A session seen from outside.
#[derive(Debug)]
pub struct Session {
    jobs: mpsc::Sender<Job>,
    closing: CancellationToken,
    closed: CancellationToken,
    running: watch::Receiver<Option<Running>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every holder leaves the state whole between its statements.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session of that id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<Arc<Session>> {
        self.lock().open.get(id).cloned()
    }

    /// The session of that id, which nobody finds any more.
    pub(super) fn take(&self, id: &str) -> Option<Arc<Session>> {
        self.lock().open.remove(id)
    }

    /// Ends all sessions.
    pub async fn close_all(&self) {
        let all = std::mem::take(&mut self.lock().open);
        for session in all.values() {
            session.closing.cancel();
        }
        for session in all.values() {
            session.closed.cancelled().await;
        }
    }

    fn reserve(&self) -> Result<(), ApiError> {
        let mut state = self.lock();
        if state.open.len() + state.opening >= MOST_SESSIONS {
            let message = format!("{MOST_SESSIONS} sessions are open; delete one that is not needed");
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code::SERVICE_UNAVAILABLE, message));
        }
        state.opening += 1;
        Ok(())
    }
}

/// Opens a session and gives its id. Not cancel safe: run it in a task of its own.
pub(super) async fn open(app: App, cwd: Option<String>) -> Result<String, ApiError> {
    app.sessions.reserve()?;
    let opened = start(app.clone(), cwd).await;
    let mut state = app.sessions.lock();
    state.opening -= 1;
    let session = opened?;
    let id = crate::random::uuid().to_string();
    state.open.insert(id.clone(), Arc::new(session));
    Ok(id)
}

async fn start(app: App, cwd: Option<String>) -> Result<Session, ApiError> {
    let shared = app.clone();
    let work = move || {
        let tag = tree::tag(crate::random::uuid().as_u64_pair().1);
        let recipe = Recipe::new(&shared, cwd.as_deref(), tree::member(tag, 0))?;
        let place = Place::new(&shared, recipe.identity())
            .map_err(|error| ApiError::runtime(format!("no place for the session's pipes: {error}")))?;
        let born =
            recipe.start(&shared, &place.0, None).map_err(|error| ApiError::runtime(error.to_string()))?;
        Ok::<_, ApiError>((recipe, place, born))
    };
    let (recipe, place, born) = match tokio::task::spawn_blocking(work).await {
        Ok(result) => result?,
        Err(error) => return Err(ApiError::runtime(error.to_string())),
    };
    let (jobs, queue) = mpsc::channel(QUEUE);
    let (now, running) = watch::channel(None);
    let (closing, closed) = (CancellationToken::new(), CancellationToken::new());
    let ends = Ends { jobs: queue, closing: closing.clone(), running: now };
    let life = Life::new(app, recipe, place, born, ends)
        .map_err(|error| ApiError::runtime(format!("the session's shell cannot be followed: {error}")))?;
    let end: DropGuard = closed.clone().drop_guard();
    tokio::spawn(async move {
        life.live().await;
        drop(end);
    });
    Ok(Session { jobs, closing, closed, running })
}

impl Session {
    /// Lets a run wait for its turn.
    pub(super) fn queue(&self, job: Job) -> Result<(), ApiError> {
        self.jobs.try_send(job).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => busy(),
            mpsc::error::TrySendError::Closed(_) => unknown(),
        })
    }

    /// Asks what runs to end, and makes it after a while. The session stays. Not cancel safe.
    pub(crate) async fn interrupt(&self) -> Result<(), ApiError> {
        let mut running = self.running.clone();
        let Some(run) = *running.borrow_and_update() else { return Ok(()) };
        let marks = stop::blocking(move || Ok(run.marks())).await?;
        stop::end(marks).await?;
        // Its last output is on the way; a session that ends meanwhile is fine too.
        let _ = running.wait_for(|now| now.is_none_or(|now| now != run)).await;
        Ok(())
    }

    /// Kills all its processes and waits until they are gone.
    pub(super) async fn close(&self) {
        self.closing.cancel();
        self.closed.cancelled().await;
    }
}
