//! What goes wrong between client and server: broken, silent, busy and foreign ones.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use opensandbox::{Client, CommandEvent, Config, Error, ListFilter, RetryCause, RetryPolicy, TreeOptions};
use serde_json::json;
use support::{Body, Fake, Seen, endpoint, json, pieces, reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

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
    assert!(error.to_string().contains("unexpected answer to GET http://"), "{error}");
}

#[tokio::test]
async fn a_page_is_never_success_and_never_repeated() {
    for status in [200, 302, 404, 502] {
        let fake = Fake::start(move |_, _| async move {
            let mut answer = reply(status, "<html>\u{1b}[31mHello</html>");
            answer.headers_mut().insert("content-type", "text/html; charset=utf-8".parse().unwrap());
            answer
        })
        .await;
        let client = client(&fake);
        let sandbox = client.sandbox("s1");
        let errors = [
            client.list(&ListFilter::default()).await.unwrap_err(),
            client.create("host").send().await.unwrap_err(),
            sandbox.kill().await.unwrap_err(),
            sandbox.pause().await.unwrap_err(),
            sandbox.diagnostics().summary(1, 1).await.unwrap_err(),
        ];
        for error in errors.map(|error| error.to_string()) {
            let parts =
                [&fake.address.to_string(), &format!("HTTP {status}"), "text/html", "no OpenSandbox server"];
            assert!(parts.iter().all(|part| error.contains(*part)), "{error}");
            assert!(!error.contains("Hello") && !error.contains('\n'), "{error}");
        }
    }
}

