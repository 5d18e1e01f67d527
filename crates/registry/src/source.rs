//! One repository at one endpoint, asked with one login.

use std::sync::Arc;

use reqwest::Response;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE};
use tokio::sync::Mutex;

use crate::auth::{self, Challenge, Login};
use crate::backoff::{Backoff, Failure};
use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use crate::manifest::{self, Digest};
use crate::pace::Body;
use crate::settings::Patience;

/// Where an image may be fetched from.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) repository: String,
    login: Login,
    /// Held while it is renewed, so that it is renewed once.
    authorization: Mutex<Option<HeaderValue>>,
    pub(crate) patience: Arc<Patience>,
    /// Attempts in a row; fewer where there is another source.
    pub(crate) attempts: u32,
}

/// A small document that is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question<'a> {
    /// Name of the image, for messages.
    pub(crate) image: &'a str,
    /// `manifests` or `blobs`.
    pub(crate) kind: &'static str,
    /// Tag or digest.
    pub(crate) reference: &'a str,
    /// What it must be, where that is known.
    pub(crate) digest: Option<&'a Digest>,
    /// Most bytes.
    pub(crate) limit: u64,
}

/// A document as it came.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) digest: Digest,
    pub(crate) content_type: String,
    /// Who gave it.
    pub(crate) registry: String,
}

impl Source {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        path: &str,
        login: Login,
        patience: Arc<Patience>,
        is_last: bool,
    ) -> Self {
        const ATTEMPTS_OF_MIRRORS: u32 = 2;
        let repository = endpoint.repository(path);
        let attempts = if is_last { patience.attempts } else { patience.attempts.min(ATTEMPTS_OF_MIRRORS) };
        Self { endpoint, repository, login, authorization: Mutex::new(None), patience, attempts }
    }

    /// Asks for a part, from byte `from` on, and answers the registry's questions about us.
    pub(crate) async fn get(
        &self,
        image: &str,
        (kind, reference): (&str, &str),
        what: &str,
        from: u64,
    ) -> Result<Response, Failure> {
        let mut headers = HeaderMap::new();
        // A compressed body would not be the bytes of the digest.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if kind == "manifests" {
            headers.insert(ACCEPT, HeaderValue::from_static(manifest::ACCEPT));
        }
        if from > 0
            && let Ok(range) = HeaderValue::from_str(&format!("bytes={from}-"))
        {
            headers.insert(RANGE, range);
        }
        let url = self.endpoint.url(&self.repository, kind, reference);
        let mut authorization = self.authorization.lock().await.clone();
        let mut renewed = false;
        loop {
            let sent = authorization.clone();
            let (response, at_home) =
                self.endpoint.get(url.clone(), sent, &headers, what, &self.patience).await?;
            let status = response.status().as_u16();
            match status {
                200 | 206 => return Ok(response),
                416 if from > 0 => return Ok(response),
                401 if at_home && !renewed => {
                    let challenge = Challenge::read(response.headers());
                    authorization = Some(self.renew(authorization, challenge).await?);
                    renewed = true;
                }
                401 | 403 | 404 if at_home => {
                    return Err(self.refusal(response, image, (kind, reference)).await);
                }
                // What a signed address stands for may have expired; the next one is fresh.
                401 | 403 | 404 => {
                    let host = response.url().host_str().unwrap_or_default();
                    let reason = format!("{host}, to which it redirects, answers {status} for {what}");
                    let registry = self.endpoint.name().into();
                    return Err(Failure::passing(Error::Unavailable { registry, reason }));
                }
                200..300 => return Err(self.endpoint.malformed(what, format!("status {status}"))),
                _ => return Err(self.endpoint.failed(response, what, &self.patience, &self.login).await),
            }
        }
    }

    async fn refusal(&self, response: Response, image: &str, (kind, part): (&str, &str)) -> Failure {
        let status = response.status().as_u16();
        let message = crate::endpoint::message(response, &self.patience).await;
        let message = self.login.redact(message);
        let registry = self.endpoint.name().to_owned();
        match status {
            401 => auth::refused(&self.login, &self.endpoint, &self.repository, message),
            403 => {
                let repository = self.repository.clone();
                Failure::last(Error::Denied { registry, repository, message })
            }
            // Its manifest was there, or nobody would know of the part.
            _ if kind == "blobs" => {
                let (reference, digest) = (image.into(), part.into());
                Failure::last(Error::BlobMissing { reference, registry, digest, message })
            }
            _ => Failure::last(Error::NotFound { reference: image.into(), registry, message }),
        }
    }

    /// A new `Authorization`, unless somebody has renewed the refused one meanwhile.
    async fn renew(
        &self,
        refused: Option<HeaderValue>,
        challenge: Option<Challenge>,
    ) -> Result<HeaderValue, Failure> {
        let mut current = self.authorization.lock().await;
        match &*current {
            Some(value) if refused.as_ref() != Some(value) => Ok(value.clone()),
            _ => {
                let (endpoint, repository) = (&self.endpoint, &self.repository);
                let value =
                    auth::answer(challenge, &self.login, endpoint, repository, &self.patience).await?;
                *current = Some(value.clone());
                Ok(value)
            }
        }
    }

    async fn ask(&self, question: &Question<'_>) -> Result<Answer, Failure> {
        let registry = self.endpoint.name();
        let noun = if question.kind == "manifests" { "manifest" } else { "configuration" };
        let what = format!("{noun} of {}", question.image);
        let response = self.get(question.image, (question.kind, question.reference), &what, 0).await?;
        if response.status().as_u16() != 200 {
            return Err(self.endpoint.malformed(&what, "a part, which was not asked for"));
        }
        let header = |name: &str| {
            let value = response.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let content_type = header(CONTENT_TYPE.as_str());
        let promised = Digest::parse(&header("docker-content-digest"));
        let bytes = Body::new(response, &self.patience, registry, &what).whole(question.limit).await?;
        let digest = Digest::of(&bytes);
        let expected = question.digest.or(promised.as_ref());
        if let Some(expected) = expected.filter(|expected| **expected != digest) {
            return Err(Failure::last(Error::WrongDigest {
                registry: registry.into(),
                what,
                expected: expected.to_string(),
                found: digest.to_string(),
            }));
        }
        Ok(Answer { bytes, digest, content_type, registry: registry.into() })
    }

    async fn ask_again(&self, question: &Question<'_>) -> Result<Answer> {
        let mut backoff = Backoff::new(&self.patience, self.attempts);
        loop {
            match self.ask(question).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => backoff.pause(failure).await?,
            }
        }
    }
}

