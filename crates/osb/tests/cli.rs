//! The program as it is called: exit codes, streams, signals. The server is the test's own.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs, dead_code)]

#[path = "../../client/tests/support/mod.rs"]
mod support;

use std::process::Stdio;
use std::time::Duration;

use serde_json::json;
use support::{Fake, endpoint, json, pieces, reply};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

fn osb(fake: Option<&Fake>, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_osb"));
    command.args(args).env_clear().kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(fake) = fake {
        command.env("OPEN_SANDBOX_DOMAIN", fake.address.to_string());
    }
    command
}

async fn output(mut command: Command) -> (Option<i32>, String, String) {
    let output = tokio::time::timeout(Duration::from_secs(20), command.output()).await.unwrap().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn interrupt(child: &Child, signal: &str) {
    let pid = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

async fn code(mut child: Child) -> i32 {
    let status = tokio::time::timeout(Duration::from_secs(10), child.wait()).await.unwrap().unwrap();
    status.code().unwrap()
}

/// A server whose commands write a line and then run for ever, and whose creates take a while.
async fn slow(create: Duration) -> Fake {
    Fake::start(move |_, seen| async move {
        let line = |event: serde_json::Value| format!("{event}\n\n").into();
        match seen.method.as_str() {
            _ if seen.target.contains("/endpoints/") => endpoint(&seen),
            "POST" if seen.target == "/v1/sandboxes" => {
                tokio::time::sleep(create).await;
                let id = json!({"id": "s1", "status": {"state": "Running"}, "entrypoint": [],
                    "createdAt": "2026-11-30T17:49:18Z"});
                json(202, id)
            }
            "POST" => {
                let begin = line(json!({"type": "init", "text": "c1", "timestamp": 1}));
                let out = line(json!({"type": "stdout", "text": "on\n", "timestamp": 1}));
                support::endless(vec![begin, out])
            }
            "DELETE" => reply(204, ""),
            _ => reply(200, ""),
        }
    })
    .await
}

#[tokio::test]
async fn signals_end_the_program_and_delete_its_sandbox() {
    for (signal, expected) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let fake = slow(Duration::ZERO).await;
        let mut child = osb(Some(&fake), &["run", "host", "--", "sleep", "9"]).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).await.unwrap();
        assert_eq!(line, "on\n");
        interrupt(&child, signal);
        assert_eq!(code(child).await, expected);
        assert_eq!(fake.calls().last().unwrap(), "DELETE /v1/sandboxes/s1");
    }
}

#[tokio::test]
async fn a_signal_during_the_create_waits_for_its_answer_and_deletes() {
    let fake = slow(Duration::from_millis(400)).await;
    let child = osb(Some(&fake), &["run", "host", "--", "sleep", "9"]).spawn().unwrap();
    while fake.calls().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    interrupt(&child, "-INT");
    assert_eq!(code(child).await, 130);
    let calls = fake.calls();
    assert_eq!(calls.last().unwrap(), "DELETE /v1/sandboxes/s1");
    assert!(!calls.iter().any(|call| call.ends_with("/command")), "{calls:?}");
}

#[tokio::test]
async fn a_signal_to_a_command_in_a_kept_sandbox_ends_that_command_only() {
    let fake = slow(Duration::ZERO).await;
    let mut child = osb(Some(&fake), &["command", "run", "s1", "--", "sleep", "9"]).spawn().unwrap();
    let mut first = [0_u8; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut first).await.unwrap();
    interrupt(&child, "-INT");
    assert_eq!(code(child).await, 130);
    assert_eq!(fake.calls().last().unwrap(), "DELETE /v1/sandboxes/s1/proxy/44772/command?id=c1");
}

