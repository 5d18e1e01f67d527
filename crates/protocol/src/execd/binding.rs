//! Readiness, and binding a running daemon to a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Answer of `GET /ready`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadyResponse {
    /// Whether work may begin.
    pub initialized: bool,
    /// The sandbox that a runtime init has named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Its allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
}

/// Body of `POST /internal/init`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeInitRequest {
    /// Id of the sandbox, 1 to 128 characters.
    #[serde(default)]
    pub sandbox_id: String,
    /// Opaque number of the allocation, above 0.
    #[serde(default)]
    pub generation: u64,
    /// `sha256:` and 64 hexadecimal digits. Absent leaves the token as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token_hash: Option<String>,
    /// Variables of everything that is started from now on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envs: Option<BTreeMap<String, String>>,
    /// Hooks, read strictly by the daemon. Absent keeps those it was started with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<serde_json::Value>,
    /// What telemetry carries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub telemetry: Option<RuntimeInitTelemetry>,
    /// What becomes of the entrypoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint_policy: Option<String>,
    /// Changes the binding only: what runs goes on, no hook runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preserve_runtime_state: Option<bool>,
}

/// What telemetry carries beside id and generation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeInitTelemetry {
    /// Names and values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<BTreeMap<String, String>>,
}

/// Answer of `POST /internal/init`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeInitResponse {
    /// `initialized`.
    pub status: String,
    /// As asked for.
    pub sandbox_id: String,
    /// As asked for.
    pub generation: u64,
    /// What was not done as asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warning: Vec<String>,
}
