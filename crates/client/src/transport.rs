//! Sending one request: repetition, time limits, and turning whatever comes back into a value or an error.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use osb_protocol::lifecycle::REQUEST_ID_HEADER;
use reqwest::header::HeaderValue;
use reqwest::{RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};

use crate::error::{ApiError, Call, Error, Result, chain};
use crate::foreign;
use crate::retry::{RetryEvent, RetryPolicy};

/// Most of an error answer that is read.
const MAX_ERROR_BODY: usize = 64 << 10;
/// Most of an answer that is not a file's content. What a sandbox answers may never end.
const MAX_BODY: usize = 64 << 20;

/// Sends requests.
#[derive(Debug, Clone)]
pub(crate) struct Transport {
    pub(crate) http: reqwest::Client,
    pub(crate) retry: RetryPolicy,
    /// The id of all requests; each has its own when this is absent.
    pub(crate) request_id: Option<HeaderValue>,
}

/// A successful answer whose body is still to come.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) call: Call,
    pub(crate) response: Response,
}

impl Answer {
    /// The next piece of the body.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>> {
        self.response.chunk().await.map_err(|error| broken(&self.call, &error))
    }

    /// All of the body, however much that is.
    pub(crate) async fn bytes(self) -> Result<Bytes> {
        self.response.bytes().await.map_err(|error| broken(&self.call, &error))
    }

    /// The whole answer, read as JSON within a time limit.
    pub(crate) async fn json<T: DeserializeOwned>(self, limit: Duration) -> Result<T> {
        let (call, bytes) = self.genuine()?.within(limit).await?;
        serde_json::from_slice(&bytes).map_err(|error| Error::Unexpected { call, reason: error.to_string() })
    }

    /// Refuses the page of some other web server: those answer with 200 too.
    pub(crate) fn genuine(self) -> Result<Self> {
        if !foreign::is_page(self.response.headers()) {
            return Ok(self);
        }
        let Self { call, response } = self;
        let reason = foreign::page(response.status().as_u16(), response.headers());
        Err(Error::Unexpected { call, reason })
    }

    /// The body of an answer that cannot be large.
    async fn body(&mut self) -> Result<Bytes> {
        let mut body = BytesMut::new();
        while let Some(piece) = self.chunk().await? {
            if body.len() + piece.len() > MAX_BODY {
                return Err(Error::TooLarge { what: format!("the answer to {}", self.call) });
            }
            body.extend_from_slice(&piece);
        }
        Ok(body.freeze())
    }

    /// The same within a time limit, with the call it belongs to.
    pub(crate) async fn within(mut self, limit: Duration) -> Result<(Call, Bytes)> {
        match timeout(limit, self.body()).await {
            Ok(body) => body.map(|body| (self.call, body)),
            Err(_) => Err(Error::Timeout { call: self.call, limit }),
        }
    }
}

/// How the attempts of one request ended.
struct Outcome {
    result: Result<Answer>,
    /// An attempt was sent and got no answer: it may have been carried out.
    lost: bool,
}

impl Transport {
    /// Without repetition.
    pub(crate) fn once(&self) -> Self {
        Self { retry: RetryPolicy::disabled(), ..self.clone() }
    }

    /// Sends a request and waits at most `limit` for the head of a successful answer.
    pub(crate) async fn open(&self, request: RequestBuilder, limit: Duration) -> Result<Answer> {
        self.attempts(request, limit).await?.result
    }

