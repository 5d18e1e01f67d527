//! What a name stands for: a stored reference, an alias, the built-in image, or an image's id.

use super::error::{Error, Result};
use super::host::HostImage;
use super::index::{ImageRecord, Index, Stamp};
use super::{HOST, Image, Root};
use osb_protocol::image::{InvalidName, Reference};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A state of the index, ready for look-ups. Never changed; a new index makes a new one.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) stamp: Option<Stamp>,
    pub(super) index: Index,
    /// Aliases of the index over those of the configuration.
    pub(super) aliases: BTreeMap<String, String>,
    host: Arc<HostImage>,
    /// Directory of the layers.
    layers: PathBuf,
    /// By complete reference.
    references: BTreeMap<String, Arc<Image>>,
    /// Every common spelling of every reference and alias.
    spellings: HashMap<String, Found>,
}

/// Aliases that may lead from one to the next.
const MOST_ALIASES: usize = 8;

/// What a name leads to.
#[derive(Clone, Debug)]
enum Found {
    /// The built-in image, which is made when it is first asked for.
    Host,
    Stored(Arc<Image>),
}

impl Names {
    pub(super) fn new(
        index: Index,
        stamp: Option<Stamp>,
        layers: &Path,
        host: Arc<HostImage>,
        configured: &BTreeMap<String, String>,
    ) -> Self {
        let mut references = BTreeMap::new();
        for (reference, id) in &index.references {
            if let Some(record) = index.images.get(id) {
                references.insert(reference.clone(), Arc::new(image(reference, id, record, layers)));
            }
        }
        let mut aliases = configured.clone();
        aliases.extend(index.aliases.clone());
        let layers = layers.to_owned();
        let mut names = Self { stamp, index, aliases, host, layers, references, spellings: HashMap::new() };
        names.spell();
        names
    }

    fn spell(&mut self) {
        let mut spellings = HashMap::new();
        for name in [HOST.to_owned(), format!("{HOST}:latest")] {
            spellings.insert(name, Found::Host);
        }
        let names = self.references.keys().chain(self.aliases.keys());
        for reference in names.filter_map(|name| Reference::parse(name).ok()) {
            // An alias that leads nowhere, or in a circle, is told about when somebody asks for it.
            if let Ok(Some(found)) = self.find(&reference, 0) {
                for spelling in reference.spellings() {
                    spellings.entry(spelling).or_insert_with(|| found.clone());
                }
            }
        }
        self.spellings = spellings;
    }

    /// Looks a name up: a stored reference first, then an alias, the built-in image, an id.
    pub(super) fn resolve(&self, name: &str) -> Result<Option<Arc<Image>>> {
        let found = match self.spellings.get(name) {
            Some(found) => Some(found.clone()),
            None => match Reference::parse(name)
                .map_err(Error::from)
                .and_then(|reference| self.find(&reference, 0))
            {
                Ok(None) | Err(Error::InvalidName { .. }) if self.by_id(name).is_some() => {
                    return Ok(self.by_id(name));
                }
                other => other?,
            },
        };
        match found {
            Some(Found::Host) => self.host.get(),
            Some(Found::Stored(image)) => Ok(Some(image)),
            None => Ok(None),
        }
    }

    fn find(&self, reference: &Reference, depth: usize) -> Result<Option<Found>> {
        let full = reference.to_string();
        let stored = self
            .references
            .get(&full)
            .cloned()
            .or_else(|| reference.digest().and_then(|digest| self.by_digest(digest)));
        if let Some(image) = stored {
            return Ok(Some(Found::Stored(image)));
        }
        let Some(target) = self.alias(reference) else { return Ok(None) };
        if target == HOST {
            return Ok(Some(Found::Host));
        }
        if depth == MOST_ALIASES {
            return Err(Error::AliasLoop { name: full });
        }
        self.find(&Reference::parse(target)?, depth + 1)
    }

    /// Where aliases lead from a name that is one, though no such image may be stored.
    pub(super) fn alias_target(&self, name: &str) -> Option<String> {
        let mut reference = Reference::parse(name).ok()?;
        let mut target = None;
        for _ in 0..=MOST_ALIASES {
            let Some(next) = self.alias(&reference) else { break };
            target = Some(next.clone());
            match Reference::parse(next) {
                Ok(parsed) if next != HOST => reference = parsed,
                _ => break,
            }
        }
        target
    }

