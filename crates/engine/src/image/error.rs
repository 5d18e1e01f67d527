use osb_protocol::image::InvalidName;
use std::io;
use std::path::{Path, PathBuf};

/// What can go wrong with stored images. Texts name the file, entry or setting and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The alias stands for an image that is not stored.
    #[error("{name} is an alias of {target}, which is not stored here; `osb image pull {name}` fetches it")]
    AliasDangling {
        /// The alias asked for.
        name: String,
        /// The name that it leads to.
        target: String,
    },
    /// Aliases lead to each other and never to an image.
    #[error("alias {name} leads back to itself; point it at a stored image or at `host`")]
    AliasLoop {
        /// The alias asked for.
        name: String,
    },
    /// The archive holds several images and the given name is none of theirs.
    #[error("{path} holds {} images; load it without a name, or name one of: {}", names.len(), names.join(", "))]
    Ambiguous {
        /// The archive.
        path: PathBuf,
        /// The names in it.
        names: Vec<String>,
    },
    /// The archive promises a part that it does not hold.
    #[error("{path} does not hold {blob}; save the image again, with all its layers")]
    BlobMissing {
        /// The archive.
        path: PathBuf,
        /// Name or digest of the part.
        blob: String,
    },
    /// Bytes are not what their digest says.
    #[error(
        "digest of {blob} does not match: expected {expected}, found {found}; fetch or save the image again"
    )]
    DigestMismatch {
        /// Name of the blob.
        blob: String,
        /// Digest in the manifest or configuration.
        expected: String,
        /// Digest of the bytes.
        found: String,
    },
    /// The index promises no image.
    #[error("the index of {what} is empty; save or push the image again")]
    EmptyIndex {
        /// The archive, or the index within it.
        what: String,
    },
    /// Written by a newer program.
    #[error("{path} has version {version}, this program knows {known}; use the newer program")]
    IndexVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
        /// The newest known version.
        known: u32,
    },
    /// A name that is no image reference.
    #[error(transparent)]
    InvalidName(#[from] InvalidName),
    /// A system call failed.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Sandboxes run of the image.
    #[error(
        "{name} is in use by {} ({}); end {} first, or add --force to remove its names now and its layers afterwards",
        counted(sandboxes.len(), "running sandbox", "running sandboxes"),
        shortened(sandboxes),
        if sandboxes.len() == 1 { "it" } else { "them" }
    )]
    InUse {
        /// The name.
        name: String,
        /// Their ids.
        sandboxes: Vec<String>,
    },
    /// The name is an alias, not an image's.
    #[error("{name} is an alias; `osb image alias --rm {name}` removes it")]
    IsAlias {
        /// The name.
        name: String,
    },
    /// JSON that does not say what it must.
    #[error("{what} is not valid JSON of its kind")]
    Json {
        /// The document.
        what: String,
        /// Position and cause.
        #[source]
        source: serde_json::Error,
    },
    /// Larger than the configured limits allow.
    #[error("{what} exceeds the limit {setting} = {limit}; raise it only for an image you trust")]
    LimitExceeded {
        /// The layer, entry or document.
        what: String,
        /// Field of [`Limits`](super::Limits).
        setting: &'static str,
        /// Its value.
        limit: u64,
    },
    /// Bytes that break their format.
    #[error("{what} is damaged: {reason}")]
    Malformed {
        /// The layer or document.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// The archive or directory carries no name for its image.
    #[error("{path} does not name its image; give a name to load it under")]
    NameNeeded {
        /// The archive or directory.
        path: PathBuf,
    },
    /// No space left, or less than the store keeps free.
    #[error("no space left in {path}; free some there")]
    NoSpace {
        /// Where there is none.
        path: PathBuf,
    },
    /// No image of that name.
    #[error("no image named {name}{}; `osb image list` shows what is stored", did_you_mean(similar))]
    NotFound {
        /// The name.
        name: String,
        /// Stored names that look like it, the likest first.
        similar: Vec<String>,
    },
    /// Made for another kind of machine.
    #[error("{what} is for {found}, but {wanted} is wanted; take the image for {wanted}")]
    Platform {
        /// The archive or image.
        what: String,
        /// Platforms offered.
        found: String,
        /// Platform of this machine, or the one asked for.
        wanted: String,
    },
    /// A name that the store keeps for itself.
    #[error("the name {name} belongs to the built-in image; choose another")]
    Reserved {
        /// The name.
        name: String,
    },
    /// More than images may take together.
    #[error(
        "no room for {what}: images may take {} (max_disk) and {}; {}",
        size(*limit),
        if *kept == 0 { "nothing stored is in the way".to_owned() } else { format!("{} cannot be removed now", size(*kept)) },
        would_free(holders)
    )]
    StoreFull {
        /// What was to be stored.
        what: String,
        /// The limit in bytes.
        limit: u64,
        /// Bytes that stay whatever is removed.
        kept: u64,
        /// Images that sandboxes run of, the largest first.
        holders: Vec<Holder>,
    },
    /// The file ended early.
    #[error("{what} ends too early; the copy is incomplete, fetch or save it again")]
    Truncated {
        /// The layer or archive.
        what: String,
    },
    /// Neither an archive nor a directory that can become an image.
    #[error(
        "{path} is no image: expected a directory with a root file system, an OCI layout (directory or archive), or an archive as `docker save` writes it"
    )]
    UnknownKind {
        /// The file.
        path: PathBuf,
    },
    /// An entry that would leave the image's root or that no sandbox may have.
    #[error("entry {entry:?} of {layer} refused: {reason}")]
    UnsafeEntry {
        /// The layer.
        layer: String,
        /// Path of the entry as the archive has it.
        entry: String,
        /// Why.
        reason: String,
    },
    /// A format that is known but not supported.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The part.
        what: String,
        /// What to do instead.
        reason: &'static str,
    },
}

