//! Sessions: what is kept from run to run, and how each run ends.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod shells;

use std::time::{Duration, Instant};

use serde_json::json;
use shells::{Host, gone, processes};

#[test]
fn state_is_kept_from_run_to_run() {
    let host = Host::start();
    let session = host.open();
    assert_eq!(
        session.run("export A='x y'; B=2; f() { echo \"f $1\"; }; cd /usr/share; umask 027; arr=(1 '2 3')"),
        (String::new(), 0)
    );
    assert_eq!(
        session.out("echo \"$A $B ${arr[1]}\"; f 1; pwd; umask"),
        "x y 2 2 3\nf 1\n/usr/share\n0027\n"
    );
    assert_eq!(session.out("sh -c 'echo $A'"), "x y\n");
    session.out("shopt -s expand_aliases; alias hi='echo hi there'; set -- a b");
    assert_eq!(session.out("hi; echo $# $2"), "hi there\n2 b\n");
    assert_eq!(session.out("exec 3</etc/passwd; exec 200>/dev/null"), "");
    assert_eq!(session.out("read -u 3 line; echo \"${line%%:*}\"; exec 3<&-; echo >&200"), "root\n");
    assert_eq!(session.out("sleep 1 & echo started"), "started\n");
    assert_eq!(session.out("wait $!; echo $?"), "0\n");
    assert_eq!(session.delete(), 200);
}

#[test]
fn exit_codes_are_those_of_bash() {
    let host = Host::start();
    let session = host.open();
    for (command, code) in [
        ("true", 0),
        ("false", 1),
        ("(exit 42)", 42),
        ("no-such-program", 127),
        ("sh -c 'kill -9 $$'", 137),
        ("[[ a == b ]]", 1),
    ] {
        assert_eq!(session.run(command).1, code, "{command}");
    }
    session.run("(exit 42)");
    assert_eq!(session.out("echo $?"), "42\n");
    assert_eq!(session.out("echo $?"), "0\n");
    let failed = session.post(json!({"command": "sh -c 'exit 7'"}));
    let error = &failed.last()["error"];
    assert_eq!((error["ename"].as_str(), error["evalue"].as_str()), (Some("CommandExecError"), Some("7")));
    assert_eq!(error["traceback"], json!(["exit status 7"]));
}

#[test]
fn a_shell_that_ends_is_followed_by_one_that_knows_the_same() {
    let host = Host::start();
    let session = host.open();
    session.out("export A=1; B=2; f() { echo f; }; cd /usr; set -u; trap 'echo usr1' USR1; declare -A map=([k]='v w'); unset HOME");
    let before = session.out("echo $$");
    for (command, code) in [
        ("cd /usr/lib; C=3; exit 3", 3),
        ("exit", 0),
        ("set -e; false; echo never", 1),
        ("set +e; echo \"${NOPE:?}\"", 127),
    ] {
        let (out, status) = session.run(command);
        assert!(!out.contains("never"));
        assert_eq!(if code == 127 { 1 } else { code }, if status == 127 { 1 } else { status }, "{command}");
        assert_eq!(
            session.out("set +e; echo $A $B $C $PWD; f; echo ${map[k]} ${HOME-none}; kill -USR1 $$"),
            "1 2 3 /usr/lib\nf\nv w none\nusr1\n",
            "{command}"
        );
    }
    assert_ne!(session.out("echo $$"), before);
    // No word of its own: what it was before this run stays.
    for (command, code) in [("C=4; cd /; kill -9 $$", 137), ("C=4; cd /; exec sh -c 'echo x; exit 9'", 9)] {
        let run = session.post(json!({"command": command}));
        assert_eq!(run.exit_code(), code, "{command}");
        let said = run.last()["error"]["traceback"].to_string();
        assert!(said.contains("as they were before this run"), "{command} {said}");
        assert_eq!(session.out("echo $A $B $C $PWD; f"), "1 2 3 /usr/lib\nf\n", "{command}");
    }
}

