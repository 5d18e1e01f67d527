//! Files and directories over HTTP: names, modes, lists, searches, moves and replacements.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // Helpers of tests are tests.

mod web;

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};

use axum::body::Body;
use http::Method;
use osb_execd::app::Shared;
use osb_execd::binding::{Access, Binding, Current};
use serde_json::json;
use web::files::{Part, metadata, start, start_in};
use web::{Daemon, encode};

#[tokio::test]
async fn info_is_keyed_by_what_was_asked() {
    let files = start().await;
    files.write("home/a b.txt", "12345");
    let absolute = files.query("home/a b.txt");
    let answer = files
        .daemon
        .get(&format!("/files/info?path={absolute}&path=~/a+b.txt&path=%24HOME%2Fa%20b.txt"))
        .await
        .ok();
    let map = answer.json();
    for key in [files.text("home/a b.txt").as_str(), "~/a b.txt", "$HOME/a b.txt"] {
        assert_eq!(map[key]["path"], key);
        assert_eq!(map[key]["size"], 5);
        assert_eq!(map[key]["type"], "file");
    }
    assert_eq!(answer.header("content-type"), "application/json; charset=utf-8");
    assert_eq!(files.daemon.get("/files/info").await.ok().text(), "{}");
    files.daemon.get(&format!("/files/info?path={absolute}&path=/nope")).await.refused(404, "FILE_NOT_FOUND");
    files.daemon.get(&format!("/files/info?path={absolute}%2Fx")).await.refused(404, "FILE_NOT_FOUND");
    files.daemon.get("/files/info?path=").await.refused(400, "INVALID_REQUEST_BODY");
    symlink("nowhere", files.path("link")).unwrap();
    let link = files.text("link");
    assert_eq!(
        files.daemon.get(&format!("/files/info?path={}", encode(&link))).await.ok().json()[&link]["type"],
        "symlink"
    );
}

#[tokio::test]
async fn undefined_variables_are_400_everywhere() {
    let files = start().await;
    let bad = "${UNSET_HERE}/x";
    for path in ["/files/info", "/files/download", "/files/search", "/directories/list"] {
        let message = files
            .daemon
            .get(&format!("{path}?path={}", encode(bad)))
            .await
            .refused(400, "INVALID_REQUEST_BODY");
        assert!(message.contains("UNSET_HERE"), "{message}");
    }
    for path in ["/files", "/directories"] {
        files
            .daemon
            .delete(&format!("{path}?path={}", encode(bad)))
            .await
            .refused(400, "INVALID_REQUEST_BODY");
    }
    for (path, body) in [
        ("/files/permissions", json!({ bad: { "mode": 644 } })),
        ("/files/mv", json!([{ "src": bad, "dest": "/tmp/x" }])),
        ("/files/replace", json!({ bad: { "old": "a", "new": "b" } })),
        ("/directories", json!({ bad: { "mode": 755 } })),
    ] {
        files.daemon.post(path, body).await.refused(400, "INVALID_REQUEST_BODY");
    }
    files.upload(&[metadata(bad), Part::File(b"x")]).await.refused(400, "INVALID_FILE_METADATA");
}

