//! How requests are read: bodies, queries and path values, with errors that name the place and never the value.

use axum::extract::{FromRequest, FromRequestParts, Request};
use http::request::Parts;
use http::{HeaderMap, header};
use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;

use super::objects::Objects;
use crate::error::{ApiError, Issue, Loc};
use crate::state::AppState;

/// Largest request body of these routes.
pub(crate) const BODY_LIMIT: usize = 4 << 20;

/// Which members of a request object may be unknown. Decided here for all of them.
pub(crate) trait Closed {
    /// Whether an unknown member at `path` (names joined by dots) is refused even when the server is not strict.
    fn always(path: &str) -> bool {
        let _ = path;
        false
    }
}

impl Closed for osb_protocol::lifecycle::CreateSandboxRequest {
    fn always(path: &str) -> bool {
        path.starts_with("lifecycle.")
    }
}

impl Closed for osb_protocol::lifecycle::CreateFsbTemplateRequest {
    fn always(_: &str) -> bool {
        true
    }
}

impl Closed for osb_protocol::lifecycle::CreatePoolRequest {}
impl Closed for osb_protocol::lifecycle::UpdatePoolRequest {}
impl Closed for osb_protocol::lifecycle::CreateSnapshotRequest {}
impl Closed for osb_protocol::lifecycle::PatchSandboxMetadataRequest {}
impl Closed for osb_protocol::lifecycle::RenewSandboxExpirationRequest {}
impl Closed for osb_protocol::lifecycle::MetricsEvent {}
impl Closed for osb_protocol::lifecycle::NetworkPolicy {}
impl Closed for Vec<osb_protocol::lifecycle::NetworkRule> {}
impl Closed for Vec<String> {}

/// A JSON body.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned + Closed> FromRequest<AppState> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let bytes = read(body, &parts.headers).await?;
        parse(&parts.headers, &bytes, state.config().server.strict_requests).map(Self)
    }
}

/// A JSON body that may be absent.
pub(crate) struct OptionalJson<T>(pub(crate) Option<T>);

impl<T: DeserializeOwned + Closed> FromRequest<AppState> for OptionalJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let bytes = read(body, &parts.headers).await?;
        if bytes.trim_ascii().is_empty() || bytes.trim_ascii() == b"null" {
            return Ok(Self(None));
        }
        parse(&parts.headers, &bytes, state.config().server.strict_requests).map(|value| Self(Some(value)))
    }
}

/// Reads a whole body of at most [`BODY_LIMIT`] bytes.
pub(crate) async fn read(body: axum::body::Body, headers: &HeaderMap) -> Result<bytes::Bytes, ApiError> {
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > BODY_LIMIT as u64) {
        return Err(ApiError::BodyTooLarge(BODY_LIMIT));
    }
    axum::body::to_bytes(body, BODY_LIMIT).await.map_err(|error| {
        let too_large = std::error::Error::source(&error)
            .is_some_and(<dyn std::error::Error>::is::<http_body_util::LengthLimitError>);
        if too_large {
            ApiError::BodyTooLarge(BODY_LIMIT)
        } else {
            ApiError::BadRequest("the request body broke off".to_owned())
        }
    })
}

/// Parses a JSON body.
pub(crate) fn parse<T: DeserializeOwned + Closed>(
    headers: &HeaderMap,
    bytes: &[u8],
    strict: bool,
) -> Result<T, ApiError> {
    if !is_json(headers) {
        return Err(issue("content_type", "a JSON body with Content-Type: application/json is expected"));
    }
    let mut unknown = Vec::new();
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let mut ignored = |path: serde_ignored::Path<'_>| {
        let path = path.to_string().replace(".?", "");
        if strict || T::always(&path) {
            unknown.push(path);
        }
    };
    let objects = Objects(serde_ignored::Deserializer::new(&mut json, &mut ignored));
    let read: T = serde_path_to_error::deserialize(objects)
        .map_err(|error| ApiError::Validation(vec![describe(&error)]))?;
    json.end().map_err(|_| issue("json_invalid", "one JSON value and nothing behind it is expected"))?;
    if unknown.is_empty() {
        return Ok(read);
    }
    Err(ApiError::Validation(
        unknown
            .iter()
            .map(|path| {
                let steps: Vec<&str> = std::iter::once("body").chain(path.split('.')).collect();
                Issue::new("extra_forbidden", &steps, "this member is not known")
            })
            .collect(),
    ))
}

