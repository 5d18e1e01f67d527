//! A port of a sandbox through the server, against the same backend reached directly.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use super::count;
use crate::http::Conn;
use crate::server::{Options, Server};
use crate::stats::{Samples, print_one};

/// Host program that answers `ok` on a port; put into the sandbox for the measurement.
const BACKEND: &str = "bench-backend";

/// Serves `ok` for ever. Run inside the sandbox as `bench-backend PORT`, and outside for the direct figure.
pub(crate) async fn backend(port: u16) -> Result<()> {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let answer = service_fn(|_| async {
                Ok::<_, Infallible>(hyper::Response::new(Full::new(Bytes::from_static(b"ok"))))
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), answer)
                .await;
        });
    }
}

pub(crate) async fn requests() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    let program = Bytes::from(std::fs::read(std::env::current_exe()?)?);
    conn.upload(&id, &format!("/tmp/{BACKEND}"), program, 1).await?;
    conn.exec(&id, &format!("chmod 755 /tmp/{BACKEND} && (/tmp/{BACKEND} serve 9000 </dev/null >/dev/null 2>&1 &) ; for i in $(seq 200); do (exec 3<>/dev/tcp/127.0.0.1/9000) 2>/dev/null && exit 0; sleep 0.02; done; exit 1")).await?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut outside = tokio::process::Command::new(std::env::current_exe()?)
        .args(["serve", &port.to_string()])
        .kill_on_drop(true)
        .spawn()?;
    tokio::time::sleep(Duration::from_millis(300)).await;

    let path = format!("/v1/sandboxes/{id}/proxy/9000/");
    let mut direct = Conn::open(&format!("127.0.0.1:{port}"), "").await.context("direct backend")?;
    let (mut through, mut bare) = (Samples::default(), Samples::default());
    for round in 0..count(3000) + 100 {
        let began = Instant::now();
        let (status, _) = conn.call("GET", &path, "").await?;
        let took = began.elapsed();
        let began = Instant::now();
        direct.call("GET", "/", "").await?;
        let alone = began.elapsed();
        if round >= 100 {
            if status.is_success() {
                through.push_ms(took);
            } else {
                through.fail();
            }
            bare.push_ms(alone);
        }
    }
    through.print("proxy_latency", "ms", Some(("direct", bare.p50())));
    if let Some((ours, theirs)) = through.p50().zip(bare.p50()) {
        print_one("proxy_added", "us", (ours - theirs) * 1e3, None);
    }
    let ours = rate(&server.host(), &path).await?;
    let theirs = rate(&format!("127.0.0.1:{port}"), "/").await?;
    print_one("proxy_rate", "1/s", ours, Some(("direct", Some(theirs))));
    outside.kill().await?;
    conn.delete(&id).await?;
    Ok(())
}

async fn rate(host: &str, path: &str) -> Result<f64> {
    let until = Instant::now() + Duration::from_secs(5);
    let began = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..32 {
        let mut conn = Conn::open(host, "").await?;
        let path = path.to_owned();
        tasks.push(tokio::spawn(async move {
            let mut done = 0_u32;
            while Instant::now() < until {
                if conn.call("GET", &path, "").await?.0.is_success() {
                    done += 1;
                }
            }
            anyhow::Ok(done)
        }));
    }
    let mut done = 0;
    for task in tasks {
        done += task.await??;
    }
    Ok(f64::from(done) / began.elapsed().as_secs_f64())
}
