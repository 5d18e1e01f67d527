//! Reads indexes, manifests and configurations of both families, OCI's and Docker's.

use std::fmt;

use osb_protocol::image::is_digest;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::Platform;

/// What is asked for: every kind of document that can lead to an image.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";

const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_SCHEMA_1: &str = "application/vnd.docker.distribution.manifest.v1+";

const CONFIGS: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];

/// What layers may be, each with an optional way of compression behind it.
const LAYERS: [&str; 3] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.container.image.rootfs.diff.tar",
];
const COMPRESSIONS: [&str; 5] = ["", "+gzip", ".gzip", "+zstd", ".zstd"];

/// More layers than any image has.
const MOST_LAYERS: usize = 512;

/// `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Digest(String);

impl Digest {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        is_digest(text).then(|| Self(text.into()))
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::finish(Sha256::new_with_prefix(bytes))
    }

    pub(crate) fn finish(hasher: Sha256) -> Self {
        let hex = hasher.finalize().iter().fold(String::from("sha256:"), |mut text, byte| {
            use fmt::Write;
            let _ = write!(text, "{byte:02x}");
            text
        });
        Self(hex)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The digits, safe as a file name.
    pub(crate) fn hex(&self) -> &str {
        &self.0["sha256:".len()..]
    }

    /// Long enough to tell one from another in a message.
    pub(crate) fn short(&self) -> &str {
        &self.0[..19]
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Digest and size of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) digest: Digest,
    pub(crate) size: u64,
}

/// A part of an index.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) part: Part,
    pub(crate) platform: Option<Platform>,
}

/// What a document turned out to be.
#[derive(Debug)]
pub(crate) enum Document {
    /// Several images.
    Index(Vec<Offer>),
    /// One image.
    Manifest(Manifest),
}

/// One image: its parts.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) media_type: String,
    pub(crate) config: Part,
    /// The lowest first.
    pub(crate) layers: Vec<Part>,
}

/// Why a document is not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is broken.
    Malformed(String),
    /// It is something else, or needs something that we do not do.
    Unsupported(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    schema_version: u32,
    media_type: Option<String>,
    manifests: Option<Vec<RawPart>>,
    config: Option<RawPart>,
    layers: Option<Vec<RawPart>>,
    fs_layers: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawPart {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<RawPlatform>,
    urls: Option<Vec<serde::de::IgnoredAny>>,
    annotations: Option<std::collections::BTreeMap<String, serde::de::IgnoredAny>>,
}

#[derive(Deserialize)]
struct RawPlatform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
}

impl From<RawPlatform> for Platform {
    fn from(raw: RawPlatform) -> Self {
        let variant = raw.variant.filter(|variant| !variant.is_empty());
        Self { os: raw.os, architecture: raw.architecture, variant }
    }
}

impl RawPart {
    fn part(&self) -> Result<Part, Refusal> {
        let digest = Digest::parse(&self.digest).ok_or_else(|| {
            let algorithm = self.digest.split(':').next().unwrap_or_default();
            let shown: String = algorithm.chars().filter(char::is_ascii_alphanumeric).take(20).collect();
            Refusal::Unsupported(format!("it uses a digest of kind {shown:?}; only sha256 is taken"))
        })?;
        Ok(Part { digest, size: self.size })
    }
}

/// Reads an index or a manifest that came under `content_type`.
pub(crate) fn document(bytes: &[u8], content_type: &str) -> Result<Document, Refusal> {
    let malformed = |reason: &str| Refusal::Malformed(reason.into());
    let raw: Raw = serde_json::from_slice(bytes)
        .map_err(|error| Refusal::Malformed(format!("no JSON of an index or manifest: {error}")))?;
    if raw.fs_layers.is_some() || raw.schema_version == 1 || content_type.starts_with(DOCKER_SCHEMA_1) {
        let reason = "the image is in Docker's old schema 1; push it again with a current tool";
        return Err(Refusal::Unsupported(reason.into()));
    }
    if raw.schema_version != 2 {
        return Err(malformed("its schema version is not 2"));
    }
    let said = raw.media_type.as_deref().unwrap_or_default();
    let given = content_type.split(';').next().unwrap_or_default().trim();
    // One document must not be an index to one reader and a manifest to another.
    let kind = |text: &str| (text.contains("index") || text.contains("list"), text.contains("vnd."));
    if kind(said).1 && kind(given).1 && said != given {
        return Err(malformed("it came under another media type than it has inside"));
    }
    match (raw.manifests, raw.config, raw.layers) {
        (Some(manifests), None, None) => {
            if [said, given].iter().any(|text| kind(text) == (false, true)) {
                return Err(malformed("an index under the media type of something else"));
            }
            Ok(Document::Index(offers(manifests)?))
        }
        (None, Some(config), Some(layers)) => {
            if [said, given].iter().any(|text| kind(text) == (true, true)) {
                return Err(malformed("a manifest under the media type of an index"));
            }
            let media_type = [said, given].into_iter().find(|text| kind(text).1).unwrap_or(OCI_MANIFEST);
            manifest(media_type, &config, &layers).map(Document::Manifest)
        }
        (None, None, None) => Err(malformed("neither index nor manifest")),
        _ => Err(malformed("index and manifest in one")),
    }
}

