//! The embedded Linux engine: images, network slots, and the path from a prepared slot to a running sandbox.

mod caps;
mod cgroup;
mod config;
mod error;
mod helper;
pub mod image;
pub mod net;
mod seccomp;
mod sys;

pub use caps::{CapSet, DEFAULT_DROP, UnknownCapability};
pub use config::{EngineConfig, ExecdSource, Limits, UserNamespace};
pub use error::{ConnectError, CreateError, EngineError, StartError};
pub use helper::{PREPARER_ARG, SPAWNER_ARG, helper_main};
