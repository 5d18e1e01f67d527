//! Calls that only other daemons of the protocol serve so far, against answers as the contract has them.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs)]

#[allow(dead_code, reason = "not every test program uses all of it")]
mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use opensandbox::{
    Attach, Client, CodeContext, CodeEvent, Config, Error, IsolatedSessionSpec, IsolatedWorkspace,
    TerminalEvent, TerminalSignal,
};
use serde_json::{Value, json};
use support::{Body, Fake, Seen, endpoint, json, pieces, reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};

/// A server with one sandbox whose daemon answers as `daemon` says to `METHOD /path?query`.
async fn with_daemon<F>(daemon: F) -> (Fake, opensandbox::Sandbox)
where
    F: Fn(&str, Seen) -> hyper::Response<Body> + Clone + Send + Sync + 'static,
{
    let fake = Fake::start(move |_, seen| {
        let call = seen.call().replace("/v1/sandboxes/s1/proxy/44772", "");
        let answer = if call.contains("/endpoints/") { endpoint(&seen) } else { daemon(&call, seen) };
        async move { answer }
    })
    .await;
    let client = Client::new(Config::new(&fake.address.to_string()).unwrap()).unwrap();
    (fake, client.sandbox("s1"))
}

fn stream(events: &[Value]) -> hyper::Response<Body> {
    pieces(events.iter().map(|event| format!("{event}\n\n").into()).collect(), false)
}

fn body(seen: &Seen) -> Value {
    serde_json::from_slice(&seen.body).unwrap()
}

#[tokio::test]
async fn sessions_run_one_command_after_the_other() {
    let (fake, sandbox) = with_daemon(|call, _| match call {
        "POST /session" => json(200, json!({"session_id": "S"})),
        "POST /session/S/run" => stream(&[
            json!({"type": "init", "text": "S", "timestamp": 1}),
            json!({"type": "stdout", "text": "a", "timestamp": 1}),
            json!({"type": "stdout", "text": "b", "timestamp": 1}),
            json!({"type": "execution_complete", "execution_time": 4, "timestamp": 1}),
        ]),
        "DELETE /session/S" | "DELETE /command?id=S" => reply(200, ""),
        _ => reply(404, ""),
    })
    .await;
    let session = sandbox.create_session(Some("/w")).await.unwrap();
    assert_eq!(session.id(), "S");
    let output = session.shell("x").cwd("/y").timeout(Duration::from_secs(2)).output().await.unwrap();
    assert_eq!((output.id.as_str(), output.stdout.as_str(), output.success()), ("S", "a\nb", true));
    session.interrupt().await.unwrap();
    session.delete().await.unwrap();
    let seen = fake.seen();
    assert_eq!(body(&seen[1]), json!({"cwd": "/w"}));
    assert_eq!(body(&seen[2]), json!({"command": "x", "cwd": "/y", "timeout": 2000}));
}

