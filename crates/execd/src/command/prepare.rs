//! From the request to a program that can be started: shell, environment, user, working directory.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use osb_protocol::execd::CommandRequest;
use rustix::fs::{Access, AtFlags, CWD};

use super::direct::{self, Direct};
use super::envfile;
use crate::accounts::{Accounts, Identity};
use crate::app::App;
use crate::binding::SANDBOX_ID;
use crate::files::path::{Requested, Surroundings};
use crate::http::ApiError;
use crate::log::redact;
use crate::process::spawn::Program;

/// Longest argument that Linux passes on to a program, without the NUL byte at its end.
const LONGEST_ARGUMENT: usize = (128 << 10) - 1;

/// Where programs are looked for when the environment does not say.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Of a command line the log shows no more.
const LONGEST_SHOWN: usize = 2048;

/// A request that keeps the rules which need no look at the system.
#[derive(Debug)]
pub struct Checked {
    what: What,
    cwd: Option<String>,
    envs: BTreeMap<String, String>,
    user: Option<(u32, Option<u32>)>,
    /// Return as soon as the program has started.
    pub background: bool,
    /// Limit of the run.
    pub timeout: Option<Duration>,
}

#[derive(Debug)]
enum What {
    Shell(String),
    Argv(Vec<String>),
}

/// How shell text is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Without the shell where that shows nowhere.
    Shortest,
    /// By the shell.
    Shell,
}

/// A request made ready.
#[derive(Debug)]
pub struct Prepared {
    /// What to start.
    pub program: Program,
    /// It takes the place of a shell, which has to be asked when this cannot be started.
    pub is_direct: bool,
}

