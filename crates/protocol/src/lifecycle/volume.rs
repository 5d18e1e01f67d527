//! Storage mounted into sandboxes.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::lenient;
#[cfg(feature = "openapi")]
use super::schemas;

/// One mount. Exactly one of `host`, `pvc` and `ossfs` is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Volume {
    /// Unique within the request.
    #[cfg_attr(feature = "openapi", schema(max_length = 63, pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// A directory of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostVolume>,
    /// A named volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcVolume>,
    /// An object store bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ossfs: Option<OssfsVolume>,
    /// Absolute path inside the sandbox.
    #[serde(alias = "mount_path")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^/.*"))]
    pub mount_path: String,
    /// Whether writing is refused.
    #[serde(default, alias = "read_only", deserialize_with = "lenient::or_default")]
    #[cfg_attr(feature = "openapi", schema(default = false))]
    pub read_only: bool,
    /// Directory inside the storage.
    #[serde(default, alias = "sub_path", skip_serializing_if = "Option::is_none")]
    pub sub_path: Option<String>,
}

/// A directory of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(as = Host))]
pub struct HostVolume {
    /// Absolute path.
    #[cfg_attr(feature = "openapi", schema(pattern = r"^(/|[A-Za-z]:[\\/])"))]
    pub path: String,
}

/// A named volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(as = PVC))]
pub struct PvcVolume {
    /// Name of the volume.
    #[serde(alias = "claim_name")]
    #[cfg_attr(feature = "openapi", schema(max_length = 253, pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub claim_name: String,
    /// Whether an absent volume is made.
    #[serde(default = "lenient::yes", alias = "create_if_not_exists", deserialize_with = "lenient::or_true")]
    #[cfg_attr(feature = "openapi", schema(default = true))]
    pub create_if_not_exists: bool,
    /// Whether a volume made by this request goes with the sandbox.
    #[serde(default, alias = "delete_on_sandbox_termination", deserialize_with = "lenient::or_default")]
    #[cfg_attr(feature = "openapi", schema(default = false))]
    pub delete_on_sandbox_termination: bool,
    /// Class of storage.
    #[serde(default, alias = "storage_class", skip_serializing_if = "Option::is_none")]
    pub storage_class: Option<String>,
    /// Size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(pattern = r"^\d+(\.\d+)?(Ki|Mi|Gi|Ti|Pi|Ei)?$"))]
    pub storage: Option<String>,
    /// How it may be mounted.
    #[serde(default, alias = "access_modes", skip_serializing_if = "Option::is_none")]
    pub access_modes: Option<Vec<String>>,
}

/// An object store bucket.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(as = OSSFS))]
pub struct OssfsVolume {
    /// Bucket.
    #[cfg_attr(feature = "openapi", schema(min_length = 3, max_length = 63))]
    pub bucket: String,
    /// Address of the store.
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub endpoint: String,
    /// Version of the mount program.
    #[serde(default, deserialize_with = "lenient::or_default")]
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::ossfs_version, required = false))]
    pub version: OssfsVersion,
    /// Options of the mount program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<Vec<String>>,
    /// Name of the key.
    #[serde(alias = "access_key_id")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub access_key_id: String,
    /// The key.
    #[serde(alias = "access_key_secret")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub access_key_secret: String,
}

impl fmt::Debug for OssfsVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OssfsVolume").field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

/// Version of the bucket mount program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OssfsVersion {
    /// The first.
    #[serde(rename = "1.0")]
    V1,
    /// The second.
    #[default]
    #[serde(rename = "2.0")]
    V2,
}
