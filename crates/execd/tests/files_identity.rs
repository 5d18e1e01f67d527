//! Files as another user. The daemon is the real program: it executes itself for each identity.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // Helpers of tests are tests.

mod common;
mod web;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Answer, Client, Daemon, eventually};
use serde_json::{Value, json};
use web::encode;
use web::files::{Part, form, metadata};

/// Nobody's ids on any machine that runs tests.
const ALICE: (u32, u32) = (23_001, 33_001);
const BOB: (u32, u32) = (23_002, 33_002);

/// A daemon and a directory that everybody may enter.
struct Site {
    daemon: Daemon,
    dir: tempfile::TempDir,
}

/// Calls of one identity.
#[derive(Clone, Copy)]
struct As<'a>(&'a Site, (u32, u32));

/// `None` where the tests cannot run.
fn site() -> Option<Site> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root may become somebody else");
        return None;
    }
    Some(site_of(Daemon::with(&[], &[("SECRET_OF_DAEMON", "hunter2"), ("HOME", "/root")])))
}

fn site_of(daemon: Daemon) -> Site {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    Site { daemon, dir }
}

impl Site {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn mkdir(&self, name: &str, owner: (u32, u32), mode: u32) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir(&path).unwrap();
        own(&path, owner, mode);
        path
    }

    fn write(&self, name: &str, content: &str, owner: (u32, u32), mode: u32) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        own(&path, owner, mode);
        path
    }

    fn owner(&self, name: &str) -> (u32, u32) {
        let found = self.path(name).symlink_metadata().unwrap();
        (found.uid(), found.gid())
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    fn mode(&self, name: &str) -> u32 {
        self.path(name).symlink_metadata().unwrap().mode() & 0o7777
    }

    fn by(&self, who: (u32, u32)) -> As<'_> {
        As(self, who)
    }
}

