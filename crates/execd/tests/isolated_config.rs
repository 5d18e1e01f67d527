//! Settings of isolated sessions, and their end when the daemon is bound anew.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Daemon, eventually, is_alive, open_at};
use serde_json::{Value, json};

/// As root only: anybody else needs a kernel and a profile that let users make namespaces.
fn may() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}

fn written(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join("isolation.toml");
    fs::write(&path, text).unwrap();
    path
}

fn make(daemon: &Daemon, body: Value) -> (u16, Value) {
    let answer = daemon.call("POST", "/v1/isolated/session", Some(body));
    (answer.head.status, answer.json())
}

fn made(daemon: &Daemon, body: Value) -> String {
    let (status, answer) = make(daemon, body);
    assert_eq!(status, 201, "{answer}");
    answer["session_id"].as_str().unwrap().to_owned()
}

/// Output of a run, and the last event.
fn run(daemon: &Daemon, id: &str, code: &str) -> (String, Value) {
    let path = format!("/v1/isolated/session/{id}/run");
    let mut stream = open_at(daemon.connect(), &path, json!({ "code": code }));
    let (mut text, mut last) = (String::new(), Value::Null);
    while let Some((_, event)) = stream.next_event() {
        if event["type"] == "stdout" {
            text.push_str(event["text"].as_str().unwrap());
        }
        last = event;
    }
    (text, last)
}

#[test]
fn the_file_decides() {
    if !may() {
        return;
    }
    fs::create_dir_all("/mnt").unwrap();
    let work = tempfile::tempdir_in("/mnt").unwrap();
    let other = tempfile::tempdir_in("/mnt").unwrap();
    let root = tempfile::tempdir_in("/var/lib").unwrap();
    // Of somebody else, and of a daemon that has died.
    let theirs = ["notes", "6b1d2a52-8f0f-4c5c-9d5d-0b0a8e4b9a11"].map(|name| root.path().join(name));
    let left = root.path().join("7c1d2a52-8f0f-4c5c-9d5d-0b0a8e4b9a12");
    for dir in theirs.iter().chain([&left]) {
        fs::create_dir_all(dir.join("in")).unwrap();
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&left, fs::Permissions::from_mode(0o700)).unwrap();
    let file = written(
        other.path(),
        &format!(
            "upper_root = {:?}\nupper_max_bytes = 1000000\nallowed_writable = [{:?}]\n\
             [seccomp]\ndeny = [\"mkdir\", \"mkdirat\"]\n",
            root.path(),
            work.path()
        ),
    );
    let daemon = Daemon::with(&["--isolation-config", file.to_str().unwrap()], &[]);
    let overlay = || json!({ "workspace": { "path": work.path(), "mode": "overlay" } });
    let id = made(&daemon, overlay());
    let uppers = || {
        let all = fs::read_dir(root.path()).unwrap().flatten();
        all.filter(|entry| entry.path().join(&id).exists()).count()
    };
    assert_eq!(uppers(), 1, "changes lie in the place that the file names");
    assert!(theirs.iter().all(|dir| dir.join("in").exists()) && !left.exists());

    let (text, last) = run(&daemon, &id, "mkdir d 2>&1; touch f && echo touched");
    assert!(text.contains("Permission denied") && text.contains("touched"), "{text} {last}");

    let bound = |path: &Path| {
        let mut body = overlay();
        body["extra_writable"] = json!([path]);
        make(&daemon, body)
    };
    let (status, answer) = bound(other.path());
    assert_eq!((status, &answer["code"]), (400, &json!("RUNTIME_ERROR")), "{answer}");
    assert!(answer["message"].as_str().unwrap().contains(work.path().to_str().unwrap()), "{answer}");

    run(&daemon, &id, "head -c 2000000 /dev/zero >f");
    let (status, answer) = make(&daemon, overlay());
    assert_eq!(status, 500, "{answer}");
    assert!(answer["message"].as_str().unwrap().contains("upper_max_bytes"), "{answer}");
    assert_eq!(daemon.call("DELETE", &format!("/v1/isolated/session/{id}"), None).head.status, 200);
    assert_eq!((make(&daemon, overlay()).0, uppers()), (201, 0));
}

#[test]
fn layers_that_are_not_there_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let of = |text: &str| {
        let file = written(dir.path(), text);
        let daemon = Daemon::with(&[], &[("EXECD_ISOLATION_CONFIG", file.to_str().unwrap())]);
        let can = daemon.call("GET", "/v1/isolated/capabilities", None).json();
        let log = fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        (can, log)
    };
    let (can, log) = of("");
    assert_eq!(can["runtimeInit"], json!({"version": 1}));
    assert_eq!(
        (&can["hardening"]["cap_drop"], &can["hardening"]["landlock"]["state"]),
        (&json!({"state": "active"}), &json!("unsupported"))
    );
    assert!(!log.contains("has no effect"), "{log}");
    let (can, log) = of("upper_max_bytes = 0\nupper_maximum = 1\n[hardening]\nenabled = true\n\
         keep_capabilities = [\"CAP_KILL\"]\n[landlock]\nenabled = true\n[ebpf]\nenabled = true\n");
    for (layer, section) in
        [("cap_drop", "hardening"), ("seccomp", "hardening"), ("landlock", "landlock"), ("ebpf", "ebpf")]
    {
        let told = &can["hardening"][layer];
        assert_eq!(told["state"], "unsupported", "{can}");
        let word = format!("[{section}] enabled = true has no effect");
        assert!(told["message"].as_str().unwrap().contains(&word), "{can}");
        assert!(log.contains(&word), "{log}");
    }
    assert!(log.contains("upper_max_bytes = 0") && log.contains("upper_maximum: no such key"), "{log}");
}

