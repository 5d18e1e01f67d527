//! Pools of prepared sandboxes.

use serde::{Deserialize, Serialize};

use super::lenient;
use crate::time::WireTime;

/// Asks for a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatePoolRequest {
    /// Unique.
    #[cfg_attr(feature = "openapi", schema(max_length = 253, pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// Pod template.
    #[cfg_attr(feature = "openapi", schema(value_type = Object, additional_properties))]
    pub template: serde_json::Map<String, serde_json::Value>,
    /// How many.
    #[serde(alias = "capacity_spec")]
    pub capacity_spec: PoolCapacitySpec,
}

/// Changes the size of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UpdatePoolRequest {
    /// How many.
    #[serde(alias = "capacity_spec")]
    pub capacity_spec: PoolCapacitySpec,
}

/// Size of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolCapacitySpec {
    /// Most idle ones.
    #[serde(alias = "buffer_max", deserialize_with = "lenient::int")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub buffer_max: i64,
    /// Fewest idle ones.
    #[serde(alias = "buffer_min", deserialize_with = "lenient::int")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub buffer_min: i64,
    /// Most of all.
    #[serde(alias = "pool_max", deserialize_with = "lenient::int")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub pool_max: i64,
    /// Fewest of all.
    #[serde(alias = "pool_min", deserialize_with = "lenient::int")]
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub pool_min: i64,
}

/// A pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolResponse {
    /// Name.
    pub name: String,
    /// How many there shall be.
    pub capacity_spec: PoolCapacitySpec,
    /// How many there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub status: Option<PoolStatus>,
    /// When it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub created_at: Option<WireTime>,
}

/// How many members a pool has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolStatus {
    /// All.
    pub total: i64,
    /// In use.
    pub allocated: i64,
    /// Idle.
    pub available: i64,
    /// Revision of the template.
    pub revision: String,
}

/// All pools.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ListPoolsResponse {
    /// The pools.
    pub items: Vec<PoolResponse>,
}