#[tokio::test]
async fn odd_names_survive_upload_and_download() {
    let files = start().await;
    for name in [
        "a b.txt",
        "50%.txt",
        "50%25.txt",
        "a#b?.txt",
        "a+b.txt",
        "ü.txt",
        "u\u{308}.txt",
        "a&b=c;d.txt",
        "line\nbreak",
        "-rf",
        "'\"$HOME\\",
        "\u{202e}rtl",
        "🦀",
        ".hidden",
        "tab\t",
        "${HOME}",
        "$$",
        "~",
        "$(id)",
    ] {
        let name = format!("odd/{name}");
        let path = files.text(&name);
        files.upload(&[metadata(&path), Part::File(name.as_bytes())]).await.ok();
        let query = format!("path={}", encode(&path));
        assert_eq!(files.daemon.get(&format!("/files/download?{query}")).await.ok().text(), name);
        assert_eq!(
            files.daemon.get(&format!("/files/info?{query}")).await.ok().json()[&path]["size"],
            name.len()
        );
        let json = json!({ &path: { "old": &name, "new": "new" } });
        let answer = files.daemon.post("/files/replace?verbose=true", json).await.ok();
        assert_eq!(answer.json()[&path]["replacedCount"], 1, "{name:?}");
        files.daemon.post("/files/permissions", json!({ &path: { "mode": 600 } })).await.ok();
        let info = files.daemon.get(&format!("/files/info?{query}")).await.ok().json();
        assert_eq!(info[&path]["mode"], 600);
        let moved = format!("{path}.moved");
        files.daemon.post("/files/mv", json!([{ "src": &path, "dest": &moved }])).await.ok();
        files.daemon.post("/files/mv", json!([{ "src": &moved, "dest": &path }])).await.ok();
        files.daemon.delete(&format!("/files?{query}")).await.ok();
        files.daemon.get(&format!("/files/download?{query}")).await.refused(404, "FILE_NOT_FOUND");
    }
}

#[tokio::test]
async fn what_a_listing_names_can_be_asked_for() {
    let files = start().await;
    for name in ["$HOME", "${UNSET}", "a$b", "~", "x"] {
        files.write(&format!("d/{name}"), name);
    }
    for entry in files
        .daemon
        .get(&format!("/files/search?path={}", files.query("d")))
        .await
        .ok()
        .json()
        .as_array()
        .unwrap()
    {
        let path = entry["path"].as_str().unwrap();
        let answer = files.daemon.get(&format!("/files/download?path={}", encode(path))).await.ok();
        assert_eq!(path.rsplit('/').next(), Some(answer.text()));
    }
}

#[tokio::test]
async fn names_that_are_not_utf8() {
    let files = start().await;
    let name = std::ffi::OsStr::from_bytes(b"\xff\xfe.bin");
    let path = files.path("raw").join(name);
    std::fs::create_dir(files.path("raw")).unwrap();
    std::fs::write(&path, "raw").unwrap();
    let query = encode(&path);
    assert_eq!(files.daemon.get(&format!("/files/download?path={query}")).await.ok().text(), "raw");
    assert_eq!(
        files.daemon.get(&format!("/files/info?path={query}")).await.ok().json().as_object().unwrap().len(),
        1
    );
    assert_eq!(
        files.names(&format!("/directories/list?path={}", files.query("raw"))).await,
        ["raw/\u{fffd}\u{fffd}.bin"]
    );
    assert_eq!(
        files.names(&format!("/files/search?path={}&pattern=*.bin", files.query("raw"))).await.len(),
        1
    );
    files.daemon.delete(&format!("/files?path={query}")).await.ok();
    assert!(!path.exists());
}

#[tokio::test]
async fn missing_is_404_with_its_code_everywhere() {
    let files = start().await;
    for path in ["/nope", "/nope/deeper"] {
        let query = encode(path);
        for call in ["/files/info", "/files/download", "/files/search", "/directories/list"] {
            files.daemon.get(&format!("{call}?path={query}")).await.refused(404, "FILE_NOT_FOUND");
        }
        files
            .daemon
            .post("/files/mv", json!([{ "src": path, "dest": files.text("x") }]))
            .await
            .refused(404, "FILE_NOT_FOUND");
        files
            .daemon
            .post("/files/permissions", json!({ path: { "mode": 644 } }))
            .await
            .refused(404, "FILE_NOT_FOUND");
        files
            .daemon
            .post("/files/replace", json!({ path: { "old": "a", "new": "b" } }))
            .await
            .refused(404, "FILE_NOT_FOUND");
        files.daemon.delete(&format!("/files?path={query}")).await.ok();
        files.daemon.delete(&format!("/directories?path={query}")).await.ok();
    }
    for call in ["/files/download", "/files/search", "/directories/list"] {
        files.daemon.get(call).await.refused(400, "MISSING_QUERY");
    }
}

