//! Uploads and downloads over HTTP.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // Helpers of tests are tests.

mod web;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::time::{Duration, Instant};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use web::files::{Files, Part, form, metadata, start};

#[tokio::test]
async fn uploads_of_any_size_and_form() {
    let files = start().await;
    for size in [0, 1, 17_000, 19_000, 65_536, 65_537, 1 << 20, (5 << 20) + 3] {
        let content: Vec<u8> = (0..size).map(|n| (n * 31 % 251) as u8).collect();
        files.upload(&[metadata(files.path("up")), Part::File(&content)]).await.ok();
        assert_eq!(std::fs::read(files.path("up")).unwrap(), content, "{size}");
        assert_eq!(files.download("up").await.ok().body, content);
        // In pieces, without a length.
        let body = form(&[metadata(files.path("sub/up")), Part::File(&content)]);
        let pieces: Vec<_> =
            body.chunks(4093).map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece))).collect();
        files.upload_as(Body::from_stream(stream::iter(pieces))).await.ok();
        assert_eq!(std::fs::read(files.path("sub/up")).unwrap(), content, "{size}");
    }
    assert_eq!(files.entries(), 3);
}

#[tokio::test]
async fn links_are_made_and_told() {
    let files = start().await;
    let link = |name: &str, target: &str| {
        Part::PlainMetadata(json!({ "path": files.text(name), "link_target": target }))
    };
    let before = files.entries();
    std::fs::write(files.path("old"), "x").unwrap();
    std::fs::create_dir(files.path("dir")).unwrap();
    for target in ["old", "../no\nwhere", "/etc"] {
        // The second and third time over a link, which is not followed.
        files.upload(&[link("sub/l", target), Part::File(b"")]).await.ok();
        assert_eq!(std::fs::read_link(files.path("sub/l")).unwrap().to_str(), Some(target));
    }
    files.upload(&[link("old", "dir"), Part::File(b"")]).await.ok();
    assert_eq!(std::fs::read_link(files.path("old")).unwrap().to_str(), Some("dir"));
    for (name, target, content) in
        [("dir", "x", &b""[..]), ("new", "x", b"content"), ("new", "", b""), ("new", "a\0b", b"")]
    {
        let answer = files.upload(&[link(name, target), Part::File(content)]).await;
        assert_eq!(answer.status, 400, "{name} {target:?}");
    }
    assert!(files.path("dir").symlink_metadata().unwrap().is_dir());
    assert!(files.path("new").symlink_metadata().is_err());
    assert_eq!(files.entries(), before + 3, "nothing half done is left");
}

#[tokio::test]
async fn upload_pairs() {
    let files = start().await;
    let plain =
        |name: &str, mode: Value| Part::PlainMetadata(json!({ "path": files.text(name), "mode": mode }));
    files
        .upload(&[plain("1", json!(755)), Part::File(b"one"), plain("2", json!(600)), Part::File(b"two")])
        .await
        .ok();
    assert_eq!((files.mode("1"), files.mode("2")), (0o755, 0o600));
    files
        .upload(&[plain("3", json!(null)), plain("4", json!(0)), Part::File(b"three"), Part::File(b"four")])
        .await
        .ok();
    assert_eq!(std::fs::read(files.path("4")).unwrap(), b"four");
    assert_eq!((files.mode("3"), files.mode("4")), (0o644, 0o644));
    files.upload(&[Part::File(b"five"), plain("5", json!("0700"))]).await.ok();
    assert_eq!((std::fs::read(files.path("5")).unwrap(), files.mode("5")), (b"five".to_vec(), 0o700));
    files
        .upload(&[plain("1", json!(0)), Part::File(b"again"), plain("1", json!(0)), Part::File(b"last")])
        .await
        .ok();
    assert_eq!((std::fs::read(files.path("1")).unwrap(), files.mode("1")), (b"last".to_vec(), 0o755));
    let before = files.entries();
    files
        .upload(&[plain("6", json!(0)), Part::File(b"x"), Part::File(b"y")])
        .await
        .refused(400, "INVALID_FILE");
    files
        .upload(&[plain("6", json!(0)), Part::File(b"x"), plain("7", json!(0))])
        .await
        .refused(400, "INVALID_FILE");
    files.upload(&[Part::File(b"x")]).await.refused(400, "INVALID_FILE_METADATA");
    files.upload(&[]).await.refused(400, "INVALID_FILE_METADATA");
    files.upload(&[plain("6", json!(0))]).await.refused(400, "INVALID_FILE_CONTENT");
    for wrong in [
        json!({}),
        json!({ "path": "" }),
        json!([]),
        json!({ "path": 5 }),
        json!({ "path": "/tmp/x/" }),
        json!({ "path": "/tmp/x", "mode": 8 }),
    ] {
        files.upload(&[Part::Metadata(wrong), Part::File(b"x")]).await.refused(400, "INVALID_FILE_METADATA");
    }
    let unknown = Part::Metadata(json!({ "path": files.text("6"), "owner": "no-such-user" }));
    files.upload(&[unknown, Part::File(b"x")]).await.refused(400, "INVALID_FILE_METADATA");
    files.daemon.post("/files/upload", json!({})).await.refused(400, "INVALID_FILE");
    assert_eq!(files.entries(), before, "a refused form changes nothing");
}

