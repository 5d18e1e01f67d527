//! Processes that serve files in the daemon's stead, as somebody else or in other mounts: started when one is asked
//! for, kept a moment for the next request of the same kind, ended by closing their socket. A request goes to them as
//! it is, but for its prefix.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use osb_protocol::execd::{ACCESS_TOKEN_HEADER, code};
use tokio::io::AsyncReadExt as _;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;

use crate::http::ApiError;
use crate::process::{exit, watch};

/// What a worker says when it is what it should be; anything else is the reason why it is not.
pub(crate) const READY: &str = "ready";

/// What makes one worker as good as another.
pub(crate) trait Kind: Clone + PartialEq + std::fmt::Debug + Send + Sync + 'static {
    /// Starts a process that serves the connection; gives its pidfd. May block.
    fn start(&self, connection: std::os::unix::net::UnixStream) -> io::Result<OwnedFd>;

    /// That there is none, or that it broke off.
    fn unavailable(&self, reason: &dyn std::fmt::Display) -> ApiError;
}

/// Headers of one hop, and what is none of the worker's business.
const NOT_FORWARDED: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    // The daemon has answered that itself.
    header::EXPECT,
    HeaderName::from_static(ACCESS_TOKEN_HEADER),
];

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

/// All workers of the daemon of one sort.
#[derive(Debug)]
pub(crate) struct Workers<K>(Arc<Shared<K>>);

#[derive(Debug)]
struct Shared<K> {
    /// Held until a process has been reaped.
    permits: Arc<Semaphore>,
    /// The longest unused one comes first.
    idle: Mutex<VecDeque<Idle<K>>>,
}

impl<K> Clone for Workers<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K> Default for Workers<K> {
    fn default() -> Self {
        Self(Arc::new(Shared { permits: Arc::new(Semaphore::new(MAX_WORKERS)), idle: Mutex::default() }))
    }
}

/// A worker without work.
#[derive(Debug)]
struct Idle<K> {
    /// Tells it from itself at another time.
    since: Instant,
    worker: Worker<K>,
}

/// A process of one kind, for one request at a time. Dropping it closes the connection; the process finishes the
/// change that it is at, so that no tree is left half moved, and ends.
#[derive(Debug)]
pub(crate) struct Worker<K> {
    kind: K,
    sender: SendRequest<Body>,
    _connection: AbortOnDropHandle<()>,
}

impl<K: Kind> Workers<K> {
    /// Has a worker of that kind answer the request, whose path is what the worker shall see.
    pub(crate) async fn forward(&self, kind: &K, request: Request) -> Result<Response, ApiError> {
        let (mut head, body) = request.into_parts();
        head.extensions.clear();
        clean(&mut head.headers);
        head.headers.insert(header::HOST, HeaderValue::from_static("files"));
        if body.size_hint().exact().is_none() {
            // Without this the client leaves out a body whose length it does not know.
            head.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        let (worker, answer) = self.send(kind, Request::from_parts(head, body)).await?;
        let (mut head, body) = answer.into_parts();
        clean(&mut head.headers);
        head.extensions.clear();
        let answer = Answer { body, ended: false, worker: Some(worker), workers: self.clone() };
        Ok(Response::from_parts(head, Body::new(answer)))
    }

    /// Has a worker of that kind take the request. Dropping the future ends that worker.
    async fn send(
        &self,
        kind: &K,
        mut request: Request,
    ) -> Result<(Worker<K>, http::Response<Incoming>), ApiError> {
        // One that waited may have been killed.
        while let Some(mut worker) = self.waiting(kind) {
            match worker.sender.try_send_request(request).await {
                Ok(answer) => return Ok((worker, answer)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(broken_off(&error.into_error())),
                },
            }
        }
        let mut worker = self.start(kind.clone()).await?;
        let answer = worker.sender.send_request(request).await.map_err(|error| broken_off(&error))?;
        Ok((worker, answer))
    }

    /// Keeps a worker whose answer was read to its end for the next request.
    fn give_back(&self, mut worker: Worker<K>) {
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

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle<K>>> {
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self, kind: &K) -> Option<Worker<K>> {
        let mut idle = self.idle();
        let at =
            idle.iter().rposition(|Idle { worker, .. }| worker.kind == *kind && worker.sender.is_ready())?;
        idle.remove(at).map(|idle| idle.worker)
    }

    /// Ends such workers, of those that have no work.
    pub(crate) fn forget_if(&self, is_such: impl Fn(&K) -> bool) {
        self.idle().retain(|idle| !is_such(&idle.worker.kind));
    }

    /// Starts a worker once there is room for one more.
    async fn start(&self, kind: K) -> Result<Worker<K>, ApiError> {
        let permit = match Arc::clone(&self.0.permits).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let oldest = self.idle().pop_front();
                drop(oldest);
                let room = Arc::clone(&self.0.permits).acquire_owned();
                let waited = tokio::time::timeout(ROOM_TIMEOUT, room).await.map_err(|_| no_room())?;
                // The semaphore is never closed.
                waited.map_err(|error| kind.unavailable(&error))?
            }
        };
        // A client that leaves meanwhile must not leave a process that nobody collects.
        let started = tokio::spawn(start(kind.clone(), permit)).await;
        started.unwrap_or_else(|error| Err(kind.unavailable(&error)))
    }
}

async fn start<K: Kind>(kind: K, permit: OwnedSemaphorePermit) -> Result<Worker<K>, ApiError> {
    let failed = |error: io::Error| kind.unavailable(&error);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    let starter = kind.clone();
    let pidfd = tokio::task::spawn_blocking(move || starter.start(theirs)).await;
    let pidfd = pidfd.map_err(|error| kind.unavailable(&error))?.map_err(failed)?;
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
        Ok(Ok(())) if word.is_empty() => return Err(kind.unavailable(&"the process ended at its start")),
        Ok(Ok(())) => return Err(kind.unavailable(&word)),
        Ok(Err(error)) => return Err(failed(error)),
        Err(_) => {
            return Err(kind.unavailable(&"the process does not start; the sandbox may be short of memory"));
        }
    }
    let (sender, connection) =
        http1::handshake(TokioIo::new(socket)).await.map_err(|error| kind.unavailable(&error))?;
    let connection = tokio::spawn(async move {
        // A failure shows in the request that it hits.
        let _ = connection.await;
    });
    Ok(Worker { kind, sender, _connection: AbortOnDropHandle::new(connection) })
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

fn no_room() -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        code::SERVICE_UNAVAILABLE,
        format!(
            "{MAX_WORKERS} transfers of files through other processes are under way; end some or try again later"
        ),
    )
}

fn broken_off(error: &hyper::Error) -> ApiError {
    ApiError::runtime(format!(
        "the process that serves these files broke off ({error}); the sandbox may be short of memory: try again"
    ))
}

fn clean(headers: &mut HeaderMap) {
    for name in NOT_FORWARDED {
        headers.remove(name);
    }
}

/// A worker's answer, which gives the worker back when it has been read to its end. Dropped before that, it ends
/// the worker's connection and thereby the worker.
struct Answer<K: Kind> {
    body: Incoming,
    ended: bool,
    worker: Option<Worker<K>>,
    workers: Workers<K>,
}

impl<K: Kind> http_body::Body for Answer<K> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        this.ended = frame.is_none();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<K: Kind> Drop for Answer<K> {
    fn drop(&mut self) {
        if (self.ended || self.body.is_end_stream())
            && let Some(worker) = self.worker.take()
        {
            self.workers.give_back(worker);
        }
    }
}

impl<K: Kind> Unpin for Answer<K> {}
