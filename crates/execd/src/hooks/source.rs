//! Where the hooks of a plain daemon come from: a variable that the control plane sets, or the file in which an
//! earlier daemon has kept them.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::document;
use super::plan::Plan;

/// Variable with the hooks as JSON.
pub const TRANSPORT: &str = "OPENSANDBOX_LIFECYCLE";
/// Variable with the name of the file.
pub const CONFIG_FILE: &str = "EXECD_LIFECYCLE_CONFIG";
/// Where the file is otherwise, below the home directory.
const USUAL_FILE: &str = ".execd/lifecycle.toml";
/// More than any variable can hold is no file of ours.
const LIMIT: u64 = 1 << 20;

/// Takes the hooks from the variable, and keeps them in the file; without the variable, from the file.
///
/// # Errors
/// They break a rule, or the file cannot be used.
pub fn load(var: impl Fn(&str) -> Option<OsString>) -> io::Result<Plan> {
    let path = file(&var);
    let text = var(TRANSPORT).unwrap_or_default();
    let Some(text) = text.to_str() else {
        return Err(io::Error::other(format!("{TRANSPORT} is not text")));
    };
    if text.trim().is_empty() {
        return match path {
            Some((path, Named::Asked)) => from_file(&path),
            // Somebody else's home is none of ours.
            Some((path, Named::Usual)) if std::fs::metadata(&path).is_ok() => from_file(&path),
            _ => Ok(Plan::default()),
        };
    }
    let failed = |error| io::Error::other(format!("{TRANSPORT}: {error}"));
    let hooks = document::parse(text).map_err(failed)?;
    let plan = Plan::new(&hooks).map_err(failed)?;
    let (path, _) = path.ok_or_else(|| {
        io::Error::other(format!("{TRANSPORT} cannot be kept: set HOME or {CONFIG_FILE} to say where"))
    })?;
    keep(&path, &document::to_toml(&hooks).map_err(failed)?)
        .map_err(|error| told(&path, "hooks cannot be kept there", &error))?;
    Ok(plan)
}

/// Who has named the file.
enum Named {
    Asked,
    Usual,
}

fn file(var: &impl Fn(&str) -> Option<OsString>) -> Option<(PathBuf, Named)> {
    let set = |name| var(name).filter(|value| !value.is_empty());
    let usual = || Some((Path::new(&set("HOME")?).join(USUAL_FILE), Named::Usual));
    set(CONFIG_FILE).map(|path| (PathBuf::from(path), Named::Asked)).or_else(usual)
}

fn from_file(path: &Path) -> io::Result<Plan> {
    let mut text = String::new();
    // A pipe in its place must not hold the start up.
    let file = std::fs::File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    match file {
        Ok(file) => {
            if !file.metadata()?.is_file() {
                return Err(told(path, "hooks cannot be read", &"it is no regular file"));
            }
            file.take(LIMIT)
                .read_to_string(&mut text)
                .map_err(|error| told(path, "hooks cannot be read", &error))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Plan::default()),
        Err(error) => return Err(told(path, "hooks cannot be read", &error)),
    }
    let failed = |error: String| told(path, "these are no hooks", &error);
    Plan::new(&document::parse(&text).map_err(failed)?).map_err(failed)
}

fn told(path: &Path, what: &str, error: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("{}: {what}: {error}", path.display()))
}

/// Writes a whole file that only this user reads; a reader sees the old one or the new one.
fn keep(path: &Path, text: &str) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut beside = OsStr::new(".").to_owned();
    beside.push(name);
    beside.push(format!(".{}", crate::random::uuid().simple()));
    let beside = dir.join(beside);
    let written = (|| {
        let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&beside)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
        return written;
    }
    // Some file systems refuse it, and the name is there already.
    let _ = std::fs::File::open(dir).and_then(|dir| dir.sync_all());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn load_with(vars: &[(&str, &str)]) -> io::Result<Plan> {
        load(|name| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into()))
    }

    #[test]
    fn the_variable_is_kept_and_later_read_from_the_file() {
        let home = tempfile::tempdir().unwrap();
        let home_var = ("HOME", home.path().to_str().unwrap());
        assert!(load_with(&[home_var]).unwrap().is_empty());
        let plan = load_with(&[home_var, (TRANSPORT, r#"{"preStart":{"command":["a"]}}"#)]).unwrap();
        assert!(plan.pre_start.is_some());
        let file = home.path().join(USUAL_FILE);
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o600);
        let dir = file.parent().unwrap();
        assert_eq!(std::fs::metadata(dir).unwrap().permissions().mode() & 0o7777, 0o700);
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 1);
        assert_eq!(load_with(&[home_var, (TRANSPORT, "  ")]).unwrap(), plan);
        // Another place wins over the home directory, and a planted link is replaced, not followed.
        let (other, target) = (home.path().join("x/y.toml"), home.path().join("target"));
        std::fs::create_dir(home.path().join("x")).unwrap();
        std::os::unix::fs::symlink(&target, &other).unwrap();
        let other_var = (CONFIG_FILE, other.to_str().unwrap());
        load_with(&[home_var, other_var, (TRANSPORT, "{}")]).unwrap();
        assert!(!target.exists() && load_with(&[home_var, other_var]).unwrap().is_empty());
    }

    #[test]
    fn what_cannot_be_used_is_told() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("f");
        let name = (CONFIG_FILE, file.to_str().unwrap());
        std::fs::write(&file, "periodic = 3").unwrap();
        let error = load_with(&[name]).unwrap_err().to_string();
        assert!(error.contains("no hooks") && error.contains(name.1), "{error}");
        assert!(load_with(&[(CONFIG_FILE, home.path().to_str().unwrap())]).is_err());
        assert!(load_with(&[(TRANSPORT, "{}")]).unwrap_err().to_string().contains("HOME"));
        let error = load_with(&[name, (TRANSPORT, "{\"x\":1}")]).unwrap_err().to_string();
        assert!(error.contains(TRANSPORT) && error.contains('x'), "{error}");
    }
}
