//! Brings images into the store, from directories and archives.

use super::archive::{Blobs, Section};
use super::decompress::{LayerStream, digest_of};
use super::error::{Error, Result};
use super::index::{self, ImageRecord, LayerRecord};
use super::manifest::{self, Plan, PlannedLayer};
use super::store::{ImageStore, Workspace, drop_unnamed};
use super::{Config, HOST, Image, Reference, apply, architecture, copy, merge, names};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What a load brought.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// One per name that now stands for a loaded image.
    pub images: Vec<Arc<Image>>,
    /// What was left out, for people to read.
    pub warnings: Vec<String>,
}

/// How far a load is. An archive that is compressed as a whole is unpacked in a step of its own, with no layers to
/// count; then all starts at zero again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Stored bytes read so far.
    pub bytes: u64,
    /// Stored bytes to read; 0 while unknown.
    pub total_bytes: u64,
    /// Layers unpacked.
    pub layers: usize,
    /// Layers to unpack; those already in the store do not count.
    pub total_layers: usize,
}

/// Layers to mount at most. More make each look-up of a missing name slower.
const MOST_LOWERS: usize = 3;
/// Digest of an empty tar archive: the layer of images that have none.
const EMPTY: &str = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef";

/// Layers that were unpacked into the workspace.
type Fresh = BTreeMap<String, LayerRecord>;

impl ImageStore {
    /// Loads the images of a directory or archive: a directory with a root file system, an OCI layout (directory or
    /// archive), an archive of `docker save`, or an archive of a root file system; archives plain or compressed with
    /// gzip or zstd.
    ///
    /// `reference` names the image where its source does not, or picks one of several. Names that stood for other
    /// images stand for the new ones afterwards. `progress` is called from several threads.
    ///
    /// The call blocks; it may be ended at any point, by a kill too, and either everything or nothing is loaded.
    ///
    /// # Errors
    /// Every variant of [`Error`] that concerns archives, names, limits and space. Nothing is left behind.
    pub fn load(
        &self,
        path: &Path,
        reference: Option<&str>,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Loaded> {
        let reference = reference.map(parse_name).transpose()?;
        let workspace = self.workspace()?;
        let metadata = std::fs::metadata(path).map_err(|error| Error::io("open", path, error))?;
        let path = &std::fs::canonicalize(path).map_err(|error| Error::io("open", path, error))?;
        let load = Load { store: self, workspace: &workspace, progress };
        if !metadata.is_dir() {
            let size = metadata.len();
            let read = AtomicU64::new(0);
            let spooled = |count| {
                let bytes = read.fetch_add(count, Ordering::Relaxed) + count;
                progress(Progress { bytes, total_bytes: size, layers: 0, total_layers: 0 });
            };
            let blobs = Blobs::archive(path, workspace.path(), self.limits(), &spooled)?;
            if manifest::is_image(&blobs) {
                return load.image(&blobs, reference);
            }
            return match blobs.whole_archive() {
                Some(archive) if is_root(&|name| blobs.holds(name)) => {
                    load.root_archive(archive, path, reference)
                }
                _ => Err(Error::UnknownKind { path: path.into() }),
            };
        }
        let blobs = Blobs::directory(path)?;
        if manifest::is_image(&blobs) {
            load.image(&blobs, reference)
        } else if is_root(&|name| blobs.holds(name)) {
            load.directory(path, reference)
        } else {
            Err(Error::UnknownKind { path: path.into() })
        }
    }
}

fn parse_name(name: &str) -> Result<Reference> {
    if names::is_host(name) {
        return Err(Error::Reserved { name: HOST.into() });
    }
    Reference::parse(name)
}

/// Whether the names at the top are those of a root file system.
fn is_root(holds: &dyn Fn(&str) -> bool) -> bool {
    ["bin", "sbin", "usr", "etc", "lib"].iter().any(|name| holds(name))
}

struct Load<'a> {
    store: &'a ImageStore,
    workspace: &'a Workspace,
    progress: &'a (dyn Fn(Progress) + Sync),
}

