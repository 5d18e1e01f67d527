//! Functions that the embedded runtime does not offer: the bodies are checked, then the contract's code is sent.

use axum::extract::{Path, State};
use osb_protocol::lifecycle::{
    CreateFsbTemplateRequest, CreatePoolRequest, CreateSnapshotRequest, ListSnapshotsResponse,
    PaginationInfo, UpdatePoolRequest,
};

use super::extract::{Json, OptionalJson, Query};
use super::sandboxes::page;
use crate::error::{ApiError, Issue};
use crate::state::AppState;

/// `POST /sandboxes/{id}/pause`.
pub(super) async fn pause(State(state): State<AppState>, Path(id): Path<String>) -> ApiError {
    state.sandbox(&id).err().unwrap_or(ApiError::NotSupported("pause"))
}

/// `POST /sandboxes/{id}/resume`.
pub(super) async fn resume(State(state): State<AppState>, Path(id): Path<String>) -> ApiError {
    state.sandbox(&id).err().unwrap_or(ApiError::NotSupported("resume"))
}

/// `POST /sandboxes/{id}/snapshots`.
pub(super) async fn create_snapshot(
    State(state): State<AppState>,
    Path(id): Path<String>,
    OptionalJson(request): OptionalJson<CreateSnapshotRequest>,
) -> ApiError {
    if request.is_some_and(|request| request.name.as_deref() == Some("")) {
        return ApiError::Validation(vec![Issue::new(
            "string_too_short",
            &["body", "name"],
            "at least one character is expected",
        )]);
    }
    state.sandbox(&id).err().unwrap_or(ApiError::SnapshotsNotSupported)
}

/// `GET /snapshots`: there are none.
pub(super) async fn list_snapshots(query: Query) -> Result<axum::Json<ListSnapshotsResponse>, ApiError> {
    let (page, size) = page(&query)?;
    let pagination = PaginationInfo::new(page, size, 0);
    Ok(axum::Json(ListSnapshotsResponse { items: Vec::new(), pagination }))
}

/// `GET` and `DELETE /snapshots/{id}`.
pub(super) async fn no_snapshot() -> ApiError {
    ApiError::SnapshotNotFound
}

/// `POST /pools`.
pub(super) async fn create_pool(Json(_): Json<CreatePoolRequest>) -> ApiError {
    ApiError::PoolsNotSupported
}

/// `PUT /pools/{name}`.
pub(super) async fn update_pool(Json(_): Json<UpdatePoolRequest>) -> ApiError {
    ApiError::PoolsNotSupported
}

/// The other routes of pools.
pub(super) async fn pools() -> ApiError {
    ApiError::PoolsNotSupported
}

/// `POST /templates`.
pub(super) async fn create_template(Json(_): Json<CreateFsbTemplateRequest>) -> ApiError {
    ApiError::TemplatesNotSupported
}

/// `GET /templates`.
pub(super) async fn list_templates(query: Query) -> ApiError {
    page(&query).err().unwrap_or(ApiError::TemplatesNotSupported)
}

/// The other routes of templates.
pub(super) async fn templates() -> ApiError {
    ApiError::TemplatesNotSupported
}
