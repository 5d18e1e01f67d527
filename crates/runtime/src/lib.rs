//! What the server sees of a runtime: the sandbox to make, the handle to keep, the events to follow.
//!
//! This crate knows neither HTTP nor Linux. A runtime keeps no truth of its own: the server's store does, and
//! hands each row's [`Handle`] back after a restart.

mod error;
mod image;
mod spec;
mod stream;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use osb_protocol::ids::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

pub use error::{ConnectError, CreateError, FetchError, RuntimeError};
pub use image::{Credentials, Fetch, FetchPhase, FetchProgress, Image, ImageSource, Platform};
pub use spec::{Limits, SandboxSpec};
pub use stream::Stream;

/// What a runtime remembers of one sandbox, opaque to the server, which stores it with the row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Handle(pub serde_json::Value);

/// Where the time of a create went, in order: name of the stage and microseconds.
pub type Stages = Vec<(&'static str, u32)>;

/// A sandbox whose entrypoint is being started. What is to be stored is known already, so that storing it and waiting
/// for the entrypoint need not follow each other.
pub struct Created {
    /// The id: the one asked for, or one the runtime had prepared.
    pub id: SandboxId,
    /// To be stored before the create is answered.
    pub handle: Handle,
    /// Ready when the entrypoint has been executed. On error nothing is left. The start goes on when this is dropped.
    pub started: BoxFuture<'static, Result<Stages, CreateError>>,
}

impl std::fmt::Debug for Created {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Created").field("id", &self.id).finish_non_exhaustive()
    }
}

/// How a sandbox ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// False: exit code 0 (`Terminated`). True: anything else (`Failed`).
    pub failed: bool,
    /// Stable word such as `CONTAINER_EXITED`, `CONTAINER_EXITED_ERROR` or `OOM_KILLED`.
    pub reason: String,
    /// For people; names the exit code.
    pub message: String,
    /// Exit code, 128 + signal; absent when nobody could tell.
    pub exit_code: Option<i32>,
}

/// What happens to sandboxes without the server's doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuntimeEvent {
    /// The entrypoint or PID 1 is gone; everything else of the sandbox has been stopped. Its record and files
    /// stay until `delete`.
    Ended {
        /// Which.
        id: SandboxId,
        /// How.
        ended: Ended,
    },
}

/// Which end of a sandbox to connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The daemon, by the socket that only the server reaches.
    Execd,
    /// A TCP port on the sandbox's loopback.
    Port(u16),
}

/// State found for a stored sandbox at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adopted {
    /// It still runs.
    Running,
    /// It ended while nobody looked, or cannot be found.
    Ended(Ended),
}

/// A place where sandboxes run.
///
/// Calls that change something run to their end even if the caller's future is dropped; the server spawns them.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// Looks for an image on this machine. Quick: nothing is fetched. `None`: [`Runtime::fetch_image`] may get it.
    async fn find_image(&self, source: &ImageSource) -> Result<Option<Image>, CreateError>;

    /// Whether there is room for another sandbox, to be asked before an image is fetched for it. No promise: a create
    /// may still find that there is none.
    ///
    /// # Errors
    /// [`CreateError::Exhausted`].
    fn room(&self) -> Result<(), CreateError>;

    /// Gets an image from where the runtime's images come from. Calls for the same image share one fetch.
    fn fetch_image(&self, source: ImageSource) -> Fetch;

    /// Makes a sandbox of an image and begins to start its entrypoint. On error nothing is left.
    async fn create(&self, spec: SandboxSpec, image: Image) -> Result<Created, CreateError>;

    /// Takes back sandboxes of an earlier life, in the order given, and removes whatever this instance owns that
    /// no entry names. Called once, before anything else.
    async fn adopt(&self, known: Vec<(SandboxId, Handle)>)
    -> Result<Vec<(SandboxId, Adopted)>, RuntimeError>;

    /// Ends a sandbox and frees all it had. Returns as soon as it can no longer be reached; the rest goes on
    /// behind, see [`Runtime::settled`]. An unknown id is no error.
    async fn delete(&self, id: SandboxId) -> Result<(), RuntimeError>;

    /// Waits until everything of deleted sandboxes is gone.
    async fn settled(&self);

    /// The stream of events; can be taken once.
    fn events(&self) -> Option<mpsc::UnboundedReceiver<RuntimeEvent>>;

    /// Opens a connection into a sandbox.
    async fn connect(&self, id: SandboxId, target: Target) -> Result<Stream, ConnectError>;

    /// The entrypoint's newest output, at most `max_bytes`.
    async fn entrypoint_log(&self, id: SandboxId, max_bytes: usize) -> Result<Vec<u8>, RuntimeError>;

    /// Stops helpers. Sandboxes go on.
    async fn shutdown(&self);
}