    fn alias(&self, reference: &Reference) -> Option<&String> {
        let any_tag = format!("{}:*", reference.repository());
        self.aliases.get(&reference.to_string()).or_else(|| self.aliases.get(&any_tag))
    }

    /// Whether the store has that layer, its record and its files.
    pub(super) fn has_layer(&self, layer: &str) -> bool {
        self.index.layers.contains_key(layer) && self.layers.join(layer).exists()
    }

    /// Image with that manifest or configuration.
    fn by_digest(&self, digest: &str) -> Option<Arc<Image>> {
        let record = |image: &&Arc<Image>| {
            image.id == digest
                || self.index.images.get(&image.id).is_some_and(|record| record.manifests.contains(digest))
        };
        self.references.values().find(record).cloned()
    }

    /// Image with that id, or with an id that alone begins so.
    pub(super) fn by_id(&self, name: &str) -> Option<Arc<Image>> {
        let hex = name.strip_prefix("sha256:").unwrap_or(name);
        if !(12..=64).contains(&hex.len()) || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let mut found: Option<&Arc<Image>> = None;
        for image in self.references.values().filter(|image| image.id["sha256:".len()..].starts_with(hex)) {
            if found.is_some_and(|found| found.id != image.id) {
                return None;
            }
            found = Some(image);
        }
        found.cloned()
    }

    /// Names that look like one that nothing is found under.
    pub(super) fn similar(&self, name: &str) -> Vec<String> {
        similar(
            name,
            std::iter::once(HOST)
                .chain(self.references.keys().chain(self.aliases.keys()).map(String::as_str)),
        )
    }

    /// All images, one per name, the built-in one first.
    pub(super) fn list(&self) -> Result<Vec<Arc<Image>>> {
        Ok(self.host.get()?.iter().chain(self.references.values()).cloned().collect())
    }
}

fn image(reference: &str, id: &str, record: &ImageRecord, layers: &Path) -> Image {
    let lowers = record.lowers.iter().map(|layer| layers.join(layer)).collect();
    Image {
        reference: reference.into(),
        id: id.into(),
        config: record.config.clone(),
        roots: vec![Root { mountpoint: "/".into(), lowers }],
        size_bytes: record.size_bytes,
        created: record.created.as_ref().and_then(|text| text.parse().ok()),
    }
}

/// Of complete names, those that a person may have meant, in their shortest spelling.
pub(super) fn similar<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> Vec<String> {
    const MOST: usize = 3;
    const ALIKE: f64 = 0.85;
    let repository = |name: &str| name.rsplit_once(':').map_or(name, |(repository, _)| repository).to_owned();
    let mut found: Vec<(f64, String)> = all
        .filter_map(|full| {
            let short = Reference::parse(full)
                .ok()
                .filter(|_| full != HOST)
                .and_then(|reference| reference.spellings().into_iter().min_by_key(String::len))
                .unwrap_or_else(|| full.to_owned());
            // Another tag of the same repository is the likeliest of all.
            let alike = if repository(&short) == repository(name) {
                1.0
            } else {
                strsim::jaro_winkler(name, &short)
                    .max(strsim::jaro_winkler(&repository(name), &repository(&short)) - 0.02)
            };
            (alike >= ALIKE).then_some((alike, short))
        })
        .collect();
    found.sort_by(|(a, name_a), (b, name_b)| b.total_cmp(a).then_with(|| name_a.cmp(name_b)));
    found.dedup_by(|a, b| a.1 == b.1);
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// The form in which an alias is kept: a complete reference, or `repository:*` for any tag or digest.
pub(super) fn alias_key(name: &str) -> Result<String> {
    if is_host(name) {
        return Err(Error::Reserved { name: name.into() });
    }
    match name.strip_suffix(":*") {
        Some(repository) => {
            let reference = Reference::parse(repository)?;
            if reference.tag() != Some("latest") || repository.ends_with(":latest") {
                let reason = "`:*` follows a repository";
                return Err(InvalidName { name: name.into(), reason }.into());
            }
            Ok(format!("{}:*", reference.repository()))
        }
        None => Ok(Reference::parse(name)?.to_string()),
    }
}

/// The form in which an alias's target is kept.
pub(super) fn alias_target(name: &str) -> Result<String> {
    if is_host(name) { Ok(HOST.into()) } else { Ok(Reference::parse(name)?.to_string()) }
}

/// Whether the name is that of the built-in image.
pub(super) fn is_host(name: &str) -> bool {
    name == HOST || name.strip_prefix(HOST) == Some(":latest")
}
