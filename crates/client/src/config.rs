//! Where the server is and how to talk to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::HeaderMap;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::http::is_loopback;

/// Environment variables that are read.
pub mod env {
    /// `host:port` of the server, optionally with `http://` or `https://` in front.
    pub const DOMAIN: &str = "OPEN_SANDBOX_DOMAIN";
    /// The API key.
    pub const API_KEY: &str = "OPEN_SANDBOX_API_KEY";
    /// `http` or `https`.
    pub const PROTOCOL: &str = "OPEN_SANDBOX_PROTOCOL";
    /// Seconds.
    pub const REQUEST_TIMEOUT: &str = "OPEN_SANDBOX_REQUEST_TIMEOUT";
    /// `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`; anything else counts as not set.
    pub const USE_SERVER_PROXY: &str = "OPEN_SANDBOX_USE_SERVER_PROXY";
}

/// Where a server is expected when nothing says otherwise.
pub const DEFAULT_DOMAIN: &str = "localhost:8080";
/// Time for ordinary calls.
pub const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What this client calls itself unless told otherwise.
pub const DEFAULT_USER_AGENT: &str = concat!("OpenSandbox-Rust-SDK/", env!("CARGO_PKG_VERSION"));

/// Scheme of all URLs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Protocol {
    /// Plain HTTP.
    #[default]
    Http,
    /// HTTP over TLS.
    Https,
}

impl Protocol {
    /// As it stands in URLs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

impl std::str::FromStr for Protocol {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "http" => Ok(Self::Http),
            "https" => Ok(Self::Https),
            _ => Err(Error::InvalidArgument(format!("protocol is '{text}'; use http or https"))),
        }
    }
}

/// Settings of a [`crate::Client`].
///
/// ```
/// use std::time::Duration;
///
/// let mut config = opensandbox::Config::new("https://sandboxes.example.org/prefix")?;
/// config.api_key = Some("…".to_owned());
/// config.request_timeout = Duration::from_secs(10);
/// config.use_server_proxy = false;
/// assert_eq!(config.base_url(), "https://sandboxes.example.org/prefix/v1");
/// # Ok::<(), opensandbox::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// `host[:port][/prefix]`, without scheme, without `/v1`.
    pub domain: String,
    /// Scheme.
    pub protocol: Protocol,
    /// API key, when the server wants one.
    pub api_key: Option<String>,
    /// How long an ordinary call may take. Streams and the making of a sandbox have limits of their own.
    pub request_timeout: Duration,
    /// Reach sandboxes through the server instead of at addresses of their own. On by default: it needs one open
    /// port only and works whatever network the sandboxes have.
    pub use_server_proxy: bool,
    /// Sent with every request, to the server and into sandboxes.
    pub headers: HeaderMap,
    /// The value of `User-Agent`.
    pub user_agent: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            domain: DEFAULT_DOMAIN.to_owned(),
            protocol: Protocol::Http,
            api_key: None,
            request_timeout: DEFAULT_REQUEST_TIMEOUT,
            use_server_proxy: true,
            headers: HeaderMap::new(),
            user_agent: DEFAULT_USER_AGENT.to_owned(),
        }
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("domain", &self.domain)
            .field("protocol", &self.protocol)
            .field("api_key", &self.api_key.as_ref().map(|_| "…"))
            .field("request_timeout", &self.request_timeout)
            .field("use_server_proxy", &self.use_server_proxy)
            .finish_non_exhaustive()
    }
}

/// Settings that may or may not be given; one layer of several.
#[derive(Clone, Default)]
pub struct Settings {
    /// See [`Config::domain`]; a scheme in front wins over `protocol`.
    pub domain: Option<String>,
    /// `http` or `https`.
    pub protocol: Option<String>,
    /// See [`Config::api_key`].
    pub api_key: Option<String>,
    /// See [`Config::request_timeout`].
    pub request_timeout: Option<Duration>,
    /// See [`Config::use_server_proxy`].
    pub use_server_proxy: Option<bool>,
}

impl Settings {
    /// What the environment says, read through `var`. Blank values count as not set.
    ///
    /// # Errors
    /// When a value cannot be read.
    pub fn from_env(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let var = |name: &str| var(name).filter(|value| !value.trim().is_empty());
        let request_timeout = match var(env::REQUEST_TIMEOUT) {
            None => None,
            Some(text) => {
                Some(text.trim().parse().ok().filter(|&seconds: &u64| seconds > 0).ok_or_else(|| {
                    Error::InvalidArgument(format!(
                        "{} is '{text}'; it must be a positive number of seconds",
                        env::REQUEST_TIMEOUT
                    ))
                })?)
            }
        };
        Ok(Self {
            domain: var(env::DOMAIN),
            protocol: var(env::PROTOCOL),
            api_key: var(env::API_KEY),
            request_timeout: request_timeout.map(Duration::from_secs),
            use_server_proxy: var(env::USE_SERVER_PROXY).and_then(|text| truth(&text)),
        })
    }