#[tokio::test]
async fn cells_give_values_output_and_exceptions() {
    let (fake, sandbox) = with_daemon(|call, seen| match call {
        "POST /code/context" => json(200, json!({"id": "C", "language": "python", "cwd": "/w"})),
        "GET /code/contexts?language=python" => json(200, json!([{"id": "C", "language": "python"}])),
        "GET /code/contexts/C" => json(200, json!({"id": "C", "language": "python"})),
        "DELETE /code/contexts/C" | "DELETE /code/contexts?language=python" | "DELETE /code?id=C" => {
            reply(200, "")
        }
        "POST /code" if seen.body.windows(5).any(|w| w == b"raise") => stream(&[
            json!({"type": "init", "text": "C", "timestamp": 1}),
            json!({"type": "status", "text": "error", "timestamp": 1}),
            json!({"type": "error", "timestamp": 1,
                "error": {"ename": "ValueError", "evalue": "no", "traceback": ["line 1"]}}),
            json!({"type": "execution_complete", "execution_time": 2, "timestamp": 1}),
        ]),
        "POST /code" if seen.body.windows(3).any(|w| w == b"cut") => {
            stream(&[json!({"type": "init", "text": "C", "timestamp": 1})])
        }
        // The end before the value, as the reference may send it.
        "POST /code" => stream(&[
            json!({"type": "init", "text": "C", "timestamp": 1}),
            json!({"type": "stdout", "text": "a\n", "timestamp": 1}),
            json!({"type": "stdout", "text": "b", "timestamp": 1}),
            json!({"type": "execution_complete", "execution_time": 5, "timestamp": 1}),
            json!({"type": "execution_count", "execution_count": 3, "timestamp": 1}),
            json!({"type": "result", "timestamp": 1,
                "results": {"text": "42", "image/png": "aGk=", "application/json": {"a": 1}}}),
        ]),
        _ => reply(404, ""),
    })
    .await;
    let code = sandbox.code();
    let context = code.create_context("python", Some("/w")).await.unwrap();
    assert_eq!(context.id.as_deref(), Some("C"));
    let output = code.run_in(&context, "x").output().await.unwrap();
    assert_eq!((output.stdout.as_str(), output.text(), output.count), ("a\nb", Some("42"), Some(3)));
    assert_eq!((output.time, output.success()), (Some(Duration::from_millis(5)), true));
    assert_eq!(output.results[0].form("image/png"), Some("aGk="));
    assert_eq!(output.results[0].form("application/json"), Some(r#"{"a":1}"#));

    let mut events = Vec::new();
    let failed = code.run("python", "raise").output_with(|event| events.push(event.clone())).await.unwrap();
    assert_eq!(failed.error.unwrap().ename, "ValueError");
    assert_eq!(events.last(), Some(&CodeEvent::Finished { time: Some(Duration::from_millis(2)) }));
    let cut = code.run("python", "cut").output().await.unwrap_err();
    assert!(matches!(cut, Error::StreamCut), "{cut}");

    assert_eq!(code.contexts(Some("python")).await.unwrap().len(), 1);
    code.context("C").await.unwrap();
    code.interrupt("C").await.unwrap();
    code.delete_context("C").await.unwrap();
    code.delete_contexts("python").await.unwrap();
    let seen = fake.seen();
    assert_eq!(body(&seen[1]), json!({"language": "python", "cwd": "/w"}));
    assert_eq!(body(&seen[2]), json!({"code": "x", "context": {"id": "C", "language": "python"}}));
    assert_eq!(body(&seen[3]), json!({"code": "raise", "context": {"language": "python"}}));
    assert_eq!(context, CodeContext { cwd: Some("/w".to_owned()), ..context.clone() });
}

#[tokio::test]
async fn isolated_sessions_have_runs_logs_and_files() {
    let (fake, sandbox) = with_daemon(|call, seen| match call {
        "POST /v1/isolated/session" => {
            json(201, json!({"session_id": "I", "created_at": "2026-11-30T00:00:00Z"}))
        }
        "GET /v1/isolated/sessions" => json(
            200,
            json!({"sessions": [
            {"session_id": "I", "status": "active", "created_at": "t", "last_run_at": "t"}]}),
        ),
        "GET /v1/isolated/session/I" => json(
            200,
            json!({"status": "active", "created_at": "t",
            "last_run_at": "t", "workspace": {"path": "/w", "mode": "ro"}, "idle_timeout_seconds": 0}),
        ),
        "GET /v1/isolated/capabilities" => json(
            200,
            json!({"available": true, "isolator": "bwrap",
            "version": "1", "setpriv_available": true, "userns_available": false,
            "hardening": {"init_mode": "pid1", "signal_shield": true, "seccomp": {"state": "active"}}}),
        ),
        "POST /v1/isolated/session/I/run" if body(&seen)["background"] == true => {
            json(202, json!({"session_id": "I", "run_id": "R", "started_at": "t"}))
        }
        "POST /v1/isolated/session/I/run" => stream(&[
            json!({"type": "stdout", "text": "x", "timestamp": 1}),
            json!({"type": "error", "text": "exit", "timestamp": 1,
                "error": {"ename": "ExitError", "evalue": "4", "traceback": []}}),
        ]),
        "GET /v1/isolated/session/I/runs/R" => json(
            200,
            json!({"session_id": "I", "run_id": "R",
            "running": false, "exit_code": 0, "started_at": "t", "finished_at": "t"}),
        ),
        "GET /v1/isolated/session/I/runs/R/logs?cursor=3" => reply(200, "more"),
        "GET /v1/isolated/session/I/files/download?path=%2Fw%2Ff" => reply(200, "content"),
        "DELETE /v1/isolated/session/I" => reply(200, ""),
        _ => reply(404, ""),
    })
    .await;
    let isolation = sandbox.isolation();
    let can = isolation.capabilities().await.unwrap();
    assert_eq!((can.available, can.hardening.unwrap().seccomp.state.as_str()), (true, "active"));
    let workspace = IsolatedWorkspace { path: "/w".to_owned(), mode: None };
    let spec = IsolatedSessionSpec { workspace: Some(workspace), ..IsolatedSessionSpec::default() };
    let session = isolation.create(&spec).await.unwrap();
    assert_eq!(isolation.list().await.unwrap()[0].session_id, "I");
    let info = session.info().await.unwrap();
    assert_eq!(info.spec.workspace.unwrap().mode.as_deref(), Some("ro"));
    let run = session.shell("x").env("A", "1").timeout(Duration::from_secs(3));
    let output = run.output().await.unwrap();
    assert_eq!((output.stdout.as_str(), output.exit.code), ("x", Some(4)));
    let run = session.shell("y").start().await.unwrap();
    assert_eq!(session.run_status(&run.run_id).await.unwrap().exit_code, Some(0));
    let logs = session.run_logs(&run.run_id, 3).await.unwrap();
    assert_eq!((&logs.content[..], logs.cursor), (&b"more"[..], Some(7)));
    assert_eq!(session.files().read("/w/f").await.unwrap(), "content");
    session.delete().await.unwrap();
    let runs: Vec<Value> =
        fake.seen().iter().filter(|seen| seen.target.ends_with("/run")).map(body).collect();
    assert_eq!(
        runs,
        [
            json!({"code": "x", "envs": {"A": "1"}, "timeout_seconds": 3}),
            json!({"code": "y", "background": true})
        ]
    );
}

#[tokio::test]
async fn files_of_an_identity_have_a_path_of_their_own() {
    let (_fake, sandbox) = with_daemon(|call, _| match call {
        "POST /v1/filesystem/7/8/directories" => reply(200, ""),
        _ => reply(404, ""),
    })
    .await;
    let own = BTreeMap::from([("/d".to_owned(), opensandbox::Permission::default())]);
    sandbox.files_as(7, 8).make_directories(&own).await.unwrap();
}

/// One connection that asks for an endpoint, then one with a terminal that is played by `play`.
async fn terminal<F, R>(play: F) -> opensandbox::Terminal
where
    F: Fn(String, WebSocketStream<tokio::net::TcpStream>) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = ()> + Send,
{
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut tcp, _) = listener.accept().await.unwrap();
            let play = play.clone();
            tokio::spawn(async move {
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    let mut byte = [0];
                    if tcp.read(&mut byte).await.unwrap_or(0) == 0 {
                        return;
                    }
                    head.push(char::from(byte[0]));
                }
                let target = head.split(' ').nth(1).unwrap().to_owned();
                let answer = |status: &str, body: &str| {
                    format!(
                        "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                        body.len()
                    )
                };
                if target.ends_with("/pty/refused") {
                    let body = json!({"code": "CONTEXT_NOT_FOUND", "message": "none"}).to_string();
                    tcp.write_all(answer("404 Not Found", &body).as_bytes()).await.unwrap();
                } else if target.contains("/endpoints/") {
                    let body = json!({"endpoint": format!("{address}/d")}).to_string();
                    tcp.write_all(answer("200 OK", &body).as_bytes()).await.unwrap();
                } else if target.contains("taken") {
                    let body = json!({"code": "ALREADY_CONNECTED", "message": "taken"}).to_string();
                    tcp.write_all(answer("409 Conflict", &body).as_bytes()).await.unwrap();
                } else if target.contains("plain") {
                    tcp.write_all(answer("200 OK", "hello").as_bytes()).await.unwrap();
                } else {
                    let key = head.lines().find_map(|line| line.strip_prefix("sec-websocket-key: ")).unwrap();
                    let key = if target.contains("wrong") { "x" } else { key };
                    let accept = derive_accept_key(key.as_bytes());
                    let head = format!(
                        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                         sec-websocket-accept: {accept}\r\n\r\n"
                    );
                    tcp.write_all(head.as_bytes()).await.unwrap();
                    play(target, WebSocketStream::from_raw_socket(tcp, Role::Server, None).await).await;
                }
            });
        }
    });
    Client::new(Config::new(&address.to_string()).unwrap()).unwrap().sandbox("s").terminal("T")
}

