//! What goes wrong, and what the client hears of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use osb_protocol::ids::SandboxId;
use osb_server::proxy::Options;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{Backend, Server, read_request};

fn impatient() -> Options {
    let short = Duration::from_millis(200);
    Options { connect: short, answer: short, ..Options::default() }
}

#[tokio::test]
async fn nothing_listens() {
    let server = Server::start().await;
    let answer = server.get(8000, "/").await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "BACKEND_CONNECTION_FAILED"));
    assert!(answer.text().contains("8000"));
}

#[tokio::test]
async fn unknown_sandboxes_and_ports() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    let id = server.id;
    for (path, status, code) in [
        (format!("/sandboxes/{}/proxy/8000", SandboxId::random()), 404, "DOCKER::SANDBOX_NOT_FOUND"),
        ("/sandboxes/nonsense/proxy/8000/x".to_owned(), 404, "DOCKER::SANDBOX_NOT_FOUND"),
        ("/v1/sandboxes/../proxy/8000/x".to_owned(), 404, "DOCKER::SANDBOX_NOT_FOUND"),
        (format!("/sandboxes/{id}/proxy/0"), 400, "DOCKER::INVALID_PORT"),
        (format!("/sandboxes/{id}/proxy/65536/x"), 400, "DOCKER::INVALID_PORT"),
        (format!("/sandboxes/{id}/proxy/http/x"), 422, "GENERAL::UNKNOWN_ERROR"),
    ] {
        let answer = server.raw(format!("GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{path}");
    }
    assert_eq!(server.fake.connects(), 0);
}

#[tokio::test]
async fn an_ended_sandbox_is_named_with_its_reason() {
    let server = Server::start().await;
    server.place(44772, Backend::Gone);
    let reason = "the sandbox is Failed (OOM_KILLED): OOMKilled (exit code 137)";
    *server.fake.ended.lock().unwrap() = Some(reason.to_owned());
    let answer = server.get(44772, "/ping").await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "BACKEND_CONNECTION_FAILED"));
    assert!(answer.text().contains("Failed (OOM_KILLED)") && answer.text().contains("exit code 137"));
}

#[tokio::test]
async fn an_end_that_is_heard_of_late_is_named_too() {
    let server = Server::start().await;
    server
        .backend(8000, |mut stream| async move {
            read_request(&mut stream, &mut Vec::new()).await;
        })
        .await;
    let hearing = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let reason = "the sandbox is Failed (CONTAINER_EXITED_ERROR): exit code 3";
        *server.fake.ended.lock().unwrap() = Some(reason.to_owned());
        server.proxy.forget(server.id);
    };
    let (answer, ()) = tokio::join!(server.get(8000, "/"), hearing);
    assert_eq!((answer.status, answer.code().as_str()), (502, "BACKEND_CONNECTION_FAILED"));
    assert!(answer.text().contains("exit code 3"));
}

#[tokio::test]
async fn a_missing_token_is_refused() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    *server.fake.token.lock().unwrap() = Some("s3cret".to_owned());
    let answer = server.get(8000, "/").await;
    assert_eq!((answer.status, answer.code().as_str()), (401, "MISSING_OR_INVALID_SECURE_ACCESS"));
    let answer = server.send("GET", 8000, "/", "OpenSandbox-Secure-Access: s3cret\r\n", "").await;
    assert!(answer.status == 200 && !answer.text().contains("s3cret"));
}

