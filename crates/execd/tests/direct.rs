//! Commands that need no shell give what they give by the shell. Both ways lead through the real daemon: as text, which
//! may take the short way, and as `bash -c text`, which cannot.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use common::Daemon;
use serde_json::{Value, json};

/// A program that shows all that it was given.
const SHOW: &str = r#"#!/bin/sh
printf '%s\n' "$0" "$@"
pwd; umask; ulimit -Sa; ulimit -Ha
tr '\0' '\n' </proc/$$/environ | sort
tr '\0' '\n' </proc/$$/cmdline
grep -E '^(Sig|Shd|Cap|Uid|Gid|Groups|NoNewPrivs|Seccomp)' /proc/$$/status | grep -v '^SigQ'
for fd in /proc/$$/fd/*; do printf '%s %s\n' "${fd##*/}" "$(readlink "$fd" | tr -d '[:digit:]')"; done
ps -o pgid=,sid=,tpgid=,ni=,tty= -p $$ | sed "s/\<$$\>/self/g" | tr -s ' '
readlink /proc/$$/exe
cat
"#;

/// Everything that a client sees of a run, without what differs between any two.
fn outcome(daemon: &Daemon, mut body: Value, what: &[(&str, Value)]) -> Value {
    for (name, value) in what {
        body[*name] = value.clone();
    }
    let run = daemon.post(body);
    let events: Vec<Value> = run
        .check()
        .events
        .iter()
        .filter(|event| event["type"] != "ping" && event["type"] != "init")
        .map(|event| {
            let mut event = event.clone();
            let fields = event.as_object_mut().unwrap();
            for varying in ["timestamp", "execution_time", "usage"] {
                fields.remove(varying);
            }
            event
        })
        .collect();
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
    // Between two pipes there is no order to compare.
    json!([of("stdout"), of("stderr"), of("error"), of("execution_complete")])
}

fn compare(daemon: &Daemon, command: &str, what: &[(&str, Value)]) {
    let text = outcome(daemon, json!({ "command": command }), what);
    let shell = outcome(daemon, json!({ "argv": ["bash", "-c", command] }), what);
    assert_eq!(text, shell, "{command:?} with {what:?}");
}

