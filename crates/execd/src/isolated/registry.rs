//! The isolated sessions that are there, and how they come and go.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use osb_protocol::execd::{IsolatedSessionSpec, IsolatedSessionState, IsolatedSessionSummary, code};
use osb_protocol::time::WireTime;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, pidfd_send_signal};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::background::BackgroundRun;
use super::config::Config;
use super::isolator::wire::{Mode, Request, Who};
use super::keeper::{Keeper, Link, Source};
use super::life::{Born, Life, Work};
use super::place::Place;
use super::spec::{self, Checked};
use super::usage;
use crate::app::App;
use crate::command::pipe;
use crate::command::spool::Stock;
use crate::files::remove;
use crate::files::workers::{Kind, Workers};
use crate::http::ApiError;
use crate::telemetry::Isolation;

/// How many may be there: each is two processes and two dozen mounts.
const MOST_SESSIONS: usize = 256;
/// Runs in the background that a session remembers; the oldest that have ended are forgotten first.
const MOST_RUNS: usize = 256;
/// Runs on their way to a session's task.
const QUEUE: usize = 16;
/// How long file requests may go on when their session is deleted.
const LEASE: Duration = Duration::from_secs(5);
/// How long a session's processes may take to die.
const DEATH: Duration = Duration::from_secs(10);
/// Pause between attempts to take a session down.
const AGAIN: Duration = Duration::from_secs(2);
/// File requests of one session at a time.
const LEASES: u32 = 1024;

/// All isolated sessions.
#[derive(Debug, Default)]
pub struct Registry {
    keeper: Keeper,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    pub(super) workers: Workers<Serving>,
    /// What the logs of all runs in the background take.
    pub(super) stock: Arc<Stock>,
    /// How often all were ended: what was on its way then ends too.
    endings: AtomicU64,
}

/// What a session is at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Active,
    /// Its shell has ended.
    Dead,
    /// It was deleted, and something of it is left.
    Destroyed,
}

/// A session seen from outside.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: String,
    created_at: WireTime,
    spec: IsolatedSessionSpec,
    /// Ends after so much time without a run.
    idle: Option<Duration>,
    /// Whether runs in the background have a place to write.
    pub(super) background: bool,
    pub(super) closing: CancellationToken,
    /// Its task has ended.
    lived: CancellationToken,
    jobs: mpsc::Sender<Work>,
    link: Arc<Link>,
    /// Each as the request names it, and without symlinks.
    trees: Vec<(String, String)>,
    on_disk: bool,
    leases: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    last_run_at: WireTime,
    last_run: Instant,
    running: usize,
    runs: Vec<Arc<BackgroundRun>>,
    /// Its first process, until that is known to be gone.
    process: Option<OwnedFd>,
    /// Its mounts, while they may be used.
    mounts: Option<Arc<OwnedFd>>,
    /// Processes that serve its files.
    workers: Vec<Arc<OwnedFd>>,
}

/// A process that serves the files of a session.
#[derive(Debug, Clone)]
pub(super) struct Serving(Arc<Session>);

impl PartialEq for Serving {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Kind for Serving {
    fn start(&self, connection: UnixStream) -> std::io::Result<OwnedFd> {
        let mounts = self.0.state().mounts.clone();
        let mounts = mounts.ok_or_else(|| std::io::Error::other("the session has ended"))?;
        let request = Request::Serve { trees: self.0.trees.clone() };
        let made = self.0.link.ask(&request, &[connection.as_fd(), mounts.as_fd()]);
        let pidfd = made.map_err(|error| std::io::Error::other(error.message))?.into_iter().next();
        let pidfd = pidfd.ok_or_else(|| std::io::Error::other("no process came back"))?;
        let mut state = self.0.state();
        state.workers.retain(|worker| !is_gone(worker));
        state.workers.push(Arc::new(pidfd.try_clone()?));
        Ok(pidfd)
    }

