//! The daemon where there is little: roots that are empty, read-only or hold nothing but busybox, a user without
//! rights or name, networks of one address family. What can be done is done; what cannot be says why.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;
mod terminals;
mod web;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Answer, Daemon, eventually, open_at};
use serde_json::{Value, json};
use terminals::{attach, running};
use web::files::{Part, form};

const NOBODY: u32 = 65_534;

/// What there is beside the daemon's own file, `/execd`, and `/sock`, where its socket is.
#[derive(Default)]
struct Root {
    busybox: bool,
    /// Shell words that mount more below `$R`.
    mounts: &'static str,
    directories: &'static [&'static str],
    user: u32,
}

/// `None` where roots cannot be made.
fn start(root: &Root) -> Option<Daemon> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("root");
    for name in ["", "sock", "bin"].iter().chain(root.directories) {
        let directory = path.join(name);
        std::fs::create_dir(&directory).unwrap();
        chown(&directory, Some(root.user), Some(root.user)).unwrap();
    }
    std::fs::copy(env!("CARGO_BIN_EXE_execd"), path.join("execd")).unwrap();
    if root.busybox {
        std::fs::copy(busybox(), path.join("bin/busybox")).unwrap();
        for name in ["sh", "cat", "echo", "id", "sleep", "stty", "tr", "head", "seq", "true", "pwd"] {
            symlink("busybox", path.join("bin").join(name)).unwrap();
        }
    }
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    chown(dir.path(), Some(root.user), Some(root.user)).unwrap();
    let script = format!(
        "set -e; R={root}; mount --bind $R $R; mount --bind {dir} $R/sock; {mounts} C=$(command -v chroot); \
         PATH=/bin exec $C --userspec={user}:{user} $R /execd --socket /sock/socket",
        root = path.display(),
        dir = dir.path().display(),
        mounts = root.mounts,
        user = root.user,
    );
    Some(begin(Command::new("unshare").args(["--mount", "sh", "-c", &script]), dir))
}

fn begin(command: &mut Command, dir: tempfile::TempDir) -> Daemon {
    let child = command
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("EXECD_LOG_FILE", "/sock/log")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut daemon = Daemon { child, dir };
    eventually("the socket", || {
        assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon does not start");
        std::os::unix::net::UnixStream::connect(daemon.socket()).is_ok()
    });
    daemon
}

fn busybox() -> PathBuf {
    let found =
        ["/usr/bin/busybox", "/bin/busybox"].into_iter().map(PathBuf::from).find(|path| path.exists());
    found.expect("busybox: scripts/test-deps.sh installs it")
}

fn put(daemon: &Daemon, path: &str, content: &[u8]) -> Answer {
    let parts = [Part::Metadata(json!({ "path": path })), Part::File(content)];
    let headers = [("content-type", "multipart/form-data; boundary=xYz")];
    let mut client = daemon.connect();
    let head = client.request("POST", "/files/upload", &headers, &form(&parts));
    let body = client.body(&head);
    Answer { head, body }
}

