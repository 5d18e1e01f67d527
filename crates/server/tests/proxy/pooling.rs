//! Connections that serve more than one request, and those that must not.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use osb_server::proxy::{Idle, Options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Answer, Living, Server, eventually, read_request, reflect};

const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

fn idle(port: Duration) -> Options {
    Options { idle: Idle { port, ..Idle::default() }, ..Options::default() }
}

#[tokio::test]
async fn one_connection_serves_many_requests_in_turn() {
    let server = Server::start().await;
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n";
    let empty = "HTTP/1.1 204 No Content\r\n\r\n";
    let unmodified = "HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n";
    let answers = [chunked.as_bytes(), empty.as_bytes(), unmodified.as_bytes(), OK];
    server
        .backend(8000, move |mut stream| async move {
            let mut buffer = Vec::new();
            for answer in answers.iter().cycle() {
                if read_request(&mut stream, &mut buffer).await.is_none() {
                    return;
                }
                stream.write_all(answer).await.unwrap();
            }
        })
        .await;
    for status in [200, 204, 304, 200].repeat(5) {
        let length = "Content-Length: 3\r\n";
        assert_eq!(server.send("POST", 8000, "/", length, "abc").await.status, status);
    }
    assert_eq!((server.fake.connects(), server.proxy.idle()), (1, 1));
    // Another port has connections of its own.
    server.reflecting(8001).await;
    server.get(8001, "/").await;
    assert_eq!((server.fake.connects(), server.proxy.idle()), (2, 2));
}

