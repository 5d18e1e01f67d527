//! What can go wrong on the way to a server and back.

use std::time::Duration;

use osb_protocol::error::ErrorBody;
use osb_protocol::execd::code;

use crate::foreign;
use crate::output::Output;

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
///
/// ```no_run
/// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
/// match client.sandbox("0b1d…").info().await {
///     Ok(info) => println!("{}", info.status.state),
///     Err(error) if error.is_not_found() => println!("gone"),
///     Err(error) if error.is_unsupported() => println!("this server cannot do that"),
///     Err(error) => {
///         eprintln!("{error}; code {:?}, status {:?}", error.code(), error.status());
///         eprintln!("look for {:?} in the server's log", error.request_id());
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server, or the daemon in the sandbox, answered with an error.
    #[error(transparent)]
    Api(Box<ApiError>),
    /// Nothing was sent: the server cannot be reached.
    #[error("cannot reach {url}: {reason}; {}", foreign::advice(reason))]
    Connect {
        /// Where to.
        url: String,
        /// What the system said.
        reason: String,
    },
    /// The answer did not come in time.
    #[error("{call} did not answer within {}; the server is busy, or the address is another's", in_words(*.limit))]
    Timeout {
        /// Which call.
        call: Call,
        /// How long was waited.
        limit: Duration,
    },
    /// The connection broke after the request was sent; whether it was carried out is not known.
    #[error("connection lost during {call}: {reason}")]
    Broken {
        /// Which call.
        call: Call,
        /// What the system said.
        reason: String,
        /// Whether the other side closed the connection in the middle of its answer.
        early_end: bool,
    },
    /// The answer is not of the protocol.
    #[error("unexpected answer to {call}: {reason}")]
    Unexpected {
        /// Which call.
        call: Call,
        /// What is wrong with it.
        reason: String,
    },
    /// The event stream of a command ended without saying how the command did.
    #[error("the output stream ended before the command did; its state is still with the server")]
    StreamCut,
    /// A background command could not be executed.
    #[error("command could not be started: {0}")]
    NotStarted(String),
    /// The other side closed a terminal's connection, or did not let it begin. Through a server's proxy a refusal
    /// comes so, with code 1008.
    #[error("{call} was closed: {reason} (code {code})")]
    Closed {
        /// Which call.
        call: Call,
        /// Code of the close frame; 4001 means that somebody else took the terminal over.
        code: u16,
        /// What the other side said.
        reason: String,
    },
    /// A command ended with another exit code than 0; see [`Output::checked`].
    #[error("{}", failed(.0))]
    Failed(Box<Output>),
    /// The sandbox was not ready in time.
    #[error("sandbox {id} was not ready within {}", in_words(*.limit))]
    NotReady {
        /// Which.
        id: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The sandbox has ended and will not come to what was waited for.
    #[error("sandbox {id} has ended: {reason}")]
    Ended {
        /// Which.
        id: String,
        /// What the server says of it.
        reason: String,
    },
    /// A snapshot could not be made.
    #[error("snapshot {id} failed: {reason}")]
    SnapshotFailed {
        /// Which.
        id: String,
        /// What the server says of it.
        reason: String,
    },
    /// There is more of it than is taken.
    #[error("{what} is larger than allowed")]
    TooLarge {
        /// What.
        what: String,
    },
    /// An argument or setting cannot be right; nothing was sent.
    #[error("{0}")]
    InvalidArgument(String),
    /// A local file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Error {
    /// The HTTP status, when a server answered.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        self.api().map(|api| api.status)
    }

    /// The server's error code, when it answered.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        self.api().map(|api| api.code.as_str())
    }

    /// What the server answered, if it did.
    #[must_use]
    pub fn api(&self) -> Option<&ApiError> {
        match self {
            Self::Api(api) => Some(api),
            _ => None,
        }
    }

    /// The id under which the server's log knows the request, answered or not.
    #[must_use]
    pub fn request_id(&self) -> Option<&str> {
        match self {
            Self::Api(api) => api.request_id.as_deref(),
            Self::Timeout { call, .. }
            | Self::Broken { call, .. }
            | Self::Unexpected { call, .. }
            | Self::Closed { call, .. } => call.request_id.as_deref(),
            _ => None,
        }
    }

    /// Whether the server, or the daemon in the sandbox, does not offer the function at all: a runtime without
    /// it, or an older version.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        self.api().is_some_and(ApiError::is_unsupported)
    }

    /// Whether the thing asked for does not exist (any more).
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404) && !self.is_unsupported()
    }

    /// Whether the key is absent, wrong, or not good for this.
    #[must_use]
    pub fn is_unauthorized(&self) -> bool {
        matches!(self.status(), Some(401 | 403))
    }

    /// Whether the state of the thing forbids the call.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.status() == Some(409) || matches!(self, Self::Closed { code: 1008 | 4001, .. })
    }

    /// Whether the same call may succeed later: the server is busy, restarting or not there yet.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Api(api) => matches!(api.status, 429 | 502 | 503),
            Self::Connect { .. } => true,
            _ => false,
        }
    }
}

