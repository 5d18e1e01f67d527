//! Background commands: start, output by cursor, end.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::time::{Duration, Instant};

use common::{Answer, Daemon, eventually};
use serde_json::json;

fn start(daemon: &Daemon, command: &str) -> String {
    let began = Instant::now();
    let run = daemon.post(json!({ "command": command, "background": true }));
    assert!(began.elapsed() < Duration::from_secs(2));
    run.check();
    assert_eq!(run.last()["type"], "execution_complete");
    assert!(run.texts("stdout").is_empty());
    run.id().to_owned()
}

fn logs(daemon: &Daemon, id: &str, cursor: &str) -> Answer {
    daemon.call("GET", &format!("/command/{id}/logs?cursor={cursor}"), None)
}

fn cursor(answer: &Answer) -> u64 {
    answer.head.header("execd-commands-tail-cursor").unwrap().parse().unwrap()
}

#[test]
fn the_stream_ends_at_once_and_the_command_goes_on() {
    let daemon = Daemon::start();
    daemon.run("true");
    let before = daemon.descriptors();
    let id = start(&daemon, "echo begin; sleep 0.3; echo end; exit 6");
    assert_eq!(daemon.status(&id)["running"], true);
    let status = daemon.wait_ended(&id);
    assert_eq!(status["exit_code"], 6);
    assert_eq!(logs(&daemon, &id, "0").body, b"begin\nend\n");
    eventually("no descriptors left", || daemon.descriptors() <= before + 2);
}

#[test]
fn input_is_empty_and_both_outputs_are_one() {
    let daemon = Daemon::start();
    let id = start(&daemon, "cat; readlink /proc/self/fd/0; for i in 1 2 3; do echo o$i; echo e$i >&2; done");
    assert_eq!(daemon.wait_ended(&id)["exit_code"], 0);
    let answer = logs(&daemon, &id, "");
    assert_eq!(answer.head.header("content-type"), Some("text/plain; charset=utf-8"));
    assert_eq!(answer.body, b"/dev/null\no1\ne1\no2\ne2\no3\ne3\n");
    assert_eq!(cursor(&answer), answer.body.len() as u64);
}

#[test]
fn the_cursor_counts_bytes() {
    let daemon = Daemon::start();
    let id = start(&daemon, "printf 'h\\303\\251llo\\377'");
    daemon.wait_ended(&id);
    assert_eq!(logs(&daemon, &id, "0").body, b"h\xc3\xa9llo\xff");
    assert_eq!(logs(&daemon, &id, "3").body, b"llo\xff");
    assert_eq!(logs(&daemon, &id, "nonsense").body.len(), 7);
    for beyond in ["7", "100"] {
        let answer = logs(&daemon, &id, beyond);
        assert_eq!((answer.body.len(), cursor(&answer)), (0, beyond.parse().unwrap()));
    }
    assert_eq!(logs(&daemon, &id, "-1").head.status, 400);
    assert_eq!(logs(&daemon, "ffff", "0").head.status, 400);
    let foreground = daemon.run("true");
    assert_eq!(logs(&daemon, foreground.id(), "0").head.status, 400);
}

#[test]
fn following_by_cursor_gives_every_byte_once() {
    let daemon = Daemon::start();
    let id = start(&daemon, "for i in $(seq 1 40); do seq 1 500; sleep 0.01; done");
    let (mut at, mut bytes) = (0, Vec::new());
    loop {
        let ended = daemon.status(&id)["running"] == false;
        let answer = logs(&daemon, &id, &at.to_string());
        at = cursor(&answer);
        bytes.extend(answer.body);
        if ended {
            break;
        }
    }
    let once: String = (1..=500).map(|line| format!("{line}\n")).collect();
    assert!(bytes == once.repeat(40).as_bytes());
}

#[test]
fn much_output_is_kept_up_to_a_bound_with_the_loss_told() {
    let daemon = Daemon::start();
    let total: u64 = 80 << 20;
    let id = start(&daemon, &format!("head -c {total} /dev/zero | tr '\\0' x; printf END"));
    daemon.wait_ended(&id);
    let answer = logs(&daemon, &id, "0");
    assert_eq!(cursor(&answer), total + 3);
    assert_eq!(answer.body.len(), 64 << 20);
    assert!(answer.body.ends_with(b"xxxEND"));
    let dropped: u64 = answer.head.header("execd-commands-dropped-bytes").unwrap().parse().unwrap();
    assert_eq!(dropped, total + 3 - (64 << 20));
    let tail = logs(&daemon, &id, &total.to_string());
    assert_eq!((tail.body.as_slice(), tail.head.header("execd-commands-dropped-bytes")), (&b"END"[..], None));
    assert!(daemon.resident_kib() < 64 << 10, "{} KiB", daemon.resident_kib());
}

#[test]
fn the_log_of_a_program_that_writes_without_end_can_be_read() {
    let daemon = Daemon::start();
    let id = start(&daemon, "exec yes");
    eventually("more than is kept is written", || {
        logs(&daemon, &id, "0").head.header("execd-commands-dropped-bytes").is_some()
    });
    for _ in 0..3 {
        // `logs` takes a body that ends before its announced length for a failure.
        let answer = logs(&daemon, &id, "0");
        assert_eq!(answer.body.len(), 64 << 20);
        assert!(answer.body.chunks(2).all(|pair| pair == b"y\n" || pair == b"\ny"));
    }
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
}

#[test]
fn nothing_is_left_in_the_temporary_directory() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::with(&[], &[("TMPDIR", dir.path().to_str().unwrap())]);
    let id = start(&daemon, "head -c 1000000 /dev/zero");
    daemon.wait_ended(&id);
    assert_eq!(logs(&daemon, &id, "0").body.len(), 1_000_000);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn limits_interrupts_and_failures_are_recorded() {
    let daemon = Daemon::start();
    let run = daemon.post(json!({ "command": "echo x; sleep 71", "background": true, "timeout": 200 }));
    let status = daemon.wait_ended(run.id());
    assert_eq!(status["exit_code"], 137);
    assert!(status["error"].as_str().unwrap().contains("200 ms"));
    assert_eq!(logs(&daemon, run.id(), "0").body, b"x\n");

    let id = start(&daemon, "sleep 72");
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
    assert_eq!(daemon.status(&id)["exit_code"], 143);

    let run = daemon.post(json!({ "argv": ["/no/such"], "background": true }));
    assert_eq!(run.check().last()["type"], "error");
    assert_eq!(daemon.status(run.id())["exit_code"], 255);
}

#[test]
fn ids_outlive_their_connections() {
    let daemon = Daemon::start();
    let id = start(&daemon, "exec sleep 73");
    for _ in 0..50 {
        daemon.run("true");
    }
    assert_eq!(daemon.status(&id)["running"], true);
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
}
