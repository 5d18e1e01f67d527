//! Settings: one TOML file, overlaid by environment variables, resolved into proven types.

mod embedded;
pub mod env;
mod images;
mod peers;
mod reader;
mod server;
mod source;

use std::path::{Path, PathBuf};

use toml::de::DeTable;

pub use embedded::{DefaultLimits, EmbeddedConfig, NetworkMode, Range4, UserNamespaceMode};
pub use env::Env;
pub use images::{ImagesConfig, PullPolicy, RegistryConfig};
pub use server::{ExecdConfig, LogConfig, LogLevel, RenewIntentConfig, Secret, ServerConfig, StoreConfig};
pub use source::{Credentials, Loaded, Source, load};

use reader::{Findings, Section};

/// All settings, resolved.
#[derive(Debug, Clone)]
pub struct Config {
    /// `[server]`.
    pub server: ServerConfig,
    /// `[log]`.
    pub log: LogConfig,
    /// `[store]`.
    pub store: StoreConfig,
    /// `[renew_intent]`.
    pub renew_intent: RenewIntentConfig,
    /// `[execd]`.
    pub execd: ExecdConfig,
    /// `[embedded]`.
    pub embedded: EmbeddedConfig,
    /// `[storage] allowed_host_paths`: host directories that volumes may name. Empty: none.
    pub allowed_host_paths: Vec<String>,
}

/// Why a configuration is refused. No value of the file is ever part of the text.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file named on purpose is not there, or cannot be read.
    #[error("configuration file {path} cannot be read: {reason}")]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: std::io::ErrorKind,
    },
    /// The file is no TOML.
    #[error("line {line} is not valid TOML: {reason}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
    /// Values that cannot be taken.
    #[error("{}", .0.join("; "))]
    Invalid(Vec<String>),
    /// No key and no leave to go without.
    #[error(
        "no API key is configured: set server.api_key or OPENSANDBOX_SERVER_API_KEY, or OPENSANDBOX_INSECURE_SERVER=YES to serve everybody who reaches the port"
    )]
    NoKey,
    /// The generated key could not be stored.
    #[error("the generated API key cannot be stored in {path}: {reason}")]
    KeyFile {
        /// Where.
        path: PathBuf,
        /// Why.
        reason: std::io::Error,
    },
}

impl Config {
    /// Reads the text of a configuration file. The second member are warnings for the log.
    ///
    /// # Errors
    /// Names every key that cannot be taken, never its value.
    pub fn parse(text: &str, env: &Env) -> Result<(Self, Vec<String>), ConfigError> {
        let findings = Findings::new(text, env);
        let table = DeTable::parse(text).map_err(|error| ConfigError::Syntax {
            line: error.span().map_or(1, |span| findings.line(span.start)),
            // The parser's own words; the line it would show is left out.
            reason: error.message().to_owned(),
        })?;
        let config = Self::read(Section::root(&findings, table.into_inner()));
        let (errors, warnings) = findings.finish();
        if errors.is_empty() { Ok((config, warnings)) } else { Err(ConfigError::Invalid(errors)) }
    }

    fn read(mut root: Section<'_, '_>) -> Self {
        let findings = root.findings();
        read_runtime(root.section("runtime").with_env());
        let this = Self {
            server: ServerConfig::read(root.section("server").with_env()),
            log: LogConfig::read(root.section("log").with_env()),
            store: StoreConfig::read(root.section("store").with_env()),
            renew_intent: RenewIntentConfig::read(root.section("renew_intent")),
            execd: ExecdConfig::read(root.section("execd").with_env()),
            embedded: EmbeddedConfig::read(root.section("embedded").with_env()),
            allowed_host_paths: peers::storage(root.section("storage")),
        };
        server::read_without_effect(&mut root);
        peers::docker(root.section("docker"));
        peers::egress(root.section("egress"));
        if peers::ingress(root.section("ingress")) {
            findings.error("ingress.mode: a gateway needs the kubernetes runtime");
        }
        if peers::secure_runtime(root.section("secure_runtime")) {
            findings.error("secure_runtime.type: stronger runtimes are not in this build yet");
        }
        peers::kubernetes(&mut root);
        let tenants = root.section("tenants");
        if tenants.present() {
            findings.error("tenants: several tenants are not in this build yet");
        }
        let variables =
            [env::SECURE_ACCESS_KEYS, env::SECURE_ACCESS_ACTIVE_KEY].map(|name| findings.env().get(name));
        if variables.iter().any(Option::is_some) {
            findings.error("OPENSANDBOX_SECURE_ACCESS_KEYS: signed routes need ingress.mode = \"gateway\"");
        }
        root.end();
        this
    }

    /// The file of the store.
    #[must_use]
    pub fn store_path(&self) -> PathBuf {
        self.store.path.clone().unwrap_or_else(|| self.embedded.data_dir.join("opensandbox.db"))
    }

    /// Whether only this machine can reach the listener.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        let host = self.server.host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

/// `[runtime]`.
fn read_runtime(mut section: Section<'_, '_>) {
    match section.text("type").as_deref().map(str::trim) {
        None if section.present() => {
            section.refuse::<()>("type", "it is required: embedded, docker or kubernetes");
        }
        None | Some("embedded") => {}
        Some("docker" | "kubernetes") => {
            section.refuse::<()>(
                "type",
                "the docker and kubernetes runtimes are not in this build yet: use type = \"embedded\"",
            );
        }
        Some(_) => {
            section.refuse::<()>("type", "embedded, docker or kubernetes is expected");
        }
    }
    // The embedded runtime carries its daemon, which is always PID 1.
    section.text("execd_image");
    section.flag("execd_run_as_init", false);
    section.end();
}

/// Whether `path` equals one of `allowed` or lies below it, component by component.
#[must_use]
pub fn is_below(path: &Path, allowed: &[String]) -> bool {
    allowed.iter().any(|root| path.starts_with(root.trim_end_matches('/')))
}
