//! The command line, and the environment variables that stand for its flags.

use std::ffi::OsString;
use std::path::PathBuf;

use osb_protocol::boot::LineEndings;
use osb_protocol::execd::EXECD_PORT;

use crate::command::retention::Retention;
use crate::log;

/// How the daemon was called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Args {
    /// As PID 1 of the embedded engine's sandbox: everything else is in the document behind this descriptor.
    Boot(i32),
    /// As an ordinary daemon.
    Plain(Plain),
    /// As the init of a container, with this entrypoint.
    Init(Plain, Vec<OsString>),
    /// Serves files as this user and group, for the daemon that executes it.
    FileWorker(u32, u32),
    /// Makes isolated sessions, for the daemon that executes it.
    Isolator,
    /// Print this and leave.
    Help,
}

/// Settings of an ordinary daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plain {
    /// Where to listen.
    pub listen: Listen,
    /// Value that requests must carry, when set.
    pub access_token: Option<String>,
    /// 0–2 fatal, 3 error, 4 warn, 5–6 info, above debug.
    pub log_level: i64,
    /// Where the log goes: files, `stdout`, `stderr`.
    pub log: Vec<PathBuf>,
    /// How line ends of command output are sent.
    pub line_endings: LineEndings,
    /// What is kept of ended commands.
    pub retention: Retention,
    /// Serve nothing before the control plane has bound the daemon.
    pub runtime_init: bool,
    /// Value that a binding must carry, when set.
    pub runtime_init_token: Option<String>,
    /// File in which a bootstrap script follows the start.
    pub status_file: Option<PathBuf>,
    /// What programs are told that ask for the system call `clone3`.
    pub clone3: Clone3,
    /// File with the settings of isolated sessions.
    pub isolation_config: Option<PathBuf>,
}

/// What programs are told that ask for the system call `clone3`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Clone3 {
    /// What the kernel says.
    #[default]
    AsItIs,
    /// That there is none, so that they take the older one.
    Absent,
    /// The same, from the daemon's first instruction on.
    AbsentFromStart,
}

/// Where an ordinary daemon listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// On this TCP port of all addresses.
    Port(u16),
    /// On this Unix socket.
    Socket(PathBuf),
}

/// Text of `--help`.
pub const HELP: &str = "\
execd: the daemon inside a sandbox

  execd [FLAGS]                    as a daemon beside the container's own program
  execd [FLAGS] --init -- PROGRAM  as the container's first process, which starts PROGRAM and ends with it
  execd bootstrap [-c TEXT | PROGRAM]
                                   as the container's entrypoint, like bootstrap.sh
  execd --boot-fd N                as PID 1 of a sandbox of the embedded engine

Flags, each with the variable that it beats:
  --port 44772 | --socket PATH
  --access-token TOKEN             EXECD_ACCESS_TOKEN; requests must carry it
  --line-endings keep|strip        EXECD_LINE_ENDINGS
  --log-level 6                    0-2 fatal, 3 error, 4 warn, 5-6 info, 7 debug
  --runtime-init                   EXECD_RUNTIME_INIT; serve nothing before POST /internal/init
  --runtime-init-token TOKEN       EXECD_RUNTIME_INIT_TOKEN; that call must carry it
  --lifecycle-startup-status-file PATH
                                   tells a bootstrap script how the preStart hook went
  --isolation-config FILE          EXECD_ISOLATION_CONFIG; settings of isolated sessions
  --jupyter-host URL, --jupyter-token TOKEN
                                   JUPYTER_HOST, JUPYTER_TOKEN
  --command-retention 24h, --command-retention-count 4096, --command-log-bytes 64Mi, --command-logs-bytes 256Mi
                                   EXECD_COMMAND_RETENTION, EXECD_COMMAND_RETENTION_COUNT, EXECD_COMMAND_LOG_BYTES,
                                   EXECD_COMMAND_LOGS_BYTES; what is kept of ended commands: their time and
                                   number, output of each in the background, of all
  --graceful-shutdown-timeout, --jupyter-idle-poll-interval, --operation-capacity
                                   EXECD_API_GRACE_SHUTDOWN, EXECD_JUPYTER_IDLE_POLL_INTERVAL,
                                   EXECD_OPERATION_CAPACITY; checked, without effect

