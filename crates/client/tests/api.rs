//! The client against a server of the test's own making.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use opensandbox::{Client, CommandEvent, Config, Error, ListFilter, RetryPolicy, Upload};
use serde_json::json;
use support::{Body, Fake, Seen, endpoint, json, pieces, reply};

const SANDBOX: &str = r#"{"id":"s1","status":{"state":"Running"},"entrypoint":["a"],
    "createdAt":"2026-11-30T17:49:18Z","future":{"x":1}}"#;

fn config(fake: &Fake) -> Config {
    Config::new(&fake.address.to_string()).unwrap()
}

fn client(fake: &Fake) -> Client {
    Client::with_retry(config(fake), quick()).unwrap()
}

/// Repetition without waiting.
fn quick() -> RetryPolicy {
    let wait = Duration::from_millis(1);
    RetryPolicy { initial_backoff: wait, max_backoff: wait, ..RetryPolicy::default() }
}

fn is_endpoint(seen: &Seen) -> bool {
    seen.target.contains("/endpoints/")
}

/// A server with one sandbox whose daemon answers as `daemon` says.
async fn with_daemon<F>(daemon: F) -> Fake
where
    F: Fn(Seen) -> hyper::Response<Body> + Clone + Send + Sync + 'static,
{
    Fake::start(move |_, seen| {
        let answer = if is_endpoint(&seen) { endpoint(&seen) } else { daemon(seen) };
        async move { answer }
    })
    .await
}

fn events(lines: &[serde_json::Value]) -> String {
    lines.iter().map(|line| format!("{line}\n\n")).collect()
}

#[tokio::test]
async fn an_error_answer_keeps_all_its_parts() {
    let fake = Fake::start(|_, _| async {
        let mut answer = json(429, json!({"code": "SANDBOX::CAPACITY_EXHAUSTED", "message": "no room"}));
        answer.headers_mut().insert("retry-after", "7".parse().unwrap());
        answer.headers_mut().insert("x-request-id", "r9".parse().unwrap());
        answer
    })
    .await;
    let error = client(&fake).create("host").send().await.unwrap_err();
    let api = error.api().unwrap();
    assert_eq!(
        (api.status, api.code.as_str(), api.message.as_str(), api.request_id.as_deref(), api.retry_after),
        (429, "SANDBOX::CAPACITY_EXHAUSTED", "no room", Some("r9"), Some(Duration::from_secs(7)))
    );
    assert!(error.is_retryable());
    assert_eq!(fake.calls(), ["POST /v1/sandboxes"], "a create is not repeated");
}

#[tokio::test]
async fn safe_calls_are_repeated_and_others_are_not() {
    let fake = Fake::start(|number, _| async move {
        if number < 2 { reply(503, "<html>busy</html>") } else { reply(200, SANDBOX) }
    })
    .await;
    let info = client(&fake).sandbox("s1").info().await.unwrap();
    assert_eq!(info.id, "s1");
    assert_eq!(fake.calls().len(), 3);

    let fake = Fake::start(|_, _| async { reply(503, "") }).await;
    let error = client(&fake).sandbox("s1").renew(Duration::from_secs(60)).await.unwrap_err();
    assert_eq!((error.status(), fake.calls().len()), (Some(503), 1));

    let fake = Fake::start(|_, _| async { reply(500, "") }).await;
    assert_eq!(client(&fake).sandbox("s1").info().await.unwrap_err().status(), Some(500));
    assert_eq!(fake.calls().len(), 1);
}

#[tokio::test]
async fn an_unreachable_server_is_named_and_tried_again() {
    let address = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let client = Client::with_retry(Config::new(&address.to_string()).unwrap(), quick()).unwrap();
    let error = client.create("host").send().await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(&address.to_string()) && text.contains("refused"), "{text}");
}