#[track_caller]
fn ok(answer: Answer) -> Answer {
    assert_eq!(answer.head.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    answer
}

/// All that is done with files, in a directory that may be written.
fn files(daemon: &Daemon, dir: &str) {
    let path = format!("{dir}/d/f");
    // Small, and larger than what stays in memory.
    for content in [b"one\ntwo\n".to_vec(), vec![b'x'; 3 << 20]] {
        ok(put(daemon, &path, &content));
        let read = ok(daemon.call("GET", &format!("/files/download?path={path}"), None));
        assert!(read.body == content);
    }
    ok(put(daemon, &path, b"one\ntwo\n"));
    let line = ok(daemon.call("GET", &format!("/files/download?path={path}&offset=2&limit=1"), None));
    assert_eq!(line.body, b"two");
    ok(daemon.call("POST", "/files/replace", Some(json!({ &path: { "old": "one", "new": "1" } }))));
    ok(daemon.call("POST", "/files/permissions", Some(json!({ &path: { "mode": 600 } }))));
    let info = ok(daemon.call("GET", &format!("/files/info?path={path}"), None)).json();
    assert_eq!((&info[&path]["mode"], &info[&path]["size"]), (&json!(600), &json!(6)));
    ok(daemon.call("POST", "/directories", Some(json!({ format!("{dir}/e/f"): { "mode": 750 } }))));
    ok(daemon.call("POST", "/files/mv", Some(json!([{ "src": &path, "dest": format!("{dir}/e/f/g") }]))));
    let list = ok(daemon.call("GET", &format!("/directories/list?path={dir}/e&depth=3"), None)).json();
    assert_eq!(list.as_array().unwrap().len(), 2, "{list}");
    let found = ok(daemon.call("GET", &format!("/files/search?path={dir}&pattern=g"), None)).json();
    assert_eq!(found[0]["path"], format!("{dir}/e/f/g"));
    ok(daemon.call("DELETE", &format!("/files?path={dir}/e/f/g"), None));
    for name in ["d", "e"] {
        ok(daemon.call("DELETE", &format!("/directories?path={dir}/{name}"), None));
    }
    assert_eq!(ok(daemon.call("GET", &format!("/directories/list?path={dir}"), None)).json(), json!([]));
}

/// Commands by shell, in every form.
fn commands(daemon: &Daemon) {
    let run = daemon
        .post(json!({ "command": "echo out; echo err >&2; echo \"$0 $A\"; exit 3", "envs": { "A": "a" } }));
    assert_eq!((run.check().stdout().as_str(), run.stderr().as_str()), ("out\nsh a\n", "err\n"));
    assert_eq!(run.exit_code(), 3);
    assert_eq!(daemon.run("cat; echo end").stdout(), "end\n", "input is empty");
    let background = daemon.post(json!({ "command": "echo one; echo two >&2", "background": true }));
    assert_eq!(daemon.wait_ended(background.id())["exit_code"], 0);
    let logs = daemon.call("GET", &format!("/command/{}/logs?cursor=0", background.id()), None);
    assert_eq!(logs.body, b"one\ntwo\n");
    // The whole tree, whether or not there is a list of processes.
    let command = "echo start; (sleep 600; echo late >/sock/late) & sleep 600";
    let run = daemon.post(json!({ "command": command, "timeout": 1000 }));
    assert_eq!((run.check().stdout().as_str(), run.exit_code()), ("start\n", 137), "{run:?}");
    let mut stream = daemon.stream(json!({ "command": "echo up; sleep 600" }));
    let id = stream.id();
    stream.until("stdout");
    ok(daemon.call("DELETE", &format!("/command?id={id}"), None));
    assert_eq!(stream.rest().pop().unwrap()["error"]["evalue"], "143");
}

fn arguments(daemon: &Daemon) {
    let run = daemon.post(json!({ "argv": ["/execd", "--help"] }));
    assert!(run.check().stdout().contains("--socket") && run.exit_code() == 0, "{run:?}");
    let run = daemon.post(json!({ "argv": ["/no/such"] }));
    assert!(run.check().last()["error"]["evalue"].as_str().unwrap().contains("/no/such"));
    // The only program that is there for certain, and that runs on.
    let endless = ["/execd", "--socket", "/sock/other"];
    let run = daemon.post(json!({ "argv": endless, "timeout": 1000 }));
    assert_eq!(run.check().exit_code(), 137);
    let other = daemon.dir.path().join("other");
    assert!(std::os::unix::net::UnixStream::connect(&other).is_err(), "it has ended");
    let background = daemon.post(json!({ "argv": endless, "background": true }));
    eventually("its socket", || std::os::unix::net::UnixStream::connect(&other).is_ok());
    ok(daemon.call("DELETE", &format!("/command?id={}", background.id()), None));
    assert_eq!(daemon.status(background.id())["running"], false);
}

fn sessions(daemon: &Daemon) {
    let made = ok(daemon.call("POST", "/session", Some(json!({ "cwd": "/sock" })))).json();
    let path = format!("/session/{}", made["session_id"].as_str().unwrap());
    let run = |body: Value| open_at(daemon.connect(), &format!("{path}/run"), body).rest();
    let texts = |events: &[Value]| -> String {
        let texts = events.iter().filter(|event| event["type"] == "stdout");
        texts.map(|event| event["text"].as_str().unwrap()).collect()
    };
    assert_eq!(run(json!({ "command": "export A=1; false" })).pop().unwrap()["error"]["evalue"], "1");
    let events = run(json!({ "command": "echo $A; pwd; exit 4" }));
    assert_eq!(
        (texts(&events).as_str(), &events.last().unwrap()["error"]["evalue"]),
        ("1\n/sock\n", &json!("4"))
    );
    let events = run(json!({ "command": "echo up; sleep 600", "timeout": 1000 }));
    assert_eq!(
        (texts(&events).as_str(), &events.last().unwrap()["error"]["evalue"]),
        ("up\n", &json!("137"))
    );
    assert_eq!(texts(&run(json!({ "command": "echo $A" }))), "1\n");
    ok(daemon.call("DELETE", &path, None));
}

fn metrics(daemon: &Daemon) {
    let metrics = ok(daemon.call("GET", "/metrics", None)).json();
    assert!(metrics["mem_total_mib"].as_f64().unwrap() > 1.0, "{metrics}");
    assert!(metrics["mem_used_mib"].as_f64().unwrap() > 1.0, "{metrics}");
    assert!(metrics["cpu_count"].as_u64().unwrap() >= 1, "{metrics}");
}

async fn terminal(daemon: &Daemon) {
    let mut socket =
        attach(daemon, &running(daemon, "stty size; read line; echo \"<$line>\"; exit 7"), "").await;
    socket.until("24 80").await;
    socket.typed("typed\n").await;
    socket.until("<typed>").await;
    assert_eq!(socket.exit().await, 7);
}

/// Why no terminal starts.
async fn no_terminal(daemon: &Daemon) -> String {
    let answer = daemon.call("POST", "/pty", Some(json!({})));
    if answer.head.status != 201 {
        assert!((500..=503).contains(&answer.head.status));
        return answer.json()["message"].as_str().unwrap().to_owned();
    }
    let mut socket = attach(daemon, answer.json()["session_id"].as_str().unwrap(), "").await;
    let error = socket.text("error").await;
    assert_eq!(error["code"], "START_FAILED");
    error["error"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn in_an_empty_root() {
    let Some(daemon) = start(&Root { directories: &["data"], ..Root::default() }) else { return };
    arguments(&daemon);
    files(&daemon, "/data");
    metrics(&daemon);
    let run = daemon.run("echo hello");
    let error = run.check().last()["error"]["evalue"].as_str().unwrap().to_owned();
    assert!(error.contains("\"sh\""), "{error}");
    let answer = daemon.call("POST", "/session", None);
    assert_eq!(answer.head.status, 500);
    assert!(!answer.json()["message"].as_str().unwrap().contains("panic"), "{}", answer.json());
    assert!(no_terminal(&daemon).await.contains("/dev/ptmx"));
    let answer = daemon.call("GET", "/v1/filesystem/1/1/files/info?path=/", None);
    assert_eq!(
        (answer.head.status, &answer.json()["code"]),
        (503, &json!("FILESYSTEM_IDENTITY_UNAVAILABLE"))
    );
    assert!(answer.json()["message"].as_str().unwrap().contains("/proc"));
    // No accounts: numbers are understood, and shown.
    ok(put(&daemon, "/data/f", b"x"));
    ok(daemon.call("POST", "/files/permissions", Some(json!({ "/data/f": { "owner": "1", "group": "2" } }))));
    let info = ok(daemon.call("GET", "/files/info?path=/data/f", None)).json();
    assert_eq!((&info["/data/f"]["owner"], &info["/data/f"]["group"]), (&json!("1"), &json!("2")));
    let named = daemon.call("POST", "/files/permissions", Some(json!({ "/data/f": { "owner": "root" } })));
    assert_eq!(named.head.status, 400);
    let run = daemon.post(json!({ "argv": ["/execd", "--help"], "uid": NOBODY, "gid": NOBODY }));
    assert_eq!(run.check().exit_code(), 0, "an identity without an account");
}

/// Nothing but busybox: neither devices nor processes can be seen.
#[tokio::test]
async fn with_nothing_but_busybox() {
    let Some(daemon) = start(&Root { busybox: true, directories: &["data"], ..Root::default() }) else {
        return;
    };
    arguments(&daemon);
    commands(&daemon);
    files(&daemon, "/data");
    metrics(&daemon);
    let answer = daemon.call("POST", "/session", None);
    assert_eq!(answer.head.status, 500);
    let message = answer.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("/tmp") || message.contains("/dev/null"), "{message}");
    assert!(no_terminal(&daemon).await.contains("/dev/ptmx"));
}

const SYSTEM: &str = "mount -t proc proc $R/proc; mount --rbind /dev $R/dev;";

#[tokio::test]
async fn in_a_root_of_busybox_with_devices() {
    let root = Root { busybox: true, mounts: SYSTEM, directories: &["proc", "dev", "tmp", "data"], user: 0 };
    let Some(daemon) = start(&root) else { return };
    arguments(&daemon);
    commands(&daemon);
    sessions(&daemon);
    files(&daemon, "/data");
    metrics(&daemon);
    terminal(&daemon).await;
    assert_eq!(daemon.run("id -u").stdout(), "0\n");
    ok(daemon.call("GET", "/v1/filesystem/1/1/files/info?path=/", None));
}

#[tokio::test]
async fn as_a_user_without_rights_or_name() {
    let root =
        Root { busybox: true, mounts: SYSTEM, directories: &["proc", "dev", "tmp", "data"], user: NOBODY };
    let Some(daemon) = start(&root) else { return };
    arguments(&daemon);
    commands(&daemon);
    sessions(&daemon);
    files(&daemon, "/data");
    metrics(&daemon);
    terminal(&daemon).await;
    assert_eq!(daemon.run("id -u; id -g").stdout(), "65534\n65534\n");
    // Neither root's files nor root's name.
    let secret = daemon.dir.path().join("root/data/secret");
    std::fs::write(&secret, "secret").unwrap();
    std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
    for answer in [
        daemon.call("GET", "/files/download?path=/data/secret", None),
        daemon.call(
            "POST",
            "/files/replace",
            Some(json!({ "/data/secret": { "old": "secret", "new": "x" } })),
        ),
        daemon.call("POST", "/files/permissions", Some(json!({ "/data/secret": { "mode": 777 } }))),
    ] {
        assert!(answer.head.status >= 400, "{}", answer.head.status);
        let message = answer.json()["message"].as_str().unwrap().to_lowercase();
        assert!(message.contains("permi"), "{message}");
    }
    let run = daemon.post(json!({ "command": "true", "uid": 0 }));
    assert!(run.check().last()["error"]["evalue"].as_str().unwrap().contains("CAP_SETUID"));
    ok(daemon.call("GET", "/v1/filesystem/65534/65534/files/info?path=/", None));
    assert_eq!(daemon.call("GET", "/v1/filesystem/0/0/files/info?path=/", None).head.status, 503);
}

#[tokio::test]
async fn in_a_root_that_cannot_be_written() {
    const READ_ONLY: &str = "mount -t proc proc $R/proc; mount --rbind /dev $R/dev; mount -t tmpfs data $R/data; \
        mount -o remount,bind,ro $R;";
    let root =
        Root { busybox: true, mounts: READ_ONLY, directories: &["proc", "dev", "tmp", "data"], user: 0 };
    let Some(daemon) = start(&root) else { return };
    arguments(&daemon);
    // Output of background commands and sessions finds a place without /tmp.
    commands(&daemon);
    sessions(&daemon);
    files(&daemon, "/data");
    metrics(&daemon);
    terminal(&daemon).await;
    for answer in [
        put(&daemon, "/new", b"x"),
        put(&daemon, "/new/below", b"x"),
        daemon.call("POST", "/directories", Some(json!({ "/new": {} }))),
        daemon.call("POST", "/files/replace", Some(json!({ "/execd": { "old": "ELF", "new": "FLE" } }))),
        daemon.call("POST", "/files/permissions", Some(json!({ "/execd": { "mode": 600 } }))),
        daemon.call("POST", "/files/mv", Some(json!([{ "src": "/execd", "dest": "/data/execd" }]))),
        daemon.call("DELETE", "/files?path=/execd", None),
        daemon.call("DELETE", "/directories?path=/bin", None),
    ] {
        assert_eq!(answer.head.status, 500, "{}", String::from_utf8_lossy(&answer.body));
        let message = answer.json()["message"].as_str().unwrap().to_lowercase();
        assert!(message.contains("read-only"), "{message}");
    }
    assert_eq!(daemon.run("echo x >/new").exit_code(), 1);
    ok(daemon.call("GET", "/files/info?path=/execd", None));
}

/// A daemon on a port of a network of its own, made by these words, and whether it answers at these hosts.
fn answers_at(network: &str, hosts: &[(&str, bool)]) {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let dir = tempfile::tempdir().unwrap();
    let script = format!("set -e; {network} exec {} --port 44772", env!("CARGO_BIN_EXE_execd"));
    let mut child = Command::new("unshare")
        .args(["--net", "sh", "-c", &script])
        .env("EXECD_LOG_FILE", dir.path().join("log"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let net = PathBuf::from(format!("/proc/{}/ns/net", child.id()));
    let answers = |host: &str| within(&net, host);
    let working = hosts.iter().find(|(_, works)| *works).unwrap().0.to_owned();
    eventually("the port", || answers(&working));
    for (host, works) in hosts {
        assert_eq!(answers(host), *works, "{host}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Whether a ping from inside that network is answered.
fn within(net: &Path, host: &str) -> bool {
    let (net, host) = (net.to_owned(), host.to_owned());
    let ping = move || -> std::io::Result<bool> {
        // This thread alone; it ends here.
        let net = std::fs::File::open(net)?;
        rustix::thread::move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&net),
            Some(rustix::thread::LinkNameSpaceType::Network),
        )?;
        let mut stream = TcpStream::connect((host.as_str(), 44772))?;
        stream.write_all(b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text.starts_with("HTTP/1.1 200"))
    };
    std::thread::spawn(ping).join().unwrap().unwrap_or(false)
}

#[test]
fn without_the_sixth_version_of_ip() {
    let off = "for d in all default lo; do echo 1 >/proc/sys/net/ipv6/conf/$d/disable_ipv6; done; ip link set lo up;";
    answers_at(off, &[("127.0.0.1", true), ("localhost", true), ("::1", false)]);
    answers_at("ip link set lo up;", &[("127.0.0.1", true), ("::1", true), ("localhost", true)]);
    answers_at("ip link set lo up; ip addr del 127.0.0.1/8 dev lo;", &[("::1", true), ("127.0.0.1", false)]);
}
