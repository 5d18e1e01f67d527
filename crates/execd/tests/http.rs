//! What holds for all routes: the access check, empty answers, unknown routes, listeners.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::{Daemon, eventually};
use serde_json::json;

#[test]
fn ping_is_bare() {
    let answer = Daemon::start().call("GET", "/ping", None);
    assert_eq!((answer.head.status, answer.head.header("content-length")), (200, Some("0")));
    assert_eq!(answer.head.header("content-type"), None);
}

#[test]
fn the_token_opens_everything_but_ping() {
    let daemon = Daemon::with(&["--access-token", "right"], &[]);
    assert_eq!(daemon.call("GET", "/ping", None).head.status, 200);
    for path in ["/command/status/x", "/files/info?path=/", "/no/such", "/proxy/1/"] {
        let answer = daemon.call("GET", path, None);
        assert_eq!(answer.head.status, 401, "{path}");
        let body = answer.json();
        assert!(body["error"].as_str().unwrap().contains("X-EXECD-ACCESS-TOKEN"));
        assert_eq!(body["code"], "UNAUTHORIZED");
    }
    let mut client = daemon.connect();
    for (token, status) in [("right", 200), ("wrong", 401), ("righ", 401), ("", 401)] {
        let head = client.request(
            "POST",
            "/command",
            &[("X-EXECD-ACCESS-TOKEN", token)],
            br#"{"command":"echo [$EXECD_ACCESS_TOKEN]"}"#,
        );
        assert_eq!(head.status, status, "{token:?}");
        let body = client.body(&head);
        if status == 200 {
            assert!(String::from_utf8(body).unwrap().contains(r#""text":"[]\n""#));
        }
    }
}

#[test]
fn unknown_routes_and_methods_are_not_found() {
    let daemon = Daemon::start();
    for (method, path) in [("GET", "/"), ("GET", "/nope"), ("PUT", "/command"), ("POST", "/ping")] {
        let answer = daemon.call(method, path, None);
        assert_eq!(answer.head.status, 404, "{method} {path}");
        let body = answer.json();
        assert!(body["message"].as_str().unwrap().contains("404 page not found") && body["code"].is_string());
    }
}

#[test]
fn bodies_are_read_leniently() {
    let daemon = Daemon::start();
    let mut client = daemon.connect();
    let body = br#"{"command":"echo a","unknown":[1],"timeout":null} trailing"#;
    let head = client.request("POST", "/command", &[("content-type", "text/plain")], body);
    assert_eq!(head.status, 200);
    assert!(String::from_utf8(client.body(&head)).unwrap().contains(r#""text":"a\n""#));
    // The connection is kept.
    let head = client.request("POST", "/command", &[], json!({ "argv": ["true"] }).to_string().as_bytes());
    assert_eq!(head.status, 200);
}

#[test]
fn the_port_answers_in_both_families_and_a_stop_is_clean() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_execd"))
        .args(["--port", &port.to_string()])
        .env("EXECD_LOG_FILE", "/dev/null")
        .spawn()
        .unwrap();
    eventually("the port", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    let ping = |host: &str| {
        let mut stream = TcpStream::connect((host, port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.write_all(b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    };
    ping("127.0.0.1");
    if TcpStream::connect(("::1", port)).is_ok() {
        ping("::1");
    }
    // SAFETY: our own child, not waited for yet.
    unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn an_error_at_the_start_is_told() {
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_execd")).args(["--port", "many"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--port"));
}
