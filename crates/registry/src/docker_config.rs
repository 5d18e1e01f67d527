//! Credentials from Docker's client configuration, read anew for each pull: people log in meanwhile.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::auth::Secret;
use crate::error::{Error, Result};
use crate::helper;
use crate::settings::{Credentials, Patience};

/// Most of the file that is read.
const MOST_CONFIG: u64 = 1 << 20;

/// What the file calls Docker Hub.
const HUB: &str = "https://index.docker.io/v1/";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct File {
    auths: BTreeMap<String, Entry>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "lowercase", default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

/// The secret for a registry, by its host and port; `None` when there is no file or nothing in it.
pub(crate) async fn find(path: &Path, registry: &str, patience: &Patience) -> Result<Option<Secret>> {
    let Some(file) = read(path)? else {
        return Ok(None);
    };
    let fits = |key: &&str| server(key) == Some(canonical(registry));
    let helper = file.cred_helpers.iter().find(|(key, _)| fits(&key.as_str())).map(|(_, name)| name.as_str());
    let store = Some(file.creds_store.as_str()).filter(|name| !name.is_empty());
    if let Some(name) = helper.or(store) {
        let asked = if canonical(registry) == canonical("docker.io") { HUB } else { registry };
        if let Some((username, password)) = helper::ask(name, asked, patience).await? {
            return Ok(Some(from_pair(username, password)));
        }
    }
    let Some(entry) = file.auths.iter().find(|(key, _)| fits(&key.as_str())).map(|(_, entry)| entry) else {
        return Ok(None);
    };
    secret(entry).map_err(|reason| Error::DockerConfig {
        path: path.into(),
        reason: format!("entry of {registry}: {reason}"),
    })
}

fn read(path: &Path) -> Result<Option<File>> {
    let mut bytes = Vec::new();
    let opened = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(Error::disk("open", path, error)),
    };
    opened.take(MOST_CONFIG + 1).read_to_end(&mut bytes).map_err(|error| Error::disk("read", path, error))?;
    let wrong = |reason: String| Error::DockerConfig { path: path.into(), reason };
    if bytes.len() as u64 > MOST_CONFIG {
        return Err(wrong(format!("it has more than {MOST_CONFIG} bytes")));
    }
    // The error's own text may quote what stands there.
    serde_json::from_slice(&bytes).map(Some).map_err(|error| {
        wrong(format!("no JSON of its kind at line {}, column {}", error.line(), error.column()))
    })
}

fn secret(entry: &Entry) -> Result<Option<Secret>, &'static str> {
    if !entry.registrytoken.is_empty() {
        return Ok(Some(Secret::RegistryToken(entry.registrytoken.clone())));
    }
    if !entry.identitytoken.is_empty() {
        return Ok(Some(Secret::IdentityToken(entry.identitytoken.clone())));
    }
    if !entry.auth.is_empty() {
        let decoded = STANDARD.decode(entry.auth.trim()).map_err(|_| "`auth` is not base64")?;
        let text = String::from_utf8(decoded).map_err(|_| "`auth` is not text")?;
        let (username, password) = text.split_once(':').ok_or("`auth` is not user and password")?;
        return Ok(Some(from_pair(username.to_owned(), password.trim_end_matches('\0').to_owned())));
    }
    if entry.username.is_empty() && entry.password.is_empty() {
        return Ok(None);
    }
    Ok(Some(from_pair(entry.username.clone(), entry.password.clone())))
}

/// Helpers name a token by a user that cannot exist.
fn from_pair(username: String, password: String) -> Secret {
    if username == "<token>" {
        Secret::IdentityToken(password)
    } else {
        Secret::Basic(Credentials { username, password })
    }
}

/// Host and port of an entry; entries of single repositories have none.
fn server(key: &str) -> Option<&str> {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    matches!(path.trim_end_matches('/'), "" | "v1" | "v2").then(|| canonical(host))
}

/// One name for Docker Hub, which has several.
fn canonical(host: &str) -> &str {
    match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn found(config: &str, registry: &str) -> Result<Option<String>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), config).unwrap();
        let secret = find(file.path(), registry, &Patience::default()).await?;
        Ok(secret.map(|secret| match secret {
            Secret::Basic(credentials) => format!("{}/{}", credentials.username, credentials.password),
            Secret::IdentityToken(token) => format!("identity {token}"),
            Secret::RegistryToken(token) => format!("registry {token}"),
        }))
    }

    #[tokio::test]
    async fn entries() {
        let config = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "aHVi OnB3"},
            "a.example": {"auth": "dTpwOnc="},
            "https://b.example/v2/": {"username": "u", "password": "p"},
            "c.example:5000": {"auth": "PHRva2VuPjp0", "identitytoken": "t"},
            "d.example": {"registrytoken": "r"},
            "e.example/team": {"auth": "dTpw"},
            "f.example": {}
        }, "HttpHeaders": {"X": "y"}}"#
            .replace("aHVi OnB3", "aHViOnB3");
        for (registry, expected) in [
            ("docker.io", Some("hub/pw")),
            ("a.example", Some("u/p:w")),
            ("b.example", Some("u/p")),
            ("c.example:5000", Some("identity t")),
            ("c.example", None),
            ("d.example", Some("registry r")),
            ("e.example", None),
            ("f.example", None),
            ("example", None),
        ] {
            assert_eq!(found(&config, registry).await.unwrap().as_deref(), expected, "{registry}");
        }
    }

    #[tokio::test]
    async fn broken_files_are_named_and_not_quoted() {
        for config in [r#"{"auths": "hunter2"#, r#"{"auths": {"a.example": {"auth": "hunter2!"}}}"#] {
            let error = found(config, "a.example").await.unwrap_err();
            assert!(matches!(error, Error::DockerConfig { .. }), "{error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
        let nowhere = Path::new("/nowhere/config.json");
        assert!(find(nowhere, "a.example", &Patience::default()).await.unwrap().is_none());
    }
}
