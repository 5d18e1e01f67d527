//! Settings: command line, then environment, then settings file, then the credentials of a local server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use osb_client::{Client, Config, Credentials, RetryPolicy, Sandbox, Settings};
use serde::Deserialize;

use crate::Globals;
use crate::config::KEYS;
use crate::duration::{Lifetime, parse_lifetime};
use crate::output::{Format, Printer, printable};
use crate::streams::{Streams, color_allowed};
use crate::suggest::nearest;

/// Variable that names the profile.
pub(crate) const PROFILE: &str = "OPEN_SANDBOX_PROFILE";

/// `~/.opensandbox/config.toml`. Unknown keys are let pass with a remark: other programs share the file.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    profile: Option<String>,
    connection: Connection,
    output: Output,
    defaults: Defaults,
    profiles: BTreeMap<String, Profile>,
}

/// Settings that replace those of the file's other sections.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Profile {
    connection: Connection,
    output: Output,
    defaults: Defaults,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Connection {
    api_key: Option<String>,
    domain: Option<String>,
    protocol: Option<String>,
    request_timeout: Option<u64>,
    use_server_proxy: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Output {
    color: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Defaults {
    image: Option<String>,
    timeout: Option<String>,
}

impl Connection {
    fn settings(self) -> Settings {
        Settings {
            domain: self.domain,
            protocol: self.protocol,
            api_key: self.api_key.filter(|key| !key.is_empty()),
            request_timeout: self.request_timeout.filter(|&s| s > 0).map(Duration::from_secs),
            use_server_proxy: self.use_server_proxy,
        }
    }
}

/// All settings, resolved; nothing has been connected to.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) config: Config,
    pub(crate) color: bool,
    pub(crate) image: Option<String>,
    pub(crate) timeout: Option<String>,
    pub(crate) profile: Option<String>,
    /// Where the settings file is, or would be.
    pub(crate) path: Option<PathBuf>,
    pub(crate) file_exists: bool,
    /// Sections and keys of the file that are none of this program's.
    unknown: Vec<String>,
}

impl Resolved {
    pub(crate) fn load(globals: &Globals, var: &impl Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let path = file_path(globals, var);
        let found = read_file(path.as_deref(), globals.config.is_some())?;
        let file_exists = found.is_some();
        let (file, unknown) = found.unwrap_or_default();
        let var_profile = var(PROFILE).filter(|name| !name.trim().is_empty());
        let name = globals.profile.clone().or(var_profile).or(file.profile);
        let profile = match &name {
            Some(name) => match file.profiles.get(name) {
                Some(profile) => profile.clone(),
                None => bail!("{}", no_profile(name, file.profiles.keys(), path.as_deref())),
            },
            None => Profile::default(),
        };
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
        // A profile that was asked for on the command line is meant more than what the environment always says.
        let (profile_settings, environment) = (profile.connection.settings(), Settings::from_env(var)?);
        let settings = match globals.profile {
            Some(_) => flags.or(profile_settings).or(environment),
            None => flags.or(environment).or(profile_settings),
        };
        let settings = settings.or(file.connection.settings());
        let text = |own: Option<String>, shared: Option<String>| {
            own.filter(|text| !text.is_empty()).or(shared).filter(|text| !text.is_empty())
        };
        Ok(Self {
            config: Config::resolve(settings, &Credentials::load(var)?)?,
            color: profile.output.color.or(file.output.color).unwrap_or(true),
            image: text(profile.defaults.image, file.defaults.image),
            timeout: text(profile.defaults.timeout, file.defaults.timeout),
            profile: name,
            path,
            file_exists,
            unknown,
        })
    }

    /// What is to be said of the file, in one line: a misspelt key would be without effect and without a word.
    pub(crate) fn remark(&self) -> Option<String> {
        let file = self.path.as_ref().map(|path| path.display().to_string())?;
        let told: Vec<String> = self.unknown.iter().map(|key| unknown_key(key)).collect();
        (!told.is_empty()).then(|| format!("{file}: not known and without effect: {}", told.join(", ")))
    }
}

/// A key that is not known, with the one that may be meant.
fn unknown_key(key: &str) -> String {
    let known: Vec<String> = KEYS.iter().map(|(key, _)| (*key).to_owned()).collect();
    let sections = known.iter().filter_map(|key| Some(key.split_once('.')?.0.to_owned()));
    let parts: Vec<&str> = key.split('.').collect();
    let (before, own) = match &parts[..] {
        ["profiles", name, rest @ ..] => (format!("profiles.{name}."), rest.join(".")),
        _ => (String::new(), key.to_owned()),
    };
    // A key at a place where sections stand may have lost its own.
    let homeless = known.iter().find(|known| known.rsplit('.').next() == Some(&own)).cloned();
    let tops = ["profile", "profiles"].into_iter().filter(|_| before.is_empty()).map(str::to_owned);
    let all: Vec<String> = known.iter().cloned().chain(sections).chain(tops).collect();
    match homeless.or_else(|| nearest(&own, &all)) {
        Some(meant) => format!("{key} (did you mean {before}{meant}?)"),
        None => key.to_owned(),
    }
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
    /// The sandbox a command was asked to work on, for a hint when there is none of that id.
    asked: Mutex<Option<String>>,
}

impl Context {
    pub(crate) async fn load(
        globals: &Globals,
        var: &impl Fn(&str) -> Option<String>,
        streams: &mut Streams,
    ) -> anyhow::Result<Self> {
        let resolved = Resolved::load(globals, var)?;
        if let Some(remark) = resolved.remark() {
            streams.note(&printable(&remark)).await;
        }
        if globals.verbose {
            streams.note(&summary(&resolved)).await;
        }
        let lifetime = match &resolved.timeout {
            Some(text) => Some(
                parse_lifetime(text)
                    .map_err(|error| anyhow::anyhow!("settings file, defaults.timeout: {error}"))?,
            ),
            None => None,
        };
        let allowed = resolved.color && color_allowed(globals.no_color, var);
        Ok(Self {
            client: Client::with_retry(resolved.config, retries())?,
            image: resolved.image,
            lifetime,
            color_errors: allowed && streams.stderr_is_terminal,
            color_output: allowed && streams.stdout_is_terminal,
            asked: Mutex::default(),
        })
    }

    /// The sandbox of this id.
    pub(crate) fn sandbox(&self, id: &str) -> Sandbox {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(id.to_owned());
        self.client.sandbox(id)
    }

    /// The sandbox that was last asked for.
    pub(crate) fn asked(&self) -> Option<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn printer(&self, format: Format) -> Printer {
        Printer { format, color: self.color_output }
    }
}

/// As often as the SDKs, but sooner, and not behind an address that stays silent: somebody waits.
fn retries() -> RetryPolicy {
    RetryPolicy {
        deadline: Some(Duration::from_secs(10)),
        initial_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_millis(500),
        ..RetryPolicy::default()
    }
}

fn summary(resolved: &Resolved) -> String {
    let config = &resolved.config;
    let key = if config.api_key.is_some() { "with" } else { "without" };
    let file = match &resolved.path {
        Some(path) if resolved.file_exists => format!("settings of {}", path.display()),
        Some(path) => format!("no settings at {}", path.display()),
        None => "no settings file".to_owned(),
    };
    let profile = resolved.profile.as_ref().map(|name| format!(", profile {name}")).unwrap_or_default();
    let way = if config.use_server_proxy { "through the server" } else { "at addresses of their own" };
    format!("{} {key} a key; sandboxes {way}; {file}{profile}", config.base_url())
}

fn no_profile<'a>(
    name: &str,
    known: impl Iterator<Item = &'a String>,
    path: Option<&std::path::Path>,
) -> String {
    let known: Vec<&str> = known.map(String::as_str).collect();
    let file = path.map_or_else(|| "the settings file".to_owned(), |path| path.display().to_string());
    match known.is_empty() {
        true => format!("there is no profile '{name}': {file} has no [profiles.{name}.connection]"),
        false => format!("there is no profile '{name}' in {file}; it has: {}", known.join(", ")),
    }
}