fn own(path: &Path, (uid, gid): (u32, u32), mode: u32) {
    chown(path, Some(uid), Some(gid)).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

impl As<'_> {
    fn call(self, method: &str, rest: &str, body: Option<Value>) -> Answer {
        let (uid, gid) = self.1;
        self.0.daemon.call(method, &format!("/v1/filesystem/{uid}/{gid}{rest}"), body)
    }

    fn get(self, operation: &str, name: &str) -> Answer {
        self.call("GET", &format!("{operation}?path={}", encode(self.0.path(name))), None)
    }

    fn upload(self, parts: &[Part<'_>]) -> Answer {
        let (uid, gid) = self.1;
        let mut client = self.0.daemon.connect();
        let path = format!("/v1/filesystem/{uid}/{gid}/files/upload");
        upload_on(&mut client, &path, parts)
    }

    fn put(self, name: &str, content: &str) -> Answer {
        self.upload(&[Part::Metadata(json!({ "path": self.0.text(name) })), Part::File(content.as_bytes())])
    }
}

fn upload_on(client: &mut Client, path: &str, parts: &[Part<'_>]) -> Answer {
    let headers = [("content-type", "multipart/form-data; boundary=xYz")];
    let head = client.request("POST", path, &headers, &form(parts));
    let body = client.body(&head);
    Answer { head, body }
}

trait Check: Sized {
    fn ok(self) -> Self;
    fn refused(&self, status: u16, code: &str) -> String;
    /// As the contract has it for what the kernel denies.
    fn denied(&self);
}

impl Check for Answer {
    #[track_caller]
    fn ok(self) -> Self {
        assert_eq!(self.head.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self
    }

    #[track_caller]
    fn refused(&self, status: u16, code: &str) -> String {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(self.head.status, status, "{text}");
        assert_eq!(self.json()["code"], code, "{text}");
        self.json()["message"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    fn denied(&self) {
        let message = self.refused(500, "RUNTIME_ERROR");
        assert!(message.contains("permission"), "{message}");
    }
}

/// Workers of this daemon: process ids and whether they are zombies.
fn workers(daemon: &Daemon) -> Vec<(i32, bool)> {
    let parent = format!("PPid:\t{}", daemon.child.id());
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
            let ours = status.lines().any(|line| line == parent);
            ours.then(|| (pid, status.contains("State:\tZ")))
        })
        .collect()
}

#[test]
fn all_operations_are_done_as_the_identity() {
    let Some(site) = site() else { return };
    site.mkdir("home", ALICE, 0o700);
    let alice = site.by(ALICE);
    alice.put("home/a/b/f", "one\ntwo\nthree\n").ok();
    for name in ["home/a", "home/a/b", "home/a/b/f"] {
        assert_eq!(site.owner(name), ALICE, "{name}");
    }
    assert_eq!((site.mode("home/a"), site.mode("home/a/b/f")), (0o755, 0o644));
    // Larger than what stays in memory.
    let large = "x".repeat(3 << 20);
    alice.put("home/large", &large).ok();
    assert_eq!((site.owner("home/large"), site.read("home/large").len()), (ALICE, large.len()));
    assert_eq!(alice.get("/files/download", "home/large").ok().body, large.as_bytes());

    let info = alice.get("/files/info", "home/a/b/f").ok().json();
    let info = &info[site.text("home/a/b/f")];
    assert_eq!(
        (&info["owner"], &info["group"], &info["size"]),
        (&json!("23001"), &json!("33001"), &json!(14))
    );
    let path = encode(site.path("home/a/b/f"));
    let lines = alice.call("GET", &format!("/files/download?path={path}&offset=2&limit=1"), None).ok();
    assert_eq!(
        (lines.body.as_slice(), lines.head.header("content-type")),
        (&b"two"[..], Some("text/plain; charset=utf-8"))
    );
    let mut client = site.daemon.connect();
    let head = client.request(
        "GET",
        &format!("/v1/filesystem/{}/{}/files/download?path={path}", ALICE.0, ALICE.1),
        &[("range", "bytes=4-6")],
        b"",
    );
    assert_eq!((head.status, head.header("content-range")), (206, Some("bytes 4-6/14")));
    assert_eq!(head.header("content-disposition"), Some("attachment; filename=\"f\""));
    assert_eq!(client.body(&head), b"two");

    let replaced = json!({ site.text("home/a/b/f"): { "old": "two", "new": "2" } });
    let answer = alice.call("POST", "/files/replace?verbose=true", Some(replaced)).ok();
    assert_eq!(answer.json()[site.text("home/a/b/f")]["replacedCount"], 1);
    assert_eq!((site.read("home/a/b/f").as_str(), site.owner("home/a/b/f")), ("one\n2\nthree\n", ALICE));
    alice.call("POST", "/files/permissions", Some(json!({ site.text("home/a/b/f"): { "mode": 600 } }))).ok();
    assert_eq!(site.mode("home/a/b/f"), 0o600);
    alice
        .call(
            "POST",
            "/files/mv",
            Some(json!([{ "src": site.text("home/a/b/f"), "dest": site.text("home/new/g") }])),
        )
        .ok();
    assert_eq!((site.owner("home/new"), site.owner("home/new/g")), (ALICE, ALICE));
    alice.call("POST", "/directories", Some(json!({ site.text("home/d/e"): { "mode": 750 } }))).ok();
    assert_eq!((site.owner("home/d"), site.owner("home/d/e"), site.mode("home/d/e")), (ALICE, ALICE, 0o750));
    let names = |answer: Answer| -> Vec<String> {
        let name = |entry: &Value| entry["path"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
        answer.json().as_array().unwrap().iter().map(name).collect()
    };
    assert_eq!(names(alice.get("/directories/list", "home").ok()), ["a", "d", "large", "new"]);
    assert_eq!(names(alice.get("/files/search", "home").ok()), ["large", "g"]);
    alice.call("DELETE", &format!("/files?path={}", encode(site.path("home/new/g"))), None).ok();
    alice.call("DELETE", &format!("/directories?path={}", encode(site.path("home/a"))), None).ok();
    assert!(!site.path("home/new/g").exists() && !site.path("home/a").exists());
    // The daemon is still who it was.
    site.daemon.call("POST", "/directories", Some(json!({ site.text("by-root"): {} }))).ok();
    assert_eq!(site.owner("by-root"), (0, 0));
}

#[test]
fn what_belongs_to_others_is_denied_and_stays() {
    let Some(site) = site() else { return };
    site.mkdir("private", BOB, 0o700);
    site.write("private/secret", "secret", BOB, 0o644);
    site.mkdir("open", BOB, 0o755);
    site.write("open/shut", "secret", BOB, 0o600);
    site.write("open/plain", "plain", BOB, 0o644);
    site.mkdir("mine", ALICE, 0o700);
    symlink("../private/secret", site.path("mine/link")).unwrap();
    symlink("../open/shut", site.path("mine/shut")).unwrap();
    symlink("../private", site.path("mine/dir")).unwrap();
    symlink("../open/new", site.path("mine/dangling")).unwrap();
    let alice = site.by(ALICE);
    for name in ["private/secret", "open/shut", "mine/link", "mine/shut", "mine/dir/secret"] {
        alice.get("/files/download", name).denied();
        let new = json!({ site.text(name): { "old": "secret", "new": "x" } });
        alice.call("POST", "/files/replace", Some(new)).denied();
        alice.put(name, "overwritten").denied();
        alice.put(name, &"overwritten".repeat(200_000)).denied();
        alice.call("POST", "/files/permissions", Some(json!({ site.text(name): { "mode": 777 } }))).denied();
    }
    for name in ["private/secret", "private/none", "mine/dir/secret"] {
        alice.get("/files/info", name).denied();
        alice.call("DELETE", &format!("/files?path={}", encode(site.path(name))), None).denied();
        let mv = json!([{ "src": site.text(name), "dest": site.text("mine/got") }]);
        alice.call("POST", "/files/mv", Some(mv)).denied();
    }
    // The link itself may be looked at, moved and removed: it is hers.
    assert_eq!(alice.get("/files/info", "mine/link").ok().json()[site.text("mine/link")]["type"], "symlink");
    for name in ["private", "private/x"] {
        alice.get("/directories/list", name).denied();
        alice.get("/files/search", name).denied();
        alice.call("DELETE", &format!("/directories?path={}", encode(site.path(name))), None).denied();
    }
    for name in ["private/new", "open/new", "mine/dir/new", "open/new/below", "mine/dangling"] {
        alice.put(name, "x").denied();
    }
    for name in ["private/new", "open/new", "mine/dir/new"] {
        alice.call("POST", "/directories", Some(json!({ site.text(name): {} }))).denied();
    }
    let mv = json!([{ "src": site.text("open/plain"), "dest": site.text("mine/got") }]);
    alice.call("POST", "/files/mv", Some(mv)).denied();
    site.write("mine/f", "f", ALICE, 0o644);
    let mv = json!([{ "src": site.text("mine/f"), "dest": site.text("open/got") }]);
    alice.call("POST", "/files/mv", Some(mv)).denied();
    alice.put("open/plain", "overwritten").denied();
    assert_eq!(alice.get("/files/download", "open/plain").ok().body, b"plain");
    // Nor may she give anything away.
    for wanted in [json!({ "owner": "0" }), json!({ "group": "0" }), json!({ "owner": "23002" })] {
        alice.call("POST", "/files/permissions", Some(json!({ site.text("mine/f"): wanted }))).denied();
    }
    let upload = json!({ "path": site.text("mine/given"), "owner": "root", "group": "root", "mode": 755 });
    alice.upload(&[Part::Metadata(upload), Part::File(b"x")]).denied();
    assert!(!site.path("mine/given").exists());

    assert_eq!((site.read("private/secret"), site.read("open/shut")), ("secret".into(), "secret".into()));
    assert_eq!((site.mode("private/secret"), site.mode("open/shut")), (0o644, 0o600));
    assert_eq!((std::fs::read_dir(site.path("open")).unwrap().count(), site.owner("mine/f")), (2, ALICE));
    assert_eq!(std::fs::read_dir(site.path("private")).unwrap().count(), 1);
}

#[test]
fn sticky_directories_and_hard_links_are_no_way_around() {
    let Some(site) = site() else { return };
    site.mkdir("tmp", (0, 0), 0o1777);
    site.write("tmp/bob", "bob", BOB, 0o644);
    site.write("tmp/for-all", "for all", BOB, 0o666);
    site.mkdir("tmp/dir", BOB, 0o777);
    site.write("tmp/dir/f", "f", BOB, 0o644);
    let alice = site.by(ALICE);
    alice.call("DELETE", &format!("/files?path={}", encode(site.path("tmp/bob"))), None).denied();
    let mv = json!([{ "src": site.text("tmp/bob"), "dest": site.text("tmp/gone") }]);
    alice.call("POST", "/files/mv", Some(mv)).denied();
    alice.put("tmp/bob", "alice").denied();
    alice.call("DELETE", &format!("/directories?path={}", encode(site.path("tmp/dir"))), None).denied();
    alice.put("tmp/alice", "alice").ok();
    assert_eq!((site.read("tmp/bob"), site.owner("tmp/alice")), ("bob".to_owned(), ALICE));
    // Written into, as it may be; it stays its owner's.
    let inode = site.path("tmp/for-all").metadata().unwrap().ino();
    alice.put("tmp/for-all", "alice").ok();
    assert_eq!((site.read("tmp/for-all"), site.owner("tmp/for-all")), ("alice".to_owned(), BOB));
    assert_eq!(site.path("tmp/for-all").metadata().unwrap().ino(), inode);

    // A link to what she may not write, in a directory that is hers: neither the file nor the name changes.
    site.mkdir("mine", ALICE, 0o755);
    std::fs::hard_link(site.path("tmp/bob"), site.path("mine/link")).unwrap();
    alice.put("mine/link", "alice").denied();
    let new = json!({ site.text("mine/link"): { "old": "bob", "new": "alice" } });
    alice.call("POST", "/files/replace", Some(new)).denied();
    alice
        .call("POST", "/files/permissions", Some(json!({ site.text("mine/link"): { "mode": 666 } })))
        .denied();
    assert_eq!(
        (site.read("mine/link"), site.path("mine/link").metadata().unwrap().nlink()),
        ("bob".to_owned(), 2)
    );
    // The name may go, as with `rm`.
    alice.call("DELETE", &format!("/files?path={}", encode(site.path("mine/link"))), None).ok();
    assert_eq!(site.read("tmp/bob"), "bob");
    assert_eq!(std::fs::read_dir(site.path("mine")).unwrap().count(), 0);

    // A trap: what she writes into it would land in her own file.
    let protected = std::fs::read_to_string("/proc/sys/fs/protected_symlinks");
    if protected.is_ok_and(|setting| setting.trim() != "1") {
        eprintln!("not checked: this kernel was told to follow everybody's links (fs.protected_symlinks)");
        return;
    }
    site.write("mine/f", "hers", ALICE, 0o644);
    symlink("../mine/f", site.path("tmp/trap")).unwrap();
    lchown(site.path("tmp/trap"), Some(BOB.0), Some(BOB.1)).unwrap();
    alice.put("tmp/trap", "bob's").denied();
    let new = json!({ site.text("tmp/trap"): { "old": "hers", "new": "bob's" } });
    alice.call("POST", "/files/replace", Some(new)).denied();
    assert_eq!(site.read("mine/f"), "hers");
}

#[test]
fn a_file_may_be_written_where_its_directory_may_not() {
    let Some(site) = site() else { return };
    site.mkdir("etc", (0, 0), 0o755);
    let alice = site.by(ALICE);
    for (content, n) in [("short".to_owned(), 0), ("long".repeat(100_000), 1)] {
        let (own, shared) = (format!("etc/own{n}"), format!("etc/shared{n}"));
        site.write(&own, "a rather long old content", ALICE, 0o640);
        site.write(&shared, "old", (0, ALICE.1), 0o664);
        alice.put(&own, &content).ok();
        alice.put(&shared, &content).ok();
        assert_eq!((site.read(&own), site.owner(&own), site.mode(&own)), (content.clone(), ALICE, 0o640));
        assert_eq!((site.read(&shared), site.owner(&shared)), (content.clone(), (0, ALICE.1)));
        // What she may not set is refused while the content is still there.
        let upload = json!({ "path": site.text(&shared), "mode": 600 });
        alice.upload(&[Part::Metadata(upload), Part::File(b"x")]).denied();
        assert_eq!(site.read(&shared), content);
        let same = json!({ "path": site.text(&shared), "mode": 664 });
        alice.upload(&[Part::Metadata(same), Part::File(b"x")]).ok();
        let new = json!({ site.text(&shared): { "old": "x", "new": "y" } });
        alice.call("POST", "/files/replace", Some(new)).ok();
        assert_eq!((site.read(&shared), site.mode(&shared)), ("y".to_owned(), 0o664));
    }
    alice.put("etc/new", "x").denied();
    assert_eq!(std::fs::read_dir(site.path("etc")).unwrap().count(), 4);
}

#[test]
fn what_cannot_be_read_is_left_out_of_a_search() {
    let Some(site) = site() else { return };
    site.mkdir("tree", ALICE, 0o755);
    site.mkdir("tree/a", BOB, 0o700);
    site.write("tree/a/hidden", "", BOB, 0o644);
    // Names may be read, but nothing about them.
    site.mkdir("tree/b", BOB, 0o744);
    site.write("tree/b/named", "", BOB, 0o644);
    site.mkdir("tree/c", BOB, 0o755);
    site.write("tree/c/found", "", BOB, 0o600);
    let paths = |answer: Answer| -> Vec<String> {
        answer
            .ok()
            .json()
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["path"].as_str().unwrap().to_owned())
            .collect()
    };
    let alice = site.by(ALICE);
    assert_eq!(paths(alice.get("/files/search", "tree")), [site.text("tree/c/found")]);
    let depth = format!("/directories/list?path={}&depth=3", encode(site.path("tree")));
    let expected = ["tree/a", "tree/b", "tree/c", "tree/c/found"].map(|name| site.text(name));
    assert_eq!(paths(alice.call("GET", &depth, None)), expected);
    assert_eq!(paths(site.by(BOB).get("/files/search", "tree")).len(), 3);
}

#[test]
fn nothing_of_the_daemon_can_be_reached() {
    let Some(site) = site() else { return };
    let pid = site.daemon.child.id();
    // A download of root's holds a descriptor of a file whose directory is shut.
    site.mkdir("shut", (0, 0), 0o700);
    site.write("shut/readable", &"x".repeat(8 << 20), (0, 0), 0o644);
    let mut root = site.daemon.connect();
    let head = root.request(
        "GET",
        &format!("/files/download?path={}", encode(site.path("shut/readable"))),
        &[],
        b"",
    );
    assert_eq!(head.status, 200);
    let held: Vec<_> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to == site.path("shut/readable")))
        .collect();
    assert_eq!(held.len(), 1, "the daemon has the file open");
    let number = held[0].file_name().into_string().unwrap();
    let alice = site.by(ALICE);
    for owner in ["self".to_owned(), "thread-self".to_owned(), pid.to_string()] {
        for what in
            [format!("fd/{number}"), "environ".to_owned(), "mem".to_owned(), "root/etc/shadow".to_owned()]
        {
            let path = format!("/files/download?path={}", encode(format!("/proc/{owner}/{what}")));
            let answer = alice.call("GET", &path, None);
            assert_ne!(answer.head.status, 200, "/proc/{owner}/{what}");
        }
    }
    // Of its own it holds little, and nothing of others.
    for entry in
        alice.call("GET", "/directories/list?path=/proc/self/fd", None).ok().json().as_array().unwrap()
    {
        let target = entry["link_target"].as_str().unwrap_or_default();
        assert!(!target.contains("shut"), "{target}");
    }
    for (pid, _) in workers(&site.daemon) {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        assert!(environ.is_empty(), "{}", String::from_utf8_lossy(&environ));
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        for line in [
            "Uid:\t23001\t23001\t23001\t23001",
            "Gid:\t33001\t33001\t33001\t33001",
            "CapPrm:\t0000000000000000",
            "CapEff:\t0000000000000000",
        ] {
            assert!(status.contains(line), "{line}: {status}");
        }
        // Of the user's own processes none may take it over.
        assert_eq!(std::fs::metadata(format!("/proc/{pid}/mem")).unwrap().uid(), 0);
    }
    for path in ["$SECRET_OF_DAEMON/x", "${PATH}"] {
        let query = format!("/files/info?path={}", encode(path));
        alice.call("GET", &query, None).refused(400, "INVALID_REQUEST_BODY");
    }
    assert_eq!(root.body(&head).len(), 8 << 20);
}

#[test]
fn file_capabilities_do_not_move_along() {
    let Some(site) = site() else { return };
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    own(elsewhere.path(), ALICE, 0o755);
    site.mkdir("mine", ALICE, 0o755);
    if elsewhere.path().metadata().unwrap().dev() == site.path("mine").metadata().unwrap().dev() {
        eprintln!("skipped: /dev/shm and /tmp are one file system");
        return;
    }
    let source = elsewhere.path().join("ping");
    // Version 2, effective, CAP_NET_RAW.
    let mut capability = [0_u8; 20];
    (capability[3], capability[0], capability[5]) = (2, 1, 0x20);
    let has_capability = |name: &str| {
        let mut value = [0_u8; 64];
        rustix::fs::getxattr(site.path(name), c"security.capability", &mut value[..]).is_ok()
    };
    let paths = |name: &str| json!([{ "src": source.to_str().unwrap(), "dest": site.text(name) }]);
    let make = || {
        std::fs::write(&source, "program").unwrap();
        own(&source, (0, 0), 0o755);
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&source, c"security.capability", &capability, flags).unwrap();
    };
    make();
    site.daemon.call("POST", "/files/mv", Some(paths("mine/roots"))).ok();
    assert!(has_capability("mine/roots"), "root may");
    make();
    site.by(ALICE).call("POST", "/files/mv", Some(paths("mine/ping"))).ok();
    assert_eq!(site.owner("mine/ping"), ALICE);
    assert!(!has_capability("mine/ping"));
    // A program that acts for its owner does not begin to act for her.
    make();
    std::fs::set_permissions(&source, PermissionsExt::from_mode(0o4755)).unwrap();
    site.by(ALICE).call("POST", "/files/mv", Some(paths("mine/suid"))).ok();
    assert_eq!((site.owner("mine/suid"), site.mode("mine/suid")), (ALICE, 0o755));
}