#[tokio::test]
async fn upload_targets_of_other_kinds() {
    let files = start().await;
    files.write("real", "old");
    std::fs::set_permissions(files.path("real"), PermissionsExt::from_mode(0o604)).unwrap();
    symlink("real", files.path("link")).unwrap();
    symlink("deep/new", files.path("to-new")).unwrap();
    std::fs::create_dir(files.path("deep")).unwrap();
    let bare = |name: &str| Part::Metadata(json!({ "path": files.text(name) }));
    for content in [&b"new"[..], &[7; 200_000]] {
        files.upload(&[bare("link"), Part::File(content)]).await.ok();
        assert!(files.path("link").is_symlink(), "written through, not replaced");
        assert_eq!(std::fs::read(files.path("real")).unwrap(), content);
        assert_eq!(files.mode("real"), 0o604);
        files.upload(&[bare("to-new"), Part::File(content)]).await.ok();
        assert_eq!(std::fs::read(files.path("deep/new")).unwrap(), content);
        files.upload(&[bare("deep"), Part::File(content)]).await.refused(400, "INVALID_REQUEST_BODY");
        files.upload(&[bare("real/below"), Part::File(content)]).await.refused(500, "RUNTIME_ERROR");
    }
    symlink("loop", files.path("loop")).unwrap();
    files.upload(&[bare("loop"), Part::File(b"x")]).await.refused(400, "INVALID_REQUEST_BODY");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, files.path("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    files.upload(&[bare("pipe"), Part::File(b"x")]).await.refused(400, "INVALID_REQUEST_BODY");
    files
        .daemon
        .get(&format!("/files/download?path={}", files.query("pipe")))
        .await
        .refused(400, "INVALID_REQUEST_BODY");
    if rustix::process::geteuid().is_root() {
        let owned =
            Part::Metadata(json!({ "path": files.text("p/q/f"), "owner": "1", "group": "2", "mode": 4711 }));
        files.upload(&[owned, Part::File(b"x")]).await.ok();
        let of = |name: &str| files.path(name).metadata().map(|found| (found.uid(), found.gid())).unwrap();
        assert_eq!([of("p"), of("p/q"), of("p/q/f")], [(1, 2); 3]);
        assert_eq!(files.mode("p/q/f"), 0o711);
    } else {
        eprintln!("skipped: owners need root");
    }
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(15);
    while !holds() {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Sends the beginning of an upload and closes the connection.
async fn break_off(files: &Files, name: &str, announced: usize, sent: usize) {
    let body = form(&[metadata(files.path(name)), Part::File(&vec![b'n'; announced])]);
    let mut stream = tokio::net::TcpStream::connect(files.daemon.address).await.unwrap();
    let head = format!(
        "POST /files/upload HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=xYz\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body[..sent.min(body.len() - 1)]).await.unwrap();
    stream.flush().await.unwrap();
    // Lets some of it reach the disk.
    tokio::time::sleep(Duration::from_millis(20)).await;
}

#[tokio::test]
async fn a_broken_upload_leaves_the_old_file_and_nothing_else() {
    let files = start().await;
    files.write("f", "old");
    for (name, announced, sent) in
        [("f", 1 << 20, 1 << 19), ("f", 3 << 20, 4 << 20), ("f", 100, 50), ("new/dir/f", 8 << 20, 7 << 20)]
    {
        break_off(&files, name, announced, sent).await;
    }
    let left = || {
        let names = std::fs::read_dir(files.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    eventually("the end of what was begun", || left() == ["f", "home"]).await;
    assert!(std::fs::read(files.path("f")).unwrap() == b"old");
}

#[tokio::test]
async fn aborted_uploads_leak_no_descriptors() {
    let files = start().await;
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    break_off(&files, "f", 1 << 20, 1 << 19).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = open();
    for _ in 0..100 {
        break_off(&files, "f", 1 << 20, 700_000).await;
    }
    // Other tests of this program run at the same time.
    eventually("closed descriptors", || open() < before + 60).await;
}

#[tokio::test]
async fn a_thousand_small_files_in_one_call() {
    let files = start().await;
    let content = vec![b'x'; 4096];
    let mut parts = Vec::new();
    for n in 0..1000 {
        parts.push(metadata(files.path(&format!("many/{n}"))));
        parts.push(Part::File(&content));
    }
    let body = form(&parts);
    let started = Instant::now();
    files.upload_as(body).await.ok();
    eprintln!("1,000 files of 4 KiB: {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(std::fs::read_dir(files.path("many")).unwrap().count(), 1000);
    assert!((0..1000).all(|n| std::fs::read(files.path(&format!("many/{n}"))).unwrap() == content));
}

#[tokio::test]
async fn many_large_files_do_not_run_out_of_descriptors() {
    let files = start().await;
    let content = vec![b'x'; 70_000];
    let mut parts = Vec::new();
    for n in 0..600 {
        parts.push(metadata(files.path(&format!("large/{n}"))));
        parts.push(Part::File(&content));
    }
    files.upload(&parts).await.ok();
    assert_eq!(std::fs::read_dir(files.path("large")).unwrap().count(), 600);
}

#[tokio::test]
async fn downloads_and_ranges() {
    let files = start().await;
    let content: Vec<u8> = (0..700_001_u32).map(|n| (n % 253) as u8).collect();
    files.write("big ü", &content);
    let url = format!("/files/download?path={}", files.query("big ü"));
    let answer = files.daemon.get(&url).await.ok();
    assert_eq!(answer.body, content);
    assert_eq!(answer.header("content-length"), "700001");
    assert_eq!(answer.header("content-type"), "application/octet-stream");
    assert_eq!(
        answer.header("content-disposition"),
        "attachment; filename=\"big%20%C3%BC\"; filename*=UTF-8''big%20%C3%BC"
    );
    let modified = answer.header("last-modified").to_owned();
    let not_modified = files.daemon.get_with(&url, &[("if-modified-since", &modified)]).await;
    assert_eq!((not_modified.status.as_u16(), not_modified.body.len()), (304, 0));
    assert_eq!(
        files.daemon.get_with(&url, &[("if-unmodified-since", "Tue, 14 Nov 2000 22:13:19 GMT")]).await.status,
        412
    );
    for (range, start, end) in [
        ("bytes=0-2", 0, 3),
        ("bytes=100-", 100, 700_001),
        ("bytes=-7", 699_994, 700_001),
        ("bytes=262143-262144", 262_143, 262_145),
        ("bytes=262144-", 262_144, 700_001),
        ("bytes=300000-600000,1-2", 300_000, 600_001),
        ("bytes=1-99999999", 1, 700_001),
    ] {
        let answer = files.daemon.get_with(&url, &[("range", range)]).await;
        assert_eq!(answer.status, 206, "{range}");
        assert_eq!(answer.header("content-range"), format!("bytes {start}-{}/700001", end - 1), "{range}");
        assert_eq!(answer.header("content-length"), (end - start).to_string());
        assert_eq!(answer.body, content[start..end], "{range}");
        let answer = files.daemon.get_with(&url, &[("range", range), ("if-range", "\"tag\"")]).await;
        assert_eq!((answer.status.as_u16(), answer.body.len()), (200, 700_001));
    }
    for range in ["bytes=700001-", "bytes=x", "lines=1-2", "bytes=5-1", "bytes=-0"] {
        let answer = files.daemon.get_with(&url, &[("range", range)]).await;
        answer.refused(416, "UNKNOWN");
        assert_eq!(answer.header("content-range"), "bytes */700001");
    }
    files.write("empty", "");
    let answer = files.download("empty").await.ok();
    assert_eq!((answer.header("content-length"), answer.body.len()), ("0", 0));
    let message = files.download("home").await.refused(400, "INVALID_REQUEST_BODY");
    assert!(message.contains("is a directory"), "{message}");
    let head = files.daemon.send(files.daemon.request(Method::HEAD, &url), Body::empty()).await;
    assert_eq!((head.header("content-length"), head.body.len()), ("700001", 0));
}

#[tokio::test]
async fn lines() {
    let files = start().await;
    files.write("lines", format!("one\ntwo\r\n{}\nfour", "x".repeat(2_000_000)));
    let url = format!("/files/download?path={}", files.query("lines"));
    let get = async |query: &str| files.daemon.get(&format!("{url}&{query}")).await.ok();
    assert_eq!(get("offset=1&limit=2").await.text(), "one\ntwo");
    assert_eq!(get("offset=3&limit=1").await.body.len(), 2_000_000);
    assert_eq!(get("limit=3").await.body.len(), 2_000_008);
    assert_eq!(get("offset=4").await.text(), "four");
    assert_eq!(get("offset=99").await.text(), "");
    assert_eq!(get("offset=2&limit=1").await.header("content-type"), "text/plain; charset=utf-8");
    for query in ["offset=0", "limit=0", "offset=-1", "limit=x"] {
        files.daemon.get(&format!("{url}&{query}")).await.refused(400, "INVALID_REQUEST_BODY");
    }
    files
        .daemon
        .get_with(&format!("{url}&offset=1"), &[("range", "bytes=0-1")])
        .await
        .refused(400, "INVALID_REQUEST_BODY");
    files.daemon.get("/files/download?path=/nope&offset=1").await.refused(404, "FILE_NOT_FOUND");
    files.daemon.get("/files/download?path=/tmp&offset=1").await.refused(400, "INVALID_REQUEST_BODY");
}

#[tokio::test]
async fn files_of_the_kernel_have_their_true_length() {
    let files = start().await;
    let expected = std::fs::read_to_string("/proc/version").unwrap();
    let answer = files.daemon.get("/files/download?path=/proc/version").await.ok();
    assert_eq!(
        (answer.text(), answer.header("content-length")),
        (expected.as_str(), expected.len().to_string().as_str())
    );
    let answer = files.daemon.get_with("/files/download?path=/proc/version", &[("range", "bytes=0-4")]).await;
    assert_eq!((answer.status.as_u16(), answer.text()), (206, "Linux"));
    // Claims 4096 bytes.
    let expected = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap();
    let answer =
        files.daemon.get("/files/download?path=/sys/kernel/mm/transparent_hugepage/enabled").await.ok();
    assert_eq!(answer.text(), expected);
}

#[tokio::test]
async fn a_growing_file_is_cut_at_its_size_and_a_shrinking_one_breaks_off() {
    let files = start().await;
    let path = files.write("log", vec![b'a'; 40 << 20]);
    let url = format!("/files/download?path={}", files.query("log"));
    let answer = files.daemon.open(files.daemon.request(Method::GET, &url), Body::empty()).await;
    std::io::Write::write_all(&mut std::fs::OpenOptions::new().append(true).open(&path).unwrap(), b"more")
        .unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes().len(), 40 << 20);
    let answer = files.daemon.open(files.daemon.request(Method::GET, &url), Body::empty()).await;
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    assert!(answer.into_body().collect().await.is_err());
}

#[tokio::test]
async fn ten_writers_leave_one_whole_file() {
    let files = start().await;
    let blobs: Vec<Vec<u8>> = (0..10).map(|n| vec![n; 300_000]).collect();
    let uploads = blobs
        .iter()
        .map(|blob| async { files.upload(&[metadata(files.path("raced")), Part::File(blob)]).await.ok() });
    futures_util::future::join_all(uploads).await;
    assert!(blobs.contains(&std::fs::read(files.path("raced")).unwrap()));
    assert_eq!(files.entries(), 2);
}
