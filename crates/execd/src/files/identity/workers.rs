//! The processes that serve files as others: started when one is asked for, kept a moment for the next request of
//! the same identity, ended by closing their socket.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use http::{Response, StatusCode};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use osb_protocol::execd::code;
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;

use super::worker::{FLAG, READY};
use super::{Who, unavailable};
use crate::accounts::Accounts;
use crate::app::App;
use crate::http::ApiError;
use crate::process::spawn::{Program, Spawned, Stdio, spawn};
use crate::process::{exit, watch};

/// Processes at a time. Further requests wait for one of them to end.
const MAX_WORKERS: usize = 32;
/// Of these, how many may wait for a request.
const MAX_IDLE: usize = 8;
/// How long.
const IDLE: Duration = Duration::from_secs(2);
/// A process that has not said a word by then never will.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests wait that long for room; places are held by clients that take their time.
const ROOM_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest first word.
const MAX_WORD: usize = 4096;

/// All workers of the daemon.
#[derive(Debug, Clone, Default)]
pub(super) struct Workers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Held until a process has been reaped.
    permits: Arc<Semaphore>,
    /// The longest unused one comes first.
    idle: Mutex<VecDeque<Idle>>,
}

impl Default for Shared {
    fn default() -> Self {
        Self { permits: Arc::new(Semaphore::new(MAX_WORKERS)), idle: Mutex::default() }
    }
}

/// A worker without work.
#[derive(Debug)]
struct Idle {
    /// Tells it from itself at another time.
    since: Instant,
    worker: Worker,
}

/// A process of one identity, for one request at a time. Dropping it closes the connection; the process finishes
/// the change that it is at, so that no tree is left half moved, and ends.
#[derive(Debug)]
pub(super) struct Worker {
    who: Who,
    /// From which its groups were read: with other accounts it is not the same identity any more.
    accounts: Arc<Accounts>,
    sender: SendRequest<Body>,
    _connection: AbortOnDropHandle<()>,
}

impl Workers {
    /// Has a worker of that identity take the request. Dropping the future ends that worker.
    pub(super) async fn send(
        &self,
        who: Who,
        app: &App,
        mut request: Request,
    ) -> Result<(Worker, Response<Incoming>), ApiError> {
        let accounts = {
            let app = app.clone();
            tokio::task::spawn_blocking(move || app.accounts.get())
                .await
                .map_err(|error| unavailable(who, error))?
        };
        // One that waited may have been killed.
        while let Some(mut worker) = self.waiting(who, &accounts) {
            match worker.sender.try_send_request(request).await {
                Ok(answer) => return Ok((worker, answer)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(broken_off(who, &error.into_error())),
                },
            }
        }
        let mut worker = self.start(who, accounts).await?;
        let answer = worker.sender.send_request(request).await.map_err(|error| broken_off(who, &error))?;
        Ok((worker, answer))
    }

    /// Keeps a worker whose answer was read to its end for the next request.
    pub(super) fn give_back(&self, mut worker: Worker) {
        // Without a runtime the daemon is ending.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let workers = self.clone();
        runtime.spawn(async move {
            // A worker that still reads its request is not ready.
            let ready = tokio::time::timeout(IDLE, worker.sender.ready()).await;
            // Somebody may wait for room.
            if !matches!(ready, Ok(Ok(()))) || workers.0.permits.available_permits() == 0 {
                return;
            }
            let since = Instant::now();
            let surplus = {
                let mut idle = workers.idle();
                idle.push_back(Idle { since, worker });
                if idle.len() > MAX_IDLE { idle.pop_front() } else { None }
            };
            drop(surplus);
            tokio::time::sleep(IDLE).await;
            // Also takes what has come at the very same instant, which has waited as long.
            workers.idle().retain(|idle| idle.since != since);
        });
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self, who: Who, accounts: &Arc<Accounts>) -> Option<Worker> {
        let mut idle = self.idle();
        let at = idle.iter().rposition(|Idle { worker, .. }| {
            worker.who == who && Arc::ptr_eq(&worker.accounts, accounts) && worker.sender.is_ready()
        })?;
        idle.remove(at).map(|idle| idle.worker)
    }

