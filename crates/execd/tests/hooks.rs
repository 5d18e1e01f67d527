//! Hooks of a sandbox's life, under an ordinary daemon.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::{Client, Daemon, eventually, is_alive};
use serde_json::{Value, json};

/// A daemon that has not been waited for, in a directory of its own, where it also keeps its hooks.
struct Started {
    child: Option<Child>,
    dir: tempfile::TempDir,
}

impl Started {
    fn with(hooks: Option<Value>) -> Self {
        Self::again(tempfile::tempdir().unwrap(), hooks)
    }

    fn again(dir: tempfile::TempDir, hooks: Option<Value>) -> Self {
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("status"), "").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_execd"));
        command
            .arg("--socket")
            .arg(path("socket"))
            .arg("--lifecycle-startup-status-file")
            .arg(path("status"))
            .env("EXECD_LOG_FILE", path("log"))
            .env("EXECD_LIFECYCLE_CONFIG", path("kept/hooks.toml"))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(hooks) = hooks {
            command.env("OPENSANDBOX_LIFECYCLE", hooks.to_string());
        }
        let child = command.spawn().unwrap();
        Self { child: Some(child), dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// The daemon, as soon as it can be reached.
    fn reachable(mut self) -> Daemon {
        eventually("the socket", || std::os::unix::net::UnixStream::connect(self.path("socket")).is_ok());
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        Daemon { child: self.child.take().unwrap(), dir }
    }

    fn end(&mut self) -> Output {
        self.child.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn shell(script: &str) -> Value {
    json!(["/bin/sh", "-c", script])
}

/// A `sleep` that no other test has.
fn sleep(number: u32) -> String {
    format!("sleep {}{number:02}", std::process::id())
}

fn ready(path: &Path) -> (u16, Value) {
    let mut client = Client::connect(path.to_path_buf());
    let head = client.request("GET", "/ready", &[], b"");
    let body = client.body(&head);
    (head.status, serde_json::from_slice(&body).unwrap())
}

#[test]
fn work_waits_for_the_first_hook_and_the_api_does_not() {
    let script = "echo it runs; env > seen; while [ ! -e go ]; do sleep 0.02; done; echo done";
    let hooks = json!({"preStart": {"command": shell(script), "timeoutSeconds": 30}});
    let daemon = Started::with(Some(hooks)).reachable();
    let read = |name: &str| std::fs::read_to_string(daemon.dir.path().join(name)).unwrap_or_default();
    eventually("the hook", || read("log").contains("it runs"));
    assert_eq!(ready(&daemon.socket()), (503, json!({"initialized": false})));
    assert_eq!(read("status"), "running 30\n");
    assert_eq!(daemon.run("echo works").stdout(), "works\n");
    // Both variables are the daemon's.
    let seen = read("seen") + &daemon.run("env").stdout();
    assert!(seen.contains("PATH=") && !seen.contains("LIFECYCLE"), "{seen}");
    std::fs::write(daemon.dir.path().join("go"), "").unwrap();
    eventually("the end of the hook", || ready(&daemon.socket()) == (200, json!({"initialized": true})));
    assert_eq!(read("status"), "running 30\ndone 0\n");
    let log = read("log");
    let said = log.lines().find(|line| line.contains("it runs")).unwrap();
    let said: Value = serde_json::from_str(said).unwrap();
    assert_eq!((&said["hook"], &said["output"]), (&json!("preStart hook"), &json!("it runs")));
}

#[test]
fn without_a_first_hook_the_start_is_reported_at_once() {
    let daemon = Started::with(None).reachable();
    let status = || std::fs::read_to_string(daemon.dir.path().join("status")).unwrap();
    eventually("the report", || status() == "done 0\n");
    eventually("readiness", || ready(&daemon.socket()).0 == 200);
}

#[test]
fn a_hook_that_fails_ends_the_start() {
    let failing = [
        (shell("echo some words; echo more >&2; exit 3"), "exit status 3; output: some words\nmore"),
        (json!(["/no/such/program"]), "/no/such/program"),
        (json!(["no-such-program"]), "no-such-program"),
        (shell("kill -9 $$"), "signal: killed"),
    ];
    for (command, words) in failing {
        let mut started = Started::with(Some(json!({"preStart": {"command": command}})));
        let output = started.end();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("preStart hook") && told.contains(words), "{told}");
        assert_eq!(started.read("status"), "running 60\ndone 1\n");
    }
}

#[test]
fn a_hook_that_takes_too_long_is_killed_with_all_it_has_started() {
    let sleeps = [sleep(11), sleep(12), sleep(13)];
    let [one, two, three] = &sleeps;
    let script = format!("{one} & setsid {two} & (setsid {three} &) ; echo waiting; wait");
    let hooks = json!({"preStart": {"command": shell(&script), "timeoutSeconds": 1}});
    let mut started = Started::with(Some(hooks));
    let output = started.end();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("1 seconds have passed") && told.contains("waiting"), "{told}");
    for sleep in sleeps {
        assert!(!is_alive(&sleep), "{sleep}");
    }
}

#[test]
fn a_daemon_that_is_stopped_takes_its_hook_along() {
    let sleep = sleep(21);
    let hooks = json!({"preStart": {"command": shell(&format!("echo up > up; {sleep} & wait"))}});
    let mut started = Started::with(Some(hooks));
    eventually("the hook", || started.path("up").exists());
    let pid = i32::try_from(started.child.as_ref().unwrap().id()).unwrap();
    // SAFETY: a signal to our own child, which has not been reaped.
    unsafe { libc::kill(pid, libc::SIGTERM) };
    assert!(started.end().status.success());
    assert!(!is_alive(&sleep));
}

#[test]
fn what_a_hook_leaves_running_does_not_hold_the_start_up() {
    let sleep = sleep(31);
    let script = format!("{sleep} & echo $! > pids; while :; do echo x; done & echo $! >> pids");
    let hooks = json!({"preStart": {"command": shell(&script)}});
    let daemon = Started::with(Some(hooks)).reachable();
    eventually("readiness", || ready(&daemon.socket()).0 == 200);
    assert!(is_alive(&sleep));
    assert_eq!(daemon.run("kill -9 $(cat pids)").exit_code(), 0);
}

#[test]
fn a_periodic_hook_runs_again_and_again_and_never_beside_itself() {
    let script = "echo begin >> runs; sleep 1.2; echo end >> runs";
    let hooks = json!({"periodic": [{"name": "sync", "schedule": "@every 1s", "command": shell(script)}]});
    let daemon = Started::with(Some(hooks)).reachable();
    let runs = || std::fs::read_to_string(daemon.dir.path().join("runs")).unwrap_or_default();
    eventually("three runs", || runs().lines().count() >= 6);
    for (at, line) in runs().lines().enumerate() {
        assert_eq!(line, if at % 2 == 0 { "begin" } else { "end" }, "{}", runs());
    }
}

#[test]
fn a_periodic_hook_that_fails_or_hangs_is_tried_again() {
    let sleep = sleep(41);
    let hanging = format!("echo run >> hung; setsid {sleep}");
    let hooks = json!({"periodic": [
        {"name": "fails", "schedule": "@every 1s", "command": shell("echo run >> failed; exit 4")},
        {"name": "hangs", "schedule": "@every 1s", "command": shell(&hanging),
         "timeoutSeconds": 1},
        {"name": "well", "schedule": "TZ=UTC @every 1s", "command": ["touch", "well"]},
    ]});
    let daemon = Started::with(Some(hooks)).reachable();
    let read = |name: &str| std::fs::read_to_string(daemon.dir.path().join(name)).unwrap_or_default();
    eventually("runs of all", || {
        read("failed").lines().count() >= 2
            && read("hung").lines().count() >= 2
            && daemon.dir.path().join("well").exists()
    });
    let log = read("log");
    assert!(log.contains("exit status 4") && log.contains("seconds have passed"), "{log}");
    assert_eq!(ready(&daemon.socket()).0, 200);
    let pid = i32::try_from(daemon.child.id()).unwrap();
    // SAFETY: a signal to our own child, which has not been reaped.
    unsafe { libc::kill(pid, libc::SIGTERM) };
    eventually("the end of all hooks", || !is_alive(&sleep));
}

#[test]
fn hooks_are_kept_for_a_daemon_that_comes_later() {
    let hooks = json!({"periodic": [{"name": "n", "schedule": "@every 1s", "command": ["touch", "ran"]}]});
    let mut first = Started::with(Some(hooks));
    eventually("a run", || first.path("ran").exists());
    let mut child = first.child.take().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    std::fs::remove_file(first.path("ran")).unwrap();
    let kept = first.read("kept/hooks.toml");
    assert!(kept.starts_with("version = 1\n"), "{kept}");
    let dir = std::mem::replace(&mut first.dir, tempfile::tempdir().unwrap());
    let second = Started::again(dir, None).reachable();
    eventually("a run of the second", || second.dir.path().join("ran").exists());
}

#[test]
fn hooks_that_cannot_be_followed_end_the_start() {
    for (hooks, words) in [
        (json!({"preStart": {"command": []}}), "preStart hook"),
        (json!({"prestart": {"command": ["true"]}}), "prestart"),
        (json!({"periodic": [{"name": "n", "schedule": "61 * * * *", "command": ["true"]}]}), "minute"),
    ] {
        let mut started = Started::with(Some(hooks));
        let output = started.end();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains("OPENSANDBOX_LIFECYCLE") && told.contains(words), "{told}");
    }
}

