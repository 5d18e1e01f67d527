//! What can go wrong with a pull, told for the person who reads it in a log.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::Platform;

/// Why an image could not be pulled. No text holds a secret, whatever a registry answered.
///
/// Cloned for everybody who waited for the same download.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The registry has the image, but not all its parts.
    #[error("{registry} has {reference}, but not its part {digest}{}; push the image again", said(message))]
    BlobMissing {
        /// Image asked for.
        reference: String,
        /// Registry.
        registry: String,
        /// The part.
        digest: String,
        /// The registry's own words.
        message: String,
    },
    /// A credential helper of the Docker configuration failed.
    #[error("credential helper {helper} failed for {registry}: {reason}; run it by hand or log in again")]
    CredentialHelper {
        /// Program.
        helper: String,
        /// Registry it was asked about.
        registry: String,
        /// What happened.
        reason: String,
    },
    /// Authenticated, and still not allowed.
    #[error("{registry} denies access to {repository}{}; use credentials that may pull it", said(message))]
    Denied {
        /// Registry.
        registry: String,
        /// Repository there.
        repository: String,
        /// The registry's own words.
        message: String,
    },
    /// An index that offers nothing.
    #[error("the index of {reference} is empty: it offers no image; push it again")]
    EmptyIndex {
        /// Image asked for.
        reference: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    Disk {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: Arc<io::Error>,
    },
    /// The Docker configuration is not what it should be.
    #[error("{path} cannot be used: {reason}; repair it or log in again")]
    DockerConfig {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A name that no registry would accept.
    #[error("invalid image name {name:?}: {reason}")]
    InvalidReference {
        /// The name as given.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// Settings that cannot work.
    #[error("{setting}: {reason}")]
    InvalidSettings {
        /// The setting.
        setting: String,
        /// What is wrong.
        reason: String,
    },
    /// An answer that breaks the protocol or the format of images.
    #[error("{registry} answered nonsense for {what}: {reason}")]
    Malformed {
        /// Registry.
        registry: String,
        /// Document or layer.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// The index offers nothing that this machine runs.
    #[error("{reference} has no image for {wanted}; it offers {}", offered.join(", "))]
    NoPlatform {
        /// Image asked for.
        reference: String,
        /// Platform asked for.
        wanted: Platform,
        /// Platforms in the index.
        offered: Vec<String>,
    },
    /// Less space than the image needs.
    #[error(
        "no space left in {path}: the download needs {}, and {} may be used; free some there",
        Bytes(*needed),
        Bytes(*available)
    )]
    NoSpace {
        /// Directory of downloads.
        path: PathBuf,
        /// Bytes still to come.
        needed: u64,
        /// Bytes that may be written.
        available: u64,
    },
    /// The registry does not know the image.
    #[error(
        "{reference} was not found on {registry}{}; check name and tag, or log in if it is private",
        said(message)
    )]
    NotFound {
        /// Image asked for.
        reference: String,
        /// Registry.
        registry: String,
        /// The registry's own words.
        message: String,
    },
    /// Something would have travelled without encryption, or speaks no TLS.
    #[error("{registry}: {reason}")]
    PlainHttp {
        /// Registry.
        registry: String,
        /// What, and how to allow it.
        reason: String,
    },
    /// The registry wants fewer requests.
    #[error(
        "{registry} limits the rate of requests{}; try again{}, or log in for a higher limit",
        said(message),
        after(retry_after)
    )]
    RateLimited {
        /// Registry.
        registry: String,
        /// When it may be asked again.
        retry_after: Option<Duration>,
        /// The registry's own words.
        message: String,
    },
    /// The target directory was in use.
    #[error("{path} is not empty; an image is pulled into a new directory")]
    TargetInUse {
        /// The directory.
        path: PathBuf,
    },
    /// No bytes, or hardly any, for too long.
    #[error("{registry} stopped sending {what}: fewer than {least} bytes in {after:?}; try again later")]
    Stalled {
        /// Registry.
        registry: String,
        /// Document or layer.
        what: String,
        /// Bytes expected within that time.
        least: u64,
        /// How long was waited.
        after: Duration,
    },
    /// Larger than allowed or declared.
    #[error("{what} from {registry} has more than {limit} bytes and was refused")]
    TooLarge {
        /// Registry.
        registry: String,
        /// Document or layer.
        what: String,
        /// The bound.
        limit: u64,
    },
    /// A layer ended early, again and again.
    #[error(
        "{what} from {registry} ended after {received} of {expected} bytes; try again, or push the image again"
    )]
    Truncated {
        /// Registry.
        registry: String,
        /// The layer.
        what: String,
        /// Bytes received.
        received: u64,
        /// Bytes declared.
        expected: u64,
    },
    /// Credentials are missing or wrong.
    #[error(
        "{registry} refuses {credentials} for {repository}{}; log in or give other credentials",
        said(message)
    )]
    Unauthorized {
        /// Registry.
        registry: String,
        /// Repository there.
        repository: String,
        /// Where the refused credentials came from.
        credentials: &'static str,
        /// The registry's own words.
        message: String,
    },
    /// The registry cannot be reached or fails.
    #[error("{registry} is not available: {reason}")]
    Unavailable {
        /// Registry.
        registry: String,
        /// Last failure.
        reason: String,
    },
    /// A kind of image or layer that is known and not taken.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// Image or layer.
        what: String,
        /// What to do instead.
        reason: String,
    },
    /// Bytes are not what their digest says.
    #[error(
        "{what} from {registry} has digest {found} instead of {expected}; the registry or something on the way is broken"
    )]
    WrongDigest {
        /// Registry.
        registry: String,
        /// Document or layer.
        what: String,
        /// Digest asked for.
        expected: String,
        /// Digest of the bytes.
        found: String,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}

fn after(retry_after: &Option<Duration>) -> String {
    retry_after.map(|wait| format!(" in {} s", wait.as_secs().max(1))).unwrap_or_default()
}

impl From<osb_protocol::image::InvalidName> for Error {
    fn from(error: osb_protocol::image::InvalidName) -> Self {
        Self::InvalidReference { name: error.name, reason: error.reason }
    }
}

impl Error {
    pub(crate) fn disk(action: &'static str, path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        Self::Disk { action, path: path.as_ref().to_path_buf(), source: Arc::new(source.into()) }
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        // Many wrappers repeat what they wrap.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    text
}

/// The causes of a failed exchange, without the address: its query may carry a signature.
pub(crate) fn causes(error: reqwest::Error) -> String {
    let error = error.without_url();
    std::error::Error::source(&error).map_or_else(|| error.to_string(), chain)
}

/// Text of a peer, made safe to print.
pub(crate) fn printable(text: &str, most: usize) -> String {
    let mut clean: String = text.chars().filter(|c| !c.is_control()).take(most).collect();
    if text.chars().nth(most).is_some() {
        clean.push('…');
    }
    clean
}

/// Bytes in the unit that people read.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[allow(clippy::cast_precision_loss)]
        let value = self.0 as f64;
        for (unit, size) in [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)] {
            if value >= size {
                return write!(f, "{:.1} {unit}", value / size);
            }
        }
        write!(f, "{} B", self.0)
    }
}