    fn unavailable(&self, reason: &dyn std::fmt::Display) -> ApiError {
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            code::SERVICE_UNAVAILABLE,
            format!("the session's files cannot be served: {reason}"),
        )
    }
}

fn is_gone(process: &OwnedFd) -> bool {
    waited(process, Duration::ZERO)
}

/// Whether the process has ended by then.
fn waited(process: &OwnedFd, most: Duration) -> bool {
    let until = std::time::Instant::now() + most;
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

impl Registry {
    /// No sessions yet.
    #[must_use]
    pub fn new(source: Source, config: Config) -> Self {
        Self { keeper: Keeper::new(source, config), ..Self::default() }
    }

    pub(super) fn config(&self) -> &Config {
        &self.keeper.config
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process that makes sessions, and what it has said of itself.
    pub(super) async fn link(&self) -> Result<Arc<Link>, ApiError> {
        self.keeper.link().await
    }

    pub(super) fn get(&self, id: &str) -> Result<Arc<Session>, ApiError> {
        self.lock().get(id).cloned().ok_or_else(unknown)
    }

    pub(super) fn list(&self) -> Vec<IsolatedSessionSummary> {
        let mut all: Vec<_> = self.lock().values().cloned().collect();
        all.sort_by(|one, other| {
            (one.created_at.as_micros(), &one.id).cmp(&(other.created_at.as_micros(), &other.id))
        });
        all.iter().map(|session| session.summary()).collect()
    }

    /// Ends all sessions.
    pub async fn close_all(&self) {
        let all: Vec<_> = {
            let mut sessions = self.lock();
            self.endings.fetch_add(1, Ordering::Relaxed);
            sessions.drain().map(|(_, session)| session).collect()
        };
        for session in &all {
            session.closing.cancel();
        }
        let ends = all.iter().map(async |session| {
            if let Err(reason) = session.take_down(&self.workers).await {
                tracing::warn!(session = %session.id, %reason, "an isolated session is not gone yet");
            }
        });
        futures_util::future::join_all(ends).await;
    }

    /// Sessions, and the bytes of their upper layers on disk. Blocks.
    pub(crate) fn numbers(&self) -> Isolation {
        let (sessions, link) = {
            let all = self.lock();
            let link = all.values().find(|session| session.on_disk).map(|session| Arc::clone(&session.link));
            (all.len() as u64, link)
        };
        let upper_bytes = link.as_ref().and_then(|link| link.disk()).map_or(0, |disk| usage::of(disk));
        Isolation { sessions, upper_bytes }
    }
}

/// Makes a session. Not cancel safe: run it in a task of its own.
pub(super) async fn make(app: App, spec: IsolatedSessionSpec) -> Result<Arc<Session>, ApiError> {
    let id = crate::random::uuid().to_string();
    let endings = app.isolated.endings.load(Ordering::Relaxed);
    let Checked { mut plan, kind, idle, background } = spec::check(&app, &spec, &id)?;
    if app.isolated.lock().len() >= MOST_SESSIONS {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            code::SERVICE_UNAVAILABLE,
            format!("there are {MOST_SESSIONS} isolated sessions; delete one that is not needed"),
        ));
    }
    let link = app.isolated.link().await?;
    link.check()?;
    let named: Vec<String> = plan.trees.iter().map(|tree| tree.path.clone()).collect();
    let on_disk = link.disk().is_some()
        && plan.trees.iter().any(|tree| matches!(tree.mode, Mode::Overlay { on_disk: true }));
    let owner = match plan.who {
        Who::Real { uid, gid } => Some((uid, gid)),
        Who::Daemon | Who::Seeming { .. } => None,
    };
    let maker = Arc::clone(&link);
    let work = move || -> Result<_, ApiError> {
        spec::targets_exist(&plan)?;
        for tree in &mut plan.trees {
            let real = std::fs::canonicalize(&tree.path)
                .map_err(|error| spec::refused(format!("'{}' cannot be used: {error}", tree.path)))?;
            tree.path = real.to_string_lossy().into_owned();
        }
        if on_disk {
            within_quota(&maker)?;
        }
        let failed =
            |error: std::io::Error| ApiError::runtime(format!("the session cannot be made: {error}"));
        let (first, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|error| failed(error.into()))?;
        let (read, feed) = pipe::pair().map_err(failed)?;
        rustix::io::ioctl_fionbio(&read, false).map_err(|error| failed(error.into()))?;
        let real = plan.trees.iter().map(|tree| tree.path.clone());
        let trees: Vec<_> = named.into_iter().zip(real).collect();
        let made = maker.ask(&Request::Make(Box::new(plan)), &[theirs.as_fd(), read.as_fd()]);
        let mut fds = made?.into_iter();
        let (Some(process), Some(dir), Some(mounts)) = (fds.next(), fds.next(), fds.next()) else {
            return Err(ApiError::runtime("the session was made, but cannot be held"));
        };
        let place = Place::new(dir, owner);
        Ok((process, mounts, Born { place, feed, first, kind }, trees))
    };
    let made = tokio::task::spawn_blocking(work).await;
    let made = made.unwrap_or_else(|error| Err(ApiError::runtime(error.to_string())));
    let (process, mounts, born, trees) = match made {
        Ok(made) => made,
        Err(error) => {
            if on_disk {
                let _ = remove_upper(&link, &id).await;
            }
            return Err(error);
        }
    };
    let (jobs, queue) = mpsc::channel(QUEUE);
    let session = Arc::new(Session {
        id: id.clone(),
        created_at: WireTime::now(),
        spec,
        idle,
        background,
        closing: CancellationToken::new(),
        lived: CancellationToken::new(),
        jobs,
        link,
        trees,
        on_disk,
        leases: Arc::new(Semaphore::new(LEASES as usize)),
        state: Mutex::new(State {
            phase: Phase::Active,
            last_run_at: WireTime::now(),
            last_run: Instant::now(),
            running: 0,
            runs: Vec::new(),
            process: Some(process),
            mounts: Some(Arc::new(mounts)),
            workers: Vec::new(),
        }),
    });
    let life = match Life::new(Arc::clone(&session), app.clone(), born, queue) {
        Ok(life) => life,
        Err(error) => {
            session.lived.cancel();
            let _ = session.take_down(&app.isolated.workers).await;
            return Err(ApiError::runtime(format!("the session cannot be followed: {error}")));
        }
    };
    let in_time = {
        let mut sessions = app.isolated.lock();
        let in_time = app.isolated.endings.load(Ordering::Relaxed) == endings;
        if in_time {
            sessions.insert(id, Arc::clone(&session));
        }
        in_time
    };
    if !in_time {
        drop(life);
        session.lived.cancel();
        let _ = session.take_down(&app.isolated.workers).await;
        return Err(super::keeper::not_available("all sessions were ended meanwhile"));
    }
    let owner = Arc::clone(&session);
    tokio::spawn(async move {
        let reason = life.live().await;
        owner.lived.cancel();
        match reason {
            // It stays to be asked about; what it held is given back.
            Some(reason) => {
                tracing::info!(session = %owner.id, reason, "the shell of an isolated session has ended");
                owner.state().phase = Phase::Dead;
                owner.retry(&app).await;
            }
            None if owner.state().phase == Phase::Destroyed => {
                owner.retry(&app).await;
                app.isolated.lock().remove(&owner.id);
            }
            None => {}
        }
    });
    Ok(session)
}