#[tokio::test]
async fn connections_that_say_close_are_not_kept() {
    let server = Server::start().await;
    server.scripted(1, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok").await;
    server.scripted(2, "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    // Bytes beyond the answer poison the next one.
    server.scripted(3, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n").await;
    for port in [1, 2, 3] {
        assert_eq!(server.get(port, "/").await.text(), "ok");
        assert_eq!(server.proxy.idle(), 0, "{port}");
    }
}

#[tokio::test]
async fn bytes_that_come_while_idle_end_the_connection() {
    let server = Server::start().await;
    server
        .backend(8000, |mut stream| async move {
            read_request(&mut stream, &mut Vec::new()).await;
            stream.write_all(OK).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            let _ = stream.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").await;
            let _ = stream.read(&mut [0]).await;
        })
        .await;
    for _ in 0..3 {
        assert_eq!(server.get(8000, "/").await.text(), "ok");
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    assert_eq!(server.fake.connects(), 3);
}

#[tokio::test]
async fn a_backend_may_close_idle_connections_whenever_it_likes() {
    let server = Server::start().await;
    server
        .backend(8000, |mut stream| async move {
            let mut buffer = Vec::new();
            while let Ok(Some(_)) =
                tokio::time::timeout(Duration::from_millis(10), read_request(&mut stream, &mut buffer)).await
            {
                stream.write_all(OK).await.unwrap();
            }
        })
        .await;
    // A client that keeps its own connection, and pauses shorter and longer than the backend's patience.
    let mut client = server.connect().await;
    let target = server.base(8000);
    let request = format!("POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody");
    for round in 0..60 {
        client.write_all(request.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\nok") {
            assert_ne!(client.read_buf(&mut head).await.unwrap(), 0, "round {round}");
        }
        assert_eq!(Answer::parse(&head).status, 200, "round {round}");
        let pause = if round % 2 == 0 { 1 } else { 15 };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

#[tokio::test]
async fn a_request_that_was_taken_is_not_repeated() {
    let server = Server::start().await;
    let seen = Arc::new(AtomicUsize::new(0));
    let count = seen.clone();
    server
        .backend(8000, move |mut stream| {
            let count = count.clone();
            async move {
                let mut buffer = Vec::new();
                read_request(&mut stream, &mut buffer).await;
                stream.write_all(OK).await.unwrap();
                // The second is read and dropped.
                if read_request(&mut stream, &mut buffer).await.is_some() {
                    count.fetch_add(1, Ordering::SeqCst);
                }
            }
        })
        .await;
    assert_eq!(server.get(8000, "/").await.status, 200);
    let answer = server.send("POST", 8000, "/", "Content-Length: 1\r\n", "x").await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "BACKEND_RESPONSE_FAILED"));
    assert_eq!((seen.load(Ordering::SeqCst), server.fake.connects()), (1, 1));
}

#[tokio::test]
async fn a_daemon_that_dies_on_an_idle_connection_is_asked_once_more() {
    const EXECD: u16 = 44772;
    let server = Server::start().await;
    let seen = Arc::new(AtomicUsize::new(0));
    let broken: Arc<Mutex<&[u8]>> = Arc::default();
    let (count, rest) = (seen.clone(), broken.clone());
    server
        .backend(EXECD, move |mut stream| {
            let (count, rest) = (count.clone(), rest.clone());
            async move {
                let mut buffer = Vec::new();
                read_request(&mut stream, &mut buffer).await;
                count.fetch_add(1, Ordering::SeqCst);
                stream.write_all(OK).await.unwrap();
                // The second is read, and perhaps begun to be answered, when the daemon dies.
                if read_request(&mut stream, &mut buffer).await.is_some() {
                    count.fetch_add(1, Ordering::SeqCst);
                    let rest = *rest.lock().unwrap();
                    stream.write_all(rest).await.unwrap();
                }
            }
        })
        .await;
    let seen_by_daemon = || seen.swap(0, Ordering::SeqCst);
    let send = |method: &'static str, headers: &'static str, body: &'static str| {
        let server = &server;
        async move {
            // Leaves a connection that ends with the next request.
            server.proxy.forget(server.id);
            assert_eq!(server.get(EXECD, "/").await.status, 200);
            assert_eq!(server.proxy.idle(), 1);
            server.send(method, EXECD, "/", headers, body).await
        }
    };
    for method in ["GET", "HEAD", "DELETE", "OPTIONS"] {
        assert_eq!(send(method, "", "").await.status, 200, "{method}");
        assert_eq!(seen_by_daemon(), 3, "{method}");
    }
    // What may have had an effect, or has sent its body.
    for (method, headers, body) in
        [("POST", "", ""), ("PATCH", "", ""), ("PUT", "Content-Length: 1\r\n", "x")]
    {
        let answer = send(method, headers, body).await;
        assert_eq!((answer.status, answer.code().as_str()), (502, "BACKEND_RESPONSE_FAILED"), "{method}");
        assert_eq!(seen_by_daemon(), 2, "{method}");
    }
    // An answer that has begun.
    *broken.lock().unwrap() = b"HTTP/1.1 2";
    assert_eq!(send("GET", "", "").await.status, 502);
    assert_eq!(seen_by_daemon(), 2);
    // A new connection is not replaced by another.
    server.proxy.forget(server.id);
    server.scripted(EXECD, "").await;
    let before = server.fake.connects();
    assert_eq!(server.get(EXECD, "/").await.status, 502);
    assert_eq!(server.fake.connects(), before + 1);
}

#[tokio::test]
async fn idle_connections_grow_old() {
    let server = Server::with(idle(Duration::from_millis(100))).await;
    let living = Living::default();
    let inner = living.clone();
    server
        .backend(8000, move |stream| {
            let life = inner.enter();
            async move {
                reflect(stream).await;
                drop(life);
            }
        })
        .await;
    server.get(8000, "/").await;
    assert_eq!((server.proxy.idle(), living.count()), (1, 1));
    eventually("closed for its age", || server.proxy.idle() == 0 && living.count() == 0).await;
    server.get(8000, "/").await;
    assert_eq!(server.fake.connects(), 2);
}

#[tokio::test]
async fn a_sandbox_that_ends_takes_its_idle_connections_along() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    server.reflecting(8001).await;
    server.get(8000, "/").await;
    server.get(8001, "/").await;
    assert_eq!(server.proxy.idle(), 2);
    server.proxy.forget(server.id);
    assert_eq!(server.proxy.idle(), 0);
}

#[tokio::test]
async fn only_so_many_connections_are_kept() {
    let limits = Idle { per_target: 3, total: 5, ..Idle::default() };
    let server = Server::with(Options { idle: limits, ..Options::default() }).await;
    let slow = |mut stream: TcpStream| async move {
        read_request(&mut stream, &mut Vec::new()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.write_all(OK).await.unwrap();
        let _ = stream.read(&mut [0]).await;
    };
    server.backend(8000, slow).await;
    server.backend(8001, slow).await;
    for (port, kept) in [(8000, 3), (8001, 5)] {
        let requests: Vec<_> = (0..10).map(|_| server.get(port, "/")).collect();
        for answer in futures_util::future::join_all(requests).await {
            assert_eq!(answer.text(), "ok");
        }
        assert_eq!(server.proxy.idle(), kept);
    }
}
