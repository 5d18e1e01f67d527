//! What is answered when a backend is not.

use axum::body::Body;
use axum::response::IntoResponse;
use http::{HeaderValue, Response, StatusCode};
use hyper::upgrade::OnUpgrade;
use osb_runtime::{ConnectError, Target};

use super::upgrade::{self, CloseCode, Handshake};
use super::upstream::Failure;
use crate::error::ApiError;

/// Why a request got no answer of the backend's.
pub(super) enum Problem {
    /// An error of our own.
    Error(ApiError),
    /// The backend did not want a WebSocket.
    HandshakeRefused(StatusCode),
}

/// An exchange that failed.
pub(super) struct Broken {
    pub(super) error: ApiError,
    /// It looks as if the whole sandbox could be gone.
    pub(super) perhaps_ended: bool,
}

impl Broken {
    /// No connection. On a port that is everyday; the daemon is always there while its sandbox is.
    pub(super) fn connect(target: Target, port: u16, error: &ConnectError) -> Self {
        let perhaps_ended = matches!(error, ConnectError::NotRunning) || target == Target::Execd;
        Self { error: ApiError::connect(port, error), perhaps_ended }
    }
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        let (error, perhaps_ended) = match failure {
            Failure::Timeout => (ApiError::BackendTimeout, false),
            Failure::Unsent(_) => (backend("it closed the connection before it took the request"), true),
            Failure::Unanswered(error) | Failure::Broken(error) if error.is_user() => {
                (ApiError::BadRequest("the body of the request broke off".to_owned()), false)
            }
            Failure::Broken(error) if error.is_parse_too_large() => {
                (backend("the head of its answer is too large"), false)
            }
            Failure::Broken(error) if error.is_parse() => (backend("its answer is not HTTP/1"), false),
            Failure::Unanswered(_) | Failure::Broken(_) => (backend("it closed the connection"), true),
        };
        Self { error, perhaps_ended }
    }
}

impl From<ApiError> for Problem {
    fn from(error: ApiError) -> Self {
        Self::Error(error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response<Body> {
        match self {
            Self::Error(error) => error.into_response(),
            // Only WebSocket handshakes are refused, and those are answered by a close frame.
            Self::HandshakeRefused(status) => {
                backend(&format!("it answered {} to a handshake", status.as_u16())).into_response()
            }
        }
    }
}

fn backend(words: &str) -> ApiError {
    ApiError::BackendResponse(words.to_owned())
}

pub(super) fn bad_path() -> ApiError {
    ApiError::BadRequest("the path behind the port is not a valid one".to_owned())
}

/// Answers a request for a WebSocket that cannot become one.
pub(super) fn malformed(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = ApiError::BadRequest(message.to_owned()).into_response();
    *response.status_mut() = status;
    if status == StatusCode::UPGRADE_REQUIRED {
        let (name, value) = upgrade::VERSION_HEADER;
        response.headers_mut().insert(name, value);
        upgrade::ask(response.headers_mut(), HeaderValue::from_static("websocket"));
    }
    response
}

/// Tells a WebSocket client what went wrong.
pub(super) fn refuse(client: OnUpgrade, handshake: Handshake, problem: Problem) -> Response<Body> {
    let (code, reason) = match problem {
        Problem::HandshakeRefused(status) => {
            (CloseCode::Policy, format!("the sandbox's port answered {} to the handshake", status.as_u16()))
        }
        Problem::Error(error @ ApiError::MissingSecureAccess) => (CloseCode::Policy, error.to_string()),
        Problem::Error(error) => (CloseCode::Internal, error.to_string()),
    };
    upgrade::refuse(client, handshake, code, &reason)
}