#[tokio::test]
async fn modes_and_owners() {
    let files = start().await;
    files.write("f", "x");
    let path = files.text("f");
    for (mode, octal) in
        [(json!(644), 0o644), (json!(420), 0o420), (json!("0600"), 0o600), (json!(4755), 0o755)]
    {
        files.daemon.post("/files/permissions", json!({ &path: { "mode": mode } })).await.ok();
        assert_eq!(files.mode("f"), octal);
    }
    files.daemon.post("/files/permissions", json!({ &path: { "mode": 0 } })).await.ok();
    files
        .daemon
        .post("/files/permissions", json!({ &path: null, "/nope": { "mode": 0, "owner": null } }))
        .await
        .ok();
    assert_eq!(files.mode("f"), 0o755);
    for mode in [json!(8), json!(649), json!(-1), json!("rwx"), json!(6.5)] {
        files
            .daemon
            .post("/files/permissions", json!({ &path: { "mode": mode } }))
            .await
            .refused(400, "INVALID_REQUEST_BODY");
    }
    let message = files
        .daemon
        .post("/files/permissions", json!({ &path: { "mode": 600, "owner": "nobody-of-that-name" } }))
        .await
        .refused(400, "INVALID_REQUEST_BODY");
    assert!(message.contains("nobody-of-that-name"));
    assert_eq!(files.mode("f"), 0o755, "nothing was changed");
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: giving files away needs root");
        return;
    }
    files
        .daemon
        .post("/files/permissions", json!({ &path: { "owner": "daemon", "group": "12345" } }))
        .await
        .ok();
    let found = files.path("f").metadata().unwrap();
    assert_eq!((found.uid(), found.gid()), (1, 12345));
    let info = files.daemon.get(&format!("/files/info?path={}", files.query("f"))).await.ok().json();
    assert_eq!((&info[&path]["owner"], &info[&path]["group"]), (&json!("daemon"), &json!("12345")));
    assert_eq!(info[&path]["mode"], 755);
    // A link is followed.
    symlink("f", files.path("l")).unwrap();
    files
        .daemon
        .post(
            "/files/permissions",
            json!({ files.text("l"): { "mode": 640, "owner": "0", "group": "root" } }),
        )
        .await
        .ok();
    assert_eq!((files.mode("f"), files.path("f").metadata().unwrap().uid()), (0o640, 0));
}

#[tokio::test]
async fn new_directories_get_the_mode_and_old_ones_keep_theirs() {
    let files = start().await;
    std::fs::create_dir(files.path("old")).unwrap();
    std::fs::set_permissions(files.path("old"), PermissionsExt::from_mode(0o701)).unwrap();
    files
        .daemon
        .post(
            "/directories",
            json!({ files.text("old/a/b"): { "mode": 750 }, files.text("old"): { "mode": 777 } }),
        )
        .await
        .ok();
    assert_eq!([files.mode("old"), files.mode("old/a"), files.mode("old/a/b")], [0o701, 0o750, 0o750]);
    files.daemon.post("/directories", json!({ files.text("plain"): {}, "~/in/home": null })).await.ok();
    assert!(files.path("plain").is_dir() && files.path("home/in/home").is_dir());
    files.write("file", "x");
    for path in ["file", "file/below"] {
        let message = files
            .daemon
            .post("/directories", json!({ files.text(path): {} }))
            .await
            .refused(500, "RUNTIME_ERROR");
        assert!(message.contains("a file is in the way"), "{message}");
    }
    symlink("nowhere", files.path("dangling")).unwrap();
    files
        .daemon
        .post("/directories", json!({ files.text("dangling/x"): {} }))
        .await
        .refused(500, "RUNTIME_ERROR");
    files
        .daemon
        .post("/directories", json!({ files.text("bad"): { "owner": "no-such-user" } }))
        .await
        .refused(400, "INVALID_REQUEST_BODY");
    assert!(!files.path("bad").exists());
}

