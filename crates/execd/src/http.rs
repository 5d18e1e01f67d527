//! What all routes share: the error body, lenient extractors, the access check and the answer to unknown routes.

use std::fmt;

use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use osb_protocol::execd::{ACCESS_TOKEN_HEADER, code};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::app::App;
use crate::binding::Access;

/// Largest JSON body that is read.
pub const MAX_JSON_BODY: usize = 32 << 20;

/// A failed request: status, stable code, and a message that says what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// Status of the answer.
    pub status: StatusCode,
    /// One of [`osb_protocol::execd::code`].
    pub code: &'static str,
    /// For people.
    pub message: String,
}

impl ApiError {
    /// An error with any status.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into() }
    }

    /// 400: body or parameter cannot be read or breaks a rule.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code::INVALID_REQUEST_BODY, message)
    }

    /// 400: a required parameter is absent.
    #[must_use]
    pub fn missing_query(name: &str) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            code::MISSING_QUERY,
            format!("the query parameter '{name}' is required"),
        )
    }

    /// 500: something failed while it was done.
    pub fn runtime(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, code::RUNTIME_ERROR, message)
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.status.as_u16(), self.code, self.message)
    }
}

impl std::error::Error for ApiError {}

#[derive(Serialize)]
struct Body<'a> {
    code: &'a str,
    message: &'a str,
    /// Clients of the first releases read the refusal from this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let error = (self.code == code::UNAUTHORIZED).then_some(self.message.as_str());
        let mut answer = json(&Body { code: self.code, message: &self.message, error });
        *answer.status_mut() = self.status;
        answer
    }
}

/// 200 with a JSON body, in the content type clients of Go's framework expect.
pub fn json<T: Serialize + ?Sized>(value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => {
            ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"))], text)
                .into_response()
        }
        // Only maps with keys that are no strings fail, and no answer has one; say so rather than panic.
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("the answer cannot be written as JSON: {error}"))
                .into_response()
        }
    }
}

/// 200 with an empty body and no content type: success without data.
#[must_use]
pub fn done() -> Response {
    StatusCode::OK.into_response()
}

/// A JSON body, read leniently as the protocol asks: the content type is not looked at, unknown members and
/// bytes after the first value are ignored.
#[derive(Debug, Clone)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &App) -> Result<Self, ApiError> {
        let body = read_body(request, MAX_JSON_BODY).await?;
        parse_json(&body).map(Self)
    }
}

/// Like [`Json`], but an absent or blank body is `None`.
#[derive(Debug, Clone)]
pub struct OptionalJson<T>(pub Option<T>);

impl<T: DeserializeOwned> FromRequest<App> for OptionalJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &App) -> Result<Self, ApiError> {
        let body = read_body(request, MAX_JSON_BODY).await?;
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self(None));
        }
        parse_json(&body).map(|value| Self(Some(value)))
    }
}

/// Collects a request's body up to `limit` bytes.
pub async fn read_body(request: Request, limit: usize) -> Result<Bytes, ApiError> {
    match Limited::new(request.into_body(), limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            code::INVALID_REQUEST_BODY,
            format!("the body is larger than {limit} bytes"),
        )),
        Err(error) => Err(ApiError::invalid(format!("the body cannot be read: {error}"))),
    }
}

/// Parses the first JSON value of `body`.
pub fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut values = serde_json::Deserializer::from_slice(body).into_iter::<T>();
    match values.next() {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(ApiError::invalid(format!("the body is not the expected JSON: {error}"))),
        None => Err(ApiError::invalid("the body is empty; a JSON object is expected")),
    }
}

/// The query string as decoded pairs, in order; keys may repeat.
#[derive(Debug, Clone, Default)]
pub struct Params(Vec<(String, String)>);

impl Params {
    /// The first value of a key; an empty value counts as absent.
    #[must_use]
    pub fn get<'s>(&'s self, name: &str) -> Option<&'s str> {
        self.all(name).find(|value| !value.is_empty())
    }

    /// All values of a key.
    pub fn all<'s, 'n>(&'s self, name: &'n str) -> impl Iterator<Item = &'s str> + use<'s, 'n> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// As [`Params::get`], with the error of an absent parameter.
    pub fn required<'s>(&'s self, name: &str) -> Result<&'s str, ApiError> {
        self.get(name).ok_or_else(|| ApiError::missing_query(name))
    }
}

impl FromRequestParts<App> for Params {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, ApiError> {
        let query = parts.uri.query().unwrap_or_default();
        Ok(Self(form_urlencoded::parse(query.as_bytes()).into_owned().collect()))
    }
}

/// Lets a request pass when no token is set, the path is open, or the header carries the token.
pub async fn require_token(State(app): State<App>, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/ping" | "/ready" | "/internal/init");
    if !open && app.lifecycle.is_shut() {
        let message = "the sandbox is not initialized yet: POST /internal/init comes first";
        return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code::SERVICE_UNAVAILABLE, message)
            .into_response();
    }
    if open || may_pass(&app.binding().access, request.headers()) {
        next.run(request).await
    } else {
        ApiError::new(
            StatusCode::UNAUTHORIZED,
            code::UNAUTHORIZED,
            "Unauthorized: invalid or missing header X-EXECD-ACCESS-TOKEN",
        )
        .into_response()
    }
}

fn may_pass(access: &Access, headers: &HeaderMap) -> bool {
    access.admits(headers.get(ACCESS_TOKEN_HEADER).map(HeaderValue::as_bytes))
}

/// 404 of unknown routes and of known ones called with another method.
pub async fn not_found() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "NOT_FOUND", "404 page not found")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_read_leniently() {
        #[derive(serde::Deserialize)]
        struct One {
            a: u8,
        }
        assert_eq!(parse_json::<One>(br#"{"a":1,"b":2} trailing"#).unwrap().a, 1);
        for bad in ["", "  ", "{", "[]", r#"{"a":"x"}"#] {
            assert_eq!(parse_json::<One>(bad.as_bytes()).err().unwrap().status, 400, "{bad}");
        }
    }
}
