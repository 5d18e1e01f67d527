//! `/proxy/{port}/…` over HTTP.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // Helpers of tests are tests.

mod web;

use std::time::{Duration, Instant};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::Method;
use http_body_util::BodyExt as _;
use osb_execd::app::Shared;
use osb_execd::binding::{Access, Binding, Current};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use web::Daemon;

/// Answers each connection's first request with what `respond` makes of its head, then closes.
async fn backend(listener: TcpListener, respond: impl Fn(&str) -> Vec<u8> + Send + Clone + 'static) -> u16 {
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let respond = respond.clone();
            tokio::spawn(async move {
                let head = read_head(&mut stream).await;
                stream.write_all(&respond(&head)).await.unwrap();
                stream.shutdown().await.unwrap();
                // The client may send on; a reset would take the answer with it.
                let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
            });
        }
    });
    port
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let Ok(byte) = stream.read_u8().await else { break };
        head.push(byte);
    }
    String::from_utf8_lossy(&head).into_owned()
}

async fn local() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

fn ok(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

async fn start() -> Daemon {
    Daemon::start(Shared::default()).await
}

/// Sends raw bytes and reads until the daemon closes.
async fn raw(daemon: &Daemon, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(daemon.address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn paths_and_queries_arrive_byte_for_byte() {
    let port = backend(local().await, |head| ok(head.lines().next().unwrap())).await;
    let daemon = start().await;
    for tail in [
        "/",
        "/a%2Fb//c?x=1&y=%2F&z=a+b&z=2&flag",
        "/?",
        "/%20?%ff",
        "//double/../x/.",
        "/a;b=c?d=e?f",
        "/%e2%82%zz",
    ] {
        let request = format!("GET /proxy/{port}{tail} HTTP/1.1\r\nHost: app\r\nConnection: close\r\n\r\n");
        let answer = raw(&daemon, request.as_bytes()).await;
        assert!(answer.ends_with(&format!("\r\n\r\nGET {tail} HTTP/1.1")), "{answer}");
    }
    assert_eq!(daemon.get(&format!("/proxy/{port}")).await.ok().text(), "GET / HTTP/1.1");
    assert_eq!(daemon.get(&format!("/proxy/{port}?a=1")).await.ok().text(), "GET /?a=1 HTTP/1.1");
}

#[tokio::test]
async fn headers() {
    let port = backend(local().await, ok).await;
    let daemon = Daemon::start(Shared {
        binding: Current::new(Binding { access: Access::Token("secret".to_owned()), ..Binding::default() }),
        ..Shared::default()
    })
    .await;
    let answer = daemon
        .get_with(
            &format!("/proxy/{port}/"),
            &[
                ("x-execd-access-token", "secret"),
                ("open-sandbox-api-key", "key"),
                ("host", "app.example"),
                ("connection", "X-Secret, keep-alive"),
                ("x-secret", "1"),
                ("te", "trailers"),
                ("trailer", "T"),
                ("x-forwarded-for", "9.9.9.9, 8.8.8.8"),
                ("x-forwarded-host", "evil"),
                ("authorization", "Bearer kept"),
                ("cookie", "a=1"),
            ],
        )
        .await
        .ok();
    let head = answer.text().to_lowercase();
    for kept in [
        "host: app.example",
        "authorization: bearer kept",
        "cookie: a=1",
        "x-forwarded-for: 9.9.9.9\r",
        "x-forwarded-proto: http\r",
    ] {
        assert!(head.contains(kept), "{kept} in {head}");
    }
    for gone in ["secret", "open-sandbox", "te:", "trailer", "evil", "8.8.8.8", "keep-alive"] {
        assert!(!head.contains(gone), "{gone} in {head}");
    }
    assert!(answer.headers.get("x-hop").is_none());
    let answer =
        daemon.get_with(&format!("/proxy/{port}/"), &[("x-execd-access-token", "secret")]).await.ok();
    assert!(answer.text().to_lowercase().contains("x-forwarded-for: 127.0.0.1\r"));
}

#[tokio::test]
async fn the_programs_own_errors_pass_and_ours_are_json() {
    let port = backend(local().await, |head| {
        let status = head.split(' ').nth(1).unwrap().trim_start_matches('/').to_owned();
        format!("HTTP/1.1 {status} Own\r\nContent-Length: 8\r\nConnection: close\r\n\r\nown body")
            .into_bytes()
    })
    .await;
    let daemon = start().await;
    for status in [404, 418, 500, 502, 599] {
        let answer = daemon.get(&format!("/proxy/{port}/{status}")).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (status, "own body"));
    }
    let closed = local().await.local_addr().unwrap().port();
    let message = daemon.get(&format!("/proxy/{closed}/")).await.refused(502, "BACKEND_CONNECTION_FAILED");
    assert!(message.contains(&closed.to_string()), "{message}");
    for path in ["/proxy", "/proxy/", "/proxy/0/", "/proxy/70000/", "/proxy/http/"] {
        daemon.get(path).await.refused(400, "INVALID_REQUEST_BODY");
    }
    let broken = backend(local().await, |_| Vec::new()).await;
    daemon.get(&format!("/proxy/{broken}/")).await.refused(502, "BACKEND_RESPONSE_FAILED");
    let switching = backend(local().await, |_| {
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n".to_vec()
    })
    .await;
    daemon.get(&format!("/proxy/{switching}/")).await.refused(502, "BACKEND_RESPONSE_FAILED");
}

#[tokio::test]
async fn a_program_that_listens_on_ipv6_alone_is_found() {
    let Ok(listener) = TcpListener::bind("[::1]:0").await else {
        eprintln!("skipped: no IPv6");
        return;
    };
    let port = backend(listener, |_| ok("six")).await;
    assert_eq!(start().await.get(&format!("/proxy/{port}/")).await.ok().text(), "six");
}

#[tokio::test]
async fn methods_and_bodies() {
    let port = {
        let app = axum::Router::new().fallback(async |request: axum::extract::Request| {
            let method = request.method().clone();
            let body = request.into_body().collect().await.unwrap().to_bytes();
            format!("{method} {}", body.len())
        });
        let listener = local().await;
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move { axum::serve(listener, app).await });
        port
    };
    let daemon = start().await;
    for method in [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS] {
        let request = daemon.request(method.clone(), &format!("/proxy/{port}/x"));
        let answer = daemon.send(request, vec![b'x'; 70_000]).await.ok();
        assert_eq!(answer.text(), format!("{method} 70000"));
        // Without a length.
        let pieces = stream::iter((0..7).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(&[0; 10_000]))));
        let request = daemon
            .request(method.clone(), &format!("/proxy/{port}/x"))
            .header("transfer-encoding", "chunked");
        assert_eq!(
            daemon.send(request, Body::from_stream(pieces)).await.ok().text(),
            format!("{method} 70000")
        );
    }
    let head =
        daemon.send(daemon.request(Method::HEAD, &format!("/proxy/{port}/x")), Body::empty()).await.ok();
    assert_eq!((head.header("content-length"), head.body.len()), ("6", 0));
    for _ in 0..200 {
        daemon.get(&format!("/proxy/{port}/x")).await.ok();
    }
}