Variables: EXECD_ENVS (file with variables for commands), EXECD_LOG_FILE, OPENSANDBOX_LOG_OUTPUT (where the log goes:
stdout, stderr, files), EXECD_CLONE3_COMPAT, OPENSANDBOX_LIFECYCLE (hooks as JSON), EXECD_LIFECYCLE_CONFIG (file in
which hooks are kept)
";

/// Reads the arguments after the program's name. A flag beats its variable.
///
/// # Errors
/// What is wrong, for people.
pub fn parse(
    args: impl IntoIterator<Item = OsString>,
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<Args, String> {
    let text =
        |name: &str| var(name).and_then(|value| value.into_string().ok()).filter(|text| !text.is_empty());
    let (retention, mistakes) = Retention::from_variables(&var);
    if let Some(mistake) = mistakes.into_iter().next() {
        return Err(mistake);
    }
    let mut plain = Plain {
        listen: Listen::Port(EXECD_PORT),
        access_token: text("EXECD_ACCESS_TOKEN"),
        log_level: 6,
        log: log::places(&var).unwrap_or_else(|| vec!["stdout".into()]),
        line_endings: text("EXECD_LINE_ENDINGS").map_or(Ok(LineEndings::Keep), |text| line_endings(&text))?,
        retention,
        runtime_init: text("EXECD_RUNTIME_INIT")
            .map_or(Ok(false), |text| switch("EXECD_RUNTIME_INIT", &text))?,
        runtime_init_token: text("EXECD_RUNTIME_INIT_TOKEN"),
        status_file: None,
        isolation_config: var(crate::isolated::config::VARIABLE)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from),
        clone3: text("EXECD_CLONE3_COMPAT").map_or(Ok(Clone3::AsItIs), |text| clone3(&text))?,
    };
    let mut jupyter = text("JUPYTER_HOST");
    // Checked though they change nothing: streams end at once, nothing is polled, and nobody counts operations.
    for (name, check) in [
        ("EXECD_API_GRACE_SHUTDOWN", duration as fn(&str, &str) -> Result<(), String>),
        ("EXECD_JUPYTER_IDLE_POLL_INTERVAL", duration),
        ("EXECD_OPERATION_CAPACITY", capacity),
    ] {
        text(name).map_or(Ok(()), |text| check(name, &text))?;
    }
    let mut init = false;
    let mut args = args.into_iter();
    let mut entrypoint = Vec::new();
    while let Some(arg) = args.next() {
        let flag = arg.to_str().and_then(|arg| arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')));
        let Some(flag) = flag.filter(|flag| !flag.is_empty()) else {
            // Two dashes alone, or a word that is no flag: here begins the entrypoint.
            entrypoint.extend(Some(arg).filter(|arg| arg != "--"));
            entrypoint.extend(args.by_ref());
            break;
        };
        let (name, inline) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        match name {
            "help" | "h" => return Ok(Args::Help),
            crate::isolated::isolator::FLAG => return Ok(Args::Isolator),
            "init" => init = inline.map_or(Ok(true), |value| switch("--init", &value))?,
            "runtime-init" => {
                plain.runtime_init = inline.map_or(Ok(true), |value| switch("--runtime-init", &value))?;
            }
            _ => {
                let value = inline.or_else(|| args.next()?.into_string().ok());
                let value = value.ok_or_else(|| format!("--{name} needs a value"))?;
                match name {
                    "boot-fd" => return Ok(Args::Boot(number(name, &value)?)),
                    crate::files::identity::FLAG => {
                        let (uid, gid) =
                            value.split_once(':').ok_or_else(|| format!("--{name} needs UID:GID"))?;
                        return Ok(Args::FileWorker(number(name, uid)?, number(name, gid)?));
                    }
                    "port" => plain.listen = Listen::Port(number(name, &value)?),
                    "socket" => plain.listen = Listen::Socket(value.into()),
                    "access-token" => plain.access_token = Some(value).filter(|token| !token.is_empty()),
                    "log-level" => plain.log_level = number(name, &value)?,
                    "line-endings" => plain.line_endings = line_endings(&value)?,
                    "jupyter-host" => jupyter = Some(value).filter(|host| !host.is_empty()),
                    "jupyter-token" => {}
                    "runtime-init-token" => {
                        plain.runtime_init_token = Some(value).filter(|token| !token.is_empty());
                    }
                    "lifecycle-startup-status-file" => {
                        plain.status_file = Some(value).filter(|path| !path.is_empty()).map(PathBuf::from);
                    }
                    "isolation-config" => {
                        plain.isolation_config =
                            Some(value).filter(|path| !path.is_empty()).map(PathBuf::from);
                    }
                    "graceful-shutdown-timeout" | "jupyter-idle-poll-interval" => {
                        duration(&format!("--{name}"), &value)?;
                    }
                    _ if Retention::FLAGS.contains(&name) => plain.retention.set(name, &value)?,
                    "operation-capacity" => capacity("--operation-capacity", &value)?,
                    _ => return Err(format!("--{name} is not known; see --help")),
                }
            }
        }
    }
    if jupyter.is_some_and(|host| !host.starts_with("http://") && !host.starts_with("https://")) {
        return Err("JUPYTER_HOST must start with http:// or https://".to_owned());
    }
    match (init, entrypoint.first()) {
        (true, None) => Err("--init needs a program: execd --init -- PROGRAM ARGUMENTS".to_owned()),
        (true, Some(_)) => Ok(Args::Init(plain, entrypoint)),
        (false, Some(word)) => Err(format!("{} is not a flag; see --help", word.display())),
        (false, None) => Ok(Args::Plain(plain)),
    }
}

/// Whether the text says yes or no.
pub(crate) fn switch(name: &str, text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "t" | "true" | "yes" | "on" => Ok(true),
        "0" | "f" | "false" | "no" | "off" | "" => Ok(false),
        _ => Err(format!("{name}: {text:?} is neither true nor false")),
    }
}

