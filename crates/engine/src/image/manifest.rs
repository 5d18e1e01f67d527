//! Reads what an archive or layout says about its images: OCI index and manifests, or Docker's `manifest.json`.

use super::archive::Blobs;
use super::decompress::digest_of;
use super::error::{Error, Result};
use super::limits::Limits;
use super::{Config, architecture};
use osb_protocol::image::{Reference, is_digest, is_hex_digest};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// One image as the archive promises it.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Digest of the configuration.
    pub(super) id: String,
    /// Digest of the manifest, where there is one.
    pub(super) manifest: Option<String>,
    pub(super) config: Config,
    pub(super) created: Option<jiff::Timestamp>,
    /// The lowest first.
    pub(super) layers: Vec<PlannedLayer>,
    pub(super) names: Vec<Reference>,
}

/// A layer and the digests to hold it against.
#[derive(Clone, Debug)]
pub(super) struct PlannedLayer {
    /// Name of the part in the archive.
    pub(super) part: String,
    /// Digest of the stored bytes, where the manifest gives one.
    pub(super) blob: Option<String>,
    /// Digest of the unpacked bytes.
    pub(super) diff_id: String,
}

/// Whether the parts are those of images at all.
pub(super) fn is_image(blobs: &Blobs) -> bool {
    let oci = blobs.holds("index.json") && (blobs.holds("oci-layout") || blobs.holds("blobs"));
    oci || blobs.holds("manifest.json")
}

/// All images for the architecture `wanted`.
pub(super) fn plans(blobs: &Blobs, wanted: &str, limits: &Limits) -> Result<Vec<Plan>> {
    let mut plans = Vec::new();
    if let Some(index) = blobs.read("index.json", limits)? {
        plans = oci_plans(blobs, &index, wanted, limits)?;
    }
    if let Some(manifest) = blobs.read("manifest.json", limits)? {
        // skopeo's `dir:` has the image's manifest under the name that Docker gives to its list of images.
        if manifest.trim_ascii_start().starts_with(b"{") {
            let digest = digest_of(&manifest);
            let what = format!("manifest.json of {}", blobs.path().display());
            plans.push(manifest_plan(blobs, &manifest, digest, what, 0, wanted, limits)?);
        } else {
            let docker = docker_plans(blobs, &manifest, wanted, limits, &plans)?;
            plans.extend(docker);
        }
    }
    let mut merged: Vec<Plan> = Vec::new();
    for plan in plans {
        match merged.iter_mut().find(|known| known.id == plan.id) {
            Some(known) => {
                known.names.extend(plan.names);
                known.manifest = known.manifest.take().or(plan.manifest);
            }
            None => merged.push(plan),
        }
    }
    for plan in &mut merged {
        plan.names.sort();
        plan.names.dedup();
    }
    Limits::check(&blobs.path().to_string_lossy(), "images", merged.len() as u64, limits.images as u64)?;
    Ok(merged)
}

fn json<T: DeserializeOwned>(data: &[u8], what: &str) -> Result<T> {
    serde_json::from_slice(data).map_err(|source| Error::Json { what: what.into(), source })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    platform: Option<Platform>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Platform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
}

impl Platform {
    fn runs_on(&self, wanted: &str) -> bool {
        // 32-bit variants carry another architecture name, so the variant never decides.
        self.os == "linux" && self.architecture == wanted
    }
}

