//! Sending one request: repetition, time limits, and turning whatever comes back into a value or an error.

use std::time::Duration;

use bytes::Bytes;
use reqwest::{RequestBuilder, Response};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::error::{ApiError, Error, Result, chain};
use crate::retry::{RetryPolicy, is_safe};

/// Most of an error answer that is read.
const MAX_ERROR_BODY: usize = 64 << 10;

/// Sends requests.
#[derive(Debug, Clone)]
pub(crate) struct Transport {
    pub(crate) http: reqwest::Client,
    pub(crate) retry: RetryPolicy,
}

/// A successful answer whose body is still to come.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) what: String,
    pub(crate) response: Response,
}

impl Transport {
    /// Sends a request and waits at most `limit` for the head of a successful answer.
    pub(crate) async fn open(&self, request: RequestBuilder, limit: Duration) -> Result<Answer> {
        let request =
            request.build().map_err(|error| Error::InvalidArgument(format!("request: {}", chain(&error))))?;
        let what = format!("{} {}", request.method(), request.url().path());
        let mut next = Some(request);
        let mut retry = 0;
        while let Some(request) = next {
            // A body that is read from somewhere cannot be sent twice.
            next = request.try_clone();
            let safe = is_safe(request.method());
            let error = match timeout(limit, self.attempt(request, &what)).await {
                Ok(Ok(response)) => return Ok(Answer { what, response }),
                Ok(Err(error)) => error,
                Err(_) => return Err(Error::Timeout { what, limit }),
            };
            let again = match &error {
                Error::Connect { .. } => true,
                other => safe && other.is_retryable(),
            };
            let asked = error.api().and_then(|api| api.retry_after);
            match self.retry.wait(retry, asked) {
                Some(wait) if again && next.is_some() => tokio::time::sleep(wait).await,
                _ => return Err(error),
            }
            retry += 1;
        }
        // The loop ends only by returning: `next` is checked before it goes round.
        Err(Error::Broken { what, reason: "request cannot be repeated".to_owned() })
    }

    async fn attempt(&self, request: reqwest::Request, what: &str) -> Result<Response> {
        let url = request.url().origin().ascii_serialization();
        let mut response = self.http.execute(request).await.map_err(|error| unanswered(&error, what, url))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let mut body = Vec::new();
        // An error answer that breaks off is still an error answer.
        while let Ok(Some(chunk)) = response.chunk().await {
            body.extend_from_slice(&chunk);
            if body.len() >= MAX_ERROR_BODY {
                break;
            }
        }
        Err(Error::Api(Box::new(ApiError::read(status.as_u16(), response.headers(), &body))))
    }

    /// Sends a request and reads a JSON answer within `limit`.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
        limit: Duration,
    ) -> Result<T> {
        let (what, bytes) = self.whole(request, limit).await?;
        serde_json::from_slice(&bytes).map_err(|error| Error::Unexpected { what, reason: error.to_string() })
    }

    /// Sends a request whose answer's body does not matter.
    pub(crate) async fn done(&self, request: RequestBuilder, limit: Duration) -> Result<()> {
        self.whole(request, limit).await.map(drop)
    }

    async fn whole(&self, request: RequestBuilder, limit: Duration) -> Result<(String, Bytes)> {
        let Answer { what, response } = self.open(request, limit).await?;
        match timeout(limit, response.bytes()).await {
            Ok(Ok(bytes)) => Ok((what, bytes)),
            Ok(Err(error)) => Err(Error::Broken { what, reason: causes(&error) }),
            Err(_) => Err(Error::Timeout { what, limit }),
        }
    }
}

/// The error of a request that got no answer.
fn unanswered(error: &reqwest::Error, what: &str, url: String) -> Error {
    let reason = causes(error);
    if error.is_connect() {
        Error::Connect { url, reason }
    } else {
        Error::Broken { what: what.to_owned(), reason }
    }
}

/// The causes of a `reqwest` error without its own text, which repeats the whole URL.
pub(crate) fn causes(error: &reqwest::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), chain)
}