impl Load<'_> {
    fn image(&self, blobs: &Blobs, reference: Option<Reference>) -> Result<Loaded> {
        let mut plans = manifest::plans(blobs, self.store.limits())?;
        match reference {
            Some(wanted) if plans.len() > 1 => {
                let names = plans.iter().flat_map(|plan| &plan.names).map(ToString::to_string).collect();
                plans.retain(|plan| plan.names.contains(&wanted));
                if plans.is_empty() {
                    return Err(Error::Ambiguous { path: blobs.path().into(), names });
                }
                plans.iter_mut().for_each(|plan| plan.names = vec![wanted.clone()]);
            }
            Some(wanted) => plans.iter_mut().for_each(|plan| plan.names = vec![wanted.clone()]),
            // An image without a name may stand beside named ones.
            None if plans.iter().any(|plan| !plan.names.is_empty()) => {
                plans.retain(|plan| !plan.names.is_empty());
            }
            None => {}
        }
        if plans.is_empty() {
            return Err(Error::UnknownKind { path: blobs.path().into() });
        }
        if plans.iter().any(|plan| plan.names.is_empty()) {
            return Err(Error::NameNeeded { path: blobs.path().into() });
        }
        if let Some(name) =
            plans.iter().flat_map(|plan| &plan.names).find(|name| name.to_string() == reserved())
        {
            return Err(Error::Reserved { name: name.to_string() });
        }
        let (fresh, warnings) = self.unpack(blobs, &plans)?;
        self.commit(plans, fresh, warnings)
    }

    fn root_archive(&self, archive: Section, path: &Path, reference: Option<Reference>) -> Result<Loaded> {
        let name = reference.ok_or_else(|| Error::NameNeeded { path: path.into() })?;
        let what = path.to_string_lossy();
        let total = archive.len();
        let read = AtomicU64::new(0);
        let progress = |count| {
            let bytes = read.fetch_add(count, Ordering::Relaxed) + count;
            (self.progress)(Progress { bytes, total_bytes: total, layers: 0, total_layers: 1 });
            Ok(())
        };
        let directory = self.workspace.path().join("root");
        create(&directory)?;
        let stream = LayerStream::open(archive, &what, self.store.limits(), &progress)?;
        let (applied, stream) = apply::apply(stream, &directory, &what, self.store.limits())?;
        let digest = stream.finish(None, None)?;
        self.commit_root(&directory, name, digest, record(&applied), applied.warnings)
    }

    fn directory(&self, path: &Path, reference: Option<Reference>) -> Result<Loaded> {
        let name = reference.ok_or_else(|| Error::NameNeeded { path: path.into() })?;
        let read = AtomicU64::new(0);
        let progress = |count| {
            let bytes = read.fetch_add(count, Ordering::Relaxed) + count;
            (self.progress)(Progress { bytes, total_bytes: 0, layers: 0, total_layers: 1 });
        };
        let directory = self.workspace.path().join("root");
        create(&directory)?;
        let copied = copy::copy(path, &directory, self.store.root(), self.store.limits(), &progress)?;
        let record = LayerRecord { bytes: copied.bytes, hides: false };
        self.commit_root(&directory, name, copied.digest, record, copied.warnings)
    }

    /// Makes an image of one unpacked tree that came without a configuration.
    fn commit_root(
        &self,
        directory: &Path,
        name: Reference,
        digest: String,
        record: LayerRecord,
        warnings: Vec<String>,
    ) -> Result<Loaded> {
        let holds = |name: &str| directory.join(name).symlink_metadata().is_ok();
        let shell = if holds("bin/bash") || holds("usr/bin/bash") { "/bin/bash" } else { "/bin/sh" };
        let config = Config {
            cmd: vec![shell.into()],
            os: "linux".into(),
            architecture: architecture().into(),
            ..Config::default()
        };
        let document = serde_json::json!({
            "architecture": config.architecture,
            "config": { "Cmd": config.cmd },
            "os": config.os,
            "rootfs": { "type": "layers", "diff_ids": [digest] },
        });
        let layer = layer_name(&digest).to_owned();
        let place = self.workspace.path().join(&layer);
        std::fs::rename(directory, &place).map_err(|error| Error::io("create", &place, error))?;
        let plan = Plan {
            id: digest_of(document.to_string().as_bytes()),
            manifest: None,
            config,
            created: None,
            layers: vec![PlannedLayer { part: String::new(), blob: None, diff_id: digest }],
            names: vec![name],
        };
        self.commit(vec![plan], Fresh::from([(layer, record)]), warnings)
    }

    /// Unpacks the layers that the store lacks, several at a time.
    fn unpack(&self, blobs: &Blobs, plans: &[Plan]) -> Result<(Fresh, Vec<String>)> {
        let limits = self.store.limits();
        let mut wanted = BTreeMap::new();
        for layer in plans.iter().flat_map(|plan| &plan.layers) {
            wanted.entry(layer_name(&layer.diff_id)).or_insert(layer);
        }
        wanted.retain(|name, _| !self.store.layer_path(name).exists());
        let mut jobs = Vec::new();
        for (name, layer) in wanted {
            let section = blobs
                .open(&layer.part, limits)?
                .ok_or_else(|| Error::BlobMissing { path: blobs.path().into(), blob: layer.part.clone() })?;
            jobs.push((name, layer, section));
        }
        // The largest first, so that no long one is left to the end.
        jobs.sort_by_key(|(_, _, section)| std::cmp::Reverse(section.len()));
        let total_bytes = jobs.iter().map(|(_, _, section)| section.len()).sum();
        let shared = Shared {
            load: self,
            total_bytes,
            total_layers: jobs.len(),
            bytes: AtomicU64::new(0),
            layers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        };
        let next = AtomicUsize::new(0);
        let results = Mutex::new((Fresh::new(), Vec::new(), None));
        let lock = || results.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            while let Some((name, layer, section)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                match shared.layer(name, layer, section.clone()) {
                    Ok(applied) => {
                        let (fresh, warnings, _) = &mut *lock();
                        fresh.insert((*name).to_owned(), record(&applied));
                        warnings.extend(applied.warnings);
                    }
                    Err(error) => {
                        // The first to set the flag failed by itself; the others were stopped by it.
                        if !shared.stop.swap(true, Ordering::Relaxed) {
                            lock().2 = Some(error);
                        }
                        return;
                    }
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(1, 4).min(jobs.len());
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        let (fresh, warnings, error) = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        match error {
            Some(error) => Err(error),
            None => Ok((fresh, warnings)),
        }
    }

    /// Merges layers where there are too many, and puts everything in its place.
    fn commit(&self, plans: Vec<Plan>, mut fresh: Fresh, warnings: Vec<String>) -> Result<Loaded> {
        let mut records = Vec::new();
        for plan in plans {
            let layers = distinct(&plan.layers);
            let layers = if layers.is_empty() { vec![self.empty_layer(&mut fresh)?] } else { layers };
            let lowers = self.lowers(&layers, &mut fresh)?;
            records.push((plan, layers, lowers));
        }
        // Content before names: after a power failure a name must not stand for empty files.
        let work = self.workspace.path();
        let synced = std::fs::File::open(work).map(|directory| rustix::fs::syncfs(&directory));
        synced
            .map_err(|error| Error::io("open", work, error))?
            .map_err(|errno| Error::io("write to", work, errno))?;
        let references = self.store.update(|index| {
            for (layer, record) in fresh {
                let (from, to) = (work.join(&layer), self.store.layer_path(&layer));
                // Another load brought the same meanwhile.
                if !to.exists() {
                    std::fs::rename(&from, &to).map_err(|error| Error::io("create", &to, error))?;
                }
                index.layers.entry(layer).or_insert(record);
            }
            index::sync_dir(&self.store.layer_path(""))?;
            let mut references = BTreeSet::new();
            for (plan, layers, lowers) in records {
                let bytes = |layer: &String| index.layers.get(layer).map_or(0, |record| record.bytes);
                let size_bytes = layers.iter().map(bytes).sum();
                let known = index.images.remove(&plan.id).map(|image| image.manifests).unwrap_or_default();
                let record = ImageRecord {
                    config: plan.config,
                    layers,
                    lowers,
                    size_bytes,
                    created: plan.created.map(|created| created.to_string()),
                    manifests: known.into_iter().chain(plan.manifest).collect(),
                };
                index.images.insert(plan.id.clone(), record);
                for name in plan.names {
                    index.references.insert(name.to_string(), plan.id.clone());
                    references.insert(name.to_string());
                }
            }
            drop_unnamed(index);
            Ok(references)
        })?;
        let images = self.store.list()?.into_iter().filter(|image| references.contains(&image.reference));
        Ok(Loaded { images: images.collect(), warnings })
    }

    fn place(&self, layer: &str, fresh: &Fresh) -> PathBuf {
        if fresh.contains_key(layer) {
            self.workspace.path().join(layer)
        } else {
            self.store.layer_path(layer)
        }
    }

    /// Layers to mount, the highest first: those of the image, or one merge of them all.
    fn lowers(&self, layers: &[String], fresh: &mut Fresh) -> Result<Vec<String>> {
        let known = self.store.current()?;
        let hides = |layer: &String| {
            fresh.get(layer).or_else(|| known.index.layers.get(layer)).is_some_and(|record| record.hides)
        };
        if layers.len() <= MOST_LOWERS && !layers.iter().any(hides) {
            return Ok(layers.iter().rev().cloned().collect());
        }
        let key = format!("merge 1\n{}", layers.join("\n"));
        let merged = layer_name(&digest_of(key.as_bytes())).to_owned();
        if !fresh.contains_key(&merged) && !self.store.layer_path(&merged).exists() {
            let target = self.workspace.path().join(&merged);
            create(&target)?;
            let sources: Vec<_> = layers.iter().map(|layer| self.place(layer, fresh)).collect();
            merge::merge(&sources, &target)?;
            fresh.insert(merged.clone(), LayerRecord::default());
        }
        Ok(vec![merged])
    }

    fn empty_layer(&self, fresh: &mut Fresh) -> Result<String> {
        if !self.store.layer_path(EMPTY).exists() && !fresh.contains_key(EMPTY) {
            let path = self.workspace.path().join(EMPTY);
            create(&path)?;
            apply::apply(&[][..], &path, "the empty layer", self.store.limits())?;
            fresh.insert(EMPTY.into(), LayerRecord::default());
        }
        Ok(EMPTY.into())
    }
}

/// What the threads of one unpacking share.
struct Shared<'a> {
    load: &'a Load<'a>,
    total_bytes: u64,
    total_layers: usize,
    bytes: AtomicU64,
    layers: AtomicUsize,
    stop: AtomicBool,
}

