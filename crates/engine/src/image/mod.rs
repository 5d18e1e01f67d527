//! Stored images: loading, naming and removing them, and the built-in image `host`.
//!
//! An image becomes a few directories that overlayfs stacks: [`Image::roots`] says which. Layers are addressed by the
//! digest of their content, unpacked once, shared between images and never changed. All calls block; none of them
//! needs a runtime.
//!
//! ```text
//! <data_dir>/images/         0700: what lies below keeps the image's owners and set-id bits
//!     index.json             names, configurations, layers; replaced by rename
//!     index.lock             held while index.json is replaced
//!     gc.lock                shared for a moment by those who begin to count on layers, exclusive for those who delete
//!     layers/<sha256>/       one unpacked layer, or a merge of several
//!     host/<hash>/           skeleton of the built-in image, one per state of the host's /etc
//!     tmp/                   work in progress, each directory locked by its owner; unlocked ones are removed
//!     used/<id>              empty; its time is when the image was last used
//! ```

mod apply;
mod archive;
mod budget;
mod change;
mod collect;
mod commit;
mod content;
mod copy;
mod decompress;
mod error;
mod host;
mod index;
mod last_used;
mod limits;
mod load;
mod manifest;
mod merge;
mod names;
mod path;
mod sparse;
mod store;
mod tarball;
mod tree;
mod uses;
mod workspace;

pub use change::ConfigChange;
pub use collect::{DiskUsage, Prune, Removed};
pub use error::{Error, Holder, Result, size};
pub use limits::Limits;
pub use load::{LoadOptions, Loaded, Progress};
pub use store::{ImageStore, Options};
pub use workspace::Workspace;

pub use osb_protocol::image::Reference;

pub(crate) use uses::{runs, stand};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Name of the built-in image.
pub const HOST: &str = "host";

/// An image that sandboxes can be made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// Its complete name.
    pub reference: String,
    /// `sha256:…` of its configuration.
    pub id: String,
    /// How its maker wants it to be run.
    pub config: Config,
    /// File systems to mount, the root first, each on a mount point that the ones before it hold.
    pub roots: Vec<Root>,
    /// Bytes of file content over all its layers.
    pub size_bytes: u64,
    /// When its maker built it.
    pub created: Option<jiff::Timestamp>,
}

/// One mounted file system of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// Absolute path inside the sandbox.
    pub mountpoint: String,
    /// Directories to stack, the top one first; at most three. Never written to.
    pub lowers: Vec<PathBuf>,
}

/// The part of an image's configuration that matters for running it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Config {
    /// Variables in the image's order.
    pub env: Vec<(String, String)>,
    /// Directory that commands start in.
    pub workdir: Option<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`, as the image has it.
    pub user: Option<String>,
    /// First words of the image's own command.
    pub entrypoint: Vec<String>,
    /// The words after them.
    pub cmd: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Ports as `8080/tcp`.
    pub exposed_ports: Vec<String>,
    /// Directories meant for data.
    pub volumes: Vec<String>,
    /// Signal that asks the image's program to end.
    pub stop_signal: Option<String>,
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, ….
    pub architecture: String,
}

/// This machine's architecture in the language of images.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}