fn clone3(text: &str) -> Result<Clone3, String> {
    if text.trim().eq_ignore_ascii_case("reexec") {
        return Ok(Clone3::AbsentFromStart);
    }
    match switch("EXECD_CLONE3_COMPAT", text) {
        Ok(true) => Ok(Clone3::Absent),
        Ok(false) => Ok(Clone3::AsItIs),
        Err(_) => Err(format!("EXECD_CLONE3_COMPAT: {text:?} is none of 0, 1 and reexec")),
    }
}

/// A duration in the spelling of Go: `200ms`, `1m30s`, `1.5s`.
fn duration(name: &str, text: &str) -> Result<(), String> {
    let bad = || format!("{name}: {text:?} is not a duration such as 200ms or 1.5s");
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest == "0" {
        return Ok(());
    }
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
        let (number, behind) = rest.split_at(digits);
        number.parse::<f64>().map_err(|_| bad())?;
        let units = ["ns", "us", "µs", "ms", "s", "m", "h"];
        rest = units.iter().find_map(|unit| behind.strip_prefix(unit)).ok_or_else(bad)?;
    }
    Ok(())
}

fn capacity(name: &str, text: &str) -> Result<(), String> {
    match text.trim().parse::<u32>() {
        Ok(1..) => Ok(()),
        _ => Err(format!("{name}: {text:?} is not a positive number")),
    }
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("--{name}: {value:?} is not a number that fits"))
}

