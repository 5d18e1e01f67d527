//! Every error that a client can see, and the one table that gives it status and code.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use osb_protocol::error::code;
use osb_protocol::labels::LabelError;
use osb_runtime::{ConnectError, CreateError, FetchError, RuntimeError};
use serde::Serialize;

use crate::store::StoreError;

/// What a handler answers instead of its result. `Display` is the message on the wire: it says what to do and
/// never repeats input that may hold a secret.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No key was sent.
    #[error("an API key is required: send it in the header OPEN-SANDBOX-API-KEY")]
    MissingApiKey,
    /// Another key was sent.
    #[error("the API key is not valid for this server")]
    InvalidApiKey,
    /// The sandbox's endpoints demand a token and it was not sent.
    #[error(
        "this sandbox's endpoints need the header OpenSandbox-Secure-Access that its endpoint answer names"
    )]
    MissingSecureAccess,
    /// No such sandbox.
    #[error("no such sandbox: it was deleted, has expired, or never was on this server")]
    SandboxNotFound,
    /// No such snapshot.
    #[error("no such snapshot")]
    SnapshotNotFound,
    /// The list filter is broken.
    #[error("metadata must be a query string such as team%3Dinfra%26stage%3Dtest: every part needs a '='")]
    InvalidMetadataFormat,
    /// A patch names a reserved key.
    #[error("{0}")]
    ReservedLabel(LabelError),
    /// A metadata entry breaks the rules.
    #[error("{0}")]
    InvalidLabel(LabelError),
    /// A member's value cannot be taken.
    #[error("{0}")]
    InvalidParameter(String),
    /// This runtime has no such function (400).
    #[error("{0}")]
    ApiNotSupported(String),
    /// `extensions.poolRef` on a runtime without pools.
    #[error("extensions.poolRef is not supported by this runtime: create without it")]
    UnsupportedPoolRef,
    /// No program to run.
    #[error("entrypoint is missing or empty: name the program and its arguments")]
    InvalidEntrypoint,
    /// No such port number.
    #[error("the port must be between 1 and 65535")]
    InvalidPort,
    /// An expiry that is not in the future.
    #[error("expiresAt must lie in the future")]
    ExpirationPast,
    /// Renewal of a sandbox that never expires.
    #[error("this sandbox has no expiry: it was created without a timeout and lives until it is deleted")]
    NoExpiration,
    /// A diagnostics scope that is not served.
    #[error("this scope is not served: use one of {0}")]
    DiagnosticsScope(&'static str),
    /// A volume breaks a rule. The first member is the code.
    #[error("{1}")]
    Volume(&'static str, String),
    /// The image is not here and cannot be had.
    #[error("{0}")]
    ImagePull(String),
    /// The image's registry wants to be left alone for a while.
    #[error("{message}")]
    ImagePullLater {
        /// What it said.
        message: String,
        /// For `Retry-After`.
        retry_after_seconds: u64,
    },
    /// The image does not fit on the disk as things are.
    #[error("{message}")]
    NoRoomForImage {
        /// What is full, and what to do.
        message: String,
        /// For `Retry-After`.
        retry_after_seconds: u64,
    },
    /// The sandbox went before it ran.
    #[error("the sandbox was deleted before it ran")]
    DeletedMeanwhile,
    /// The server is about to end.
    #[error("the server is stopping: create the sandbox again once it is back")]
    Stopping,
    /// The sandbox did not start.
    #[error("{0}")]
    StartFailed(String),
    /// The sandbox could not be removed yet.
    #[error("the sandbox could not be removed: {0}; removal is tried again in the background")]
    DeleteFailed(String),
    /// The sandbox has ended.
    #[error("the sandbox is not running")]
    NotRunning,
    /// No room; with seconds to wait.
    #[error("no room for another sandbox: {what}; delete some or try again later")]
    Exhausted {
        /// Which resource.
        what: String,
        /// For `Retry-After`.
        retry_after_seconds: u64,
    },
    /// Snapshots are not offered.
    #[error("snapshots are not supported by this runtime")]
    SnapshotsNotSupported,
    /// Pools are not offered.
    #[error("pools are not supported by this runtime: they need the kubernetes runtime")]
    PoolsNotSupported,
    /// Templates are not offered.
    #[error("templates are not supported by this runtime")]
    TemplatesNotSupported,
    /// Another function that is not offered (501).
    #[error("{0} is not supported by this runtime")]
    NotSupported(&'static str),
    /// Nothing answers on the sandbox's port.
    #[error("nothing answers on port {port} of the sandbox: {reason}")]
    BackendConnection {
        /// The port.
        port: u16,
        /// Why.
        reason: String,
    },
    /// The backend broke off before its head was complete.
    #[error("the service on the sandbox's port broke off before it answered: {0}")]
    BackendResponse(String),
    /// The backend took too long before its head.
    #[error("the service on the sandbox's port did not answer in time")]
    BackendTimeout,
    /// A request that makes no sense here (400).
    #[error("{0}")]
    BadRequest(String),
    /// Body, query or path value fails validation.
    #[error("{}", Issues(.0))]
    Validation(Vec<Issue>),
    /// No such route.
    #[error("no such path on this server: see /docs for the API")]
    RouteNotFound,
    /// The route has other methods.
    #[error("this path does not take that method")]
    MethodNotAllowed,
    /// The body is larger than the route takes.
    #[error("the request body is larger than {0} bytes")]
    BodyTooLarge(usize),
    /// Too many connections.
    #[error("the server has as many connections as it takes: try again")]
    Overloaded,
    /// Nothing can be stored.
    #[error("the server's disk is full: make room on the disk of its data_dir and try again")]
    DiskFull,
    /// Our fault. The text is logged and not sent.
    #[error("the server failed; its log has the details under this request's id")]
    Internal(String),
}

/// One thing wrong with a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Issue {
    /// `missing`, `value_error`, …
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Where: `body`, `query` or `path`, then member names and list positions.
    pub loc: Vec<Loc>,
    /// What is expected.
    pub msg: String,
}

/// Step of an [`Issue`]'s place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Loc {
    /// Member.
    Name(String),
    /// Position in a list.
    Index(usize),
}

