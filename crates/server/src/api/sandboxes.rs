//! Create, get, list, delete, label, renew, endpoints.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use osb_protocol::lifecycle::{
    CreateSandboxRequest, CreateSandboxResponse, DEFAULT_PAGE_SIZE, Endpoint, ListSandboxesResponse,
    MAX_PAGE_SIZE, PaginationInfo, PatchSandboxMetadataRequest, RenewSandboxExpirationRequest,
    RenewSandboxExpirationResponse, Sandbox,
};

use super::Mount;
use super::create::{check, check_patch};
use super::extract::{self, Json, Query};
use crate::error::{ApiError, Issue};
use crate::sandbox::Record;
use crate::state::AppState;

/// Tells where the time of a create went.
static SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// `POST /sandboxes`.
pub(super) async fn create(State(state): State<AppState>, request: Request) -> Result<Response, ApiError> {
    let began = Instant::now();
    let (parts, body) = request.into_parts();
    let bytes = extract::read(body, &parts.headers).await?;
    let request: CreateSandboxRequest =
        extract::parse(&parts.headers, &bytes, state.config().server.strict_requests)?;
    let order = check(request, state.config())?;
    let parsed = began.elapsed();
    let mut delivery = state.create(order).await?;
    let stages = std::mem::take(&mut delivery.stages);
    let record = delivery.accept();
    let sandbox = record.to_wire();
    let response = CreateSandboxResponse {
        id: sandbox.id,
        status: sandbox.status,
        metadata: sandbox.metadata,
        extensions: sandbox.extensions,
        platform: sandbox.platform,
        expires_at: sandbox.expires_at,
        created_at: sandbox.created_at,
        entrypoint: sandbox.entrypoint,
    };
    let mut response = (StatusCode::ACCEPTED, axum::Json(response)).into_response();
    let parsed = u32::try_from(parsed.as_micros()).unwrap_or(u32::MAX);
    if let Some(value) = timing(parsed, &stages) {
        response.headers_mut().insert(SERVER_TIMING.clone(), value);
    }
    Ok(response)
}

