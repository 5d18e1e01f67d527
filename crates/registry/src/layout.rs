//! Writes a complete image as an OCI layout.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;

use crate::error::{Error, Result};
use crate::image::Image;
use crate::manifest::Digest;
use crate::partial::Blob;

/// Writes everything into a directory that is new or empty; after an error it is as it was before.
pub(crate) fn write(directory: &Path, image: &Image, layers: &[(Digest, Arc<Blob>)]) -> Result<()> {
    let is_new = prepare(directory)?;
    let written = fill(directory, image, layers);
    if written.is_err() {
        // What cannot be removed is the lesser of the two troubles.
        if is_new {
            let _ = std::fs::remove_dir_all(directory);
        } else {
            let _ = std::fs::remove_dir_all(directory.join("blobs"));
            for name in ["index.json", "oci-layout"] {
                let _ = std::fs::remove_file(directory.join(name));
            }
        }
    }
    written
}

/// Makes the directory, unless it is there and empty. Tells whether it was made.
fn prepare(directory: &Path) -> Result<bool> {
    match std::fs::read_dir(directory) {
        Ok(mut entries) => match entries.next() {
            None => Ok(false),
            Some(_) => Err(Error::TargetInUse { path: directory.into() }),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
            made.map_err(|error| Error::disk("create", directory, error))?;
            Ok(true)
        }
        Err(error) => Err(Error::disk("open", directory, error)),
    }
}

fn fill(directory: &Path, image: &Image, layers: &[(Digest, Arc<Blob>)]) -> Result<()> {
    let blobs = directory.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).map_err(|error| Error::disk("create", &blobs, error))?;
    for (digest, blob) in layers {
        blob.place(&blobs.join(digest.hex()))?;
    }
    for answer in [&image.config, &image.manifest] {
        put(&blobs.join(answer.digest.hex()), &answer.bytes)?;
    }
    let mut platform = json!({"os": image.platform.os, "architecture": image.platform.architecture});
    if let Some(variant) = &image.platform.variant {
        platform["variant"] = json!(variant);
    }
    let mut annotations = json!({"io.containerd.image.name": image.reference.to_string()});
    if let Some(tag) = image.reference.tag() {
        annotations["org.opencontainers.image.ref.name"] = json!(tag);
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{
            "mediaType": image.media_type,
            "digest": image.manifest.digest.as_str(),
            "size": image.manifest.bytes.len(),
            "platform": platform,
            "annotations": annotations,
        }],
    });
    put(&directory.join("oci-layout"), br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    put(&directory.join("index.json"), index.to_string().as_bytes())
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|error| Error::disk("write", path, error))
}
