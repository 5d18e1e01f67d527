//! Finds out what a name stands for.

use std::collections::HashSet;
use std::sync::Arc;

use osb_protocol::image::Reference;
use tokio::sync::Semaphore;

use crate::error::{Error, Result, printable};
use crate::layer::Layer;
use crate::manifest::{self, Digest, Document, Manifest, Offer, Refusal};
use crate::source::{Answer, Question, Source, document};
use crate::{Platform, Settings};

/// Most bytes of an index or manifest.
const MOST_MANIFEST: u64 = 4 << 20;

/// Most bytes of a configuration.
const MOST_CONFIG: u64 = 8 << 20;

/// Indexes in indexes.
const MOST_NESTED: usize = 4;

/// An image as its registry describes it; only its layers are still to come.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) reference: Reference,
    /// What the name itself stands for.
    pub(crate) digest: Digest,
    pub(crate) manifest: Answer,
    pub(crate) media_type: String,
    pub(crate) config: Answer,
    pub(crate) platform: Platform,
    /// Each once, in the order of the manifest.
    pub(crate) layers: Vec<Layer>,
    pub(crate) sources: Vec<Source>,
    /// Downloads from this registry.
    pub(crate) permits: Arc<Semaphore>,
}

impl Image {
    /// Asks for everything but layers.
    pub(crate) async fn resolve(
        reference: Reference,
        wanted: &Platform,
        sources: Vec<Source>,
        permits: Arc<Semaphore>,
        settings: &Settings,
    ) -> Result<Self> {
        let name = reference.to_string();
        let (answer, manifest, digest) = select(&reference, &name, wanted, &sources).await?;
        let question = Question {
            image: &name,
            kind: "blobs",
            reference: manifest.config.digest.as_str(),
            digest: Some(&manifest.config.digest),
            limit: MOST_CONFIG,
        };
        let too_large = |what: &str, limit| Error::TooLarge {
            registry: answer.registry.clone(),
            what: format!("{what} of {name}"),
            limit,
        };
        if manifest.config.size > MOST_CONFIG {
            return Err(too_large("configuration", MOST_CONFIG));
        }
        let total: u64 = manifest.layers.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
        if total > settings.max_image_bytes {
            return Err(too_large("the sum of all layers", settings.max_image_bytes));
        }
        let config = document(&sources, &question).await?;
        let read = manifest::config(&config.bytes, manifest.layers.len())
            .map_err(|refusal| refused(refusal, &config.registry, &name, "configuration"))?;
        let platform = read.platform.unwrap_or_else(|| wanted.clone());
        if platform.fitness(wanted).is_none() {
            return Err(no_platform(&name, wanted, [&platform]));
        }
        let mut seen = HashSet::new();
        let layers = manifest.layers.iter().zip(read.diff_ids);
        let layers = layers
            .filter(|(part, _)| seen.insert(part.digest.clone()))
            .map(|(part, diff_id)| Layer::new(part.clone(), diff_id))
            .collect();
        Ok(Self {
            reference,
            digest,
            manifest: answer,
            media_type: manifest.media_type,
            config,
            platform,
            layers,
            sources,
            permits,
        })
    }
}

/// Follows indexes to the manifest for a platform. Gives it back with the digest of what the name stands for.
async fn select(
    reference: &Reference,
    name: &str,
    wanted: &Platform,
    sources: &[Source],
) -> Result<(Answer, Manifest, Digest)> {
    let named = reference.digest().and_then(Digest::parse);
    let mut next = named.clone();
    let mut top = named;
    for depth in 0..=MOST_NESTED {
        let tag = reference.tag().unwrap_or("latest");
        let question = Question {
            image: name,
            kind: "manifests",
            reference: next.as_ref().map_or(tag, Digest::as_str),
            digest: next.as_ref(),
            limit: MOST_MANIFEST,
        };
        let answer = document(sources, &question).await.map_err(|error| match (error, &next) {
            (Error::NotFound { reference, registry, message }, Some(digest)) if depth > 0 => {
                Error::BlobMissing { reference, registry, digest: digest.to_string(), message }
            }
            (error, _) => error,
        })?;
        let top = top.get_or_insert_with(|| answer.digest.clone());
        let read = manifest::document(&answer.bytes, &answer.content_type)
            .map_err(|refusal| refused(refusal, &answer.registry, name, "manifest"))?;
        match read {
            Document::Manifest(manifest) => return Ok((answer, manifest, top.clone())),
            Document::Index(offers) => next = Some(choose(&offers, wanted, name)?),
        }
    }
    Err(Error::Malformed {
        registry: reference.host().into(),
        what: format!("manifest of {name}"),
        reason: "indexes are nested too deep".into(),
    })
}

/// The offer that serves a platform best, the first of several equal ones.
fn choose(offers: &[Offer], wanted: &Platform, name: &str) -> Result<Digest> {
    let fit = offers.iter().filter_map(|offer| Some((offer.platform.as_ref()?.fitness(wanted)?, offer)));
    // The last of the greatest is what `max_by_key` takes.
    let best = fit.rev().max_by_key(|(fitness, _)| *fitness).map(|(_, offer)| offer);
    // Where an index says nothing, the configuration will.
    let silent = || offers.iter().find(|offer| offer.platform.is_none());
    match best.or_else(silent) {
        Some(offer) => Ok(offer.part.digest.clone()),
        None if offers.is_empty() => Err(Error::EmptyIndex { reference: name.into() }),
        None => Err(no_platform(name, wanted, offers.iter().filter_map(|offer| offer.platform.as_ref()))),
    }
}

fn no_platform<'a>(name: &str, wanted: &Platform, offered: impl IntoIterator<Item = &'a Platform>) -> Error {
    const MOST_SHOWN: usize = 20;
    let shown = |platform: &Platform| printable(&platform.to_string(), 50);
    let offered = offered.into_iter().take(MOST_SHOWN).map(shown).collect();
    Error::NoPlatform { reference: name.into(), wanted: wanted.clone(), offered }
}

fn refused(refusal: Refusal, registry: &str, name: &str, noun: &str) -> Error {
    match refusal {
        Refusal::Malformed(reason) => {
            Error::Malformed { registry: registry.into(), what: format!("{noun} of {name}"), reason }
        }
        Refusal::Unsupported(reason) => Error::Unsupported { what: name.into(), reason },
    }
}