impl Issue {
    /// An issue at `loc`, whose first step is `body`, `query` or `path`.
    pub fn new(kind: &'static str, loc: &[&str], msg: impl Into<String>) -> Self {
        Self { kind, loc: loc.iter().map(|s| Loc::Name((*s).to_owned())).collect(), msg: msg.into() }
    }
}

/// First issue in words, for `message`.
struct Issues<'a>(&'a [Issue]);

impl std::fmt::Display for Issues<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(issue) = self.0.first() else { return f.write_str("the request is not valid") };
        for (at, step) in issue.loc.iter().enumerate() {
            if at > 0 {
                f.write_str(".")?;
            }
            match step {
                Loc::Name(name) => f.write_str(name)?,
                Loc::Index(index) => write!(f, "{index}")?,
            }
        }
        write!(f, ": {}", issue.msg)
    }
}

impl ApiError {
    /// Status and code of each error.
    #[must_use]
    pub fn wire(&self) -> (StatusCode, &'static str) {
        match self {
            Self::MissingApiKey => (StatusCode::UNAUTHORIZED, code::MISSING_API_KEY),
            Self::InvalidApiKey => (StatusCode::UNAUTHORIZED, code::INVALID_API_KEY),
            Self::MissingSecureAccess => (StatusCode::UNAUTHORIZED, code::MISSING_OR_INVALID_SECURE_ACCESS),
            Self::SandboxNotFound => (StatusCode::NOT_FOUND, code::SANDBOX_NOT_FOUND),
            Self::SnapshotNotFound => (StatusCode::NOT_FOUND, code::SNAPSHOT_NOT_FOUND),
            Self::InvalidMetadataFormat => (StatusCode::BAD_REQUEST, code::INVALID_METADATA_FORMAT),
            Self::ReservedLabel(_) => (StatusCode::BAD_REQUEST, code::INVALID_METADATA_LABEL),
            Self::InvalidLabel(_) => (StatusCode::BAD_REQUEST, code::SANDBOX_INVALID_METADATA_LABEL),
            Self::InvalidParameter(_) => (StatusCode::BAD_REQUEST, code::INVALID_PARAMETER),
            Self::ApiNotSupported(_) => (StatusCode::BAD_REQUEST, code::API_NOT_SUPPORTED),
            Self::UnsupportedPoolRef => (StatusCode::BAD_REQUEST, code::UNSUPPORTED_POOL_REF),
            Self::InvalidEntrypoint => (StatusCode::BAD_REQUEST, code::INVALID_ENTRYPOINT),
            Self::InvalidPort => (StatusCode::BAD_REQUEST, code::INVALID_PORT),
            Self::ExpirationPast => (StatusCode::BAD_REQUEST, code::INVALID_EXPIRATION),
            Self::NoExpiration => (StatusCode::CONFLICT, code::INVALID_EXPIRATION),
            Self::DiagnosticsScope(_) => (StatusCode::BAD_REQUEST, code::DIAGNOSTICS_SCOPE_UNSUPPORTED),
            Self::Volume(code, _) => (StatusCode::BAD_REQUEST, code),
            Self::ImagePull(_) => (StatusCode::INTERNAL_SERVER_ERROR, code::IMAGE_PULL_FAILED),
            Self::ImagePullLater { .. } => (StatusCode::TOO_MANY_REQUESTS, code::IMAGE_PULL_FAILED),
            Self::DeletedMeanwhile => (StatusCode::CONFLICT, code::NOT_RUNNING),
            Self::StartFailed(_) => (StatusCode::INTERNAL_SERVER_ERROR, code::START_FAILED),
            Self::DeleteFailed(_) => (StatusCode::INTERNAL_SERVER_ERROR, code::DELETE_FAILED),
            Self::NotRunning => (StatusCode::CONFLICT, code::NOT_RUNNING),
            Self::Exhausted { .. } | Self::NoRoomForImage { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, code::CAPACITY_EXHAUSTED)
            }
            Self::SnapshotsNotSupported => (StatusCode::NOT_IMPLEMENTED, code::SNAPSHOT_NOT_IMPLEMENTED),
            Self::PoolsNotSupported => (StatusCode::NOT_IMPLEMENTED, code::POOL_NOT_SUPPORTED),
            Self::TemplatesNotSupported => (StatusCode::NOT_IMPLEMENTED, code::FSB_API_NOT_SUPPORTED),
            Self::NotSupported(_) => (StatusCode::NOT_IMPLEMENTED, code::API_NOT_SUPPORTED),
            Self::BackendConnection { .. } => (StatusCode::BAD_GATEWAY, code::BACKEND_CONNECTION_FAILED),
            Self::BackendResponse(_) => (StatusCode::BAD_GATEWAY, code::BACKEND_RESPONSE_FAILED),
            Self::BackendTimeout => (StatusCode::GATEWAY_TIMEOUT, code::BACKEND_TIMEOUT),
            Self::BadRequest(_) => (StatusCode::BAD_REQUEST, code::UNKNOWN_ERROR),
            Self::Validation(_) => (StatusCode::UNPROCESSABLE_ENTITY, code::UNKNOWN_ERROR),
            Self::RouteNotFound => (StatusCode::NOT_FOUND, code::UNKNOWN_ERROR),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, code::UNKNOWN_ERROR),
            Self::BodyTooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, code::UNKNOWN_ERROR),
            Self::Overloaded | Self::Stopping => (StatusCode::SERVICE_UNAVAILABLE, code::UNKNOWN_ERROR),
            Self::DiskFull | Self::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, code::UNKNOWN_ERROR),
        }
    }

    /// The body: `code` and `message`, with the framework's `detail` beside on 404 of routes, 405 and 422.
    fn body(&self, code: &str) -> serde_json::Value {
        let mut body = serde_json::json!({ "code": code, "message": self.to_string() });
        match self {
            Self::Validation(issues) => body["detail"] = serde_json::json!(issues),
            Self::RouteNotFound => body["detail"] = "Not Found".into(),
            Self::MethodNotAllowed => body["detail"] = "Method Not Allowed".into(),
            _ => {}
        }
        body
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code) = self.wire();
        match &self {
            Self::Internal(cause) => tracing::error!(cause, "request failed"),
            _ if status.is_server_error() => {
                tracing::warn!(status = status.as_u16(), code, message = %self, "request failed");
            }
            _ => {}
        }
        let mut response = (status, axum::Json(self.body(code))).into_response();
        let seconds = match self {
            Self::Exhausted { retry_after_seconds, .. }
            | Self::NoRoomForImage { retry_after_seconds, .. }
            | Self::ImagePullLater { retry_after_seconds, .. } => Some(retry_after_seconds.max(1)),
            Self::Overloaded | Self::Stopping => Some(1),
            _ => None,
        };
        if let Some(seconds) = seconds {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<CreateError> for ApiError {
    fn from(error: CreateError) -> Self {
        match error {
            CreateError::ImageNotFound { .. } => Self::ImagePull(error.to_string()),
            CreateError::Fetch { error: FetchError::Failed(_), .. } => Self::ImagePull(error.to_string()),
            CreateError::Fetch { error: FetchError::Platform(_), .. } => {
                Self::InvalidParameter(error.to_string())
            }
            CreateError::Fetch { error: FetchError::Busy { retry_after, .. }, .. } => Self::ImagePullLater {
                message: error.to_string(),
                retry_after_seconds: whole_seconds(retry_after),
            },
            CreateError::Fetch { error: FetchError::NoRoom { retry_after, .. }, .. } => {
                Self::NoRoomForImage {
                    message: error.to_string(),
                    retry_after_seconds: whole_seconds(retry_after),
                }
            }
            CreateError::Entrypoint { .. } => Self::InvalidParameter(error.to_string()),
            CreateError::InvalidParameter(message) => Self::InvalidParameter(message),
            CreateError::Exhausted { what, retry_after } => {
                Self::Exhausted { what, retry_after_seconds: whole_seconds(retry_after) }
            }
            CreateError::Hook(_) | CreateError::Failed(_) => Self::StartFailed(error.to_string()),
        }
    }
}

/// Rounded up, at least one.
fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Full => Self::DiskFull,
            error => Self::Internal(error.to_string()),
        }
    }
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::NotFound => Self::SandboxNotFound,
            RuntimeError::Failed(cause) => Self::Internal(cause),
        }
    }
}

impl ApiError {
    /// A connection to `port` of a sandbox that was not made.
    #[must_use]
    pub fn connect(port: u16, error: &ConnectError) -> Self {
        let reason = match error {
            ConnectError::NotRunning => "the sandbox is not running".to_owned(),
            ConnectError::Io(error) => error.kind().to_string(),
        };
        Self::BackendConnection { port, reason }
    }
}