#[test]
fn paths_start_at_the_identitys_own_places() {
    let Some(site) = site() else { return };
    let alice = site.by(ALICE);
    for (path, key) in [("etc", "directory"), ("~/etc", "directory"), ("$HOME/etc", "directory")] {
        let answer = alice.call("GET", &format!("/files/info?path={}", encode(path)), None).ok();
        assert_eq!(answer.json()[path]["type"], key, "{path}");
    }
    // Root has an account, and a home that others may not enter.
    let root = site.by((0, 0));
    let answer = root.call("GET", "/files/info?path=~", None).ok();
    assert_eq!(answer.json()["~"]["owner"], "root");
    root.put("f", "x").ok();
    site.by((0, ALICE.1)).put("g", "x").ok();
    assert_eq!((site.owner("f"), site.owner("g")), ((0, 0), (0, ALICE.1)));
}

#[test]
fn ids_and_routes_are_checked() {
    let Some(site) = site() else { return };
    for bad in ["4294967295", "99999999999", "-1", "+1", "%201", "0x1", "root", "1.0", "%31", "1%2F2"] {
        for path in [format!("/v1/filesystem/{bad}/1"), format!("/v1/filesystem/1/{bad}")] {
            let message = site
                .daemon
                .call("GET", &format!("{path}/files/info?path=/"), None)
                .refused(400, "INVALID_REQUEST_BODY");
            assert!(message.contains("4294967294"), "{message}");
        }
    }
    site.by((4_294_967_294, 4_294_967_294)).call("GET", "/files/info?path=/", None).ok();
    for (method, rest) in [
        ("GET", "/files"),
        ("GET", "/files/none"),
        ("POST", "/files/info"),
        ("PUT", "/directories"),
        ("GET", "/ping"),
        ("POST", "/command"),
        ("GET", "/v1/filesystem/1/1/files/info?path=/"),
        ("GET", ""),
    ] {
        let answer = site.by(ALICE).call(method, rest, None);
        let plain = site.daemon.call("GET", "/no-such-route", None);
        assert_eq!((answer.head.status, &answer.body), (404, &plain.body), "{method} {rest}");
    }
    site.by(ALICE).call("GET", "/files/search", None).refused(400, "MISSING_QUERY");
    site.by(ALICE).call("GET", "/files/info?path=/nope", None).refused(404, "FILE_NOT_FOUND");

    let guarded = Daemon::with(&["--access-token", "t0ken"], &[]);
    let mut client = guarded.connect();
    let path = "/v1/filesystem/0/0/files/info?path=/";
    let head = client.request("GET", path, &[], b"");
    assert_eq!(head.status, 401);
    client.body(&head);
    assert_eq!(client.request("GET", path, &[("x-execd-access-token", "t0ken")], b"").status, 200);
}