fn timing(parsed: u32, stages: &[(&'static str, u32)]) -> Option<HeaderValue> {
    use std::fmt::Write;
    let mut text = String::with_capacity(32 * (stages.len() + 1));
    for (name, micros) in std::iter::once(&("parse", parsed)).chain(stages) {
        if !text.is_empty() {
            text.push_str(", ");
        }
        // Writing to a string does not fail.
        let _ = write!(text, "{name};dur={}.{:03}", micros / 1000, micros % 1000);
    }
    HeaderValue::try_from(text).ok()
}

/// `GET /sandboxes/{id}`.
pub(super) async fn get(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<axum::Json<Sandbox>, ApiError> {
    Ok(axum::Json(state.sandbox(&id)?.to_wire()))
}

/// `GET /sandboxes`.
pub(super) async fn list(
    State(state): State<AppState>,
    query: Query,
) -> Result<axum::Json<ListSandboxesResponse>, ApiError> {
    let (page, size) = page(&query)?;
    let metadata = match query.get("metadata") {
        Some(text) => parse_filter(text)?,
        None => BTreeMap::new(),
    };
    let states: Vec<&str> = query.all("state").map(str::trim).filter(|state| !state.is_empty()).collect();
    let skip = (page as usize - 1).saturating_mul(size as usize);
    let (records, total) = if metadata.is_empty() && states.is_empty() {
        state.index().page(skip, size as usize)
    } else {
        state.index().page_where(skip, size as usize, |record| matches(record, &states, &metadata))
    };
    let items = records.iter().map(|record| record.to_wire()).collect();
    let pagination = PaginationInfo::new(page, size, total as u64);
    Ok(axum::Json(ListSandboxesResponse { items, pagination }))
}

/// Page and page size of a list request.
pub(super) fn page(query: &Query) -> Result<(u32, u32), ApiError> {
    let page = query.int("page", 1, u64::from(u32::MAX))?.unwrap_or(1);
    let size =
        query.int("pageSize", 1, u64::from(MAX_PAGE_SIZE))?.unwrap_or_else(|| DEFAULT_PAGE_SIZE.into());
    // Both are in range of the smaller type.
    Ok((u32::try_from(page).unwrap_or(u32::MAX), u32::try_from(size).unwrap_or(MAX_PAGE_SIZE)))
}

fn matches(record: &Record, states: &[&str], metadata: &BTreeMap<String, String>) -> bool {
    let now = record.now();
    let state = now.status.state.as_str();
    (states.is_empty() || states.iter().any(|wanted| wanted.eq_ignore_ascii_case(state)))
        && metadata.iter().all(|(key, value)| now.metadata.get(key) == Some(value))
}

/// The filter is a query string inside the query string: each key and value may be encoded once more, and by some old
/// clients twice.
pub(super) fn parse_filter(text: &str) -> Result<BTreeMap<String, String>, ApiError> {
    if text.is_empty() {
        return Ok(BTreeMap::new());
    }
    if text.split('&').any(|part| !part.contains('=')) {
        return Err(ApiError::InvalidMetadataFormat);
    }
    Ok(url::form_urlencoded::parse(text.as_bytes())
        .map(|(key, value)| (label(&key), label(&value)))
        .collect())
}

/// Takes the further layers of encoding off. No key and no value of a label holds a percent sign.
fn label(text: &str) -> String {
    let mut text = text.to_owned();
    for _ in 0..2 {
        if !text.contains('%') {
            break;
        }
        text = url::form_urlencoded::parse(text.as_bytes()).map(|(first, _)| first).collect();
    }
    text
}

/// `DELETE /sandboxes/{id}`.
pub(super) async fn delete(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let record = state.sandbox(&id)?;
    let own = state.clone();
    detached(&state, async move { own.remove(&record).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `PATCH /sandboxes/{id}/metadata`.
pub(super) async fn patch_metadata(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Json(PatchSandboxMetadataRequest(patch)): Json<PatchSandboxMetadataRequest>,
) -> Result<axum::Json<Sandbox>, ApiError> {
    let record = state.sandbox(&id)?;
    check_patch(&patch)?;
    let (own, shown) = (state.clone(), Arc::clone(&record));
    detached(&state, async move { own.patch_metadata(&record, patch).await }).await?;
    Ok(axum::Json(shown.to_wire()))
}

/// `POST /sandboxes/{id}/renew-expiration`.
pub(super) async fn renew(
    State(state): State<AppState>,
    Path(id): Path<String>,
    Json(request): Json<RenewSandboxExpirationRequest>,
) -> Result<axum::Json<RenewSandboxExpirationResponse>, ApiError> {
    let record = state.sandbox(&id)?;
    let (own, expires_at) = (state.clone(), request.expires_at);
    detached(&state, async move { own.renew(&record, expires_at).await }).await?;
    Ok(axum::Json(RenewSandboxExpirationResponse { expires_at }))
}

/// Runs a change to its end, whatever becomes of the request that asked for it.
async fn detached<T: Send + 'static>(
    state: &AppState,
    change: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    state
        .tasks()
        .spawn(change)
        .await
        .map_err(|_| ApiError::Internal("a change ended without an answer".to_owned()))?
}

/// `GET /sandboxes/{id}/endpoints/{port}`.
pub(super) async fn endpoint(
    State(state): State<AppState>,
    Path((id, port)): Path<(String, String)>,
    Extension(mount): Extension<Mount>,
    headers: HeaderMap,
    query: Query,
) -> Result<axum::Json<Endpoint>, ApiError> {
    let through_server = query.flag("use_server_proxy", false)?;
    let expires = query.int("expires", 0, u64::MAX)?;
    let port = parse_port(&port)?;
    if expires.is_some() {
        return Err(if through_server {
            ApiError::InvalidParameter("expires and use_server_proxy exclude each other".to_owned())
        } else {
            ApiError::ApiNotSupported("signed endpoints need a gateway: leave expires out".to_owned())
        });
    }
    let record = state.sandbox(&id)?;
    let base = match &state.config().server.eip {
        Some(eip) => eip.split_once("://").map_or(eip.as_str(), |(_, rest)| rest).to_owned(),
        None => format!("{}{}", host(&state, &headers), mount.0),
    };
    let headers = record
        .origin
        .endpoint_token
        .as_ref()
        .map(|token| BTreeMap::from([("OpenSandbox-Secure-Access".to_owned(), token.clone())]));
    Ok(axum::Json(Endpoint { endpoint: format!("{base}/sandboxes/{}/proxy/{port}", record.id()), headers }))
}

/// Under which name the client reached this server.
fn host(state: &AppState, headers: &HeaderMap) -> String {
    headers.get(header::HOST).and_then(|host| host.to_str().ok()).filter(|host| !host.is_empty()).map_or_else(
        || format!("{}:{}", state.config().server.host, state.config().server.port),
        str::to_owned,
    )
}

fn parse_port(text: &str) -> Result<u16, ApiError> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(ApiError::Validation(vec![Issue::new(
            "int_parsing",
            &["path", "port"],
            "a number from 1 to 65535 is expected",
        )]));
    }
    match text.parse::<u16>() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(ApiError::InvalidPort),
    }
}
