//! `execd --init -- argv`: as a container's first process, and as the reaper of its descendants.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use common::{Client, Run, eventually, is_alive, run_on};
use serde_json::{Value, json};

/// A container of one's own, or only a process with its descendants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum As {
    First,
    Reaper,
}

struct Box_ {
    child: Child,
    dir: tempfile::TempDir,
    kind: As,
}

fn start(kind: As, args: &[&str], env: &[(&str, &str)], entrypoint: &[&str]) -> Box_ {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut command = match kind {
        As::First => {
            let mut command = Command::new("unshare");
            command.args(["--fork", "--pid", "--mount-proc", "--kill-child", env!("CARGO_BIN_EXE_execd")]);
            command
        }
        As::Reaper => Command::new(env!("CARGO_BIN_EXE_execd")),
    };
    command
        .arg("--socket")
        .arg(path("socket"))
        .args(args)
        .args(["--init", "--"])
        .args(entrypoint)
        .env("EXECD_LOG_FILE", path("log"))
        .env("EXECD_LIFECYCLE_CONFIG", path("hooks.toml"))
        .envs(env.iter().copied())
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(path("out")).unwrap())
        .stderr(std::fs::File::create(path("err")).unwrap());
    Box_ { child: command.spawn().unwrap(), dir, kind }
}

/// Runs a test in both forms, the first one only where it can be.
fn both(test: impl Fn(As)) {
    test(As::Reaper);
    if rustix::process::geteuid().is_root() { test(As::First) } else { eprintln!("half skipped: needs root") }
}

impl Box_ {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn reachable(self) -> Self {
        eventually("the socket", || UnixStream::connect(self.path("socket")).is_ok());
        self
    }

    fn run(&self, command: &str) -> Run {
        run_on(Client::connect(self.path("socket")), json!({"command": command}))
    }

    fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Value) -> (u16, Value) {
        let mut client = Client::connect(self.path("socket"));
        let head = client.request(method, path, headers, body.to_string().as_bytes());
        let body = client.body(&head);
        (head.status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Number of init outside.
    fn init(&self) -> i32 {
        match self.kind {
            As::Reaper => self.child.id().cast_signed(),
            As::First => children(self.child.id().cast_signed())[0],
        }
    }

    fn daemon(&self) -> Option<i32> {
        children(self.init()).into_iter().find(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "execd\n")
        })
    }

    fn signal(&self, signal: i32) {
        kill(self.init(), signal);
    }

    fn end(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

fn children(pid: i32) -> Vec<i32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn kill(pid: i32, signal: i32) {
    // SAFETY: a process of this test's own.
    unsafe { libc::kill(pid, signal) };
}

impl Drop for Box_ {
    fn drop(&mut self) {
        // Asked first: descendants of a reaper that is killed stay.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(libc::SIGTERM);
            for _ in 0..100 {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A `sleep` that no other test has.
fn sleep(number: u32) -> String {
    format!("sleep {}{number:02}", std::process::id())
}

#[test]
fn the_entrypoints_status_is_the_containers() {
    both(|kind| {
        for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)] {
            let mut container = start(kind, &[], &[], &["sh", "-c", script]);
            assert_eq!(container.end().code(), Some(code), "{script}");
        }
        let mut container = start(kind, &[], &[], &["/no/such/program"]);
        assert_eq!(container.end().code(), Some(127));
        assert!(container.read("err").contains("/no/such/program"), "{}", container.read("err"));
        let mut container = start(kind, &[], &[], &["/etc/passwd"]);
        assert_eq!(container.end().code(), Some(126));
    });
}

#[test]
fn the_entrypoint_has_our_place_and_not_our_secrets() {
    both(|kind| {
        let env = [
            ("EXECD_ACCESS_TOKEN", "t0ken"),
            ("JUPYTER_TOKEN", "notebook"),
            ("OPENSANDBOX_LIFECYCLE", r#"{"periodic":[]}"#),
        ];
        let script = "pwd; echo to err >&2; cat; env; ls /proc/self/fd | wc -l; \
                      grep -E 'Sig(Blk|Ign)' /proc/self/status; ps -o pgid= -p $$ | tr -d ' '; echo $$";
        let mut container = start(kind, &[], &env, &["sh", "-c", script]);
        assert_eq!(container.end().code(), Some(0));
        let out = container.read("out");
        assert!(out.starts_with(container.dir.path().to_str().unwrap()), "{out}");
        assert!(container.read("err").ends_with("to err\n"));
        assert!(out.contains("JUPYTER_TOKEN=notebook"), "{out}");
        assert!(!out.contains("t0ken") && !out.contains("LIFECYCLE"), "{out}");
        let masks = out.lines().filter(|line| line.starts_with("Sig")).collect::<Vec<_>>();
        assert!(masks.len() == 2 && masks.iter().all(|line| line.ends_with("\t0000000000000000")), "{out}");
        let tail: Vec<&str> = out.lines().rev().take(2).collect();
        assert_eq!(tail[0], tail[1], "its own group: {out}");
    });
}

#[test]
fn commands_come_and_go_without_the_container() {
    both(|kind| {
        let mut container =
            start(kind, &[], &[], &["sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; exit 4"])
                .reachable();
        assert_eq!(container.run("exit 3").exit_code(), 3);
        assert_eq!(
            container.run("kill -9 $$").last()["error"]["evalue"].as_str().map(|v| v != "0"),
            Some(true)
        );
        // Orphans come to us and leave no zombies.
        container.run("for i in 1 2 3 4 5; do (setsid sh -c 'exit 1' &); done");
        eventually("no zombies", || {
            children(container.init()).into_iter().all(|pid| {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                !stat.contains(") Z ")
            })
        });
        let sleep = sleep(1);
        container
            .run(&format!("setsid {sleep} > /dev/null 2>&1 & (setsid {sleep} > /dev/null 2>&1 &) ; true"));
        assert!(is_alive(&sleep));
        std::fs::write(container.path("go"), "").unwrap();
        assert_eq!(container.end().code(), Some(4));
        assert!(!is_alive(&sleep), "what is left ends with the container");
    });
}

#[test]
fn signals_reach_the_entrypoint() {
    both(|kind| {
        let script = "for s in HUP INT QUIT USR1 USR2 WINCH; do trap \"echo $s\" $s; done; \
                      trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.02; done";
        let mut container = start(kind, &[], &[], &["bash", "-c", script]).reachable();
        eventually("the entrypoint", || container.read("out") == "up\n");
        let signals = [
            ("HUP", libc::SIGHUP),
            ("USR1", libc::SIGUSR1),
            ("USR2", libc::SIGUSR2),
            ("WINCH", libc::SIGWINCH),
            ("INT", libc::SIGINT),
        ];
        for (name, signal) in signals {
            container.signal(signal);
            eventually(name, || container.read("out").lines().last() == Some(name));
        }
        container.signal(libc::SIGTERM);
        assert_eq!(container.end().code(), Some(5));
        assert!(container.read("out").ends_with("bye\n"));
    });
}

#[test]
fn a_stop_ends_streams_and_commands() {
    both(|kind| {
        let mut container = start(kind, &[], &[], &["sleep", "300"]).reachable();
        let sleep = sleep(2);
        let mut stream = common::open_on(
            Client::connect(container.path("socket")),
            json!({"command": format!("echo up; {sleep}")}),
        );
        stream.until("stdout");
        container.signal(libc::SIGTERM);
        let rest = stream.rest();
        let last = rest.last().unwrap();
        assert_eq!(last["type"], "error", "{rest:?}");
        assert_eq!(container.end().code(), Some(143));
        assert!(!is_alive(&sleep));
    });
}

#[test]
fn what_ignores_a_stop_is_killed() {
    both(|kind| {
        let script = "trap '' TERM; echo up; while :; do sleep 0.1; done";
        let mut container = start(kind, &[], &[], &["bash", "-c", script]).reachable();
        eventually("the entrypoint", || container.read("out") == "up\n");
        let began = std::time::Instant::now();
        container.signal(libc::SIGTERM);
        assert_eq!(container.end().code(), Some(137));
        assert!(began.elapsed() >= std::time::Duration::from_secs(9), "{:?}", began.elapsed());
    });
}

#[test]
fn the_hook_before_the_entrypoint() {
    both(|kind| {
        let script = "echo hook; while [ ! -e go ]; do sleep 0.02; done";
        let hooks = json!({"preStart": {"command": ["sh", "-c", script]}}).to_string();
        let env = [("OPENSANDBOX_LIFECYCLE", hooks.as_str())];
        let mut container = start(kind, &[], &env, &["sh", "-c", "echo entrypoint; exit 6"]).reachable();
        assert_eq!(container.run("echo works").stdout(), "works\n");
        assert_eq!(container.call("GET", "/ready", &[], json!({})).0, 503);
        assert_eq!(container.read("out"), "");
        std::fs::write(container.path("go"), "").unwrap();
        assert_eq!(container.end().code(), Some(6));
        assert_eq!(container.read("out"), "entrypoint\n");
        // One that fails.
        let hooks = json!({"preStart": {"command": ["sh", "-c", "echo why; exit 3"]}}).to_string();
        let env = [("OPENSANDBOX_LIFECYCLE", hooks.as_str())];
        let mut container = start(kind, &[], &env, &["sh", "-c", "echo entrypoint"]);
        assert_eq!(container.end().code(), Some(1));
        let told = container.read("err");
        assert!(told.contains("preStart hook") && told.contains("output: why"), "{told}");
        assert_eq!(container.read("out"), "");
    });
}

#[test]
fn a_daemon_that_dies_comes_back_bound_as_it_was() {
    both(|kind| {
        let container = start(kind, &["--access-token", "old"], &[], &["sleep", "300"]).reachable();
        let hash = "sha256:11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437";
        let periodic =
            json!([{"name": "p", "schedule": "@every 1s", "command": ["sh", "-c", "echo $A >> ticks"]}]);
        let body = json!({"sandboxId": "box", "generation": 4, "accessTokenHash": hash, "envs": {"A": "tick"},
            "lifecycle": {"preStart": {"command": ["sh", "-c", "echo once >> once"]}, "periodic": periodic}});
        eventually("readiness", || container.call("GET", "/ready", &[], json!({})).0 == 200);
        assert_eq!(container.call("POST", "/internal/init", &[], body).0, 200);
        let first = container.daemon().unwrap();
        kill(first, libc::SIGKILL);
        eventually("another daemon", || container.daemon().is_some_and(|pid| pid != first));
        let metrics =
            |token| container.call("GET", "/metrics", &[("x-execd-access-token", token)], json!({})).0;
        eventually("an answer", || metrics("new") == 200);
        assert_eq!(metrics("old"), 401, "the token of the start stays dead");
        let ready = json!({"initialized": true, "sandboxId": "box", "generation": 4});
        assert_eq!(container.call("GET", "/ready", &[], json!({})), (200, ready));
        std::fs::write(container.path("ticks"), "").unwrap();
        eventually("the periodic hook", || container.read("ticks").contains("tick\n"));
        assert_eq!(container.read("once"), "once\n");
    });
}

#[test]
fn a_binding_may_start_the_entrypoint_anew() {
    both(|kind| {
        let sleep = sleep(3);
        let script = format!("echo $OPENSANDBOX_ID $A >> seen; {sleep} & setsid {sleep} & exec {sleep}");
        let env = [("A", "start"), ("OPENSANDBOX_ID", "template")];
        let container = start(kind, &[], &env, &["sh", "-c", &script]).reachable();
        eventually("the entrypoint", || container.read("seen") == "template start\n");
        eventually("readiness", || container.call("GET", "/ready", &[], json!({})).0 == 200);
        let bind = |generation: u64, more: Value| {
            let mut body = json!({"sandboxId": format!("box{generation}"), "generation": generation,
                "envs": {"A": "bound"}});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let (status, answer) = container.call("POST", "/internal/init", &[], body);
            assert_eq!(status, 200, "{answer}");
            answer
        };
        let answer = bind(1, json!({}));
        assert!(answer.get("warning").is_none(), "a running one is adopted: {answer}");
        assert_eq!(container.read("seen"), "template start\n");
        bind(2, json!({"entrypointPolicy": "restart"}));
        eventually("another entrypoint", || container.read("seen") == "template start\nbox2 bound\n");
        bind(3, json!({"entrypointPolicy": "restart"}));
        eventually("a third one", || container.read("seen").lines().last() == Some("box3 bound"));
        eventually("the earlier ones' end", || {
            let count = std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
                std::fs::read(entry.path().join("cmdline"))
                    .is_ok_and(|line| String::from_utf8_lossy(&line).replace('\0', " ").trim() == sleep)
            });
            count.count() == 3
        });
    });
}

#[test]
fn a_gated_container_starts_its_entrypoint_when_told_to() {
    both(|kind| {
        let mut container =
            start(kind, &["--runtime-init"], &[], &["sh", "-c", "echo $OPENSANDBOX_ID; exit 8"]).reachable();
        assert_eq!(container.call("POST", "/command", &[], json!({"command": "true"})).0, 503);
        let (status, answer) =
            container.call("POST", "/internal/init", &[], json!({"sandboxId": "a", "generation": 1}));
        assert_eq!(status, 200, "{answer}");
        assert!(answer["warning"][0].as_str().unwrap().contains("was not started"), "{answer}");
        assert_eq!(container.run("echo works").stdout(), "works\n");
        assert_eq!(container.read("out"), "");
        let body = json!({"sandboxId": "b", "generation": 2, "entrypointPolicy": "restart"});
        let mut client = Client::connect(container.path("socket"));
        // The entrypoint may end before the answer is read.
        let head = client.request("POST", "/internal/init", &[], body.to_string().as_bytes());
        assert_eq!(head.status, 200);
        assert_eq!(container.end().code(), Some(8));
        assert_eq!(container.read("out"), "b\n");
    });
}

#[test]
fn a_gated_container_that_is_stopped_leaves() {
    both(|kind| {
        let mut container = start(kind, &["--runtime-init"], &[], &["sleep", "300"]).reachable();
        container.signal(libc::SIGTERM);
        assert_eq!(container.end().code(), Some(143));
    });
}

#[test]
fn others_cannot_look_into_init() {
    both(|kind| {
        let container = start(kind, &[], &[], &["sleep", "300"]).reachable();
        let owner = std::fs::metadata(format!("/proc/{}/environ", container.init())).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&owner), 0);
        if kind == As::First {
            // The first process of a namespace ignores what it has no handler for.
            assert_ne!(container.run("kill -9 1; kill -STOP 1; echo alive").stdout(), "");
            assert_eq!(container.run("echo again").exit_code(), 0);
        }
    });
}