#[tokio::test]
async fn a_silent_server_is_given_up_in_time() {
    let fake = Fake::start(|_, _| async { std::future::pending().await }).await;
    let mut config = config(&fake);
    config.request_timeout = Duration::from_millis(50);
    let client = Client::with_retry(config, RetryPolicy::disabled()).unwrap();
    let began = Instant::now();
    let error = client.sandbox("s1").info().await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let fake = Fake::start(|_, _| async {
        let mut answer = reply(307, "");
        answer.headers_mut().insert("location", "http://127.0.0.1:1/".parse().unwrap());
        answer
    })
    .await;
    assert_eq!(client(&fake).sandbox("s1").info().await.unwrap_err().status(), Some(307));
}

#[tokio::test]
async fn what_is_no_json_is_an_unexpected_answer() {
    let fake = Fake::start(|_, _| async { reply(200, "<html>") }).await;
    let error = client(&fake).list(&ListFilter::default()).await.unwrap_err();
    assert!(error.to_string().contains("unexpected answer to GET /v1/sandboxes"), "{error}");
}

#[tokio::test]
async fn the_key_goes_to_the_server_and_never_straight_into_a_sandbox() {
    for through_server in [true, false] {
        let fake = with_daemon(|_| reply(200, "")).await;
        let mut config = config(&fake);
        config.api_key = Some("key".to_owned());
        config.use_server_proxy = through_server;
        let sandbox = Client::new(config).unwrap().sandbox("s1");
        sandbox.ping().await.unwrap();
        sandbox.ping().await.unwrap();
        let seen = fake.seen();
        assert_eq!(
            fake.calls(),
            [
                format!("GET /v1/sandboxes/s1/endpoints/44772?use_server_proxy={through_server}").as_str(),
                "GET /v1/sandboxes/s1/proxy/44772/ping",
                "GET /v1/sandboxes/s1/proxy/44772/ping",
            ]
        );
        assert_eq!(seen[0].header("open-sandbox-api-key"), Some("key"));
        assert_eq!(seen[1].header("open-sandbox-api-key"), through_server.then_some("key"));
        assert_eq!(seen[1].header("opensandbox-secure-access"), Some("token"));
        assert!(seen[1].header("user-agent").unwrap().starts_with("OpenSandbox-Rust-SDK/"));
    }
}

#[tokio::test]
async fn a_command_is_followed_however_its_bytes_are_cut() {
    let stream = events(&[
        json!({"type": "init", "text": "c1", "timestamp": 1}),
        json!({"type": "ping", "text": "pong", "timestamp": 1}),
        json!({"type": "stdout", "text": "é\n", "timestamp": 1}),
        json!({"type": "stderr", "text": "oh\n", "timestamp": 1}),
        json!({"type": "stdout", "text": "b", "timestamp": 1}),
        json!({"type": "error", "timestamp": 1,
            "error": {"ename": "CommandExecError", "evalue": "7", "traceback": ["exit status 7"]}}),
    ]);
    for size in [1, 2, 3, 50, 10_000] {
        let cut: Vec<Bytes> = stream.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect();
        let fake = with_daemon(move |_| pieces(cut.clone(), false)).await;
        let sandbox = client(&fake).sandbox("s1");
        let output = sandbox.argv(["a", "b c", ""]).cwd("/tmp").env("K", "V").user(1).output().await.unwrap();
        assert_eq!(
            (output.id.as_str(), output.stdout.as_str(), output.stderr.as_str(), output.exit.code),
            ("c1", "é\nb", "oh\n", Some(7))
        );
        let body: serde_json::Value = serde_json::from_slice(&fake.seen()[1].body).unwrap();
        assert_eq!(body, json!({"argv": ["a", "b c", ""], "cwd": "/tmp", "envs": {"K": "V"}, "uid": 1}));
    }
}