    /// Fills in what is not given here from `lower`.
    #[must_use]
    pub fn or(self, lower: Self) -> Self {
        Self {
            domain: self.domain.or(lower.domain),
            protocol: self.protocol.or(lower.protocol),
            api_key: self.api_key.or(lower.api_key),
            request_timeout: self.request_timeout.or(lower.request_timeout),
            use_server_proxy: self.use_server_proxy.or(lower.use_server_proxy),
        }
    }
}

fn truth(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

impl Config {
    /// Settings for the server at `domain` (`host:port`, with or without scheme).
    ///
    /// # Errors
    /// When `domain` is no address.
    pub fn new(domain: &str) -> Result<Self> {
        Self::resolve(
            Settings { domain: Some(domain.to_owned()), ..Settings::default() },
            &Credentials::default(),
        )
    }

    /// What the environment says, then the credentials that a local server left for this user, then defaults.
    ///
    /// # Errors
    /// When a value or the credentials file cannot be read.
    pub fn from_env() -> Result<Self> {
        let var = |name: &str| std::env::var(name).ok();
        Self::resolve(Settings::from_env(var)?, &Credentials::load(var)?)
    }

    /// Completes `settings` with credentials and defaults.
    ///
    /// The stored key is used for the server it belongs to and no other.
    ///
    /// # Errors
    /// When a setting cannot be right.
    pub fn resolve(settings: Settings, credentials: &Credentials) -> Result<Self> {
        let given = settings.domain.or_else(|| credentials.domain.clone());
        let (scheme, domain) = split_domain(given.as_deref().unwrap_or(DEFAULT_DOMAIN))?;
        let protocol = match (scheme, settings.protocol) {
            (Some(scheme), _) => scheme,
            (None, Some(protocol)) => protocol.parse()?,
            (None, None) => Protocol::Http,
        };
        let stored_domain = credentials.domain.as_deref().unwrap_or(DEFAULT_DOMAIN);
        let stored_key = match split_domain(stored_domain) {
            Ok((_, stored)) if same_server(&stored, &domain) => credentials.api_key.clone(),
            _ => None,
        };
        Ok(Self {
            domain,
            protocol,
            api_key: settings.api_key.or(stored_key),
            request_timeout: settings.request_timeout.unwrap_or(DEFAULT_REQUEST_TIMEOUT),
            use_server_proxy: settings.use_server_proxy.unwrap_or(true),
            ..Self::default()
        })
    }

    /// Base of the lifecycle API, ending in `/v1`.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("{}://{}/v1", self.protocol.as_str(), self.domain)
    }
}

fn split_domain(text: &str) -> Result<(Option<Protocol>, String)> {
    let text = text.trim();
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (Some(scheme.parse()?), rest),
        None => (None, text),
    };
    let rest = rest.trim_end_matches('/');
    let rest = rest.strip_suffix("/v1").unwrap_or(rest).trim_end_matches('/');
    let url = url::Url::parse(&format!("http://{rest}"));
    let plain = url.is_ok_and(|url| {
        url.has_host() && url.username().is_empty() && url.query().is_none() && url.fragment().is_none()
    });
    if !plain {
        return Err(Error::InvalidArgument(format!(
            "server address '{text}' is not right; use host:port such as {DEFAULT_DOMAIN}"
        )));
    }
    Ok((scheme, rest.to_owned()))
}

fn same_server(a: &str, b: &str) -> bool {
    let port = |domain: &str| {
        url::Url::parse(&format!("http://{domain}")).ok().and_then(|url| url.port_or_known_default())
    };
    let host = |domain: &str| domain.split('/').next().unwrap_or_default().to_ascii_lowercase();
    let (host_a, host_b) = (host(a), host(b));
    port(a) == port(b) && (host_a == host_b || (is_loopback(&host_a) && is_loopback(&host_b)))
}

/// What a local server writes for its user: address and key.
#[derive(Clone, Default, Deserialize)]
pub struct Credentials {
    /// The key.
    #[serde(default)]
    pub api_key: Option<String>,
    /// The address it is for; absent means [`DEFAULT_DOMAIN`].
    #[serde(default)]
    pub domain: Option<String>,
}

