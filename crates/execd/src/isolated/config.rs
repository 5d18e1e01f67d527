//! The settings of isolated sessions: one TOML file, named by `--isolation-config` or `EXECD_ISOLATION_CONFIG`.
//!
//! A wrong value ends the daemon before it serves; layers that this daemon does not have are read and, where they are
//! asked for, told in the log and in the capabilities.

use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};

use osb_confine::seccomp::{Named, named};
use toml::{Table, Value};

/// Variable that names the file.
pub const VARIABLE: &str = "EXECD_ISOLATION_CONFIG";
/// Longest file that is read.
const LONGEST: u64 = 1 << 20;

/// What a daemon's sessions may do and take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where an ordinary daemon keeps upper layers on disk.
    pub(super) upper_root: PathBuf,
    /// Bound of all upper layers on disk together, looked at when a session is made and when one runs something.
    pub(super) upper_max_bytes: Option<u64>,
    /// Where what a session may write directly has to be.
    pub(super) allowed_writable: Vec<String>,
    /// System calls refused to sessions instead of the usual ones.
    pub(super) refused_calls: Option<Vec<u32>>,
    /// Layers that are asked for and not there.
    pub(super) hardening: bool,
    pub(super) landlock: bool,
    pub(super) ebpf: bool,
    /// What of the file has no effect.
    warnings: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            upper_root: "/var/lib/execd/isolation".into(),
            upper_max_bytes: Some(8 << 30),
            allowed_writable: ["/workspace", "/mnt", "/media", "/data"].map(str::to_owned).to_vec(),
            refused_calls: None,
            hardening: false,
            landlock: false,
            ebpf: false,
            warnings: Vec::new(),
        }
    }
}

impl Config {
    /// Reads the file.
    ///
    /// # Errors
    /// What is wrong, with the names of file and key.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = text_of(path).map_err(|error| format!("isolation config {}: {error}", path.display()))?;
        Self::parse(&text).map_err(|error| format!("isolation config {}: {error}", path.display()))
    }

    /// Makes the place for upper layers, if it is not the usual one, which is made when it is needed.
    ///
    /// # Errors
    /// It cannot be a directory of this daemon.
    pub(crate) fn make_root(&self) -> Result<(), String> {
        let root = &self.upper_root;
        if *root == Self::default().upper_root {
            return Ok(());
        }
        let made = std::fs::create_dir_all(root).and_then(|()| std::fs::symlink_metadata(root));
        match made {
            Ok(meta) if meta.is_dir() => Ok(()),
            Ok(_) => Err(format!("upper_root: '{}' is not a directory", root.display())),
            Err(error) => Err(format!("upper_root: '{}' cannot be made: {error}", root.display())),
        }
    }

    /// Tells what of the settings has no effect.
    pub(crate) fn warn(&self) {
        for warning in &self.warnings {
            tracing::warn!(warning, "settings of isolated sessions");
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let table: Table = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        let mut all = Section { name: "", table, warnings: Vec::new() };
        let mut config = Self::default();
        if let Some(root) = all.text("upper_root")? {
            config.upper_root = absolute(&root).map_err(|error| format!("upper_root: {error}"))?;
        }
        if let Some(bytes) = all.bytes("upper_max_bytes")? {
            config.upper_max_bytes = (bytes > 0).then_some(bytes);
            if bytes == 0 {
                all.warnings
                    .push("upper_max_bytes = 0: nothing but the disk bounds what sessions change".to_owned());
            }
        }
        // Reserved with the differences themselves.
        all.bytes("diff_max_bytes")?;
        if let Some(paths) = all.paths("allowed_writable")? {
            config.allowed_writable = paths;
        }
        if let Some(within) =
            config.allowed_writable.iter().find(|allowed| config.upper_root.starts_with(allowed))
        {
            return Err(format!(
                "upper_root: '{}' is in '{within}' of allowed_writable, where sessions could write each other's changes",
                config.upper_root.display()
            ));
        }
        let mut seccomp = all.section("seccomp")?;
        if let Some(names) = seccomp.texts("deny")? {
            config.refused_calls = Some(numbers(&names)?);
        }
        all.absorb(seccomp);
        let mut hardening = all.section("hardening")?;
        config.hardening = hardening.switch("enabled")?;
        hardening.texts("keep_capabilities")?;
        all.absorb(hardening);
        let mut landlock = all.section("landlock")?;
        config.landlock = landlock.switch("enabled")?;
        landlock.paths("extra_writable")?;
        landlock.paths("extra_readable")?;
        all.absorb(landlock);
        let mut ebpf = all.section("ebpf")?;
        config.ebpf = ebpf.switch("enabled")?;
        ebpf.texts("observe")?;
        ebpf.text("audit_file")?;
        all.absorb(ebpf);
        for (name, asked) in
            [("hardening", config.hardening), ("landlock", config.landlock), ("ebpf", config.ebpf)]
        {
            if asked {
                all.warnings.push(not_here(name));
            }
        }
        all.finish();
        config.warnings = all.warnings;
        Ok(config)
    }
}

