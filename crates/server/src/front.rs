//! What every request passes before it is routed, and every answer after: request id, CORS, the key, the proxy,
//! spellings of paths.

use std::panic::AssertUnwindSafe;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version, header};
use osb_protocol::lifecycle::{API_KEY_HEADER, REQUEST_ID_HEADER};
use subtle::ConstantTimeEq;
use tower::ServiceExt;
use tracing::Instrument;

use crate::access::Access;
use crate::api::{self, Mount};
use crate::error::ApiError;
use crate::proxy;
use crate::state::AppState;

/// Paths that need no key, by what they begin with.
const OPEN: [&str; 5] = ["/health", "/version", "/docs", "/redoc", "/openapi.json"];
/// Most characters of a request id that are kept.
const REQUEST_ID_MAX: usize = 256;

/// The whole server as one service.
pub fn app(state: AppState) -> Router {
    let routes: Router = api::router().with_state(state.clone());
    Router::new().fallback(move |request: Request| {
        let (state, routes) = (state.clone(), routes.clone());
        async move { front(&state, routes, request).await }
    })
}

async fn front(state: &AppState, routes: Router, request: Request) -> Response {
    let id = request_id(request.headers());
    let cors = Cors::of(request.headers());
    let access = Access::begin(&request);
    let mut response = match cors.preflight(&request) {
        Some(response) => response,
        None => {
            let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default());
            AssertUnwindSafe(handle(state, routes, request).instrument(span))
                .catch_unwind()
                .await
                .unwrap_or_else(|_| ApiError::Internal("a handler panicked".to_owned()).into_response())
        }
    };
    cors.apply(response.headers_mut());
    if let Some(access) = access {
        access.end(response.status(), &id);
    }
    response.headers_mut().insert(REQUEST_ID_HEADER, id);
    response
}

async fn handle(state: &AppState, routes: Router, mut request: Request) -> Response {
    if !has_good_host(&request) {
        let message = "exactly one Host header is expected, with a host name and perhaps a port";
        return ApiError::BadRequest(message.to_owned()).into_response();
    }
    collapse_slashes(&mut request);
    let host = request.headers().get(header::HOST).cloned();
    let proxied = state.proxy().destination(request.uri(), host.as_ref()).is_some();
    if let Err(error) = authorize(state, &request, proxied) {
        return error.into_response();
    }
    let request = if proxied {
        match state.proxy().call(state, request).await {
            Ok(response) => return response,
            Err(request) => request,
        }
    } else {
        request
    };
    route(routes, request).await
}

/// What RFC 9112 asks of the Host header: one in HTTP/1.1, never two, and nothing but a host in it.
fn has_good_host(request: &Request) -> bool {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => request.version() < Version::HTTP_11,
        (Some(host), None) => {
            let bytes = host.as_bytes();
            bytes.is_empty() || (!bytes.contains(&b'@') && Authority::try_from(bytes).is_ok())
        }
        (Some(_), Some(_)) => false,
    }
}

/// The client's scheme, as a proxy before this server tells it. Whoever lies misleads himself alone.
fn scheme(headers: &HeaderMap) -> &'static str {
    let told = headers.get("x-forwarded-proto").map(HeaderValue::as_bytes).unwrap_or_default();
    let first = told.split(|byte| *byte == b',').next().unwrap_or_default();
    if first.trim_ascii().eq_ignore_ascii_case(b"https") { "https" } else { "http" }
}

async fn route(routes: Router, mut request: Request) -> Response {
    let path = request.uri().path();
    let mount = if path.starts_with("/v1/") { "/v1" } else { "" };
    if path.len() > 1 && path.ends_with('/') {
        let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).map(str::to_owned);
        let uri = request.uri().clone();
        let base = host.map(|host| format!("{}://{host}", scheme(request.headers())));
        return redirect(routes, &uri, base.as_deref())
            .await
            .unwrap_or_else(|| ApiError::RouteNotFound.into_response());
    }
    if matches!(*request.method(), Method::HEAD | Method::OPTIONS) {
        return probe(routes, request.uri().clone()).await;
    }
    if !decodes(request.uri().path()) {
        return ApiError::RouteNotFound.into_response();
    }
    request.extensions_mut().insert(Mount(mount));
    // The error of a router is no error at all.
    let mut response = routes.oneshot(request).await.unwrap_or_else(|never| match never {});
    if response.status() == StatusCode::METHOD_NOT_ALLOWED {
        without_head(response.headers_mut());
    }
    response
}

/// Asks the router about a path with a method that no route takes: 405 tells that there is a route.
async fn probe(routes: Router, uri: Uri) -> Response {
    let mut request = Request::new(Body::empty());
    *request.method_mut() = Method::TRACE;
    *request.uri_mut() = uri;
    let mut response = routes.oneshot(request).await.unwrap_or_else(|never| match never {});
    without_head(response.headers_mut());
    response
}

/// `Allow` without the HEAD that the router derives from GET; these routes do not take it.
fn without_head(headers: &mut HeaderMap) {
    let Some(allow) = headers.get(header::ALLOW).and_then(|value| value.to_str().ok()) else { return };
    let methods = allow.split(',').map(str::trim).filter(|m| *m != "HEAD").collect::<Vec<_>>().join(", ");
    if let Ok(value) = HeaderValue::try_from(methods) {
        headers.insert(header::ALLOW, value);
    }
}