/// Refuses what would make the sandbox's disk fuller than sessions may.
fn within_quota(link: &Link) -> Result<(), ApiError> {
    let (Some(disk), Some(most)) = (link.disk(), link.upper_max_bytes()) else { return Ok(()) };
    if usage::exceeds(disk, most) {
        return Err(ApiError::runtime(format!(
            "the upper layers of all sessions hold more than {most} bytes (upper_max_bytes); delete sessions that are not needed"
        )));
    }
    Ok(())
}

async fn remove_upper(link: &Arc<Link>, id: &str) -> Result<(), String> {
    let Some(disk) = link.disk().cloned() else { return Ok(()) };
    let name = id.to_owned();
    let removed = tokio::task::spawn_blocking(move || remove::tree_at(disk.as_fd(), name.as_ref())).await;
    removed
        .map_err(|error| error.to_string())?
        .map_err(|error| format!("its changes cannot be removed: {error}"))
}

/// Deletes a session.
///
/// # Errors
/// 503 when something of it is left; that is tried again until it is gone.
pub(super) async fn delete(app: App, id: &str) -> Result<(), ApiError> {
    let session = app.isolated.get(id)?;
    session.closing.cancel();
    session.state().phase = Phase::Destroyed;
    match session.take_down(&app.isolated.workers).await {
        Ok(()) => {
            app.isolated.lock().remove(id);
            Ok(())
        }
        Err(reason) => {
            let again = Arc::clone(&session);
            tokio::spawn(async move {
                again.retry(&app).await;
                app.isolated.lock().remove(&again.id);
            });
            Err(ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                code::SERVICE_UNAVAILABLE,
                format!("the session is not gone completely yet, which is tried again: {reason}"),
            ))
        }
    }
}