/// What is said of a layer that is asked for and not there.
pub(super) fn not_here(section: &str) -> String {
    format!("[{section}] enabled = true has no effect: this execd does not have it")
}

fn text_of(path: &Path) -> Result<String, String> {
    // Opening what is no file must not hang.
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).map_err(|error| error.to_string())?;
    let file = std::fs::File::options()
        .read(true)
        .custom_flags(nonblock)
        .open(path)
        .map_err(|error| error.to_string())?;
    if !file.metadata().is_ok_and(|meta| meta.is_file()) {
        return Err("is not a file".to_owned());
    }
    let mut text = String::new();
    file.take(LONGEST + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > LONGEST {
        return Err(format!("is longer than {LONGEST} bytes"));
    }
    Ok(text)
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    if !path.is_absolute() || text.contains('\0') {
        return Err(format!("{text:?} is not an absolute path"));
    }
    if path.components().any(|component| component == Component::ParentDir) {
        return Err(format!("{text:?} must not hold '..'"));
    }
    Ok(path.components().collect())
}

fn numbers(names: &[String]) -> Result<Vec<u32>, String> {
    let mut numbers = Vec::new();
    for name in names {
        match named(name) {
            // The shell itself is executed under the filter.
            Some(_) if name == "execve" => {
                return Err("seccomp.deny: without 'execve' no session can begin".to_owned());
            }
            Some(Named::Call(number)) => numbers.push(number),
            Some(Named::Elsewhere) => {}
            None => return Err(format!("seccomp.deny: {name:?} is no system call")),
        }
    }
    Ok(numbers)
}

/// A table of the file, of which what has been read is gone.
struct Section {
    name: &'static str,
    table: Table,
    warnings: Vec<String>,
}

impl Section {
    fn key(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    fn take<T>(
        &mut self,
        key: &str,
        kind: &str,
        read: impl Fn(Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.table.remove(key) else { return Ok(None) };
        let given = value.type_str();
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(format!("{}: must be {kind}, and is not this {given}", self.key(key))),
        }
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        self.take(key, "a string", |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        })
    }

    fn texts(&mut self, key: &str) -> Result<Option<Vec<String>>, String> {
        self.take(key, "a list of strings", |value| {
            let Value::Array(values) = value else { return None };
            values.into_iter().map(|value| value.as_str().map(str::to_owned)).collect()
        })
    }

    fn paths(&mut self, key: &str) -> Result<Option<Vec<String>>, String> {
        let Some(texts) = self.texts(key)? else { return Ok(None) };
        let paths = texts.iter().map(|text| Ok(absolute(text)?.to_string_lossy().into_owned()));
        let paths: Result<_, String> = paths.collect();
        paths.map(Some).map_err(|error| format!("{}: {error}", self.key(key)))
    }

