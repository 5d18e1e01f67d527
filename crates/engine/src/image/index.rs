//! What the store knows about its images, in one file that is replaced as a whole.

use super::Config;
use super::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const VERSION: u32 = 1;

/// Content of `index.json`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    version: u32,
    /// By digest of the configuration.
    pub(super) images: BTreeMap<String, ImageRecord>,
    /// Complete image names and the image each stands for.
    pub(super) references: BTreeMap<String, String>,
    /// Other names, and what to look up instead.
    pub(super) aliases: BTreeMap<String, String>,
    /// Unpacked layers by directory name, also those that no image uses any more but a sandbox may.
    pub(super) layers: BTreeMap<String, LayerRecord>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct ImageRecord {
    pub(super) config: Config,
    /// Layers as the image has them, the lowest first.
    pub(super) layers: Vec<String>,
    /// Layers to mount, the highest first: those above, or merges of them.
    pub(super) lowers: Vec<String>,
    pub(super) size_bytes: u64,
    pub(super) created: Option<String>,
    /// Digests of manifests that led here.
    pub(super) manifests: BTreeSet<String>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct LayerRecord {
    /// Bytes of file content that are its own; none for a merge.
    pub(super) bytes: u64,
    /// Bytes of disk that it takes, about: whole blocks, names that link to other layers' files for nothing.
    #[serde(default)]
    pub(super) disk: u64,
    /// Whether it holds whiteouts or opaque directories.
    pub(super) hides: bool,
    /// Hard links to files of layers below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) links: Vec<LowerLink>,
}

/// A hard link in a layer whose other name is in a layer below: it can be made only where the layers come together.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct LowerLink {
    pub(super) path: String,
    pub(super) target: String,
}

impl LayerRecord {
    /// Bytes of disk.
    pub(super) fn on_disk(&self) -> u64 {
        self.disk.max(self.bytes)
    }
}

/// Tells two versions of the file apart without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    inode: u64,
    mtime: (i64, i64),
    size: u64,
}

impl Stamp {
    /// Stamp of the file, or `None` when it is not there.
    pub(super) fn of(path: &Path) -> Result<Option<Self>> {
        match std::fs::metadata(path) {
            Ok(metadata) => Ok(Some(Self::new(&metadata))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("examine", path, error)),
        }
    }

    fn new(metadata: &std::fs::Metadata) -> Self {
        Self { inode: metadata.ino(), mtime: (metadata.mtime(), metadata.mtime_nsec()), size: metadata.len() }
    }
}

impl Index {
    /// Reads the file; an absent one is an empty index.
    pub(super) fn read(path: &Path) -> Result<(Self, Option<Stamp>)> {
        let failed = |error| Error::io("read", path, error);
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok((Self::default(), None)),
            Err(error) => return Err(failed(error)),
        };
        // Of the open file, so that stamp and content belong together.
        let stamp = Stamp::new(&file.metadata().map_err(failed)?);
        let data = std::io::read_to_string(file).map_err(failed)?;
        let json = |source| Error::Json { what: path.display().to_string(), source };
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_str(&data).map_err(json)?;
        if version > VERSION {
            return Err(Error::IndexVersion { path: path.into(), version, known: VERSION });
        }
        Ok((serde_json::from_str(&data).map_err(json)?, Some(stamp)))
    }

    /// Replaces the file. Readers see the old or the new one, after a crash too.
    pub(super) fn write(&mut self, path: &Path) -> Result<()> {
        self.version = VERSION;
        let temporary = path.with_extension("new");
        let data = serde_json::to_vec_pretty(self)
            .map_err(|source| Error::Json { what: path.display().to_string(), source })?;
        let failed = |error| Error::io("write", &temporary, error);
        let mut file = File::create(&temporary).map_err(failed)?;
        file.write_all(&data).and_then(|()| file.sync_all()).map_err(failed)?;
        std::fs::rename(&temporary, path).map_err(|error| Error::io("replace", path, error))?;
        if let Some(directory) = path.parent() {
            sync_dir(directory)?;
        }
        Ok(())
    }

    /// Layers that some image needs.
    pub(super) fn used_layers(&self) -> BTreeSet<&str> {
        self.images
            .values()
            .flat_map(|image| image.layers.iter().chain(&image.lowers))
            .map(String::as_str)
            .collect()
    }
}

/// Makes renames in a directory durable.
pub(super) fn sync_dir(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| Error::io("write to", path, error))
}
