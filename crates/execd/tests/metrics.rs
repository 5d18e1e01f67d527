//! `/metrics` and `/metrics/watch` over HTTP.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // Helpers of tests are tests.

mod web;

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use axum::body::Body;
use http::Method;
use http_body_util::BodyExt as _;
use osb_execd::app::{Limits, Shared};
use osb_protocol::boot::UsageFds;
use web::Daemon;

#[tokio::test]
async fn figures_come_from_the_engines_descriptors() {
    let file = |text: &str| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    };
    let (current, stat, cpu) = (file("104857600\n"), file("total_inactive_file 4194304\n"), file("0\n"));
    let limits = Limits {
        memory_bytes: Some(256 << 20),
        cpu_millis: Some(500),
        usage: UsageFds {
            cpuacct_usage: Some(cpu.as_raw_fd()),
            memory_current: Some(current.as_raw_fd()),
            memory_stat: Some(stat.as_raw_fd()),
            ..UsageFds::default()
        },
        ..Limits::default()
    };
    let daemon = Daemon::start(Shared { limits, ..Shared::default() }).await;
    let started = Instant::now();
    let text = daemon.get("/metrics").await.ok().text().to_owned();
    assert!(started.elapsed() < Duration::from_millis(900), "no second is spent on a sample");
    assert!(text.contains("\"cpu_count\":1,"), "a whole number without a fraction: {text}");
    let metrics: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(metrics["mem_total_mib"], 256.0);
    assert_eq!(metrics["mem_used_mib"], 96.0);
    assert_eq!(metrics["cpu_used_pct"], 0.0);
    assert!(metrics["timestamp"].as_i64().unwrap() > 1_700_000_000_000);
}

#[tokio::test]
async fn without_an_engine_the_machine_is_measured() {
    let daemon = Daemon::start(Shared::default()).await;
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let busy = std::thread::spawn({
        let stop = stop.clone();
        move || while !stop.load(std::sync::atomic::Ordering::Relaxed) {}
    });
    daemon.get("/metrics").await.ok();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let metrics = daemon.get("/metrics").await.ok().json();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    busy.join().unwrap();
    let percent = metrics["cpu_used_pct"].as_f64().unwrap();
    assert!(percent > 1.0 && percent <= 100.0, "{percent}");
    assert!(metrics["mem_used_mib"].as_f64().unwrap() > 1.0);
    assert!(metrics["mem_total_mib"].as_f64() > metrics["mem_used_mib"].as_f64());
    assert!(metrics["cpu_count"].is_u64());
}

#[tokio::test]
async fn a_watch_sends_a_line_each_second() {
    let daemon = Daemon::start(Shared::default()).await;
    let started = Instant::now();
    let answer = daemon.open(daemon.request(Method::GET, "/metrics/watch"), Body::empty()).await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    assert!(started.elapsed() < Duration::from_millis(900), "headers come at once");
    let mut body = answer.into_body();
    let mut times = Vec::new();
    while times.len() < 3 {
        let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
        let text = std::str::from_utf8(&frame).unwrap();
        let line = text.strip_suffix('\n').unwrap();
        assert!(!line.contains('\n'));
        assert!(serde_json::from_str::<serde_json::Value>(line).unwrap()["cpu_count"].is_u64());
        times.push(started.elapsed());
    }
    assert!(times[2] > Duration::from_millis(1500) && times[2] < Duration::from_secs(30), "{times:?}");
}