#[tokio::test]
async fn a_signal_during_a_download_leaves_no_half_a_file() {
    let fake = Fake::start(|_, seen| async move {
        match seen.target.as_str() {
            target if target.contains("/endpoints/") => endpoint(&seen),
            target if target.contains("/files/info") => json(
                200,
                json!({"/big": {"path": "/big", "type": "file", "size": 9_000_000, "mode": 644, "owner": "root",
                    "group": "root", "created_at": "2026-11-30T17:49:18Z", "modified_at": "2026-11-30T17:49:18Z"}}),
            ),
            _ => support::endless(vec![vec![b'x'; 100_000].into()]),
        }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let local = dir.path().join("big").display().to_string();
    for args in [&["cp", "s1:/big", &local][..], &["file", "download", "s1", "/big", &local]] {
        for (signal, expected) in [("-INT", 130), ("-TERM", 143)] {
            let child = osb(Some(&fake), args).spawn().unwrap();
            let begun = async {
                while std::fs::read_dir(dir.path()).unwrap().next().is_none() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(10), begun).await.unwrap();
            interrupt(&child, signal);
            assert_eq!(code(child).await, expected);
            assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "{args:?}");
        }
    }
}

#[tokio::test]
async fn local_input_does_not_hold_the_program_up() {
    let fake = Fake::start(|_, seen| async move {
        if seen.target.contains("/endpoints/") {
            return endpoint(&seen);
        }
        let lines = [
            json!({"type": "init", "text": "c1", "timestamp": 1}),
            json!({"type": "stdout", "text": "hi\n", "timestamp": 1}),
            json!({"type": "execution_complete", "timestamp": 1}),
        ];
        pieces(lines.iter().map(|line| format!("{line}\n\n").into()).collect(), false)
    })
    .await;
    // A pipe that stays open and silent.
    let mut command = osb(Some(&fake), &["command", "run", "s1", "--", "echo", "hi"]);
    command.stdin(Stdio::piped());
    let child = command.spawn().unwrap();
    let output =
        tokio::time::timeout(Duration::from_secs(10), child.wait_with_output()).await.unwrap().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"hi\n"[..]));
}

#[tokio::test]
async fn exit_codes_of_the_program_itself() {
    for (args, expected, words) in [
        (&["--help"][..], 0, "Isolated machines"),
        (&["sandbox"], 0, "endpoint"),
        (&["help", "sandbox", "create"], 0, "--skip-health-check"),
        (&["help", "sandbox", "craete"], 2, "'create'"),
        (&["help"], 0, "\n  isolation "),
        (&["help", "isolation"], 0, "A kernel bug is an escape."),
        (&["help", "DOCKER::INVALID_PORT"], 0, "1 to 65535"),
        (&["help", "isolatoin"], 2, "'isolation'"),
        (&["sandbox", "list", "--stat", "x"], 2, "'--state'"),
        (&["completions", "zsh"], 0, "port-forward"),
        (&["--version"], 0, "opensandbox, version "),
        (&["server", "--help"], 0, "--purge"),
        (&["image", "--help"], 0, "load"),
        (&["nonsense"], 2, "unrecognized subcommand"),
        (&["--no-color", "image", "list"], 2, "put it first"),
        (&["sandbox", "list", "--domain", "user@host"], 1, "is not right"),
        (&["run", "--domain", "127.0.0.1:1", "host", "--", "true"], 125, "cannot reach"),
        (&["server", "--config", "/nonexistent.toml"], 1, "/nonexistent.toml"),
        (&["server", "--check", "--purge"], 2, "cannot be used with"),
        (&["image", "list", "--config", "/nonexistent.toml"], 1, "/nonexistent.toml"),
    ] {
        let (code, out, err) = output(osb(None, args)).await;
        assert_eq!(code, Some(expected), "{args:?}: {out}{err}");
        assert!(format!("{out}{err}").contains(words), "{args:?}: {out}{err}");
        assert!(!err.contains("panicked") && !err.contains("backtrace"), "{err}");
    }
}

