//! Reads answers within their time and size.

use std::time::Duration;

use bytes::Bytes;
use reqwest::Response;
use tokio::time::{Instant, timeout};

use crate::backoff::Failure;
use crate::error::{Error, causes};
use crate::settings::Patience;

/// An answer's body. Waiting for the network counts against its time, what the reader does in between does not.
#[derive(Debug)]
pub(crate) struct Body<'a> {
    response: Response,
    patience: &'a Patience,
    registry: &'a str,
    what: &'a str,
    waited: Duration,
    bytes: u64,
}

impl<'a> Body<'a> {
    pub(crate) fn new(response: Response, patience: &'a Patience, registry: &'a str, what: &'a str) -> Self {
        Self { response, patience, registry, what, waited: Duration::ZERO, bytes: 0 }
    }

    /// The next bytes; `None` at the end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, Failure> {
        let left = self.patience.stall.saturating_sub(self.waited);
        let begin = Instant::now();
        let chunk = match timeout(left, self.response.chunk()).await {
            Ok(Ok(chunk)) => chunk,
            Ok(Err(error)) => {
                let reason = format!("{} broke off: {}", self.what, causes(error));
                return Err(Failure::passing(Error::Unavailable { registry: self.registry.into(), reason }));
            }
            Err(_) => return Err(self.stalled()),
        };
        self.waited += begin.elapsed();
        if let Some(chunk) = &chunk {
            self.bytes += chunk.len() as u64;
            if self.bytes >= self.patience.least_bytes {
                (self.waited, self.bytes) = (Duration::ZERO, 0);
            }
        }
        Ok(chunk)
    }

    fn stalled(&self) -> Failure {
        Failure::passing(Error::Stalled {
            registry: self.registry.into(),
            what: self.what.into(),
            least: self.patience.least_bytes,
            after: self.patience.stall,
        })
    }

    fn too_large(&self, limit: u64) -> Failure {
        Failure::last(Error::TooLarge { registry: self.registry.into(), what: self.what.into(), limit })
    }

    /// The whole body, of at most `limit` bytes; a longer one is refused as soon as it is known.
    pub(crate) async fn whole(mut self, limit: u64) -> Result<Vec<u8>, Failure> {
        if self.response.content_length().is_some_and(|length| length > limit) {
            return Err(self.too_large(limit));
        }
        let mut whole = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            if whole.len() as u64 + chunk.len() as u64 > limit {
                return Err(self.too_large(limit));
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole)
    }
}