fn text(value: &Value) -> Message {
    Message::Text(value.to_string().into())
}

#[tokio::test]
async fn a_terminal_is_typed_into_and_read_from() {
    let terminal = terminal(|target, mut socket| async move {
        assert_eq!(target, "/d/pty/T/ws?since=5&takeover=1");
        socket.send(Message::Binary(b"\x03\0\0\0\0\0\0\0\x05old".as_slice().into())).await.unwrap();
        let connected = json!({"type": "connected", "session_id": "T", "mode": "pty", "role": "holder"});
        socket.send(text(&connected)).await.unwrap();
        let mut got = Vec::new();
        while got.len() < 4 {
            match socket.next().await.unwrap().unwrap() {
                Message::Binary(bytes) => got.push(format!("{bytes:?}")),
                Message::Text(line) => got.push(line.to_string()),
                _ => {}
            }
        }
        let wanted = [
            r#"b"\0ls\n""#,
            r#"{"type":"resize","cols":120,"rows":40}"#,
            r#"{"type":"signal","signal":"SIGINT"}"#,
            r#"{"type":"ping"}"#,
        ];
        assert_eq!(got, wanted);
        socket.send(Message::Ping(b"p".as_slice().into())).await.unwrap();
        socket.send(text(&json!({"type": "pong"}))).await.unwrap();
        socket.send(Message::Binary(b"\x01file\r\n".as_slice().into())).await.unwrap();
        socket.send(text(&json!({"type": "error", "error": "no", "code": "INVALID_FRAME"}))).await.unwrap();
        socket.send(text(&json!({"type": "exit", "exit_code": 3}))).await.unwrap();
        socket.close(None).await.unwrap();
    })
    .await;
    let how = Attach { since: Some(5), takeover: true, ..Attach::default() };
    let (mut sender, mut receiver) = terminal.attach(&how).await.unwrap().split();
    let replay = TerminalEvent::Replay { offset: 5, bytes: "old".into() };
    assert_eq!(receiver.recv().await.unwrap(), Some(replay));
    let connected = TerminalEvent::Connected { terminal: true, viewer: false };
    assert_eq!(receiver.recv().await.unwrap(), Some(connected));
    sender.send("ls\n").await.unwrap();
    sender.resize(120, 40).await.unwrap();
    sender.signal(TerminalSignal::Interrupt).await.unwrap();
    sender.ping().await.unwrap();
    let mut rest = Vec::new();
    while let Some(event) = receiver.recv().await.unwrap() {
        rest.push(event);
    }
    let refused = TerminalEvent::Error { code: "INVALID_FRAME".to_owned(), message: "no".to_owned() };
    let wanted = [
        TerminalEvent::Pong,
        TerminalEvent::Output("file\r\n".into()),
        refused,
        TerminalEvent::Exit { code: 3 },
    ];
    assert_eq!(rest, wanted);
    assert_eq!(receiver.recv().await.unwrap(), None);
}

