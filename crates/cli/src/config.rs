//! `osb config`: the settings file.

use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Subcommand;
use serde_json::{Value, json};
use toml_edit::{DocumentMut, Item, Table};

use crate::Globals;
use crate::args::OutputArg;
use crate::duration::parse_lifetime;
use crate::exit;
use crate::output::{Cell, Format, Printer, printable};
use crate::settings::{Resolved, file_path};
use crate::streams::{Streams, color_allowed};
use crate::suggest::nearest;

/// What to do with settings.
#[derive(Debug, Clone, Subcommand)]
pub enum ConfigAction {
    /// Write a settings file in which everything is explained and nothing is set
    Init {
        /// Replace an existing file
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show the settings in use, wherever they come from
    Show {
        #[command(flatten)]
        output: OutputArg,
    },
    /// Change one setting in the file; comments stay
    Set {
        /// Such as connection.domain, or profiles.NAME.connection.domain
        key: String,
        /// New value
        #[arg(allow_hyphen_values = true)]
        value: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

const TEMPLATE: &str = r#"# Settings of osb. Options on the command line come first, then the environment, then this file.

[connection]
# api_key = "secret"
# domain = "localhost:8080"
# protocol = "http"            # or "https"
# request_timeout = 30         # seconds
# use_server_proxy = true      # false: reach sandboxes at addresses of their own

[output]
# color = true

[defaults]
# image = "host"
# timeout = "10m"              # or "none": sandboxes live until they are deleted

# Further servers, chosen by --profile NAME, OPEN_SANDBOX_PROFILE, or `profile = "NAME"` on top of this file.
# [profiles.work.connection]
# domain = "sandboxes.example.org"
# protocol = "https"
"#;

/// Kinds of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Protocol,
    Seconds,
    Flag,
    Lifetime,
}

/// Every key that can be set, behind its section.
pub(crate) const KEYS: [(&str, Kind); 8] = [
    ("connection.api_key", Kind::Text),
    ("connection.domain", Kind::Text),
    ("connection.protocol", Kind::Protocol),
    ("connection.request_timeout", Kind::Seconds),
    ("connection.use_server_proxy", Kind::Flag),
    ("output.color", Kind::Flag),
    ("defaults.image", Kind::Text),
    ("defaults.timeout", Kind::Lifetime),
];

pub(crate) async fn run(
    globals: &Globals,
    action: ConfigAction,
    var: &impl Fn(&str) -> Option<String>,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let color = streams.stdout_is_terminal && color_allowed(globals.no_color, var);
    let printer = |format| Printer { format, color };
    match action {
        ConfigAction::Init { force, output: OutputArg { output } } => {
            let path = needed_path(globals, var)?;
            if path.exists() && !force {
                let message = format!("{} exists; --force replaces it", path.display());
                match output {
                    Format::Table => streams.note(&message).await,
                    Format::Json | Format::Yaml => {
                        let answer = json!({"status": "warning", "message": message});
                        printer(output).data(streams, &answer).await?;
                    }
                }
                return Ok(exit::SUCCESS);
            }
            write(&path, TEMPLATE)?;
            printer(output).done(streams, &format!("settings file written: {}", path.display())).await?;
        }
        ConfigAction::Show { output: OutputArg { output } } => {
            let resolved = Resolved::load(globals, var)?;
            if let Some(remark) = resolved.remark() {
                streams.note(&printable(&remark)).await;
            }
            let shown = shown(&resolved);
            let properties = shown.iter().map(|(name, value)| (*name, Cell::of_json(value))).collect();
            let json: serde_json::Map<String, Value> =
                shown.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            printer(output).object(streams, properties, &json).await?;
        }
        ConfigAction::Set { key, value, output: OutputArg { output } } => {
            let path = needed_path(globals, var)?;
            let text = match std::fs::read_to_string(&path) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => TEMPLATE.to_owned(),
                Err(error) => return Err(error).with_context(|| path.display().to_string()),
            };
            let text = set(&text, &key, &value).with_context(|| path.display().to_string())?;
            write(&path, &text)?;
            printer(output).done(streams, &format!("set: {key}")).await?;
        }
    }
    Ok(exit::SUCCESS)
}

fn needed_path(globals: &Globals, var: &impl Fn(&str) -> Option<String>) -> anyhow::Result<PathBuf> {
    file_path(globals, var).context("HOME is not set: name the settings file with --config")
}

fn shown(resolved: &Resolved) -> Vec<(&'static str, Value)> {
    let config = &resolved.config;
    let path = resolved.path.as_ref().map(|path| path.display().to_string());
    vec![
        ("api_key", json!(config.api_key.as_deref().map(masked))),
        ("domain", json!(config.domain)),
        ("protocol", json!(config.protocol.as_str())),
        ("request_timeout", json!(config.request_timeout.as_secs())),
        ("use_server_proxy", json!(config.use_server_proxy)),
        ("color", json!(resolved.color)),
        ("default_image", json!(resolved.image)),
        ("default_timeout", json!(resolved.timeout)),
        ("profile", json!(resolved.profile)),
        ("config_path", json!(path)),
        ("config_file_exists", json!(resolved.file_exists)),
    ]
}

/// A secret by which its owner knows it and nobody else can use it.
fn masked(secret: &str) -> String {
    let letters: Vec<char> = secret.chars().collect();
    match letters.len() {
        // Four of few letters would be most of it.
        0..8 => "*".repeat(letters.len().max(3)),
        length => {
            let ends = |letters: &[char]| letters.iter().collect::<String>();
            format!("{}{}{}", ends(&letters[..2]), "*".repeat(length - 4), ends(&letters[length - 2..]))
        }
    }
}

/// The text of a settings file with one value changed.
fn set(text: &str, key: &str, value: &str) -> anyhow::Result<String> {
    let mut document: DocumentMut = match text.parse::<DocumentMut>() {
        Ok(document) => document,
        Err(error) => bail!("{}", crate::settings::fault(text, error.message(), error.span())),
    };
    let parts: Vec<&str> = key.split('.').collect();
    let (sections, name, kind) = match &parts[..] {
        ["profile"] => (&parts[..0], "profile", Kind::Text),
        ["profiles", profile, section, name] if !profile.is_empty() => {
            (&parts[..3], *name, kind_of(&format!("{section}.{name}"))?)
        }
        [_, name] => (&parts[..1], *name, kind_of(key)?),
        _ => bail!("{}", unknown(key)),
    };
    let mut table = document.as_table_mut();
    for (depth, section) in sections.iter().enumerate() {
        let item = table.entry(section).or_insert_with(|| {
            let mut made = Table::new();
            made.set_implicit(depth + 1 < sections.len());
            Item::Table(made)
        });
        table = item.as_table_mut().with_context(|| format!("{section} is not a section"))?;
    }
    let value = typed(kind, value).map_err(|error| anyhow::anyhow!("{key}: {error}"))?;
    match table.get_mut(name).and_then(Item::as_value_mut) {
        Some(old) => {
            let decor = old.decor().clone();
            *old = value;
            *old.decor_mut() = decor;
        }
        None => drop(table.insert(name, Item::Value(value))),
    }
    Ok(document.to_string())
}

fn kind_of(key: &str) -> anyhow::Result<Kind> {
    KEYS.iter().find(|(known, _)| *known == key).map(|(_, kind)| *kind).with_context(|| unknown(key))
}

fn unknown(key: &str) -> String {
    let keys: Vec<&str> = KEYS.iter().map(|(key, _)| *key).collect();
    let last = key.rsplit('.').next().unwrap_or_default();
    let same = keys.iter().find(|known| known.rsplit('.').next() == Some(last)).map(|key| (*key).to_owned());
    match same.or_else(|| nearest(key, &keys)) {
        Some(meant) => format!("there is no setting '{key}'; did you mean {meant}?"),
        None => format!("there is no setting '{key}'; there are: {}", keys.join(", ")),
    }
}

fn typed(kind: Kind, text: &str) -> Result<toml_edit::Value, String> {
    match kind {
        Kind::Text => Ok(text.into()),
        Kind::Protocol => match text {
            "http" | "https" => Ok(text.into()),
            _ => Err("use http or https".to_owned()),
        },
        Kind::Seconds => match text.parse::<u32>() {
            Ok(seconds) if seconds > 0 => Ok(i64::from(seconds).into()),
            _ => Err("use a number of seconds above 0".to_owned()),
        },
        Kind::Flag => match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Ok(true.into()),
            "false" | "no" | "off" | "0" => Ok(false.into()),
            _ => Err("use true or false".to_owned()),
        },
        Kind::Lifetime => parse_lifetime(text).map(|_| text.trim().into()),
    }
}