#[test]
fn two_hundred_identities_at_once_do_not_mix() {
    let Some(site) = site() else { return };
    site.mkdir("all", (0, 0), 0o1777);
    let count = 200_u32;
    std::thread::scope(|scope| {
        for n in 0..count {
            let site = &site;
            scope.spawn(move || {
                let who = (40_000 + n, 50_000 + n);
                let me = site.by(who);
                let name = format!("all/{n}");
                me.call("POST", "/directories", Some(json!({ site.text(&name): { "mode": 700 } }))).ok();
                let sizes = [10, 200_000];
                for (round, size) in sizes.into_iter().enumerate() {
                    let file = format!("{name}/{round}");
                    me.put(&file, &n.to_string().repeat(size)).ok();
                    assert_eq!(site.owner(&file), who);
                    // Root in between, through the daemon itself.
                    let root = format!("all/root-{n}-{round}");
                    site.daemon.call("POST", "/directories", Some(json!({ site.text(&root): {} }))).ok();
                    assert_eq!(site.owner(&root), (0, 0));
                }
                assert_eq!(site.owner(&name), who);
                let body = me.get("/files/download", &format!("{name}/0")).ok().body;
                assert_eq!(body, n.to_string().repeat(10).into_bytes());
                let other = format!("all/{}", (n + 1) % count);
                if site.path(&other).join("0").exists() {
                    me.get("/files/download", &format!("{other}/0")).denied();
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..50 {
                // Between the two looks all of these were there.
                let (first, second) = (workers(&site.daemon), workers(&site.daemon));
                let both = first.iter().filter(|(pid, _)| second.iter().any(|(other, _)| other == pid));
                assert!(both.count() <= 32, "{first:?} {second:?}");
                std::thread::sleep(Duration::from_millis(10));
            }
        });
    });
    // None stays.
    eventually("the end of all workers", || workers(&site.daemon).is_empty());
}

#[test]
fn workers_are_used_again_and_replaced_when_they_die() {
    let Some(site) = site() else { return };
    site.mkdir("mine", ALICE, 0o755);
    let alice = site.by(ALICE);
    alice.put("mine/f", "x").ok();
    // Given back once the answer was read, which the client may see a little earlier.
    let mut reused = 0;
    eventually("ten requests without a new process", || {
        let before = workers(&site.daemon);
        alice.get("/files/download", "mine/f").ok();
        let after = workers(&site.daemon);
        reused += usize::from(!after.is_empty() && after.iter().all(|worker| before.contains(worker)));
        reused == 10
    });
    for _ in 0..5 {
        for (pid, _) in workers(&site.daemon) {
            rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid).unwrap(),
                rustix::process::Signal::KILL,
            )
            .unwrap();
        }
        eventually("a reaped worker", || workers(&site.daemon).is_empty());
        alice.get("/files/download", "mine/f").ok();
    }
    eventually("the end of idle workers", || workers(&site.daemon).is_empty());
}