#[tokio::test]
async fn a_backend_that_hangs() {
    let server = Server::with(impatient()).await;
    server.place(1, Backend::Silent);
    let answer = server.get(1, "/").await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "BACKEND_CONNECTION_FAILED"));

    let closed = Arc::new(AtomicUsize::new(0));
    let count = closed.clone();
    let serve = move |mut stream: tokio::net::TcpStream| {
        let count = count.clone();
        async move {
            read_request(&mut stream, &mut Vec::new()).await;
            assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
            count.fetch_add(1, Ordering::SeqCst);
        }
    };
    server.backend(2, serve).await;
    let answer = server.get(2, "/").await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "BACKEND_TIMEOUT"));
    crate::support::eventually("the connection is closed", || closed.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn a_slow_upload_is_no_silence() {
    let server = Server::with(impatient()).await;
    server.reflecting(8000).await;
    let mut client = server.connect().await;
    let target = server.base(8000);
    let head =
        format!("POST {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 10\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(80)).await;
        client.write_all(b"x").await.unwrap();
    }
    let answer = crate::support::Answer::read(&mut client).await;
    assert!(answer.status == 200 && answer.text().ends_with("xxxxxxxxxx"));
}

#[tokio::test]
async fn answers_that_are_none() {
    let server = Server::start().await;
    let huge = format!("HTTP/1.1 200 OK\r\nX-Huge: {}\r\n\r\n", "x".repeat(1 << 20));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X-A: 1\r\n".repeat(1000));
    for (name, bytes) in [
        ("nothing", ""),
        ("garbage", "SSH-2.0-OpenSSH_9.2p1\r\n\r\n"),
        ("zeroes", "\0\0\0\0\0\0\0\0"),
        ("half a status line", "HTTP/1.1 20"),
        ("half a head", "HTTP/1.1 200 OK\r\nContent-Le"),
        ("a huge head", &huge),
        ("many headers", &many),
        ("two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
        ("no length", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nab"),
        ("unknown coding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        ("chunks in HTTP/1.0", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("a switch", "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"),
    ] {
        server.scripted(8000, bytes).await;
        let answer = server.get(8000, "/").await;
        assert_eq!((answer.status, answer.code().as_str()), (502, "BACKEND_RESPONSE_FAILED"), "{name}");
    }
    assert_eq!(server.proxy.idle(), 0);
}

#[tokio::test]
async fn broken_bodies_cut_the_client_off() {
    let server = Server::start().await;
    for (head, ending) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\npartial", "partial"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\npartial\r\n5\r\nab", "ab\r\n"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\npartial\r\nzz\r\n", "partial\r\n"),
    ] {
        server.scripted(8000, head).await;
        let answer = server.get(8000, "/").await;
        assert_eq!(answer.status, 200);
        // Neither the promised length nor a last chunk: the client can tell.
        assert!(answer.text().ends_with(ending) && !answer.text().contains("0\r\n\r\n"), "{}", answer.text());
    }
}

#[tokio::test]
async fn ambiguous_requests_do_not_pass() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    let target = server.base(8000);
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
    for headers in [
        "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Content-Length: 4, 5\r\n",
        "Content-Length: +4\r\n",
        "Content-Length : 4\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "X: y\r\n folded\r\n",
    ] {
        let request = format!(
            "POST {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{headers}\r\n0\r\n\r\n{smuggled}"
        );
        let answer = server.raw(request).await;
        assert_eq!(answer.status, 400, "{headers}");
    }
    assert_eq!(server.fake.connects(), 0);
    // A length beside chunks: the chunks count, the length goes, and the connection is not used again.
    let request = format!(
        "POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n\
         2\r\nab\r\n0\r\n\r\n{smuggled}"
    );
    let text = server.raw(request).await.text();
    assert!(
        text.ends_with("transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n") || text.contains("2\r\nab")
    );
    assert!(!text.contains("content-length") && !text.contains("smuggled"), "{text}");
}

#[tokio::test]
async fn an_ambiguous_answer_is_made_unambiguous() {
    let server = Server::start().await;
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n";
    server.scripted(1, format!("{head}2\r\nab\r\n0\r\n\r\n")).await;
    let answer = server.get(1, "/").await;
    assert_eq!((answer.header("content-length"), answer.text().as_str()), (None, "2\r\nab\r\n0\r\n\r\n"));
    server.scripted(2, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab").await;
    let answer = server.get(2, "/").await;
    assert_eq!((answer.all("content-length"), answer.text().as_str()), (vec!["2"], "ab"));
}
