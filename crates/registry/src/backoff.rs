//! When to try again, and when not.

use std::time::Duration;

use crate::error::Error;
use crate::settings::Patience;

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Box<Error>,
    pub(crate) again: Again,
}

/// Whether another attempt may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// The same question gets the same answer.
    Never,
    /// It may, after the usual wait.
    Later,
    /// It may, after the wait that the registry asks for.
    After(Duration),
}

impl Failure {
    pub(crate) fn last(error: Error) -> Self {
        Self { error: Box::new(error), again: Again::Never }
    }

    pub(crate) fn passing(error: Error) -> Self {
        Self { error: Box::new(error), again: Again::Later }
    }
}

/// Counts failures in a row.
#[derive(Debug)]
pub(crate) struct Backoff<'a> {
    patience: &'a Patience,
    attempts: u32,
    failures: u32,
}

impl<'a> Backoff<'a> {
    /// At most `attempts` in a row.
    pub(crate) fn new(patience: &'a Patience, attempts: u32) -> Self {
        Self { patience, attempts, failures: 0 }
    }

    /// Progress was made: what comes counts anew.
    pub(crate) fn progress(&mut self) {
        self.failures = 0;
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// The failure's error, when there is no sense in another one.
    pub(crate) async fn pause(&mut self, failure: Failure) -> Result<(), Error> {
        self.failures += 1;
        match self.wait(failure.again) {
            Some(wait) => {
                tracing::debug!(error = %failure.error, ?wait, "will try again");
                tokio::time::sleep(wait).await;
                Ok(())
            }
            None => Err(*failure.error),
        }
    }

    fn wait(&self, again: Again) -> Option<Duration> {
        if again == Again::Never || self.failures >= self.attempts {
            return None;
        }
        let doubled = self.patience.first_wait.saturating_mul(1 << (self.failures - 1).min(16));
        let usual = doubled.min(self.patience.longest_wait);
        match again {
            Again::After(asked) if asked > self.patience.longest_wait => None,
            Again::After(asked) => Some(asked.max(self.patience.first_wait)),
            _ => Some(usual),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_double_and_end() {
        let patience = Patience::default();
        let failure = |again| Failure {
            error: Box::new(Error::Unavailable { registry: "r".into(), reason: "down".into() }),
            again,
        };
        let mut backoff = Backoff::new(&patience, 5);
        let begin = tokio::time::Instant::now();
        for _ in 0..4 {
            backoff.pause(failure(Again::Later)).await.unwrap();
        }
        assert_eq!(begin.elapsed().as_millis() / 100, 75);
        backoff.pause(failure(Again::Later)).await.unwrap_err();
        backoff.progress();
        let begin = tokio::time::Instant::now();
        backoff.pause(failure(Again::After(Duration::from_secs(7)))).await.unwrap();
        assert_eq!(begin.elapsed().as_secs(), 7);
        backoff.pause(failure(Again::After(Duration::from_secs(3600)))).await.unwrap_err();
        Backoff::new(&patience, 5).pause(failure(Again::Never)).await.unwrap_err();
    }
}