#[tokio::test]
async fn streams_pass_as_they_come_and_end_with_the_client() {
    let listener = local().await;
    let port = listener.local_addr().unwrap().port();
    let (ended, has_ended) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_head(&mut stream).await;
        stream
            .write_all(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n",
            )
            .await
            .unwrap();
        for _ in 0.. {
            if stream.write_all(b"9\r\ndata: 1\n\n\r\n").await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        ended.send(()).unwrap();
    });
    let daemon = start().await;
    let answer = daemon.open(daemon.request(Method::GET, &format!("/proxy/{port}/")), Body::empty()).await;
    let started = Instant::now();
    let mut pieces = answer.into_body().into_data_stream();
    for _ in 0..4 {
        assert_eq!(pieces.next().await.unwrap().unwrap(), "data: 1\n\n");
    }
    assert!(started.elapsed() > Duration::from_millis(250));
    drop(pieces);
    tokio::time::timeout(Duration::from_secs(5), has_ended).await.unwrap().unwrap();
}

#[tokio::test]
async fn upgraded_connections_carry_raw_bytes() {
    let listener = local().await;
    let port = listener.local_addr().unwrap().port();
    let (tell, told) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        // The first bytes of the new protocol come in one packet with the answer.
        stream
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: WebSocket\r\nSec-WebSocket-Protocol: chat\r\n\r\nhello")
            .await
            .unwrap();
        let (mut reader, mut writer) = stream.split();
        tokio::io::copy(&mut reader, &mut writer).await.unwrap();
        tell.send(head).unwrap();
    });
    let daemon = start().await;
    let mut stream = TcpStream::connect(daemon.address).await.unwrap();
    let request = format!(
        "GET /proxy/{port}/chat?x=1 HTTP/1.1\r\nHost: app\r\nConnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
         Origin: http://app\r\nSec-WebSocket-Key: a2V5\r\nSec-WebSocket-Protocol: chat\r\nSec-WebSocket-Version: 13\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await.to_lowercase();
    assert!(head.starts_with("http/1.1 101"), "{head}");
    for line in ["connection: upgrade\r", "upgrade: websocket\r", "sec-websocket-protocol: chat\r"] {
        assert!(head.contains(line), "{line} in {head}");
    }
    let mut greeting = [0; 5];
    stream.read_exact(&mut greeting).await.unwrap();
    assert_eq!(&greeting, b"hello");
    let data: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let (mut reader, mut writer) = stream.split();
    let mut echoed = vec![0; data.len()];
    let (sent, read) = tokio::join!(writer.write_all(&data), reader.read_exact(&mut echoed));
    sent.unwrap();
    read.unwrap();
    assert_eq!(echoed, data);
    drop(stream);
    let seen = tokio::time::timeout(Duration::from_secs(5), told).await.unwrap().unwrap().to_lowercase();
    for line in [
        "get /chat?x=1 http/1.1",
        "upgrade: websocket",
        "connection: upgrade",
        "origin: http://app",
        "sec-websocket-key",
        "host: app",
    ] {
        assert!(seen.contains(line), "{line} in {seen}");
    }
}