#[tokio::test]
async fn listings() {
    let files = start().await;
    for name in ["l/b.txt", "l/a.txt", "l/e/f/g", "l/e.txt", "l/.h"] {
        files.write(name, "");
    }
    symlink("e", files.path("l/link")).unwrap();
    let root = files.query("l");
    assert_eq!(
        files.names(&format!("/directories/list?path={root}")).await,
        ["l/.h", "l/a.txt", "l/b.txt", "l/e", "l/e.txt", "l/link"]
    );
    assert_eq!(
        files.names(&format!("/directories/list?path={root}%2F&depth=9")).await,
        ["l/.h", "l/a.txt", "l/b.txt", "l/e", "l/e/f", "l/e/f/g", "l/e.txt", "l/link"]
    );
    assert_eq!(files.names(&format!("/directories/list?path={root}&depth=2")).await.len(), 7);
    assert_eq!(files.daemon.get(&format!("/directories/list?path={root}&depth=0")).await.ok().text(), "[]");
    for depth in ["-1", "x", "1.5"] {
        files
            .daemon
            .get(&format!("/directories/list?path={root}&depth={depth}"))
            .await
            .refused(400, "INVALID_REQUEST_BODY");
    }
    for name in ["l/link", "l/link/", "l/a.txt"] {
        files
            .daemon
            .get(&format!("/directories/list?path={}", files.query(name)))
            .await
            .refused(400, "INVALID_REQUEST_BODY");
    }
    std::fs::create_dir(files.path("empty")).unwrap();
    assert_eq!(
        files.daemon.get(&format!("/directories/list?path={}", files.query("empty"))).await.ok().text(),
        "[]"
    );
    assert_eq!(
        files.daemon.get(&format!("/files/search?path={}", files.query("empty"))).await.ok().text(),
        "[]"
    );
    assert_eq!(files.names("/directories/list?path=l").await.len(), 6, "relative to the working directory");
}

#[tokio::test]
async fn searches() {
    let files = start().await;
    for name in ["s/a.md", "s/d/b.md", "s/d/e/c.md", "s/d/x.js", "s/src/a.js", "s/src/x/b.js", "s/lib/c.js"] {
        files.write(name, "");
    }
    symlink("/etc", files.path("s/etc")).unwrap();
    let root = files.query("s");
    for (pattern, expected) in [
        ("*.md", vec!["s/a.md", "s/d/b.md", "s/d/e/c.md"]),
        ("**/*.md", vec!["s/a.md", "s/d/b.md", "s/d/e/c.md"]),
        ("src/*.js", vec!["s/src/a.js"]),
        (
            "*.{js,md}",
            vec!["s/a.md", "s/d/b.md", "s/d/e/c.md", "s/d/x.js", "s/lib/c.js", "s/src/a.js", "s/src/x/b.js"],
        ),
        ("passwd", vec![]),
        ("etc", vec!["s/etc"]),
        ("d", vec![]),
    ] {
        assert_eq!(
            files.names(&format!("/files/search?path={root}&pattern={}", encode(pattern))).await,
            expected,
            "{pattern}"
        );
    }
    assert_eq!(files.names(&format!("/files/search?path={root}")).await.len(), 8);
    assert_eq!(files.names(&format!("/files/search?path={root}&pattern=**")).await.len(), 8);
    for pattern in ["[a", "{a", "a\\"] {
        files
            .daemon
            .get(&format!("/files/search?path={root}&pattern={}", encode(pattern)))
            .await
            .refused(400, "INVALID_REQUEST_BODY");
    }
    files
        .daemon
        .get(&format!("/files/search?path={}", files.query("s/etc")))
        .await
        .refused(400, "INVALID_REQUEST_BODY");
    assert_eq!(
        files.names(&format!("/files/search?path={}&pattern=*.md", files.query("s/a.md"))).await,
        ["s/a.md"]
    );
}

