//! Health, version, and the API's own description.

use std::sync::{Arc, OnceLock};

use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, header};
use osb_protocol::lifecycle::{HealthResponse, VersionResponse};

use crate::error::ApiError;

/// `GET /health`.
pub(super) async fn health() -> axum::Json<HealthResponse> {
    axum::Json(HealthResponse { status: "healthy".to_owned() })
}

/// `GET /version`.
pub(super) async fn version() -> axum::Json<VersionResponse> {
    axum::Json(VersionResponse { version: env!("CARGO_PKG_VERSION").to_owned() })
}

/// `GET /openapi.json`. Made when it is first asked for.
pub(super) async fn openapi() -> Result<Response, ApiError> {
    static TEXT: OnceLock<Option<bytes::Bytes>> = OnceLock::new();
    let text = TEXT.get_or_init(|| super::document().to_json().ok().map(bytes::Bytes::from));
    let text =
        text.clone().ok_or_else(|| ApiError::Internal("the document does not serialise".to_owned()))?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text).into_response())
}

/// `GET /docs` and `/redoc`: the page that shows the document.
pub(super) async fn page() -> Result<Response, ApiError> {
    let file = file("index.html")?;
    // The page lies at `/docs`, its files below.
    let text = String::from_utf8_lossy(&file.bytes).replace("\"./", "\"docs/");
    let html = HeaderValue::from_static("text/html; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, html)], text).into_response())
}

/// `GET /docs/{file}`.
pub(super) async fn asset(Path(name): Path<String>) -> Result<Response, ApiError> {
    let file = file(&name)?;
    let kind = HeaderValue::try_from(file.content_type).map_err(|_| ApiError::RouteNotFound)?;
    Ok(([(header::CONTENT_TYPE, kind)], file.bytes.into_owned()).into_response())
}

fn file(name: &str) -> Result<utoipa_swagger_ui::SwaggerFile<'static>, ApiError> {
    static CONFIG: OnceLock<Arc<utoipa_swagger_ui::Config<'static>>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| Arc::new(utoipa_swagger_ui::Config::new(["/openapi.json"])));
    match utoipa_swagger_ui::serve(name, Arc::clone(config)) {
        Ok(Some(file)) => Ok(file),
        Ok(None) => Err(ApiError::RouteNotFound),
        Err(error) => Err(ApiError::Internal(error.to_string())),
    }
}