#[test]
fn clients_that_leave_take_their_worker_along() {
    let Some(site) = site() else { return };
    site.mkdir("mine", ALICE, 0o755);
    site.write("mine/large", &"x".repeat(32 << 20), ALICE, 0o600);
    let alice = site.by(ALICE);
    alice.get("/files/info", "mine/large").ok();
    eventually("an idle daemon", || workers(&site.daemon).is_empty());
    let before = site.daemon.descriptors();
    let prefix = format!("/v1/filesystem/{}/{}", ALICE.0, ALICE.1);
    // More than there are places: the others would wait for ever if these stayed.
    for _ in 0..40 {
        let mut client = site.daemon.connect();
        let head = client.request(
            "GET",
            &format!("{prefix}/files/download?path={}", encode(site.path("mine/large"))),
            &[],
            b"",
        );
        assert_eq!(head.status, 200);
    }
    // Half an upload.
    for _ in 0..40 {
        let mut body = form(&[metadata(site.path("mine/half")), Part::File(&[b'x'; 300_000])]);
        let length = body.len();
        body.truncate(200_000);
        let mut stream = std::os::unix::net::UnixStream::connect(site.daemon.socket()).unwrap();
        use std::io::Write as _;
        write!(stream, "POST {prefix}/files/upload HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=xYz\r\ncontent-length: {length}\r\n\r\n").unwrap();
        stream.write_all(&body).unwrap();
    }
    alice.put("mine/after", "x").ok();
    eventually("the end of all workers", || workers(&site.daemon).is_empty());
    eventually("closed descriptors", || site.daemon.descriptors() <= before);
    let mut names: Vec<_> =
        std::fs::read_dir(site.path("mine")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["after", "large"]);
}

