//! Names, texts and errors that would take a terminal over, come as long as a book, or are wider than they look.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs, dead_code)]

#[path = "../../client/tests/support/mod.rs"]
mod support;

mod harness;

use harness::{Done, How, Size, osb_how};
use serde_json::{Value, json};
use support::{Fake, endpoint, json};
use unicode_width::UnicodeWidthStr as _;

/// Clears the screen, sets the title, moves the cursor, turns the direction, and ends the line.
const EVIL: &str = "a\x1b[2J\x1b]0;t\x07\u{9b}2J\rb\nc\u{202e}d\u{2066}\u{200f}\u{2028}e\x7f";
const WIDE: &str = "日本語👩‍👩‍👧‍👦🇩🇪é";

fn texts() -> Vec<String> {
    vec![EVIL.to_owned(), WIDE.to_owned(), "x".repeat(10_000), format!("{WIDE}{EVIL}")]
}

/// A server of which every text is `text`.
async fn server(text: String) -> Fake {
    Fake::start(move |_, seen| {
        let at = "2026-11-30T17:49:18Z";
        let page = json!({"page": 1, "pageSize": 20, "totalItems": 2, "totalPages": 1, "hasNextPage": false});
        let sandbox = |id: &str| {
            json!({
                "id": id, "image": {"uri": text}, "entrypoint": [text], "metadata": {"k": text}, "createdAt": at,
                "status": {"state": "Failed", "reason": text, "message": text}, "extensions": {"e": text},
                "snapshotId": text, "platform": {"os": text, "arch": text},
            })
        };
        let snapshot = json!({"id": "n1", "sandboxId": text, "name": text, "createdAt": at,
            "status": {"state": "Ready", "reason": text, "message": text}});
        let template = json!({"templateId": "t1", "image": text, "publish": text, "format": "native",
            "entrypoint": [text], "env": {"A": text}, "metadata": {"k": text}, "createdAt": at, "updatedAt": at,
            "readiness": {"probe": text}, "status": {"phase": "Failed", "message": text, "manifestRef": text}});
        let file = json!({"path": text, "type": "file", "size": 1, "mode": 644, "owner": text, "group": text,
            "created_at": at, "modified_at": at});
        let content = json!({"sandboxId": "s1", "kind": "logs", "scope": "all", "delivery": "inline",
            "contentType": text, "content": text, "truncated": true, "warnings": [text]});
        let list = |item: &Value| json!({"items": [item, item], "pagination": page});
        let path = seen.target.split('?').next().unwrap_or_default().to_owned();
        let answer = match path.as_str() {
            _ if path.contains("/endpoints/44772") => endpoint(&seen),
            _ if path.contains("/endpoints/") => json(200, json!({"endpoint": text, "headers": {"H": text}})),
            "/v1/sandboxes" => json(200, list(&sandbox("s1"))),
            "/v1/sandboxes/s1" => json(200, sandbox("s1")),
            "/v1/snapshots" => json(200, list(&snapshot)),
            "/v1/snapshots/n1" => json(200, snapshot),
            "/v1/templates" => json(200, list(&template)),
            "/v1/templates/t1" => json(200, template),
            _ if path.contains("/files/search") || path.contains("/directories/list") => {
                json(200, json!([file, file]))
            }
            _ if path.contains("/files/info") => json(200, json!({"/x": file})),
            _ if path.contains("/command/status") => json(200, json!({"id": "c1", "content": text, "running": false,
                "exit_code": 1, "error": text, "started_at": text, "finished_at": text})),
            _ if path.ends_with("diagnostics/logs") && seen.target.contains("scope=") => json(200, content),
            _ if path.ends_with("diagnostics/events") && seen.target.contains("scope=") => json(200, content),
            _ if path.contains("/diagnostics/") => support::reply(200, text.clone()),
            _ => json(500, json!({"code": text, "message": text})),
        };
        async move { answer }
    })
    .await
}

const SHOWN: [&str; 20] = [
    "sandbox list",
    "sandbox get s1",
    "sandbox endpoint s1 --port 80",
    "snapshot list",
    "snapshot get n1",
    "template list",
    "template get t1",
    "file ls s1 /x",
    "file search s1 / -p *",
    "file info s1 /x",
    "command status s1 c1",
    "diagnostics logs s1 --scope all",
    "diagnostics events s1 --scope all",
    "diagnostics logs s1 --scope all -o table",
    "devops inspect s1",
    "devops logs s1",
    "devops summary s1",
    "events --existing nothing",
    "top --once",
    // Unknown to the server: an error.
    "sandbox renew s1 -t 1m",
];

async fn at_terminal(fake: &Fake, line: &str, width: Option<Size>) -> Done {
    let words: Vec<&str> = ["--no-color"].into_iter().chain(line.split(' ')).collect();
    let how = How { terminal: true, size: width, ..How::default() };
    let done = tokio::time::timeout(std::time::Duration::from_secs(1), osb_how(fake, &words, how)).await;
    // What goes on and on has shown what there is.
    done.unwrap_or_else(|_| Done { code: 0, out: String::new(), err: String::new() })
}

#[tokio::test]
async fn nothing_that_a_terminal_obeys_is_shown() {
    for text in texts() {
        let fake = server(text).await;
        for line in SHOWN {
            let done = at_terminal(&fake, line, None).await;
            let shown = format!("{}{}", done.out, done.err);
            let orders: Vec<char> = shown
                .chars()
                .filter(|c| *c != '\n' && (c.is_control() || "\u{202e}\u{2066}\u{200f}\u{2028}".contains(*c)))
                .collect();
            assert!(orders.is_empty(), "{line}: {orders:?} {shown:?}");
        }
    }
}

/// Columns begin at the same place in every line.
#[tokio::test]
async fn columns_stay_aligned() {
    for text in texts() {
        let fake = server(text).await;
        for line in ["sandbox list", "snapshot list", "template list", "file ls s1 /x"] {
            for size in [None, Some((|| Some((80, 24))) as fn() -> _)] {
                let done = at_terminal(&fake, line, size).await;
                let lines: Vec<&str> = done.out.lines().collect();
                assert_eq!((done.code, lines.len()), (0, 3), "{line}: {done:?}");
                // The last column's values are equal, and so are the widths of what stands before them.
                let before = |line: &str| {
                    let at = line.trim_end().rfind("  ").unwrap();
                    line[..at].width()
                };
                assert_eq!(before(lines[1]), before(lines[2]), "{line}");
                let wide = lines[1].width() > 1_000;
                assert!(wide || before(lines[0]) <= before(lines[1]), "{line}: {lines:?}");
                assert!(lines[0].width() < 1_000, "{line}: a heading is not {} wide", lines[0].width());
            }
        }
    }
}

/// Programs get every byte; that YAML does so, too, is for a parser of it to say (`conformance/test_cli_answers.py`).
#[tokio::test]
async fn json_is_exact() {
    for text in texts() {
        let fake = server(text.clone()).await;
        for line in
            ["sandbox get s1", "snapshot get n1", "template get t1", "diagnostics logs s1 --scope all"]
        {
            let json = at_terminal(&fake, &format!("{line} -o json"), None).await.out;
            let json: Value = serde_json::from_str(&json).unwrap();
            assert!(has(&json, &text), "{line}: {json}");
        }
    }
}

fn has(value: &Value, text: &str) -> bool {
    match value {
        Value::String(own) => own == text,
        Value::Array(items) => items.iter().any(|item| has(item, text)),
        Value::Object(members) => members.values().any(|member| has(member, text)),
        _ => false,
    }
}
