//! The router that every listener serves.

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::get;

use crate::app::App;
use crate::{files, http, metrics, proxy};

/// All routes behind the access check.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/ping", get(|| async { http::done() }))
        .merge(files::router())
        .merge(metrics::router())
        .merge(proxy::router())
        .fallback(http::not_found)
        .method_not_allowed_fallback(http::not_found)
        .layer(from_fn_with_state(app.clone(), http::require_token))
        .with_state(app)
}
