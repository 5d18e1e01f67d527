//! Commands of all kinds by the thousand, a third of which fail to start, run out of time or lose their client. They
//! leave nothing. `make soak` runs ten thousand; `OSB_SOAK` is the number.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;
mod shells;
mod terminals;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use common::eventually;
use serde_json::json;
use shells::{Host, Session};

const WORKERS: usize = 4;

/// What must be as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    descriptors: usize,
    children: usize,
    zombies: usize,
    temporary: usize,
}

fn held(host: &Host) -> Held {
    let parent = host.daemon.child.id().to_string();
    let state = |entry: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.to_owned();
        (fields.next()? == parent).then_some(state)
    };
    let children: Vec<_> = std::fs::read_dir("/proc").unwrap().flatten().filter_map(state).collect();
    Held {
        descriptors: host.daemon.descriptors(),
        children: children.len(),
        zombies: children.iter().filter(|state| *state == "Z").count(),
        temporary: host.left(),
    }
}

fn threads(host: &Host) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", host.daemon.child.id())).unwrap().count()
}

/// A program of this test's alone.
fn endless() -> String {
    format!("sleep 98{:07}", std::process::id())
}

/// The command of that number.
fn one(host: &Host, session: &Session<'_>, runtime: &tokio::runtime::Runtime, number: usize) {
    let daemon = &host.daemon;
    match number % 12 {
        // A third goes wrong.
        0 => {
            let run = daemon.post(json!({ "argv": ["/no/such/program"] }));
            assert_eq!(run.check().last()["type"], "error");
        }
        1 => {
            let body = json!({ "command": "true", "cwd": "/no/such" });
            assert_eq!(daemon.call("POST", "/command", Some(body)).head.status, 400);
        }
        2 => {
            let command = format!("{0} & setsid {0} & {0}", endless());
            let run = daemon.post(json!({ "command": command, "timeout": 30 }));
            assert_eq!(run.check().exit_code(), 137);
        }
        3 => {
            let mut stream = daemon.stream(json!({ "command": "sleep 0.02; seq 20000; exit 5" }));
            stream.id();
        }
        4 => assert_eq!(session.run("n=$((n+1)); echo $((n>0)); sleep 0.01 &").0, "1\n"),
        5 => assert_eq!(session.run(&format!("echo x >&2; exit {}", number % 50)).1, (number % 50) as i32),
        6 => {
            let run = daemon.post(json!({ "command": "seq 2000; exit 6", "background": true }));
            assert_eq!(daemon.wait_ended(run.id())["exit_code"], 6);
            let logs = daemon.call("GET", &format!("/command/{}/logs?cursor=8878", run.id()), None);
            assert_eq!(logs.body, b"1998\n1999\n2000\n");
        }
        7 => runtime.block_on(terminal(host, number)),
        8 => {
            let mut stream = daemon.stream(json!({ "command": format!("echo up; {}", endless()) }));
            let id = stream.id();
            stream.until("stdout");
            assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
            assert_eq!(stream.rest().pop().unwrap()["error"]["evalue"], "143");
        }
        _ => {
            let code = (number % 200) as i32;
            let run = daemon.post(json!({ "command": format!("echo {number}; exit {code}") }));
            assert_eq!((run.check().stdout(), run.exit_code()), (format!("{number}\n"), code));
        }
    }
}

async fn terminal(host: &Host, number: usize) {
    let id = terminals::running(&host.daemon, "echo up; read line; exit 9");
    let mut socket = terminals::attach(&host.daemon, &id, "").await;
    socket.until("up").await;
    // One leaves without a word; the terminal is deleted with its program.
    if number % 24 == 7 {
        socket.typed("\n").await;
        assert_eq!(socket.exit().await, 9);
    } else {
        drop(socket);
    }
    assert_eq!(host.daemon.call("DELETE", &format!("/pty/{id}"), None).head.status, 200);
}

fn run(host: &Host, numbers: std::ops::Range<usize>) {
    let next = AtomicUsize::new(numbers.start);
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let session = host.open();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= numbers.end {
                        break;
                    }
                    one(host, &session, &runtime, number);
                }
                assert_eq!(session.delete(), 200);
            });
        }
    });
}

#[test]
fn commands_of_all_kinds_leave_nothing() {
    let count = std::env::var("OSB_SOAK").map_or(480, |count| count.parse().unwrap());
    let host = Host::start();
    run(&host, 0..48);
    let settled = |what: &str| {
        eventually(what, || held(&host).children == 0);
        eventually(what, || threads(&host) <= 2);
        (held(&host), threads(&host), host.daemon.resident_kib())
    };
    let (before, threads_before, memory) = settled("the end of the first");
    let began = Instant::now();
    run(&host, 0..count);
    let took = began.elapsed();
    eventually("all is as it was", || held(&host).children == 0 && held(&host) == before);
    let (after, threads_after, memory_after) = settled("the end of all");
    eprintln!("{count} commands in {took:.1?}: {before:?}, {threads_before} threads, {memory} KiB");
    eprintln!("afterwards: {after:?}, {threads_after} threads, {memory_after} KiB");
    assert_eq!(after, before);
    // What ended commands are remembered by is bounded.
    assert!(memory_after < memory + (16 << 10), "{memory} KiB became {memory_after} KiB");
    assert_eq!(shells::processes(&endless()), 0);
}
