//! The listener: limits, leaving clients, stopping.

use std::time::Duration;

use osb_server::serve;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::support::{Fake, config, minimal, with};

struct Running {
    address: std::net::SocketAddr,
    fake: std::sync::Arc<Fake>,
    stop: oneshot::Sender<()>,
    done: tokio::task::JoinHandle<()>,
    _dir: tempfile::TempDir,
}

async fn start(settings: &str) -> Running {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), settings);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let fake = Fake::new();
    let (stop, stopped) = oneshot::channel::<()>();
    let runtime = fake.clone();
    let done = tokio::spawn(async move {
        serve(config, runtime, listener, async { drop(stopped.await) }).await.unwrap();
    });
    Running { address, fake, stop, done, _dir: dir }
}

fn request(body: &serde_json::Value) -> String {
    let body = body.to_string();
    format!(
        "POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn exchange(stream: &mut TcpStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = vec![0; 65536];
    let n = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut answer)).await.unwrap().unwrap();
    String::from_utf8_lossy(&answer[..n]).into_owned()
}

#[tokio::test]
async fn a_connection_serves_many_requests_with_one_date_each() {
    let server = start("").await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    for _ in 0..3 {
        let answer = exchange(&mut stream, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert_eq!(answer.matches("\r\ndate: ").count(), 1, "{answer}");
        assert_eq!(answer.matches("\r\nx-request-id: ").count(), 1, "{answer}");
    }
    let answer = exchange(&mut stream, &request(&minimal())).await;
    assert!(answer.starts_with("HTTP/1.1 202 Accepted\r\n"), "{answer}");
    drop(server.stop);
    server.done.await.unwrap();
    assert_eq!(server.fake.live(), 1, "sandboxes go on");
}

#[tokio::test]
async fn a_request_names_one_host() {
    let server = start("").await;
    for (head, status) in [
        ("GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "200"),
        ("GET /health HTTP/1.1\r\nhost: [::1]:8080\r\n\r\n", "200"),
        ("GET /health HTTP/1.1\r\nhost: my_box:8080\r\n\r\n", "200"),
        ("GET /health HTTP/1.1\r\nhost:\r\n\r\n", "200"),
        ("GET /health HTTP/1.0\r\n\r\n", "200"),
        ("GET /health HTTP/1.1\r\n\r\n", "400"),
        ("GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", "400"),
        ("GET /health HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n", "400"),
        ("GET /health HTTP/1.1\r\nhost: x/y\r\n\r\n", "400"),
        ("GET /health HTTP/1.1\r\nhost: x y\r\n\r\n", "400"),
        ("GET /health HTTP/1.1\r\nhost: u:p@x\r\n\r\n", "400"),
    ] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let answer = exchange(&mut stream, head).await;
        assert_eq!(answer.split(' ').nth(1), Some(status), "{head:?}: {answer}");
        if status == "400" {
            assert!(answer.contains("GENERAL::UNKNOWN_ERROR") && answer.contains("Host"), "{answer}");
        }
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_leaves_no_sandbox() {
    let server = start("").await;
    let body = with(serde_json::json!({"image": {"uri": "slow"}}));
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(request(&body).as_bytes()).await.unwrap();
    while server.fake.at_gate.load(std::sync::atomic::Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(stream);
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.fake.gate.add_permits(1);
    for _ in 0..500 {
        if server.fake.deleted.load(std::sync::atomic::Ordering::SeqCst) == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.fake.live(), 0);
    assert_eq!(server.fake.deleted.load(std::sync::atomic::Ordering::SeqCst), 1);
    drop(server.stop);
    server.done.await.unwrap();
}

#[tokio::test]
async fn too_many_connections_are_told_so() {
    let server = start("server.limit_concurrency = 2\n").await;
    let mut first = TcpStream::connect(server.address).await.unwrap();
    let mut second = TcpStream::connect(server.address).await.unwrap();
    for stream in [&mut first, &mut second] {
        exchange(stream, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    }
    let mut third = TcpStream::connect(server.address).await.unwrap();
    let mut answer = String::new();
    third.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    third.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("retry-after: 1") && answer.contains("\"code\""), "{answer}");
    drop(first);
    for _ in 0..200 {
        let mut fourth = TcpStream::connect(server.address).await.unwrap();
        if exchange(&mut fourth, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.contains("200 OK") {
            drop(server.stop);
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the place of a connection that ended was not given on");
}

#[tokio::test]
async fn a_stopping_server_lets_requests_end() {
    let server = start("").await;
    let body = with(serde_json::json!({"image": {"uri": "slow"}}));
    let mut idle = TcpStream::connect(server.address).await.unwrap();
    exchange(&mut idle, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(request(&body).as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(server.stop);
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.fake.gate.add_permits(1);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 202 "), "{answer}");
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).await.unwrap();
    server.done.await.unwrap();
    assert_eq!(server.fake.live(), 1);
    assert!(TcpStream::connect(server.address).await.is_err());
}

/// Sends the head, waits, then sends the body: what clients do that write the two apart.
async fn in_two_parts(server: &Running, head: &str, body: &[u8]) -> (String, String) {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let head = format!("{head} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    stream.write_all(body).await.unwrap();
    let mut answer = vec![0; 65536];
    let n = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut answer)).await.unwrap().unwrap();
    let first = String::from_utf8_lossy(&answer[..n]).into_owned();
    (first, exchange(&mut stream, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await)
}

#[tokio::test]
async fn answers_before_the_body_leave_the_connection_usable() {
    let server = start("").await;
    let id = "3b0a72f7-93ab-4b6e-9aa0-000000000000";
    let large = vec![b'x'; 5 << 20];
    for (head, body, status) in [
        (format!("POST /v1/sandboxes/{id}/proxy/44772/command"), &b"{}"[..], "404"),
        ("POST /nope".to_owned(), b"{}", "404"),
        ("PUT /v1/sandboxes".to_owned(), b"{}", "405"),
        (format!("DELETE /v1/sandboxes/{id}"), b"{}", "404"),
        ("POST /nope".to_owned(), &large, "404"),
        ("POST /v1/sandboxes".to_owned(), &large, "413"),
    ] {
        let (first, second) = in_two_parts(&server, &head, body).await;
        assert!(first.starts_with(&format!("HTTP/1.1 {status} ")), "{head}: {first}");
        assert!(second.starts_with("HTTP/1.1 200 "), "{head}: {second}");
    }
}

#[tokio::test]
async fn a_body_that_is_held_back_and_not_wanted_ends_the_connection() {
    let server = start("").await;
    let head = "POST /nope HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n";
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let answer = exchange(&mut stream, head).await;
    assert!(answer.starts_with("HTTP/1.1 404 ") && answer.contains("\r\nconnection: close\r\n"), "{answer}");
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let body = minimal().to_string();
    let head = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    assert!(exchange(&mut stream, &head).await.starts_with("HTTP/1.1 100 Continue"), "it is asked for");
    let answer = exchange(&mut stream, &body).await;
    assert!(answer.starts_with("HTTP/1.1 202 ") && !answer.contains("connection: close"), "{answer}");
}
