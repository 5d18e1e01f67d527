//! The way into a sandbox's ports.

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use osb_runtime::Target;

use crate::error::ApiError;
use crate::sandbox::Record;
use crate::state::AppState;

/// Routes `/sandboxes/{id}/proxy/{port}` and below. Mounted bare and under `/v1`; the key was checked before.
pub(crate) fn router() -> Router<AppState> {
    Router::new()
}

/// Sends one request to a port of a sandbox as `path_and_query`, and gives its answer back as it is.
pub(crate) async fn forward(
    state: &AppState,
    record: &Record,
    port: u16,
    path_and_query: &str,
    request: Request,
) -> Result<Response, ApiError> {
    let _ = (path_and_query, request);
    match state.runtime().connect(record.id(), Target::Port(port)).await {
        Ok(_) => Err(ApiError::NotSupported("forwarding")),
        Err(error) => Err(ApiError::connect(port, &error)),
    }
}
