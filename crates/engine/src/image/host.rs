//! The built-in image `host`: this machine's programs, and nothing of what is private on it.
//!
//! `/usr` (with `/bin`, `/lib` and the like where they are directories of their own) is used as it is; mount points
//! inside it do not show. The root is a skeleton made here: empty directories, a few generated files, and copies of
//! files of `/etc` that programs need. What is copied is a fixed list, and within it only what every user of the
//! machine may read, never anything that looks like a key.
//!
//! The skeleton's name is a hash over the state of the listed files, so a change of the machine makes a new one at
//! the next start, while running sandboxes keep theirs.

use super::decompress::hex_digest;
use super::error::{Error, Result};
use super::workspace::Workspace;
use super::{Config, HOST, Image, Root, architecture};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{Metadata, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Bumped when the generated files or the rules change.
const VERSION: &[u8] = b"host skeleton 1";

/// Entries of `/etc` to copy, files or whole directories. A `*` ends a prefix of a single name.
const ETC: &[&str] = &[
    // Who the machine is, as a distribution.
    "alpine-release",
    "arch-release",
    "debian_version",
    "fedora-release",
    "lsb-release",
    "os-release",
    "redhat-release",
    "SuSE-release",
    "system-release",
    // Loader, programs chosen among alternatives, locales, terminals.
    "alternatives",
    "inputrc",
    "ld-musl-*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "login.defs",
    "shells",
    "terminfo",
    "xattr.conf",
    // Names of protocols and file types.
    "ethertypes",
    "gai.conf",
    "host.conf",
    "magic",
    "magic.mime",
    "mime.types",
    "netconfig",
    "networks",
    "protocols",
    "rpc",
    "services",
    // Certificates that are trusted, and how TLS libraries are set up.
    "ca-certificates",
    "crypto-policies",
    "pki/ca-trust/extracted",
    "pki/java",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/ct_log_list.cnf",
    "pki/tls/openssl.cnf",
    "pki/tls/openssl.d",
    "ssl/ca-bundle.pem",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/ct_log_list.cnf",
    "ssl/openssl.cnf",
    // Languages and tools that keep parts of themselves here.
    "dotnet/install_location",
    "emacs",
    "fonts",
    "groff",
    "ImageMagick-*",
    "java",
    "java-*",
    "magics",
    "manpath.config",
    "maven/logging",
    "maven/m2.conf",
    "nanorc",
    "perl",
    "php",
    "python2*",
    "python3*",
    "R/Makeconf",
    "R/Renviron",
    "R/javaconf",
    "R/ldpaths",
    "R/repositories",
    "texmf",
    "vim",
];

/// File names that are never copied, whoever may read them.
const SECRET_WORDS: [&str; 6] = ["password", "passwd", "secret", "credential", "token", "private"];
const SECRET_ENDINGS: [&str; 6] = [".key", ".p12", ".pfx", ".jks", ".keytab", ".netrc"];

/// Beyond this a file is no configuration. The largest known, a bundle of certificates, has a quarter of it.
const LARGEST_FILE: u64 = 1 << 20;
/// Entries looked at; the usual machine has a thousand.
const MOST_ENTRIES: usize = 20_000;
const DEEPEST: usize = 8;

/// Directories of the skeleton and their modes.
const DIRECTORIES: &[(&str, u32)] = &[
    ("boot", 0o755),
    ("dev", 0o755),
    ("etc", 0o755),
    ("etc/pam.d", 0o755),
    ("etc/profile.d", 0o755),
    ("etc/skel", 0o755),
    ("home", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/local", 0o755),
    ("var/log", 0o755),
    ("var/mail", 0o1777),
    ("var/opt", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];

const LINKS: &[(&str, &str)] = &[
    ("etc/localtime", "/usr/share/zoneinfo/Etc/UTC"),
    ("etc/mtab", "/proc/self/mounts"),
    ("var/lock", "/run/lock"),
    ("var/run", "/run"),
    ("var/spool/mail", "../mail"),
];

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Files whose host versions say too much or ask for services that a sandbox lacks.
const GENERATED: &[(&str, &str)] = &[
    ("etc/bash.bashrc", "[ -z \"$PS1\" ] && return\nshopt -s checkwinsize\nPS1='\\u@\\h:\\w\\$ '\n"),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\n\
         services: files\nethers: files\nrpc: files\n",
    ),
    // Root may become any user; nobody else may become anyone, as set-id programs have no effect.
    (
        "etc/pam.d/other",
        "auth required pam_deny.so\naccount required pam_deny.so\npassword required pam_deny.so\nsession required pam_deny.so\n",
    ),
    ("etc/pam.d/runuser", PAM_ROOT),
    ("etc/pam.d/runuser-l", PAM_ROOT),
    ("etc/pam.d/su", PAM_ROOT),
    ("etc/pam.d/su-l", PAM_ROOT),
    (
        "etc/profile",
        "case \"$PATH\" in '') PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; export PATH ;; esac\n\
         if [ -n \"$BASH\" ] && [ -n \"$PS1\" ] && [ -r /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi\n\
         for file in /etc/profile.d/*.sh; do [ -r \"$file\" ] && . \"$file\"; done\nunset file\n",
    ),
    ("etc/timezone", "Etc/UTC\n"),
];

const PAM_ROOT: &str = "auth sufficient pam_rootok.so\nauth required pam_deny.so\naccount required pam_permit.so\n\
                        session required pam_permit.so\n";

/// Something below `/etc` that will be in the skeleton.
enum Item {
    Directory,
    File(PathBuf),
    Link(PathBuf),
}

/// The built-in image of a store, made when it is first asked for: on a machine with much in its `/etc` that takes a
/// quarter of a second, in which a server can answer already.
#[derive(Debug)]
pub(super) struct HostImage {
    /// Root of the machine; `None` for a store without the image.
    machine: Option<PathBuf>,
    /// Directory of the store.
    store: PathBuf,
    made: Mutex<Option<Arc<Image>>>,
}

impl HostImage {
    pub(super) fn new(machine: Option<PathBuf>, store: &Path) -> Self {
        Self { machine, store: store.to_owned(), made: Mutex::default() }
    }

    /// The image. Blocks while it is being made.
    pub(super) fn get(&self) -> Result<Option<Arc<Image>>> {
        let Some(machine) = &self.machine else { return Ok(None) };
        // A panic leaves nothing half made: the value is set as a whole.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.is_none() {
            *made = Some(Arc::new(prepare(machine, &self.store)?));
        }
        Ok(made.clone())
    }
}

/// Makes sure that the skeleton for the present state of `machine` lies in the store, and describes the image.
fn prepare(machine: &Path, store: &Path) -> Result<Image> {
    let mut survey = Survey { machine, items: BTreeMap::new(), hash: Sha256::new_with_prefix(VERSION) };
    for pattern in ETC {
        survey.pattern(pattern)?;
    }
    let accounts = [account_file(machine, "passwd"), account_file(machine, "group")];
    for text in &accounts {
        survey.note(text.as_bytes());
    }
    let top = top_level(machine)?;
    for (name, entry) in &top {
        survey.note(name.as_bytes());
        survey.note(entry.as_ref().map_or(&b""[..], |target| target.as_os_str().as_bytes()));
    }
    let id = hex_digest(survey.hash);
    let skeleton = store.join("host").join(&id["sha256:".len()..]["".len()..32]);
    if !skeleton.is_dir() {
        let workspace = Workspace::new(store)?;
        let made = workspace.path().join("skeleton");
        build(&made, machine, &survey.items, &accounts, &top)?;
        match std::fs::rename(&made, &skeleton) {
            // Another process made the same one meanwhile.
            Err(error) if !skeleton.is_dir() => return Err(Error::io("create", &skeleton, error)),
            _ => {}
        }
    }
    let mut roots = vec![Root { mountpoint: "/".into(), lowers: vec![skeleton] }];
    let own = top.iter().filter(|(_, link)| link.is_none()).map(|(name, _)| name);
    roots.extend(own.map(|name| Root { mountpoint: format!("/{name}"), lowers: vec![machine.join(name)] }));
    let config = Config {
        env: vec![("PATH".into(), PATH.into())],
        cmd: vec![shell(machine).into()],
        os: "linux".into(),
        architecture: architecture().into(),
        ..Config::default()
    };
    Ok(Image { reference: HOST.into(), id, config, roots, size_bytes: 0, created: None })
}

fn shell(machine: &Path) -> &'static str {
    if machine.join("usr/bin/bash").exists() || machine.join("bin/bash").exists() {
        "/bin/bash"
    } else {
        "/bin/sh"
    }
}

