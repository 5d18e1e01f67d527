//! Downloads one layer.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use reqwest::Response;
use reqwest::header::CONTENT_RANGE;
use tokio::sync::mpsc;

use crate::backoff::{Backoff, Failure};
use crate::downloads::{Downloads, blocking};
use crate::error::{Error, Result};
use crate::flight::Flight;
use crate::image::Image;
use crate::manifest::{Digest, Part};
use crate::pace::Body;
use crate::partial::{Blob, Found, Partial};
use crate::source::{Source, pass_over, worth_asking};

/// Bytes after which failures are counted anew.
const PROGRESS: u64 = 1 << 20;

/// Pieces between the network and the disk.
const QUEUE: usize = 16;

/// How an attempt at one source ended.
enum Step {
    Done(Blob),
    Failed(Partial, Error),
}

/// A layer of an image that is being pulled.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) part: Part,
    /// Digest of the unpacked bytes.
    pub(crate) diff_id: Digest,
    pub(crate) flight: Flight<Blob>,
    /// Bytes there, for progress.
    pub(crate) received: AtomicU64,
}

impl Layer {
    pub(crate) fn new(part: Part, diff_id: Digest) -> Self {
        Self { part, diff_id, flight: Flight::default(), received: AtomicU64::new(0) }
    }

    fn what(&self) -> String {
        format!("layer {}", self.part.digest.short())
    }

    /// Brings the layer into the directory of downloads. May be dropped at any time: what is there is taken up by
    /// the next one.
    pub(crate) async fn fetch(&self, image: &Image, downloads: &Downloads) -> Result<Blob> {
        let _permit = image.permits.acquire().await.map_err(|_| Error::Unavailable {
            registry: image.reference.host().into(),
            reason: "the program is ending".into(),
        })?;
        let found = downloads.claim(image.reference.host(), &self.part, &self.received).await?;
        let mut partial = match found {
            Found::Complete(blob) => {
                self.received.store(self.part.size, Ordering::Relaxed);
                return Ok(blob);
            }
            Found::Beginning(partial) => partial,
            Found::Rubbish => return Err(self.malformed("the downloads", "a useless file came back")),
        };
        self.note(&partial);
        let mut failed = self.malformed(image.reference.host(), "there is nowhere to fetch it from");
        for (source, is_last) in worth_asking(&image.sources) {
            match self.fetch_from(source, image, partial).await? {
                Step::Done(blob) => return Ok(blob),
                Step::Failed(beginning, error) => (partial, failed) = (beginning, error),
            }
            if !is_last {
                pass_over(source, &failed);
            }
        }
        Err(failed)
    }

    /// Tries one source until it has given everything or is not worth another attempt. What goes wrong on our own
    /// side, where no other source helps, is the outer error.
    async fn fetch_from(&self, source: &Source, image: &Image, mut partial: Partial) -> Result<Step> {
        let mut backoff = Backoff::new(&source.patience, source.attempts);
        let mut may_restart = true;
        loop {
            let before = partial.len();
            let outcome;
            (partial, outcome) = self.attempt(source, image, partial).await?;
            if partial.len() >= before + PROGRESS {
                backoff.progress();
            }
            let failure = match outcome {
                Err(failure) => failure,
                Ok(()) => {
                    let found;
                    (partial, found) = match partial.finish() {
                        Ok(blob) => return Ok(Step::Done(blob)),
                        Err(wrong) => wrong,
                    };
                    partial.clear()?;
                    self.note(&partial);
                    if before > 0 && may_restart {
                        // The beginning may have been what was wrong.
                        may_restart = false;
                        continue;
                    }
                    self.wrong_digest(source, &found)
                }
            };
            if let Err(error) = backoff.pause(failure).await {
                return Ok(Step::Failed(partial, error));
            }
        }
    }