impl Shared<'_> {
    fn layer(&self, name: &str, layer: &PlannedLayer, section: Section) -> Result<apply::Applied> {
        let limits = self.load.store.limits();
        let directory = self.load.workspace.path().join(name);
        create(&directory)?;
        let progress = |count| {
            if self.stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("another layer failed"));
            }
            self.bytes.fetch_add(count, Ordering::Relaxed);
            self.report();
            Ok(())
        };
        let stream = LayerStream::open(section, &layer.part, limits, &progress)?;
        let (applied, stream) = apply::apply(stream, &directory, &layer.part, limits)?;
        stream.finish(layer.blob.as_deref(), Some(&layer.diff_id))?;
        self.layers.fetch_add(1, Ordering::Relaxed);
        self.report();
        Ok(applied)
    }

    fn report(&self) {
        (self.load.progress)(Progress {
            bytes: self.bytes.load(Ordering::Relaxed),
            total_bytes: self.total_bytes,
            layers: self.layers.load(Ordering::Relaxed),
            total_layers: self.total_layers,
        });
    }
}

/// Layer names, the lowest first, each once: of a layer that comes twice only the upper one is seen, and overlayfs
/// refuses to stack a directory on itself.
fn distinct(layers: &[PlannedLayer]) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut names: Vec<_> = layers
        .iter()
        .rev()
        .map(|layer| layer_name(&layer.diff_id).to_owned())
        .filter(|name| seen.insert(name.clone()))
        .collect();
    names.reverse();
    names
}

fn record(applied: &apply::Applied) -> LayerRecord {
    LayerRecord { bytes: applied.bytes, hides: applied.hides }
}

/// Directory name of a layer.
fn layer_name(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

fn reserved() -> String {
    format!("docker.io/library/{HOST}:latest")
}

fn create(path: &Path) -> Result<()> {
    std::fs::create_dir(path).map_err(|error| Error::io("create", path, error))
}