impl Checked {
    /// Checks a request.
    ///
    /// # Errors
    /// 400 with the rule it breaks.
    pub fn new(request: CommandRequest) -> Result<Self, ApiError> {
        let what = match (request.command, request.argv) {
            (Some(_), Some(_)) => return Err(ApiError::invalid("give either 'command' or 'argv', not both")),
            (Some(command), None) if !command.trim().is_empty() => What::Shell(command),
            (Some(_), None) => return Err(ApiError::invalid("'command' is blank")),
            (None, Some(argv)) if argv.first().is_some_and(|program| !program.is_empty()) => What::Argv(argv),
            (None, Some(_)) => return Err(ApiError::invalid("'argv' must start with the name of a program")),
            (None, None) => return Err(ApiError::invalid("'command' or 'argv' is required")),
        };
        let texts = match &what {
            What::Shell(command) => std::slice::from_ref(command),
            What::Argv(argv) => argv.as_slice(),
        };
        if texts.iter().any(|text| text.contains('\0')) {
            return Err(ApiError::invalid("a command cannot hold a NUL byte"));
        }
        let envs = request.envs.unwrap_or_default();
        for (name, value) in &envs {
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(ApiError::invalid(format!("'envs': {name:?} cannot be the name of a variable")));
            }
            if value.contains('\0') {
                return Err(ApiError::invalid(format!("'envs': the value of {name:?} holds a NUL byte")));
            }
        }
        let user = match (request.uid, request.gid) {
            (None, None) => None,
            (None, Some(_)) => return Err(ApiError::invalid("'gid' needs 'uid'")),
            (Some(u32::MAX), _) | (_, Some(u32::MAX)) => {
                return Err(ApiError::invalid("4294967295 is nobody's id"));
            }
            (Some(uid), gid) => Some((uid, gid)),
        };
        let timeout = match request.timeout.unwrap_or(0) {
            0 => None,
            millis => Some(Duration::from_millis(
                u64::try_from(millis).map_err(|_| ApiError::invalid("'timeout' must not be negative"))?,
            )),
        };
        let background = request.background.unwrap_or(false);
        Ok(Self { what, cwd: request.cwd, envs, user, background, timeout })
    }

    /// What the status shows: the command's text, or the arguments as JSON.
    #[must_use]
    pub fn content(&self) -> String {
        match &self.what {
            What::Shell(command) => command.clone(),
            // A list of strings always has a JSON form.
            What::Argv(argv) => serde_json::to_string(argv).unwrap_or_default(),
        }
    }

    /// What the log shows: the same without secrets, and no more of it than a line bears.
    #[must_use]
    pub fn shown(&self) -> String {
        match &self.what {
            What::Shell(command) => {
                redact::text(&command[..command.floor_char_boundary(LONGEST_SHOWN)]).into_owned()
            }
            What::Argv(argv) => {
                let mut room = LONGEST_SHOWN;
                let fits = argv.iter().take_while(|word| {
                    let fits = room > 0;
                    room = room.saturating_sub(word.len() + 3);
                    fits
                });
                let cut = |word: &String| word[..word.floor_char_boundary(LONGEST_SHOWN)].to_owned();
                redact::argv(&fits.map(cut).collect::<Vec<_>>())
            }
        }
    }

    /// Looks up all that the start needs. Touches the file system: call it where that may block.
    ///
    /// # Errors
    /// 400 when the working directory is none, 500 when the sandbox's own user is unknown.
    pub fn prepare(&self, app: &App, tag: u64, way: Way) -> Result<Prepared, ApiError> {
        let accounts = app.accounts.get();
        let identity = self.identity(app, &accounts)?;
        let mut env = Env::new(app, &self.envs, &accounts, identity.as_ref());

        let cwd = self.directory(app, &env)?;
        env.0.insert("PWD".into(), cwd.clone().into_os_string());

        let mut is_direct = false;
        let (candidates, argv) = match &self.what {
            What::Shell(command) => {
                let (path, name) = shell(env.path());
                let direct = match way {
                    Way::Shortest => Direct::find(&path, command, &cwd, &mut env),
                    Way::Shell => None,
                };
                is_direct = direct.is_some();
                direct.map_or_else(
                    || (vec![path], script(name, command)),
                    |found| (vec![found.path], found.argv),
                )
            }
            What::Argv(argv) => (candidates(&argv[0], env.path()), argv.clone()),
        };
        let mut env = env.into_strings()?;
        if is_direct {
            direct::order(&mut env);
        }
        let program = Program {
            candidates: candidates
                .into_iter()
                .map(|path| c_string(path.into_os_string()))
                .collect::<Result<_, _>>()?,
            argv: argv.into_iter().map(|arg| c_string(arg.into())).collect::<Result<_, _>>()?,
            env,
            cwd: c_string(cwd.into_os_string())?,
            identity,
            tag: Some(tag),
        };
        Ok(Prepared { program, is_direct })
    }

    fn identity(&self, app: &App, accounts: &Accounts) -> Result<Option<Identity>, ApiError> {
        let Some((uid, gid)) = self.user else { return usual_identity(app, accounts) };
        let mut identity = accounts.identity(uid, gid);
        if let Some(gid) = gid {
            // The named group replaces the primary one only.
            identity.groups.extend(accounts.groups_beside(uid, gid));
        }
        Ok(Some(identity))
    }

    fn directory(&self, app: &App, env: &Env) -> Result<PathBuf, ApiError> {
        let Some(cwd) = self.cwd.as_deref().filter(|cwd| !cwd.is_empty()) else { return Ok(app.cwd.clone()) };
        let path = env.expand(app, cwd)?;
        match std::fs::metadata(&path) {
            Ok(found) if found.is_dir() => Ok(path),
            Ok(_) => Err(ApiError::invalid(format!("'cwd': {} is not a directory", path.display()))),
            Err(error) => Err(ApiError::invalid(format!("'cwd': {}: {error}", path.display()))),
        }
    }
}

/// The user of this sandbox; `None` stays what the daemon is.
pub(crate) fn usual_identity(app: &App, accounts: &Accounts) -> Result<Option<Identity>, ApiError> {
    app.user
        .as_deref()
        .map(|user| accounts.resolve(user))
        .transpose()
        .map_err(|error| ApiError::runtime(format!("the user of this sandbox: {error}")))
}

