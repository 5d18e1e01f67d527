//! When images were last used: the time of one empty file for each, so that a use costs no rewriting of the index.

use super::Image;
use super::error::{Error, Result};
use super::index::Index;
use super::store::{ImageStore, list_dir};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Times finer than this are not kept.
const GRAIN: Duration = Duration::from_secs(30);

/// Uses noted by this process.
#[derive(Debug, Default)]
pub(super) struct Touched(Mutex<HashMap<String, Instant>>);

impl ImageStore {
    fn used_path(&self, image_id: &str) -> PathBuf {
        self.root().join("used").join(image_id.trim_start_matches("sha256:"))
    }

    /// Notes that the image is used now. Cheap enough for every start of a sandbox.
    pub fn touch(&self, image: &Image) {
        if !image.id.starts_with("sha256:") {
            return;
        }
        let now = Instant::now();
        {
            let mut touched = self.touched.0.lock().unwrap_or_else(PoisonError::into_inner);
            match touched.get_mut(&image.id) {
                Some(last) if now.duration_since(*last) < GRAIN => return,
                Some(last) => *last = now,
                None => drop(touched.insert(image.id.clone(), now)),
            }
        }
        if let Err(error) = self.note_use(&image.id) {
            tracing::debug!(image = %image.id, %error, "the time of an image's use is not kept");
        }
    }

    pub(super) fn note_use(&self, image_id: &str) -> Result<()> {
        let path = self.used_path(image_id);
        std::fs::File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .and_then(|file| file.set_modified(SystemTime::now()))
            .map_err(|error| Error::io("write", &path, error))
    }

    /// When the image was last used or loaded; `None` when that is not known.
    pub fn last_used(&self, image: &Image) -> Option<jiff::Timestamp> {
        self.used(&image.id).and_then(|time| time.try_into().ok())
    }

    pub(super) fn used(&self, image_id: &str) -> Option<SystemTime> {
        std::fs::metadata(self.used_path(image_id)).and_then(|metadata| metadata.modified()).ok()
    }

    /// Removes the notes on images that are gone.
    pub(super) fn forget_uses(&self, index: &Index) -> Result<()> {
        for name in list_dir(&self.root().join("used"))? {
            if !index.images.contains_key(&format!("sha256:{name}")) {
                // Another process may have done so.
                let _ = std::fs::remove_file(self.used_path(&name));
            }
        }
        Ok(())
    }
}
