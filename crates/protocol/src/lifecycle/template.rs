//! Templates: images prepared for virtual machines.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::lenient;
use super::sandbox::PaginationInfo;
#[cfg(feature = "openapi")]
use super::schemas;
use crate::time::WireTime;

/// Asks for a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateFsbTemplateRequest {
    /// Image to start from.
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub image: String,
    /// `cpu`, `memory`, `disk`.
    #[serde(default, alias = "resource_limits", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<BTreeMap<String, String>>,
    /// Program and arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_items = 1))]
    pub entrypoint: Option<Vec<String>>,
    /// Variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// Labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// When it counts as ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readiness: Option<FsbTemplateReadiness>,
    /// Where the result goes.
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub publish: String,
    /// Form of the result.
    #[serde(default, deserialize_with = "lenient::or_default")]
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::template_format_or_default, required = false))]
    pub format: TemplateFormat,
}

/// When a template counts as ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FsbTemplateReadiness {
    /// Command or address to ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<String>,
    /// Seconds to wait.
    #[serde(default, alias = "warmup_seconds", deserialize_with = "lenient::opt_int")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub warmup_seconds: Option<i64>,
}

/// Form of a template's result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TemplateFormat {
    /// A machine image.
    Native,
    /// Layers of block devices.
    #[default]
    Overlaybd,
}

/// A template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FsbTemplate {
    /// Id.
    pub template_id: String,
    /// Image.
    pub image: String,
    /// Limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub resource_limits: Option<BTreeMap<String, String>>,
    /// Program and arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub entrypoint: Option<Vec<String>>,
    /// Variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub env: Option<BTreeMap<String, String>>,
    /// Labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub metadata: Option<BTreeMap<String, String>>,
    /// When it counts as ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub readiness: Option<FsbTemplateReadiness>,
    /// Where the result goes.
    pub publish: String,
    /// Form of the result.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::template_format))]
    pub format: TemplateFormat,
    /// State.
    pub status: FsbTemplateStatus,
    /// When it was asked for.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: WireTime,
    /// When it last changed.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub updated_at: WireTime,
}

/// State of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FsbTemplateStatus {
    /// How far it is.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::template_phase))]
    pub phase: TemplatePhase,
    /// The result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub manifest_ref: Option<String>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub message: Option<String>,
}

/// How far a template is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TemplatePhase {
    /// Not begun.
    Pending,
    /// Under way.
    Building,
    /// Done.
    Succeeded,
    /// Given up.
    Failed,
}

/// One page of templates, newest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ListFsbTemplatesResponse {
    /// The page.
    pub items: Vec<FsbTemplate>,
    /// Where it lies.
    pub pagination: PaginationInfo,
}