/// The settings file: the one named, else the usual one.
pub(crate) fn file_path(globals: &Globals, var: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let usual = || {
        var("HOME")
            .filter(|home| !home.is_empty())
            .map(|home| PathBuf::from(home).join(".opensandbox/config.toml"))
    };
    globals.config.clone().or_else(usual)
}

/// What is wrong in a TOML file, and where, without what stands there: that may be the key.
pub(crate) fn fault(text: &str, message: &str, span: Option<std::ops::Range<usize>>) -> String {
    let message = match message.rsplit_once(", expected ") {
        Some((found, expected)) if found.starts_with("invalid ") => format!("expected {expected}"),
        _ => message.to_owned(),
    };
    match span {
        Some(span) => {
            let line = 1 + text.bytes().take(span.start).filter(|byte| *byte == b'\n').count();
            format!("line {line}: {message}")
        }
        None => message,
    }
}

/// The file and its unknown keys; `None` when there is none and none was asked for.
fn read_file(path: Option<&std::path::Path>, named: bool) -> anyhow::Result<Option<(File, Vec<String>)>> {
    let Some(path) = path else { return Ok(None) };
    match std::fs::read_to_string(path) {
        Ok(text) => match parse_file(&text) {
            Ok(found) => Ok(Some(found)),
            Err(error) => bail!("{}: {}", path.display(), fault(&text, error.message(), error.span())),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !named => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn parse_file(text: &str) -> Result<(File, Vec<String>), toml::de::Error> {
    let mut unknown = Vec::new();
    let file = serde_ignored::deserialize(toml::Deserializer::parse(text)?, |path| {
        unknown.push(path.to_string());
    })?;
    Ok((file, unknown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_the_file_tell_where_and_not_what() {
        for (text, said) in [
            ("\n[connection]\napi_key = 12345\n", "line 3: expected a string"),
            ("connection = \"s3cret, expected\"", "line 1: expected struct Connection"),
            ("[connection]\napi_key = s3cret\n", "line 2: "),
        ] {
            let error = toml::from_str::<File>(text).unwrap_err();
            let fault = fault(text, error.message(), error.span());
            assert!(fault.starts_with(said), "{fault}");
            assert!(!fault.contains("12345") && !fault.contains("s3cret"), "{fault}");
        }
    }

    #[test]
    fn unknown_keys_are_told_with_the_ones_that_may_be_meant() {
        let text = "profil = 'x'\ndomain = 'h'\n[conection]\napi_key = 'k'\n[connection]\ndomian = 'h'\n\
            request_timeout = 3\n[output]\nfont = 1\n[profiles.work.connection]\napi-key = 'k'\n\
            [profiles.work.colour]\na = 1\n[zzz]\na = 1\n";
        let (file, unknown) = parse_file(text).unwrap();
        assert_eq!(file.connection.request_timeout, Some(3));
        let mut told: Vec<String> = unknown.iter().map(|key| unknown_key(key)).collect();
        told.sort();
        assert_eq!(
            told,
            [
                "conection (did you mean connection?)",
                "connection.domian (did you mean connection.domain?)",
                "domain (did you mean connection.domain?)",
                "output.font",
                "profil (did you mean profile?)",
                "profiles.work.colour",
                "profiles.work.connection.api-key (did you mean profiles.work.connection.api_key?)",
                "zzz",
            ]
        );
    }
}