#[tokio::test]
async fn commands_in_a_row_share_a_connection() {
    let stream = events(&[
        json!({"type": "init", "text": "c1", "timestamp": 1}),
        json!({"type": "execution_complete", "execution_time": 3, "timestamp": 1}),
    ]);
    let fake = with_daemon(move |_| pieces(vec![Bytes::from(stream.clone())], false)).await;
    let sandbox = client(&fake).sandbox("s1");
    for _ in 0..5 {
        let output = sandbox.shell("true").timeout(Duration::from_millis(1500)).output().await.unwrap();
        assert!(output.exit.success());
        assert_eq!(output.exit.time, Some(Duration::from_millis(3)));
        // Lets the rest of the stream arrive, as it would between two real commands.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(fake.connections(), 1);
    let body: serde_json::Value = serde_json::from_slice(&fake.seen()[1].body).unwrap();
    assert_eq!(body, json!({"command": "true", "timeout": 1500}));
}

#[tokio::test]
async fn a_stream_that_ends_early_or_breaks_is_an_error() {
    let begin = events(&[
        json!({"type": "init", "text": "c1", "timestamp": 1}),
        json!({"type": "stdout", "text": "x\n", "timestamp": 1}),
    ]);
    for breaks in [false, true] {
        let begin = begin.clone();
        let fake = with_daemon(move |_| pieces(vec![Bytes::from(begin.clone())], breaks)).await;
        let mut stream = client(&fake).sandbox("s1").shell("x").stream().await.unwrap();
        assert_eq!(stream.next().await.unwrap(), Some(CommandEvent::Started { id: "c1".to_owned() }));
        assert_eq!(stream.next().await.unwrap(), Some(CommandEvent::Stdout("x\n".to_owned())));
        let error = stream.next().await.unwrap_err();
        match breaks {
            false => assert!(matches!(error, Error::StreamCut), "{error}"),
            true => assert!(matches!(error, Error::Broken { .. }), "{error}"),
        }
        assert_eq!(stream.next().await.unwrap(), None);
    }
}

#[tokio::test]
async fn background_commands_have_status_logs_and_an_end() {
    let fake = with_daemon(|seen| match seen.call().split("/proxy/44772").nth(1).unwrap_or_default() {
        "/command" if seen.method == "POST" => reply(
            200,
            events(&[
                json!({"type": "init", "text": "c1", "timestamp": 1}),
                json!({"type": "execution_complete", "timestamp": 1}),
            ]),
        ),
        "/command/status/c1" => json(
            200,
            json!({"id": "c1", "content": "x", "running": true, "started_at": "2026-11-30T17:49:18Z"}),
        ),
        "/command/c1/logs?cursor=5" => {
            let mut answer = reply(200, "more");
            answer.headers_mut().insert("EXECD-COMMANDS-TAIL-CURSOR", "9".parse().unwrap());
            answer
        }
        "/command?id=c1" => reply(200, ""),
        _ => json(404, json!({"code": "INVALID_REQUEST_BODY", "message": "unknown"})),
    })
    .await;
    let sandbox = client(&fake).sandbox("s1");
    assert_eq!(sandbox.shell("sleep 9").start().await.unwrap(), "c1");
    assert!(sandbox.command_status("c1").await.unwrap().running);
    let logs = sandbox.command_logs("c1", Some(5)).await.unwrap();
    assert_eq!((&logs.content[..], logs.cursor), (&b"more"[..], Some(9)));
    sandbox.interrupt("c1").await.unwrap();
    assert!(sandbox.command_status("c2").await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn a_background_command_that_cannot_start_is_an_error() {
    let fake = with_daemon(|_| {
        reply(
            200,
            events(&[
                json!({"type": "init", "text": "c1", "timestamp": 1}),
                json!({"type": "error", "timestamp": 1, "error": {
                    "ename": "CommandExecError", "evalue": "no such file", "traceback": ["no such file"]}}),
            ]),
        )
    })
    .await;
    let error = client(&fake).sandbox("s1").argv(["nope"]).start().await.unwrap_err();
    assert!(matches!(error, Error::NotStarted(_)) && error.to_string().contains("no such file"));
}

#[tokio::test]
async fn a_sandbox_that_does_not_become_ready_is_deleted() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.method.as_str() {
            "POST" => reply(202, SANDBOX),
            "DELETE" => reply(204, ""),
            _ if is_endpoint(&seen) => endpoint(&seen),
            _ => json(503, json!({"code": "SERVICE_UNAVAILABLE", "message": "later"})),
        };
        async move { answer }
    })
    .await;
    let began = Instant::now();
    let error =
        client(&fake).create("host").ready_timeout(Duration::from_millis(250)).send().await.unwrap_err();
    assert!(matches!(error, Error::NotReady { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(2));
    let calls = fake.calls();
    assert_eq!(calls.last().map(String::as_str), Some("DELETE /v1/sandboxes/s1"));
    assert_eq!(calls.iter().filter(|call| call.ends_with("/ping")).count(), 2, "{calls:?}");
}

#[tokio::test]
async fn files_go_up_in_pairs_and_come_down_whole_or_not_at_all() {
    let fake = with_daemon(|seen| match seen.method.as_str() {
        "POST" => reply(200, ""),
        _ if seen.target.contains("short") => pieces(vec![Bytes::from("half")], true),
        _ => reply(200, "content"),
    })
    .await;
    let sandbox = client(&fake).sandbox("s1");
    let files = sandbox.files();
    files
        .upload([
            Upload::new("/tmp/a b.txt", "one").mode(0o640).owner("root"),
            Upload::new("/tmp/b", vec![0xFF, 0, b'\n']),
        ])
        .await
        .unwrap();
    let upload = &fake.seen()[1];
    assert!(upload.header("content-type").unwrap().starts_with("multipart/form-data; boundary="));
    let body = String::from_utf8_lossy(&upload.body).into_owned();
    let order: Vec<usize> = [
        "name=\"metadata\"; filename=\"metadata\"",
        "\"path\":\"/tmp/a b.txt\",\"owner\":\"root\",\"group\":null,\"mode\":640",
        "name=\"file\"; filename=\"a b.txt\"",
        "one",
        "\"path\":\"/tmp/b\"",
        "name=\"file\"; filename=\"b\"",
    ]
    .iter()
    .map(|part| body.find(part).unwrap_or_else(|| panic!("{part} not in {body}")))
    .collect();
    assert!(order.is_sorted(), "{body}");

    let dir = tempfile::tempdir().unwrap();
    let local = dir.path().join("l");
    let content = vec![b'z'; 700_000];
    std::fs::write(&local, &content).unwrap();
    files.upload([Upload::file("/tmp/l", &local).await.unwrap()]).await.unwrap();
    let body = &fake.seen()[2].body;
    assert!(body.windows(content.len()).any(|window| window == content));
    assert!(Upload::file("/tmp/l", dir.path()).await.is_err());

    assert_eq!(&files.read("/tmp/a b").await.unwrap()[..], b"content");
    assert!(fake.calls().last().unwrap().contains("/files/download?path=%2Ftmp%2Fa+b"));
    files.download_range("/x", 10, 5).await.unwrap();
    assert_eq!(fake.seen().last().unwrap().header("range"), Some("bytes=10-14"));
    assert!(matches!(files.download_range("/x", 1, 0).await, Err(Error::InvalidArgument(_))));
    assert!(matches!(files.read("/short").await, Err(Error::Broken { .. })));
}

#[tokio::test]
async fn file_calls_have_the_protocols_shape() {
    let fake = with_daemon(|seen| {
        if seen.target.contains("/replace") {
            return json(200, json!({"/f": {"replacedCount": 2}}));
        }
        match seen.method.as_str() {
            "GET" if seen.target.contains("/info") => json(200, json!({})),
            "GET" => json(200, json!([])),
            _ => reply(200, ""),
        }
    })
    .await;
    let sandbox = client(&fake).sandbox("s1");
    let files = sandbox.files();
    let permission = opensandbox::Permission { mode: 700, ..Default::default() };
    assert!(files.info(&["/a", "/b c"]).await.unwrap().is_empty());
    assert!(files.search("/tmp", "*.txt").await.unwrap().is_empty());
    assert!(files.list("/tmp", 2).await.unwrap().is_empty());
    files.make_directory("/d").await.unwrap();
    files.remove(&["/a", "/b"]).await.unwrap();
    files.remove_directories(&["/d"]).await.unwrap();
    files.rename(&[opensandbox::Rename { src: "/a".to_owned(), dest: "/b".to_owned() }]).await.unwrap();
    files.set_permissions(&BTreeMap::from([("/a".to_owned(), permission)])).await.unwrap();
    let change = opensandbox::Replacement { old: "x".to_owned(), new: "y".to_owned() };
    let counts = files.replace(&BTreeMap::from([("/f".to_owned(), change)])).await.unwrap();
    assert_eq!(counts, BTreeMap::from([("/f".to_owned(), 2)]));
    let calls: Vec<String> =
        fake.calls()[1..].iter().map(|call| call.replace("/v1/sandboxes/s1/proxy/44772", "")).collect();
    assert_eq!(
        calls,
        [
            "GET /files/info?path=%2Fa&path=%2Fb+c",
            "GET /files/search?path=%2Ftmp&pattern=*.txt",
            "GET /directories/list?path=%2Ftmp&depth=2",
            "POST /directories",
            "DELETE /files?path=%2Fa&path=%2Fb",
            "DELETE /directories?path=%2Fd",
            "POST /files/mv",
            "POST /files/permissions",
            "POST /files/replace?verbose=true",
        ]
    );
}

#[tokio::test]
async fn lifecycle_calls_have_the_protocols_shape() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.call().as_str() {
            call if call.starts_with("GET /v1/sandboxes?") => json(
                200,
                json!({"items": [], "pagination": {"page": 1, "pageSize": 20, "totalItems": 0,
                    "totalPages": 0, "hasNextPage": false}}),
            ),
            "POST /v1/sandboxes/s1/renew-expiration" => {
                json(200, json!({"expiresAt": "2026-11-30T18:00:00Z"}))
            }
            "DELETE /v1/sandboxes/s1" => reply(204, ""),
            "GET /version" => json(200, json!({"version": "1.2.3"})),
            _ => reply(200, SANDBOX),
        };
        async move { answer }
    })
    .await;
    let client = client(&fake);
    let filter = ListFilter {
        states: vec!["running".to_owned()],
        metadata: BTreeMap::from([("k".to_owned(), "v w".to_owned())]),
        ..ListFilter::default()
    };
    assert!(client.list(&filter).await.unwrap().items.is_empty());
    let sandbox = client.sandbox("s1");
    assert_eq!(sandbox.info().await.unwrap().status.state.as_str(), "Running");
    let end = sandbox.renew(Duration::from_secs(60)).await.unwrap();
    assert_eq!(end.to_string(), "2026-11-30T18:00:00Z");
    let patch = BTreeMap::from([("a".to_owned(), Some("1".to_owned())), ("b".to_owned(), None)]);
    sandbox.patch_metadata(patch).await.unwrap();
    sandbox.kill().await.unwrap();
    assert_eq!(client.server_version().await.unwrap(), "1.2.3");
    assert_eq!(
        fake.calls(),
        [
            "GET /v1/sandboxes?state=running&metadata=k%3Dv%2Bw",
            "GET /v1/sandboxes/s1",
            "POST /v1/sandboxes/s1/renew-expiration",
            "PATCH /v1/sandboxes/s1/metadata",
            "DELETE /v1/sandboxes/s1",
            "GET /version",
        ]
    );
    assert_eq!(&fake.seen()[3].body[..], br#"{"a":"1","b":null}"#);
}