    fn bytes(&mut self, key: &str) -> Result<Option<u64>, String> {
        self.take(key, "a number of bytes, 0 or more", |value| u64::try_from(value.as_integer()?).ok())
    }

    fn switch(&mut self, key: &str) -> Result<bool, String> {
        Ok(self.take(key, "true or false", |value| value.as_bool())?.unwrap_or(false))
    }

    fn section(&mut self, name: &'static str) -> Result<Self, String> {
        let table = self.take(name, "a table", |value| match value {
            Value::Table(table) => Some(table),
            _ => None,
        })?;
        Ok(Self { name, table: table.unwrap_or_default(), warnings: Vec::new() })
    }

    /// Tells what nobody has read.
    fn finish(&mut self) {
        let left: Vec<String> = self.table.keys().map(|key| self.key(key)).collect();
        self.warnings.extend(left.into_iter().map(|key| format!("{key}: no such key")));
    }

    fn absorb(&mut self, mut part: Self) {
        part.finish();
        self.warnings.append(&mut part.warnings);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_as_usual() {
        assert_eq!(Config::parse(""), Ok(Config::default()));
        let text = "upper_root = \"/u//x/\"\nupper_max_bytes = 7\ndiff_max_bytes = 9\nallowed_writable = []\n\
            [seccomp]\ndeny = [\"mkdirat\", \"mkdirat\"]\n[hardening]\nkeep_capabilities = [\"CAP_KILL\"]\n\
            [landlock]\nextra_readable = [\"/x\"]\n[ebpf]\nobserve = [\"exec\"]\naudit_file = \"/a\"\n";
        let config = Config::parse(text).unwrap();
        assert_eq!((config.upper_root.to_str(), config.upper_max_bytes), (Some("/u/x"), Some(7)));
        assert!(config.allowed_writable.is_empty() && config.warnings.is_empty(), "{config:?}");
        assert_eq!(config.refused_calls.unwrap().len(), 2);
    }

    #[test]
    fn mistakes_name_their_key() {
        for (text, key) in [
            ("upper_root = 1", "upper_root"),
            ("upper_root = \"x\"", "upper_root"),
            ("upper_root = \"/x/../y\"", "upper_root"),
            ("upper_root = \"/data/x\"", "allowed_writable"),
            ("allowed_writable = [\"/\"]", "allowed_writable"),
            ("upper_max_bytes = -1", "upper_max_bytes"),
            ("upper_max_bytes = \"8Gi\"", "upper_max_bytes"),
            ("upper_max_bytes = 1.5", "upper_max_bytes"),
            ("diff_max_bytes = true", "diff_max_bytes"),
            ("allowed_writable = \"/x\"", "allowed_writable"),
            ("allowed_writable = [\"x\"]", "allowed_writable"),
            ("allowed_writable = [1]", "allowed_writable"),
            ("seccomp = 1", "seccomp"),
            ("[seccomp]\ndeny = \"mount\"", "seccomp.deny"),
            ("[seccomp]\ndeny = [\"mountt\"]", "mountt"),
            ("[seccomp]\ndeny = [\"execve\"]", "execve"),
            ("[hardening]\nenabled = 1", "hardening.enabled"),
            ("[hardening]\nkeep_capabilities = [1]", "hardening.keep_capabilities"),
            ("[landlock]\nextra_writable = [\"x\"]", "landlock.extra_writable"),
            ("[ebpf]\naudit_file = 1", "ebpf.audit_file"),
            ("upper_root = ", "line 1"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(key), "{text}: {error}");
        }
    }

    #[test]
    fn what_has_no_effect_is_told() {
        let config = Config::parse("upper_max_bytes = 0\nmore = 1\n[ebpf]\nenabled = true\nx = 1\n").unwrap();
        assert_eq!(config.upper_max_bytes, None);
        let all = config.warnings.join("; ");
        for word in ["upper_max_bytes = 0", "more: no such key", "ebpf.x: no such key", "[ebpf] enabled"] {
            assert!(all.contains(word), "{word}: {all}");
        }
    }
}
