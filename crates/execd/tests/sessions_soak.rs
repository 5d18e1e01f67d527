//! Sessions over thousands of runs: bytes, leftovers, time.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod shells;

use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;
use shells::Host;

fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}

/// Children of a process: number, and how many of them are zombies.
fn children(pid: u32) -> (usize, usize) {
    let of_parent = |entry: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.to_owned();
        (fields.next()? == pid.to_string()).then_some(state)
    };
    let states: Vec<_> = std::fs::read_dir("/proc").unwrap().flatten().filter_map(of_parent).collect();
    (states.len(), states.iter().filter(|state| *state == "Z").count())
}

#[test]
fn two_thousand_runs_leave_nothing() {
    let host = Host::start();
    let session = host.open();
    session.out("export A=1");
    let pid = host.daemon.child.id();
    let before = (host.daemon.descriptors(), host.left(), children(pid));
    let memory = host.daemon.resident_kib();
    for number in 0..2000 {
        match number % 20 {
            0 => assert_eq!(session.run("exit 3").1, 3),
            7 => assert_eq!(session.run("(sleep 0.05; echo late) & echo x").1, 0),
            13 => assert_eq!(session.run("kill -9 $$").1, 137),
            _ => assert_eq!(session.out("echo $A"), "1\n"),
        }
    }
    let after = || (host.daemon.descriptors(), host.left(), children(pid));
    common::eventually("descriptors, files and processes as before", || after() == before);
    common::eventually("idle threads to go", || threads(pid) <= 3);
    assert!(host.daemon.resident_kib() < memory + 8192);
    assert_eq!((session.delete(), host.left()), (200, 0));
    assert_eq!(children(pid), (0, 0));
}

#[test]
fn any_output_in_any_pieces_is_whole() {
    let host = Host::start();
    let session = host.open();
    let piece = prop_oneof![
        3 => "[a-z \n]{0,30}",
        1 => Just("\u{e4}\u{20ac}\r\n".to_owned()),
        1 => (1usize..70_000).prop_map(|length| "z".repeat(length)),
        1 => Just("\n\n".to_owned()),
    ];
    let pieces = proptest::collection::vec((piece, 0u8..4), 0..12);
    let config = ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() };
    let run = |pieces: Vec<(String, u8)>, code: u8| {
        let mut command = String::new();
        for (text, how) in &pieces {
            let text = text.replace('\'', "'\\''");
            command.push_str(&match how {
                0 => format!("printf %s '{text}'\n"),
                1 => format!("printf %s '{text}' >&2\n"),
                2 => format!("(printf %s '{text}')\n"),
                _ => format!("printf %s '{text}' | cat; sleep 0.001\n"),
            });
        }
        command.push_str(&format!("(exit {code})"));
        let expected: String = pieces.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(session.run(&command), (expected, i32::from(code)));
    };
    let mut runner = TestRunner::new(config);
    let check = |(pieces, code)| {
        run(pieces, code);
        Ok(())
    };
    runner.run(&(pieces, any::<u8>()), check).unwrap();
}

#[test]
fn a_run_takes_no_longer_than_a_command() {
    let host = Host::start();
    let session = host.open();
    let middle = |mut run: Box<dyn FnMut() + '_>| {
        let mut times: Vec<Duration> = (0..300)
            .map(|_| {
                let began = Instant::now();
                run();
                began.elapsed()
            })
            .collect();
        times.sort_unstable();
        times[150]
    };
    let in_session = middle(Box::new(|| assert_eq!(session.run("true").1, 0)));
    let command =
        middle(Box::new(|| assert_eq!(host.daemon.post(json!({"command": "true"})).exit_code(), 0)));
    eprintln!("p50 of true: in a session {in_session:?}, as a command {command:?}");
    assert!(in_session < command * 2, "{in_session:?} {command:?}");
}
