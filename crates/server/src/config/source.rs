//! Which file is read, and the key that is made when there is none.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use super::env::{self, Env};
use super::{Config, ConfigError, Secret};

/// Where the configuration came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A file.
    File(PathBuf),
    /// None was found: a guarded server on the loopback address with a key of its own. The file looked for.
    Default(PathBuf),
}

/// A configuration that may serve.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The settings.
    pub config: Config,
    /// Where they came from.
    pub source: Source,
    /// For the log.
    pub warnings: Vec<String>,
}

/// Whom the client credentials belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Their home directory.
    pub home: PathBuf,
    /// User and group the file shall have; `None` leaves the process's own.
    pub owner: Option<(u32, u32)>,
}

/// Finds and reads the configuration: `explicit` (the command line's), else `SANDBOX_CONFIG_PATH`, else
/// `~/.sandbox.toml`, else the guarded default.
///
/// # Errors
/// A file named on purpose that is absent, a file that cannot be taken, or no key.
pub fn load(explicit: Option<&Path>, env: &Env) -> Result<Loaded, ConfigError> {
    let named = explicit
        .map(|path| env.expand(&path.to_string_lossy()))
        .or_else(|| env.get(env::CONFIG_PATH).filter(|p| !p.is_empty()).map(|p| env.expand(p)));
    let path = named.clone().unwrap_or_else(|| env.expand("~/.sandbox.toml"));
    match fs::read_to_string(&path) {
        Ok(text) => {
            let (config, warnings) = Config::parse(&text, env)?;
            guard(&config, env)?;
            Ok(Loaded { config, source: Source::File(path), warnings })
        }
        Err(error) if named.is_none() && error.kind() == ErrorKind::NotFound => default(path, env),
        Err(error) => Err(ConfigError::Unreadable { path, reason: error.kind() }),
    }
}

/// Without a key the server starts only by leave of the operator.
fn guard(config: &Config, env: &Env) -> Result<(), ConfigError> {
    if config.server.api_key.is_some() || env.get(env::INSECURE) == Some("YES") {
        Ok(())
    } else {
        Err(ConfigError::NoKey)
    }
}

fn default(looked_for: PathBuf, env: &Env) -> Result<Loaded, ConfigError> {
    let (mut config, warnings) = Config::parse("", env)?;
    if env.get("OPENSANDBOX_SERVER_HOST").is_none_or(str::is_empty) {
        "127.0.0.1".clone_into(&mut config.server.host);
    }
    if config.server.api_key.is_none() && env.get(env::INSECURE) != Some("YES") {
        let key = stored_key(&config.embedded.data_dir)?;
        let address = format!("{}:{}", config.server.host, config.server.port);
        if let Some(credentials) = Credentials::find(env) {
            credentials.write(&address, &key);
        }
        config.server.api_key = Some(Secret(key));
    }
    Ok(Loaded { config, source: Source::Default(looked_for), warnings })
}

/// The key in `data_dir/api-key`; made when there is none.
fn stored_key(data_dir: &Path) -> Result<String, ConfigError> {
    let path = data_dir.join("api-key");
    let failed = |reason| ConfigError::KeyFile { path: path.clone(), reason };
    fs::create_dir_all(data_dir).map_err(failed)?;
    match fs::read_to_string(&path) {
        Ok(key) if !key.trim().is_empty() => return Ok(key.trim().to_owned()),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let key = random_key().map_err(failed)?;
    write_private(&path, format!("{key}\n").as_bytes(), None).map_err(failed)?;
    Ok(key)
}

fn random_key() -> std::io::Result<String> {
    let mut bytes = [0_u8; 24];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().fold("osb_".to_owned(), |mut key, byte| {
        key.push(char::from_digit(u32::from(byte >> 4), 16).unwrap_or('0'));
        key.push(char::from_digit(u32::from(byte & 15), 16).unwrap_or('0'));
        key
    }))
}

impl Credentials {
    /// The user behind sudo when there is one, else the process's own home.
    #[must_use]
    pub fn find(env: &Env) -> Option<Self> {
        let number = |name| env.get(name).and_then(|text| text.parse::<u32>().ok());
        if let (Some(uid), Some(gid)) = (number(env::SUDO_UID), number(env::SUDO_GID))
            && uid != 0
        {
            let home = home_of(uid, &fs::read_to_string("/etc/passwd").ok()?)?;
            return Some(Self { home, owner: Some((uid, gid)) });
        }
        Some(Self { home: env.get(env::HOME).filter(|home| home.starts_with('/'))?.into(), owner: None })
    }

    /// Writes `~/.config/opensandbox/credentials.toml`. A failure is logged and no obstacle: the key also lies in
    /// the data directory.
    fn write(&self, address: &str, key: &str) {
        let directory = self.home.join(".config/opensandbox");
        let path = directory.join("credentials.toml");
        let text =
            format!("# Written by the server at its start.\ndomain = \"{address}\"\napi_key = \"{key}\"\n");
        let done = make_directories(&self.home, &[".config", "opensandbox"], self.owner)
            .and_then(|()| write_private(&path, text.as_bytes(), self.owner));
        if let Err(error) = done {
            tracing::warn!(path = %path.display(), %error, "client credentials could not be written");
        }
    }
}

fn home_of(uid: u32, passwd: &str) -> Option<PathBuf> {
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        (fields.len() >= 6 && fields[2].parse() == Ok(uid)).then(|| PathBuf::from(fields[5]))
    })
}

/// Makes directories below a user's home as that user would have. Root walks through a directory that somebody
/// else controls here, so links are refused: nothing outside may be made or given away.
fn make_directories(home: &Path, names: &[&str], owner: Option<(u32, u32)>) -> std::io::Result<()> {
    let mut path = home.to_owned();
    for name in names {
        path.push(name);
        match fs::create_dir(&path) {
            Ok(()) => {
                if let Some((uid, gid)) = owner {
                    std::os::unix::fs::lchown(&path, Some(uid), Some(gid))?;
                }
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                if !fs::symlink_metadata(&path)?.is_dir() {
                    return Err(ErrorKind::NotADirectory.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes a file that only its owner reads, whole or not at all.
fn write_private(path: &Path, bytes: &[u8], owner: Option<(u32, u32)>) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let temporary = PathBuf::from(name);
    // A file left behind under that name may be another's: it is removed, never opened.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let written = (|| {
        file.write_all(bytes)?;
        if let Some((uid, gid)) = owner {
            fchown(&file, Some(uid), Some(gid))?;
        }
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}
