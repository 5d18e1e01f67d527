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
    /// Serves files as this user and group, for the daemon that executes it.
    FileWorker(u32, u32),
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

  execd [--port 44772 | --socket PATH] [--access-token TOKEN] [--log-level 6] [--line-endings keep|strip]
        [--command-retention 24h] [--command-retention-count 4096]
        [--command-log-bytes 64Mi] [--command-logs-bytes 256Mi]
  execd --boot-fd N        as PID 1 of a sandbox of the embedded engine

The last four bound what is kept of ended commands: their time and number, output of each in the background, of all.

Environment: EXECD_ACCESS_TOKEN, EXECD_LINE_ENDINGS, EXECD_ENVS (file with variables for commands),
EXECD_LOG_FILE, OPENSANDBOX_LOG_OUTPUT (where the log goes: stdout, stderr, files),
EXECD_COMMAND_RETENTION, EXECD_COMMAND_RETENTION_COUNT, EXECD_COMMAND_LOG_BYTES, EXECD_COMMAND_LOGS_BYTES
";

/// Flags of the protocol that take a value and have no effect on what this daemon does: streams end at once, so
/// there is no time to hold them, and nothing is polled.
const WITHOUT_EFFECT: [&str; 3] =
    ["graceful-shutdown-timeout", "jupyter-idle-poll-interval", "operation-capacity"];
/// Flags of parts that this daemon does not have: it must not look as if it had them.
const NOT_OFFERED: [&str; 4] = ["init", "runtime-init", "isolation-config", "lifecycle-startup-status-file"];

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
    };
    let mut jupyter = text("JUPYTER_HOST");
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let arg = arg.into_string().map_err(|arg| format!("{} is not text", arg.display()))?;
        let Some(flag) = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')) else {
            return Err(format!("{arg:?} is not a flag; see --help"));
        };
        let (name, inline) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        if NOT_OFFERED.contains(&name) {
            return Err(format!("--{name} is not offered by this build of execd; start it without the flag"));
        }
        if matches!(name, "help" | "h") {
            return Ok(Args::Help);
        }
        let mut value = || {
            inline
                .clone()
                .or_else(|| args.next()?.into_string().ok())
                .ok_or_else(|| format!("--{name} needs a value"))
        };
        match name {
            "boot-fd" => return Ok(Args::Boot(number(name, &value()?)?)),
            crate::files::identity::FLAG => {
                let ids = value()?;
                let (uid, gid) = ids.split_once(':').ok_or_else(|| format!("--{name} needs UID:GID"))?;
                return Ok(Args::FileWorker(number(name, uid)?, number(name, gid)?));
            }
            "port" => plain.listen = Listen::Port(number(name, &value()?)?),
            "socket" => plain.listen = Listen::Socket(value()?.into()),
            "access-token" => plain.access_token = Some(value()?).filter(|token| !token.is_empty()),
            "log-level" => plain.log_level = number(name, &value()?)?,
            "line-endings" => plain.line_endings = line_endings(&value()?)?,
            "jupyter-host" => jupyter = Some(value()?).filter(|host| !host.is_empty()),
            "jupyter-token" => drop(value()?),
            _ if Retention::FLAGS.contains(&name) => plain.retention.set(name, &value()?)?,
            _ if WITHOUT_EFFECT.contains(&name) => drop(value()?),
            _ => return Err(format!("--{name} is not known; see --help")),
        }
    }
    if jupyter.is_some_and(|host| !host.starts_with("http://") && !host.starts_with("https://")) {
        return Err("JUPYTER_HOST must start with http:// or https://".to_owned());
    }
    Ok(Args::Plain(plain))
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
            (&["--init", "--", "sleep"], "--init"),
            (&["--command-log-bytes", "much"], "much"),
            (&["--jupyter-host", "localhost"], "http://"),
        ] {
            assert!(parsed(args).unwrap_err().contains(word), "{args:?}");
        }
    }
}