/// A path that would match without the slash at its end leads there.
async fn redirect(routes: Router, uri: &Uri, base: Option<&str>) -> Option<Response> {
    let path = uri.path().trim_end_matches('/');
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let target = format!("{path}{query}");
    let wanted: Uri = target.parse().ok()?;
    if path.is_empty() || probe(routes, wanted).await.status() != StatusCode::METHOD_NOT_ALLOWED {
        return None;
    }
    let location = base.map_or_else(|| target.clone(), |base| format!("{base}{target}"));
    let location = HeaderValue::try_from(location).ok()?;
    Some((StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, location)]).into_response())
}

/// Several slashes in front count as one: some clients join a base address ending in `/` with the path.
fn collapse_slashes(request: &mut Request) {
    if !request.uri().path().starts_with("//") {
        return;
    }
    let Some(whole) = request.uri().path_and_query() else { return };
    let target = format!("/{}", whole.as_str().trim_start_matches('/'));
    if let Ok(target) = PathAndQuery::try_from(target) {
        let mut parts = request.uri().clone().into_parts();
        parts.path_and_query = Some(target);
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
}

/// Checks the key, where one is needed.
fn authorize(state: &AppState, request: &Request, proxied: bool) -> Result<(), ApiError> {
    let Some(key) = &state.config().server.api_key else { return Ok(()) };
    let path = request.uri().path();
    if !proxied && OPEN.iter().any(|open| path.starts_with(open)) {
        return Ok(());
    }
    if proxied && is_open_proxy_path(path) {
        return Ok(());
    }
    let sent = request.headers().get(API_KEY_HEADER).map_or(&[][..], HeaderValue::as_bytes);
    if sent.is_empty() {
        Err(ApiError::MissingApiKey)
    } else if bool::from(sent.ct_eq(key.0.as_bytes())) {
        Ok(())
    } else {
        Err(ApiError::InvalidApiKey)
    }
}

/// Proxy paths are open, the sandbox's id being the gate, unless the port is no number or the decoded path holds
/// `..`. A host name that leads to a sandbox owns its whole path.
fn is_open_proxy_path(path: &str) -> bool {
    match proxy::matches(path) {
        Some(matched) => matched.port.bytes().all(|b| b.is_ascii_digit()) && !holds_dots(path),
        None => true,
    }
}

/// Whether a path holds `..` after percent-decoding.
fn holds_dots(path: &str) -> bool {
    let mut bytes = path.bytes();
    let mut before = 0;
    while let Some(byte) = bytes.next() {
        let mut ahead = bytes.clone();
        let decoded = match (byte, ahead.next(), ahead.next()) {
            (b'%', Some(b'2'), Some(b'e' | b'E')) => {
                bytes = ahead;
                b'.'
            }
            _ => byte,
        };
        if decoded == b'.' && before == b'.' {
            return true;
        }
        before = decoded;
    }
    false
}

/// Whether a path is text after percent-decoding.
fn decodes(path: &str) -> bool {
    let mut bytes = path.bytes();
    let mut decoded = Vec::with_capacity(path.len());
    while let Some(byte) = bytes.next() {
        let mut ahead = bytes.clone();
        let digits = (ahead.next().map(char::from), ahead.next().map(char::from));
        match (byte, digits) {
            (b'%', (Some(high), Some(low))) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                let value = |digit: char| digit.to_digit(16).unwrap_or_default() as u8;
                decoded.push(value(high) << 4 | value(low));
                bytes = ahead;
            }
            _ => decoded.push(byte),
        }
    }
    std::str::from_utf8(&decoded).is_ok()
}

fn request_id(headers: &HeaderMap) -> HeaderValue {
    let sent = headers.get(REQUEST_ID_HEADER).map(HeaderValue::as_bytes).unwrap_or_default().trim_ascii();
    let sent = &sent[..sent.len().min(REQUEST_ID_MAX)];
    match HeaderValue::from_bytes(sent) {
        Ok(value) if !sent.is_empty() => value,
        _ => {
            let id = uuid::Uuid::new_v4().simple().to_string();
            HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("-"))
        }
    }
}

/// Cross-origin rules: any origin, with credentials.
struct Cors {
    origin: Option<HeaderValue>,
}

impl Cors {
    fn of(headers: &HeaderMap) -> Self {
        Self { origin: headers.get(header::ORIGIN).cloned() }
    }

    /// The answer to a preflight; it is given before any key is asked for.
    fn preflight(&self, request: &Request) -> Option<Response> {
        self.origin.as_ref()?;
        request.headers().get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
        if request.method() != Method::OPTIONS {
            return None;
        }
        let mut response = "OK".into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"),
        );
        if let Some(names) = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        Some(response)
    }

    fn apply(self, headers: &mut HeaderMap) {
        let Some(origin) = self.origin else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        headers
            .insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("OPEN-SANDBOX-ORIGIN"));
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_are_no_text_are_seen() {
        for path in ["/a", "/%41%c3%BC", "/%", "/%4", "/%zz", "/a%2fb"] {
            assert!(decodes(path), "{path}");
        }
        for path in ["/%ff", "/a/%c3/b", "/%C3%28"] {
            assert!(!decodes(path), "{path}");
        }
    }

    #[test]
    fn dots_are_seen_through_encoding() {
        for path in ["/a/../b", "/a/%2e%2e/b", "/a/.%2E", "/a/%2e.", "/x..y"] {
            assert!(holds_dots(path), "{path}");
        }
        for path in ["/a/./b", "/a.b.c", "/%2e/%2e", "/%2", "/a%2"] {
            assert!(!holds_dots(path), "{path}");
        }
    }
}