#[tokio::test]
async fn a_large_tree_is_answered_whole() {
    let files = start_in("/dev/shm").await;
    std::fs::create_dir(files.path("many")).unwrap();
    let dir =
        rustix::fs::open(files.path("many"), rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    for n in 0..20_000 {
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(&dir, format!("{n:05}"), rustix::fs::FileType::RegularFile, mode, 0).unwrap();
    }
    for call in ["/files/search?pattern=*&path", "/directories/list?path"] {
        let found = files.names(&format!("{call}={}", files.query("many"))).await;
        assert_eq!(found.len(), 20_000);
        assert!(found.is_sorted());
    }
    // A client that leaves does not keep the walk.
    for _ in 0..50 {
        let request =
            files.daemon.request(Method::GET, &format!("/files/search?path={}", files.query("many")));
        drop(files.daemon.open(request, Body::empty()).await);
    }
    assert_eq!(
        files.names(&format!("/files/search?path={}&pattern=00001", files.query("many"))).await,
        ["many/00001"]
    );
    files.daemon.delete(&format!("/directories?path={}", files.query("many"))).await.ok();
    assert!(!files.path("many").exists());
}

#[tokio::test]
async fn moves_and_removals() {
    let files = start().await;
    files.write("a", "x");
    files
        .daemon
        .post("/files/mv", json!([{ "src": files.text("a"), "dest": files.text("n/e/w") }]))
        .await
        .ok();
    assert_eq!(std::fs::read(files.path("n/e/w")).unwrap(), b"x");
    files.write("b", "y");
    let message = files
        .daemon
        .post("/files/mv", json!([{ "src": files.text("b"), "dest": files.text("n/e/w") }]))
        .await
        .refused(500, "RUNTIME_ERROR");
    assert!(message.contains("already exists"), "{message}");
    assert_eq!(std::fs::read(files.path("n/e/w")).unwrap(), b"x");
    files.daemon.post("/files/mv", json!({})).await.refused(400, "INVALID_REQUEST_BODY");
    files.daemon.delete(&format!("/files?path={}", files.query("n"))).await.refused(500, "RUNTIME_ERROR");
    files
        .daemon
        .delete(&format!("/files?path={}&path={}&path=/nope", files.query("b"), files.query("n/e/w")))
        .await
        .ok();
    assert!(!files.path("b").exists() && files.path("n/e").is_dir());
    files.daemon.delete(&format!("/directories?path={}", files.query("n"))).await.ok();
    assert!(!files.path("n").exists());
    files.daemon.delete("/directories?path=/").await.refused(400, "INVALID_REQUEST_BODY");
}

#[tokio::test]
async fn replacements() {
    let files = start().await;
    files.write("r", b"a b a \xff");
    std::fs::set_permissions(files.path("r"), PermissionsExt::from_mode(0o640)).unwrap();
    let path = files.text("r");
    let answer = files
        .daemon
        .post("/files/replace?verbose=true", json!({ &path: { "old": "a", "new": "cc" } }))
        .await
        .ok();
    assert_eq!(answer.json(), json!({ &path: { "replacedCount": 2 } }));
    assert_eq!(std::fs::read(&path).unwrap(), b"cc b cc \xff");
    assert_eq!(files.mode("r"), 0o640);
    let answer =
        files.daemon.post("/files/replace", json!({ &path: { "old": "zzz", "new": "q" } })).await.ok();
    assert!(answer.body.is_empty());
    files
        .daemon
        .post("/files/replace", json!({ &path: { "old": "", "new": "q" } }))
        .await
        .refused(400, "INVALID_REQUEST_BODY");
    files
        .daemon
        .post("/files/replace", json!({ files.text("home"): { "old": "a", "new": "q" } }))
        .await
        .refused(400, "INVALID_REQUEST_BODY");
    files.daemon.post("/files/replace", json!([])).await.refused(400, "INVALID_REQUEST_BODY");
}

#[tokio::test]
async fn the_token_guards_every_route() {
    let daemon = Daemon::start(Shared {
        binding: Current::new(Binding { access: Access::Token("secret".to_owned()), ..Binding::default() }),
        ..Shared::default()
    })
    .await;
    for path in [
        "/files/info",
        "/files/download?path=/etc/passwd",
        "/directories/list?path=/",
        "/metrics",
        "/proxy/80/",
    ] {
        assert_eq!(daemon.get(path).await.status, 401, "{path}");
    }
    daemon.get_with("/files/info", &[("x-execd-access-token", "secret")]).await.ok();
}