#[tokio::test]
async fn called_as_opensandbox_server_it_takes_that_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().join("opensandbox-server");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_osb"), &name).unwrap();
    for (args, expected, words) in [
        (&["--config", "/nonexistent.toml", "--reload"][..], 1, "/nonexistent.toml"),
        (&["init-config", "x", "--example", "docker"], 1, "not in this version"),
        (&["migrate-snapshots", "--to", "x"], 1, "comes later"),
        (&["--help"], 0, "--reload"),
    ] {
        let mut command = Command::new(&name);
        command.args(args).env_clear();
        let (code, out, err) = output(command).await;
        assert_eq!(code, Some(expected), "{args:?}: {out}{err}");
        assert!(format!("{out}{err}").contains(words), "{args:?}: {out}{err}");
    }
}

#[tokio::test]
async fn a_configuration_file_is_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("below/config.toml");
    let path = path.to_str().unwrap();
    for (args, expected, words) in [
        (&["server", "init-config", path][..], 0, "configuration written"),
        (&["server", "init-config", path], 1, "--force"),
        (&["server", "init-config", "--force", path], 0, "configuration written"),
    ] {
        let (code, out, err) = output(osb(None, args)).await;
        assert_eq!((code, err.as_str()), (Some(expected), ""), "{args:?}: {out}");
        assert!(out.contains(words) && out.contains(path), "{out}");
    }
    // It is taken as it is; what is missing is a key.
    let (code, _, err) = output(osb(None, &["server", "--config", path])).await;
    assert!(code == Some(1) && err.contains("no API key is configured"), "{err}");
}

#[tokio::test]
async fn a_person_is_asked_before_a_server_without_a_key_starts() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    // A data directory that cannot be made ends the start that was agreed to.
    let text = "[server]\nhost = \"127.0.0.1\"\nport = 1\n[runtime]\ntype = \"embedded\"\n\
        [embedded]\ndata_dir = \"/dev/null/x\"\n";
    std::fs::write(&config, text).unwrap();
    for (answer, asked_again) in [("no", true), ("YES", false)] {
        let line = format!("{} server --config {}", env!("CARGO_BIN_EXE_osb"), config.display());
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).env_clear().env("PATH", "/usr/bin:/bin");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stdin, format!("{answer}\n").as_bytes()).await.unwrap();
        let done = tokio::time::timeout(Duration::from_secs(20), child.wait_with_output()).await;
        let done = done.unwrap().unwrap();
        drop(stdin);
        let out = String::from_utf8_lossy(&done.stdout);
        assert!(!done.status.success() && out.contains("Type YES within 30 seconds"), "{out}");
        assert_eq!(out.contains("error: no API key is configured"), asked_again, "{out}");
    }
    // Without a terminal nobody is asked.
    let (code, out, err) = output(osb(None, &["server", "--config", config.to_str().unwrap()])).await;
    assert!(code == Some(1) && !format!("{out}{err}").contains("Type YES"), "{out}{err}");
}

#[tokio::test]
async fn colours_are_for_terminals_and_can_be_switched_off() {
    // `script` gives the program a terminal.
    let run = |args: &str, env: &'static str| {
        let mut command = Command::new("script");
        let line = format!("{} {args}", env!("CARGO_BIN_EXE_osb"));
        command
            .args(["-qec", &line, "/dev/null"])
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("TERM", "xterm");
        command.stdin(Stdio::null());
        if !env.is_empty() {
            command.env(env, "1");
        }
        output(command)
    };
    for (args, env, colored) in [
        ("nonsense", "", true),
        ("nonsense", "NO_COLOR", false),
        ("--no-color nonsense", "", false),
        ("--domain user@host sandbox list", "", true),
        ("--domain user@host sandbox list", "NO_COLOR", false),
        ("--no-color --domain user@host sandbox list", "", false),
    ] {
        let (_, out, _) = run(args, env).await;
        assert!(out.contains("error:"), "{out}");
        assert_eq!(out.contains('\x1b'), colored, "{args} {env}: {out:?}");
    }
}
