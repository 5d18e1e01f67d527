//! Settings: command line, then environment, then settings file, then the credentials of a local server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use osb_client::{Client, Config, Credentials, Settings};
use serde::Deserialize;

use crate::Globals;
use crate::duration::{Lifetime, parse_lifetime};
use crate::output::{Format, Printer};
use crate::streams::{Streams, color_allowed};

/// `~/.opensandbox/config.toml`. Unknown keys are let pass: other programs share the file.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    connection: Connection,
    output: Output,
    defaults: Defaults,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Connection {
    api_key: Option<String>,
    domain: Option<String>,
    protocol: Option<String>,
    request_timeout: Option<u64>,
    use_server_proxy: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
struct Output {
    color: bool,
}

impl Default for Output {
    fn default() -> Self {
        Self { color: true }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Defaults {
    image: Option<String>,
    timeout: Option<String>,
}

/// What commands work with.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) client: Client,
    /// Image of `sandbox create` when none is named.
    pub(crate) image: Option<String>,
    /// Lifetime of `sandbox create` when none is named.
    pub(crate) lifetime: Option<Lifetime>,
    pub(crate) color_errors: bool,
    color_output: bool,
}

impl Context {
    pub(crate) fn load(
        globals: &Globals,
        var: &impl Fn(&str) -> Option<String>,
        streams: &Streams,
    ) -> anyhow::Result<Self> {
        let file = read_file(globals.config.as_deref(), var)?;
        let flags = Settings {
            domain: globals.domain.clone(),
            protocol: globals.protocol.clone(),
            api_key: globals.api_key.clone(),
            request_timeout: globals.request_timeout.map(Duration::from_secs),
            use_server_proxy: match (globals.use_server_proxy, globals.no_use_server_proxy) {
                (true, _) => Some(true),
                (false, true) => Some(false),
                (false, false) => None,
            },
        };
        let stored = Settings {
            domain: file.connection.domain,
            protocol: file.connection.protocol,
            api_key: file.connection.api_key.filter(|key| !key.is_empty()),
            request_timeout: file.connection.request_timeout.filter(|&s| s > 0).map(Duration::from_secs),
            use_server_proxy: file.connection.use_server_proxy,
        };
        let settings = flags.or(Settings::from_env(var)?).or(stored);
        let client = Client::new(Config::resolve(settings, &Credentials::load(var)?)?)?;
        let lifetime = match file.defaults.timeout {
            Some(text) => Some(
                parse_lifetime(&text)
                    .map_err(|error| anyhow::anyhow!("settings file, defaults.timeout: {error}"))?,
            ),
            None => None,
        };
        let allowed = file.output.color && color_allowed(globals.no_color, var);
        Ok(Self {
            client,
            image: file.defaults.image.filter(|image| !image.is_empty()),
            lifetime,
            color_errors: allowed && streams.stderr_is_terminal,
            color_output: allowed && streams.stdout_is_terminal,
        })
    }

    pub(crate) fn printer(&self, format: Format) -> Printer {
        Printer { format, color: self.color_output }
    }
}

fn read_file(named: Option<&Path>, var: &impl Fn(&str) -> Option<String>) -> anyhow::Result<File> {
    let usual = || {
        var("HOME")
            .filter(|home| !home.is_empty())
            .map(|home| PathBuf::from(home).join(".opensandbox/config.toml"))
    };
    let Some(path) = named.map(Path::to_path_buf).or_else(usual) else {
        return Ok(File::default());
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => match toml::from_str(&text) {
            Ok(file) => Ok(file),
            // The message alone: the full text quotes the line, which may hold the key.
            Err(error) => bail!("{}: {}", path.display(), error.message()),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => Ok(File::default()),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}