/// Writes the file whole or not at all. It may hold a key: a new one is its owner's alone.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let failed = || path.display().to_string();
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(failed)?;
    }
    // A link stays a link: what it leads to is written.
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mode = std::fs::metadata(&target).map_or(0o600, |metadata| metadata.permissions().mode());
    let mut name = target.clone().into_os_string();
    name.push(format!(".{}.new", std::process::id()));
    let partial = PathBuf::from(name);
    let written = (|| {
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        file.write_all(text.as_bytes())?;
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        std::fs::rename(&partial, &target)
    })();
    if written.is_err() {
        // The first failure is the one to tell.
        let _ = std::fs::remove_file(&partial);
    }
    written.with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_valid_and_sets_nothing() {
        let table: toml::Table = TEMPLATE.parse().unwrap();
        assert!(table.values().all(|section| section.as_table().is_some_and(toml::Table::is_empty)));
        for (key, _) in KEYS {
            let name = key.rsplit('.').next().unwrap();
            assert!(TEMPLATE.contains(&format!("# {name} = ")), "{key}");
        }
    }

    #[test]
    fn values_are_set_and_comments_stay() {
        let text = set(TEMPLATE, "connection.domain", "h:1").unwrap();
        let text = set(&text, "connection.request_timeout", "5").unwrap();
        let text = set(&text, "connection.use_server_proxy", "no").unwrap();
        let text = set(&text, "connection.api_key", "123").unwrap();
        let text = set(&text, "defaults.timeout", "none").unwrap();
        let text = set(&text, "profiles.work.connection.domain", "w:2").unwrap();
        let text = set(&text, "profile", "work").unwrap();
        let text = set(&text, "connection.domain", "h:3").unwrap();
        assert!(text.contains("# api_key = \"secret\"\n") && text.contains("# image = \"host\"\n"), "{text}");
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["connection"]["domain"].as_str(), Some("h:3"));
        assert_eq!(table["connection"]["request_timeout"].as_integer(), Some(5));
        assert_eq!(table["connection"]["use_server_proxy"].as_bool(), Some(false));
        assert_eq!(table["connection"]["api_key"].as_str(), Some("123"));
        assert_eq!(table["defaults"]["timeout"].as_str(), Some("none"));
        assert_eq!(table["profiles"]["work"]["connection"]["domain"].as_str(), Some("w:2"));
        assert_eq!(table["profile"].as_str(), Some("work"));
    }

    #[test]
    fn what_cannot_be_set_is_refused_with_a_hint() {
        for (key, value, words) in [
            ("domain", "x", "did you mean connection.domain?"),
            ("conection.api_key", "x", "did you mean connection.api_key?"),
            ("a.b", "x", "there are: connection.api_key"),
            ("profiles.x.output.colour", "x", "no setting 'output.colour'; did you mean output.color?"),
            ("connection.request_timeout", "0", "seconds"),
            ("connection.protocol", "ftp", "http or https"),
            ("output.color", "maybe", "true or false"),
            ("defaults.timeout", "soon", "no duration"),
        ] {
            let error = format!("{:#}", set(TEMPLATE, key, value).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
        let error = format!("{:#}", set("api_key = \"s3cret", "output.color", "on").unwrap_err());
        assert!(!error.contains("s3cret"), "{error}");
    }

    #[test]
    fn secrets_show_their_ends_only() {
        assert_eq!(masked("abcdefghijkl"), "ab********kl");
        assert_eq!(masked("abc"), "***");
        assert_eq!(masked("abcdefg"), "*******");
        assert_eq!(masked("é2345678"), "é2****78");
    }
}
