//! The server's side of the spawners: requests in parallel, replies by number, new ones for dead ones.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, oneshot};

use super::handle::{Helper, PATIENCE, Recipe};
use super::message::{Hello, Spawn, Spawned};
use crate::sys::scm;

/// Requests that a spawner may have before it: one it works on, one that it finds when it is done.
const DEPTH: usize = 2;
/// Pause before another attempt to start a spawner that does not start.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// A reply and the pidfd that came with it.
pub(crate) type Reply = (Spawned, Option<OwnedFd>);

/// All spawners of an engine.
#[derive(Debug)]
pub(crate) struct Spawners {
    recipe: Recipe,
    hello: Hello,
    execd: File,
    live: Mutex<Vec<Arc<Spawner>>>,
    /// Free places before spawners. May be too many for a moment after one has died, never too few.
    places: Semaphore,
    next: Mutex<u64>,
    closed: std::sync::atomic::AtomicBool,
}

#[derive(Debug)]
struct Spawner {
    socket: AsyncFd<OwnedFd>,
    /// Kept for its end.
    helper: Helper,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Set when the spawner has died.
    gone: bool,
    replies: HashMap<u64, oneshot::Sender<Reply>>,
}

/// Why there is no reply.
#[derive(Debug)]
pub(crate) enum Lost {
    /// Nothing was sent.
    NotSent(io::Error),
    /// The spawner died or was stuck; whether it had started something is not known.
    Unknown,
}

impl Spawners {
    /// Starts `count` spawners. Must be called within a tokio runtime.
    pub(crate) fn start(recipe: Recipe, hello: Hello, execd: File, count: usize) -> io::Result<Arc<Self>> {
        let spawners = Arc::new(Self {
            recipe,
            hello,
            execd,
            live: Mutex::default(),
            places: Semaphore::new(0),
            next: Mutex::new(0),
            closed: std::sync::atomic::AtomicBool::new(false),
        });
        for _ in 0..count.max(1) {
            spawners.add()?;
        }
        Ok(spawners)
    }

    fn add(self: &Arc<Self>) -> io::Result<()> {
        let (mut helper, _) = self.recipe.start(&self.hello, Some(&self.execd))?;
        let socket = helper.take_socket().ok_or(io::ErrorKind::NotConnected)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = crate::sys::watched(socket, Interest::READABLE | Interest::WRITABLE)?;
        let spawner = Arc::new(Spawner { socket, helper, waiting: Mutex::default() });
        lock(&self.live).push(Arc::clone(&spawner));
        self.places.add_permits(DEPTH);
        tokio::spawn(read_replies(Arc::downgrade(self), spawner));
        Ok(())
    }