/// 404: no such session or run.
pub(super) fn unknown() -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        code::SESSION_NOT_FOUND,
        "there is no such isolated session or run; it was deleted, or the daemon has been restarted since",
    )
}

impl Session {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every holder leaves the state whole between its statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn summary(&self) -> IsolatedSessionSummary {
        let status = self.status();
        IsolatedSessionSummary {
            session_id: self.id.clone(),
            status: status.status,
            created_at: status.created_at,
            last_run_at: status.last_run_at,
            idle_remaining_seconds: status.idle_remaining_seconds,
        }
    }

    pub(super) fn status(&self) -> IsolatedSessionState {
        let state = self.state();
        let busy = state.running > 0 || state.runs.iter().any(|run| run.is_running());
        let remaining = self.idle.map(|idle| {
            let left = if busy { idle } else { idle.saturating_sub(state.last_run.elapsed()) };
            i64::try_from(left.as_secs()).unwrap_or(i64::MAX)
        });
        IsolatedSessionState {
            status: match state.phase {
                Phase::Active => "active",
                Phase::Dead => "dead",
                Phase::Destroyed => "destroyed",
            }
            .to_owned(),
            created_at: self.created_at.to_string(),
            last_run_at: state.last_run_at.to_string(),
            idle_remaining_seconds: remaining,
            spec: IsolatedSessionSpec {
                idle_timeout_seconds: Some(self.spec.idle_timeout_seconds.unwrap_or(0)),
                ..self.spec.clone()
            },
        }
    }

    pub(super) fn created_at(&self) -> WireTime {
        self.created_at
    }

    pub(super) fn run_begins(&self) {
        let mut state = self.state();
        state.running += 1;
        state.last_run_at = WireTime::now();
        state.last_run = Instant::now();
    }

    pub(super) fn run_ends(&self) {
        let mut state = self.state();
        state.running = state.running.saturating_sub(1);
        state.last_run = Instant::now();
    }

    /// Something has happened that counts as use.
    pub(super) fn touch(&self) {
        let mut state = self.state();
        state.last_run_at = WireTime::now();
        state.last_run = Instant::now();
    }

    /// When it has been idle for too long, if nothing happens until then.
    pub(super) fn idle_until(&self) -> Option<Instant> {
        let state = self.state();
        if state.runs.iter().any(|run| run.is_running()) {
            // Looked at again soon.
            return self.idle.map(|idle| Instant::now() + idle.min(Duration::from_secs(1)));
        }
        self.idle.map(|idle| state.last_run + idle)
    }

    /// It has been idle for too long.
    pub(super) fn expire(&self) {
        self.state().phase = Phase::Destroyed;
        self.closing.cancel();
    }

    /// Room for changes, if they lie on disk. Blocks.
    pub(super) fn check_quota(&self) -> Result<(), ApiError> {
        if self.on_disk { within_quota(&self.link) } else { Ok(()) }
    }

