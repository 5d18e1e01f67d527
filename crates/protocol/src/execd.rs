//! Wire types of `execd`, the daemon inside a sandbox: event streams, commands, files, metrics.

mod binding;
mod code_cell;
mod isolated;
mod session;

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

pub use binding::{ReadyResponse, RuntimeInitRequest, RuntimeInitResponse, RuntimeInitTelemetry};
pub use code_cell::{CodeContext, CodeContextRequest, RunCodeRequest};
pub use isolated::{
    BindMount, EnvPassthrough, Hardening, HardeningLayer, ISOLATED_TAIL_CURSOR_HEADER, IsolatedOverlay,
    IsolatedRunRequest, IsolatedRunStarted, IsolatedRunStatus, IsolatedSessionCreated, IsolatedSessionSpec,
    IsolatedSessionState, IsolatedSessionSummary, IsolatedWorkspace, IsolationCapabilities,
    ListIsolatedSessionsResponse, RuntimeInit,
};
pub use session::{
    CreateSessionRequest, RunInSessionRequest, SessionCreated, TerminalMessage, TerminalRequest,
    TerminalStatus, frame,
};

/// Header with the daemon's access token.
pub const ACCESS_TOKEN_HEADER: &str = "x-execd-access-token";
/// Header of log answers: the offset to ask from next, in bytes.
pub const TAIL_CURSOR_HEADER: &str = "execd-commands-tail-cursor";
/// Header of log answers whose first bytes are no longer kept: how many were asked for and are lost.
pub const DROPPED_HEADER: &str = "execd-commands-dropped-bytes";
/// Port of the daemon inside every sandbox.
pub const EXECD_PORT: u16 = 44772;

/// Codes of the daemon's errors.
pub mod code {
    /// Body or parameter cannot be read or breaks a rule.
    pub const INVALID_REQUEST_BODY: &str = "INVALID_REQUEST_BODY";
    /// A required parameter is absent.
    pub const MISSING_QUERY: &str = "MISSING_QUERY";
    /// Something failed while it was done.
    pub const RUNTIME_ERROR: &str = "RUNTIME_ERROR";
    /// The upload is no multipart form or its pairs do not match.
    pub const INVALID_FILE: &str = "INVALID_FILE";
    /// The upload has no file part.
    pub const INVALID_FILE_CONTENT: &str = "INVALID_FILE_CONTENT";
    /// The upload's metadata is absent or broken.
    pub const INVALID_FILE_METADATA: &str = "INVALID_FILE_METADATA";
    /// No such file or directory.
    pub const FILE_NOT_FOUND: &str = "FILE_NOT_FOUND";
    /// No such code context, session or terminal.
    pub const CONTEXT_NOT_FOUND: &str = "CONTEXT_NOT_FOUND";
    /// No such isolated session.
    pub const SESSION_NOT_FOUND: &str = "SESSION_NOT_FOUND";
    /// Somebody types into the terminal already.
    pub const ALREADY_CONNECTED: &str = "ALREADY_CONNECTED";
    /// A terminal whose program does not run cannot be watched.
    pub const VIEWER_REQUIRES_RUNNING_SESSION: &str = "VIEWER_REQUIRES_RUNNING_SESSION";
    /// Not offered here.
    pub const NOT_SUPPORTED: &str = "NOT_SUPPORTED";
    /// Not ready, or too busy.
    pub const SERVICE_UNAVAILABLE: &str = "SERVICE_UNAVAILABLE";
    /// Files cannot be served as the user and group that the path names.
    pub const FILESYSTEM_IDENTITY_UNAVAILABLE: &str = "FILESYSTEM_IDENTITY_UNAVAILABLE";
    /// A runtime init is under way already.
    pub const ALREADY_INITIALIZED: &str = "ALREADY_INITIALIZED";
    /// The token is absent or wrong.
    pub const UNAUTHORIZED: &str = "UNAUTHORIZED";
    /// A range that the file does not have.
    pub const UNKNOWN: &str = "UNKNOWN";
}

/// One event of a stream: a compact JSON object followed by `\n\n`, without `data:` in front. It is the only
/// framing that all official clients read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// `init`, `ping`, `stdout`, `stderr`, `result`, `execution_count`, `error` or `execution_complete`.
    #[serde(rename = "type")]
    pub kind: EventKind,
    /// Output, or the id in `init`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Number of the cell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_count: Option<u64>,
    /// Milliseconds; absent when zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_time: Option<u64>,
    /// Unix milliseconds.
    pub timestamp: i64,
    /// MIME bundle of a result. All values are strings; others are read as their JSON text.
    #[serde(default, deserialize_with = "texts", skip_serializing_if = "Option::is_none")]
    pub results: Option<BTreeMap<String, String>>,
    /// Set in `error`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ExecutionError>,
}

