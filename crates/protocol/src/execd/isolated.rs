//! Isolated sessions: shells in namespaces of their own within a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Header of log answers of isolated runs: the offset to ask from next, in bytes.
pub const ISOLATED_TAIL_CURSOR_HEADER: &str = "execd-isolated-tail-cursor";

/// Body of `POST /v1/isolated/session`, and what `GET` of a session repeats of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedSessionSpec {
    /// `strict` (own `/tmp`) or `balanced` (the sandbox's).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The tree that the session works on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<IsolatedWorkspace>,
    /// Further trees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlays: Option<Vec<IsolatedOverlay>>,
    /// Paths that stay writable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extra_writable: Option<Vec<String>>,
    /// Paths mounted elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binds: Option<Vec<BindMount>>,
    /// Whether the sandbox's network is seen; it is unless told otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_net: Option<bool>,
    /// Which variables pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_passthrough: Option<EnvPassthrough>,
    /// User.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// `setpriv` or `userns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid_mode: Option<String>,
    /// Ends after so much time without a run; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_seconds: Option<i64>,
}

/// The tree that a session works on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedWorkspace {
    /// Absolute; must exist.
    pub path: String,
    /// `rw`, `ro` or `overlay` (changes are dropped with the session; the default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
}

/// A further tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedOverlay {
    /// Absolute; must exist.
    pub path: String,
    /// As [`IsolatedWorkspace::mode`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Whether changes lie on disk; they do unless told otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persist: Option<bool>,
}

/// A path mounted elsewhere.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindMount {
    /// Existing path.
    pub source: String,
    /// Where; the same path unless told otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dest: Option<String>,
    /// Whether writing is refused.
    #[serde(default)]
    pub readonly: bool,
}

/// Which variables pass into a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvPassthrough {
    /// `allow` (these only) or `deny` (all but these).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Names.
    #[serde(default)]
    pub keys: Vec<String>,
}

/// Answer of `POST /v1/isolated/session`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedSessionCreated {
    /// Its id.
    pub session_id: String,
    /// RFC 3339.
    #[serde(default)]
    pub created_at: String,
}

/// One entry of `GET /v1/isolated/sessions`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedSessionSummary {
    /// Its id.
    pub session_id: String,
    /// `active`, `dead` or `destroyed`.
    pub status: String,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339.
    #[serde(default)]
    pub last_run_at: String,
    /// Seconds until it ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_remaining_seconds: Option<i64>,
}

/// Answer of `GET /v1/isolated/sessions`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListIsolatedSessionsResponse {
    /// The sessions.
    pub sessions: Vec<IsolatedSessionSummary>,
}

/// Answer of `GET /v1/isolated/session/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedSessionState {
    /// `active`, `dead` or `destroyed`.
    pub status: String,
    /// RFC 3339.
    #[serde(default)]
    pub created_at: String,
    /// RFC 3339.
    #[serde(default)]
    pub last_run_at: String,
    /// Seconds until it ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_remaining_seconds: Option<i64>,
    /// What it was made with.
    #[serde(flatten)]
    pub spec: IsolatedSessionSpec,
}

/// Body of `POST /v1/isolated/session/{id}/run`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedRunRequest {
    /// Shell text.
    pub code: String,
    /// Variables of this run only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envs: Option<BTreeMap<String, String>>,
    /// Seconds; 0 or absent is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// Return as soon as it has started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub background: Option<bool>,
}

/// Answer to a run in the background.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedRunStarted {
    /// Its session.
    pub session_id: String,
    /// Its id.
    pub run_id: String,
    /// RFC 3339.
    pub started_at: String,
}

/// Answer of `GET /v1/isolated/session/{id}/runs/{run}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsolatedRunStatus {
    /// Its session.
    pub session_id: String,
    /// Its id.
    pub run_id: String,
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
}

/// Answer of `GET /v1/isolated/capabilities`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct IsolationCapabilities {
    /// Whether sessions can be made.
    pub available: bool,
    /// By what.
    pub isolator: String,
    /// Its version.
    pub version: String,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Whether the user mode `setpriv` works.
    pub setpriv_available: bool,
    /// Whether the user mode `userns` works.
    pub userns_available: bool,
    /// Reserved.
    pub commit_supported: bool,
    /// Reserved.
    pub diff_supported: bool,
    /// Layers of defence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hardening: Option<Hardening>,
    /// What the daemon knows of late initialisation.
    #[serde(rename = "runtimeInit", skip_serializing_if = "Option::is_none")]
    pub runtime_init: Option<RuntimeInit>,
}

/// Which form of late initialisation a daemon knows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RuntimeInit {
    /// Its number.
    pub version: u32,
}

/// Layers of defence of everything that the daemon starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hardening {
    /// `pid1`, `subreaper` or `none`.
    pub init_mode: String,
    /// Whether signals from inside are kept from the daemon.
    pub signal_shield: bool,
    /// Capabilities.
    pub cap_drop: HardeningLayer,
    /// System calls.
    pub seccomp: HardeningLayer,
    /// Files.
    pub landlock: HardeningLayer,
    /// Observation.
    pub ebpf: HardeningLayer,
}

/// State of one layer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HardeningLayer {
    /// `active`, `disabled`, `degraded` or `unsupported`.
    pub state: String,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}