/// A daemon started by these words, which end in executing `"$@"`.
fn daemon_by(program: &str, before: &[&str], dir: tempfile::TempDir, binary: &Path) -> Daemon {
    let child = Command::new(program)
        .args(before)
        .arg(binary)
        .arg("--socket")
        .arg(dir.path().join("socket"))
        .env("EXECD_LOG_FILE", dir.path().join("log"))
        .current_dir("/")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    Daemon { child, dir }
}

#[test]
fn the_accounts_other_groups_count() {
    let Some(_) = site() else { return };
    let dir = tempfile::tempdir().unwrap();
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_execd"));
    let (passwd, group) = (dir.path().join("passwd"), dir.path().join("group"));
    let home = tempfile::tempdir().unwrap();
    own(home.path(), ALICE, 0o755);
    std::fs::write(
        &passwd,
        format!("root:x:0:0::/root:\nalice:x:{}:{}::{}:\n", ALICE.0, ALICE.1, home.path().display()),
    )
    .unwrap();
    std::fs::write(
        &group,
        format!("root:x:0:\nalice:x:{}:\nstaff:x:33050:bob,alice\nvideo:x:33044:bob\n", ALICE.1),
    )
    .unwrap();
    let script = format!(
        "mount --bind {} /etc/passwd && mount --bind {} /etc/group && exec \"$@\"",
        passwd.display(),
        group.display()
    );
    let daemon = daemon_by("unshare", &["-m", "sh", "-c", &script, "sh"], dir, &binary);
    eventually("the socket", || std::os::unix::net::UnixStream::connect(daemon.socket()).is_ok());
    let site = site_of(daemon);
    site.write("staff", "staff", (0, 33_050), 0o640);
    site.write("video", "video", (0, 33_044), 0o640);
    site.write("own", "own", (0, ALICE.1), 0o640);
    let alice = site.by(ALICE);
    assert_eq!(alice.get("/files/download", "staff").ok().body, b"staff");
    assert_eq!(alice.get("/files/download", "own").ok().body, b"own");
    alice.get("/files/download", "video").denied();
    // The group in the path stands in for her own; the others stay.
    let other = site.by((ALICE.0, 33_044));
    assert_eq!(other.get("/files/download", "video").ok().body, b"video");
    assert_eq!(other.get("/files/download", "staff").ok().body, b"staff");
    other.get("/files/download", "own").denied();
    let upload = json!({ "path": "~/f", "group": "staff" });
    alice.upload(&[Part::Metadata(upload), Part::File(b"x")]).ok();
    let made = home.path().join("f").metadata().unwrap();
    assert_eq!((made.uid(), made.gid()), (ALICE.0, 33_050));
    assert_eq!(alice.call("GET", "/files/info?path=~/f", None).ok().json()["~/f"]["owner"], "alice");
    // A change of the accounts holds from the next request on.
    let mut text = std::fs::read_to_string(&group).unwrap();
    text = text.replace("bob,alice", "bob");
    std::fs::write(&group, text).unwrap();
    alice.get("/files/download", "staff").denied();
}

