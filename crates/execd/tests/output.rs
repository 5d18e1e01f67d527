//! Whatever bytes a program writes, in whatever pieces, to whichever output: what arrives, joined, is what was
//! written. `OSB_CASES` is the number of programs for each way of reading.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;
mod shells;
mod terminals;

use std::fmt::Write as _;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use shells::Host;

/// Bytes, whether they go to standard error, and how long the program rests afterwards, in milliseconds.
type Piece = (Vec<u8>, bool, u8);

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let text = prop_oneof![
        4 => prop::sample::select(vec![&b"\n"[..], b"\r", b"\r\n", b"\n\n", b"\0", b"\"\\\x1b[0m", b"\xe2\x82\xac\n"])
            .prop_map(<[u8]>::to_vec),
        // Parts of characters, and what is none.
        3 => prop::sample::select(vec![&b"\xe2"[..], b"\x82\xac", b"\xf0\x9f", b"\x98\x80", b"\xff\xfe", b"\xc3"])
            .prop_map(<[u8]>::to_vec),
        3 => "[a-z ]{0,40}".prop_map(String::into_bytes),
        1 => proptest::collection::vec(any::<u8>(), 0..200),
        1 => (any::<u8>(), 1..200_000_usize).prop_map(|(byte, length)| vec![byte; length]),
    ];
    let piece =
        (proptest::collection::vec(text, 1..5), any::<bool>(), prop_oneof![3 => Just(0), 1 => 1..4_u8]);
    let piece = piece.prop_map(|(texts, error, rest)| (texts.concat(), error, rest));
    proptest::collection::vec(piece, 0..10)
}

/// One replacement for each byte that is no part of a character.
fn lossy(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(std::iter::repeat_n('\u{fffd}', chunk.invalid().len()));
    }
    text
}

fn stripped(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
    if lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines.into_iter().map(|line| if line.is_empty() { "\n".to_owned() } else { line }).collect()
}

/// All bytes of one output, or of both.
fn written(pieces: &[Piece], error: Option<bool>) -> Vec<u8> {
    let wanted = pieces.iter().filter(|(_, to, _)| error.is_none_or(|error| *to == error));
    wanted.flat_map(|(bytes, ..)| bytes.clone()).collect()
}

/// A shell command that writes them.
fn program(host: &Host, pieces: &[Piece]) -> String {
    let mut command = String::new();
    for (number, (bytes, error, rest)) in pieces.iter().enumerate() {
        let file = host.daemon.dir.path().join(format!("piece-{number}"));
        std::fs::write(&file, bytes).unwrap();
        writeln!(command, "cat {}{}", file.display(), if *error { " >&2" } else { "" }).unwrap();
        if *rest > 0 {
            writeln!(command, "sleep 0.00{rest}").unwrap();
        }
    }
    command + "exit 3"
}

fn for_all(mut check: impl FnMut(Vec<Piece>)) {
    let cases = std::env::var("OSB_CASES").map_or(40, |cases| cases.parse().unwrap());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let check = std::cell::RefCell::new(&mut check);
    let run = |pieces| {
        (check.borrow_mut())(pieces);
        Ok(())
    };
    TestRunner::new(config).run(&pieces(), run).unwrap();
}

#[test]
fn of_a_command_with_its_line_ends() {
    let host = Host::start();
    for_all(|pieces| {
        let run = host.daemon.run(&program(&host, &pieces));
        assert_eq!(run.check().exit_code(), 3);
        assert!(run.stdout() == lossy(&written(&pieces, Some(false))), "{pieces:?}");
        assert!(run.stderr() == lossy(&written(&pieces, Some(true))), "{pieces:?}");
    });
}

#[test]
fn of_a_command_without_its_line_ends() {
    let host = Host::with(&["--line-endings", "strip"], &[]);
    for_all(|pieces| {
        let run = host.daemon.run(&program(&host, &pieces));
        assert_eq!(run.check().exit_code(), 3);
        for (kind, error) in [("stdout", false), ("stderr", true)] {
            assert!(run.texts(kind) == stripped(&lossy(&written(&pieces, Some(error)))), "{kind} {pieces:?}");
        }
    });
}

#[test]
fn of_runs_in_a_session() {
    for mode in ["keep", "strip"] {
        let host = Host::with(&["--line-endings", mode], &[]);
        let session = host.open();
        for_all(|pieces| {
            // `exit` in a shell of its own, so that the session's stays.
            let run = session.post(json!({ "command": format!("({})", program(&host, &pieces)) }));
            assert_eq!(run.exit_code(), 3);
            let expected = lossy(&written(&pieces, None));
            if mode == "keep" {
                assert!(run.stdout() == expected, "{pieces:?}");
            } else {
                assert!(run.texts("stdout") == stripped(&expected), "{pieces:?}");
            }
        });
    }
}

#[test]
fn of_a_background_command_by_its_cursor() {
    let host = Host::start();
    for_all(|pieces| {
        let body = json!({ "command": program(&host, &pieces), "background": true });
        let run = host.daemon.post(body);
        let (mut cursor, mut read) = (0_usize, Vec::new());
        loop {
            let ended = host.daemon.status(run.id())["running"] == Value::Bool(false);
            let logs = host.daemon.call("GET", &format!("/command/{}/logs?cursor={cursor}", run.id()), None);
            cursor = logs.head.header("execd-commands-tail-cursor").unwrap().parse().unwrap();
            read.extend(logs.body);
            assert_eq!(cursor, read.len());
            if ended {
                break;
            }
        }
        assert!(read == written(&pieces, None), "{pieces:?}");
    });
}

#[test]
fn of_a_terminal_and_its_replay() {
    let host = Host::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut at = 0_usize;
    for_all(|pieces| {
        let expected = written(&pieces, None);
        let command = format!("stty raw -echo\n({})\nread end", program(&host, &pieces));
        at += 7919;
        runtime.block_on(async {
            let id = terminals::running(&host.daemon, &command);
            let mut socket = terminals::attach(&host.daemon, &id, "").await;
            while socket.output.len() < expected.len() {
                assert!(socket.step().await, "{socket:?}");
            }
            assert!(socket.output == expected, "{pieces:?}");
            drop(socket);
            let since = at % (expected.len() + 1);
            let query = format!("since={since}&takeover=1");
            let mut socket = terminals::attach(&host.daemon, &id, &query).await;
            socket.text("connected").await;
            // More than the ring holds may have been written.
            let kept = expected.len().saturating_sub(1 << 20).max(since);
            assert!(socket.output == expected[kept..], "since {since} {pieces:?}");
            assert_eq!(socket.lost, (kept - since) as u64);
            // There may be only so many.
            assert_eq!(host.daemon.call("DELETE", &format!("/pty/{id}"), None).head.status, 200);
        });
    });
}