/// An index or a manifest: which one, the members tell.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    schema_version: Option<u32>,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
struct ConfigFile {
    created: Option<String>,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
    #[serde(default)]
    os: String,
    config: Option<RunConfig>,
    rootfs: Option<RootFs>,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunConfig {
    user: Option<String>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    volumes: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    working_dir: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    stop_signal: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

/// Reads a part by its digest and holds it against it.
fn blob(blobs: &Blobs, digest: &str, limits: &Limits) -> Result<Vec<u8>> {
    let part = part_of(digest, blobs)?;
    let data = blobs.require(&part, limits)?;
    let found = digest_of(&data);
    if found != digest {
        let blob = format!("{part} of {}", blobs.path().display());
        return Err(Error::DigestMismatch { blob, expected: digest.into(), found });
    }
    Ok(data)
}

fn part_of(digest: &str, blobs: &Blobs) -> Result<String> {
    if !is_digest(digest) {
        return Err(Error::Unsupported {
            what: format!(
                "digest {:?} in {}",
                digest.chars().take(100).collect::<String>(),
                blobs.path().display()
            ),
            reason: "save the image with sha256 digests",
        });
    }
    let hex = digest.strip_prefix("sha256:").unwrap_or(digest);
    if blobs.holds("blobs") || blobs.holds("oci-layout") {
        return Ok(format!("blobs/sha256/{hex}"));
    }
    // In skopeo's `dir:` the parts lie side by side, manifests of an index by another name.
    let manifest = format!("{hex}.manifest.json");
    Ok(if blobs.holds(&manifest) { manifest } else { hex.to_owned() })
}

fn oci_plans(blobs: &Blobs, index: &[u8], wanted: &str, limits: &Limits) -> Result<Vec<Plan>> {
    let what = format!("index.json of {}", blobs.path().display());
    let index: Document = json(index, &what)?;
    let manifests = index.manifests.unwrap_or_default();
    Limits::check(&what, "images", manifests.len() as u64, limits.images as u64)?;
    let mut plans = Vec::new();
    let mut refused = None;
    // Docker's list may stand beside it and name what it does not.
    if manifests.iter().all(is_attestation) && !blobs.holds("manifest.json") {
        return Err(Error::EmptyIndex { what: blobs.path().display().to_string() });
    }
    for descriptor in &manifests {
        if is_attestation(descriptor) {
            continue;
        }
        match oci_plan(blobs, descriptor, 0, wanted, limits) {
            Ok(mut plan) => {
                plan.names = names(descriptor);
                plans.push(plan);
            }
            // Other platforms may stand beside ours.
            Err(error @ Error::Platform { .. }) => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    match refused {
        Some(error) if plans.is_empty() => Err(error),
        _ => Ok(plans),
    }
}

fn is_attestation(descriptor: &Descriptor) -> bool {
    let key = "vnd.docker.reference.type";
    descriptor.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(key))
}

/// Names in the annotations. A bare `ref.name` is only a tag, which names nothing.
fn names(descriptor: &Descriptor) -> Vec<Reference> {
    let Some(annotations) = &descriptor.annotations else {
        return Vec::new();
    };
    let full = annotations.get("io.containerd.image.name");
    let name = annotations
        .get("org.opencontainers.image.ref.name")
        .filter(|name| full.is_none() && name.contains(['/', ':']));
    full.into_iter().chain(name).filter_map(|name| Reference::parse(name).ok()).collect()
}

fn oci_plan(
    blobs: &Blobs,
    descriptor: &Descriptor,
    depth: usize,
    wanted: &str,
    limits: &Limits,
) -> Result<Plan> {
    let what = format!("{} of {}", descriptor.digest, blobs.path().display());
    if let Some(platform) = descriptor.platform.as_ref().filter(|platform| !platform.runs_on(wanted)) {
        return Err(wrong_platform(&what, wanted, [platform]));
    }
    if descriptor.media_type.contains("manifest.v1+") && !descriptor.media_type.contains("oci") {
        return Err(Error::Unsupported {
            what: format!("manifest {what} of schema 1"),
            reason: "save the image again with a current tool",
        });
    }
    let data = blob(blobs, &descriptor.digest, limits)?;
    manifest_plan(blobs, &data, descriptor.digest.clone(), what, depth, wanted, limits)
}

fn manifest_plan(
    blobs: &Blobs,
    data: &[u8],
    digest: String,
    what: String,
    depth: usize,
    wanted: &str,
    limits: &Limits,
) -> Result<Plan> {
    let document: Document = json(data, &what)?;
    if let Some(manifests) = document.manifests {
        const MOST_NESTED: usize = 4;
        if depth == MOST_NESTED {
            return Err(Error::Malformed { what, reason: "indexes are nested too deep".into() });
        }
        let candidates: Vec<_> = manifests.iter().filter(|descriptor| !is_attestation(descriptor)).collect();
        let fits = |descriptor: &&&Descriptor| {
            descriptor.platform.as_ref().is_none_or(|platform| platform.runs_on(wanted))
        };
        if candidates.is_empty() {
            return Err(Error::EmptyIndex { what });
        }
        // Of several that run here the first is the one meant: indexes go from plain to special variants.
        let Some(chosen) = candidates.iter().find(fits) else {
            let offered = candidates.iter().filter_map(|found| found.platform.as_ref());
            return Err(wrong_platform(&what, wanted, offered));
        };
        return oci_plan(blobs, chosen, depth + 1, wanted, limits);
    }
    let (Some(config), Some(layers)) = (document.config, document.layers) else {
        let version = document.schema_version.unwrap_or(0);
        let reason = format!("neither index nor image manifest (schema version {version})");
        return Err(Error::Malformed { what, reason });
    };
    let data = blob(blobs, &config.digest, limits)?;
    let layers = layers
        .into_iter()
        .map(|layer| Ok((part_of(&layer.digest, blobs)?, Some(layer.digest))))
        .collect::<Result<_>>()?;
    let mut plan = plan(&data, &what, config.digest, layers, wanted, limits)?;
    plan.manifest = Some(digest);
    Ok(plan)
}

fn docker_plans(
    blobs: &Blobs,
    manifest: &[u8],
    wanted: &str,
    limits: &Limits,
    known: &[Plan],
) -> Result<Vec<Plan>> {
    let what = format!("manifest.json of {}", blobs.path().display());
    let images: Vec<DockerManifest> = json(manifest, &what)?;
    Limits::check(&what, "images", images.len() as u64, limits.images as u64)?;
    if images.is_empty() && known.is_empty() {
        return Err(Error::EmptyIndex { what: blobs.path().display().to_string() });
    }
    let mut plans = Vec::new();
    for image in images {
        let data = blobs.require(&image.config, limits)?;
        let id = digest_of(&data);
        let stem = image.config.rsplit('/').next().unwrap_or_default().trim_end_matches(".json");
        if is_hex_digest(stem) && id != format!("sha256:{stem}") {
            let expected = format!("sha256:{stem}");
            let blob = format!("{} of {}", image.config, blobs.path().display());
            return Err(Error::DigestMismatch { blob, expected, found: id });
        }
        let names = image.repo_tags.unwrap_or_default();
        let names: Vec<_> = names.iter().filter_map(|name| Reference::parse(name).ok()).collect();
        // The OCI part of the same archive told more; only the names are missing there.
        if let Some(same) = known.iter().find(|known| known.id == id) {
            plans.push(Plan { names, ..same.clone() });
            continue;
        }
        let layers = image.layers.unwrap_or_default().into_iter();
        let layers = layers
            .map(|part| {
                let hex = part.strip_prefix("blobs/sha256/").filter(|hex| is_hex_digest(hex));
                let digest = hex.map(|hex| format!("sha256:{hex}"));
                (part, digest)
            })
            .collect();
        let mut plan = plan(
            &data,
            &format!("{} of {}", image.config, blobs.path().display()),
            id,
            layers,
            wanted,
            limits,
        )?;
        plan.names = names;
        plans.push(plan);
    }
    Ok(plans)
}

fn plan(
    data: &[u8],
    what: &str,
    id: String,
    layers: Vec<(String, Option<String>)>,
    wanted: &str,
    limits: &Limits,
) -> Result<Plan> {
    let file: ConfigFile = json(data, &format!("configuration in {what}"))?;
    let platform = Platform { os: file.os, architecture: file.architecture, variant: file.variant };
    // Very old images name neither.
    let named = !platform.os.is_empty() && !platform.architecture.is_empty();
    if named && !platform.runs_on(wanted) {
        return Err(wrong_platform(what, wanted, [&platform]));
    }
    Limits::check(what, "layers", layers.len() as u64, limits.layers as u64)?;
    let diff_ids = file.rootfs.and_then(|rootfs| rootfs.diff_ids).unwrap_or_default();
    if diff_ids.len() != layers.len() || !diff_ids.iter().all(|diff_id| is_digest(diff_id)) {
        let reason =
            format!("its configuration names {} layers, its manifest {}", diff_ids.len(), layers.len());
        return Err(Error::Malformed { what: what.into(), reason });
    }
    let layers = layers
        .into_iter()
        .zip(diff_ids)
        .map(|((part, blob), diff_id)| PlannedLayer { part, blob, diff_id })
        .collect();
    let run = file.config.unwrap_or_default();
    let text = |value: Option<String>| value.filter(|value| !value.is_empty());
    let env = run.env.unwrap_or_default().into_iter();
    let config = Config {
        env: env
            .filter_map(|pair| pair.split_once('=').map(|(key, value)| (key.into(), value.into())))
            .collect(),
        workdir: text(run.working_dir),
        user: text(run.user),
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
        labels: run.labels.unwrap_or_default(),
        exposed_ports: run.exposed_ports.unwrap_or_default().into_keys().collect(),
        volumes: run.volumes.unwrap_or_default().into_keys().collect(),
        stop_signal: text(run.stop_signal),
        os: text(Some(platform.os)).unwrap_or_else(|| "linux".into()),
        architecture: text(Some(platform.architecture)).unwrap_or_else(|| architecture().into()),
    };
    let created = file.created.and_then(|text| text.parse().ok());
    Ok(Plan { id, manifest: None, config, created, layers, names: Vec::new() })
}

fn wrong_platform<'a>(what: &str, wanted: &str, found: impl IntoIterator<Item = &'a Platform>) -> Error {
    let found: Vec<_> = found
        .into_iter()
        .map(|platform| {
            let variant = platform.variant.as_ref().map(|variant| format!("/{variant}")).unwrap_or_default();
            format!("{}/{}{variant}", platform.os, platform.architecture)
        })
        .collect();
    Error::Platform { what: what.into(), found: found.join(", "), wanted: format!("linux/{wanted}") }
}
