//! Between the daemon and init: the daemon runs hooks and is bound anew, init owns the entrypoint.
//!
//! The daemon says a word in a document whose descriptor it sends, since an environment may be larger than a message
//! of a socket; init answers what was done where the word asks for something.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use osb_protocol::execd::RuntimeInitRequest;
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};

use super::orders::{Orders, read};

/// What the daemon wants of init.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Word {
    /// Start the entrypoint, with its own environment or with this one.
    Start(Option<Vec<(OsString, OsString)>>),
    /// End the entrypoint and whatever it has started.
    End,
    /// Do not start the entrypoint, for this reason, but leave.
    Refuse(String),
    /// For the daemon that comes when this one dies.
    Remember(Box<RuntimeInitRequest>),
}

/// Init's answer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Done {
    /// It was done.
    Well,
    /// It was not, for this reason.
    Badly(String),
}

/// A document in memory.
pub(super) fn document(content: &impl Serialize) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("word", MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(&serde_json::to_vec(content)?)?;
    Ok(file.into())
}

/// Init as the daemon sees it.
#[derive(Debug)]
pub struct Superior {
    socket: Arc<Mutex<Orders>>,
    started: AtomicBool,
}

impl Superior {
    pub(super) fn new(socket: Orders, started: bool) -> Self {
        Self { socket: Arc::new(Mutex::new(socket)), started: AtomicBool::new(started) }
    }

    /// Whether the entrypoint was ever started.
    pub(crate) fn has_started(&self) -> bool {
        self.started.load(Ordering::Relaxed)
    }

    /// Has the entrypoint started as it was ordered.
    pub(crate) async fn start(&self) -> Result<(), String> {
        self.started.store(true, Ordering::Relaxed);
        self.ask(Word::Start(None)).await
    }

    /// Has the entrypoint started with this environment.
    pub(crate) async fn start_with(&self, env: &[(OsString, OsString)]) -> Result<(), String> {
        self.started.store(true, Ordering::Relaxed);
        self.ask(Word::Start(Some(env.to_vec()))).await
    }

    /// Has the entrypoint and whatever it has started ended.
    pub(crate) async fn end_entrypoint(&self) -> Result<(), String> {
        self.ask(Word::End).await
    }

    /// Gives the sandbox up.
    pub(crate) fn refuse(&self, why: &str) {
        self.tell(&Word::Refuse(why.to_owned()));
    }

    /// Leaves word for the daemon that comes when this one dies.
    pub(crate) fn remember(&self, request: RuntimeInitRequest) {
        self.tell(&Word::Remember(Box::new(request)));
    }

    fn tell(&self, word: &Word) {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        match document(word) {
            Ok(document) => socket.pass_on(&document, None),
            Err(error) => tracing::error!(%error, "init could not be told"),
        }
    }

    async fn ask(&self, word: Word) -> Result<(), String> {
        let socket = Arc::clone(&self.socket);
        let asked = move || {
            let socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
            socket.pass_on(&document(&word)?, None);
            match socket.receive()? {
                Some(fds) => read::<Done>(fds.first().ok_or(std::io::ErrorKind::InvalidData)?),
                None => Err(std::io::Error::other("it has gone")),
            }
        };
        match tokio::task::spawn_blocking(asked).await {
            Ok(Ok(Done::Well)) => Ok(()),
            Ok(Ok(Done::Badly(why))) => Err(why),
            Ok(Err(error)) => Err(format!("init gave no answer: {error}")),
            Err(error) => Err(format!("init gave no answer: {error}")),
        }
    }
}
