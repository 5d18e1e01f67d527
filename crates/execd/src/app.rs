//! State shared by all request handlers.

use std::sync::Arc;

use osb_protocol::boot::{LineEndings, UsageFds};

use crate::account_cache::AccountCache;
use crate::binding::{Binding, Current};
use crate::command::registry::Registry;
use crate::lifecycle::Lifecycle;
use crate::telemetry::Telemetry;
use crate::{isolated, pty, session, usage};

/// Handle on the daemon's state. Cloning costs one reference count.
#[derive(Clone, Debug)]
pub struct App(Arc<Shared>);

impl std::ops::Deref for App {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// What [`App`] points to. Nothing here changes after the start except the binding and inside the registries.
#[derive(Debug)]
pub struct Shared {
    /// Id, token, variables and telemetry, which the control plane may change.
    pub binding: Current,
    /// The image's user in its configuration's spelling; `None` is root.
    pub user: Option<String>,
    /// Working directory of commands that name none.
    pub cwd: std::path::PathBuf,
    /// How line ends of command output are sent.
    pub line_endings: LineEndings,
    /// What only the embedded engine tells; empty elsewhere.
    pub limits: Limits,
    /// The image's accounts.
    pub accounts: Arc<AccountCache>,
    /// The commands that can be asked about.
    pub commands: Registry,
    /// The shells that keep their state.
    pub sessions: session::registry::Registry,
    /// The terminals.
    pub terminals: pty::registry::Registry,
    /// What is counted for a collector, where there is one.
    pub telemetry: Option<Box<Telemetry>>,
    /// Hooks, and whether work may begin.
    pub lifecycle: Lifecycle,
    /// The shells in namespaces of their own.
    pub isolated: isolated::registry::Registry,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            binding: Current::default(),
            user: None,
            cwd: "/".into(),
            line_endings: LineEndings::default(),
            limits: Limits::default(),
            accounts: Arc::default(),
            commands: Registry::default(),
            sessions: session::registry::Registry::default(),
            terminals: pty::registry::Registry::default(),
            telemetry: None,
            lifecycle: Lifecycle::default(),
            isolated: isolated::registry::Registry::default(),
        }
    }
}

/// Limits and statistics of the work's cgroups, as the engine hands them over.
#[derive(Debug, Default)]
pub struct Limits {
    /// Memory limit of the work.
    pub memory_bytes: Option<u64>,
    /// CPU limit in thousandths of a core.
    pub cpu_millis: Option<u64>,
    /// Inherited descriptors of statistics files; read them with `pread` at offset 0, never close them.
    pub usage: UsageFds,
    /// Inherited descriptors into which a process writes `0` to be moved under the work's limits.
    pub work_cgroup: Vec<i32>,
}

impl Limits {
    /// Out-of-memory kills in the work's cgroup so far, when that can be known.
    #[must_use]
    pub fn oom_kills(&self) -> Option<u64> {
        usage::oom_kills(self.usage.oom_events?)
    }
}

impl App {
    /// Wraps the state.
    #[must_use]
    pub fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }

    /// What the daemon is bound to now.
    #[must_use]
    pub fn binding(&self) -> Arc<Binding> {
        self.binding.get()
    }
}