/// `usr`, and the directories beside it that hold programs: with the target where they are links into `usr`.
fn top_level(machine: &Path) -> Result<Vec<(&'static str, Option<PathBuf>)>> {
    let mut top = Vec::new();
    for name in ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        let path = machine.join(name);
        match std::fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_symlink() => {
                let target = std::fs::read_link(&path).map_err(|error| Error::io("read", &path, error))?;
                top.push((name, Some(target)));
            }
            Ok(metadata) if metadata.is_dir() => top.push((name, None)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("examine", &path, error)),
        }
    }
    Ok(top)
}

/// Finds what will be copied, and hashes its state.
struct Survey<'a> {
    machine: &'a Path,
    /// By path below `/etc`.
    items: BTreeMap<PathBuf, Item>,
    hash: Sha256,
}

impl Survey<'_> {
    fn note(&mut self, field: &[u8]) {
        self.hash.update((field.len() as u64).to_le_bytes());
        self.hash.update(field);
    }

    fn note_metadata(&mut self, path: &Path, metadata: &Metadata) {
        self.note(path.as_os_str().as_bytes());
        self.hash.update(metadata.mode().to_le_bytes());
        if metadata.is_file() {
            self.hash.update(metadata.len().to_le_bytes());
            self.hash.update(metadata.mtime().to_le_bytes());
            self.hash.update(metadata.mtime_nsec().to_le_bytes());
        }
    }

    fn pattern(&mut self, pattern: &str) -> Result<()> {
        let Some(prefix) = pattern.strip_suffix('*') else {
            return self.visit(Path::new(pattern), 0);
        };
        let etc = self.machine.join("etc");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&etc).map_err(|error| Error::io("read", &etc, error))? {
            let name = entry.map_err(|error| Error::io("read", &etc, error))?.file_name();
            if name.as_bytes().starts_with(prefix.as_bytes()) {
                names.push(name);
            }
        }
        names.sort();
        names.iter().try_for_each(|name| self.visit(Path::new(name), 0))
    }

    /// Takes one file or tree. What cannot be read, or may not be read by everyone, is left out.
    fn visit(&mut self, relative: &Path, depth: usize) -> Result<()> {
        let path = self.machine.join("etc").join(relative);
        let Ok(metadata) = std::fs::symlink_metadata(&path) else {
            return Ok(());
        };
        if self.items.len() >= MOST_ENTRIES || depth > DEEPEST || looks_secret(relative) {
            return Ok(());
        }
        self.note_metadata(relative, &metadata);
        if metadata.is_dir() {
            let readable = metadata.mode() & 0o005 == 0o005;
            let Some(entries) = std::fs::read_dir(&path).ok().filter(|_| readable) else {
                return Ok(());
            };
            self.parents(relative);
            self.items.insert(relative.into(), Item::Directory);
            let mut names: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
            names.sort();
            return names.iter().try_for_each(|name| self.visit(&relative.join(name), depth + 1));
        }
        let item = if metadata.is_symlink() {
            let target = std::fs::read_link(&path).map_err(|error| Error::io("read", &path, error))?;
            self.note(target.as_os_str().as_bytes());
            if leads_inside(relative, &target) {
                Item::Link(target)
            } else {
                // Some distributions keep what is meant elsewhere, and the link would lead nowhere in a sandbox.
                let Ok(metadata) = std::fs::metadata(&path) else {
                    return Ok(());
                };
                self.note_metadata(&target, &metadata);
                if !is_harmless(&metadata) || looks_secret(&target) {
                    return Ok(());
                }
                Item::File(path)
            }
        } else if is_harmless(&metadata) {
            Item::File(path)
        } else {
            return Ok(());
        };
        self.parents(relative);
        self.items.insert(relative.into(), item);
        Ok(())
    }

    fn parents(&mut self, relative: &Path) {
        for parent in relative.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()) {
            self.items.entry(parent.into()).or_insert(Item::Directory);
        }
    }
}

