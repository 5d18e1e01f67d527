//! Transfers of large files: bounded memory, and their speed for the record.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // Helpers of tests are tests.

mod web;

use std::time::{Duration, Instant};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::Method;
use http_body_util::BodyExt as _;
use osb_execd::app::Shared;
use web::{Daemon, encode};

const PIECE: usize = 256 << 10;
const PIECES: usize = 1024;

/// Largest resident size so far, in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

fn speed(what: &str, elapsed: Duration) {
    let mib = (PIECE * PIECES) >> 20;
    eprintln!(
        "{what}: {mib} MiB in {elapsed:?}, {:.0} MB/s",
        (PIECE * PIECES) as f64 / 1e6 / elapsed.as_secs_f64()
    );
}

/// One test: figures of one process.
#[tokio::test]
async fn large_files_pass_through_little_memory() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("large");
    let daemon = Daemon::start(Shared::default()).await;
    daemon.get("/ping").await.ok();
    let before = peak();

    let piece = Bytes::from((0..PIECE).map(|n| (n * 7 % 256) as u8).collect::<Vec<_>>());
    let head = format!(
        "--b\r\nContent-Disposition: form-data; name=\"metadata\"\r\n\r\n{}\r\n--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n",
        serde_json::json!({ "path": path })
    );
    let pieces = [Bytes::from(head)]
        .into_iter()
        .chain(std::iter::repeat_n(piece.clone(), PIECES))
        .chain([Bytes::from_static(b"\r\n--b--\r\n")]);
    let body = Body::from_stream(stream::iter(pieces.map(Ok::<_, std::io::Error>)));
    let request = daemon
        .request(Method::POST, "/files/upload")
        .header("content-type", "multipart/form-data; boundary=b");
    let started = Instant::now();
    daemon.send(request, body).await.ok();
    speed("upload", started.elapsed());
    assert_eq!(path.metadata().unwrap().len(), (PIECE * PIECES) as u64);

    let started = Instant::now();
    let answer = daemon
        .open(daemon.request(Method::GET, &format!("/files/download?path={}", encode(&path))), Body::empty())
        .await;
    let mut body = answer.into_body();
    let mut at = 0;
    while let Some(frame) = body.frame().await {
        let data = frame.unwrap().into_data().unwrap();
        let start = at % PIECE;
        let end = (start + data.len()).min(PIECE);
        assert!(data[..end - start] == piece[start..end]);
        at += data.len();
    }
    speed("download", started.elapsed());
    assert_eq!(at, PIECE * PIECES);
    assert!(peak() < before + 48, "{before} MiB before, {} MiB after", peak());

    let started = Instant::now();
    let json = serde_json::json!({ path.to_str().unwrap(): { "old": "\u{1}\u{2}never", "new": "" } });
    daemon.post("/files/replace", json).await.ok();
    speed("replace without a match", started.elapsed());
    assert!(peak() < before + 48);

    // A match in each piece, some of them over the borders of what is read at a time.
    let text: Vec<u8> = (0..PIECE).map(|n| b'a' + (n % 23) as u8).collect();
    {
        use std::io::Write as _;
        let mut file = std::fs::File::create(&path).unwrap();
        for number in 0..PIECES {
            file.write_all(&text[..PIECE - 7 - number % 5]).unwrap();
            file.write_all(b"<<here>>").unwrap();
        }
    }
    let size = path.metadata().unwrap().len();
    let started = Instant::now();
    let json = serde_json::json!({ path.to_str().unwrap(): { "old": "<<here>>", "new": "[[there now]]" } });
    let answer = daemon.post("/files/replace?verbose=true", json).await.ok();
    speed("replace", started.elapsed());
    assert_eq!(answer.json()[path.to_str().unwrap()]["replacedCount"], PIECES);
    assert_eq!(path.metadata().unwrap().len(), size + 5 * PIECES as u64);
    assert!(peak() < before + 48, "{before} MiB before, {} MiB after", peak());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing half done is left");

    // One line of 256 MiB.
    let answer = daemon
        .open(
            daemon.request(Method::GET, &format!("/files/download?path={}&limit=1", encode(&path))),
            Body::empty(),
        )
        .await;
    let mut body = answer.into_body();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        length += frame.unwrap().into_data().unwrap().len() as u64;
    }
    assert_eq!(length, size + 5 * PIECES as u64);
    assert!(peak() < before + 48, "{before} MiB before, {} MiB after", peak());
}
