//! `/ready` and `/internal/init`.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{Daemon, eventually, is_alive};
use serde_json::{Value, json};

const TOKEN: &str = "x-execd-access-token";
/// Of `new`, by `sha256sum`.
const NEW: &str = "sha256:11507a0e2f5e69d5dfa40a62a1bd7b6ee57e6bcd85c67c9b8431b36fff21c437";
/// Of `other`.
const OTHER: &str = "sha256:d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa";

/// A daemon whose hooks are kept in its own directory.
fn daemon(args: &[&str], env: &[(&str, &str)]) -> Daemon {
    let kept = tempfile::tempdir().unwrap().path().join("hooks.toml");
    let mut all = vec![("EXECD_LIFECYCLE_CONFIG", kept.to_str().unwrap())];
    all.extend(env);
    Daemon::with(args, &all)
}

fn call(daemon: &Daemon, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, Value) {
    let mut client = daemon.connect();
    let head = client.request(method, path, headers, body.as_bytes());
    let body = client.body(&head);
    (head.status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn init(daemon: &Daemon, body: Value) -> (u16, Value) {
    call(daemon, "POST", "/internal/init", &[], &body.to_string())
}

fn ready(daemon: &Daemon) -> (u16, Value) {
    call(daemon, "GET", "/ready", &[], "")
}

fn metrics(daemon: &Daemon, token: Option<&str>) -> u16 {
    let headers: Vec<_> = token.iter().map(|token| (TOKEN, *token)).collect();
    call(daemon, "GET", "/metrics", &headers, "").0
}

#[test]
fn a_gated_daemon_serves_nothing_before_it_is_bound() {
    let daemon = daemon(&["--runtime-init", "--access-token", "old"], &[("OPENSANDBOX_ID", "template")]);
    assert_eq!(call(&daemon, "GET", "/ping", &[], "").0, 200);
    assert_eq!(ready(&daemon), (503, json!({"initialized": false})));
    for (method, path) in
        [("GET", "/metrics"), ("POST", "/command"), ("GET", "/no/such"), ("GET", "/proxy/1/")]
    {
        let (status, body) = call(&daemon, method, path, &[(TOKEN, "old")], "{\"command\":\"true\"}");
        assert_eq!((status, &body["code"]), (503, &json!("SERVICE_UNAVAILABLE")), "{path}");
    }
    assert_eq!(init(&daemon, json!({"sandboxId": "x", "generation": 0})).0, 400);
    assert_eq!(ready(&daemon).0, 503);
    let request = json!({"sandboxId": "box", "generation": 7, "accessTokenHash": NEW, "envs": {"A": "bound"},
        "telemetry": {"attributes": {"tenant": "x", "sandbox_id": "forged"}}});
    let (status, answer) = init(&daemon, request);
    assert_eq!(status, 200, "{answer}");
    let warning = "telemetry attribute sandbox_id is reserved and was dropped";
    assert_eq!(
        answer,
        json!({"status": "initialized", "sandboxId": "box", "generation": 7, "warning": [warning]})
    );
    let bound = json!({"initialized": true, "sandboxId": "box", "generation": 7});
    assert_eq!(ready(&daemon), (200, bound));
    assert_eq!((metrics(&daemon, None), metrics(&daemon, Some("old"))), (401, 401));
    assert_eq!(metrics(&daemon, Some("new")), 200);
    let body =
        json!({"command": "echo $A $OPENSANDBOX_ID", "envs": {"OPENSANDBOX_ID": "forged"}}).to_string();
    let mut client = daemon.connect();
    let head = client.request("POST", "/command", &[(TOKEN, "new")], body.as_bytes());
    assert!(String::from_utf8_lossy(&client.body(&head)).contains("bound box\\n"), "the binding's variables");
}

#[test]
fn a_daemon_is_bound_again_and_again() {
    let daemon = daemon(&[], &[("EXECD_ACCESS_TOKEN", "old"), ("A", "start"), ("B", "start")]);
    assert_eq!(ready(&daemon), (200, json!({"initialized": true})));
    assert_eq!((metrics(&daemon, None), metrics(&daemon, Some("old"))), (401, 200));
    let bind = |body: Value| {
        let (status, answer) = init(&daemon, body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    // Without a hash the token stays; a generation may be any number.
    bind(json!({"sandboxId": "one", "generation": 9, "envs": {"A": "one"}}));
    assert_eq!(metrics(&daemon, Some("old")), 200);
    bind(json!({"sandboxId": "two", "generation": 3, "accessTokenHash": NEW}));
    assert_eq!((metrics(&daemon, Some("old")), metrics(&daemon, Some("new"))), (401, 200));
    bind(json!({"sandboxId": "two", "generation": 3, "accessTokenHash": OTHER}));
    assert_eq!((metrics(&daemon, Some("new")), metrics(&daemon, Some("other"))), (401, 200));
    // Hashes of hashes and the hash itself open nothing.
    assert_eq!((metrics(&daemon, Some(OTHER)), metrics(&daemon, Some(&OTHER[7..]))), (401, 401));
    let answer = bind(json!({"sandboxId": "three", "generation": 4, "entrypointPolicy": "restart"}));
    assert!(answer["warning"][0].as_str().unwrap().contains("entrypointPolicy=restart ignored"), "{answer}");
    assert_eq!(ready(&daemon).1["sandboxId"], "three");
}

#[test]
fn the_environment_has_its_layers() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("env");
    std::fs::write(&file, "C=file\nD=file\nOPENSANDBOX_ID=file\n").unwrap();
    let names = ["A", "B", "C", "D"];
    let mut env: Vec<(&str, &str)> = names.iter().map(|name| (*name, "start")).collect();
    env.push(("EXECD_ENVS", file.to_str().unwrap()));
    let daemon = daemon(&[], &env);
    let envs = json!({"B": "bound", "C": "bound", "D": "bound"});
    assert_eq!(init(&daemon, json!({"sandboxId": "box", "generation": 1, "envs": envs})).0, 200);
    let body = json!({"command": "echo $A $B $C $D $OPENSANDBOX_ID", "envs": {"D": "request"}});
    assert_eq!(daemon.post(body).stdout(), "start bound file request box\n");
    // What an earlier binding has brought goes with it.
    assert_eq!(init(&daemon, json!({"sandboxId": "box2", "generation": 2})).0, 200);
    assert_eq!(daemon.run("echo $B $OPENSANDBOX_ID").stdout(), "start box2\n");
}

#[test]
fn requests_that_break_a_rule_change_nothing() {
    let daemon = daemon(&[], &[]);
    let many: serde_json::Map<String, Value> = (0..65).map(|n| (format!("k{n}"), json!("v"))).collect();
    let good = json!({"sandboxId": "box", "generation": 1});
    for bad in [
        json!({"sandboxId": " "}),
        json!({"sandboxId": "x".repeat(129)}),
        json!({"generation": 0}),
        json!({"generation": -1}),
        json!({"generation": "1"}),
        json!({"accessTokenHash": "abc"}),
        json!({"accessTokenHash": format!("sha256:{}", "g".repeat(64))}),
        json!({"envs": {"1A": "x"}}),
        json!({"envs": {"A-B": "x"}}),
        json!({"envs": {"": "x"}}),
        json!({"envs": {"A": "\u{0}"}}),
        json!({"envs": {"EXECD_ACCESS_TOKEN": "x"}}),
        json!({"envs": {"execd_envs": "x"}}),
        json!({"envs": {"OPENSANDBOX_LIFECYCLE": "{}"}}),
        json!({"envs": {"JUPYTER_TOKEN": "x"}}),
        json!({"lifecycle": {"preStart": {"command": []}}}),
        json!({"lifecycle": {"periodic": [{"name": "a", "schedule": "often", "command": ["a"]}]}}),
        json!({"telemetry": {"attributes": many}}),
        json!({"telemetry": {"attributes": {"": "x"}}}),
        json!({"telemetry": {"attributes": {"k".repeat(129): "x"}}}),
        json!({"telemetry": {"attributes": {"k": "v".repeat(1025)}}}),
        json!({"entrypointPolicy": "stop"}),
    ] {
        let mut body = good.clone();
        body.as_object_mut().unwrap().extend(bad.as_object().unwrap().clone());
        let (status, answer) = init(&daemon, body);
        assert_eq!((status, &answer["code"]), (400, &json!("INVALID_REQUEST_BODY")), "{bad}: {answer}");
    }
    assert_eq!(call(&daemon, "POST", "/internal/init", &[], "").0, 400);
    assert_eq!(ready(&daemon), (200, json!({"initialized": true})));
}

#[test]
fn what_ran_before_ends_unless_it_is_to_be_preserved() {
    let daemon = daemon(&[], &[]);
    let sleep = format!("sleep {}51", std::process::id());
    let start = || {
        let id = daemon.post(json!({"command": sleep, "background": true})).id().to_owned();
        eventually("the command", || is_alive(&sleep));
        id
    };
    let session = |daemon: &Daemon| daemon.call("POST", "/session", Some(json!({}))).json();
    let id = start();
    let kept = session(&daemon)["session_id"].as_str().unwrap().to_owned();
    let preserve = json!({"sandboxId": "a", "generation": 1, "preserveRuntimeState": true,
        "lifecycle": {"preStart": {"command": ["touch", "ran"]}}});
    assert_eq!(init(&daemon, preserve).0, 200);
    assert!(is_alive(&sleep) && daemon.status(&id)["running"] == true);
    assert!(!daemon.dir.path().join("ran").exists());
    let run = |session: &str| {
        daemon.call("POST", &format!("/session/{session}/run"), Some(json!({"command": "true"})))
    };
    assert_eq!(run(&kept).head.status, 200);
    assert_eq!(init(&daemon, json!({"sandboxId": "b", "generation": 2})).0, 200);
    assert!(!is_alive(&sleep) && daemon.status(&id)["running"] == false);
    assert_eq!(run(&kept).head.status, 404);
}

#[test]
fn a_binding_brings_its_hooks() {
    let daemon =
        daemon(&[], &[("OPENSANDBOX_LIFECYCLE", r#"{"preStart":{"command":["sh","-c","echo $W>>ran"]}}"#)]);
    let ran = || std::fs::read_to_string(daemon.dir.path().join("ran")).unwrap_or_default();
    eventually("readiness", || ready(&daemon).0 == 200);
    assert_eq!(ran(), "\n");
    // The hooks of the start are kept where none are brought, with the new variables.
    let request = json!({"sandboxId": "a", "generation": 1, "envs": {"W": "first"}});
    assert_eq!(init(&daemon, request).0, 200);
    assert_eq!(ran(), "\nfirst\n");
    let request = json!({"sandboxId": "a", "generation": 2, "lifecycle": {}});
    assert_eq!(init(&daemon, request).0, 200);
    assert_eq!(ran(), "\nfirst\n");
    let periodic = json!([{"name": "p", "schedule": "@every 1s", "command": ["touch", "periodic"]}]);
    let request = json!({"sandboxId": "a", "generation": 3, "lifecycle": {"periodic": periodic}});
    assert_eq!(init(&daemon, request).0, 200);
    eventually("the periodic hook", || daemon.dir.path().join("periodic").exists());
    // The next binding ends it.
    assert_eq!(init(&daemon, json!({"sandboxId": "a", "generation": 4, "lifecycle": {}})).0, 200);
    std::fs::remove_file(daemon.dir.path().join("periodic")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert!(!daemon.dir.path().join("periodic").exists());
}

#[test]
fn a_hook_that_fails_leaves_the_daemon_unbound_until_one_succeeds() {
    let daemon = daemon(&["--runtime-init"], &[]);
    let failing = json!({"preStart": {"command": ["sh", "-c", "echo why; exit 5"]}});
    let (status, answer) = init(&daemon, json!({"sandboxId": "a", "generation": 1, "lifecycle": failing}));
    let message = answer["message"].as_str().unwrap();
    assert_eq!((status, &answer["code"]), (500, &json!("RUNTIME_ERROR")));
    assert!(message.contains("exit status 5") && message.contains("why"), "{message}");
    assert_eq!((ready(&daemon).0, metrics(&daemon, None)), (503, 503));
    assert_eq!(init(&daemon, json!({"sandboxId": "a", "generation": 2})).0, 200);
    assert_eq!((ready(&daemon).0, metrics(&daemon, None)), (200, 200));
}

#[test]
fn one_binding_at_a_time() {
    let daemon = daemon(&["--runtime-init"], &[]);
    let hook =
        json!({"preStart": {"command": ["sh", "-c", "touch up; while [ ! -e go ]; do sleep 0.02; done"]}});
    std::thread::scope(|scope| {
        let first =
            scope.spawn(|| init(&daemon, json!({"sandboxId": "a", "generation": 1, "lifecycle": hook})));
        eventually("the hook", || daemon.dir.path().join("up").exists());
        let (status, answer) = init(&daemon, json!({"sandboxId": "b", "generation": 2}));
        assert_eq!((status, &answer["code"]), (409, &json!("ALREADY_INITIALIZED")));
        assert_eq!(ready(&daemon).0, 503);
        std::fs::write(daemon.dir.path().join("go"), "").unwrap();
        assert_eq!(first.join().unwrap().0, 200);
    });
    assert_eq!(ready(&daemon).1["sandboxId"], "a");
}

#[test]
fn a_client_that_leaves_does_not_stop_a_binding() {
    let daemon = daemon(&["--runtime-init"], &[]);
    let hook =
        json!({"preStart": {"command": ["sh", "-c", "touch up; while [ ! -e go ]; do sleep 0.02; done"]}});
    let body = json!({"sandboxId": "a", "generation": 1, "lifecycle": hook}).to_string();
    let mut client = daemon.connect();
    let text =
        format!("POST /internal/init HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    std::io::Write::write_all(client.reader.get_mut(), text.as_bytes()).unwrap();
    eventually("the hook", || daemon.dir.path().join("up").exists());
    drop(client);
    std::fs::write(daemon.dir.path().join("go"), "").unwrap();
    eventually("readiness", || ready(&daemon).0 == 200);
}

#[test]
fn a_secret_from_the_start_guards_the_binding() {
    let daemon = daemon(&["--runtime-init"], &[("EXECD_RUNTIME_INIT_TOKEN", "plane")]);
    let body = json!({"sandboxId": "a", "generation": 1}).to_string();
    let with = |headers: &[(&str, &str)]| call(&daemon, "POST", "/internal/init", headers, &body).0;
    let name = "x-execd-runtime-init-token";
    assert_eq!((with(&[]), with(&[(name, "wrong")]), with(&[(TOKEN, "plane")])), (401, 401, 401));
    assert_eq!(ready(&daemon).0, 503);
    assert_eq!(with(&[(name, "plane")]), 200);
    assert_eq!(daemon.run("env").stdout().matches("RUNTIME_INIT").count(), 0);
}