/// Variables of the sandbox's file of them, in order.
pub(crate) fn file_variables(app: &App) -> Vec<(OsString, OsString)> {
    let binding = app.binding();
    match variables_file(app) {
        Some(path) => envfile::read(path.as_os_str(), |name| binding.var(name)),
        None => Vec::new(),
    }
}

/// The sandbox's file of variables.
pub(crate) fn variables_file(app: &App) -> Option<PathBuf> {
    app.binding().var("EXECD_ENVS").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Environment of the command to be.
pub(crate) struct Env(pub(crate) BTreeMap<OsString, OsString>);

impl Env {
    /// The daemon's environment, the sandbox's file of variables and the request's, later ones first in rank.
    pub(crate) fn new(
        app: &App,
        envs: &BTreeMap<String, String>,
        accounts: &Accounts,
        identity: Option<&Identity>,
    ) -> Self {
        let mut env = Self(BTreeMap::new());
        let binding = app.binding();
        env.0.extend(binding.env.iter().cloned());
        env.0.extend(file_variables(app));
        env.0.extend(envs.iter().map(|(name, value)| (name.into(), value.into())));
        if let (Some(_), Some(id)) = (binding.generation, &binding.sandbox_id) {
            env.0.insert(SANDBOX_ID.into(), id.into());
        }
        env.add_account(accounts, identity);
        env
    }

    /// Expands `~` and `$NAME` in the name of a working directory.
    pub(crate) fn expand(&self, app: &App, cwd: &str) -> Result<PathBuf, ApiError> {
        let place = Place { env: self, cwd: &app.cwd };
        let requested = Requested::new(cwd.as_bytes(), &place)
            .map_err(|error| ApiError::invalid(format!("'cwd': {error}")))?;
        Ok(requested.path)
    }

    pub(crate) fn path(&self) -> &OsStr {
        self.0.get(OsStr::new("PATH")).map_or_else(|| OsStr::new(DEFAULT_PATH), OsString::as_os_str)
    }

    /// Adds what a login would, where it is absent.
    fn add_account(&mut self, accounts: &Accounts, identity: Option<&Identity>) {
        let own;
        let identity = match identity {
            Some(identity) => identity,
            None => {
                own = accounts.identity(rustix::process::geteuid().as_raw(), None);
                &own
            }
        };
        self.0.entry("HOME".into()).or_insert_with(|| identity.home.clone().into());
        if let Some(name) = &identity.name {
            self.0.entry("USER".into()).or_insert_with(|| name.into());
        }
        self.0.entry("PATH".into()).or_insert_with(|| DEFAULT_PATH.into());
    }

    pub(crate) fn into_strings(self) -> Result<Vec<CString>, ApiError> {
        self.0
            .into_iter()
            .map(|(mut name, value)| {
                name.push("=");
                name.push(value);
                c_string(name)
            })
            .collect()
    }
}

/// What a working directory may refer to.
struct Place<'a> {
    env: &'a Env,
    cwd: &'a Path,
}

impl Surroundings for Place<'_> {
    fn var(&self, name: &str) -> Option<OsString> {
        self.env.0.get(OsStr::new(name)).cloned()
    }

    fn home(&self) -> OsString {
        self.var("HOME").unwrap_or_else(|| "/".into())
    }

    fn cwd(&self) -> &Path {
        self.cwd
    }
}

/// Arguments by which the shell `name` runs `command`. One that is too long for an argument goes in pieces, which
/// the shell puts together and takes off its positional parameters again.
pub(crate) fn script(name: &str, command: &str) -> Vec<String> {
    let mut argv = vec![name.to_owned(), "-c".to_owned()];
    if command.len() <= LONGEST_ARGUMENT {
        argv.push(command.to_owned());
        return argv;
    }
    let mut pieces = Vec::new();
    let mut rest = command;
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(rest.floor_char_boundary(LONGEST_ARGUMENT));
        pieces.push(piece.to_owned());
        rest = later;
    }
    let whole: String = (1..=pieces.len()).map(|number| format!("${{{number}}}")).collect();
    argv.extend([format!("eval \"shift $#; {whole}\""), name.to_owned()]);
    argv.extend(pieces);
    argv
}

