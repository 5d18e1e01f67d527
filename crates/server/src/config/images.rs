//! `[embedded.images]` and `[embedded.registries]`: where images come from.

use std::collections::BTreeMap;
use std::path::PathBuf;

use osb_protocol::quantity::MemoryBytes;

use super::Secret;
use super::env;
use super::reader::Section;

/// When a registry is asked for an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PullPolicy {
    /// When the image is not stored.
    #[default]
    IfNotPresent,
    /// Each time a sandbox is made of it.
    Always,
    /// Never: only stored images are used.
    Never,
}

/// `[embedded.images]`: where images come from. The order is: a stored image of that name, an alias, a registry.
#[derive(Debug, Clone)]
pub struct ImagesConfig {
    /// `pull_policy`, default `IfNotPresent`: `IfNotPresent`, `Always` (the registry is asked at each create; layers
    /// that are stored are not fetched again) or `Never`.
    pub pull_policy: PullPolicy,
    /// `max_disk`, no default: most disk that stored images may take; unset: all but `embedded.disk_reserve`.
    pub max_disk: Option<MemoryBytes>,
    /// `docker_config`, default `~/.docker/config.json`: Docker's file of registry accounts, used where neither the
    /// request nor `[embedded.registries]` names one. `DOCKER_CONFIG` in the environment names its directory.
    pub docker_config: Option<PathBuf>,
    /// `concurrent_downloads`, default 3: layers fetched from one registry at a time, 1 to 32.
    pub concurrent_downloads: usize,
    /// `default_registry`, default `docker.io`: registry of names that name none.
    pub default_registry: String,
}

/// `[embedded.registries."HOST"]`: how one registry is reached; `HOST` as in image names, with its port.
#[derive(Debug, Clone, Default)]
pub struct RegistryConfig {
    /// `mirrors`, default empty: hosts asked first, in this order.
    pub mirrors: Vec<String>,
    /// `plain_http`, default false: speak HTTP without TLS. Needed for a registry on this machine, too.
    pub plain_http: bool,
    /// `username`, no default: account used when a request brings none.
    pub username: Option<String>,
    /// `password`, no default: its password or token.
    pub password: Option<Secret>,
    /// `password_file`, no default: file that holds the password instead; read at the start.
    pub password_file: Option<PathBuf>,
    /// `ca_file`, no default: PEM file of authorities trusted besides the usual ones.
    pub ca_file: Option<PathBuf>,
}

/// Name of Docker's registry.
const DOCKER_HUB: &str = "docker.io";

impl ImagesConfig {
    pub(super) fn read(mut section: Section<'_, '_>) -> Self {
        let env = section.findings().env();
        let policies = [
            ("IfNotPresent", PullPolicy::IfNotPresent),
            ("Always", PullPolicy::Always),
            ("Never", PullPolicy::Never),
        ];
        let usual = match env.get(env::DOCKER_CONFIG).filter(|directory| !directory.is_empty()) {
            Some(directory) => Some(env.expand(directory)),
            None => env.get(env::HOME).map(|_| env.expand("~/.docker")),
        };
        let this = Self {
            pull_policy: section.word("pull_policy", &policies, PullPolicy::IfNotPresent),
            max_disk: section.parsed("max_disk", str::parse),
            docker_config: section
                .text("docker_config")
                .map(|path| env.expand(&path))
                .or_else(|| usual.map(|directory| directory.join("config.json"))),
            concurrent_downloads: section.int_or("concurrent_downloads", 1..=32, 3),
            default_registry: section
                .parsed("default_registry", host)
                .unwrap_or_else(|| DOCKER_HUB.to_owned()),
        };
        section.end();
        this
    }
}

impl RegistryConfig {
    /// All registries, by host.
    pub(super) fn read_all(embedded: &mut Section<'_, '_>) -> BTreeMap<String, Self> {
        let findings = embedded.findings();
        let mut registries = BTreeMap::new();
        for (name, section) in embedded.named_sections("registries") {
            match host(&name) {
                Ok(host) => {
                    registries.insert(host, Self::read(section));
                }
                Err(expected) => findings.error(format!("embedded.registries.{name}: {expected}")),
            }
        }
        registries
    }

    fn read(mut section: Section<'_, '_>) -> Self {
        let env = section.findings().env();
        let this = Self {
            mirrors: section.list("mirrors").unwrap_or_default(),
            plain_http: section.flag("plain_http", false),
            username: section.text("username"),
            password: section.text("password").map(Secret),
            password_file: section.text("password_file").map(|path| env.expand(&path)),
            ca_file: section.text("ca_file").map(|path| env.expand(&path)),
        };
        if this.password.is_some() && this.password_file.is_some() {
            section.refuse::<()>("password_file", "it excludes password: keep one of the two");
        }
        match (&this.username, this.password.is_some() || this.password_file.is_some()) {
            (Some(_), false) => {
                section.refuse::<()>("username", "a password or a password_file belongs to it");
            }
            (None, true) => {
                section.refuse::<()>("username", "it is required beside a password");
            }
            _ => {}
        }
        section.end();
        this
    }
}

/// A registry as image names spell it.
fn host(text: &str) -> Result<String, &'static str> {
    const WANTED: &str = "a registry is written as in image names: registry.example.com or 127.0.0.1:5000";
    let text = text.trim();
    let allowed = |c: char| c.is_ascii_alphanumeric() || ".-:[]".contains(c);
    if text.is_empty() || !text.chars().all(allowed) {
        return Err(WANTED);
    }
    Ok(if text == "index.docker.io" { DOCKER_HUB.to_owned() } else { text.to_owned() })
}
