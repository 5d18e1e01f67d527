//! The embedded Linux engine: images, network slots, and the path from a prepared slot to a running sandbox.
//!
//! ```text
//! Engine ── pool thread ──▶ preparer process: user namespace, overlays (detached mounts)
//!    │         ├── network slot, cgroups, socket: a *slot*, made ready for one image
//!    │         └── spawner process ──clone──▶ execd as PID 1 of a sandbox on *standby*
//!    ├── create: order ──▶ execd of a standby (or of a sandbox started now) ──▶ entrypoint
//!    ├── watch: one pidfd per sandbox ──▶ events
//!    └── retire threads: slots cleared for the next sandbox, files deleted
//! ```
//!
//! Sandboxes do not depend on the engine being alive: the next one takes them back by their [`Record`]s. Whoever
//! links this crate hands the command lines of helpers to [`helper_main`] before anything else.

mod adopt;
mod base;
mod boot;
mod caps;
mod cgroup;
mod check;
mod config;
mod connect;
mod create;
mod engine;
mod error;
mod helper;
mod identity;
pub mod image;
mod kept;
pub mod net;
mod pool;
mod retire;
mod room;
mod sandbox;
mod slot;
mod standby;
mod supervise;
mod sys;
mod tree;

pub use adopt::Adopted;
pub use caps::{CapSet, DEFAULT_DROP, UnknownCapability};
pub use check::{CheckItem, CheckResult, check};
pub use config::{EngineConfig, ExecdSource, Limits, UserNamespace};
pub use create::{CreateParams, CreatedSandbox, Placed};
pub use engine::{Engine, Event};
pub use error::{ConnectError, CreateError, EngineError, StartError};
pub use helper::{PREPARER_ARG, SPAWNER_ARG, helper_main};
pub use sandbox::{Ended, Record};
