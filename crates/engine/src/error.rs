//! What can go wrong.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why the engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Not root.
    #[error("the embedded engine needs root: start it with sudo or as a system service")]
    NotRoot,
    /// Another server holds the directory.
    #[error("'{}' is in use by another server: stop it or choose another data directory", .0.display())]
    InUse(PathBuf),
    /// A setting cannot be used.
    #[error("{0}")]
    Setting(String),
    /// The machine lacks something.
    #[error("{0}")]
    Missing(String),
    /// A step failed.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl StartError {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

/// Why a sandbox was not made. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The entrypoint cannot be executed.
    #[error("entrypoint '{program}' cannot be executed: {reason}")]
    Entrypoint {
        /// First word of the entrypoint.
        program: String,
        /// Why.
        reason: String,
    },
    /// The hook before the entrypoint has failed.
    #[error("{0}")]
    Hook(String),
    /// A parameter cannot be honoured.
    #[error("{0}")]
    Invalid(String),
    /// A resource is used up.
    #[error("no room for another sandbox: {what}")]
    Exhausted {
        /// Which.
        what: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The machine failed.
    #[error("{0}")]
    Failed(String),
}

/// Why a connection was not made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No such sandbox, or it has ended.
    #[error("sandbox is not running")]
    NotRunning,
    /// Nothing listens there, or the machine failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A call on the engine failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No such sandbox.
    #[error("sandbox is not known to the engine")]
    NotFound,
    /// The machine failed.
    #[error("{0}")]
    Failed(String),
}
