//! What can go wrong on the way to a server and back.

use std::time::Duration;

use osb_protocol::error::ErrorBody;

/// Result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server, or the daemon in the sandbox, answered with an error.
    #[error(transparent)]
    Api(Box<ApiError>),
    /// Nothing was sent: the server cannot be reached.
    #[error("cannot reach {url}: {reason}; is the server running, and is OPEN_SANDBOX_DOMAIN right?")]
    Connect {
        /// Where to.
        url: String,
        /// What the system said.
        reason: String,
    },
    /// The answer did not come in time.
    #[error("{what} did not answer within {}", in_words(*.limit))]
    Timeout {
        /// Method and path.
        what: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The connection broke after the request was sent; whether it was carried out is not known.
    #[error("connection lost during {what}: {reason}")]
    Broken {
        /// Method and path.
        what: String,
        /// What the system said.
        reason: String,
    },
    /// The answer is not of the protocol.
    #[error("unexpected answer to {what}: {reason}")]
    Unexpected {
        /// Method and path.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The event stream of a command ended without saying how the command did.
    #[error("the output stream ended before the command did; its state is still with the server")]
    StreamCut,
    /// A background command could not be executed.
    #[error("command could not be started: {0}")]
    NotStarted(String),
    /// The sandbox was not ready in time.
    #[error("sandbox {id} was not ready within {}", in_words(*.limit))]
    NotReady {
        /// Which.
        id: String,
        /// How long was waited.
        limit: Duration,
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

    /// Whether the thing asked for does not exist (any more).
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
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

/// Most of an unreadable error body that is shown.
const SHOWN_BODY: usize = 300;

impl ApiError {
    /// Reads an error answer, whatever its body: gateways in between answer in HTML.
    pub(crate) fn read(status: u16, headers: &reqwest::header::HeaderMap, body: &[u8]) -> Self {
        let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let (code, message) = match serde_json::from_slice::<ErrorBody>(body) {
            Ok(body) if !body.code.is_empty() => (body.code, body.message),
            _ => (UNEXPECTED_RESPONSE.to_owned(), unreadable(status, body)),
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

fn unreadable(status: u16, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text = text.trim();
    if text.is_empty() {
        return format!("the answer has status {status} and no body; is this an OpenSandbox server?");
    }
    let mut shown: String = text.chars().take(SHOWN_BODY).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
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

    #[test]
    fn error_answers_of_every_shape_are_read() {
        let mut headers = HeaderMap::new();
        headers.insert("x-request-id", HeaderValue::from_static("r1"));
        headers.insert("retry-after", HeaderValue::from_static("3"));
        let error =
            ApiError::read(429, &headers, br#"{"code":"SANDBOX::CAPACITY_EXHAUSTED","message":"full"}"#);
        assert_eq!(error.code, "SANDBOX::CAPACITY_EXHAUSTED");
        assert_eq!(
            error.to_string(),
            "full (SANDBOX::CAPACITY_EXHAUSTED, HTTP 429, request r1); try again in 3 s"
        );

        let none = HeaderMap::new();
        for body in [&b"<html>bad gateway</html>"[..], b"\xff\xfe", b"", b"{}", b"{\"code\":\"\"}", b"[1]"] {
            let error = ApiError::read(502, &none, body);
            assert_eq!(error.code, UNEXPECTED_RESPONSE, "{body:?}");
            assert!(!error.message.is_empty());
        }
        assert!(ApiError::read(500, &none, &[b'x'; 4000]).message.len() < 310);
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
        let api = |status| Error::Api(Box::new(ApiError::read(status, &HeaderMap::new(), b"")));
        assert!(api(429).is_retryable() && api(503).is_retryable());
        assert!(!api(500).is_retryable() && !api(404).is_retryable());
        assert!(api(404).is_not_found());
        assert!(Error::Connect { url: String::new(), reason: String::new() }.is_retryable());
        assert!(!Error::StreamCut.is_retryable());
    }
}