#[test]
fn a_run_cannot_harm_the_next_one() {
    let host = Host::start();
    let session = host.open();
    session.out("keep=1");
    for command in [
        "exec 1>&-",
        "exec 2>&-",
        "exec 0<&-",
        "exec >/dev/null 2>&1",
        "exec 0<&- 1>&- 2>&-",
        "for fd in /proc/$$/fd/*; do fd=${fd##*/}; eval \"exec $fd>&-\"; done",
        "for fd in {3..260}; do eval \"exec $fd</dev/null\"; done",
        "for fd in /proc/$$/fd/*; do echo junk > \"$fd\"; done 2>/dev/null",
        "for fd in {10..20}; do timeout 0.2 cat <&$fd; done 2>/dev/null; read -t 0.1 -u 10 x; read -t 0.1 -u 255 x; :",
        "printf() { :; }; command() { :; }; builtin() { :; }; eval() { :; }; exit() { :; }",
        "unset -f printf command builtin eval exit; shopt -s expand_aliases; alias printf=: command=: eval=: set=: trap=:",
        "unalias -a; set -n",
        "set -f; set -C; IFS=x",
        "set -a; set -k; set -u; PS4='$(echo p)'",
        "PS1='$ '; PROMPT_COMMAND='echo prompt'; PS0=x",
        "set -r",
        "trap '' EXIT TERM INT; trap 'echo dbg' DEBUG; trap - DEBUG",
        "trap 'echo err' ERR; false; trap - ERR",
        "shopt -s extdebug; trap false DEBUG",
        "echo \"unbalanced",
        "case x in",
        "cat <<E\nno end",
        "if true; then",
        "f() {",
        "$(",
        "}",
        ")",
        ";;",
        "do",
        "break 9",
        "continue",
        "return 3",
        "rm -rf \"$TMPDIR\"/.execd-sh-*",
        "rm -f \"$TMPDIR\"/.execd-sh-*/c",
        "echo junk > \"$TMPDIR\"/.execd-sh-*/c",
        "enable -n printf; :",
        "readonly __execd_s=1 PATH",
        "ulimit -n 3",
        "ulimit -f 0",
        "set -o posix",
        "set +o posix",
        "set -o noexec",
        "set -x; set -v",
        "set +x +v",
        "mkdir /tmp/gone-$$; cd /tmp/gone-$$; rmdir /tmp/gone-$$",
        "cd /",
        "LANG=C; LC_ALL=nonsense",
        "unset PATH HOME PWD OLDPWD IFS",
        "BASH_ENV=/nope; ENV=/nope; SHELLOPTS=1",
        "kill -HUP $$",
        "kill -INT $$",
        "kill -PIPE $$",
        "disown -a; exec -a x true",
    ] {
        let began = Instant::now();
        let (first, code) = session.run(command);
        assert!(began.elapsed() < Duration::from_secs(30), "{command} took {:?}", began.elapsed());
        let (out, status) = session.run("echo \"<$keep>\" 2>&1; (exit 5)");
        // A trace of the shell is output like any other.
        let out = out
            .lines()
            .filter(|line| !line.starts_with('+') && !line.starts_with("echo") && !line.starts_with('p'))
            .collect::<Vec<_>>()
            .join("\n");
        assert_eq!((out.as_str(), status), ("<1>", 5), "after {command:?}, which gave {code} and {first:?}");
    }
    assert_eq!(session.delete(), 200);
}

#[test]
fn errors_of_syntax_have_their_code_and_message() {
    let host = Host::start();
    let session = host.open();
    for command in ["echo \"unbalanced", "if true; then", "f() {", ")", "case x in"] {
        let (out, code) = session.run(command);
        assert!((1..=2).contains(&code) && out.contains("bash"), "{command}: {out} {code}");
    }
}

