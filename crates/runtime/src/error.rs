//! What can go wrong, in the words of the domain. The server alone turns these into status codes.

use std::time::Duration;

/// Why a sandbox was not made.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CreateError {
    /// No stored image and no alias has that name.
    #[error("image '{reference}' is not stored here{hint}")]
    ImageNotFound {
        /// As asked for.
        reference: String,
        /// What to do, beginning with `: ` or empty.
        hint: String,
    },
    /// The image could not be fetched.
    #[error("image '{reference}' could not be pulled: {error}")]
    Fetch {
        /// As asked for.
        reference: String,
        /// Why.
        error: FetchError,
    },
    /// The entrypoint cannot be executed.
    #[error("entrypoint '{program}' cannot be executed: {reason}")]
    Entrypoint {
        /// First word of the entrypoint.
        program: String,
        /// Why.
        reason: String,
    },
    /// The hook before the entrypoint has failed; names it, with the end of its output.
    #[error("{0}")]
    Hook(String),
    /// A member of the request cannot be honoured.
    #[error("{0}")]
    InvalidParameter(String),
    /// Memory, disk, process numbers or slots are used up.
    #[error("no room for another sandbox: {what}")]
    Exhausted {
        /// Which resource.
        what: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The machine failed.
    #[error("sandbox could not be started: {0}")]
    Failed(String),
}

/// Why an image could not be fetched. Texts tell what whoever asked can do and hold no secret.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FetchError {
    /// No such image, no right to it, damaged, or a source that does not answer.
    #[error("{0}")]
    Failed(String),
    /// The image is there, but not for the platform.
    #[error("{0}")]
    Platform(String),
    /// The source has had too many requests.
    #[error("{reason}")]
    Busy {
        /// In its words.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// It does not fit on the disk as things are.
    #[error("{reason}")]
    NoRoom {
        /// What is full, and what to do.
        reason: String,
        /// When to try again.
        retry_after: Duration,
    },
}

/// Why a call on the runtime failed.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No such sandbox here.
    #[error("sandbox is not known to the runtime")]
    NotFound,
    /// The machine failed.
    #[error("{0}")]
    Failed(String),
}

/// Why a connection was not made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No such sandbox here, or it has ended.
    #[error("sandbox is not running")]
    NotRunning,
    /// Nothing listens there, or the machine failed.
    #[error("connection failed: {0}")]
    Io(#[from] std::io::Error),
}
