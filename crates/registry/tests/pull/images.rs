//! Images to serve and to push.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

pub(crate) fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Bytes that do not compress, the same for the same seed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// An image whose parts are in memory.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) blobs: BTreeMap<String, Vec<u8>>,
    pub(crate) layers: Vec<String>,
    pub(crate) diff_ids: Vec<String>,
    pub(crate) config: String,
    pub(crate) manifest: Value,
}

impl Image {
    /// One layer per entry: size of its only file, and compression.
    pub(crate) fn new(platform: &str, layers: &[(usize, Compression)]) -> Self {
        let mut image = Self {
            blobs: BTreeMap::new(),
            layers: Vec::new(),
            diff_ids: Vec::new(),
            config: String::new(),
            manifest: Value::Null,
        };
        let mut descriptors = Vec::new();
        for (number, (size, compression)) in layers.iter().enumerate() {
            let mut archive = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_size(*size as u64);
            header.set_mode(0o644);
            let content = noise(number as u64 + *size as u64, *size);
            archive.append_data(&mut header, format!("file-{number}"), &content[..]).unwrap();
            let archive = archive.into_inner().unwrap();
            image.diff_ids.push(digest(&archive));
            let (kind, blob) = match compression {
                Compression::None => ("", archive),
                Compression::Gzip => {
                    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                    encoder.write_all(&archive).unwrap();
                    ("+gzip", encoder.finish().unwrap())
                }
                Compression::Zstd => ("+zstd", zstd::encode_all(&archive[..], 1).unwrap()),
            };
            image.layers.push(digest(&blob));
            descriptors.push(descriptor(&format!("{OCI_LAYER}{kind}"), &blob));
            image.blobs.insert(digest(&blob), blob);
        }
        let words: Vec<&str> = platform.split('/').collect();
        let mut config = json!({
            "os": words[0],
            "architecture": words[1],
            "config": {"Cmd": ["/bin/true"]},
            "rootfs": {"type": "layers", "diff_ids": image.diff_ids},
        });
        if let Some(variant) = words.get(2) {
            config["variant"] = json!(variant);
        }
        let config = config.to_string().into_bytes();
        image.config = digest(&config);
        image.manifest = json!({
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": descriptor(OCI_CONFIG, &config),
            "layers": descriptors,
        });
        image.blobs.insert(image.config.clone(), config);
        image
    }

    pub(crate) fn for_here(layers: &[(usize, Compression)]) -> Self {
        Self::new(&osb_registry::Platform::host().to_string(), layers)
    }

    pub(crate) fn manifest_bytes(&self) -> Vec<u8> {
        self.manifest.to_string().into_bytes()
    }

    pub(crate) fn layer(&self, number: usize) -> &[u8] {
        &self.blobs[&self.layers[number]]
    }

    /// As an OCI layout for `skopeo`, under the tag `it`.
    pub(crate) fn write(&self, directory: &Path) {
        write_layout(directory, std::slice::from_ref(self), &self.manifest_bytes(), OCI_MANIFEST);
    }
}

/// An index of several images, each with its platform.
pub(crate) fn index(images: &[(&str, &Image)]) -> Value {
    let manifests: Vec<Value> = images
        .iter()
        .map(|(platform, image)| {
            let words: Vec<&str> = platform.split('/').collect();
            let mut descriptor = descriptor(OCI_MANIFEST, &image.manifest_bytes());
            descriptor["platform"] = json!({"os": words[0], "architecture": words[1]});
            if let Some(variant) = words.get(2) {
                descriptor["platform"]["variant"] = json!(variant);
            }
            descriptor
        })
        .collect();
    json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests})
}

pub(crate) fn write_layout(directory: &Path, images: &[Image], top: &[u8], media_type: &str) {
    let blobs = directory.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| std::fs::write(blobs.join(&digest(bytes)["sha256:".len()..]), bytes).unwrap();
    for image in images {
        image.blobs.values().for_each(|blob| put(blob));
        put(&image.manifest_bytes());
    }
    put(top);
    let mut descriptor = descriptor(media_type, top);
    descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": "it"});
    let index = json!({"schemaVersion": 2, "manifests": [descriptor]});
    std::fs::write(directory.join("index.json"), index.to_string()).unwrap();
    std::fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

pub(crate) fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(bytes), "size": bytes.len()})
}