#[test]
fn output_is_whole_and_apart_from_the_next_runs() {
    let host = Host::start();
    let session = host.open();
    for number in 0..30 {
        let out = session.out("head -c 200000 /dev/zero | tr '\\0' x; echo; echo e >&2");
        assert!(out.len() == 200_003 && out.ends_with("x\ne\n"), "{number}: {}", out.len());
        assert_eq!(session.out("echo next"), "next\n");
    }
    assert_eq!(session.out("printf foo"), "foo");
    assert_eq!(session.out("printf 'a\\n\\nb\\r\\nc'"), "a\n\nb\r\nc");
    assert_eq!(session.out("echo a; echo b >&2; echo c"), "a\nb\nc\n");
    assert_eq!(session.out("head -c 300000 /dev/zero | tr '\\0' '\\n'").len(), 300_000);
    assert_eq!(session.out("echo x > >(tr x y); wait $!"), "y\n");
    // Who writes a moment after the end is waited for; on a busy machine a moment may last longer than that.
    assert!((0..10).any(|_| session.out("echo x > >(sleep 0.02; tr x y)") == "y\n"));
    assert_eq!(
        session.out("printf '__EXIT_CODE__:5\\nR0.1 7 h\\0\\n__PWD__:/\\n'"),
        "__EXIT_CODE__:5\nR0.1 7 h\0\n__PWD__:/\n"
    );
}

#[test]
fn standard_input_is_empty_and_nothing_of_ours_is_inherited() {
    let host = Host::start();
    let session = host.open();
    assert_eq!(
        session.out("cat; head -c1; read x || echo eof; printf a | cat; cat <<E\nhere $((1+1))\nE"),
        "eof\nahere 2\n"
    );
    assert_eq!(session.out("ls -l /proc/self/fd | grep -c -- '->'"), "4\n");
    assert_eq!(session.out("ls /proc/self/fd"), "0\n1\n2\n3\n");
    assert_eq!(session.out("env -i /usr/bin/env; compgen -v | grep -i execd_s || true"), "");
}

#[test]
fn background_jobs_hold_nobody_up_and_write_to_nobody_else() {
    let host = Host::start();
    let session = host.open();
    for command in [
        "sleep 987001 &",
        "(sleep 987001 &) ; true",
        "setsid sleep 987001 & disown",
        "nohup sh -c 'sleep 987001 &'",
    ] {
        let began = Instant::now();
        session.run(command);
        assert!(began.elapsed() < Duration::from_secs(20), "{command}");
    }
    session.out("(while :; do echo noise; sleep 0.01; done) &");
    for _ in 0..20 {
        assert_eq!(session.out("echo mine; sleep 0.02"), "mine\n");
    }
    assert_eq!(session.delete(), 200);
    assert_eq!(processes("sleep 987001"), 0);
}

#[test]
fn long_commands_run_as_they_are() {
    let host = Host::start();
    let session = host.open();
    for length in [1_000, 15_000, 17_000, 200_000, 1 << 20] {
        let text = "ä'\"\\$x\n".repeat(length / 8);
        let command = format!("cat <<'END' | cksum\n{text}END");
        let expected = std::process::Command::new("bash")
            .arg("-c")
            .arg("cksum")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut expected.stdin.as_ref().unwrap(), text.as_bytes()).unwrap();
        let expected = String::from_utf8(expected.wait_with_output().unwrap().stdout).unwrap();
        let began = Instant::now();
        let (out, code) = session.run(&command);
        assert_eq!((out, code), (expected, 0), "{length}");
        assert!(began.elapsed() < Duration::from_secs(20), "{length}: {:?}", began.elapsed());
    }
    let big = format!("x='{}'; echo ${{#x}}", "y".repeat(1 << 20));
    assert_eq!(session.out(&big), "1048576\n");
    assert_eq!(session.out("echo ${#x}"), "1048576\n");
    let too_long = host.daemon.call(
        "POST",
        &format!("/session/{}/run", session.id),
        Some(json!({"command": "x".repeat(5 << 20)})),
    );
    assert_eq!(too_long.head.status, 400);
}

#[test]
fn traps_and_traces_are_the_users() {
    let host = Host::start();
    let session = host.open();
    assert_eq!(session.run("trap 'echo bye' EXIT; exit 3"), ("bye\n".into(), 3));
    assert_eq!(session.out("set -x; echo 1"), "++ echo 1\n1\n");
    assert_eq!(session.out("echo 2"), "++ echo 2\n2\n");
    assert_eq!(session.out("set +x"), "++ set +x\n");
    assert_eq!(session.out("echo 3"), "3\n");
    assert_eq!(session.out("PS1=x; PROMPT_COMMAND='echo no'; echo $PS1"), "x\n");
    assert_eq!(session.out("echo $PS1"), "x\n");
    assert_eq!(session.run("set -e; echo a; false || true; echo b; false; echo c"), ("a\nb\n".into(), 1));
}

