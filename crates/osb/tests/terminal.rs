//! The program at a terminal and at a pipe: width, the way out, readers that leave, servers that stay silent.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs, dead_code)]

#[path = "../../client/tests/support/mod.rs"]
mod support;

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use support::{Fake, endpoint, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;

const OSB: &str = env!("CARGO_BIN_EXE_osb");

/// A server with many sandboxes that run.
async fn many() -> Fake {
    Fake::start(|_, seen| async move {
        if seen.target.contains("/endpoints/") {
            return endpoint(&seen);
        }
        if seen.target.contains("/metrics") {
            let figures = json!({"cpu_count": 1.0, "cpu_used_pct": 12.3, "mem_total_mib": 2048.0,
                "mem_used_mib": 1234.5, "timestamp": 1});
            return json(200, figures);
        }
        let sandbox = |number: u32| {
            json!({"id": format!("fa89052c-e221-4f56-87de-{number:012}"), "status": {"state": "Running"},
                "image": {"uri": "docker.io/library/python:3.12"}, "entrypoint": [],
                "createdAt": "2026-11-30T17:49:18Z", "expiresAt": "2036-11-30T17:49:18Z"})
        };
        let items: Vec<_> = (0..25).map(sandbox).collect();
        json(
            200,
            json!({"items": items, "pagination": {"page": 1, "pageSize": 200, "totalItems": 25,
            "totalPages": 1, "hasNextPage": false}}),
        )
    })
    .await
}

/// Runs a line of shell on a terminal and returns all that came out of it.
async fn on_terminal(fake: &Fake, line: &str) -> String {
    let mut command = Command::new("script");
    command.args(["-qec", line, "/dev/null"]).env_clear();
    command.env("PATH", "/usr/bin:/bin").env("TERM", "xterm");
    command.env("OPEN_SANDBOX_DOMAIN", fake.address.to_string());
    command.stdin(Stdio::null()).kill_on_drop(true);
    let done: Output =
        tokio::time::timeout(Duration::from_secs(20), command.output()).await.unwrap().unwrap();
    String::from_utf8(done.stdout).unwrap()
}

#[tokio::test]
async fn top_fits_onto_the_terminal_and_leaves_it_as_it_was() {
    let fake = many().await;
    for (columns, kept, gone) in [
        (40, &["ID", "CPU"][..], &["IMAGE", "LIMIT"][..]),
        (60, &["ID", "CPU", "MEMORY"], &["IMAGE", "LIMIT"]),
        (150, &["ID", "CPU", "MEMORY", "STATUS", "IMAGE", "AGE"], &[]),
    ] {
        let line = format!(
            "stty cols {columns} rows 20; before=$(stty -g); timeout --foreground -s INT 4 {OSB} --no-color top -i 1; \
             echo code $?; [ \"$before\" = \"$(stty -g)\" ] && echo as it was"
        );
        let out = on_terminal(&fake, &line).await;
        let frame = out.split("\x1b[H\x1b[2J").nth(1).unwrap_or_else(|| panic!("{out}"));
        let lines: Vec<&str> = frame.lines().map(|line| line.trim_end_matches('\r')).collect();
        let table = &lines[..lines.iter().position(|line| line.ends_with(" more")).unwrap() + 1];
        assert!(table.len() < 20, "{table:?}");
        assert!(table.iter().all(|line| line.chars().count() <= columns), "{columns}: {table:#?}");
        let headings: Vec<&str> = table[0].split("  ").map(str::trim).collect();
        assert!(kept.iter().all(|name| headings.contains(name)), "{columns}: {headings:?}");
        assert!(!gone.iter().any(|name| headings.contains(name)), "{columns}: {headings:?}");
        assert!(out.contains("as it was"), "{out}");
    }
}

#[tokio::test]
async fn an_interrupt_is_told_by_the_exit_code() {
    let fake = many().await;
    for args in [&["top"][..], &["events"], &["port-forward", "s1", "0:80"]] {
        let line =
            format!("{OSB} --no-color {} & sleep 1; kill -INT $!; wait $!; echo code $?", args.join(" "));
        // A shell of a script lets its background jobs ignore the signal; `set -m` does not.
        let out = on_terminal(&fake, &format!("bash -c 'set -m; {line}'")).await;
        assert!(out.contains("code 130"), "{args:?}: {out}");
    }
}

/// Nothing happens on the server, and so nothing is written that would show that nobody reads.
#[tokio::test]
async fn a_reader_that_leaves_ends_what_goes_on_and_on() {
    let fake = many().await;
    for args in [&["events", "--existing", "--interval", "60000"][..], &["events", "--interval", "60000"]] {
        let mut command = Command::new(OSB);
        command.args(args).env_clear().env("OPEN_SANDBOX_DOMAIN", fake.address.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut reader = BufReader::new(child.stdout.take().unwrap());
        if args.contains(&"--existing") {
            let mut line = String::new();
            reader.read_line(&mut line).await.unwrap();
            assert!(line.contains("existing"), "{line}");
        } else {
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        drop(reader);
        let status = tokio::time::timeout(Duration::from_secs(2), child.wait()).await.unwrap().unwrap();
        let mut told = String::new();
        child.stderr.take().unwrap().read_to_string(&mut told).await.unwrap();
        assert_eq!((status.code(), told.as_str()), (Some(141), ""), "{args:?}");
    }
}

/// A server that takes connections and never answers.
#[tokio::test]
async fn what_is_waited_for_is_told() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    for (args, words) in [
        (&["run", "host", "--", "true"][..], "making the sandbox: no answer from http://"),
        (&["sandbox", "create", "-i", "host"], "making the sandbox: no answer from http://"),
        (&["sandbox", "list"], "no answer yet from http://"),
        (&["snapshot", "list"], "no answer yet from http://"),
        (&["diagnostics", "logs", "s1", "--scope", "all"], "no answer yet from http://"),
    ] {
        let mut command = Command::new(OSB);
        command.args(args).env_clear().env("OPEN_SANDBOX_DOMAIN", &address);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let read = tokio::time::timeout(Duration::from_secs(10), stderr.read_line(&mut line)).await;
        assert!(read.is_ok() && line.contains(words) && line.contains(&address), "{args:?}: {line}");
    }
    // The limit of ordinary calls ends the wait.
    let mut command = Command::new(OSB);
    command.args(["--request-timeout", "1", "sandbox", "list"]).env_clear();
    command.env("OPEN_SANDBOX_DOMAIN", &address).stdin(Stdio::null()).kill_on_drop(true);
    let began = Instant::now();
    let done = tokio::time::timeout(Duration::from_secs(9), command.output()).await.unwrap().unwrap();
    let told = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.code() == Some(1) && told.contains("1 s"), "{told} after {:?}", began.elapsed());
}