/// Kind of an [`Event`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// First event; its text is the id.
    Init,
    /// Keep-alive.
    #[default]
    Ping,
    /// A line of standard output.
    Stdout,
    /// A line of standard error.
    Stderr,
    /// Value of a cell.
    Result,
    /// Number of a cell.
    ExecutionCount,
    /// The run failed. Last event.
    Error,
    /// The run succeeded. Last event.
    ExecutionComplete,
    /// A word this version does not know.
    #[serde(other)]
    Unknown,
}

/// Why a run failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutionError {
    /// `CommandExecError`, or the exception's name.
    pub ename: String,
    /// For commands the exit code as a decimal number (128 + signal): clients parse it.
    pub evalue: String,
    /// Always an array.
    #[serde(default)]
    pub traceback: Vec<String>,
}

/// Body of `POST /command`. Exactly one of `command` and `argv`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandRequest {
    /// Shell text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Program and arguments, run without a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Working directory; must exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Return as soon as the program has started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub background: Option<bool>,
    /// Milliseconds; 0 or absent is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Run as this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Run as this group; needs `uid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Additional environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envs: Option<BTreeMap<String, String>>,
}

/// Answer of `GET /command/status/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandStatus {
    /// 32 hex characters.
    pub id: String,
    /// Command text, or the JSON text of `argv`.
    pub content: String,
    /// Whether it still runs.
    pub running: bool,
    /// Absent while running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Text of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// RFC 3339.
    pub started_at: String,
    /// RFC 3339; absent while running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<String>,
    /// What it has used; absent while running and from daemons that do not tell. Not known to 1.1.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<CommandUsage>,
}

/// What an ended command has used: its first process and all that were waited for, down the tree. Processes that
/// were left behind, or whose parent ended before them, are not in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandUsage {
    /// CPU time in its programs, in microseconds.
    pub cpu_user_us: u64,
    /// CPU time in the kernel on their behalf, in microseconds.
    pub cpu_system_us: u64,
    /// Largest resident memory of one of its processes. A program smaller than the daemon, which takes a few
    /// mebibytes, is told as that.
    pub peak_memory_bytes: u64,
}

/// One file or directory, without following a symlink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// As it was asked for.
    pub path: String,
    /// Kind of entry.
    #[serde(rename = "type")]
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// RFC 3339.
    pub modified_at: String,
    /// RFC 3339; birth time where the file system knows it, else the time of the last change.
    pub created_at: String,
    /// Name, or the number as text.
    pub owner: String,
    /// Name, or the number as text.
    pub group: String,
    /// The nine permission bits in octal digits read as a decimal number: 0644 is `644`.
    pub mode: u32,
    /// What a symlink says, whether or not it leads anywhere; absent where that is no UTF-8. Not known to 1.1.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target: Option<String>,
}

/// Kind of a [`FileInfo`]; the Python client takes no other word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Device, pipe or socket.
    Other,
}

/// Mode and owner to set; zero and absent members change nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permission {
    /// Octal digits as a decimal number, as in [`FileInfo::mode`].
    #[serde(default)]
    pub mode: u32,
    /// Name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// Metadata part of an upload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadMetadata {
    /// Where the file goes.
    pub path: String,
    /// Name or number.
    #[serde(default)]
    pub owner: Option<String>,
    /// Name or number.
    #[serde(default)]
    pub group: Option<String>,
    /// As [`Permission::mode`].
    #[serde(default)]
    pub mode: Option<u32>,
    /// Makes a symlink that says this instead of a file; the content is empty. Not known to 1.1.1, which writes the
    /// empty file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target: Option<String>,
}

/// One entry of `POST /files/mv`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rename {
    /// Existing path.
    pub src: String,
    /// New path; must not exist.
    pub dest: String,
}

/// One entry of `POST /files/replace`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replacement {
    /// Text to look for, not empty.
    pub old: String,
    /// Text to put there.
    pub new: String,
}

/// One entry of the answer of `POST /files/replace?verbose=true`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replaced {
    /// Number of places changed.
    #[serde(rename = "replacedCount")]
    pub replaced_count: u64,
}

/// Answer of `GET /metrics`, measured on the sandbox's own cgroup.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Whole cores the work may use, rounded up. An integer on the wire: the C# client fails on `2.0`.
    /// Other daemons write a fraction.
    #[serde(deserialize_with = "rounded_up")]
    pub cpu_count: u64,
    /// 0–100 of those cores.
    pub cpu_used_pct: f64,
    /// MiB the work may use.
    pub mem_total_mib: f64,
    /// MiB in use, without page cache that can be dropped.
    pub mem_used_mib: f64,
    /// Unix milliseconds.
    pub timestamp: i64,
}

fn rounded_up<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let number = f64::deserialize(deserializer)?;
    // Saturates; no machine has so many.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let whole = number.ceil() as u64;
    Ok(whole)
}

fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<BTreeMap<String, String>>, D::Error> {
    let values = Option::<BTreeMap<String, serde_json::Value>>::deserialize(deserializer)?;
    let text = |value| match value {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    Ok(values.map(|values| values.into_iter().map(|(kind, value)| (kind, text(value))).collect()))
}