#[test]
fn directory_of_session_and_run() {
    let host = Host::start();
    let session = host.open_in(json!({"cwd": "/usr"}));
    assert_eq!(session.out("pwd; echo $PWD"), "/usr\n/usr\n");
    assert_eq!(session.post(json!({"command": "pwd", "cwd": "/usr/share"})).stdout(), "/usr/share\n");
    assert_eq!(session.out("pwd"), "/usr/share\n");
    assert_eq!(session.post(json!({"command": "pwd", "cwd": ".."})).stdout(), "/usr\n");
    for cwd in ["/no/such", "/etc/passwd", "$UNSET/x"] {
        let answer = host.daemon.call(
            "POST",
            &format!("/session/{}/run", session.id),
            Some(json!({"command": "pwd", "cwd": cwd})),
        );
        assert_eq!(
            (answer.head.status, answer.json()["code"].as_str()),
            (400, Some("INVALID_REQUEST_BODY")),
            "{cwd}"
        );
    }
    assert_eq!(session.out("pwd"), "/usr\n");
    let made = host.tmp.path().join("a/b");
    let other = host.open_in(json!({"cwd": made}));
    assert_eq!(other.out("pwd"), format!("{}\n", made.display()));
    assert_eq!(host.daemon.call("POST", "/session", Some(json!({"cwd": "/etc/passwd"}))).head.status, 400);
    std::fs::remove_dir_all(host.tmp.path().join("a")).unwrap();
    assert_eq!(other.run("exit 4").1, 4);
    assert_eq!(other.out("echo still"), "still\n");
}

#[test]
fn requests_that_break_a_rule_are_refused() {
    let host = Host::start();
    let session = host.open();
    let path = format!("/session/{}/run", session.id);
    for body in [
        json!({}),
        json!({"command": "  "}),
        json!({"command": null}),
        json!({"command": "true", "timeout": -1}),
        json!({"command": "a\0b"}),
        json!({"command": "a", "cwd": "\0"}),
        json!({"cmd": "true"}),
    ] {
        let answer = host.daemon.call("POST", &path, Some(body.clone()));
        assert_eq!(
            (answer.head.status, answer.json()["code"].as_str()),
            (400, Some("INVALID_REQUEST_BODY")),
            "{body}"
        );
    }
    assert_eq!(host.daemon.call("POST", &path, None).head.status, 400);
    assert_eq!(session.post(json!({"code": "echo old", "timeout_ms": 1000})).stdout(), "old\n");
    let zero = "00000000-0000-4000-8000-000000000000";
    for (method, path) in [
        ("POST", format!("/session/{zero}/run")),
        ("DELETE", format!("/session/{zero}")),
        ("DELETE", format!("/command?id={zero}")),
    ] {
        let answer = host.daemon.call(method, &path, Some(json!({"command": "true"})));
        assert_eq!(
            (answer.head.status, answer.json()["code"].as_str()),
            (404, Some("CONTEXT_NOT_FOUND")),
            "{path}"
        );
    }
    assert_eq!((session.delete(), session.delete()), (200, 404));
}

