//! The error body and the codes of the lifecycle API.

use serde::{Deserialize, Serialize};

/// Body of every error of every service: a stable code for programs, a message for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(as = ErrorResponse))]
pub struct ErrorBody {
    /// Stable word, never empty.
    pub code: String,
    /// What went wrong and what to do. Never repeats input that may hold a secret.
    pub message: String,
}

impl ErrorBody {
    /// Builds a body from a code of [`code`] and a message.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into() }
    }
}

/// Codes of the lifecycle server. Runtimes other than Docker reuse its prefix where clients test for it.
pub mod code {
    /// 401: no API key was sent.
    pub const MISSING_API_KEY: &str = "MISSING_API_KEY";
    /// 401: the key is not ours.
    pub const INVALID_API_KEY: &str = "INVALID_API_KEY";
    /// 401: the sandbox's own token is absent or wrong.
    pub const MISSING_OR_INVALID_SECURE_ACCESS: &str = "MISSING_OR_INVALID_SECURE_ACCESS";
    /// 400: no such scope of diagnostics.
    pub const DIAGNOSTICS_SCOPE_UNSUPPORTED: &str = "DIAGNOSTICS_SCOPE_UNSUPPORTED";
    /// 400: the list filter is not a query string.
    pub const INVALID_METADATA_FORMAT: &str = "INVALID_METADATA_FORMAT";
    /// 400: a patch names a reserved key.
    pub const INVALID_METADATA_LABEL: &str = "INVALID_METADATA_LABEL";
    /// 400: a metadata key or value breaks the label rules.
    pub const SANDBOX_INVALID_METADATA_LABEL: &str = "SANDBOX::INVALID_METADATA_LABEL";
    /// 400: a member has a value the server cannot take.
    pub const INVALID_PARAMETER: &str = "SANDBOX::INVALID_PARAMETER";
    /// 400: this runtime has no such function.
    pub const API_NOT_SUPPORTED: &str = "SANDBOX::API_NOT_SUPPORTED";
    /// 400: pools are not offered by this runtime.
    pub const UNSUPPORTED_POOL_REF: &str = "SANDBOX::UNSUPPORTED_POOL_REF";
    /// 404.
    pub const SANDBOX_NOT_FOUND: &str = "DOCKER::SANDBOX_NOT_FOUND";
    /// 400: the entrypoint is empty.
    pub const INVALID_ENTRYPOINT: &str = "DOCKER::INVALID_ENTRYPOINT";
    /// 400: a port outside 1–65535.
    pub const INVALID_PORT: &str = "DOCKER::INVALID_PORT";
    /// 400: a time not in the future; 409: the sandbox has no expiry.
    pub const INVALID_EXPIRATION: &str = "DOCKER::INVALID_EXPIRATION";
    /// 500: the image is not there and cannot be had.
    pub const IMAGE_PULL_FAILED: &str = "DOCKER::SANDBOX_IMAGE_PULL_FAILED";
    /// 500: the sandbox could not be started.
    pub const START_FAILED: &str = "DOCKER::SANDBOX_START_FAILED";
    /// 500.
    pub const DELETE_FAILED: &str = "DOCKER::SANDBOX_DELETE_FAILED";
    /// 409.
    pub const NOT_RUNNING: &str = "DOCKER::SANDBOX_NOT_RUNNING";
    /// 409.
    pub const NOT_PAUSED: &str = "DOCKER::SANDBOX_NOT_PAUSED";
    /// 429: memory, disk, process numbers or network slots are used up.
    pub const CAPACITY_EXHAUSTED: &str = "SANDBOX::CAPACITY_EXHAUSTED";
    /// 404.
    pub const SNAPSHOT_NOT_FOUND: &str = "SNAPSHOT::NOT_FOUND";
    /// 501.
    pub const SNAPSHOT_NOT_IMPLEMENTED: &str = "SNAPSHOT::NOT_IMPLEMENTED";
    /// 501.
    pub const POOL_NOT_SUPPORTED: &str = "KUBERNETES::POOL_NOT_SUPPORTED";
    /// 501.
    pub const FSB_API_NOT_SUPPORTED: &str = "FSB::API_NOT_SUPPORTED";
    /// 502: nothing answers on that port.
    pub const BACKEND_CONNECTION_FAILED: &str = "BACKEND_CONNECTION_FAILED";
    /// 502: the backend broke off before its head was complete.
    pub const BACKEND_RESPONSE_FAILED: &str = "BACKEND_RESPONSE_FAILED";
    /// 504.
    pub const BACKEND_TIMEOUT: &str = "BACKEND_TIMEOUT";
    /// 404, 405, 422, 500 and whatever has no code of its own.
    pub const UNKNOWN_ERROR: &str = "GENERAL::UNKNOWN_ERROR";
}
