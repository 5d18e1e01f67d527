//! What a puller is told once.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Everything that a [`Puller`](crate::Puller) needs to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// By host and port, as they stand in image names: `registry.example.com:5000`, `docker.io`.
    pub registries: BTreeMap<String, RegistrySettings>,
    /// Docker's client configuration, for credentials. A file that does not exist is no error.
    pub docker_config: Option<PathBuf>,
    /// Downloads from one registry at the same time.
    pub concurrent_downloads: usize,
    /// Where layers lie while they are fetched. What a broken pull leaves there is taken up by the next one.
    pub downloads_dir: PathBuf,
    /// Age at which leftovers in it are removed.
    pub keep_downloads: Duration,
    /// Compressed size over all layers that is still accepted.
    pub max_image_bytes: u64,
    /// Space that downloads leave free on their file system.
    pub reserve_bytes: u64,
    /// When to give up and when to try again.
    pub patience: Patience,
}

/// How one registry is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistrySettings {
    /// Asked in this order, and the registry itself last: `host[:port][/prefix]`, optionally with `https://` or
    /// `http://` before it. What follows the host is put before the repository's name.
    pub mirrors: Vec<String>,
    /// Speak HTTP without TLS.
    pub plain_http: bool,
    /// Used where a pull brings none.
    pub credentials: Option<Credentials>,
    /// PEM file of authorities to trust besides the usual ones.
    pub ca_file: Option<PathBuf>,
}

/// User and password.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Credentials {
    /// User.
    pub username: String,
    /// Password or access token.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Time limits and repetition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Longest wait for an answer to begin, and for the next bytes of it.
    pub stall: Duration,
    /// Bytes that must arrive in each such period: a trickle counts as a stall.
    pub least_bytes: u64,
    /// Attempts in a row without progress, the first included.
    pub attempts: u32,
    /// Wait before the second attempt; doubled each time.
    pub first_wait: Duration,
    /// Longest wait between two attempts. A registry that asks for more gets its answer as an error.
    pub longest_wait: Duration,
    /// Longest run of a credential helper.
    pub credential_helper: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            stall: Duration::from_secs(30),
            least_bytes: 16 << 10,
            attempts: 5,
            first_wait: Duration::from_millis(500),
            longest_wait: Duration::from_secs(30),
            credential_helper: Duration::from_secs(15),
        }
    }
}

impl Settings {
    /// The usual settings, with Docker's configuration from its usual place.
    #[must_use]
    pub fn new(downloads_dir: impl Into<PathBuf>) -> Self {
        Self {
            registries: BTreeMap::new(),
            docker_config: docker_config(),
            concurrent_downloads: 3,
            downloads_dir: downloads_dir.into(),
            keep_downloads: Duration::from_secs(24 * 3600),
            max_image_bytes: 128 << 30,
            reserve_bytes: 256 << 20,
            patience: Patience::default(),
        }
    }
}

/// `$DOCKER_CONFIG/config.json`, else `~/.docker/config.json`.
#[must_use]
pub fn docker_config() -> Option<PathBuf> {
    let directory = std::env::var_os("DOCKER_CONFIG").filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".docker"));
    directory.or_else(home).map(|directory| directory.join("config.json"))
}
