//! What a sandbox shall be.

use osb_protocol::boot::LineEndings;
use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::SandboxLifecycle;
use osb_protocol::quantity::{CpuNanos, MemoryBytes};

/// A sandbox to make. All members are proven; nothing is parsed again below.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    /// The id to use; `None` lets the runtime take a prepared one, which is faster.
    pub id: Option<SandboxId>,
    /// Program and arguments. Never empty.
    pub entrypoint: Vec<String>,
    /// The request's variables; they win over the image's.
    pub env: Vec<(String, String)>,
    /// What the request asks for; the runtime fills in its defaults.
    pub limits: Limits,
    /// How command output treats line ends.
    pub line_endings: LineEndings,
    /// Commands beside the entrypoint. The create waits for the one before it.
    pub lifecycle: Option<SandboxLifecycle>,
}

/// Limits of the work inside a sandbox; `None` takes the runtime's default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// CPU.
    pub cpu: Option<CpuNanos>,
    /// Memory.
    pub memory: Option<MemoryBytes>,
    /// Number of processes and threads.
    pub pids: Option<u32>,
    /// Bytes on disk.
    pub disk: Option<MemoryBytes>,
}