    /// Starts a worker once there is room for one more.
    async fn start(&self, who: Who, accounts: Arc<Accounts>) -> Result<Worker, ApiError> {
        let permit = match Arc::clone(&self.0.permits).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let oldest = self.idle().pop_front();
                drop(oldest);
                let room = Arc::clone(&self.0.permits).acquire_owned();
                let waited = tokio::time::timeout(ROOM_TIMEOUT, room).await.map_err(|_| no_room())?;
                // The semaphore is never closed.
                waited.map_err(|error| unavailable(who, error))?
            }
        };
        // A client that leaves meanwhile must not leave a process that nobody collects.
        let started = tokio::spawn(start(who, accounts, permit)).await;
        started.unwrap_or_else(|error| Err(unavailable(who, error)))
    }
}

async fn start(who: Who, accounts: Arc<Accounts>, permit: OwnedSemaphorePermit) -> Result<Worker, ApiError> {
    let failed = |error: io::Error| unavailable(who, error);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    let spawned = tokio::task::spawn_blocking(move || spawn_worker(who, &theirs)).await;
    let Spawned { pidfd, .. } = spawned.map_err(|error| unavailable(who, error))?.map_err(failed)?;
    match watch::readable(pidfd) {
        Ok(pidfd) => {
            tokio::spawn(async move {
                let _ = pidfd.readable().await;
                let _ = exit::reap(pidfd.get_ref());
                drop(permit);
            });
        }
        Err((pidfd, error)) => {
            // It ends without its socket.
            drop(ours);
            let _ = tokio::task::spawn_blocking(move || exit::wait_blocking(&pidfd)).await;
            return Err(failed(error));
        }
    }
    ours.set_nonblocking(true).map_err(failed)?;
    let mut socket = UnixStream::from_std(ours).map_err(failed)?;
    let mut word = String::new();
    let heard = tokio::time::timeout(START_TIMEOUT, first_word(&mut socket, &mut word)).await;
    match heard {
        Ok(Ok(())) if word == READY => {}
        Ok(Ok(())) if word.is_empty() => return Err(unavailable(who, "the process ended at its start")),
        Ok(Ok(())) => return Err(unavailable(who, word)),
        Ok(Err(error)) => return Err(failed(error)),
        Err(_) => {
            return Err(unavailable(who, "the process does not start; the sandbox may be short of memory"));
        }
    }
    let (sender, connection) =
        http1::handshake(TokioIo::new(socket)).await.map_err(|error| unavailable(who, error))?;
    let connection = tokio::spawn(async move {
        // A failure shows in the request that it hits.
        let _ = connection.await;
    });
    Ok(Worker { who, accounts, sender, _connection: AbortOnDropHandle::new(connection) })
}

/// A line without its end. The worker says nothing more before it is asked, so nothing of an answer is taken.
async fn first_word(socket: &mut UnixStream, word: &mut String) -> io::Result<()> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\n") && bytes.len() < MAX_WORD {
        if socket.read_buf(&mut bytes).await? == 0 {
            break;
        }
    }
    *word = String::from_utf8_lossy(&bytes).trim_end().to_owned();
    Ok(())
}

/// Executes this very program again. It is still the daemon's user, and becomes the other one by itself: the
/// program need not be anybody else's to execute.
fn spawn_worker(who: Who, socket: &std::os::unix::net::UnixStream) -> io::Result<Spawned> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let ids = CString::new(format!("{}:{}", who.uid, who.gid))?;
    let program = Program {
        candidates: vec![c"/proc/self/exe".to_owned()],
        argv: vec![c"execd".to_owned(), CString::new(format!("--{FLAG}"))?, ids],
        env: Vec::new(),
        cwd: c"/".to_owned(),
        identity: None,
        tag: None,
    };
    let stdio = Stdio { stdin: socket.as_fd(), stdout: null.as_fd(), stderr: null.as_fd() };
    spawn(&program, stdio, &[]).map_err(io::Error::other)
}

fn no_room() -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        code::SERVICE_UNAVAILABLE,
        format!("{MAX_WORKERS} transfers of files as other users are under way; end some or try again later"),
    )
}

fn broken_off(who: Who, error: &hyper::Error) -> ApiError {
    ApiError::runtime(format!(
        "the process that serves files as {}:{} broke off ({error}); the sandbox may be short of memory: try again",
        who.uid, who.gid
    ))
}