fn issue(kind: &'static str, message: &str) -> ApiError {
    ApiError::Validation(vec![Issue::new(kind, &["body"], message)])
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

/// A parse error without the value that caused it.
fn describe(error: &serde_path_to_error::Error<serde_json::Error>) -> Issue {
    let mut loc = vec![Loc::Name("body".to_owned())];
    for segment in error.path() {
        match segment {
            Segment::Seq { index } => loc.push(Loc::Index(*index)),
            Segment::Map { key } => loc.push(Loc::Name(key.clone())),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    let text = error.inner().to_string();
    // Behind the line and column the parser's text may hold nothing of ours.
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text);
    if let Some(rest) = text.strip_prefix("missing field `") {
        loc.push(Loc::Name(rest.trim_end_matches('`').to_owned()));
        return Issue { kind: "missing", loc, msg: "this member is required".to_owned() };
    }
    if text.starts_with("duplicate field `") {
        return Issue { kind: "duplicate", loc, msg: "a member is sent twice".to_owned() };
    }
    if text.starts_with("lone leading surrogate") || text.starts_with("unexpected end of hex escape") {
        let msg = "a text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character";
        return Issue { kind: "value_error", loc, msg: msg.to_owned() };
    }
    if !error.inner().is_data() {
        let msg = format!("the body is not valid JSON (line {})", error.inner().line());
        return Issue { kind: "json_invalid", loc: vec![Loc::Name("body".to_owned())], msg };
    }
    let expects = ["invalid type: ", "invalid value: ", "invalid length ", "unknown variant "];
    if expects.iter().any(|start| text.starts_with(start)) {
        // What was sent stands before the last of these; what stands behind is ours.
        let msg = text.rsplit_once(", expected ").map_or_else(
            || "another value is expected".to_owned(),
            |(_, wanted)| format!("{} is expected", plain(wanted)),
        );
        return Issue { kind: "value_error", loc, msg };
    }
    if text.starts_with("data did not match any variant") {
        return Issue { kind: "value_error", loc, msg: "a value of another type is expected".to_owned() };
    }
    // Texts of our own visitors.
    Issue { kind: "value_error", loc, msg: text.to_owned() }
}

/// Words of JSON for the parser's own.
fn plain(wanted: &str) -> &str {
    match wanted {
        "a map" => "an object",
        "a sequence" => "a list",
        wanted if wanted.starts_with("struct ") => "an object",
        wanted => wanted,
    }
}

/// The parameters of a query string, in order.
pub(crate) struct Query(Vec<(String, String)>);

impl FromRequestParts<AppState> for Query {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Self::Rejection> {
        let query = parts.uri.query().unwrap_or_default();
        Ok(Self(url::form_urlencoded::parse(query.as_bytes()).into_owned().collect()))
    }
}

impl Query {
    /// The last value of a parameter.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// All values of a parameter.
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// A whole number in a range.
    pub(crate) fn int(&self, name: &'static str, min: u64, max: u64) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let text = text.trim();
        match text.strip_suffix(".0").unwrap_or(text).parse::<u64>() {
            Ok(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(ApiError::Validation(vec![Issue::new(
                "int_range",
                &["query", name],
                if max == u64::MAX {
                    format!("a whole number of at least {min} is expected")
                } else {
                    format!("a whole number from {min} to {max} is expected")
                },
            )])),
        }
    }

    /// A switch.
    pub(crate) fn flag(&self, name: &'static str, default: bool) -> Result<bool, ApiError> {
        let Some(text) = self.get(name) else { return Ok(default) };
        match text.trim().to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" | "t" | "y" => Ok(true),
            "false" | "0" | "no" | "off" | "f" | "n" => Ok(false),
            _ => Err(ApiError::Validation(vec![Issue::new(
                "bool_parsing",
                &["query", name],
                "true or false is expected",
            )])),
        }
    }
}