/// Which of the sources to ask, in order: mirrors that work, and the last one always.
pub(crate) fn worth_asking(sources: &[Source]) -> impl Iterator<Item = (&Source, bool)> {
    let last = sources.len().saturating_sub(1);
    let numbered = sources.iter().enumerate().map(move |(number, source)| (source, number == last));
    numbered.filter(|(source, is_last)| *is_last || !source.endpoint.rests())
}

/// A document from the first source that has it.
///
/// # Errors
/// The last source's: it is the registry that the image's name tells.
pub(crate) async fn document(sources: &[Source], question: &Question<'_>) -> Result<Answer> {
    let mut failed = None;
    for (source, is_last) in worth_asking(sources) {
        match source.ask_again(question).await {
            Ok(answer) => return Ok(answer),
            Err(error) => {
                if !is_last {
                    pass_over(source, &error);
                }
                failed = Some(error);
            }
        }
    }
    Err(failed.unwrap_or_else(|| Error::Unavailable {
        registry: question.image.into(),
        reason: "there is nowhere to fetch it from".into(),
    }))
}

/// Notes that a mirror did not help.
pub(crate) fn pass_over(source: &Source, error: &Error) {
    source.endpoint.note(error);
    let mirror = source.endpoint.name();
    // A mirror that lacks an image is no event.
    if matches!(error, Error::NotFound { .. } | Error::BlobMissing { .. }) {
        tracing::debug!(mirror, %error, "mirror passed over");
    } else {
        tracing::warn!(mirror, %error, "mirror passed over");
    }
}