#[test]
fn a_time_zone_that_is_not_there_is_told_and_the_sandbox_works() {
    let hooks = json!({"periodic": [
        {"name": "n", "schedule": "CRON_TZ=Mars/Olympus 0 0 * * *", "command": ["true"]},
    ]});
    let daemon = Started::with(Some(hooks)).reachable();
    let log = || std::fs::read_to_string(daemon.dir.path().join("log")).unwrap_or_default();
    eventually("the error", || log().contains("Mars/Olympus") && log().contains("tzdata"));
    eventually("readiness", || ready(&daemon.socket()).0 == 200);
}

#[test]
fn signals_to_the_daemon_reach_the_commands_that_somebody_waits_for() {
    let daemon = Daemon::start();
    let pid = i32::try_from(daemon.child.id()).unwrap();
    // SAFETY: a signal to our own child, which has not been reaped.
    let signal = |signal| unsafe { libc::kill(pid, signal) };
    // Nobody to pass it on to: nothing happens.
    signal(libc::SIGUSR1);
    signal(libc::SIGHUP);
    let script = "for s in HUP USR1 USR2 WINCH; do trap \"echo $s\" $s; done; trap 'echo bye; exit 5' TERM; \
                  echo up; while :; do sleep 0.02; done";
    let mut stream = daemon.stream(json!({"command": script}));
    assert!(stream.until("stdout")["text"].as_str().unwrap().starts_with("up"));
    for (name, number) in [("HUP", libc::SIGHUP), ("USR2", libc::SIGUSR2), ("WINCH", libc::SIGWINCH)] {
        signal(number);
        assert!(stream.until("stdout")["text"].as_str().unwrap().starts_with(name));
    }
    let background =
        daemon.post(json!({"command": "trap 'touch told' USR1; sleep 300 & wait", "background": true}));
    assert_eq!(daemon.status(background.id())["running"], true);
    // The stop too, so that the stream ends as the command does, and not by force.
    signal(libc::SIGTERM);
    let rest = stream.rest();
    assert!(
        rest.iter().any(|event| event["text"].as_str().is_some_and(|text| text.starts_with("bye"))),
        "{rest:?}"
    );
    assert_eq!(rest.last().unwrap()["error"]["evalue"], "5", "{rest:?}");
    assert!(!daemon.dir.path().join("told").exists());
}
