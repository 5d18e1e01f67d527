//! Removing: names, images, and the layers that nobody needs any more; and what the store takes on disk.

use super::error::{Error, Holder, Result};
use super::index::{ImageRecord, Index};
use super::names::{self, Names};
use super::store::{ImageStore, drop_unnamed, list_dir};
use super::uses::Uses;
use super::workspace::Temporary;
use super::{HOST, Image, Reference};
use rustix::fs::FlockOperation;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// What a removal did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Names that were removed.
    pub names: Vec<String>,
    /// Ids of images that lost their last name.
    pub images: Vec<String>,
    /// Layers deleted.
    pub layers: usize,
    /// Bytes of file content deleted.
    pub bytes: u64,
    /// Layers without an image that sandboxes or loads still need. They go when those have ended.
    pub kept: usize,
    /// Their bytes.
    pub kept_bytes: u64,
}

/// Which images [`ImageStore::prune`] removes beside layers that no image needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prune {
    /// None.
    #[default]
    Dangling,
    /// Those that no sandbox runs of.
    Unused,
    /// Of those, the ones not used for so long.
    UnusedFor(Duration),
}

/// Space taken by images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Stored images, each counted once whatever its names.
    pub images: usize,
    /// Unpacked layers.
    pub layers: usize,
    /// Bytes of file content in all layers, shared ones counted once.
    pub bytes: u64,
    /// Those of layers that no image uses.
    pub reclaimable_bytes: u64,
    /// Bytes of disk that all layers take, about.
    pub disk_bytes: u64,
}

impl ImageStore {
    /// Removes a name, and with its last name the image. An id removes all names of its image.
    ///
    /// Its layers go at once where neither another image nor a sandbox needs them, else with the last of those; a
    /// sandbox never loses what it stands on.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Reserved`] for the built-in image, [`Error::InUse`] when sandboxes run of an image
    /// that would lose its last name and `force` is not set, and failures of the file system.
    pub fn remove(&self, name: &str, force: bool) -> Result<Removed> {
        if names::is_host(name) {
            return Err(Error::Reserved { name: HOST.into() });
        }
        let uses = Uses::look(self.data_dir())?;
        let mut removed = self.update(|index| {
            let names = self.names_meant(index, name)?;
            let kept: BTreeSet<_> = index
                .references
                .iter()
                .filter(|(name, _)| !names.contains(*name))
                .map(|(_, id)| id)
                .collect();
            let lost =
                names.iter().filter_map(|name| index.references.get(name)).filter(|id| !kept.contains(id));
            let sandboxes: BTreeSet<_> = lost.flat_map(|id| uses.running(id)).collect();
            if !force && !sandboxes.is_empty() {
                return Err(Error::InUse { name: name.into(), sandboxes: sandboxes.into_iter().collect() });
            }
            Ok(forget(index, &names))
        })?;
        self.told_removed(&removed);
        removed.add(self.collect()?);
        Ok(removed)
    }

    /// The complete names that a removal of `name` means.
    fn names_meant(&self, index: &Index, name: &str) -> Result<BTreeSet<String>> {
        if let Ok(reference) = Reference::parse(name)
            && index.references.contains_key(&reference.to_string())
        {
            return Ok(BTreeSet::from([reference.to_string()]));
        }
        let names =
            Names::new(index.clone(), None, &self.layer_path(""), Arc::clone(&self.host), &BTreeMap::new());
        let Some(image) = names.by_id(name) else {
            let alias = names::alias_key(name).is_ok_and(|key| index.aliases.contains_key(&key));
            return Err(if alias {
                Error::IsAlias { name: name.into() }
            } else {
                Error::NotFound { name: name.into(), similar: names.similar(name) }
            });
        };
        let same = index.references.iter().filter(|(_, id)| **id == image.id);
        Ok(same.map(|(reference, _)| reference.clone()).collect())
    }

    fn told_removed(&self, removed: &Removed) {
        if let Some(release) = self.release.get() {
            removed.images.iter().for_each(|id| release(id));
        }
    }