fn program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A directory of programs: good ones, and some that cannot be executed.
fn programs() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let at = |name: &str| directory.path().join(name);
    program(&at("show"), SHOW);
    program(&at("killed"), "#!/bin/sh\nkill -9 $$\n");
    program(&at("exits"), "#!/bin/sh\necho out; echo err >&2; exit 42\n");
    program(&at("no-shebang"), "echo by the shell \"$@\" $0\n");
    program(&at("empty"), "");
    program(&at("no-interpreter"), "#!/no/such/interpreter\n");
    program(&at("binary"), "\x7fELF nonsense");
    program(&at("secret"), "#!/bin/sh\necho secret\n");
    fs::set_permissions(at("secret"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(at("no-mode"), "#!/bin/sh\necho never\n").unwrap();
    fs::create_dir(at("directory")).unwrap();
    symlink("show", at("link")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    symlink("/usr/bin", at("bin")).unwrap();
    // Bash goes on to the next place when the first one's file may not be executed.
    fs::create_dir(at("first")).unwrap();
    fs::write(at("first/show"), "#!/bin/sh\necho never\n").unwrap();
    program(&at("first/env"), "#!/no/such/interpreter\n");
    directory
}

/// A shell that cannot be executed shows who needs it.
#[test]
fn plain_commands_are_executed_without_a_shell() {
    let daemon = Daemon::in_clean_environment();
    let directory = tempfile::tempdir().unwrap();
    let shell = fs::read("/bin/bash").unwrap();
    let at = directory.path().join("bash");
    fs::write(&at, [b"not ", &shell[..]].concat()).unwrap();
    fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
    let envs = json!({ "PATH": format!("{}:/usr/bin:/bin", directory.path().display()) });
    for (command, code) in
        [("true", 255), ("/bin/true", 0), ("false", 255), ("/bin/false", 1), ("env -i A=1", 0), ("ls ~", 255)]
    {
        let run = daemon.post(json!({ "command": command, "envs": envs }));
        let code = if code == 255 { None } else { Some(code) };
        let ended = run.check().last();
        match code {
            Some(0) => assert_eq!(ended["type"], "execution_complete", "{command}"),
            Some(code) => assert_eq!(ended["error"]["evalue"], code.to_string(), "{command}"),
            None => assert!(
                ended["error"]["evalue"].as_str().unwrap().contains("cannot execute"),
                "{command}: {ended}"
            ),
        }
    }
}

#[test]
fn programs_see_the_same_either_way() {
    let daemon = Daemon::in_clean_environment();
    let directory = programs();
    let at = |name: &str| format!("{}/{name}", directory.path().display());
    let path = json!({ "PATH": format!("{}:/usr/bin:/bin", directory.path().display()) });
    for name in [
        "show",
        "killed",
        "exits",
        "no-shebang",
        "empty",
        "no-interpreter",
        "binary",
        "secret",
        "no-mode",
        "directory",
        "link",
        "dangling",
        "absent",
        "bin/true",
        "exits/",
    ] {
        let user = [json!(null), json!(65534)];
        for uid in user {
            compare(&daemon, &at(name), &[("uid", uid.clone())]);
            compare(&daemon, &format!(" {} a=b --c=d,e x:y@z  +1 %2 ", at(name)), &[("uid", uid.clone())]);
            compare(&daemon, name, &[("envs", path.clone()), ("uid", uid.clone())]);
            compare(&daemon, &format!("{name}\t-a\tb"), &[("envs", path.clone()), ("uid", uid)]);
        }
    }
    let both = format!("{}:{}:/usr/bin:/bin", at("first"), directory.path().display());
    for name in ["show", "env"] {
        compare(&daemon, name, &[("envs", json!({ "PATH": both }))]);
    }
    for cwd in ["/usr", "/bin", "/usr/../tmp", "/tmp/", &at("bin"), &at("bin/../bin")] {
        compare(&daemon, &at("show"), &[("cwd", json!(cwd))]);
        compare(&daemon, "env", &[("cwd", json!(cwd))]);
    }
    for relative in ["./show", "directory/../show", "show", "../show"] {
        compare(&daemon, relative, &[("cwd", json!(directory.path()))]);
        let envs = json!({ "PATH": ".:/usr/bin:/bin" });
        compare(&daemon, relative, &[("cwd", json!(directory.path())), ("envs", envs)]);
    }
}

#[test]
fn variables_of_the_shell_have_their_effect_either_way() {
    let daemon = Daemon::in_clean_environment();
    let directory = programs();
    let show = format!("{}/show", directory.path().display());
    let start = directory.path().join("start");
    fs::write(&start, "echo started; export ADDED=1; alias env='echo aliased'; shopt -s expand_aliases\n")
        .unwrap();
    let known = std::process::Command::new("bash").args(["-c", "compgen -v"]).output().unwrap();
    let known = String::from_utf8(known.stdout).unwrap();
    let more = "BASH_COMPAT BASH_XTRACEFD BASH_LOADABLES_PATH POSIXLY_CORRECT POSIX_PEDANTIC ENV CDPATH CHILD_MAX COLUMNS \
                COMPREPLY COPROC EMACS EXECIGNORE FCEDIT FIGNORE FUNCNEST GLOBIGNORE GLOBSORT HISTCONTROL HISTFILE \
                HISTFILESIZE HISTIGNORE HISTSIZE HISTTIMEFORMAT HOME HOSTFILE HOSTNAME IGNOREEOF INPUTRC INSIDE_EMACS \
                LANG LANGUAGE LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_NUMERIC LC_TIME LINES MAIL MAILCHECK MAILPATH \
                MAPFILE OLDPWD OPTARG PROMPT_COMMAND PROMPT_DIRTRIM PS0 PS1 PS2 PS3 PS4 PWD READLINE_ARGUMENT \
                READLINE_LINE REPLY SHELL SSH_CLIENT SSH2_CLIENT TERM TEXTDOMAIN TEXTDOMAINDIR TIMEFORMAT TMOUT TMPDIR \
                TZ USER auto_resume histchars _ A a1 x.y x-y 1x BASH_FUNC_env%% BASH_FUNC_other%%";
    let values = [
        "",
        "0",
        "7",
        "999",
        "1000",
        "-1",
        "007",
        "C",
        "xx_YY.UTF-8",
        "/tmp",
        "() {  echo f\n}",
        "*",
        "a b",
        "xtrace",
    ];
    let mut count = 0;
    for name in known.lines().chain(more.split_whitespace()) {
        // A search path that names nothing leaves no shell to compare with, and the shell's own clocks and numbers
        // differ between any two runs.
        if ["PATH", "EPOCHREALTIME", "EPOCHSECONDS", "SECONDS", "RANDOM", "SRANDOM", "BASHPID"]
            .contains(&name)
        {
            continue;
        }
        for value in values {
            count += 1;
            // Two values each, turning round, so that every pair comes up over the names.
            if count % 7 > 1 {
                continue;
            }
            compare(&daemon, "env", &[("envs", json!({ name: value }))]);
        }
    }
    for envs in [
        json!({ "BASH_ENV": start }),
        json!({ "ENV": start, "POSIXLY_CORRECT": "1" }),
        json!({ "BASH_FUNC_env%%": "() {  echo \"a function $*\"\n}" }),
        json!({ "BASH_FUNC_command_not_found_handle%%": "() {  echo \"handled $*\"; return 5\n}" }),
        json!({ "SHLVL": "5", "OLDPWD": "/usr", "IFS": ",", "LC_ALL": "C" }),
    ] {
        for command in ["env", &show, "no-such-program a b", "/no/such"] {
            compare(&daemon, command, &[("envs", envs.clone())]);
        }
    }
}

/// Numbers as they come, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

#[test]
fn random_commands_end_the_same_either_way() {
    let daemon = Daemon::in_clean_environment();
    let directory = programs();
    let own = |name: &str| format!("{}/{name}", directory.path().display());
    let mut words: Vec<String> = [
        "env",
        "true",
        "false",
        "/bin/true",
        "/bin/echo",
        "echo",
        "printf",
        "%s",
        "ls",
        "-d",
        "/",
        "/usr",
        "pwd",
        "A=1",
        "test",
        "[",
        "]",
        "cat",
        "head",
        "-c1",
        "seq",
        "3",
        "id",
        "-u",
        "nope",
        "/nope",
        "x",
        "'x y'",
        "\"$HOME\"",
        "*",
        "?",
        "[a]",
        "~",
        "#x",
        "{a,b}",
        "!",
        ";",
        "&&",
        "||",
        ">/dev/null",
        "2>&1",
        "<",
        "time",
        "if",
        "then",
        "fi",
        "exit",
        "cd",
        "%1",
        "-",
        "--",
        "+x",
        "@",
        ":",
        ".",
        "..",
        "a:b",
        "a,b",
        "a=b",
        "=",
        "\\",
        "\n",
        "\t",
        "`id`",
        "$(id)",
        "$$x",
        "ä",
        "\u{a0}",
        "\u{1}",
        "sh",
        "bash",
        "-c",
        "expr",
        "1",
        "+",
        "basename",
        "a/b",
        "dirname",
        "uname",
        "sort",
        "wc",
        "-l",
        "stat",
        "-L",
        "-c",
        "%F",
        "readlink",
        "-f",
    ]
    .map(str::to_owned)
    .to_vec();
    words.extend(["exits", "no-shebang", "no-interpreter", "no-mode", "directory"].map(own));
    let rounds = std::env::var("DIRECT_ROUNDS").map_or(600, |text| text.parse().unwrap());
    let mut numbers = Numbers(7);
    for _ in 0..rounds {
        let length = 1 + numbers.below(4);
        let command: Vec<&str> = (0..length).map(|_| words[numbers.below(words.len())].as_str()).collect();
        let command = command.join([" ", "  ", "\t", ""][numbers.below(4).min(numbers.below(4))]);
        // Numbers of processes and times differ between any two runs.
        if command.trim().is_empty() || command.contains("$$") || command.contains("time") {
            continue;
        }
        compare(&daemon, &command, &[("cwd", json!(directory.path())), ("timeout", json!(20_000))]);
    }
}