fn is_harmless(metadata: &Metadata) -> bool {
    metadata.is_file() && metadata.mode() & 0o004 != 0 && metadata.len() <= LARGEST_FILE
}

fn looks_secret(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    // Java's trust store holds certificates only; its ending would exclude it elsewhere.
    SECRET_WORDS.iter().any(|word| name.contains(word))
        || SECRET_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Whether a link at `relative` below `/etc` leads to the system's programs or to `/etc`, by its text.
fn leads_inside(relative: &Path, target: &Path) -> bool {
    let mut path = PathBuf::from("/etc").join(relative);
    path.pop();
    for component in target.components() {
        match component {
            Component::RootDir => path = "/".into(),
            Component::ParentDir => drop(path.pop()),
            Component::Normal(name) => path.push(name),
            Component::CurDir | Component::Prefix(_) => {}
        }
    }
    ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
        .iter()
        .any(|inside| path.starts_with(inside))
}

/// `passwd` or `group` of the machine, reduced to the accounts that every system has, without passwords, members and
/// comments.
fn account_file(machine: &Path, name: &str) -> String {
    let text = std::fs::read_to_string(machine.join("etc").join(name)).unwrap_or_default();
    let mut accounts = String::new();
    for line in text.lines() {
        let fields: Vec<_> = line.split(':').collect();
        let plain = |text: &str| {
            !text.is_empty()
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        let id = fields.get(2).and_then(|id| id.parse::<u32>().ok());
        let Some(id) = id.filter(|id| *id <= 100 || matches!(id, 65_533 | 65_534)) else {
            continue;
        };
        // Numbers from 100 on are given to services as they are installed, and would tell about them.
        if !plain(fields[0]) || (name == "passwd" && id == 100) || id == 0 {
            continue;
        }
        // Writing to a string cannot fail.
        let _ = match fields.as_slice() {
            [account, _, _, gid, _, home, shell] if name == "passwd" => {
                writeln!(accounts, "{account}:*:{id}:{gid}:{account}:{home}:{shell}")
            }
            [account, _, _, _] if name == "group" => writeln!(accounts, "{account}:x:{id}:"),
            _ => Ok(()),
        };
    }
    match name {
        "passwd" => format!("root:*:0:0:root:/root:{}\n{accounts}", shell(machine)),
        _ => format!("root:x:0:\n{accounts}"),
    }
}

fn build(
    root: &Path,
    machine: &Path,
    items: &BTreeMap<PathBuf, Item>,
    accounts: &[String; 2],
    top: &[(&str, Option<PathBuf>)],
) -> Result<()> {
    directory(root, 0o755)?;
    for (path, mode) in DIRECTORIES {
        directory(&root.join(path), *mode)?;
    }
    for (name, target) in top {
        match target {
            Some(target) => link(target, &root.join(name))?,
            None if *name == "usr" => {}
            None => directory(&root.join(name), 0o755)?,
        }
    }
    let etc = root.join("etc");
    // Parents sort before what lies in them.
    for (relative, item) in items {
        let path = etc.join(relative);
        match item {
            Item::Directory if path.is_dir() => {}
            Item::Directory => directory(&path, 0o755)?,
            Item::Link(target) => link(target, &path)?,
            Item::File(source) => copy(source, &path)?,
        }
    }
    for (path, content) in GENERATED {
        file(&root.join(path), content.as_bytes(), 0o644)?;
    }
    for (path, target) in LINKS {
        // A machine without time zones has UTC by having none.
        if target.starts_with("/usr") && !machine.join(target.trim_start_matches('/')).exists() {
            continue;
        }
        link(Path::new(target), &root.join(path))?;
    }
    file(&etc.join("passwd"), accounts[0].as_bytes(), 0o644)?;
    file(&etc.join("group"), accounts[1].as_bytes(), 0o644)
}

fn copy(source: &Path, target: &Path) -> Result<()> {
    // What vanished or became unreadable since the survey is left out like what was never there.
    let Ok(content) = std::fs::read(source) else {
        return Ok(());
    };
    let holds_key = content.windows(PRIVATE_KEY.len()).any(|window| window == PRIVATE_KEY);
    if holds_key || content.len() as u64 > LARGEST_FILE {
        return Ok(());
    }
    let executable = std::fs::metadata(source).is_ok_and(|metadata| metadata.mode() & 0o111 != 0);
    file(target, &content, if executable { 0o755 } else { 0o644 })
}

const PRIVATE_KEY: &[u8] = b"PRIVATE KEY-----";

fn directory(path: &Path, mode: u32) -> Result<()> {
    std::fs::DirBuilder::new()
        .mode(mode)
        .create(path)
        // Again, since the umask takes bits away.
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(|error| Error::io("create", path, error))
}

fn file(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    std::fs::write(path, content)
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(|error| Error::io("write", path, error))
}

fn link(target: &Path, path: &Path) -> Result<()> {
    std::os::unix::fs::symlink(target, path).map_err(|error| Error::io("create", path, error))
}