    /// Sends a request and waits for its reply.
    pub(crate) async fn request(&self, mut spawn: Spawn, fds: &[BorrowedFd<'_>]) -> Result<Reply, Lost> {
        loop {
            let Ok(place) = self.places.acquire().await else {
                return Err(Lost::NotSent(io::Error::other("the engine has been shut down")));
            };
            let Some((spawner, seq, reply)) = self.enlist() else {
                // The place was before a spawner that has died; its successor brings new ones.
                place.forget();
                continue;
            };
            spawn.seq = seq;
            if let Err(error) = spawner.send(&spawn, fds).await {
                lock(&spawner.waiting).replies.remove(&seq);
                if spawner.is_gone() {
                    place.forget();
                    continue;
                }
                return Err(Lost::NotSent(error));
            }
            return match tokio::time::timeout(PATIENCE, reply).await {
                Ok(Ok(reply)) => Ok(reply),
                Ok(Err(_)) => {
                    place.forget();
                    Err(Lost::Unknown)
                }
                Err(_) => {
                    tracing::error!(pid = spawner.helper.pid(), "a spawner is stuck and is replaced");
                    spawner.kill();
                    place.forget();
                    Err(Lost::Unknown)
                }
            };
        }
    }

    /// Picks the spawner with the least to do and registers a reply.
    fn enlist(&self) -> Option<(Arc<Spawner>, u64, oneshot::Receiver<Reply>)> {
        let seq = {
            let mut next = lock(&self.next);
            *next += 1;
            *next
        };
        let live = lock(&self.live);
        let spawner = live
            .iter()
            .filter_map(|spawner| {
                let waiting = lock(&spawner.waiting);
                (!waiting.gone && waiting.replies.len() < DEPTH).then_some((waiting.replies.len(), spawner))
            })
            .min_by_key(|(load, _)| *load)
            .map(|(_, spawner)| Arc::clone(spawner))?;
        let (sender, receiver) = oneshot::channel();
        let mut waiting = lock(&spawner.waiting);
        if waiting.gone {
            return None;
        }
        waiting.replies.insert(seq, sender);
        drop(waiting);
        Some((spawner, seq, receiver))
    }

    /// Process ids, for tests and diagnostics.
    pub(crate) fn pids(&self) -> Vec<u32> {
        lock(&self.live).iter().map(|spawner| spawner.helper.pid()).collect()
    }

    /// Ends the spawners. Sandboxes go on.
    pub(crate) fn close(&self) {
        self.closed.store(true, std::sync::atomic::Ordering::SeqCst);
        self.places.close();
        for spawner in lock(&self.live).drain(..) {
            spawner.kill();
        }
    }

    /// Puts a new spawner in the place of one that has died.
    async fn replace(self: Arc<Self>, dead: &Arc<Spawner>) {
        lock(&self.live).retain(|spawner| !Arc::ptr_eq(spawner, dead));
        while !self.closed.load(std::sync::atomic::Ordering::SeqCst) {
            let spawners = Arc::clone(&self);
            let runtime = tokio::runtime::Handle::current();
            let added = tokio::task::spawn_blocking(move || {
                let _in_runtime = runtime.enter();
                spawners.add()
            })
            .await;
            match added {
                Ok(Ok(())) => return,
                Ok(Err(error)) => tracing::error!(%error, "a spawner cannot be started; trying again"),
                Err(error) => tracing::error!(%error, "a spawner cannot be started; trying again"),
            }
            tokio::time::sleep(RESTART_PAUSE).await;
        }
    }
}

impl Spawner {
    async fn send(&self, spawn: &Spawn, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(spawn)?;
        // The pair is empty but for requests of ours, so this nearly never waits.
        self.socket.async_io(Interest::WRITABLE, |socket| scm::send(socket.as_fd(), &bytes, fds, false)).await
    }

    fn is_gone(&self) -> bool {
        lock(&self.waiting).gone
    }

    fn kill(&self) {
        if let Some(pid) = i32::try_from(self.helper.pid()).ok().and_then(rustix::process::Pid::from_raw) {
            // The number is ours until `helper` has been waited for, which its drop does.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Hands replies to those who wait, until the spawner is gone.
async fn read_replies(spawners: Weak<Spawners>, spawner: Arc<Spawner>) {
    let mut buffer = vec![0; scm::MAX_BYTES];
    let error = loop {
        let mut fds = Vec::new();
        let received = spawner
            .socket
            .async_io(Interest::READABLE, |socket| {
                scm::receive(
                    socket.as_fd(),
                    &mut buffer,
                    &mut fds,
                    RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
                )
            })
            .await;
        let reply: Spawned = match received {
            Ok(Some(len)) => match serde_json::from_slice(&buffer[..len]) {
                Ok(reply) => reply,
                Err(error) => break error.to_string(),
            },
            Ok(None) => break "it ended".to_owned(),
            Err(error) => break error.to_string(),
        };
        let waiting = lock(&spawner.waiting).replies.remove(&reply.seq);
        if let Some(waiting) = waiting {
            // Whoever asked may have given up; the descriptor is then closed and the slot cleared by them.
            let _ = waiting.send((reply, fds.pop()));
        }
    };
    {
        let mut waiting = lock(&spawner.waiting);
        waiting.gone = true;
        // Dropping the senders tells the askers.
        waiting.replies.clear();
    }
    let Some(spawners) = spawners.upgrade() else { return };
    if !spawners.closed.load(std::sync::atomic::Ordering::SeqCst) {
        tracing::warn!(pid = spawner.helper.pid(), reason = error, "a spawner is gone and is replaced");
        spawners.replace(&spawner).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves its data whole at each step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
