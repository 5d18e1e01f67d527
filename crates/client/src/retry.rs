//! When a failed request is sent again.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;

use crate::error::Error;

/// Longest `Retry-After` that is waited for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// How often and after what time a request is repeated.
///
/// Repeated are requests that never left (any method), and requests whose repetition changes nothing (`GET`,
/// `HEAD`, `PUT`, `DELETE`, `OPTIONS`) when the connection breaks, no answer comes in time, or the status is one
/// of a list. What is streamed up is sent once; streams that come down are not repeated once they have begun.
///
/// ```
/// use std::time::Duration;
/// use opensandbox::RetryPolicy;
///
/// let patient = RetryPolicy { max_retries: 8, ..RetryPolicy::default() };
/// let watched = RetryPolicy::default().on_retry(|event| eprintln!("{} {:?}", event.url, event.cause));
/// ```
#[derive(Clone)]
pub struct RetryPolicy {
    /// Repetitions after the first attempt.
    pub max_retries: u32,
    /// Wait before the first repetition.
    pub initial_backoff: Duration,
    /// Longest wait.
    pub max_backoff: Duration,
    /// By how much waits grow.
    pub backoff_multiplier: f64,
    /// How waits are spread.
    pub jitter: Jitter,
    /// Statuses after which a request is repeated whose repetition changes nothing.
    pub statuses: Vec<u16>,
    /// Statuses after which any other request is repeated: none, unless you know that the server did nothing.
    pub unsafe_statuses: Vec<u16>,
    /// How long one attempt may take, when that is less than the call's own limit.
    pub attempt_timeout: Option<Duration>,
    /// No repetition begins later than this after the first attempt.
    pub deadline: Option<Duration>,
    /// Called before each wait.
    pub observer: Option<Observer>,
}

/// Called before a request is repeated; see [`RetryPolicy::on_retry`].
pub type Observer = Arc<dyn Fn(&RetryEvent) + Send + Sync>;

/// How waits are spread, so that clients that failed together do not come back together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Jitter {
    /// Not at all.
    None,
    /// Between nothing and the full wait.
    Full,
    /// Between the first wait and three times the last one.
    #[default]
    Decorrelated,
}

/// A repetition that is about to happen.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetryEvent {
    /// The attempt that failed, from 1.
    pub attempt: u32,
    /// The method.
    pub method: String,
    /// The URL, without query.
    pub url: String,
    /// Why.
    pub cause: RetryCause,
    /// How long is waited.
    pub backoff: Duration,
    /// The request's id.
    pub request_id: Option<String>,
    /// The error's text.
    pub error: String,
}

/// Why a request is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetryCause {
    /// It never left.
    PreSend,
    /// The connection broke.
    Transport,
    /// The connection was closed before the answer was complete.
    UnexpectedEof,
    /// No answer came in time.
    ReadTimeout,
    /// The answer has this status.
    Status(u16),
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_retries: 3,
            initial_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(30),
            backoff_multiplier: 2.0,
            jitter: Jitter::default(),
            statuses: vec![429, 502, 503],
            unsafe_statuses: Vec::new(),
            attempt_timeout: None,
            deadline: None,
            observer: None,
        }
    }
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryPolicy")
            .field("max_retries", &self.max_retries)
            .field("initial_backoff", &self.initial_backoff)
            .field("max_backoff", &self.max_backoff)
            .field("jitter", &self.jitter)
            .finish_non_exhaustive()
    }
}

impl RetryPolicy {
    /// Never repeats.
    #[must_use]
    pub fn disabled() -> Self {
        Self { max_retries: 0, ..Self::default() }
    }

    /// Tells of each repetition.
    #[must_use]
    pub fn on_retry(mut self, observer: impl Fn(&RetryEvent) + Send + Sync + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// Why a request that failed so is to be repeated; `None` when it is not.
    pub(crate) fn cause(&self, method: &Method, error: &Error) -> Option<RetryCause> {
        let safe = is_safe(method);
        match error {
            Error::Connect { .. } => Some(RetryCause::PreSend),
            Error::Api(api) => {
                let statuses = if safe { &self.statuses } else { &self.unsafe_statuses };
                statuses.contains(&api.status).then_some(RetryCause::Status(api.status))
            }
            Error::Timeout { .. } if safe => Some(RetryCause::ReadTimeout),
            Error::Broken { early_end: true, .. } if safe => Some(RetryCause::UnexpectedEof),
            Error::Broken { .. } if safe => Some(RetryCause::Transport),
            _ => None,
        }
    }

    /// The wait before repetition number `retry` (from 0) when the last wait was `last`, or `None` when there is
    /// none left.
    pub(crate) fn wait(
        &self,
        retry: u32,
        last: Option<Duration>,
        asked: Option<Duration>,
    ) -> Option<Duration> {
        if retry >= self.max_retries {
            return None;
        }
        if let Some(asked) = asked {
            return Some(asked.min(MAX_RETRY_AFTER));
        }
        let cap = self.max_backoff.as_secs_f64();
        let initial = self.initial_backoff.as_secs_f64().min(cap);
        let exponent = i32::try_from(retry).unwrap_or(i32::MAX);
        let grown = (initial * self.backoff_multiplier.max(1.0).powi(exponent)).min(cap);
        let seconds = match self.jitter {
            Jitter::None => grown,
            Jitter::Full => grown * fraction(),
            Jitter::Decorrelated => {
                let top = last.map_or(initial, |last| last.as_secs_f64()).max(initial) * 3.0;
                initial + (top.min(cap) - initial).max(0.0) * fraction()
            }
        };
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(self.max_backoff))
    }
}

