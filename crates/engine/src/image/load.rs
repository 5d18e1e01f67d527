//! Brings images into the store, from directories and archives.

use super::archive::{Blobs, Section};
use super::budget::Budget;
use super::change::ConfigChange;
use super::commit::{distinct, layer_name, merge_name, record};
use super::decompress::{self, digest_of};
use super::error::{Error, Result};
use super::index::LayerRecord;
use super::manifest::{self, Plan, PlannedLayer};
use super::store::ImageStore;
use super::workspace::Workspace;
use super::{Config, HOST, Image, Reference, apply, architecture, copy, names};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
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

/// Layers that were unpacked into the workspace.
pub(super) type Fresh = BTreeMap<String, LayerRecord>;

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
        self.load_with(path, LoadOptions { reference, ..LoadOptions::default() }, progress)
    }

    /// As [`ImageStore::load`], with options.
    ///
    /// # Errors
    /// As [`ImageStore::load`].
    pub fn load_with(
        &self,
        path: &Path,
        options: LoadOptions<'_>,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Loaded> {
        let reference = options.reference.map(parse_name).transpose()?;
        let workspace = self.workspace()?;
        let metadata = std::fs::metadata(path).map_err(|error| Error::io("open", path, error))?;
        // A pipe has no name but the one it is given by: what `/dev/stdin` leads to is none.
        let named = metadata.is_file() || metadata.is_dir();
        let path = &if named { std::fs::canonicalize(path) } else { std::path::absolute(path) }
            .map_err(|error| Error::io("open", path, error))?;
        let called = options.called.map_or(path.as_path(), Path::new);
        let budget = Budget::new(self, called)?;
        let load = Load { store: self, workspace: &workspace, progress, options: &options, budget };
        if !metadata.is_dir() {
            let size = metadata.len();
            let read = AtomicU64::new(0);
            let spooled = |count| {
                let bytes = read.fetch_add(count, Ordering::Relaxed) + count;
                progress(Progress { bytes, total_bytes: size, layers: 0, total_layers: 0 });
            };
            let blobs = Blobs::archive(path, called, workspace.path(), self.limits(), &spooled)?;
            if manifest::is_image(&blobs) {
                return load.image(&blobs, reference);
            }
            return match blobs.whole_archive() {
                Some(archive) if is_root(&|name| blobs.holds(name)) => {
                    load.root_archive(archive, path, reference)
                }
                _ => Err(Error::UnknownKind { path: called.into() }),
            };
        }
        let blobs = Blobs::directory(path, called)?;
        if manifest::is_image(&blobs) {
            load.image(&blobs, reference)
        } else if is_root(&|name| blobs.holds(name)) {
            load.directory(path, reference)
        } else {
            Err(Error::UnknownKind { path: called.into() })
        }
    }
}

fn parse_name(name: &str) -> Result<Reference> {
    if names::is_host(name) {
        return Err(Error::Reserved { name: HOST.into() });
    }
    Ok(Reference::parse(name)?)
}

/// Whether the names at the top are those of a root file system.
fn is_root(holds: &dyn Fn(&str) -> bool) -> bool {
    ["bin", "sbin", "usr", "etc", "lib"].iter().any(|name| holds(name))
}

/// How an image is loaded.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions<'a> {
    /// Name for an image whose source has none, or the one of several to load.
    pub reference: Option<&'a str>,
    /// Architecture that the image must be for, in the words of images; `None` is this machine's.
    pub architecture: Option<&'a str>,
    /// What messages call the source, where its path means nothing to whoever reads them.
    pub called: Option<&'a str>,
    /// Changes to the image's configuration.
    pub change: Option<&'a ConfigChange>,
}

pub(super) struct Load<'a> {
    pub(super) store: &'a ImageStore,
    pub(super) workspace: &'a Workspace,
    progress: &'a (dyn Fn(Progress) + Sync),
    options: &'a LoadOptions<'a>,
    pub(super) budget: Budget<'a>,
}

impl Load<'_> {
    fn image(&self, blobs: &Blobs, reference: Option<Reference>) -> Result<Loaded> {
        let wanted = self.options.architecture.unwrap_or_else(|| architecture());
        let mut plans = manifest::plans(blobs, wanted, self.store.limits())?;
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
        if let Some(change) = self.options.change.filter(|change| !change.is_empty()) {
            for plan in &mut plans {
                change.apply(&mut plan.config);
                // The configuration is another now, so the image is.
                plan.id = change.id(&plan.id, &plan.config);
                plan.manifest = None;
            }
        }
        self.pin(&plans)?;
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
        let limits = self.store.limits();
        let (applied, digests) = decompress::unpack(archive, &what, limits, &progress, |chunks| {
            apply::apply(chunks, &directory, &what, limits, &|bytes| self.budget.charge(bytes))
        })?;
        self.commit_root(&directory, name, digests.unpacked, record(&applied), applied.warnings)
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
        let charge = |bytes| self.budget.charge(bytes);
        let copied =
            copy::copy(path, &directory, self.store.root(), self.store.limits(), &charge, &progress)?;
        let record = LayerRecord { bytes: copied.bytes, disk: copied.disk, ..LayerRecord::default() };
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
        let mut config = Config {
            cmd: vec![shell.into()],
            os: "linux".into(),
            architecture: self.options.architecture.unwrap_or_else(|| architecture()).into(),
            ..Config::default()
        };
        if let Some(change) = self.options.change {
            change.apply(&mut config);
        }
        let document = serde_json::json!({
            "config": config,
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
        let plans = vec![plan];
        self.pin(&plans)?;
        self.commit(plans, Fresh::from([(layer, record)]), warnings)
    }

    /// Keeps what the images need from being deleted under this load, whether it is in the store already or will be.
    fn pin(&self, plans: &[Plan]) -> Result<()> {
        let layers = plans.iter().map(|plan| distinct(&plan.layers));
        let pins: Vec<_> = layers
            .flat_map(|layers| {
                let merge = merge_name(&layers);
                layers.into_iter().chain([merge])
            })
            .collect();
        let _shared = self.store.lock_layers(rustix::fs::FlockOperation::LockShared)?;
        self.workspace.pin(&pins)?;
        self.budget.spare(plans.iter().map(|plan| plan.id.clone()));
        Ok(())
    }

    /// Unpacks the layers that the store lacks, several at a time.
    fn unpack(&self, blobs: &Blobs, plans: &[Plan]) -> Result<(Fresh, Vec<String>)> {
        let limits = self.store.limits();
        let mut wanted = BTreeMap::new();
        for layer in plans.iter().flat_map(|plan| &plan.layers) {
            wanted.entry(layer_name(&layer.diff_id)).or_insert(layer);
        }
        let known = self.store.current()?;
        wanted.retain(|name, _| !known.has_layer(name));
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
                let what = format!("{} of {}", layer.part, blobs.path().display());
                match shared.layer(name, layer, &what, section.clone()) {
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
    fn layer(
        &self,
        name: &str,
        layer: &PlannedLayer,
        what: &str,
        section: Section,
    ) -> Result<apply::Applied> {
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
        let (applied, digests) = decompress::unpack(section, what, limits, &progress, |chunks| {
            apply::apply(chunks, &directory, what, limits, &|bytes| self.load.budget.charge(bytes))
        })?;
        digests.check(what, layer.blob.as_deref(), Some(&layer.diff_id))?;
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

fn reserved() -> String {
    format!("docker.io/library/{HOST}:latest")
}

pub(super) fn create(path: &Path) -> Result<()> {
    std::fs::create_dir(path).map_err(|error| Error::io("create", path, error))
}