fn offers(manifests: Vec<RawPart>) -> Result<Vec<Offer>, Refusal> {
    let mut offers = Vec::new();
    for raw in manifests {
        let attests = |map: &std::collections::BTreeMap<_, _>| map.contains_key("vnd.docker.reference.type");
        if raw.annotations.as_ref().is_some_and(attests) {
            continue;
        }
        offers.push(Offer { part: raw.part()?, platform: raw.platform.map(Platform::from) });
    }
    Ok(offers)
}

fn manifest(media_type: &str, config: &RawPart, layers: &[RawPart]) -> Result<Manifest, Refusal> {
    if !CONFIGS.contains(&config.media_type.as_str()) {
        let shown: String = config.media_type.chars().filter(char::is_ascii_graphic).take(100).collect();
        return Err(Refusal::Unsupported(format!("it is no image but an artifact of type {shown:?}")));
    }
    if layers.len() > MOST_LAYERS {
        return Err(Refusal::Unsupported(format!("it has more than {MOST_LAYERS} layers")));
    }
    let parts = layers.iter().map(|layer| {
        let shown: String = layer.media_type.chars().filter(char::is_ascii_graphic).take(100).collect();
        let elsewhere = layer.urls.as_ref().is_some_and(|urls| !urls.is_empty());
        if elsewhere || shown.contains("foreign") || shown.contains("nondistributable") {
            let reason = "a layer lies outside of the registry (foreign layer); such layers are not fetched";
            return Err(Refusal::Unsupported(reason.into()));
        }
        let known = LAYERS.iter().any(|layer| {
            shown.strip_prefix(layer).is_some_and(|compression| COMPRESSIONS.contains(&compression))
        });
        if !known {
            return Err(Refusal::Unsupported(format!("a layer has the type {shown:?}")));
        }
        layer.part()
    });
    Ok(Manifest {
        media_type: media_type.into(),
        config: config.part()?,
        layers: parts.collect::<Result<_, _>>()?,
    })
}

/// The part of a configuration that a pull looks at.
#[derive(Debug)]
pub(crate) struct Config {
    /// `None` in very old images.
    pub(crate) platform: Option<Platform>,
    /// Digests of the unpacked layers.
    pub(crate) diff_ids: Vec<Digest>,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(flatten)]
    platform: RawPlatform,
    rootfs: Option<RawRoot>,
}

#[derive(Deserialize)]
struct RawRoot {
    diff_ids: Option<Vec<String>>,
}

