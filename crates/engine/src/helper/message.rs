//! What server and helpers say to each other: one JSON document per message, descriptors beside it.

use serde::{Deserialize, Serialize};

/// First message to every helper. Spawners get the daemon's executable beside it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Capabilities of sandboxes, as a bit mask.
    pub(crate) caps: u64,
    /// Whether sandboxes have user namespaces.
    pub(crate) user_namespace: bool,
    /// First host id of slot 0.
    pub(crate) id_base: u32,
    /// The preparer tries its work out in this empty directory.
    pub(crate) probe_dir: String,
}

/// A helper's answer to [`Hello`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Why it cannot work, naming the step.
    pub(crate) error: Option<String>,
    /// The preparer's finding: why user namespaces with id-mapped overlays do not work here.
    pub(crate) no_user_namespace: Option<String>,
}

/// Starts a sandbox.
///
/// Descriptors, in this order: the `keep` ones for the daemon (they get the numbers 3, 4, … in the order sent),
/// network namespace, user namespace (when used), one overlay per entry of `mounts`, `attach` files to write `0`
/// into, and the cgroup to be born in (when `born_in` is set).
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spawn {
    pub(crate) seq: u64,
    pub(crate) hostname: String,
    /// Size of `/dev/shm`.
    pub(crate) shm_bytes: u64,
    /// Host id of the sandbox's root.
    pub(crate) root_id: u32,
    pub(crate) keep: usize,
    /// Where the overlays go; the first is `/`.
    pub(crate) mounts: Vec<String>,
    pub(crate) attach: usize,
    pub(crate) born_in: bool,
    /// Number that the daemon's descriptor of a detached mount has, which goes where no path leads.
    pub(crate) uppers: Option<i32>,
}

/// Answer to [`Spawn`], with the pidfd beside it when it went well.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spawned {
    pub(crate) seq: u64,
    pub(crate) outcome: Outcome,
    /// Nanoseconds of each of [`super::child::STAGES`] that was reached.
    pub(crate) nanos: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// The daemon has been executed.
    Running { pid: i32 },
    /// A step failed; no process is left.
    Failed { step: String, errno: i32 },
}

/// What the preparer is asked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// A new file system.
    Prepare(Prepare),
    /// Clones of the detached overlays that come beside it.
    Clone,
}

/// Makes ready the file system of one sandbox. The slot's user namespace comes beside it unless it has none yet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Prepare {
    /// Number of the slot, from which its range of ids follows.
    pub(crate) slot: u32,
    /// The sandbox's directory, to be made; it must not exist.
    pub(crate) dir: String,
    /// The overlays, `/` first.
    pub(crate) roots: Vec<RootSpec>,
    /// Files for the first overlay's upper layer: path below `/` and text.
    pub(crate) files: Vec<(String, String)>,
}

/// One overlay.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RootSpec {
    pub(crate) mountpoint: String,
    /// Directories, topmost first.
    pub(crate) lowers: Vec<String>,
}

/// Answer to [`Request`]. Beside it, when it went well: the user namespace (only if it was made now), one detached
/// overlay per root and, where the kernel clones those and it was not asked for clones already, a clone of each.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Prepared {
    pub(crate) error: Option<String>,
    /// The error is that the disk is full.
    pub(crate) full: bool,
    pub(crate) new_namespace: bool,
}