#[test]
fn ids_outside_of_the_user_namespace_are_unavailable() {
    let Some(_) = site() else { return };
    let dir = tempfile::tempdir().unwrap();
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_execd"));
    let (entered, mapped) = (dir.path().join("entered"), dir.path().join("mapped"));
    let script = format!(
        ": > {}; until [ -e {} ]; do sleep 0.01; done; exec \"$@\"",
        entered.display(),
        mapped.display()
    );
    own(dir.path(), (0, 0), 0o777);
    let daemon = daemon_by("unshare", &["-U", "sh", "-c", &script, "sh"], dir, &binary);
    eventually("the namespace", || entered.exists());
    for map in ["uid_map", "gid_map"] {
        std::fs::write(format!("/proc/{}/{map}", daemon.child.id()), "0 0 65536\n").unwrap();
    }
    std::fs::write(&mapped, "").unwrap();
    eventually("the socket", || std::os::unix::net::UnixStream::connect(daemon.socket()).is_ok());
    let site = site_of(daemon);
    site.mkdir("mine", ALICE, 0o755);
    site.by(ALICE).put("mine/f", "x").ok();
    assert_eq!(site.owner("mine/f"), ALICE);
    for who in [(65_536, 0), (0, 70_000), (4_294_967_294, 4_294_967_294)] {
        let message = site
            .by(who)
            .call("GET", "/files/info?path=/", None)
            .refused(503, "FILESYSTEM_IDENTITY_UNAVAILABLE");
        assert!(message.contains("0 to 65535"), "{message}");
    }
    site.by((65_535, 65_535)).call("GET", "/files/info?path=/", None).ok();
}

