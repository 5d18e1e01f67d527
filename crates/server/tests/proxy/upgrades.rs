//! WebSockets and other switches of protocol.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use http::HeaderValue;
use osb_server::proxy::Options;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Message, protocol::WebSocketConfig};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use crate::support::{Answer, Living, Server, eventually, read_request};

type Client = WebSocketStream<MaybeTlsStream<TcpStream>>;

fn unlimited() -> WebSocketConfig {
    WebSocketConfig::default().max_message_size(None).max_frame_size(None)
}

/// Echoes messages; its first tells what the handshake looked like.
#[expect(clippy::result_large_err, reason = "the signature is the library's")]
async fn echo(stream: TcpStream) {
    let mut seen = String::new();
    let look = |request: &Request, mut response: Response| {
        let header =
            |name| request.headers().get(name).and_then(|v: &HeaderValue| v.to_str().ok()).unwrap_or("-");
        seen = format!("{} {} {} {}", request.uri(), header("host"), header("origin"), header("cookie"));
        if header("sec-websocket-protocol").contains("beta") {
            response.headers_mut().insert("sec-websocket-protocol", HeaderValue::from_static("beta"));
        }
        Ok(response)
    };
    let accepted = tokio_tungstenite::accept_hdr_async_with_config(stream, look, Some(unlimited())).await;
    let mut socket = accepted.unwrap();
    socket.send(Message::text(seen)).await.unwrap();
    while let Some(Ok(message)) = socket.next().await {
        match message {
            Message::Text(text) if text.starts_with("close ") => {
                let code: u16 = text[6..].parse().unwrap();
                let frame = CloseFrame { code: code.into(), reason: "as asked".into() };
                let _ = socket.close(Some(frame)).await;
            }
            Message::Text(_) | Message::Binary(_) => socket.send(message).await.unwrap(),
            _ => {}
        }
    }
}