#[tokio::test]
async fn a_terminal_that_cannot_be_had_or_breaks_is_an_error() {
    let terminal = terminal(|target, mut socket| async move {
        if target.contains("refused") {
            let code = 1008.into();
            socket.close(Some(CloseFrame { code, reason: "refused".into() })).await.unwrap();
            return;
        }
        if !target.contains("gone") {
            let connected = json!({"type": "connected", "session_id": "T", "mode": "pipe", "role": "viewer"});
            socket.send(text(&connected)).await.unwrap();
        }
        if target.contains("over") {
            let code = 4001.into();
            socket.close(Some(CloseFrame { code, reason: "TAKEN_OVER".into() })).await.unwrap();
        }
    })
    .await;
    let mut connection = terminal.attach(&Attach::default()).await.unwrap();
    let connected = TerminalEvent::Connected { terminal: false, viewer: true };
    assert_eq!(connection.recv().await.unwrap(), Some(connected));
    assert!(matches!(connection.recv().await, Err(Error::Broken { .. })));
    assert_eq!(connection.recv().await.unwrap(), None);

    let mut taken = terminal.sandbox().terminal("over").attach(&Attach::default()).await.unwrap();
    taken.recv().await.unwrap();
    let error = taken.recv().await.unwrap_err();
    assert!(matches!(error, Error::Closed { code: 4001, .. }) && error.is_conflict(), "{error}");

    let gone = terminal.sandbox().terminal("gone").attach(&Attach::default()).await.unwrap_err();
    assert!(matches!(gone, Error::Broken { .. }), "{gone}");
    // As a proxy refuses; the daemon then says why.
    let refused = terminal.sandbox().terminal("refused").attach(&Attach::default()).await.unwrap_err();
    assert!(refused.is_not_found(), "{refused}");
    for (id, conflict) in [("taken", true), ("plain", false), ("wrong", false)] {
        let other = terminal.sandbox().terminal(id);
        let error = other
            .attach(&Attach { pipe: true, viewer: true, since: None, takeover: false, size: None })
            .await;
        let error = error.unwrap_err();
        assert_eq!(error.is_conflict(), conflict, "{id}: {error}");
        assert_eq!(matches!(error, Error::Unexpected { .. }), !conflict, "{id}: {error}");
    }
}