/// A request, for error messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Call {
    /// Method and URL, without query.
    pub what: String,
    /// The value of `X-Request-ID` that was sent.
    pub request_id: Option<String>,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.request_id {
            Some(id) => write!(f, "{} (request {id})", self.what),
            None => f.write_str(&self.what),
        }
    }
}

impl From<&str> for Call {
    fn from(what: &str) -> Self {
        Self { what: what.to_owned(), request_id: None }
    }
}

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// Stable code; `UNEXPECTED_RESPONSE` when the answer had none.
    pub code: String,
    /// For people.
    pub message: String,
    /// Id under which the server's log knows the request.
    pub request_id: Option<String>,
    /// When to try again, if the server said so.
    pub retry_after: Option<Duration>,
}

impl std::error::Error for ApiError {}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, HTTP {}", self.message, self.code, self.status)?;
        if let Some(id) = &self.request_id {
            write!(f, ", request {id}")?;
        }
        write!(f, ")")?;
        if let Some(after) = self.retry_after {
            write!(f, "; try again in {}", in_words(after))?;
        }
        Ok(())
    }
}

/// Code of an error answer that carries none.
pub(crate) const UNEXPECTED_RESPONSE: &str = "UNEXPECTED_RESPONSE";

/// Code of daemons for a path that they do not know.
const NO_SUCH_ROUTE: &str = "NOT_FOUND";
/// What a daemon answers there that has no code.
const NO_SUCH_ROUTE_TEXT: &str = "404 page not found";

/// Most of what a command complained of that is shown.
const SHOWN_LINE: usize = 300;

impl ApiError {
    /// Codes that say that there is no such function here.
    const UNSUPPORTED: [&'static str; 3] =
        [code::NOT_SUPPORTED, osb_protocol::error::code::API_NOT_SUPPORTED, NO_SUCH_ROUTE];

    /// See [`Error::is_unsupported`].
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        self.status == 501 || Self::UNSUPPORTED.contains(&self.code.as_str())
    }

    /// Reads an error answer, whatever its body: gateways in between answer in HTML.
    pub(crate) fn read(
        url: &url::Url,
        status: u16,
        headers: &reqwest::header::HeaderMap,
        body: &[u8],
    ) -> Self {
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let (code, message) = match serde_json::from_slice::<ErrorBody>(body) {
            Ok(body) if !body.code.is_empty() => (body.code, body.message),
            _ if status == 404 && body.trim_ascii() == NO_SUCH_ROUTE_TEXT.as_bytes() => {
                (NO_SUCH_ROUTE.to_owned(), NO_SUCH_ROUTE_TEXT.to_owned())
            }
            _ => (UNEXPECTED_RESPONSE.to_owned(), foreign::error(url, status, headers, body)),
        };
        Self {
            status,
            code,
            message,
            request_id: text("x-request-id"),
            retry_after: text("retry-after").and_then(|value| retry_after(&value)),
        }
    }
}

/// `Retry-After`: whole seconds or an HTTP date.
fn retry_after(value: &str) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let at = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
    let left = at.duration_since(jiff::Timestamp::now());
    Some(Duration::try_from(left).unwrap_or_default())
}

/// How a command failed, with the last thing it complained of.
fn failed(output: &Output) -> String {
    let how = match (output.exit.code, &output.exit.error) {
        (Some(code), _) => format!("command ended with exit code {code}"),
        (None, Some(error)) => format!("command could not be run: {}", error.evalue),
        (None, None) => "command did not end".to_owned(),
    };
    match output.stderr.lines().rfind(|line| !line.trim().is_empty()) {
        Some(line) => format!("{how}: {}", line.chars().take(SHOWN_LINE).collect::<String>()),
        None => how,
    }
}