fn line_endings(value: &str) -> Result<LineEndings, String> {
    match value {
        "keep" => Ok(LineEndings::Keep),
        "strip" => Ok(LineEndings::Strip),
        _ => Err(format!("line endings are 'keep' or 'strip', not {value:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Args, String> {
        let var = |name: &str| (name == "EXECD_ACCESS_TOKEN").then(|| "from-env".into());
        parse(args.iter().map(OsString::from), var)
    }

    #[test]
    fn flags_beat_variables_and_have_both_spellings() {
        let Ok(Args::Plain(plain)) = parsed(&["-port=1", "--access-token", "t", "--line-endings=strip"])
        else {
            panic!("not plain")
        };
        assert_eq!((plain.listen, plain.access_token.as_deref()), (Listen::Port(1), Some("t")));
        assert_eq!(plain.line_endings, LineEndings::Strip);
        let Ok(Args::Plain(plain)) = parsed(&["--graceful-shutdown-timeout", "1s"]) else {
            panic!("not plain")
        };
        assert_eq!((plain.listen, plain.access_token.as_deref()), (Listen::Port(44772), Some("from-env")));
        assert_eq!(parsed(&["--boot-fd", "9"]), Ok(Args::Boot(9)));
        assert_eq!(parsed(&["--file-worker", "1:4294967294"]), Ok(Args::FileWorker(1, 4_294_967_294)));
    }

    #[test]
    fn mistakes_are_named() {
        for (args, word) in [
            (&["--port", "70000"][..], "70000"),
            (&["--port"], "needs a value"),
            (&["--what"], "--what"),
            (&["--file-worker", "7"], "UID:GID"),
            (&["sleep"], "sleep"),
            (&["--command-log-bytes", "much"], "much"),
            (&["--init"], "needs a program"),
            (&["--init", "--"], "needs a program"),
            (&["--init=maybe", "--", "a"], "maybe"),
            (&["--graceful-shutdown-timeout", "5"], "duration"),
            (&["--graceful-shutdown-timeout", "fast"], "duration"),
            (&["--jupyter-idle-poll-interval", "1.2.3s"], "duration"),
            (&["--operation-capacity", "0"], "positive"),
            (&["--isolation-config"], "needs a value"),
            (&["--jupyter-host", "localhost"], "http://"),
        ] {
            assert!(parsed(args).unwrap_err().contains(word), "{args:?}");
        }
    }

    #[test]
    fn the_entrypoint_begins_where_the_flags_end() {
        for args in [
            &["--init", "--port", "1", "--", "sleep", "--port"][..],
            &["--port=1", "--init=true", "sleep", "--port"],
        ] {
            let Ok(Args::Init(plain, argv)) = parsed(args) else { panic!("{args:?}") };
            assert_eq!((plain.listen, argv), (Listen::Port(1), vec!["sleep".into(), "--port".into()]));
        }
        let Ok(Args::Plain(plain)) = parsed(&["--init=false", "--runtime-init", "--operation-capacity=7"])
        else {
            panic!()
        };
        assert!(plain.runtime_init && plain.runtime_init_token.is_none());
    }

    #[test]
    fn variables_are_checked_and_flags_beat_them() {
        let with = |name: &'static str, value: &'static str, args: &[&str]| {
            parse(args.iter().map(OsString::from), |asked| (asked == name).then(|| value.into()))
        };
        for (name, value) in [
            ("EXECD_RUNTIME_INIT", "perhaps"),
            ("EXECD_CLONE3_COMPAT", "2"),
            ("EXECD_API_GRACE_SHUTDOWN", "200"),
            ("EXECD_JUPYTER_IDLE_POLL_INTERVAL", "x"),
            ("EXECD_OPERATION_CAPACITY", "-1"),
            ("EXECD_LINE_ENDINGS", "cut"),
            ("JUPYTER_HOST", "localhost"),
        ] {
            let error = with(name, value, &[]).unwrap_err();
            assert!(error.contains(value) || name == "JUPYTER_HOST", "{name}: {error}");
        }
        let plain = |result| match result {
            Ok(Args::Plain(plain)) => plain,
            other => panic!("{other:?}"),
        };
        assert!(plain(with("EXECD_RUNTIME_INIT", "Yes", &[])).runtime_init);
        assert!(!plain(with("EXECD_RUNTIME_INIT", "1", &["--runtime-init=false"])).runtime_init);
        for (text, expected) in
            [("on", Clone3::Absent), ("reexec", Clone3::AbsentFromStart), ("off", Clone3::AsItIs)]
        {
            assert_eq!(plain(with("EXECD_CLONE3_COMPAT", text, &[])).clone3, expected);
        }
        assert!(with("EXECD_API_GRACE_SHUTDOWN", "1m30.5s", &[]).is_ok());
    }
}
