//! The entrypoint of a container, in the place of the script `bootstrap.sh`: `execd bootstrap`, or this program under
//! the name `bootstrap` or `bootstrap.sh`.
//!
//! It prepares what programs expect and starts daemon and command: in its own place when the daemon is to be the
//! first process (`EXECD_INIT`), beside each other otherwise ([`classic`]). Preparations are done as well as they
//! can be; a warning tells what could not.

mod ca;
mod classic;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::args::switch;
use crate::command::prepare::{DEFAULT_PATH, shell};
use crate::{process, start};

/// Word that asks for this part.
const ROLE: &str = "bootstrap";
/// Where images have the daemon.
const EXECD: &str = "/opt/opensandbox/execd";
/// Where variables are kept for commands when nothing is said.
const ENVS: &str = "/opt/opensandbox/.env";
/// Set by ourselves for the program that follows the sourced script.
const SOURCED: &str = "_EXECD_BOOTSTRAP_SOURCED";

/// The arguments behind the role, when this program was called for it.
#[must_use]
pub fn arguments(mut args: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let name = args.next()?;
    let called =
        Path::new(&name).file_name().is_some_and(|name| name == "bootstrap" || name == "bootstrap.sh");
    let mut rest: Vec<OsString> = args.collect();
    if !called {
        if rest.first().is_none_or(|word| word != ROLE) {
            return None;
        }
        rest.remove(0);
    }
    if rest.first().is_some_and(|word| word == "--") {
        rest.remove(0);
    }
    Some(rest)
}

/// Does the work of the script. Returns only when nothing could be started, or with the command's status.
///
/// # Errors
/// Nothing could be started.
pub fn run(args: Vec<OsString>) -> io::Result<ExitCode> {
    process::inherited::reserve_standard()?;
    let sourced = std::env::var_os(SOURCED).is_some();
    let mut changes: Vec<(OsString, OsString)> = Vec::new();
    if !sourced {
        if is_on("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT") {
            match ca::trust()? {
                ca::Waited::Stopped => return Ok(ExitCode::SUCCESS),
                ca::Waited::Done(variables) => changes.extend(variables),
            }
        }
        let envs = set("EXECD_ENVS").unwrap_or_else(|| ENVS.into());
        keep_variables(Path::new(&envs));
        changes.push(("EXECD_ENVS".into(), envs));
        if let Some(script) = set("EXECD_BOOTSTRAP_PRE_SCRIPT") {
            source(&script, &args, &changes);
        }
    }
    let execd = set("EXECD").map_or_else(|| PathBuf::from(EXECD), PathBuf::from);
    // An image that has only us has the daemon too.
    let execd = if set("EXECD").is_none() && !execd.exists() { std::env::current_exe()? } else { execd };
    let argv = command(args);
    let mut daemon = Command::new(&execd);
    daemon.envs(changes.iter().cloned()).env_remove(SOURCED);
    if is_on("EXECD_INIT") {
        let error = daemon.arg("--init").arg("--").args(argv).exec();
        return Err(io::Error::new(error.kind(), format!("{}: {error}", execd.display())));
    }
    classic::run(daemon, &execd, argv, &changes)
}

/// A variable that is not empty.
fn set(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn is_on(name: &str) -> bool {
    set(name).is_some_and(|text| switch(name, &text.to_string_lossy()).unwrap_or(false))
}

fn warn(text: std::fmt::Arguments<'_>) {
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(io::stderr(), "bootstrap: {text}");
}

/// Makes the file to which clients append variables.
fn keep_variables(file: &Path) {
    let made = file
        .parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::File::options().append(true).create(true).open(file));
    if let Err(error) = made {
        warn(format_args!("EXECD_ENVS: {}: {error}", file.display()));
    }
}

/// Has a shell read the script and then go on with us, so that what the script exports counts. Returns when that
/// cannot be done.
fn source(script: &OsStr, args: &[OsString], changes: &[(OsString, OsString)]) {
    let path = Path::new(script);
    if let Err(error) = std::fs::File::open(path) {
        return warn(format_args!("EXECD_BOOTSTRAP_PRE_SCRIPT: {}: {error}", path.display()));
    }
    // Without a slash the shell would look for it in `PATH`.
    let literal =
        if script.as_encoded_bytes().contains(&b'/') { path.into() } else { Path::new(".").join(path) };
    let Ok(itself) = std::env::current_exe() else {
        return warn(format_args!("EXECD_BOOTSTRAP_PRE_SCRIPT: /proc is not there"));
    };
    let search = std::env::var_os("PATH");
    let (shell, _) = shell(search.as_deref().unwrap_or_else(|| OsStr::new(DEFAULT_PATH)));
    let error = Command::new(&shell)
        .arg("-c")
        .arg("__script=$1; __execd=$2; shift 2; . \"$__script\"; unset __script; exec \"$__execd\" bootstrap -- \"$@\"")
        .arg("bootstrap")
        .arg(literal)
        .arg(itself)
        .args(args)
        .envs(changes.iter().cloned())
        .env(SOURCED, "1")
        .exec();
    warn(format_args!("EXECD_BOOTSTRAP_PRE_SCRIPT: {}: {error}", shell.display()));
}

/// Program and arguments of the user's command.
fn command(mut args: Vec<OsString>) -> Vec<OsString> {
    let text = match set("BOOTSTRAP_CMD") {
        Some(text) => Some(text),
        None if args.first().is_some_and(|word| word == "-c") => {
            args.remove(0);
            Some(std::mem::take(&mut args).join(OsStr::new(" ")))
        }
        None => None,
    };
    if text.is_none() && !args.is_empty() {
        return args;
    }
    let shell = set("BOOTSTRAP_SHELL").unwrap_or_else(|| {
        let search = std::env::var_os("PATH");
        shell(search.as_deref().unwrap_or_else(|| OsStr::new(DEFAULT_PATH))).0.into()
    });
    match text.filter(|text| !text.is_empty()) {
        Some(text) => vec![shell, "-c".into(), text],
        None => vec![shell],
    }
}

/// Signals that end the container.
fn stopping() -> io::Result<std::os::fd::OwnedFd> {
    start::signal_descriptor(&[libc::SIGTERM, libc::SIGINT, libc::SIGCHLD])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_role_is_a_name_or_a_word() {
        let called = |words: &[&str]| arguments(words.iter().map(OsString::from));
        let words = |words: &[&str]| Some(words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(called(&["/opt/opensandbox/bootstrap.sh", "a", "--", "b"]), words(&["a", "--", "b"]));
        assert_eq!(called(&["bootstrap", "--", "a"]), words(&["a"]));
        assert_eq!(called(&["execd", "bootstrap", "-c", "x y"]), words(&["-c", "x y"]));
        assert_eq!(called(&["execd", "bootstrap"]), words(&[]));
        assert_eq!(called(&["execd", "--init", "--", "bootstrap"]), None);
        assert_eq!(called(&["execd"]), None);
    }
}