#[tokio::test]
async fn the_wrong_protocol_is_told() {
    // A port that answers with a TLS alert, and one that hangs up, as servers of TLS do.
    for (answer, words) in [(&b"\x15\x03\x03\x00\x02\x02\x0a"[..], "--protocol https"), (b"", "connection")] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(answer).await;
            }
        });
        let client = Client::with_retry(Config::new(&address.to_string()).unwrap(), quick()).unwrap();
        let error = client.list(&ListFilter::default()).await.unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(&address.to_string()), "{error}");
        server.abort();
    }
    let fake = Fake::start(|_, _| async { reply(200, "") }).await;
    let config = Config::new(&format!("https://{}", fake.address)).unwrap();
    let error = Client::with_retry(config, quick()).unwrap().list(&ListFilter::default()).await.unwrap_err();
    assert!(error.to_string().contains("does not speak TLS: use --protocol http "), "{error}");
    let config = Config::new("no-such-host.invalid").unwrap();
    let error = Client::with_retry(config, quick()).unwrap().list(&ListFilter::default()).await.unwrap_err();
    assert!(error.to_string().contains("check the host's name"), "{error}");
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
async fn an_endpoint_tells_what_its_sandbox_was_made_from() {
    for (header, origin) in [(None, None), (Some(""), None), (Some("template"), Some("template"))] {
        let fake = Fake::start(move |_, seen| {
            let mut answer = endpoint(&seen);
            if let Some(header) = header {
                answer.headers_mut().insert("open-sandbox-origin", header.parse().unwrap());
            }
            async move { answer }
        })
        .await;
        let sandbox = client(&fake).sandbox("s1");
        let found = sandbox.endpoint(8000).await.unwrap();
        assert_eq!(found.origin.as_deref(), origin);
        assert_eq!(found.headers["OpenSandbox-Secure-Access"], "token");
        assert!(found.endpoint.ends_with("/v1/sandboxes/s1/proxy/44772"), "{}", found.endpoint);
        let until = opensandbox::protocol::time::WireTime::from_micros(4_102_444_800_000_000).unwrap();
        assert_eq!(sandbox.signed_endpoint(8000, until).await.unwrap().origin.as_deref(), origin);
        assert_eq!(
            fake.calls(),
            [
                "GET /v1/sandboxes/s1/endpoints/8000?use_server_proxy=true",
                "GET /v1/sandboxes/s1/endpoints/8000?expires=4102444800",
            ]
        );
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
async fn half_a_file_is_an_error_and_leaves_nothing() {
    let fake = with_daemon(|_| pieces(vec![Bytes::from("half")], true)).await;
    let sandbox = client(&fake).sandbox("s1");
    assert!(matches!(sandbox.files().read("/short").await, Err(Error::Broken { .. })));
    let dir = tempfile::tempdir().unwrap();
    let saved = sandbox.files().download("/short").await.unwrap().save(&dir.path().join("f")).await;
    assert!(matches!(saved, Err(Error::Broken { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn names_that_lead_out_of_a_tree_are_refused() {
    for path in ["/t/../../escape", "/elsewhere", "/t//abs", "/t/a/../../../b"] {
        let fake = with_daemon(move |_| {
            json(
                200,
                json!([{"path": path, "type": "file", "size": 1, "modified_at": "", "created_at": "",
                    "owner": "", "group": "", "mode": 644}]),
            )
        })
        .await;
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("to");
        let sandbox = client(&fake).sandbox("s1");
        let options = opensandbox::TreeOptions::default();
        let error = sandbox.files().download_tree("/t", &to, &options, &mut |_| {}).await.unwrap_err();
        assert!(matches!(error, Error::Unexpected { .. }), "{path}: {error}");
        assert!(!to.exists());
    }
}

#[tokio::test]
async fn links_of_a_tree_lead_nowhere_else() {
    let entry = |path: &str, kind: &str, target: Option<&str>| {
        json!({"path": path, "type": kind, "size": 1, "mode": 755, "owner": "root", "group": "root",
            "modified_at": "T", "created_at": "T", "link_target": target})
    };
    let listing = json!([
        entry("/t/good", "symlink", Some("d/file")),
        entry("/t/d", "directory", None),
        entry("/t/d/back", "symlink", Some("..")),
        entry("/t/d/file", "file", None),
        entry("/t/abs", "symlink", Some("/etc")),
        entry("/t/up", "symlink", Some("../outside")),
        entry("/t/sly", "symlink", Some("d/back/../outside")),
        entry("/t/old", "symlink", None),
        // A link to a directory outside, with files below it.
        entry("/t/both", "symlink", Some(".")),
        entry("/t/both/file", "file", None),
        entry("/t/both/link", "symlink", Some("../d")),
        entry("/t/line\nend\u{1b}[31m", "symlink", Some("good")),
    ]);
    let fake = with_daemon(move |seen| match seen.target.contains("/directories/list") {
        true => json(200, listing.clone()),
        false => reply(200, "x"),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    let sandbox = client(&fake).sandbox("s1");
    let options = TreeOptions::default();
    // The second time over what the first one made.
    for _ in 0..2 {
        let done = sandbox.files().download_tree("/t", &to, &options, &mut |_| {}).await.unwrap();
        let mut skipped: Vec<&str> = done.skipped.iter().map(|skipped| skipped.path.as_str()).collect();
        skipped.sort_unstable();
        assert_eq!(skipped, ["abs", "both", "old", "sly", "up"]);
        assert_eq!((done.files, done.links), (2, 4));
    }
    let link = |name: &str| std::fs::read_link(to.join(name)).unwrap();
    assert_eq!(link("good"), std::path::Path::new("d/file"));
    assert_eq!(link("d/back"), std::path::Path::new(".."));
    assert_eq!(link("both/link"), std::path::Path::new("../d"));
    assert_eq!(link("line\nend\u{1b}[31m"), std::path::Path::new("good"));
    assert!(to.join("both").symlink_metadata().unwrap().is_dir());
    assert_eq!(std::fs::read(to.join("both/file")).unwrap(), b"x");
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["to"], "nothing is written beside the tree");
    let left = std::fs::read_dir(&to)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(".opensandbox-"));
    assert_eq!(left.count(), 0);
}

#[tokio::test]
async fn a_file_that_grows_without_end_is_given_up() {
    let fake = with_daemon(|seen| {
        if seen.target.contains("/list") {
            return json(
                200,
                json!([{"path": "/t/f", "type": "file", "size": 1, "modified_at": "", "created_at": "",
                    "owner": "", "group": "", "mode": 644}]),
            );
        }
        pieces(vec![Bytes::from(vec![0; 1 << 20]); 16], false)
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let mut options = opensandbox::TreeOptions::default();
    options.max_bytes = Some(1 << 20);
    let sandbox = client(&fake).sandbox("s1");
    let error = sandbox.files().download_tree("/t", dir.path(), &options, &mut |_| {}).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn an_answer_without_end_is_given_up() {
    let fake = Fake::start(|_, _| async { pieces(vec![Bytes::from(vec![b' '; 1 << 20]); 70], false) }).await;
    let error = client(&fake).list(&ListFilter::new()).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}

#[tokio::test]
async fn a_request_has_one_id_on_all_its_attempts() {
    let fake = Fake::start(|_, _| async { reply(503, "") }).await;
    let error = client(&fake).sandbox("s1").info().await.unwrap_err();
    let ids: Vec<_> = fake.seen().iter().map(|seen| seen.header("x-request-id").map(str::to_owned)).collect();
    assert_eq!(ids.len(), 4);
    assert!(ids[0].as_ref().is_some_and(|id| id.len() == 32) && ids.iter().all(|id| *id == ids[0]));
    assert_eq!(error.request_id(), ids[0].as_deref());
    client(&fake).sandbox("s1").info().await.unwrap_err();
    assert_ne!(fake.seen()[4].header("x-request-id"), ids[0].as_deref());

    let mut own = config(&fake);
    own.headers.insert("x-request-id", "mine".parse().unwrap());
    own.headers.insert("x-team", "search".parse().unwrap());
    own.user_agent = "test/1".to_owned();
    let error = Client::with_retry(own, RetryPolicy::disabled()).unwrap().sandbox("s").info().await;
    assert_eq!(error.unwrap_err().request_id(), Some("mine"));
    let seen = fake.seen().pop().unwrap();
    let header = |name| seen.header(name).unwrap().to_owned();
    assert_eq!(["x-request-id", "x-team", "user-agent"].map(header), ["mine", "search", "test/1"]);
}

#[tokio::test]
async fn a_busy_server_is_given_the_time_it_asks_for() {
    let fake = Fake::start(|number, _| async move {
        let mut answer = reply(if number == 0 { 503 } else { 200 }, SANDBOX);
        answer.headers_mut().insert("retry-after", "1".parse().unwrap());
        answer
    })
    .await;
    let events = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let told = events.clone();
    let policy = quick().on_retry(move |event| told.lock().unwrap().push(event.clone()));
    let patient = Client::with_retry(config(&fake), policy).unwrap();
    let began = Instant::now();
    patient.sandbox("s1").info().await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1));
    let events = events.lock().unwrap().clone();
    let event = &events[0];
    assert_eq!((events.len(), event.attempt, event.method.as_str()), (1, 1, "GET"));
    assert_eq!((event.cause, event.backoff), (RetryCause::Status(503), Duration::from_secs(1)));
    assert!(event.url.ends_with("/v1/sandboxes/s1"));

    let fake = Fake::start(|_, _| async {
        let mut answer = reply(429, "");
        answer.headers_mut().insert("retry-after", "30".parse().unwrap());
        answer
    })
    .await;
    let policy = RetryPolicy { deadline: Some(Duration::from_secs(5)), ..RetryPolicy::default() };
    let hasty = Client::with_retry(config(&fake), policy).unwrap();
    let error = hasty.sandbox("s1").info().await.unwrap_err();
    assert_eq!((error.status(), fake.calls().len()), (Some(429), 1));
}

#[tokio::test]
async fn slow_attempts_are_repeated_within_their_limit() {
    let fake = Fake::start(|number, _| async move {
        if number < 2 {
            std::future::pending::<()>().await;
        }
        reply(200, SANDBOX)
    })
    .await;
    let policy = RetryPolicy { attempt_timeout: Some(Duration::from_millis(50)), ..quick() };
    let sandbox = Client::with_retry(config(&fake), policy).unwrap().sandbox("s1");
    sandbox.info().await.unwrap();
    assert_eq!(fake.calls().len(), 3);
}

/// A server that closes each connection after its request until `good` have come; then answers with `last`.
async fn closes_first(good: usize, last: &'static str) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = [0; 4096];
            if stream.read(&mut head).await.unwrap_or(0) == 0 {
                continue;
            }
            // A part of the answer's head, and then nothing.
            let answer = if counted.fetch_add(1, Ordering::SeqCst) < good { "HTTP/1.1 200" } else { last };
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (address, count)
}

const GONE: &str = "HTTP/1.1 404 Not Found\r\ncontent-length: 53\r\nconnection: close\r\n\r\n\
    {\"code\":\"DOCKER::SANDBOX_NOT_FOUND\",\"message\":\"gone\"}";

#[tokio::test]
async fn broken_connections_are_tried_again_where_that_is_safe() {
    let at = |address: std::net::SocketAddr| {
        Client::with_retry(Config::new(&address.to_string()).unwrap(), quick()).unwrap()
    };
    let (address, count) = closes_first(9, "").await;
    let error = at(address).sandbox("s1").info().await.unwrap_err();
    assert!(matches!(error, Error::Broken { early_end: true, .. }), "{error:?}");
    assert_eq!(count.load(Ordering::SeqCst), 4);

    let (address, count) = closes_first(9, "").await;
    let error = at(address).create("host").send().await.unwrap_err();
    assert!(matches!(error, Error::Broken { .. }), "{error}");
    assert_eq!(count.load(Ordering::SeqCst), 1, "a create may have been carried out");
}

#[tokio::test]
async fn a_delete_whose_answer_was_lost_has_succeeded_when_nothing_is_left() {
    let at = |address: std::net::SocketAddr| {
        Client::with_retry(Config::new(&address.to_string()).unwrap(), quick()).unwrap()
    };
    let (address, count) = closes_first(1, GONE).await;
    at(address).sandbox("s1").kill().await.unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 2);
    let (address, _) = closes_first(0, GONE).await;
    assert!(at(address).sandbox("s1").kill().await.unwrap_err().is_not_found());
}
