//! Background commands: start, output by cursor, end.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::time::{Duration, Instant};

use common::{Answer, Daemon, eventually};
use serde_json::json;

fn start(daemon: &Daemon, command: &str) -> String {
    let began = Instant::now();
    let run = daemon.post(json!({ "command": command, "background": true }));
    assert!(began.elapsed() < Duration::from_secs(20));
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
    let gate = daemon.gate("gate");
    let id = start(&daemon, &format!("echo begin; {}; echo end; exit 6", gate.wait()));
    assert_eq!(daemon.status(&id)["running"], true);
    gate.open();
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
    let run = daemon.post(json!({ "command": "echo x; sleep 71", "background": true, "timeout": 1000 }));
    let status = daemon.wait_ended(run.id());
    assert_eq!(status["exit_code"], 137);
    assert!(status["error"].as_str().unwrap().contains("1000 ms"));
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

#[test]
fn a_reader_misses_nothing_of_a_fast_writer() {
    // Counting lines of a fixed width tell their own offset.
    let daemon = Daemon::with(&["--command-log-bytes", "1Mi"], &[]);
    let id = start(
        &daemon,
        "i=0; while [ $i -lt 40 ]; do seq -f %09.0f $((i*20000)) $((i*20000+19999)); i=$((i+1)); done",
    );
    let (mut at, mut ended, mut seen) = (0, false, 0_u64);
    while !ended {
        ended = daemon.status(&id)["running"] == false;
        let answer = logs(&daemon, &id, &at.to_string());
        let next = cursor(&answer);
        let dropped: u64 =
            answer.head.header("execd-commands-dropped-bytes").map_or(0, |bytes| bytes.parse().unwrap());
        assert_eq!(at + dropped + answer.body.len() as u64, next, "every byte is there or told as lost");
        let first = at + dropped;
        for (place, byte) in (first..).zip(&answer.body) {
            let line = format!("{:09}\n", place / 10);
            assert_eq!(line.as_bytes()[(place % 10) as usize], *byte, "at {place}");
        }
        seen += answer.body.len() as u64;
        at = next;
    }
    assert_eq!(at, 8_000_000);
    assert!(seen >= 1 << 20);
}

#[test]
fn what_is_kept_is_bounded_by_flags() {
    let flags = ["--command-log-bytes=256Ki", "--command-logs-bytes=512Ki", "--command-retention-count=4"];
    let daemon = Daemon::with(&flags, &[]);
    let ids: Vec<String> = (0..6)
        .map(|_| {
            let id = start(&daemon, "head -c 400000 /dev/zero");
            daemon.wait_ended(&id);
            id
        })
        .collect();
    for id in &ids[..2] {
        assert_eq!(daemon.call("GET", &format!("/command/status/{id}"), None).head.status, 404);
        assert_eq!(logs(&daemon, id, "0").head.status, 400);
    }
    let sizes: Vec<usize> = ids[2..].iter().map(|id| logs(&daemon, id, "0").body.len()).collect();
    assert_eq!(sizes[3], 256 << 10);
    assert!(sizes.iter().sum::<usize>() <= 512 << 10, "{sizes:?}");
    for id in &ids[2..] {
        assert_eq!(cursor(&logs(&daemon, id, "0")), 400_000, "cursors stay what they were");
        assert_eq!(cursor(&logs(&daemon, id, "399999")), 400_000);
    }
}

#[test]
fn what_has_been_kept_long_enough_is_forgotten() {
    let daemon = Daemon::with(&[], &[("EXECD_COMMAND_RETENTION", "300ms")]);
    let id = start(&daemon, "head -c 400000 /dev/zero");
    daemon.wait_ended(&id);
    eventually("it is forgotten", || {
        daemon.call("GET", &format!("/command/status/{id}"), None).head.status == 404
    });
}

#[test]
fn a_full_disk_costs_old_output_and_nothing_else() {
    // SAFETY of others: the mount is in a namespace of its own.
    let Ok(output) = std::process::Command::new("unshare")
        .args(["-m", "sh", "-ec", SMALL_DISK, "sh", env!("CARGO_BIN_EXE_execd")])
        .output()
    else {
        return eprintln!("skipped: no unshare");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    if text.contains("cannot mount") {
        return eprintln!("skipped: {text}");
    }
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(text.trim(), "3000000 1048576");
}

/// Starts a daemon with a temporary directory of 256 KiB, has it keep 3 MB of output, and prints cursor and length.
const SMALL_DISK: &str = r#"
    d=$(mktemp -d)
    mount -t tmpfs -o size=256k none "$d" || { echo cannot mount; exit 0; }
    s=$(mktemp -d)
    TMPDIR=$d "$1" --socket "$s/socket" >/dev/null & p=$!
    trap 'kill $p' EXIT
    until curl -sf --unix-socket "$s/socket" http://x/ping; do sleep 0.02; done
    id=$(curl -s --unix-socket "$s/socket" http://x/command -d '{"command":"head -c 3000000 /dev/zero","background":true}' |
        sed -n 's/.*"init","text":"\([0-9a-f]*\)".*/\1/p')
    until curl -s --unix-socket "$s/socket" "http://x/command/status/$id" | grep -q '"running":false'; do sleep 0.02; done
    curl -s --unix-socket "$s/socket" -D "$s/head" -o "$s/body" "http://x/command/$id/logs?cursor=0"
    [ "$(df --output=used "$d" | tail -1)" -eq 0 ]
    echo $(tr -d '\r' <"$s/head" | sed -n 's/^execd-commands-tail-cursor: //p') $(stat -c %s "$s/body")
"#;
