//! Commands for which a shell would do nothing but execute a program.
//!
//! Starting `bash` takes longer than most small programs run. A text of plain words whose first one is neither
//! builtin nor keyword makes `bash -c` look the program up, change three variables and execute it in its own place.
//! That is done here instead, where nothing could show the difference. In every doubt the shell runs: about the text,
//! about a variable to which the shell pays attention, about the shell itself, and whenever the exec fails, because
//! the words for that are the shell's.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Access, AtFlags, CWD};

use super::prepare::Env;
use crate::file_key::FileKey;

/// Longer texts are not worth looking at.
const LONGEST: usize = 4096;
/// Highest shell level that is passed on without a warning.
const HIGHEST_LEVEL: u32 = 998;

/// A program to be executed in the shell's place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Direct {
    /// Where it lies.
    pub(crate) path: PathBuf,
    /// The words of the command.
    pub(crate) argv: Vec<String>,
}

impl Direct {
    /// What `shell -c command` would execute in its own place, if that is all it would do. Changes the environment as
    /// the shell would.
    pub(crate) fn find(shell: &Path, command: &str, cwd: &Path, env: &mut Env) -> Option<Self> {
        let argv = words(command)?;
        if !is_plain_directory(cwd) || !env.0.iter().all(|(name, value)| passes_unchanged(name, value)) {
            return None;
        }
        let level = level(env.0.get(OsStr::new("SHLVL")))?;
        let path = look_up(&argv[0], env.path())?;
        if !is_known(shell) {
            return None;
        }
        env.0.insert("SHLVL".into(), level);
        env.0.insert("_".into(), path.clone().into());
        Some(Self { path, argv })
    }
}

/// Puts variables, `NAME=value` each, into the order in which bash hands them on: that of its table of variables.
/// Nobody should care, but programs show it.
pub(crate) fn order(variables: &mut [CString]) {
    const BUCKETS: u32 = 1024;
    // They come sorted by name; what is put into a full place of the table later stands before what was there.
    variables.reverse();
    variables.sort_by_cached_key(|variable| {
        let name = variable.to_bytes().split(|&byte| byte == b'=').next().unwrap_or_default();
        let hash = name
            .iter()
            .fold(2_166_136_261_u32, |hash, &byte| hash.wrapping_mul(16_777_619) ^ u32::from(byte));
        (name == b"_", hash % BUCKETS)
    });
}

/// The words of a command that consists of nothing else; `None` where the shell would do more than split them.
fn words(command: &str) -> Option<Vec<String>> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b" \t_./:,@%+=-".contains(&byte);
    if command.len() > LONGEST || !command.bytes().all(plain) {
        return None;
    }
    let words: Vec<String> = command.split_ascii_whitespace().map(str::to_owned).collect();
    let first = words.first()?;
    // An assignment, a job, or a name that no program should have.
    let odd = first.contains('=') || first.starts_with(['%', '-', '+']);
    (!odd && !is_reserved(first)).then_some(words)
}

/// Whether bash knows a word itself.
fn is_reserved(word: &str) -> bool {
    const RESERVED: &[&str] = &[
        ".",
        ":",
        "alias",
        "bg",
        "bind",
        "break",
        "builtin",
        "caller",
        "case",
        "cd",
        "command",
        "compgen",
        "complete",
        "compopt",
        "continue",
        "coproc",
        "declare",
        "dirs",
        "disown",
        "do",
        "done",
        "echo",
        "elif",
        "else",
        "enable",
        "esac",
        "eval",
        "exec",
        "exit",
        "export",
        "false",
        "fc",
        "fg",
        "fi",
        "for",
        "function",
        "getopts",
        "hash",
        "help",
        "history",
        "if",
        "in",
        "jobs",
        "kill",
        "let",
        "local",
        "logout",
        "mapfile",
        "popd",
        "printf",
        "pushd",
        "pwd",
        "read",
        "readarray",
        "readonly",
        "return",
        "select",
        "set",
        "shift",
        "shopt",
        "source",
        "suspend",
        "test",
        "then",
        "time",
        "times",
        "trap",
        "true",
        "type",
        "typeset",
        "ulimit",
        "umask",
        "unalias",
        "unset",
        "until",
        "wait",
        "while",
    ];
    RESERVED.binary_search(&word).is_ok()
}

