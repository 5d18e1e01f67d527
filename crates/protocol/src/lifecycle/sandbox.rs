//! Sandboxes as the server shows them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::create::{ImageSpec, PlatformSpec};
#[cfg(feature = "openapi")]
use super::schemas;
use crate::time::WireTime;

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sandbox {
    /// Id.
    pub id: String,
    /// Image asked for; absent for a restored snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub image: Option<ImageSpec>,
    /// Snapshot it was restored from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub snapshot_id: Option<String>,
    /// Platform asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub platform: Option<PlatformSpec>,
    /// What it does now.
    pub status: SandboxStatus,
    /// Labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Extensions that the server keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub extensions: Option<BTreeMap<String, String>>,
    /// The pool it was taken from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub allocation: Option<AllocationSummary>,
    /// Program and arguments it runs.
    pub entrypoint: Vec<String>,
    /// When it will be removed; absent means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub expires_at: Option<WireTime>,
    /// When it was made.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: WireTime,
}

/// State with its reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxStatus {
    /// State.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub state: SandboxState,
    /// Stable word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub reason: Option<String>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub message: Option<String>,
    /// When the state was entered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub last_transition_at: Option<WireTime>,
}

/// State of a sandbox: an open set of words, new ones may come.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SandboxState {
    /// Being made.
    Pending,
    /// The entrypoint runs.
    Running,
    /// Being paused.
    Pausing,
    /// Processes are frozen.
    Paused,
    /// Being resumed.
    Resuming,
    /// Being removed.
    Stopping,
    /// The entrypoint ended with exit code 0.
    Terminated,
    /// The entrypoint ended otherwise, or the sandbox was lost.
    Failed,
    /// The runtime cannot tell.
    Unknown,
    /// A word of a newer server.
    Other(String),
}

impl SandboxState {
    /// The word on the wire.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Pausing => "Pausing",
            Self::Paused => "Paused",
            Self::Resuming => "Resuming",
            Self::Stopping => "Stopping",
            Self::Terminated => "Terminated",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
            Self::Other(word) => word,
        }
    }
}

impl From<&str> for SandboxState {
    fn from(word: &str) -> Self {
        match word {
            "Pending" => Self::Pending,
            "Running" => Self::Running,
            "Pausing" => Self::Pausing,
            "Paused" => Self::Paused,
            "Resuming" => Self::Resuming,
            "Stopping" => Self::Stopping,
            "Terminated" => Self::Terminated,
            "Failed" => Self::Failed,
            "Unknown" => Self::Unknown,
            other => Self::Other(other.to_owned()),
        }
    }
}

impl FromStr for SandboxState {
    type Err = Infallible;

    fn from_str(word: &str) -> Result<Self, Infallible> {
        Ok(Self::from(word))
    }
}

impl fmt::Display for SandboxState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for SandboxState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for SandboxState {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|word| Self::from(word.as_str()))
    }
}

/// That a sandbox was taken from a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AllocationSummary {
    /// Always `pool`.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::pool, required = false))]
    pub mode: String,
    /// Name of the pool.
    pub pool_ref: String,
    /// Always `allocated`.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::allocated, required = false))]
    pub state: String,
}

/// One page of sandboxes, newest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ListSandboxesResponse {
    /// The page.
    pub items: Vec<Sandbox>,
    /// Where it lies.
    pub pagination: PaginationInfo,
}

/// Where a page lies in the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PaginationInfo {
    /// Counted from 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub page: u32,
    /// Most items of a page.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub page_size: u32,
    /// Items of all pages.
    pub total_items: u64,
    /// 0 when there are no items.
    pub total_pages: u64,
    /// Whether a later page has items.
    pub has_next_page: bool,
}

impl PaginationInfo {
    /// Works the totals out.
    #[must_use]
    pub fn new(page: u32, page_size: u32, total_items: u64) -> Self {
        let total_pages = total_items.div_ceil(u64::from(page_size.max(1)));
        Self { page, page_size, total_items, total_pages, has_next_page: u64::from(page) < total_pages }
    }
}

/// How to reach a port: no scheme, maybe a path, never a query, no slash at the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Endpoint {
    /// `host[:port][/path]`.
    pub endpoint: String,
    /// To be sent with every request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub headers: Option<BTreeMap<String, String>>,
}

/// New moment of expiry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RenewSandboxExpirationRequest {
    /// Absolute; may shorten.
    #[serde(alias = "expires_at")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub expires_at: WireTime,
}

/// The moment of expiry now in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RenewSandboxExpirationResponse {
    /// In UTC.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub expires_at: WireTime,
}

/// Merge patch of metadata: a string adds or replaces, `null` removes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PatchSandboxMetadataRequest(pub BTreeMap<String, Option<String>>);
