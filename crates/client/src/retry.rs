//! When a failed request is sent again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use reqwest::Method;

/// Longest `Retry-After` that is waited for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// How often and after what time a request is repeated.
///
/// Repeated are requests that never left (any method), and requests whose repetition changes nothing (`GET`,
/// `HEAD`, `PUT`, `DELETE`) after status 429, 502 or 503. Streams are not repeated once they have begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Repetitions after the first attempt.
    pub max_retries: u32,
    /// Wait before the first repetition; each further one waits twice as long.
    pub initial_backoff: Duration,
    /// Longest wait.
    pub max_backoff: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_retries: 3,
            initial_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(30),
        }
    }
}

impl RetryPolicy {
    /// Never repeats.
    #[must_use]
    pub fn disabled() -> Self {
        Self { max_retries: 0, ..Self::default() }
    }

    /// The wait before repetition number `retry` (from 0), or `None` when there is none left.
    pub(crate) fn wait(&self, retry: u32, asked: Option<Duration>) -> Option<Duration> {
        if retry >= self.max_retries {
            return None;
        }
        if let Some(asked) = asked {
            return Some(asked.min(MAX_RETRY_AFTER));
        }
        let full = self.initial_backoff.saturating_mul(1 << retry.min(20)).min(self.max_backoff);
        // Between half and all of it, so that clients that failed together do not come back together.
        Some(full / 2 + full.mul_f64(fraction() / 2.0))
    }
}

/// Whether sending a request twice is as good as sending it once.
pub(crate) fn is_safe(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::PUT, Method::DELETE].contains(method)
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

    #[test]
    fn waits_grow_to_the_limit_and_end() {
        let policy = RetryPolicy { max_retries: 40, ..RetryPolicy::default() };
        for retry in 0..40 {
            let wait = policy.wait(retry, None).unwrap();
            let full = Duration::from_millis(500 << retry.min(10)).min(Duration::from_secs(30));
            assert!(wait >= full / 2 && wait <= full, "{retry}: {wait:?}");
        }
        assert_eq!(policy.wait(40, None), None);
        assert_eq!(RetryPolicy::disabled().wait(0, None), None);
    }

    #[test]
    fn the_server_may_ask_for_a_wait_within_reason() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.wait(0, Some(Duration::from_secs(2))), Some(Duration::from_secs(2)));
        assert_eq!(policy.wait(0, Some(Duration::from_secs(9999))), Some(MAX_RETRY_AFTER));
        assert_eq!(policy.wait(3, Some(Duration::from_secs(2))), None);
    }
}
