//! Diagnostics, health and the clients' own measurements.

use serde::{Deserialize, Serialize};

use super::lenient;
#[cfg(feature = "openapi")]
use super::schemas;
use crate::time::WireTime;

/// Text of a diagnostic source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiagnosticContentResponse {
    /// The sandbox.
    pub sandbox_id: String,
    /// Which kind.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::diagnostic_kind))]
    pub kind: DiagnosticKind,
    /// Which part, as asked for.
    pub scope: String,
    /// How the text comes.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::diagnostic_delivery))]
    pub delivery: DiagnosticDelivery,
    /// Media type of the text.
    pub content_type: String,
    /// The text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub content: Option<String>,
    /// Where the text lies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false, format = "uri"))]
    pub content_url: Option<String>,
    /// Bytes of the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false, minimum = 0))]
    pub content_length: Option<u64>,
    /// How long `contentUrl` is good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub expires_at: Option<WireTime>,
    /// Whether there is more.
    pub truncated: bool,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub warnings: Option<Vec<String>>,
}

/// Kinds of diagnostic text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiagnosticKind {
    /// Output.
    Logs,
    /// What happened.
    Events,
}

/// How diagnostic text comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiagnosticDelivery {
    /// In the answer.
    Inline,
    /// Elsewhere.
    Url,
}

/// That the server is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HealthResponse {
    /// Always `healthy`.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::healthy))]
    pub status: String,
}

/// Version of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VersionResponse {
    /// Semantic version.
    pub version: String,
}

/// What a client measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MetricsEvent {
    /// Always `sandbox.create`.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::sandbox_create))]
    #[serde(alias = "event_type")]
    pub event_type: String,
    /// The sandbox, if there is one.
    #[serde(default, alias = "sandbox_id", skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Image asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Milliseconds until it was ready.
    #[serde(alias = "create_duration_ms", deserialize_with = "lenient::int")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub create_duration_ms: i64,
    /// Whether it became ready.
    pub success: bool,
}