/// A duration as people say it.
pub(crate) fn in_words(duration: Duration) -> String {
    if duration.subsec_millis() == 0 && duration.as_secs() > 0 {
        format!("{} s", duration.as_secs())
    } else {
        format!("{} ms", duration.as_millis())
    }
}

/// The whole chain of an error's causes in one line; `reqwest` says little in its own message.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use reqwest::header::{HeaderMap, HeaderValue};

    use super::*;

    fn read(status: u16, headers: &HeaderMap, body: &[u8]) -> ApiError {
        ApiError::read(&"http://h/v1/sandboxes".parse().unwrap(), status, headers, body)
    }

    #[test]
    fn error_answers_of_every_shape_are_read() {
        let mut headers = HeaderMap::new();
        headers.insert("x-request-id", HeaderValue::from_static("r1"));
        headers.insert("retry-after", HeaderValue::from_static("3"));
        let error = read(429, &headers, br#"{"code":"SANDBOX::CAPACITY_EXHAUSTED","message":"full"}"#);
        assert_eq!(error.code, "SANDBOX::CAPACITY_EXHAUSTED");
        assert_eq!(
            error.to_string(),
            "full (SANDBOX::CAPACITY_EXHAUSTED, HTTP 429, request r1); try again in 3 s"
        );

        let none = HeaderMap::new();
        for body in [&b"<html>bad gateway</html>"[..], b"\xff\xfe", b"", b"{}", b"{\"code\":\"\"}", b"[1]"] {
            let error = read(502, &none, body);
            assert_eq!(error.code, UNEXPECTED_RESPONSE, "{body:?}");
            assert!(!error.message.is_empty());
        }
        assert!(read(500, &none, &[b'x'; 4000]).message.len() < 310);
    }

    #[test]
    fn what_is_not_offered_is_told_from_what_is_not_there() {
        let api = |status, body: &str| Error::Api(Box::new(read(status, &HeaderMap::new(), body.as_bytes())));
        for (status, body) in [
            (501, r#"{"code":"SNAPSHOT::NOT_IMPLEMENTED","message":"m"}"#),
            (503, r#"{"code":"NOT_SUPPORTED","message":"m"}"#),
            (404, r#"{"code":"NOT_FOUND","message":"404 page not found"}"#),
            (404, "404 page not found\n"),
        ] {
            let error = api(status, body);
            assert!(error.is_unsupported() && !error.is_not_found(), "{error}");
        }
        let absent = api(404, r#"{"code":"FILE_NOT_FOUND","message":"m"}"#);
        assert!(absent.is_not_found() && !absent.is_unsupported());
        assert!(api(401, "").is_unauthorized() && api(409, "").is_conflict());
    }

    #[test]
    fn a_request_is_known_by_its_id_also_without_an_answer() {
        let call = Call { what: "GET http://h/v1/sandboxes".to_owned(), request_id: Some("r1".to_owned()) };
        let error = Error::Timeout { call, limit: Duration::from_secs(3) };
        assert_eq!(error.request_id(), Some("r1"));
        assert_eq!(
            error.to_string(),
            "GET http://h/v1/sandboxes (request r1) did not answer within 3 s; \
             the server is busy, or the address is another's"
        );
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        assert_eq!(retry_after(" 7 "), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert_eq!(retry_after("soon"), None);
        let soon = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(30);
        let date = jiff::fmt::rfc2822::to_string(&soon.to_zoned(jiff::tz::TimeZone::UTC)).unwrap();
        let wait = retry_after(&date).unwrap();
        assert!((25..=30).contains(&wait.as_secs()), "{wait:?}");
    }

    #[test]
    fn only_busy_or_absent_servers_are_worth_another_try() {
        let api = |status| Error::Api(Box::new(read(status, &HeaderMap::new(), b"")));
        assert!(api(429).is_retryable() && api(503).is_retryable());
        assert!(!api(500).is_retryable() && !api(404).is_retryable());
        assert!(api(404).is_not_found());
        assert!(Error::Connect { url: String::new(), reason: String::new() }.is_retryable());
        assert!(!Error::StreamCut.is_retryable());
    }
}