    /// Asks for what is missing and takes what comes.
    async fn attempt(
        &self,
        source: &Source,
        image: &Image,
        mut partial: Partial,
    ) -> Result<(Partial, Result<(), Failure>)> {
        let name = image.reference.to_string();
        let what = self.what();
        let from = partial.len();
        let asked = source.get(&name, ("blobs", self.part.digest.as_str()), &what, from).await;
        let checked = asked.and_then(|response| self.check(source, &response, from).map(|()| response));
        let response = match checked {
            Ok(response) => response,
            Err(failure) => return Ok((partial, Err(failure))),
        };
        // A registry that knows no ranges, or nothing from here on.
        if from > 0 && response.status().as_u16() != 206 {
            partial.clear()?;
            self.note(&partial);
            if response.status().as_u16() == 416 {
                let error = self.malformed(source.endpoint.name(), "it has no bytes from there on");
                return Ok((partial, Err(Failure::passing(error))));
            }
        }
        self.receive(source, response, partial).await
    }

    /// Holds the head of an answer against what was asked for.
    fn check(&self, source: &Source, response: &Response, from: u64) -> Result<(), Failure> {
        let malformed = |reason: &str| self.malformed(source.endpoint.name(), reason);
        let total = match response.status().as_u16() {
            206 => {
                let range = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
                let range = range.and_then(|range| range.strip_prefix("bytes ")?.split_once('/'));
                let Some((range, total)) = range else {
                    return Err(Failure::last(malformed("a part without its place")));
                };
                let start = range.split('-').next().and_then(|start| start.parse().ok());
                if start != Some(from) || from == 0 {
                    return Err(Failure::last(malformed("another part than was asked for")));
                }
                total.parse().ok()
            }
            200 => response.content_length(),
            _ => None,
        };
        match total {
            Some(total) if total > self.part.size => Err(Failure::last(self.too_large(source))),
            Some(total) if total < self.part.size => Err(Failure::last(self.truncated(source, total))),
            _ => Ok(()),
        }
    }

    /// Takes a body. A thread of its own hashes and writes, so that the network need not wait for either.
    async fn receive(
        &self,
        source: &Source,
        response: Response,
        mut partial: Partial,
    ) -> Result<(Partial, Result<(), Failure>)> {
        let what = self.what();
        let mut len = partial.len();
        let (sender, mut receiver) = mpsc::channel::<Bytes>(QUEUE);
        let writer = blocking(move || {
            while let Some(bytes) = receiver.blocking_recv() {
                partial.append(&bytes)?;
            }
            Ok(partial)
        });
        let mut body = Body::new(response, &source.patience, source.endpoint.name(), &what);
        let reader = async {
            // Dropped at the end of this block, which ends the writer.
            let sender = sender;
            loop {
                match body.chunk().await? {
                    Some(bytes) => {
                        len += bytes.len() as u64;
                        if len > self.part.size {
                            return Err(Failure::last(self.too_large(source)));
                        }
                        // Without a receiver the writer has failed and tells why.
                        if sender.send(bytes).await.is_err() {
                            return Ok(());
                        }
                        self.received.store(len, Ordering::Relaxed);
                    }
                    None if len < self.part.size => {
                        return Err(Failure::passing(self.truncated(source, len)));
                    }
                    None => return Ok(()),
                }
            }
        };
        let (partial, outcome) = tokio::join!(writer, reader);
        let mut partial = partial?;
        if len > self.part.size {
            partial.clear()?;
        }
        Ok((partial, outcome))
    }

    fn note(&self, partial: &Partial) {
        self.received.store(partial.len(), Ordering::Relaxed);
    }

    fn malformed(&self, registry: &str, reason: &str) -> Error {
        Error::Malformed { registry: registry.into(), what: self.what(), reason: reason.into() }
    }

    fn too_large(&self, source: &Source) -> Error {
        let registry = source.endpoint.name().into();
        Error::TooLarge { registry, what: self.what(), limit: self.part.size }
    }

    fn truncated(&self, source: &Source, received: u64) -> Error {
        Error::Truncated {
            registry: source.endpoint.name().into(),
            what: self.what(),
            received,
            expected: self.part.size,
        }
    }

    fn wrong_digest(&self, source: &Source, found: &Digest) -> Failure {
        Failure::last(Error::WrongDigest {
            registry: source.endpoint.name().into(),
            what: self.what(),
            expected: self.part.digest.to_string(),
            found: found.to_string(),
        })
    }
}