async fn open(server: &Server, path: &str, headers: &[(&'static str, &'static str)]) -> (Client, Response) {
    let mut request = format!("ws://{}{path}", server.address).into_client_request().unwrap();
    for (name, value) in headers {
        request.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    let opened = tokio_tungstenite::connect_async_with_config(request, Some(unlimited()), true).await;
    let (client, response) = opened.unwrap();
    (client, response.map(|_| ()))
}

/// The close frame that ends a socket.
async fn close_frame(client: &mut Client) -> (u16, String) {
    loop {
        match client.next().await {
            Some(Ok(Message::Close(Some(frame)))) => return (frame.code.into(), frame.reason.to_string()),
            Some(Ok(_)) => {}
            other => panic!("no close frame: {other:?}"),
        }
    }
}

#[tokio::test]
async fn messages_of_any_size_pass_both_ways() {
    let server = Server::start().await;
    server.backend(8000, echo).await;
    let path = format!("{}/chat//x?a=%2F&", server.base(8000));
    let headers =
        [("origin", "https://app.example.org"), ("sec-websocket-protocol", "alpha, beta"), ("cookie", "a=b")];
    let (mut client, response) = open(&server, &path, &headers).await;
    assert_eq!(response.headers()["sec-websocket-protocol"], "beta");
    // Same `Host` as plain requests get; origin passed on, cookie not.
    let seen = client.next().await.unwrap().unwrap().into_text().unwrap();
    assert_eq!(seen.as_str(), "/chat//x?a=%2F& 127.0.0.1:8000 https://app.example.org -");
    for size in [0, 1, 125, 126, 65_535, 65_536, 20 << 20] {
        let sent = Message::binary(vec![7; size]);
        client.send(sent.clone()).await.unwrap();
        assert_eq!(client.next().await.unwrap().unwrap(), sent, "{size}");
    }
    client.close(Some(CloseFrame { code: CloseCode::Library(4321), reason: "bye".into() })).await.unwrap();
    assert_eq!(close_frame(&mut client).await, (4321, "bye".to_owned()));
}

#[tokio::test]
async fn close_codes_of_the_backend_reach_the_client() {
    let server = Server::start().await;
    server.backend(8000, echo).await;
    for code in [1000, 1001, 1008, 1011, 3000, 4999] {
        let (mut client, _) = open(&server, &server.base(8000), &[]).await;
        client.send(Message::text(format!("close {code}"))).await.unwrap();
        assert_eq!(close_frame(&mut client).await, (code, "as asked".to_owned()));
    }
}

#[tokio::test]
async fn idle_sockets_outlive_every_time_out() {
    let server = Server::with(Options { answer: Duration::from_millis(100), ..Options::default() }).await;
    server.backend(8000, echo).await;
    let (mut client, _) = open(&server, &server.base(8000), &[]).await;
    client.next().await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    client.send(Message::text("still there")).await.unwrap();
    assert_eq!(client.next().await.unwrap().unwrap(), Message::text("still there"));
}

#[tokio::test]
async fn handshakes_are_read_in_any_case_and_only_from_get() {
    let server = Server::start().await;
    server.backend(8000, echo).await;
    let target = server.base(8000);
    let key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";
    let mut client = server.connect().await;
    let request =
        format!("GET {target} HTTP/1.1\r\nHost: h\r\nCONNECTION: UPGRADE\r\nupgrade: WebSocket\r\n{key}\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        client.read_buf(&mut head).await.unwrap();
    }
    let answer = Answer::parse(&head);
    assert_eq!(answer.status, 101);
    assert_eq!(answer.header("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    assert_eq!(answer.header("connection"), Some("upgrade"));

    let connects = server.fake.connects();
    for (method, lines, status) in [
        ("POST", format!("Connection: Upgrade\r\nUpgrade: WebSocket\r\n{key}"), 400),
        ("GET", format!("Upgrade: websocket\r\n{key}"), 400),
        ("GET", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n".to_owned(), 400),
        ("GET", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n".to_owned(), 426),
    ] {
        let request = format!("{method} {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{lines}\r\n");
        let answer = server.raw(request).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, "GENERAL::UNKNOWN_ERROR"), "{lines}");
    }
    assert_eq!(server.fake.connects(), connects);
}

#[tokio::test]
async fn refusals_are_close_frames() {
    let server = Server::start().await;
    server.scripted(8000, "HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno").await;
    server.scripted(8001, "nonsense").await;
    let unknown = format!("/sandboxes/{}/proxy/80", osb_protocol::ids::SandboxId::random());
    for (path, code, words) in [
        (server.base(8000), 1008, "403"),
        (server.base(8001), 1011, "not HTTP"),
        (server.base(9), 1011, "port 9"),
        (unknown, 1011, "no such sandbox"),
        (format!("/sandboxes/{}/proxy/0", server.id), 1011, "port"),
    ] {
        let (mut client, response) = open(&server, &path, &[("sec-websocket-protocol", "alpha, beta")]).await;
        assert_eq!(response.headers()["sec-websocket-protocol"], "alpha");
        let (got, reason) = close_frame(&mut client).await;
        assert!(got == code && reason.contains(words) && reason.len() <= 123, "{path}: {got} {reason}");
    }
    *server.fake.token.lock().unwrap() = Some("s3cret".to_owned());
    let (mut client, _) = open(&server, &server.base(8000), &[]).await;
    assert_eq!(close_frame(&mut client).await.0, 1008);
}

#[tokio::test]
async fn either_end_that_goes_takes_the_other_along() {
    let server = Server::start().await;
    let living = Living::default();
    let inner = living.clone();
    server
        .backend(8000, move |stream| {
            let life = inner.enter();
            async move {
                echo(stream).await;
                drop(life);
            }
        })
        .await;
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.num_alive_tasks();
    for _ in 0..50 {
        let (mut client, _) = open(&server, &server.base(8000), &[]).await;
        client.next().await.unwrap().unwrap();
        drop(client);
    }
    eventually("backends see their clients go", || living.count() == 0).await;
    eventually("all tunnels ended", || metrics.num_alive_tasks() <= before).await;

    server
        .backend(8001, |stream| async move {
            let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
            socket.send(Message::text("last words")).await.unwrap();
        })
        .await;
    let (mut client, _) = open(&server, &server.base(8001), &[]).await;
    assert_eq!(client.next().await.unwrap().unwrap(), Message::text("last words"));
    let end = tokio::time::timeout(Duration::from_secs(5), client.next())
        .await
        .expect("the client is left hanging");
    assert!(matches!(end, None | Some(Err(_))));
}

#[tokio::test]
async fn other_protocols_are_bytes() {
    let server = Server::start().await;
    server
        .backend(8000, |mut stream| async move {
            let head = read_request(&mut stream, &mut Vec::new()).await.unwrap();
            let head = String::from_utf8(head).unwrap();
            assert!(head.contains("connection: upgrade\r\nupgrade: tcp\r\n"), "{head}");
            let switch =
                b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nX-A: 1\r\n\r\nhello ";
            stream.write_all(switch).await.unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).await.unwrap();
            // After the client's half-close.
            stream.write_all(&all).await.unwrap();
        })
        .await;
    let mut client = server.connect().await;
    let target = server.base(8000);
    let request = format!("POST {target} HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        client.read_buf(&mut head).await.unwrap();
    }
    client.write_all(b"world").await.unwrap();
    client.shutdown().await.unwrap();
    client.read_to_end(&mut head).await.unwrap();
    let answer = Answer::parse(&head);
    assert_eq!((answer.status, answer.header("x-a")), (101, Some("1")));
    assert_eq!(answer.text(), "hello world");

    // A refusal is the backend's own answer; HTTP/2 is not asked for.
    server.reflecting(8001).await;
    for protocol in ["tcp", "h2c"] {
        let headers =
            format!("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: x\r\n");
        let answer = server.send("GET", 8001, "/", &headers, "").await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.text().contains("upgrade: tcp"), protocol == "tcp");
        assert!(!answer.text().contains("h2c") && !answer.text().contains("http2-settings"));
    }
}