    /// Deletes layers that nobody needs: neither an image, nor a sandbox, nor a load under way; and old states of
    /// [`HOST`].
    ///
    /// # Errors
    /// Failures of the file system. What was not deleted stays known and is tried again next time.
    pub fn collect(&self) -> Result<Removed> {
        // Before the lock, which making it would wait for.
        let host = self.host.get()?;
        let lock = self.lock_layers(FlockOperation::LockExclusive)?;
        let mut temporary = Temporary::look(self.root())?;
        let uses = Uses::look(self.data_dir())?;
        let mut removed = Removed::default();
        self.update(|index| {
            for layer in unused(index) {
                let path = self.layer_path(&layer);
                let bytes = index.layers.get(&layer).map_or(0, |record| record.bytes);
                if temporary.pinned.contains(&layer) || uses.holds(&path) {
                    removed.kept += 1;
                    removed.kept_bytes += bytes;
                    continue;
                }
                temporary.discard(self.root(), &path)?;
                index.layers.remove(&layer);
                removed.layers += 1;
                removed.bytes += bytes;
            }
            self.forget_uses(index)
        })?;
        let hosts = self.root().join("host");
        let current = host.as_ref().and_then(|host| host.roots.first()?.lowers.first());
        for old in list_dir(&hosts)?.into_iter().map(|name| hosts.join(name)) {
            if host.is_some() && Some(&old) != current && !uses.holds(&old) {
                temporary.discard(self.root(), &old)?;
            }
        }
        drop(lock);
        temporary.delete()?;
        Ok(removed)
    }

    /// Whether layers wait to be collected. Costs one `stat` when nothing changed.
    ///
    /// # Errors
    /// When the index cannot be read.
    pub fn has_garbage(&self) -> Result<bool> {
        Ok(!unused(&self.current()?.index).is_empty())
    }

    /// Removes images that are not needed, and what no image needs. With `pretend` nothing is removed and the answer
    /// says what would be.
    ///
    /// # Errors
    /// Failures of the file system.
    pub fn prune(&self, which: Prune, pretend: bool) -> Result<Removed> {
        let uses = Uses::look(self.data_dir())?;
        let (running, now) = (uses.images(), SystemTime::now());
        let goes = |id: &str| {
            let idle = match which {
                Prune::Dangling => return false,
                Prune::Unused => true,
                Prune::UnusedFor(least) => {
                    let used = self.used(id).unwrap_or(SystemTime::UNIX_EPOCH);
                    now.duration_since(used).is_ok_and(|idle| idle >= least)
                }
            };
            idle && !running.contains(id)
        };
        let names_of = |index: &Index| -> BTreeSet<String> {
            index.references.iter().filter(|(_, id)| goes(id)).map(|(name, _)| name.clone()).collect()
        };
        if pretend {
            let mut index = self.current()?.index.clone();
            let names = names_of(&index);
            let mut removed = forget(&mut index, &names);
            for layer in unused(&index) {
                let bytes = index.layers.get(&layer).map_or(0, |record| record.bytes);
                if uses.holds(&self.layer_path(&layer)) {
                    removed.kept += 1;
                    removed.kept_bytes += bytes;
                } else {
                    removed.layers += 1;
                    removed.bytes += bytes;
                }
            }
            return Ok(removed);
        }
        let mut removed = self.update(|index| {
            let names = names_of(index);
            Ok(forget(index, &names))
        })?;
        self.told_removed(&removed);
        removed.add(self.collect()?);
        Ok(removed)
    }

    /// Removes unused images, those not used for the longest time first, until `bytes` of disk are free that were not,
    /// or no more can be had. Images named in `spare` stay. Answers how many bytes came free.
    pub(super) fn evict(&self, bytes: u64, spare: &BTreeSet<String>) -> Result<u64> {
        let before = self.disk_usage()?.disk_bytes;
        let freed = |store: &Self| Ok::<_, Error>(before.saturating_sub(store.disk_usage()?.disk_bytes));
        self.collect()?;
        while freed(self)? < bytes {
            let uses = Uses::look(self.data_dir())?;
            let running = uses.images();
            let evicted = self.update(|index| {
                let mut may_go: Vec<_> = index
                    .images
                    .keys()
                    .filter(|id| !running.contains(id.as_str()) && !spare.contains(*id))
                    .map(|id| (self.used(id), id.clone()))
                    .collect();
                may_go.sort();
                let Some((_, id)) = may_go.into_iter().next() else { return Ok(None) };
                let names = index.references.iter().filter(|(_, image)| **image == id);
                let names = names.map(|(name, _)| name.clone()).collect();
                Ok(Some(forget(index, &names)))
            })?;
            let Some(evicted) = evicted else { break };
            tracing::info!(names = ?evicted.names, "an image was removed to make room (max_disk)");
            self.collect_released(&evicted)?;
        }
        freed(self)
    }