/// `bash` where the image has it, else `sh`.
pub(crate) fn shell(path: &OsStr) -> (PathBuf, &'static str) {
    let found = |name: &'static str| {
        candidates(name, path)
            .into_iter()
            .find(|candidate| {
                rustix::fs::accessat(CWD, candidate.as_path(), Access::EXEC_OK, AtFlags::EACCESS).is_ok()
            })
            .map(|path| (path, name))
    };
    found("bash").or_else(|| found("sh")).unwrap_or_else(|| ("/bin/sh".into(), "sh"))
}

/// Paths that a program's name may mean. Relative entries of the search path are left out: what runs must not
/// depend on where it runs.
pub(crate) fn candidates(name: &str, path: &OsStr) -> Vec<PathBuf> {
    if name.contains('/') {
        return vec![name.into()];
    }
    std::env::split_paths(path).filter(|dir| dir.is_absolute()).map(|dir| dir.join(name)).collect()
}

pub(crate) fn c_string(text: OsString) -> Result<CString, ApiError> {
    CString::new(text.into_vec()).map_err(|error| {
        let shown = error.into_vec();
        ApiError::invalid(format!("{:?} holds a NUL byte", OsStr::from_bytes(&shown)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str) -> Result<Checked, ApiError> {
        Checked::new(serde_json::from_str(body).unwrap())
    }

    #[test]
    fn requests_that_break_a_rule_are_refused() {
        for bad in [
            "{}",
            r#"{"command":" \n"}"#,
            r#"{"command":"a","argv":["a"]}"#,
            r#"{"argv":[]}"#,
            r#"{"argv":[""]}"#,
            r#"{"command":"a\u0000"}"#,
            r#"{"argv":["a","b\u0000"]}"#,
            r#"{"command":"a","timeout":-1}"#,
            r#"{"command":"a","gid":1}"#,
            r#"{"command":"a","uid":4294967295}"#,
            r#"{"command":"a","envs":{"":"x"}}"#,
            r#"{"command":"a","envs":{"A=B":"x"}}"#,
            r#"{"command":"a","envs":{"A":"\u0000"}}"#,
        ] {
            let error = check(bad).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (400, "INVALID_REQUEST_BODY"), "{bad}");
        }
        let all = check(r#"{"command":"a","timeout":null,"background":false,"cwd":null,"uid":0}"#).unwrap();
        assert_eq!((all.timeout, all.background, all.content()), (None, false, "a".to_owned()));
        assert_eq!(check(r#"{"argv":["a","b c"]}"#).unwrap().content(), r#"["a","b c"]"#);
    }

    #[test]
    fn a_command_longer_than_an_argument_runs_as_it_stands() {
        let text = "ä".repeat(150_000);
        let command =
            format!("x='{text}'\n[ \"$#\" = 0 ] && [ \"$LINENO\" = 2 ] && echo \"${{#x}} $0\"; exit 7");
        for name in ["bash", "sh"] {
            let argv = script(name, &command);
            assert!(argv.len() > 5 && argv.iter().all(|argument| argument.len() <= LONGEST_ARGUMENT));
            let run = std::process::Command::new("bash")
                .env("LC_ALL", "C.UTF-8")
                .args(&argv[1..])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8_lossy(&run.stdout), format!("150000 {name}\n"));
            assert_eq!(run.status.code(), Some(7));
        }
        assert_eq!(script("sh", "echo a"), ["sh", "-c", "echo a"]);
    }

    #[test]
    fn names_are_looked_for_in_absolute_places_only() {
        let paths = |name, path: &str| candidates(name, OsStr::new(path));
        assert_eq!(paths("x", "/a:b::/c"), [Path::new("/a/x"), Path::new("/c/x")]);
        assert_eq!(paths("./x", "/a"), [Path::new("./x")]);
    }
}