/// Whether bash passes a variable on as it came and lets nothing depend on it. Exported functions have names that
/// are none.
fn passes_unchanged(name: &OsStr, value: &OsStr) -> bool {
    const HEEDED: &[&str] = &[
        "CHILD_MAX",
        "COMP_WORDBREAKS",
        "COPROC",
        "DIRSTACK",
        "ENV",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "EUID",
        "EXECIGNORE",
        "FUNCNAME",
        "GLOBIGNORE",
        "GROUPS",
        "HISTCMD",
        "IFS",
        "LINENO",
        "MAILCHECK",
        "OLDPWD",
        "OPTARG",
        "OPTERR",
        "OPTIND",
        "PIPESTATUS",
        "PPID",
        "PS0",
        "PS1",
        "PS2",
        "PS4",
        "RANDOM",
        "SECONDS",
        "SHELLOPTS",
        "SRANDOM",
        "SSH2_CLIENT",
        "SSH_CLIENT",
        "UID",
        "_",
    ];
    let Some(name) = name.to_str() else { return false };
    let mut letters = name.bytes();
    let is_name = letters.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && letters.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let heeded = name.starts_with("BASH")
        || name.starts_with("POSIX")
        || name.starts_with("READLINE_")
        // One that is unknown makes the shell warn.
        || (name.starts_with("LC_") && value != "C" && value != "POSIX")
        || HEEDED.binary_search(&name).is_ok();
    is_name && !heeded
}

/// The level that a shell hands on to what it executes in its own place; `None` where it would say something.
fn level(before: Option<&OsString>) -> Option<OsString> {
    let Some(before) = before else { return Some("0".into()) };
    let number: u32 = before.to_str()?.parse().ok()?;
    let canonical = number.to_string();
    (number <= HIGHEST_LEVEL && before == canonical.as_str()).then(|| canonical.into())
}

/// Whether the shell takes the name of its working directory as it stands.
fn is_plain_directory(path: &Path) -> bool {
    let Some(text) = path.to_str() else { return false };
    text == "/"
        || (text.starts_with('/') && text[1..].split('/').all(|part| !matches!(part, "" | "." | "..")))
}

/// The file that a word means; `None` where the shell has to decide.
fn look_up(word: &str, search: &OsStr) -> Option<PathBuf> {
    let executable = |path: &Path| {
        rustix::fs::accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS).is_ok()
            && std::fs::metadata(path).is_ok_and(|found| found.is_file())
    };
    if word.contains('/') {
        return Some(PathBuf::from(word)).filter(|path| path.is_absolute() && executable(path));
    }
    for place in search.to_str()?.split(':') {
        // Places relative to the working directory, and names that would be shortened.
        if !place.starts_with('/') || place.ends_with('/') {
            return None;
        }
        let path = Path::new(place).join(word);
        if executable(&path) {
            return Some(path);
        }
    }
    None
}

/// Whether this file is a bash of a version that is known to behave as described above.
fn is_known(shell: &Path) -> bool {
    static LAST: Mutex<Option<(PathBuf, FileKey, bool)>> = Mutex::new(None);
    if shell.file_name() != Some(OsStr::new("bash")) {
        return false;
    }
    let Some(key) = FileKey::of(shell) else { return false };
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((path, known, verdict)) = &*last
        && *known == key
        && path == shell
    {
        return *verdict;
    }
    let verdict = names_known_version(shell).unwrap_or(false);
    *last = Some((shell.to_owned(), key, verdict));
    verdict
}

