//! What the engine hands to `execd` when it makes a sandbox. Both ends are built together, so this may change with
//! every release.
//!
//! It comes in two parts, since the engine starts sandboxes before anybody asks for one: `execd --boot-fd N` reads a
//! [`Boot`] from that descriptor, gets everything going that is the same for every sandbox, and waits on the socket
//! [`BootFds::orders`] for its [`Order`].

use serde::{Deserialize, Serialize};

use crate::lifecycle::SandboxLifecycle;

/// What PID 1 knows from the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// Also listen on TCP 44772 of every address inside the sandbox.
    pub listen_tcp: bool,
    /// Init is under a system call filter that lets it make namespaces and mounts, for isolated sessions alone: all
    /// else that it starts gives that up.
    #[serde(default)]
    pub may_build: bool,
    /// Inherited descriptors, by number.
    pub fds: BootFds,
}

/// What the sandbox shall be. Sent once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The sandbox's id; also in `env` as `OPENSANDBOX_ID`.
    pub sandbox_id: String,
    /// Program and arguments, run as they are. Never empty.
    pub entrypoint: Vec<String>,
    /// The whole environment of entrypoint and commands, later entries win. `HOME` and `USER` are added by
    /// `execd` from the image's account file where absent.
    pub env: Vec<(String, String)>,
    /// Working directory of the image; made when absent. `None` is `/`.
    pub cwd: Option<String>,
    /// Directories that the image means for data; made when absent.
    pub volumes: Vec<String>,
    /// The image's user as its configuration spells it (`uid`, `uid:gid`, `name`, `name:group`); `None` is root.
    pub user: Option<String>,
    /// How line ends of command output are sent.
    pub line_endings: LineEndings,
    /// Value that API requests must carry in `X-EXECD-ACCESS-TOKEN`, when set.
    pub access_token: Option<String>,
    /// Hooks; the one before the entrypoint holds [`Started`] back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<SandboxLifecycle>,
    /// Memory limit of the work, for `/metrics`.
    pub memory_limit_bytes: Option<u64>,
    /// CPU limit in thousandths of a core, for `/metrics`.
    pub cpu_limit_millis: Option<u64>,
}

/// Descriptor numbers in the started process. All are closed on exec by `execd` before it runs anything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootFds {
    /// Listening Unix stream socket that only the server can reach. Connections may already be queued.
    pub listen: i32,
    /// Connected `SEQPACKET` socket. The engine sends one message with the descriptor of an [`Order`]'s document
    /// beside it; init answers exactly one [`Started`] as JSON and closes it. A message without a descriptor before
    /// that has init and daemon rehearse, which costs a millisecond and saves one of whoever will wait for the order.
    /// An end without a message means that nobody wants the sandbox any more, and init ends.
    pub orders: i32,
    /// Host-side file, opened for writing. Init writes exactly one [`Ended`] as a JSON line, just before it exits.
    pub ended: i32,
    /// Host-side file that keeps the entrypoint's output; `execd` bounds it to [`ENTRYPOINT_LOG_BYTES`].
    pub log: i32,
    /// Files into which a process writes `0` to move itself under the limits of the work (cgroup v1 `tasks`,
    /// v2 `cgroup.procs`). The entrypoint and every command do so before their exec.
    pub work_cgroup: Vec<i32>,
    /// Directory for the upper layers of isolated sessions, where the machine has one for them: on no overlay, reached
    /// by no path, and empty.
    #[serde(default)]
    pub uppers: Option<i32>,
    /// Open statistics files of the work's cgroups, re-read at offset 0.
    pub usage: UsageFds,
}

/// Statistics files of the work's cgroups. The file's form depends on the cgroup version.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageFds {
    /// v1 `cpuacct.usage` (one number, nanoseconds).
    pub cpuacct_usage: Option<i32>,
    /// v2 `cpu.stat` (`usage_usec N` among other lines).
    pub cpu_stat: Option<i32>,
    /// v1 `memory.usage_in_bytes` or v2 `memory.current` (one number, bytes).
    pub memory_current: Option<i32>,
    /// v1 or v2 `memory.stat`; page cache that can be dropped (`total_inactive_file` or `inactive_file`) is not
    /// counted as used.
    pub memory_stat: Option<i32>,
    /// v1 `memory.oom_control` or v2 `memory.events`, both with a line `oom_kill N`.
    pub oom_events: Option<i32>,
}

/// Bound of the entrypoint's log file; the newest bytes are kept.
pub const ENTRYPOINT_LOG_BYTES: u64 = 1 << 20;

/// The first word from init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Started {
    /// The entrypoint's exec succeeded.
    Running {
        /// Process id inside the sandbox; `None` for one that only waits, which init does by itself.
        pid: Option<i32>,
    },
    /// The hook before the entrypoint has failed; init exits at once.
    Refused {
        /// Names the hook and says why, with the end of its output.
        message: String,
    },
    /// The entrypoint cannot be executed; init exits at once.
    Failed {
        /// The system's error number, when there is one.
        errno: Option<i32>,
        /// Names the program and says why.
        message: String,
    },
}

/// The last word from init: how the entrypoint ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Exit code, 128 + signal for a death by signal.
    pub exit_code: i32,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// Out-of-memory kills in the work's cgroup so far, when known.
    pub oom_kills: Option<u64>,
}

/// How the text of command output treats line ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LineEndings {
    /// Each event's text carries its `\n`, `\r` or `\r\n`: concatenation gives the bytes.
    #[default]
    Keep,
    /// It does not; an empty line is the text `"\n"`. For acceptance suites older than 1.1.
    Strip,
}