    /// Sends the request of a removal. A repetition that finds nothing means that the attempt before, whose
    /// answer was lost, has removed it.
    pub(crate) async fn remove(&self, request: RequestBuilder, limit: Duration) -> Result<()> {
        let Outcome { result, lost } = self.attempts(request, limit).await?;
        match result {
            Ok(answer) => answer.genuine()?.within(limit).await.map(drop),
            Err(error) if lost && error.is_not_found() => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn attempts(&self, request: RequestBuilder, limit: Duration) -> Result<Outcome> {
        let mut request =
            request.build().map_err(|error| Error::InvalidArgument(format!("request: {}", chain(&error))))?;
        let id = request.headers().get(REQUEST_ID_HEADER).or(self.request_id.as_ref()).cloned();
        let id = id.unwrap_or_else(new_request_id);
        let call = Call {
            what: format!("{} {}", request.method(), foreign::shown(request.url())),
            request_id: id.to_str().ok().map(str::to_owned),
        };
        request.headers_mut().insert(REQUEST_ID_HEADER, id);

        let began = Instant::now();
        let attempt_limit = self.retry.attempt_timeout.map_or(limit, |own| own.min(limit));
        let (mut retry, mut last_wait, mut lost) = (0, None, false);
        loop {
            // A body that is read from somewhere cannot be sent twice.
            let next = request.try_clone();
            let (method, url) = (request.method().clone(), foreign::shown(request.url()));
            let error = match timeout(attempt_limit, self.attempt(request, &call)).await {
                Ok(Ok(response)) => return Ok(Outcome { result: Ok(Answer { call, response }), lost }),
                Ok(Err(error)) => error,
                Err(_) => Error::Timeout { call: call.clone(), limit: attempt_limit },
            };
            lost |= matches!(error, Error::Broken { .. } | Error::Timeout { .. });
            let asked = error.api().and_then(|api| api.retry_after);
            let cause = self.retry.cause(&method, &error);
            let wait = self.retry.wait(retry, last_wait, asked).filter(|wait| {
                self.retry.deadline.is_none_or(|deadline| began.elapsed() + *wait <= deadline)
            });
            let (Some(next), Some(cause), Some(wait)) = (next, cause, wait) else {
                return Ok(Outcome { result: Err(error), lost });
            };
            if let Some(observer) = &self.retry.observer {
                observer(&RetryEvent {
                    attempt: retry + 1,
                    method: method.to_string(),
                    url,
                    cause,
                    backoff: wait,
                    request_id: call.request_id.clone(),
                    error: error.to_string(),
                });
            }
            tokio::time::sleep(wait).await;
            request = next;
            last_wait = Some(wait);
            retry += 1;
        }
    }

    async fn attempt(&self, request: reqwest::Request, call: &Call) -> Result<Response> {
        let url = request.url().origin().ascii_serialization();
        let mut response = self.http.execute(request).await.map_err(|error| unanswered(&error, call, url))?;
        let status = response.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
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
        let mut error = ApiError::read(response.url(), status.as_u16(), response.headers(), &body);
        error.request_id = error.request_id.or_else(|| call.request_id.clone());
        Err(Error::Api(Box::new(error)))
    }

    /// Sends a request and reads a JSON answer within `limit`.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
        limit: Duration,
    ) -> Result<T> {
        self.open(request, limit).await?.json(limit).await
    }

    /// Sends a request and reads a text, which is no page. Bytes that are no UTF-8 are replaced.
    pub(crate) async fn text(&self, request: RequestBuilder, limit: Duration) -> Result<String> {
        let (_, bytes) = self.open(request, limit).await?.genuine()?.within(limit).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sends a request whose answer's body does not matter.
    pub(crate) async fn done(&self, request: RequestBuilder, limit: Duration) -> Result<()> {
        self.open(request, limit).await?.genuine()?.within(limit).await.map(drop)
    }
}

/// The error of a request that got no answer.
fn unanswered(error: &reqwest::Error, call: &Call, url: String) -> Error {
    let no_http = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse)
    };
    if error.is_connect() {
        return Error::Connect { url, reason: causes(error) };
    }
    match std::iter::successors(std::error::Error::source(error), |cause| cause.source()).any(no_http) {
        true => Error::Unexpected { call: call.clone(), reason: foreign::no_http(&url) },
        false => match broken(call, error) {
            // So do some servers end a connection that does not begin with TLS.
            Error::Broken { call, reason, early_end } if reason.contains("reset by peer") => {
                Error::Broken { call, reason: format!("{reason}{}", foreign::reset(&url)), early_end }
            }
            other => other,
        },
    }
}

/// The error of a connection that did not last.
pub(crate) fn broken(call: &Call, error: &reqwest::Error) -> Error {
    let mut source = std::error::Error::source(error);
    let mut early_end = false;
    while let Some(cause) = source {
        early_end |= cause.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message);
        source = cause.source();
    }
    Error::Broken { call: call.clone(), reason: causes(error), early_end }
}

/// The causes of a `reqwest` error without its own text, which repeats the whole URL.
fn causes(error: &reqwest::Error) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), chain);
    text.strip_prefix("client error (Connect): ").map(str::to_owned).unwrap_or(text)
}

/// An id that no other request has.
fn new_request_id() -> HeaderValue {
    let id = uuid::Uuid::new_v4().simple().to_string();
    // Hexadecimal digits can always be sent.
    HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("-"))
}