impl Credentials {
    /// Reads the first of [`credentials_files`] that exists; none is no error.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn load(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        for path in credentials_files(var) {
            if let Some(found) = Self::read(&path)? {
                return Ok(found);
            }
        }
        Ok(Self::default())
    }

    fn read(path: &Path) -> Result<Option<Self>> {
        match std::fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).map(Some).map_err(|error| {
                // The message alone: the parser's full text quotes the line, which may hold the key.
                Error::InvalidArgument(format!("{}: {}", path.display(), error.message()))
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { path: path.display().to_string(), source }),
        }
    }
}

/// Where credentials are looked for: below `XDG_CONFIG_HOME`, then below `~/.config`, where servers write.
pub fn credentials_files(var: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let xdg = var("XDG_CONFIG_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let home = var("HOME").filter(|dir| !dir.is_empty()).map(|dir| Path::new(&dir).join(".config"));
    let mut files: Vec<PathBuf> =
        xdg.into_iter().chain(home).map(|dir| dir.join("opensandbox/credentials.toml")).collect();
    files.dedup();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials(domain: Option<&str>) -> Credentials {
        Credentials { api_key: Some("stored".to_owned()), domain: domain.map(str::to_owned) }
    }

    fn at(domain: &str) -> Settings {
        Settings { domain: Some(domain.to_owned()), ..Settings::default() }
    }

    #[test]
    fn addresses_are_cleaned() {
        for (given, base) in [
            ("localhost:8080", "http://localhost:8080/v1"),
            ("http://h:1/", "http://h:1/v1"),
            ("https://h/v1/", "https://h/v1"),
            ("h/prefix/v1", "http://h/prefix/v1"),
            (" [::1]:8080 ", "http://[::1]:8080/v1"),
        ] {
            assert_eq!(Config::new(given).unwrap().base_url(), base, "{given}");
        }
        for bad in ["", "ftp://h", "http://", "h:port", "user@h", "h?x", "h#x", "a b"] {
            assert!(Config::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn explicit_wins_over_environment_over_file() {
        let env = |name: &str| match name {
            env::DOMAIN => Some("env:1".to_owned()),
            env::API_KEY => Some("env-key".to_owned()),
            env::PROTOCOL => Some("HTTPS".to_owned()),
            env::REQUEST_TIMEOUT => Some("5".to_owned()),
            env::USE_SERVER_PROXY => Some("off".to_owned()),
            _ => None,
        };
        let environment = Settings::from_env(env).unwrap();
        let config = Config::resolve(at("flag:2").or(environment), &credentials(Some("file:3"))).unwrap();
        assert_eq!(
            config,
            Config {
                domain: "flag:2".to_owned(),
                protocol: Protocol::Https,
                api_key: Some("env-key".to_owned()),
                request_timeout: Duration::from_secs(5),
                use_server_proxy: false,
                ..Config::default()
            }
        );
        let blank = Settings::from_env(|_| Some(" ".to_owned()));
        let config = Config::resolve(blank.unwrap(), &credentials(Some("file:3"))).unwrap();
        assert_eq!((config.domain.as_str(), config.api_key.as_deref()), ("file:3", Some("stored")));
        assert!(Settings::from_env(|name| (name == env::REQUEST_TIMEOUT).then(|| "0".to_owned())).is_err());
    }

    #[test]
    fn a_stored_key_goes_to_its_own_server_only() {
        let key = |settings, stored| Config::resolve(settings, &credentials(stored)).unwrap().api_key;
        assert!(key(Settings::default(), None).is_some());
        assert!(key(at("127.0.0.1:8080"), Some("localhost:8080")).is_some());
        assert!(key(at("localhost:8080"), None).is_some());
        assert!(key(at("localhost:9090"), None).is_none());
        assert!(key(at("example.org:8080"), Some("localhost:8080")).is_none());
    }

    #[test]
    fn credentials_files_are_read_and_never_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".config/opensandbox/credentials.toml");
        let var = |name: &str| (name == "HOME").then(|| dir.path().to_str().unwrap().to_owned());
        assert!(Credentials::load(var).unwrap().api_key.is_none());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "api_key = \"k\"\ndomain = \"h:1\"\nother = 1\n").unwrap();
        let found = Credentials::load(var).unwrap();
        assert_eq!((found.api_key.as_deref(), found.domain.as_deref()), (Some("k"), Some("h:1")));
        std::fs::write(&path, "api_key = \"secret\n").unwrap();
        let error = Credentials::load(var).err().unwrap().to_string();
        assert!(error.contains("credentials.toml") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn the_key_is_not_in_debug_output() {
        let config = Config { api_key: Some("secret".to_owned()), ..Config::default() };
        assert!(!format!("{config:?}").contains("secret"));
    }
}