#[test]
fn a_wrong_file_ends_the_start_and_a_flag_beats_the_variable() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good.toml");
    fs::write(&good, "upper_max_bytes = 5\n").unwrap();
    let none = dir.path().join("none.toml");
    let failed = |file: &Path| {
        let out = Command::new(env!("CARGO_BIN_EXE_execd"))
            .arg("--socket")
            .arg(dir.path().join("socket"))
            .arg("--isolation-config")
            .arg(file)
            .env("EXECD_ISOLATION_CONFIG", &good)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(!out.status.success());
        let told = String::from_utf8(out.stderr).unwrap();
        assert!(told.contains(file.to_str().unwrap()), "{told}");
        told
    };
    for (text, word) in [
        ("upper_max_bytes = -5", "upper_max_bytes"),
        ("upper_root = \"/dev/null/x\"", "upper_root"),
        ("allowed_writable = [\"relative\"]", "allowed_writable"),
        ("[seccomp]\ndeny = [\"mount\", \"no_such_call\"]", "no_such_call"),
        ("[seccomp]\ndeny = [\"execve\"]\n[hardening]\nenabled = true", "execve"),
        ("[landlock]\nenabled = \"yes\"", "landlock.enabled"),
        ("= 1", "line 1"),
    ] {
        let told = failed(&written(dir.path(), text));
        assert!(told.contains(word), "{text}: {told}");
    }
    assert!(failed(&none).contains("No such file"));
    assert!(failed(dir.path()).contains("is not a file"));
    let flags = ["--isolation-config", good.to_str().unwrap()];
    let daemon = Daemon::with(&flags, &[("EXECD_ISOLATION_CONFIG", none.to_str().unwrap())]);
    daemon.run("true").check();
    assert_eq!(daemon.run("env").stdout().matches("ISOLATION_CONFIG").count(), 0);
}

#[test]
fn a_stop_leaves_nothing() {
    if !may() {
        return;
    }
    fs::create_dir_all("/mnt").unwrap();
    let work = tempfile::tempdir_in("/mnt").unwrap();
    let root = tempfile::tempdir_in("/var/lib").unwrap();
    let file = written(work.path(), &format!("upper_root = {:?}\n", root.path()));
    let mut daemon = Daemon::with(&["--isolation-config", file.to_str().unwrap()], &[]);
    let id = made(&daemon, json!({ "workspace": { "path": work.path(), "mode": "overlay" } }));
    let sleep = format!("sleep {}58", std::process::id());
    let path = format!("/v1/isolated/session/{id}/run");
    let code = format!("echo changed >f; {sleep}");
    assert_eq!(
        daemon.call("POST", &path, Some(json!({ "code": code, "background": true }))).head.status,
        202
    );
    eventually("the run", || is_alive(&sleep));
    let pid = rustix::process::Pid::from_raw(i32::try_from(daemon.child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.child.wait().unwrap().success());
    assert!(!is_alive(&sleep));
    let left: Vec<_> = fs::read_dir(root.path()).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_binding_ends_sessions_unless_they_are_to_be_preserved() {
    if !may() {
        return;
    }
    fs::create_dir_all("/mnt").unwrap();
    let work = tempfile::tempdir_in("/mnt").unwrap();
    let kept = work.path().join("hooks.toml");
    let daemon = Daemon::with(&[], &[("EXECD_LIFECYCLE_CONFIG", kept.to_str().unwrap())]);
    let body = || json!({ "workspace": { "path": work.path(), "mode": "rw" } });
    let ids = [made(&daemon, body()), made(&daemon, body())];
    let sleep = format!("sleep {}57", std::process::id());
    let path = format!("/v1/isolated/session/{}/run", ids[0]);
    let begun = daemon.call("POST", &path, Some(json!({ "code": sleep, "background": true })));
    assert_eq!(begun.head.status, 202);
    eventually("the run", || is_alive(&sleep));
    let bind = |body: Value| daemon.call("POST", "/internal/init", Some(body)).head.status;
    assert_eq!(bind(json!({"sandboxId": "a", "generation": 1, "preserveRuntimeState": true})), 200);
    assert!(is_alive(&sleep) && run(&daemon, &ids[1], "echo here").0 == "here");
    assert_eq!(bind(json!({"sandboxId": "b", "generation": 2})), 200);
    assert!(!is_alive(&sleep));
    for id in &ids {
        assert_eq!(daemon.call("GET", &format!("/v1/isolated/session/{id}"), None).head.status, 404);
    }
    let id = made(&daemon, body());
    assert_eq!(run(&daemon, &id, "echo $OPENSANDBOX_ID").0, "b");
}
