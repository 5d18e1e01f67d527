//! Which sandboxes stand on which layers. Told by files beside the sandboxes, so that every process knows, whether a
//! server runs or not: a file in a sandbox's directory names its layers and goes with the directory, and the kernel's
//! lock on another, which the sandbox's init keeps open, says that it runs.

use super::error::{Error, Result};
use super::workspace::{Lock, lock_layers};
use super::{HOST, Image};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// File in the directory of a sandbox.
const FILE: &str = "image";

/// What a sandbox's file says.
#[derive(Debug, Deserialize, Serialize)]
struct Standing {
    /// The image's id.
    image: String,
    layers: BTreeSet<PathBuf>,
}

/// Makes what stands on an image, within the directory `dir` of a sandbox, and keeps the image's layers from being
/// deleted as long as the directory is there. `make` makes the directory.
pub(crate) fn stand<T>(
    data_dir: &Path,
    image: &Image,
    dir: &Path,
    make: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let layers: BTreeSet<_> = image.roots.iter().flat_map(|root| root.lowers.iter().cloned()).collect();
    let _shared =
        lock_layers(&data_dir.join("images"), FlockOperation::LockShared).map_err(io::Error::other)?;
    if let Some(gone) = layers.iter().find(|layer| !layer.exists()) {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("the image {} has just been removed ({} is gone)", image.reference, gone.display()),
        ));
    }
    let made = make()?;
    let text = serde_json::to_vec(&Standing { image: image.id.clone(), layers })?;
    std::fs::write(dir.join(FILE), text)?;
    Ok(made)
}

/// Notes on a file that the sandbox's init keeps open to its end that the sandbox runs. The note goes with the init.
pub(crate) fn runs(log: &File) -> io::Result<()> {
    Ok(rustix::fs::flock(log, FlockOperation::LockShared)?)
}

/// A sandbox, running or prepared.
#[derive(Debug)]
struct Sandbox {
    id: String,
    runs: bool,
    standing: Standing,
}

/// All sandboxes below a data directory.
#[derive(Debug, Default)]
pub(super) struct Uses {
    sandboxes: Vec<Sandbox>,
}

impl Uses {
    /// Looks at them. Without a server, directories in which nothing runs are remains of its prepared sandboxes, which
    /// its next start removes.
    pub(super) fn look(data_dir: &Path) -> Result<Self> {
        let all = data_dir.join("sandboxes");
        let served = Lock::is_held(&data_dir.join("lock"))?;
        let mut uses = Self::default();
        let entries = match std::fs::read_dir(&all) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(uses),
            Err(error) => return Err(Error::io("read", all, error)),
        };
        for entry in entries {
            let dir = entry.map_err(|error| Error::io("read", &all, error))?.path();
            let path = dir.join(FILE);
            let text = match std::fs::read(&path) {
                Ok(text) => text,
                // Of a sandbox that is being removed, or prepared: the latter holds the lock of the layers.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
                {
                    continue;
                }
                Err(error) => return Err(Error::io("read", path, error)),
            };
            let runs = Lock::is_held(&dir.join(crate::slot::LOG_FILE))?;
            if !runs && !served {
                continue;
            }
            let standing = serde_json::from_slice(&text)
                .map_err(|source| Error::Json { what: path.display().to_string(), source })?;
            let id = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            uses.sandboxes.push(Sandbox { id, runs, standing });
        }
        uses.sandboxes.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(uses)
    }

    /// Whether a sandbox, running or prepared, stands on this layer.
    pub(super) fn holds(&self, layer: &Path) -> bool {
        self.sandboxes.iter().any(|sandbox| sandbox.standing.layers.contains(layer))
    }

    /// Whether a running sandbox stands on this layer.
    pub(super) fn runs_on(&self, layer: &Path) -> bool {
        self.sandboxes.iter().any(|sandbox| sandbox.runs && sandbox.standing.layers.contains(layer))
    }

    /// Ids of the running sandboxes of an image.
    pub(super) fn running(&self, image_id: &str) -> Vec<String> {
        let of = |sandbox: &&Sandbox| sandbox.runs && sandbox.standing.image == image_id;
        self.sandboxes.iter().filter(of).map(|sandbox| sandbox.id.clone()).collect()
    }

    /// Ids of the images that sandboxes run of.
    pub(super) fn images(&self) -> BTreeSet<&str> {
        let running = self.sandboxes.iter().filter(|sandbox| sandbox.runs);
        running.map(|sandbox| sandbox.standing.image.as_str()).filter(|image| *image != HOST).collect()
    }
}