#[test]
fn time_limits_kill_the_run_and_spare_the_session() {
    let host = Host::start();
    let session = host.open();
    session.out("export A=1; sleep 987011 & disown");
    for command in [
        "echo before; sleep 987012",
        "echo before; trap '' TERM INT; while :; do :; done",
        "echo before; setsid sleep 987012 & sleep 987012",
        "echo before; exec sleep 987012",
    ] {
        let began = Instant::now();
        let run = session.post(json!({"command": command, "timeout": 1000}));
        assert!((990..30_000).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
        assert_eq!((run.stdout().as_str(), run.exit_code()), ("before\n", 137));
        assert!(run.last()["error"]["traceback"].to_string().contains("time limit of 1000 ms"));
        assert_eq!(processes("sleep 987012"), 0, "{command}");
        assert_eq!(session.out("echo $A"), "1\n");
    }
    // What an earlier run has left in the background is not this run's.
    common::eventually("the job", || processes("sleep 987011") == 1);
    session.delete();
    gone("sleep 987011");
}

#[test]
fn an_interrupt_ends_what_runs_and_the_session_stays() {
    let host = Host::start();
    let session = host.open();
    let interrupt = || host.daemon.call("DELETE", &format!("/command?id={}", session.id), None).head.status;
    assert_eq!(interrupt(), 200);
    session.out("sleep 987021 & :");
    for command in ["A=7; echo up; sleep 987022", "A=7; echo up; while :; do sleep 0.1; done"] {
        let mut stream = session.stream(json!({ "command": command }));
        stream.until("stdout");
        let began = Instant::now();
        assert_eq!(interrupt(), 200);
        assert!(began.elapsed() < Duration::from_secs(30), "{command}");
        let last = stream.rest().pop().unwrap();
        // bash may miss the signal when it comes just before a fork, and is killed then.
        if last["error"]["evalue"] == "143" {
            assert_eq!(session.out("echo $A"), "7\n", "{command}");
        } else {
            assert_eq!(last["error"]["evalue"], "137");
            session.out("A=7");
        }
        assert_eq!(processes("sleep 987022"), 0);
    }
    common::eventually("the job", || processes("sleep 987021") == 1);
    let mut stubborn = session.stream(json!({"command": "trap '' TERM; echo up; while :; do :; done"}));
    stubborn.until("stdout");
    assert_eq!(interrupt(), 200);
    assert_eq!(stubborn.rest().pop().unwrap()["error"]["evalue"], "137");
    assert_eq!(session.out("echo $A"), "7\n");
}

#[test]
fn runs_of_one_session_take_turns() {
    let host = Host::start();
    let session = host.open();
    let gate = host.daemon.gate("gate");
    let mut first = session.stream(json!({"command": format!("n=1; {}; echo A$n", gate.wait())}));
    first.until("ping");
    let mut second = session.stream(json!({"command": "n=$((n+1)); sleep 0.1; echo B$n"}));
    second.until("ping");
    let mut third = session.stream(json!({"command": "cd /no/such/place", "cwd": "/no/such"}));
    third.until("ping");
    gate.open();
    let texts = |events: Vec<serde_json::Value>| {
        events
            .iter()
            .filter(|event| event["type"] == "stdout")
            .map(|event| event["text"].as_str().unwrap().to_owned())
            .collect::<String>()
    };
    assert_eq!(texts(first.rest()), "A1\n");
    assert_eq!(texts(second.rest()), "B2\n");
    assert_eq!(third.rest().pop().unwrap()["type"], "error");

    let mut long = session.stream(json!({"command": "echo up; sleep 987031"}));
    long.until("stdout");
    let waiting: Vec<_> = (0..64).map(|_| session.stream(json!({"command": "echo never"}))).collect();
    let answer =
        host.daemon.call("POST", &format!("/session/{}/run", session.id), Some(json!({"command": "true"})));
    assert_eq!((answer.head.status, answer.json()["code"].as_str()), (503, Some("SERVICE_UNAVAILABLE")));
    assert_eq!(session.delete(), 200);
    assert_eq!(long.rest().pop().unwrap()["error"]["evalue"], "137");
    for mut stream in waiting {
        let events = stream.rest();
        assert!(
            events.last().unwrap()["type"] == "error" && events.iter().all(|event| event["type"] != "stdout")
        );
    }
    gone("sleep 987031");
}

#[test]
fn a_client_that_leaves_does_not_end_the_run() {
    let host = Host::start();
    let session = host.open();
    let mut stream = session.stream(json!({"command": "echo up; sleep 0.3; A=done"}));
    stream.until("stdout");
    drop(stream);
    assert_eq!(session.out("echo $A"), "done\n");
}

#[test]
fn variables_of_the_sandboxes_file_arrive() {
    let tmp = tempfile::tempdir().unwrap();
    let file = tmp.path().join("env");
    let host = Host::with(&[], &[("EXECD_ENVS", file.to_str().unwrap()), ("BASE", "b")]);
    std::fs::write(&file, "ONE=1\nTWO=2\n").unwrap();
    let session = host.open();
    assert_eq!(session.out("echo $ONE $TWO $BASE; TWO=own"), "1 2 b\n");
    std::fs::write(&file, "ONE='it'\\''s'\nONE=\"it's 3\"\nTWO=3\nNEW=4\n").unwrap();
    assert_eq!(session.out("echo $ONE $TWO $NEW; sh -c 'echo $NEW'"), "it's 3 own 4\n4\n");
    assert_eq!(session.out("printf '%s\\n' LATER=5 >> \"$EXECD_ENVS\""), "");
    assert_eq!(session.out("echo $LATER"), "5\n");
    assert_eq!(session.run("exit 1").1, 1);
    assert_eq!(session.out("echo $ONE $TWO $NEW $LATER"), "it's 3 own 4 5\n");
}

#[test]
fn sessions_are_bounded_and_leave_nothing() {
    let host = Host::start();
    let sessions: Vec<_> = (0..64).map(|_| host.open()).collect();
    let answer = host.daemon.call("POST", "/session", None);
    assert_eq!((answer.head.status, answer.json()["code"].as_str()), (503, Some("SERVICE_UNAVAILABLE")));
    for session in &sessions {
        session.out("sleep 987041 & (setsid sleep 987041 &); :");
    }
    common::eventually("all jobs", || processes("sleep 987041") == 128);
    for session in &sessions {
        assert_eq!(session.delete(), 200);
    }
    assert_eq!((processes("sleep 987041"), host.left()), (0, 0));
    assert_eq!(host.open().out("echo $BASH_VERSION | grep -c ."), "1\n");
}

#[test]
fn an_image_without_bash_has_sessions_of_its_sh() {
    let bin = tempfile::tempdir().unwrap();
    for name in ["sh", "cat", "sleep", "tr", "head", "ls"] {
        let target = if name == "sh" { "/usr/bin/dash".into() } else { format!("/usr/bin/{name}") };
        std::os::unix::fs::symlink(target, bin.path().join(name)).unwrap();
    }
    let host = Host::with(&[], &[("PATH", bin.path().to_str().unwrap())]);
    let session = host.open();
    assert_eq!(
        session.out("export A=\"it's\"; B=2; cd /usr; f() { echo f; }; echo ${BASH_VERSION-none}"),
        "none\n"
    );
    assert_eq!(session.out("echo $A $B $PWD; f"), "it's 2 /usr\nf\n");
    for (command, code) in [
        ("exit 3", 3),
        ("echo \"x", 2),
        ("set -e; false; echo no", 1),
        ("kill -9 $$", 137),
        ("(exit 4)", 4),
        ("exec 1>&-", 0),
        ("cat; read x", 1),
    ] {
        assert_eq!(session.run(command).1, code, "{command}");
        assert_eq!(session.out("set +e; echo $A $PWD"), "it's /usr\n", "{command}");
    }
    assert_eq!(session.out("ls /proc/self/fd"), "0\n1\n2\n3\n");
    let big = format!("x='{}'; echo ${{#x}}", "y".repeat(1 << 20));
    assert_eq!(session.out(&big), "1048576\n");
    assert_eq!(session.post(json!({"command": "sleep 987051", "timeout": 200})).exit_code(), 137);
    assert_eq!(session.out("echo $A"), "it's\n");
    assert_eq!((session.delete(), host.left()), (200, 0));
}

#[test]
fn an_image_without_any_shell_says_so() {
    let bin = tempfile::tempdir().unwrap();
    let broken = bin.path().join("bash");
    std::fs::write(&broken, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&broken, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let host = Host::with(&[], &[("PATH", bin.path().to_str().unwrap())]);
    let answer = host.daemon.call("POST", "/session", None);
    assert_eq!((answer.head.status, answer.json()["code"].as_str()), (500, Some("RUNTIME_ERROR")));
    assert!(answer.json()["message"].as_str().unwrap().contains("bash"), "{}", answer.json());
    assert_eq!(host.left(), 0);
}