/// An image that cannot make room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its name.
    pub name: String,
    /// Bytes of disk that it takes.
    pub disk_bytes: u64,
    /// How many sandboxes run of it.
    pub sandboxes: usize,
}

/// Result of store operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A failed system call on `path`; lack of space gets its own variant.
    pub(super) fn io(action: &'static str, path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        let (path, source) = (path.as_ref().to_path_buf(), source.into());
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Self::NoSpace { path },
            _ => Self::Io { action, path, source },
        }
    }

    /// A failed read of a compressed, hashed or limited stream: errors that travelled through [`io::Error`] come
    /// out as they went in.
    pub(super) fn stream(what: &str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::UnexpectedEof => Self::Truncated { what: what.into() },
            _ if source.raw_os_error().is_some() => Self::io("read", what, source),
            _ => match source.downcast::<Self>() {
                Ok(error) => error,
                Err(source) => Self::Malformed { what: what.into(), reason: source.to_string() },
            },
        }
    }

    pub(super) fn entry(layer: &str, entry: &[u8], reason: impl Into<String>) -> Self {
        // Long hostile names stay out of logs.
        let entry = &entry[..entry.len().min(200)];
        Self::UnsafeEntry {
            layer: layer.into(),
            entry: String::from_utf8_lossy(entry).into_owned(),
            reason: reason.into(),
        }
    }
}

fn did_you_mean(similar: &[String]) -> String {
    if similar.is_empty() { String::new() } else { format!(" (did you mean {}?)", similar.join(" or ")) }
}

fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A few of many ids.
fn shortened(ids: &[String]) -> String {
    const MOST: usize = 3;
    let shown = ids[..ids.len().min(MOST)].join(", ");
    if ids.len() > MOST { format!("{shown}, …") } else { shown }
}

fn would_free(holders: &[Holder]) -> String {
    const MOST: usize = 5;
    if holders.is_empty() {
        return "raise max_disk, or take a smaller image".to_owned();
    }
    let told: Vec<_> = holders[..holders.len().min(MOST)]
        .iter()
        .map(|holder| {
            let sandboxes = counted(holder.sandboxes, "sandbox", "sandboxes");
            format!("{} ({}, {sandboxes})", holder.name, size(holder.disk_bytes))
        })
        .collect();
    format!("end the sandboxes of {}, or raise max_disk", told.join(", "))
}

/// A number of bytes for people.
#[must_use]
pub fn size(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss)] // Shown with one digit.
    let mut amount = bytes as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].into_iter().peekable();
    while let Some(unit) = units.next() {
        if amount < 1024.0 || units.peek().is_none() {
            return if unit == "B" { format!("{bytes} B") } else { format!("{amount:.1} {unit}") };
        }
        amount /= 1024.0;
    }
    String::new()
}