/// Whether sending a request twice is as good as sending it once.
fn is_safe(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS].contains(method)
}

/// A number in 0..1; the standard library's hasher keys are random.
fn fraction() -> f64 {
    let bits = RandomState::new().build_hasher().finish() >> 40;
    #[allow(clippy::cast_precision_loss)] // 24 bits fit.
    let value = bits as f64 / f64::from(1 << 24);
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ApiError;

    fn waits(policy: &RetryPolicy) -> Vec<Duration> {
        let mut last = None;
        (0..)
            .map_while(|retry| {
                last = policy.wait(retry, last, None);
                last
            })
            .collect()
    }

    #[test]
    fn waits_grow_to_the_limit_and_end() {
        let second = Duration::from_secs(1);
        let exact = RetryPolicy { jitter: Jitter::None, max_retries: 8, ..RetryPolicy::default() };
        assert_eq!(waits(&exact), [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0].map(|s| second.mul_f64(s)));
        assert!(waits(&RetryPolicy::disabled()).is_empty());
        for _ in 0..50 {
            let full = RetryPolicy { jitter: Jitter::Full, ..exact.clone() };
            assert!(waits(&full).iter().zip(waits(&exact)).all(|(wait, most)| *wait <= most));
            let spread = waits(&RetryPolicy { max_retries: 20, ..RetryPolicy::default() });
            assert_eq!(spread.len(), 20);
            let mut last = Duration::from_millis(500);
            for wait in spread {
                assert!(wait >= Duration::from_millis(500) && wait <= Duration::from_secs(30));
                assert!(wait <= last * 3, "{wait:?} after {last:?}");
                last = wait;
            }
        }
        let odd =
            RetryPolicy { backoff_multiplier: f64::NAN, jitter: Jitter::None, ..RetryPolicy::default() };
        assert_eq!(waits(&odd).len(), 3);
    }

    #[test]
    fn the_server_may_ask_for_a_wait_within_reason() {
        let policy = RetryPolicy::default();
        let second = Duration::from_secs(1);
        assert_eq!(policy.wait(0, None, Some(2 * second)), Some(2 * second));
        assert_eq!(policy.wait(0, None, Some(9999 * second)), Some(MAX_RETRY_AFTER));
        assert_eq!(policy.wait(3, None, Some(2 * second)), None);
    }

    #[test]
    fn what_may_have_been_done_is_not_repeated() {
        let policy = RetryPolicy::default();
        let url = "http://h/".parse().unwrap();
        let none = reqwest::header::HeaderMap::new();
        let api = |status| Error::Api(Box::new(ApiError::read(&url, status, &none, b"")));
        let connect = Error::Connect { url: String::new(), reason: String::new() };
        let broken = Error::Broken { call: "".into(), reason: String::new(), early_end: true };
        let slow = Error::Timeout { call: "".into(), limit: Duration::ZERO };
        for method in [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS] {
            for status in [429, 502, 503] {
                assert_eq!(policy.cause(&method, &api(status)), Some(RetryCause::Status(status)));
            }
            assert_eq!(policy.cause(&method, &api(504)), None);
            assert_eq!(policy.cause(&method, &api(500)), None);
            assert_eq!(policy.cause(&method, &broken), Some(RetryCause::UnexpectedEof));
            assert_eq!(policy.cause(&method, &slow), Some(RetryCause::ReadTimeout));
        }
        for method in [Method::POST, Method::PATCH] {
            assert_eq!(policy.cause(&method, &connect), Some(RetryCause::PreSend));
            for error in [&api(503), &broken, &slow] {
                assert_eq!(policy.cause(&method, error), None);
            }
        }
        let bold = RetryPolicy { unsafe_statuses: vec![503], ..policy };
        assert_eq!(bold.cause(&Method::POST, &api(503)), Some(RetryCause::Status(503)));
    }
}
