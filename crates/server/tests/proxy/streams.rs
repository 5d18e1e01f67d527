//! Long, large and aborted bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use osb_server::proxy::Options;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Living, Server, eventually, read_request};

const SSE: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Sends an event, then waits for the peer's end.
async fn one_event(mut stream: TcpStream) {
    read_request(&mut stream, &mut Vec::new()).await;
    let _ = stream.write_all(format!("{SSE}7\r\nevent\n\n\r\n").as_bytes()).await;
    let _ = stream.read(&mut [0]).await;
}

async fn read_until(stream: &mut TcpStream, end: &str) -> Vec<u8> {
    let mut all = Vec::new();
    while !all.windows(end.len()).any(|window| window == end.as_bytes()) {
        assert_ne!(stream.read_buf(&mut all).await.unwrap(), 0, "{}", String::from_utf8_lossy(&all));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_aborted_streams_leave_nothing() {
    let server = Server::start().await;
    let living = Living::default();
    let inner = living.clone();
    server
        .backend(8000, move |stream| {
            let life = inner.enter();
            async move {
                one_event(stream).await;
                drop(life);
            }
        })
        .await;
    let request = format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", server.base(8000));
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.num_alive_tasks();
    for round in 0..1000 {
        let mut client = server.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        // Some leave before the head, some in the middle.
        if round % 3 != 0 {
            read_until(&mut client, "event\n\n").await;
        }
        if round % 2 == 0 {
            client.shutdown().await.unwrap();
        }
    }
    eventually("all connections closed", || living.count() == 0).await;
    eventually("all tasks ended", || metrics.num_alive_tasks() <= before).await;
    assert_eq!(server.proxy.idle(), 0);
}

#[tokio::test]
async fn an_aborted_request_closes_its_backend_at_once() {
    let server = Server::start().await;
    let living = Living::default();
    let inner = living.clone();
    server
        .backend(8000, move |mut stream| {
            let life = inner.enter();
            async move {
                // Reads all there is and never answers.
                while stream.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0) {}
                drop(life);
            }
        })
        .await;
    let target = server.base(8000);
    for request in [
        format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"),
        format!("POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\npart"),
        format!("POST {target} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n"),
    ] {
        let mut client = server.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        eventually("the backend has the request", || living.count() == 1).await;
        let started = Instant::now();
        drop(client);
        eventually("the backend is left", || living.count() == 0).await;
        assert!(started.elapsed() < Duration::from_secs(2));
    }
}

#[tokio::test]
async fn a_client_that_sent_more_and_left_is_noticed_when_the_backend_writes() {
    let server = Server::start().await;
    let living = Living::default();
    let inner = living.clone();
    server
        .backend(8000, move |mut stream| {
            let life = inner.enter();
            async move {
                read_request(&mut stream, &mut Vec::new()).await;
                stream.write_all(SSE.as_bytes()).await.unwrap();
                // A heartbeat, as the daemon sends them.
                while stream.write_all(b"2\r\n\n\n\r\n").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                drop(life);
            }
        })
        .await;
    let mut client = server.connect().await;
    let request = format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", server.base(8000));
    client.write_all(format!("{request}{request}").as_bytes()).await.unwrap();
    read_until(&mut client, "\r\n\r\n").await;
    drop(client);
    eventually("the backend is left", || living.count() == 0).await;
}

#[tokio::test]
async fn endless_events_arrive_one_by_one_and_without_end() {
    // Every wait is longer than what is allowed before the head.
    let server = Server::with(Options { answer: Duration::from_millis(100), ..Options::default() }).await;
    let (send, receive) = tokio::sync::mpsc::channel::<()>(1);
    let receive = Arc::new(tokio::sync::Mutex::new(receive));
    server
        .backend(8000, move |mut stream| {
            let receive = receive.clone();
            async move {
                read_request(&mut stream, &mut Vec::new()).await;
                stream.write_all(SSE.as_bytes()).await.unwrap();
                let mut number = 0;
                while receive.lock().await.recv().await.is_some() {
                    stream.write_all(format!("9\r\nevent {number}\n\n\r\n").as_bytes()).await.unwrap();
                    number += 1;
                }
            }
        })
        .await;
    let mut client = server.connect().await;
    let request = format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", server.base(8000));
    client.write_all(request.as_bytes()).await.unwrap();
    // The head comes before any event does.
    read_until(&mut client, "\r\n\r\n").await;
    for number in 0..6 {
        tokio::time::sleep(Duration::from_millis(150)).await;
        send.send(()).await.unwrap();
        // The next is not sent before this one is here.
        read_until(&mut client, &format!("event {number}\n\n")).await;
    }
}

#[tokio::test]
async fn the_backends_death_ends_the_client() {
    let server = Server::start().await;
    server
        .backend(8000, |mut stream| async move {
            read_request(&mut stream, &mut Vec::new()).await;
            stream.write_all(format!("{SSE}7\r\nevent\n\n\r\n").as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        })
        .await;
    let answer = server.get(8000, "/").await;
    assert!(answer.text().ends_with("event\n\n\r\n"), "no last chunk, just the end: {}", answer.text());
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_stream_in_bounded_memory() {
    const SIZE: u64 = 200 << 20;
    let server = Server::start().await;
    server
        .backend(8000, |mut stream| async move {
            // The upload is counted and answered by a download of the same size.
            let mut buffer = vec![0; 1 << 16];
            let mut head = Vec::new();
            let start = loop {
                stream.read_buf(&mut head).await.unwrap();
                if let Some(at) = head.windows(4).position(|window| window == b"\r\n\r\n") {
                    break at + 4;
                }
            };
            let mut received = (head.len() - start) as u64;
            while received < SIZE {
                received += stream.read(&mut buffer).await.unwrap() as u64;
            }
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            for _ in 0..SIZE >> 16 {
                stream.write_all(&buffer).await.unwrap();
            }
        })
        .await;
    let before = resident();
    let mut client = server.connect().await;
    let target = server.base(8000);
    let head =
        format!("PUT {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {SIZE}\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let block = vec![0; 1 << 16];
    for _ in 0..SIZE >> 16 {
        client.write_all(&block).await.unwrap();
    }
    let up = resident();
    let mut buffer = vec![0; 1 << 16];
    let mut received = 0;
    loop {
        let read = client.read(&mut buffer).await.unwrap() as u64;
        if read == 0 {
            break;
        }
        received += read;
    }
    assert!(received > SIZE && received < SIZE + 1000);
    for (name, now) in [("up", up), ("down", resident())] {
        assert!(now < before + (24 << 20), "{name}: {} KiB more", (now - before) >> 10);
    }
}

#[tokio::test]
async fn a_slow_reader_slows_the_backend_down() {
    let server = Server::start().await;
    let sent = Arc::new(AtomicU64::new(0));
    let count = sent.clone();
    server
        .backend(8000, move |mut stream| {
            let count = count.clone();
            async move {
                read_request(&mut stream, &mut Vec::new()).await;
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                let block = vec![0; 1 << 16];
                while stream.write_all(&block).await.is_ok() {
                    count.fetch_add(1 << 16, Ordering::SeqCst);
                }
            }
        })
        .await;
    let mut client = server.connect().await;
    let request = format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", server.base(8000));
    client.write_all(request.as_bytes()).await.unwrap();
    let mut last = u64::MAX;
    // Until everything between is full.
    while last != sent.load(Ordering::SeqCst) || last == 0 {
        last = sent.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(last < 64 << 20, "{last} bytes are on their way");
}

#[tokio::test]
async fn an_early_answer_ends_an_upload() {
    let server = Server::start().await;
    server
        .backend(8000, |mut stream| async move {
            stream.read_exact(&mut [0; 16]).await.unwrap();
            let refusal = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig";
            stream.write_all(refusal).await.unwrap();
            // Keeps the connection without reading on.
            tokio::time::sleep(Duration::from_secs(60)).await;
        })
        .await;
    let mut client = server.connect().await;
    let target = server.base(8000);
    let head = format!("POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 100000000\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(&vec![0; 1 << 16]).await.unwrap();
    let answer = read_until(&mut client, "\r\n\r\nbig").await;
    assert!(answer.starts_with(b"HTTP/1.1 413"));
    assert_eq!(server.proxy.idle(), 0, "a connection with half a request on it is of no use");
}
