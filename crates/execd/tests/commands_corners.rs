//! Output in every corner, in both modes of line ends, by every way that leads to it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use common::{Daemon, Run, open_at};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;

/// A daemon with a session in it.
struct Host {
    daemon: Daemon,
    session: String,
}

impl Host {
    fn new(line_endings: &str) -> Self {
        let daemon = Daemon::with(&["--line-endings", line_endings], &[]);
        let session = daemon.call("POST", "/session", None).json()["session_id"].as_str().unwrap().to_owned();
        Self { daemon, session }
    }

    fn in_session(&self, command: &str) -> Run {
        let path = format!("/session/{}/run", self.session);
        let mut stream = open_at(self.daemon.connect(), &path, json!({ "command": command }));
        let mut run = Run::default();
        while let Some((at, event)) = stream.next_event() {
            run.times.push(at);
            run.events.push(event);
        }
        run
    }

    fn in_background(&self, command: &str) -> Vec<u8> {
        let run = self.daemon.post(json!({ "command": command, "background": true }));
        self.daemon.wait_ended(run.id());
        self.daemon.call("GET", &format!("/command/{}/logs?cursor=0", run.id()), None).body
    }
}

/// What one printf writes, and the events of it when line ends are kept and when they are stripped.
const CORNERS: [(&str, &[&str], &[&str]); 14] = [
    ("", &[], &[]),
    ("a", &["a"], &["a"]),
    ("a\n", &["a\n"], &["a"]),
    ("\n", &["\n"], &["\n"]),
    ("\n\n", &["\n", "\n"], &["\n", "\n"]),
    ("\r", &["\r"], &["\n"]),
    ("a\r", &["a\r"], &["a"]),
    ("a\r\nb", &["a\r\n", "b"], &["a", "b"]),
    ("a\r\r\nb\r\n", &["a\r", "\r\n", "b\r\n"], &["a", "\n", "b"]),
    ("\r\n\r\n", &["\r\n", "\r\n"], &["\n", "\n"]),
    ("a\n\nb", &["a\n", "\n", "b"], &["a", "\n", "b"]),
    ("a\n\rb", &["a\n", "\r", "b"], &["a", "\n", "b"]),
    (" \n\t\n", &[" \n", "\t\n"], &[" ", "\t"]),
    ("é\nü", &["é\n", "ü"], &["é", "ü"]),
];

#[test]
fn line_ends_in_every_corner() {
    for (mode, host) in ["keep", "strip"].map(|mode| (mode, Host::new(mode))) {
        for (text, kept, stripped) in CORNERS {
            let expected = if mode == "keep" { kept } else { stripped };
            let octal: String = text.bytes().map(|byte| format!("\\{byte:03o}")).collect();
            let printf = format!("printf '{octal}'");
            assert_eq!(host.daemon.run(&printf).texts("stdout"), expected, "{mode} {text:?}");
            assert_eq!(
                host.daemon.run(&format!("{printf} >&2")).texts("stderr"),
                expected,
                "{mode} {text:?}"
            );
            assert_eq!(host.in_session(&printf).texts("stdout"), expected, "{mode} {text:?} in a session");
            assert_eq!(host.in_background(&printf), text.as_bytes(), "{mode} {text:?} in the background");
        }
        let long = "head -c 200000 /dev/zero | tr '\\0' x";
        assert_eq!(host.daemon.run(long).texts("stdout").len(), 1, "{mode}");
    }
}

/// Text of bytes: each that is no UTF-8 becomes one replacement.
fn shown(mut bytes: &[u8]) -> String {
    let mut shown = String::new();
    loop {
        match std::str::from_utf8(bytes) {
            Ok(text) => return shown + text,
            Err(error) => {
                let (good, bad) = bytes.split_at(error.valid_up_to());
                shown += std::str::from_utf8(good).unwrap();
                shown.push('\u{fffd}');
                bytes = &bad[1..];
            }
        }
    }
}

#[test]
fn any_bytes_arrive_as_text_and_can_be_had_exactly() {
    let host = Host::new("keep");
    let path = host.daemon.dir.path().join("bytes");
    let cat = format!("cat {0}; sleep 0.01; cat {0}", path.display());
    let piece = prop_oneof![
        Just(b"\n".to_vec()),
        Just(b"\r\n".to_vec()),
        Just("é€🦀".as_bytes().to_vec()),
        proptest::collection::vec(any::<u8>(), 0..40),
        (1..70_000_usize).prop_map(|length| vec![b'x'; length]),
    ];
    let bytes = proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat());
    let mut runner = TestRunner::new(ProptestConfig::with_cases(24));
    runner
        .run(&bytes, |bytes| {
            std::fs::write(&path, &bytes).unwrap();
            let twice = [&bytes[..], &bytes].concat();
            prop_assert_eq!(host.daemon.run(&cat).stdout(), shown(&twice));
            prop_assert_eq!(host.in_session(&cat).stdout(), shown(&twice));
            // The exact bytes: in the background, and by a file.
            prop_assert!(host.in_background(&cat) == twice);
            host.daemon.run(&format!("({cat}) > {}.2", path.display())).check();
            let file = host.daemon.call("GET", &format!("/files/download?path={}.2", path.display()), None);
            prop_assert!(file.body == twice);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_user_without_account_and_group_has_group_0_and_no_others() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let daemon = Daemon::start();
    let run = daemon.post(json!({ "command": "id -u; id -g; id -G; echo $HOME", "uid": 54_321, "cwd": "/" }));
    assert_eq!(run.stdout().lines().take(3).collect::<Vec<_>>(), ["54321", "0", "0"]);
    let run = daemon.post(json!({ "argv": ["id", "-u"], "uid": 54_321, "gid": 7, "cwd": "/" }));
    assert_eq!(run.stdout(), "54321\n");
    let refused = daemon.call("POST", "/command", Some(json!({ "command": "id", "gid": 7 })));
    assert_eq!((refused.head.status, &refused.json()["code"]), (400, &json!("INVALID_REQUEST_BODY")));
}