    /// Whether changes lie on disk.
    pub(super) fn is_on_disk(&self) -> bool {
        self.on_disk
    }

    /// Lets work wait for its turn.
    pub(super) fn queue(&self, work: Work) -> Result<(), ApiError> {
        self.jobs.try_send(work).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => super::life::busy(),
            mpsc::error::TrySendError::Closed(_) => ApiError::runtime(super::background::TERMINATED),
        })
    }

    pub(super) fn is_active(&self) -> bool {
        self.state().phase == Phase::Active
    }

    pub(super) fn add_run(&self, run: Arc<BackgroundRun>) {
        let mut state = self.state();
        if state.runs.len() >= MOST_RUNS
            && let Some(oldest) = state.runs.iter().position(|run| !run.is_running())
        {
            state.runs.remove(oldest);
        }
        state.runs.push(run);
    }

    pub(super) fn drop_run(&self, id: &str) {
        self.state().runs.retain(|run| run.id != id);
    }

    pub(super) fn run(&self, id: &str) -> Result<Arc<BackgroundRun>, ApiError> {
        self.state().runs.iter().find(|run| run.id == id).cloned().ok_or_else(unknown)
    }

    /// Has the session's files served to a request. They stay while it lasts.
    pub(super) async fn files(
        self: &Arc<Self>,
        workers: &Workers<Serving>,
        request: axum::extract::Request,
    ) -> Result<axum::response::Response, ApiError> {
        if !self.is_active() {
            return Err(unknown());
        }
        let lease = Arc::clone(&self.leases).acquire_owned().await.map_err(|_| unknown())?;
        let answer = workers.forward(&Serving(Arc::clone(self)), request).await?;
        Ok(answer.map(|body| axum::body::Body::new(Leased { body, _lease: lease })))
    }

    /// Tries to take it down until nothing is left.
    async fn retry(&self, app: &App) {
        while let Err(reason) = self.take_down(&app.isolated.workers).await {
            tracing::warn!(session = %self.id, %reason, "an isolated session is not gone yet");
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Ends everything of the session and waits until it is gone. May be repeated.
    async fn take_down(&self, workers: &Workers<Serving>) -> Result<(), String> {
        self.kill();
        // Its task lets go of what it holds.
        let _ = tokio::time::timeout(DEATH, self.lived.cancelled()).await;
        // Requests for files come to their end first, within reason.
        let _ = tokio::time::timeout(LEASE, self.leases.acquire_many(LEASES)).await;
        self.leases.close();
        workers.forget_if(|serving| std::ptr::eq(Arc::as_ptr(&serving.0), self));
        let (process, serving) = {
            let mut state = self.state();
            state.mounts = None;
            (state.process.as_ref().and_then(|fd| fd.try_clone().ok()), state.workers.clone())
        };
        let gone = tokio::task::spawn_blocking(move || {
            for worker in &serving {
                let _ = pidfd_send_signal(worker, Signal::KILL);
            }
            let end = std::time::Instant::now() + DEATH;
            let left = || end.saturating_duration_since(std::time::Instant::now());
            process.is_none_or(|process| waited(&process, left()))
                && serving.iter().all(|worker| waited(worker, left()))
        });
        if !gone.await.unwrap_or(false) {
            return Err("its processes do not die".to_owned());
        }
        {
            let mut state = self.state();
            state.process = None;
            state.workers.clear();
        }
        if self.on_disk { remove_upper(&self.link, &self.id).await } else { Ok(()) }
    }

    fn kill(&self) {
        if let Some(process) = &self.state().process {
            // The first process of the session: the kernel kills all others with it.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }
}

/// An answer about files, during which they stay.
struct Leased {
    body: axum::body::Body,
    _lease: tokio::sync::OwnedSemaphorePermit,
}

impl http_body::Body for Leased {
    type Data = bytes::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Self::Data>, Self::Error>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}