    /// Deletes the layers of images that were just removed. What is prepared of them is given up, by a server in another
    /// process within seconds: only for what a sandbox runs on there is nothing to wait for.
    fn collect_released(&self, removed: &Removed) -> Result<()> {
        const PAUSE: Duration = Duration::from_millis(100);
        const PAUSES: usize = 60;
        for _ in 0..PAUSES {
            self.told_removed(removed);
            self.collect()?;
            let uses = Uses::look(self.data_dir())?;
            let stands = |layer: &String| uses.runs_on(&self.layer_path(layer));
            if unused(&self.current()?.index).iter().all(stands) {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Bytes that images take which cannot be removed now, and those images that sandboxes run of, the largest first.
    pub(super) fn unremovable(&self, spare: &BTreeSet<String>) -> Result<(u64, Vec<Holder>)> {
        let uses = Uses::look(self.data_dir())?;
        let names = self.current()?;
        let index = &names.index;
        let disk = |layer: &String| index.layers.get(layer).map_or(0, super::index::LayerRecord::on_disk);
        let mut kept = BTreeSet::new();
        let mut holders = Vec::new();
        for (id, image) in &index.images {
            let layers: BTreeSet<_> = image.layers.iter().chain(&image.lowers).collect();
            let running = uses.running(id).len();
            if running > 0 || spare.contains(id) {
                kept.extend(layers.iter().copied());
            }
            if running > 0 {
                let name = index.references.iter().find(|(_, image)| *image == id).map(|(name, _)| name);
                holders.push(Holder {
                    name: name.unwrap_or(id).clone(),
                    disk_bytes: layers.into_iter().map(disk).sum(),
                    sandboxes: running,
                });
            }
        }
        // What is only prepared is given up. Layers of images that were removed by force are not.
        kept.extend(index.layers.keys().filter(|layer| uses.runs_on(&self.layer_path(layer))));
        holders.sort_by(|a: &Holder, b| b.disk_bytes.cmp(&a.disk_bytes).then_with(|| a.name.cmp(&b.name)));
        Ok((kept.into_iter().map(disk).sum(), holders))
    }

    /// Ids of the sandboxes that run of an image.
    ///
    /// # Errors
    /// When the sandboxes' directories cannot be read.
    pub fn sandboxes(&self, image: &Image) -> Result<Vec<String>> {
        Ok(Uses::look(self.data_dir())?.running(&image.id))
    }

    /// Ids of the sandboxes that run of each of these images, by the image's id.
    ///
    /// # Errors
    /// When the sandboxes' directories cannot be read.
    pub fn sandboxes_of(&self, images: &[Arc<Image>]) -> Result<BTreeMap<String, Vec<String>>> {
        let uses = Uses::look(self.data_dir())?;
        Ok(images.iter().map(|image| (image.id.clone(), uses.running(&image.id))).collect())
    }

    /// Space taken by images.
    ///
    /// # Errors
    /// When the index cannot be read.
    pub fn disk_usage(&self) -> Result<DiskUsage> {
        let names = self.current()?;
        let used = names.index.used_layers();
        let mut usage = DiskUsage {
            images: names.index.images.len(),
            layers: names.index.layers.len(),
            ..DiskUsage::default()
        };
        for (layer, record) in &names.index.layers {
            usage.bytes += record.bytes;
            usage.disk_bytes += record.on_disk();
            if !used.contains(layer.as_str()) {
                usage.reclaimable_bytes += record.bytes;
            }
        }
        Ok(usage)
    }
}

impl Removed {
    fn add(&mut self, other: Self) {
        self.layers += other.layers;
        self.bytes += other.bytes;
        self.kept += other.kept;
        self.kept_bytes += other.kept_bytes;
    }
}

/// Takes names out of the index, and images that lose their last.
fn forget(index: &mut Index, names: &BTreeSet<String>) -> Removed {
    let before: BTreeMap<String, ImageRecord> = index.images.clone();
    index.references.retain(|reference, _| !names.contains(reference));
    drop_unnamed(index);
    let images = before.into_keys().filter(|id| !index.images.contains_key(id)).collect();
    Removed { names: names.iter().cloned().collect(), images, ..Removed::default() }
}

/// Layers that no image needs.
fn unused(index: &Index) -> Vec<String> {
    let used = index.used_layers();
    index.layers.keys().filter(|layer| !used.contains(layer.as_str())).cloned().collect()
}
