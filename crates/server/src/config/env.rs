//! Environment variables of the server. Besides the ones named here, every scalar key of `[server]`, `[log]`,
//! `[runtime]`, `[store]`, `[execd]` and `[embedded]` has one: `OPENSANDBOX_<SECTION>_<KEY>`. A variable wins over
//! the file.

use std::collections::BTreeMap;

/// Configuration file.
pub const CONFIG_PATH: &str = "SANDBOX_CONFIG_PATH";
/// The server's key. Wins over the file even when it is empty, which switches authentication off.
pub const API_KEY: &str = "OPENSANDBOX_SERVER_API_KEY";
/// Exactly `YES`: start without a key.
pub const INSECURE: &str = "OPENSANDBOX_INSECURE_SERVER";
/// Keys of signed routes; replaces the block of the file.
pub const SECURE_ACCESS_KEYS: &str = "OPENSANDBOX_SECURE_ACCESS_KEYS";
/// Active key of signed routes; goes with [`SECURE_ACCESS_KEYS`].
pub const SECURE_ACCESS_ACTIVE_KEY: &str = "OPENSANDBOX_SECURE_ACCESS_ACTIVE_KEY";
/// Directory of Docker's client configuration.
pub const DOCKER_CONFIG: &str = "DOCKER_CONFIG";
/// Base of every `~`.
pub const HOME: &str = "HOME";
/// Set by sudo: the user behind it.
pub const SUDO_UID: &str = "SUDO_UID";
/// Set by sudo: that user's group.
pub const SUDO_GID: &str = "SUDO_GID";

/// The environment as a value, so that tests bring their own.
#[derive(Debug, Clone, Default)]
pub struct Env(BTreeMap<String, String>);

impl Env {
    /// The process's. Variables that are not UTF-8 are left out.
    #[must_use]
    pub fn of_process() -> Self {
        Self(
            std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                .collect(),
        )
    }

    /// The value of a variable, the empty one included.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// `path` with a leading `~` replaced by [`HOME`].
    #[must_use]
    pub fn expand(&self, path: &str) -> std::path::PathBuf {
        match (path.strip_prefix('~'), self.get(HOME)) {
            (Some(""), Some(home)) => home.into(),
            (Some(rest), Some(home)) if rest.starts_with('/') => {
                std::path::Path::new(home).join(rest.trim_start_matches('/'))
            }
            _ => path.into(),
        }
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Env {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(pairs: T) -> Self {
        Self(pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect())
    }
}
