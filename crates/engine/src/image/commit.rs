//! The last step of a load: layers are merged where there are too many, all is put in its place, and names stand for
//! it.

use super::apply;
use super::decompress::digest_of;
use super::error::{Error, Result};
use super::index::{self, ImageRecord, LayerRecord};
use super::load::{Fresh, Load, Loaded, create};
use super::manifest::{Plan, PlannedLayer};
use super::merge;
use super::store::drop_unnamed;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Layers to mount at most. More make each look-up of a missing name slower.
const MOST_LOWERS: usize = 3;
/// Digest of an empty tar archive: the layer of images that have none.
const EMPTY: &str = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef";

impl Load<'_> {
    /// Merges layers where there are too many, and puts everything in its place.
    pub(super) fn commit(&self, plans: Vec<Plan>, mut fresh: Fresh, warnings: Vec<String>) -> Result<Loaded> {
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
        let ids: Vec<_> = records.iter().map(|(plan, _, _)| plan.id.clone()).collect();
        let committed = self.store.update(|index| {
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
        });
        let references = match committed {
            Ok(references) => references,
            Err(error) => {
                // Layers may be in place that no record names.
                self.workspace.unpin()?;
                self.store.recover()?;
                return Err(error);
            }
        };
        for id in ids {
            self.store.note_use(&id)?;
        }
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
        let none = LayerRecord::default();
        let record_of =
            |layer: &String| fresh.get(layer).or_else(|| known.index.layers.get(layer)).unwrap_or(&none);
        let as_they_are = |layer: &String| !record_of(layer).hides && record_of(layer).links.is_empty();
        if layers.len() <= MOST_LOWERS && layers.iter().all(as_they_are) {
            return Ok(layers.iter().rev().cloned().collect());
        }
        let merged = merge_name(layers);
        if !fresh.contains_key(&merged) && !known.has_layer(&merged) {
            let target = self.workspace.path().join(&merged);
            create(&target)?;
            let sources: Vec<_> = layers
                .iter()
                .map(|layer| merge::Source {
                    name: layer,
                    place: self.place(layer, fresh),
                    links: &record_of(layer).links,
                })
                .collect();
            let disk = merge::merge(&sources, &target)?;
            self.budget.charge(disk)?;
            fresh.insert(merged.clone(), LayerRecord { disk, ..LayerRecord::default() });
        }
        Ok(vec![merged])
    }

    fn empty_layer(&self, fresh: &mut Fresh) -> Result<String> {
        if !self.store.current()?.has_layer(EMPTY) && !fresh.contains_key(EMPTY) {
            let path = self.workspace.path().join(EMPTY);
            create(&path)?;
            apply::apply(&[][..], &path, "the empty layer", self.store.limits(), &|_| Ok(()))?;
            fresh.insert(EMPTY.into(), LayerRecord::default());
        }
        Ok(EMPTY.into())
    }
}

/// Layer names, the lowest first, each once: of a layer that comes twice only the upper one is seen, and overlayfs
/// refuses to stack a directory on itself.
pub(super) fn distinct(layers: &[PlannedLayer]) -> Vec<String> {
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

pub(super) fn record(applied: &apply::Applied) -> LayerRecord {
    LayerRecord {
        bytes: applied.bytes,
        disk: applied.disk,
        hides: applied.hides,
        links: applied.links.clone(),
    }
}

/// Directory name of a layer.
pub(super) fn layer_name(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

/// Directory name of the merge of these layers.
pub(super) fn merge_name(layers: &[String]) -> String {
    layer_name(&digest_of(format!("merge 1\n{}", layers.join("\n")).as_bytes())).to_owned()
}
