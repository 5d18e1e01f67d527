//! The routes of the lifecycle API.

mod create;
mod diagnostics;
mod docs;
mod extract;
mod hooks;
mod metrics;
mod objects;
mod openapi;
mod policy;
mod sandboxes;
mod unsupported;
mod volumes;
mod words;

use axum::Router;
use axum::routing::{MethodFilter, get, on, patch, post};

use crate::error::ApiError;
use crate::state::AppState;

pub use openapi::document;

/// Where a request came in: put into each request before it is routed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mount(pub(crate) &'static str);

/// All routes but the proxy's.
pub(crate) fn router() -> Router<AppState> {
    Router::new()
        .merge(lifecycle())
        .nest("/v1", lifecycle().route("/metrics/events", post(metrics::report)))
        .route("/health", get(docs::health))
        .route("/version", get(docs::version))
        .route("/openapi.json", get(docs::openapi))
        .route("/docs", get(docs::page))
        .route("/docs/{file}", get(docs::asset))
        .route("/redoc", get(docs::page))
        .fallback(async || ApiError::RouteNotFound)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
}

/// The routes that exist bare and under `/v1`.
fn lifecycle() -> Router<AppState> {
    Router::new()
        .route("/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::delete))
        .route("/sandboxes/{id}/metadata", patch(sandboxes::patch_metadata))
        .route("/sandboxes/{id}/renew-expiration", post(sandboxes::renew))
        .route("/sandboxes/{id}/endpoints/{port}", get(sandboxes::endpoint))
        .route("/sandboxes/{id}/pause", post(unsupported::pause))
        .route("/sandboxes/{id}/resume", post(unsupported::resume))
        .route("/sandboxes/{id}/snapshots", post(unsupported::create_snapshot))
        .route("/snapshots", get(unsupported::list_snapshots))
        .route("/snapshots/{id}", get(unsupported::no_snapshot).delete(unsupported::no_snapshot))
        .route(
            "/sandboxes/{id}/networkpolicy",
            on(MethodFilter::GET, policy::get).put(policy::put).patch(policy::patch).delete(policy::delete),
        )
        .route("/sandboxes/{id}/diagnostics/logs", get(diagnostics::logs))
        .route("/sandboxes/{id}/diagnostics/events", get(diagnostics::events))
        .route("/sandboxes/{id}/diagnostics/inspect", get(diagnostics::inspect))
        .route("/sandboxes/{id}/diagnostics/summary", get(diagnostics::summary))
        .route("/pools", get(unsupported::pools).post(unsupported::create_pool))
        .route(
            "/pools/{name}",
            get(unsupported::pools).put(unsupported::update_pool).delete(unsupported::pools),
        )
        .route("/templates", get(unsupported::list_templates).post(unsupported::create_template))
        .route("/templates/{id}", get(unsupported::templates).delete(unsupported::templates))
}
