//! `POST /sandboxes`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::lenient;
use super::network::NetworkPolicy;
use super::sandbox::SandboxStatus;
#[cfg(feature = "openapi")]
use super::schemas;
use super::volume::Volume;
use crate::time::WireTime;

/// Asks for a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateSandboxRequest {
    /// Image to start from. A blank `uri` counts as absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSpec>,
    /// Snapshot to start from instead of an image.
    #[serde(alias = "snapshot_id", skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    /// Platform the sandbox must run on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformSpec>,
    /// Lifetime in seconds; absent means until it is deleted.
    #[serde(deserialize_with = "lenient::opt_int", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 60))]
    pub timeout: Option<i64>,
    /// Limits: `cpu`, `memory` and others that a runtime may know.
    #[serde(alias = "resource_limits", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<BTreeMap<String, String>>,
    /// What a scheduler sets aside; only Kubernetes reads it.
    #[serde(alias = "resource_requests", skip_serializing_if = "Option::is_none")]
    pub resource_requests: Option<BTreeMap<String, String>>,
    /// Variables of entrypoint and commands. A null value leaves the variable out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, Option<String>>>,
    /// Labels of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Hooks; only Kubernetes runs them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<SandboxLifecycle>,
    /// Program and arguments; the sandbox ends with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_items = 1))]
    pub entrypoint: Option<Vec<String>>,
    /// Which destinations the sandbox may reach.
    #[serde(alias = "network_policy", skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
    /// Injection of credentials into outgoing requests.
    #[serde(alias = "credential_proxy", skip_serializing_if = "Option::is_none")]
    pub credential_proxy: Option<CredentialProxyConfig>,
    /// Whether endpoints demand a token of their own.
    #[serde(alias = "secure_access", deserialize_with = "lenient::or_default")]
    #[cfg_attr(feature = "openapi", schema(default = false))]
    pub secure_access: bool,
    /// Storage to mount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<Volume>>,
    /// Switches beyond the schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extensions: Option<BTreeMap<String, String>>,
    /// Template to start from instead of an image.
    #[serde(alias = "template_id", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub template_id: Option<String>,
}

/// A container image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageSpec {
    /// Name of a stored image, an alias or a registry reference.
    pub uri: String,
    /// Account at the registry. Never part of an answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<ImageAuth>,
}

/// Account at a registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageAuth {
    /// Name.
    pub username: String,
    /// Password or token.
    pub password: String,
}

impl fmt::Debug for ImageAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ImageAuth(***)")
    }
}

/// Operating system and processor. Read with any case and blanks around; the words are checked by the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PlatformSpec {
    /// `linux` or `windows`.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::os))]
    pub os: String,
    /// `amd64` or `arm64`.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::arch))]
    pub arch: String,
}

/// Switch of the credential proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CredentialProxyConfig {
    /// On or off.
    #[serde(default, deserialize_with = "lenient::or_default")]
    #[cfg_attr(feature = "openapi", schema(default = false))]
    pub enabled: bool,
}

/// Commands that run inside the sandbox beside the entrypoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxLifecycle {
    /// Runs once, before the entrypoint.
    #[serde(default, alias = "pre_start", skip_serializing_if = "Option::is_none")]
    pub pre_start: Option<LifecycleHook>,
    /// Run again and again. Names are unique after trimming.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub periodic: Option<Vec<PeriodicLifecycleHook>>,
}

/// A command that runs once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LifecycleHook {
    /// Program and arguments.
    #[cfg_attr(feature = "openapi", schema(min_items = 1))]
    pub command: Vec<String>,
    /// Seconds it may take.
    #[serde(default, alias = "timeout_seconds", deserialize_with = "lenient::opt_int")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 10800))]
    pub timeout_seconds: Option<i64>,
}

/// A command that runs by a schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PeriodicLifecycleHook {
    /// What it is called.
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub name: String,
    /// Five-field cron, `@hourly` and the like, or `@every 30s`.
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub schedule: String,
    /// Program and arguments.
    #[cfg_attr(feature = "openapi", schema(min_items = 1))]
    pub command: Vec<String>,
    /// Seconds one run may take.
    #[serde(default, alias = "timeout_seconds", deserialize_with = "lenient::opt_int")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 300))]
    pub timeout_seconds: Option<i64>,
}

/// Answer to a create.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateSandboxResponse {
    /// Id of the new sandbox.
    pub id: String,
    /// State at the moment of the answer.
    pub status: SandboxStatus,
    /// Labels as asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Extensions that the server keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub extensions: Option<BTreeMap<String, String>>,
    /// Platform asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub platform: Option<PlatformSpec>,
    /// When it will be removed; absent means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub expires_at: Option<WireTime>,
    /// When it was made.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: WireTime,
    /// Program and arguments it runs.
    pub entrypoint: Vec<String>,
}