/// Reads the configuration of an image with that many layers.
pub(crate) fn config(bytes: &[u8], layers: usize) -> Result<Config, Refusal> {
    let raw: RawConfig = serde_json::from_slice(bytes)
        .map_err(|error| Refusal::Malformed(format!("no JSON of a configuration: {error}")))?;
    let diff_ids = raw.rootfs.and_then(|rootfs| rootfs.diff_ids).unwrap_or_default();
    if diff_ids.len() != layers {
        let named = diff_ids.len();
        return Err(Refusal::Malformed(format!("it names {named} layers, its manifest {layers}")));
    }
    let diff_ids: Option<Vec<_>> = diff_ids.iter().map(|text| Digest::parse(text)).collect();
    let diff_ids = diff_ids.ok_or_else(|| Refusal::Unsupported("only sha256 digests are taken".into()))?;
    let platform = Platform::from(raw.platform);
    let named = !platform.os.is_empty() && !platform.architecture.is_empty();
    Ok(Config { platform: named.then_some(platform), diff_ids })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn part(media_type: &str) -> Value {
        json!({"mediaType": media_type, "digest": format!("sha256:{}", "a".repeat(64)), "size": 7})
    }

    fn image(layer: &Value) -> Value {
        json!({"schemaVersion": 2, "config": part(CONFIGS[0]), "layers": [layer]})
    }

    fn read(value: &Value, content_type: &str) -> Result<Document, Refusal> {
        document(value.to_string().as_bytes(), content_type)
    }

    #[test]
    fn layers_of_all_kinds() {
        for (family, kinds) in
            [(LAYERS[0], &["", "+gzip", "+zstd"][..]), (LAYERS[1], &["", ".gzip", ".zstd"])]
        {
            for kind in kinds {
                let manifest = image(&part(&format!("{family}{kind}")));
                let Ok(Document::Manifest(read)) = read(&manifest, "") else { panic!("{family}{kind}") };
                assert_eq!((read.layers.len(), read.layers[0].size), (1, 7));
            }
        }
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let unsupported = |value: &Value, words: &str| match read(value, "") {
            Err(Refusal::Unsupported(reason)) => assert!(reason.contains(words), "{reason}"),
            other => panic!("{value}: {other:?}"),
        };
        unsupported(&image(&part("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip")), "foreign");
        unsupported(&image(&part("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip")), "foreign");
        let mut elsewhere = part("application/vnd.oci.image.layer.v1.tar+gzip");
        elsewhere["urls"] = json!(["https://elsewhere.example/layer"]);
        unsupported(&image(&elsewhere), "foreign");
        unsupported(&image(&part("application/vnd.oci.image.layer.v1.tar+gzip+encrypted")), "encrypted");
        let mut sha512 = part("application/vnd.oci.image.layer.v1.tar");
        sha512["digest"] = json!(format!("sha512:{}", "a".repeat(128)));
        unsupported(&image(&sha512), "sha512");
        unsupported(
            &json!({"schemaVersion": 2, "config": part("application/vnd.cncf.helm.config.v1+json"), "layers": []}),
            "artifact",
        );
        unsupported(&json!({"schemaVersion": 1, "fsLayers": []}), "schema 1");
    }

    #[test]
    fn documents_are_one_thing_to_everybody() {
        let mut both = image(&part(LAYERS[0]));
        both["manifests"] = json!([part(OCI_MANIFEST)]);
        let index = json!({"schemaVersion": 2, "manifests": [part(OCI_MANIFEST)]});
        let list = "application/vnd.docker.distribution.manifest.list.v2+json";
        for (value, content_type) in [
            (&both, ""),
            (&index, OCI_MANIFEST),
            (&image(&part(LAYERS[0])), list),
            (&json!({"schemaVersion": 2}), ""),
            (&json!([]), ""),
            (&json!({"schemaVersion": 3, "manifests": []}), ""),
        ] {
            let refused = read(value, content_type);
            assert!(matches!(refused, Err(Refusal::Malformed(_))), "{value} {content_type}: {refused:?}");
        }
        assert!(matches!(read(&index, list), Ok(Document::Index(_))));
        assert!(matches!(read(&index, "application/json; charset=utf-8"), Ok(Document::Index(_))));
    }

    #[test]
    fn attestations_are_no_offers() {
        let mut attestation = part(OCI_MANIFEST);
        attestation["annotations"] = json!({"vnd.docker.reference.type": "attestation-manifest"});
        let index = json!({"schemaVersion": 2, "manifests": [attestation, part(OCI_MANIFEST)]});
        let Ok(Document::Index(offers)) = read(&index, "") else { panic!() };
        assert_eq!(offers.len(), 1);
    }

    #[test]
    fn configurations() {
        let diff_id = format!("sha256:{}", "b".repeat(64));
        let value = json!({"os": "linux", "architecture": "arm64", "variant": "v8", "rootfs": {"diff_ids": [diff_id]}});
        let read = config(value.to_string().as_bytes(), 1).unwrap();
        assert_eq!(read.platform.unwrap().to_string(), "linux/arm64/v8");
        assert!(matches!(config(value.to_string().as_bytes(), 2), Err(Refusal::Malformed(_))));
        assert!(config(b"{}", 0).unwrap().platform.is_none());
        assert!(matches!(config(b"{", 0), Err(Refusal::Malformed(_))));
    }

    #[test]
    fn digests() {
        assert_eq!(
            Digest::of(b"").as_str(),
            "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
        assert_eq!(Digest::parse("sha256:../../../etc"), None);
    }
}
