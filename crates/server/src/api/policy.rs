//! `/sandboxes/{id}/networkpolicy`: passed on to the sandbox's egress API after the body was checked.

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use http::HeaderName;
use osb_protocol::lifecycle::{EGRESS_AUTH_HEADER, EGRESS_PORT, NetworkPolicy, NetworkRule};
use serde::de::DeserializeOwned;

use super::extract::{self, Closed};
use crate::error::{ApiError, Issue};
use crate::state::AppState;

/// `GET`.
pub(super) async fn get(
    State(state): State<AppState>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    pass(&state, &id, request).await
}

/// `PUT`: replaces the policy.
pub(super) async fn put(
    State(state): State<AppState>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (policy, request) = checked::<NetworkPolicy>(&state, request).await?;
    check_targets(&policy.egress)?;
    pass(&state, &id, request).await
}

/// `PATCH`: adds and replaces rules.
pub(super) async fn patch(
    State(state): State<AppState>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (rules, request) = checked::<Vec<NetworkRule>>(&state, request).await?;
    check_targets(&rules)?;
    pass(&state, &id, request).await
}

/// `DELETE`: removes rules by target.
pub(super) async fn delete(
    State(state): State<AppState>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (_, request) = checked::<Vec<String>>(&state, request).await?;
    pass(&state, &id, request).await
}

/// Reads a body, checks it and puts it back as it was.
async fn checked<T: DeserializeOwned + Closed>(
    state: &AppState,
    request: Request,
) -> Result<(T, Request), ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = extract::read(body, &parts.headers).await?;
    let value = extract::parse(&parts.headers, &bytes, state.config().server.strict_requests)?;
    Ok((value, Request::from_parts(parts, Body::from(bytes))))
}

fn check_targets(rules: &[NetworkRule]) -> Result<(), ApiError> {
    if rules.iter().all(|rule| !rule.target.is_empty()) {
        return Ok(());
    }
    Err(ApiError::Validation(vec![Issue::new(
        "string_too_short",
        &["body", "target"],
        "at least one character is expected",
    )]))
}

async fn pass(state: &AppState, id: &str, mut request: Request) -> Result<Response, ApiError> {
    let record = state.sandbox(id)?;
    state.accessed(&record, request.headers());
    // The token of the egress API is the server's to add.
    request.headers_mut().remove(HeaderName::from_static(EGRESS_AUTH_HEADER));
    let target = match request.uri().query() {
        Some(query) => format!("/policy?{query}"),
        None => "/policy".to_owned(),
    };
    crate::proxy::forward(state, &record, EGRESS_PORT, &target, request).await
}