#[test]
fn a_daemon_that_is_not_root_serves_itself_only() {
    let Some(_) = site() else { return };
    let dir = tempfile::tempdir().unwrap();
    own(dir.path(), ALICE, 0o755);
    let binary = dir.path().join("execd");
    std::fs::copy(env!("CARGO_BIN_EXE_execd"), &binary).unwrap();
    own(&binary, (0, 0), 0o755);
    let (uid, gid) = (format!("--reuid={}", ALICE.0), format!("--regid={}", ALICE.1));
    let daemon = daemon_by("setpriv", &[&uid, &gid, "--clear-groups"], dir, &binary);
    eventually("the socket", || std::os::unix::net::UnixStream::connect(daemon.socket()).is_ok());
    let site = site_of(daemon);
    site.mkdir("mine", ALICE, 0o700);
    site.by(ALICE).put("mine/f", "x").ok();
    assert_eq!(site.owner("mine/f"), ALICE);
    for who in [BOB, (0, 0), (ALICE.0, 0)] {
        let message = site
            .by(who)
            .call("GET", "/files/info?path=/", None)
            .refused(503, "FILESYSTEM_IDENTITY_UNAVAILABLE");
        assert!(message.contains("23001") && message.contains("root"), "{message}");
    }
}

#[test]
fn a_request_costs_milliseconds() {
    let Some(site) = site() else { return };
    site.mkdir("mine", ALICE, 0o755);
    // Another identity each time: nothing is used again. The machine may have other things to do meanwhile.
    let times = (0..20).map(|n| {
        let begun = Instant::now();
        site.by((60_000 + n, 1)).get("/files/info", "mine").ok();
        begun.elapsed()
    });
    let least = times.min().unwrap();
    eprintln!("an identity's first request: {least:?}");
    assert!(least < Duration::from_millis(100), "{least:?}");
}