/// Looks for the words by which a bash tells its version.
fn names_known_version(shell: &Path) -> std::io::Result<bool> {
    const WORDS: &[u8] = b"@(#)Bash version 5.";
    const MINORS: &[u8] = b"123";
    const PIECE: usize = 64 << 10;
    let mut file = File::open(shell)?;
    let mut buffer = vec![0; WORDS.len() + 1 + PIECE];
    let mut kept = 0;
    loop {
        let read = file.read(&mut buffer[kept..])?;
        if read == 0 {
            return Ok(false);
        }
        let length = kept + read;
        if let Some(at) = memchr::memmem::find(&buffer[..length], WORDS)
            && let Some(minor) = buffer[..length].get(at + WORDS.len())
        {
            return Ok(MINORS.contains(minor));
        }
        kept = length.min(WORDS.len());
        buffer.copy_within(length - kept..length, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn found(command: &str, variables: &[(&str, &str)]) -> Option<(Direct, Env)> {
        let mut env: BTreeMap<OsString, OsString> = BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into())]);
        env.extend(variables.iter().map(|&(name, value)| (name.into(), value.into())));
        let mut env = Env(env);
        let shell = super::super::prepare::shell(OsStr::new("/usr/bin:/bin")).0;
        Direct::find(&shell, command, Path::new("/tmp"), &mut env).map(|direct| (direct, env))
    }

    #[test]
    fn plain_commands_need_no_shell() {
        for (command, path, argv) in [
            ("/bin/true", "/bin/true", vec!["/bin/true"]),
            (" env\t-i  A=1 ", "/usr/bin/env", vec!["env", "-i", "A=1"]),
            ("ls --sort=size /usr/lib,x@y:z+%", "/usr/bin/ls", vec!["ls", "--sort=size", "/usr/lib,x@y:z+%"]),
        ] {
            let (direct, env) =
                found(command, &[("LC_ALL", "C"), ("SHLVL", "7"), ("HOME", "/root")]).unwrap();
            assert_eq!(
                (direct.path.as_path(), direct.argv),
                (Path::new(path), argv.iter().map(ToString::to_string).collect())
            );
            assert_eq!((&env.0[OsStr::new("SHLVL")], &env.0[OsStr::new("_")]), (&"7".into(), &path.into()));
        }
        assert_eq!(found("env", &[]).unwrap().1.0[OsStr::new("SHLVL")], "0");
    }

    #[test]
    fn in_doubt_the_shell_runs() {
        for command in [
            "",
            " ",
            "true",
            "cd /",
            "[ a ]",
            "time ls",
            "ls;",
            "ls | cat",
            "ls\n",
            "ls &",
            "ls >x",
            "'ls'",
            "\"ls\"",
            "l\\s",
            "$x",
            "ls *",
            "ls ?",
            "ls [a]",
            "ls {a,b}",
            "ls ~",
            "A=1 ls",
            "A=1",
            "%1",
            "-x",
            "! ls",
            "#ls",
            "ls `a`",
            "ls \u{e4}",
            "ls\u{a0}a",
            "no-such-program",
            "/no/such",
            "/usr",
            "bin/true",
            "./true",
            "ls ^a",
            "if",
            "done",
            "}",
            "function",
        ] {
            assert!(found(command, &[]).is_none(), "{command}");
        }
        assert!(found(&"ls ".repeat(5000), &[]).is_none());
        for (name, value) in [
            ("BASH_ENV", "/x"),
            ("BASH_FUNC_ls%%", "() { :; }"),
            ("LC_ALL", "xx"),
            ("LC_CTYPE", "C.UTF-8"),
            ("IFS", "x"),
            ("OLDPWD", "/"),
            ("SHLVL", "999"),
            ("SHLVL", "007"),
            ("SHLVL", "-1"),
            ("SHLVL", "x"),
            ("POSIXLY_CORRECT", ""),
            ("a-b", "1"),
            ("1", "1"),
            ("PATH", "bin:/usr/bin"),
            ("PATH", ":/usr/bin"),
            ("PATH", "~/bin:/usr/bin"),
            ("PATH", "/usr/bin/"),
            ("PATH", ""),
            ("SSH_CLIENT", "x"),
            ("SHELLOPTS", "xtrace"),
            ("PS4", "x"),
        ] {
            assert!(found("env", &[(name, value)]).is_none(), "{name}={value}");
        }
        // Behind the hit nobody looks.
        assert!(found("env", &[("PATH", "/usr/bin:bin")]).is_some());
        let mut env = Env(BTreeMap::from([("PATH".into(), "/usr/bin".into())]));
        for (shell, cwd) in
            [("/bin/sh", "/"), ("/bin/true", "/"), ("/bin/bash", "/tmp/"), ("/bin/bash", "/usr/../tmp")]
        {
            assert_eq!(
                Direct::find(Path::new(shell), "env", Path::new(cwd), &mut env),
                None,
                "{shell} {cwd}"
            );
        }
    }

    #[test]
    fn the_lists_are_in_order() {
        // What bash itself says it knows is a subset of ours.
        let told =
            std::process::Command::new("bash").args(["-c", "compgen -b; compgen -k"]).output().unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        for word in told
            .lines()
            .filter(|word| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:".contains(&byte)))
        {
            assert!(is_reserved(word), "{word}");
        }
        assert!(told.lines().count() > 50);
        assert!(!passes_unchanged(OsStr::new("_"), OsStr::new("")));
        assert!(
            !passes_unchanged(OsStr::new("UID"), OsStr::new(""))
                && !passes_unchanged(OsStr::new("CHILD_MAX"), OsStr::new(""))
        );
        assert!(passes_unchanged(OsStr::new("HOME"), OsStr::new("")));
    }

    #[test]
    fn a_program_called_bash_is_not_taken_for_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bash");
        std::fs::write(&path, "#!/bin/sh\nexec /bin/bash \"$@\"\n").unwrap();
        assert!(!is_known(&path));
        std::fs::write(&path, [&[b'x'; (64 << 10) + 10][..], b"@(#)Bash version 5.2.15(1) release"].concat())
            .unwrap();
        assert!(is_known(&path), "found across two pieces");
        std::fs::write(&path, b"@(#)Bash version 5.0.1(1) release").unwrap();
        assert!(!is_known(&path));
        assert!(!is_known(&directory.path().join("absent/bash")));
    }
}
