//! The client commands against a real server with real sandboxes. Needs root and a daemon (built in, or beside the
//! program); says so where one is missing.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, missing_docs)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A server of the test's own; its sandboxes and all it keeps go with it.
struct Server {
    child: Child,
    home: tempfile::TempDir,
    port: u16,
}

#[derive(Debug)]
struct Done {
    code: i32,
    out: String,
    err: String,
}

impl Server {
    fn start() -> Option<Self> {
        use std::os::unix::fs::MetadataExt as _;
        if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
            eprintln!("skipped: sandboxes need root");
            return None;
        }
        let home = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let check = command(home.path(), port).args(["server", "--check"]).output().unwrap();
        if String::from_utf8_lossy(&check.stdout).contains("no sandbox daemon") {
            eprintln!(
                "skipped: this build has no sandbox daemon; `cargo build -p osb-execd` makes one beside it"
            );
            return None;
        }
        let log = home.path().join("log");
        let out = std::fs::File::create(&log).unwrap();
        let child = command(home.path(), port).arg("server").stdout(out).spawn().unwrap();
        let server = Self { child, home, port };
        wait_for(&log, "serving");
        Some(server)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = command(self.home.path(), self.port);
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn osb(&self, args: &[&str]) -> Done {
        let output = self.command(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Done { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }

    fn json(&self, args: &[&str]) -> Value {
        // Behind the command's name: what follows a payload is the payload's.
        let (name, rest) = args.split_at(args.len().min(2));
        let done = self.osb(&[name, &["-o", "json"], rest].concat());
        assert_eq!(done.code, 0, "{args:?}: {done:?}");
        serde_json::from_str(&done.out).unwrap()
    }

    /// A sandbox of this image.
    fn sandbox(&self) -> String {
        let made = self.json(&["sandbox", "create", "-i", "host", "-t", "5m"]);
        made["id"].as_str().unwrap().to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        end(&mut self.child);
        let purged = command(self.home.path(), self.port).args(["server", "--purge"]).output();
        if !std::thread::panicking() {
            assert!(purged.unwrap().status.success(), "purge");
        }
    }
}

fn command(home: &Path, port: u16) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_osb"));
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", home)
        .env("OPENSANDBOX_EMBEDDED_DATA_DIR", home.join("data"))
        .env("OPENSANDBOX_EMBEDDED_READY_SLOTS", "2")
        .env("OPENSANDBOX_SERVER_PORT", port.to_string())
        .env("OPEN_SANDBOX_DOMAIN", format!("127.0.0.1:{port}"))
        .stdin(Stdio::null());
    command
}

/// Ends a program as a person does, and waits for it.
fn end(child: &mut Child) -> i32 {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap();
        }
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("{pid} does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until a file holds this text.
fn wait_for(path: &Path, text: &str) -> String {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let now = std::fs::read_to_string(path).unwrap_or_default();
        if now.contains(text) {
            return now;
        }
        assert!(Instant::now() < until, "{text:?} does not come: {now:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn tree(dir: &Path) -> PathBuf {
    let root = dir.join("src");
    std::fs::create_dir_all(root.join("sub/empty")).unwrap();
    std::fs::write(root.join("a"), "one").unwrap();
    std::fs::write(root.join("sub/b c"), [0, 255, 10, 13]).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.join("link")).unwrap();
    std::fs::set_permissions(root.join("a"), std::os::unix::fs::PermissionsExt::from_mode(0o750)).unwrap();
    root
}

/// One server for all: each start makes and removes networks.
#[test]
fn the_client_commands_work_on_real_sandboxes() {
    let Some(server) = Server::start() else { return };
    programs(&server);
    files(&server);
    small_images(&server);
    watching(&server);
    ports(&server);
    mistakes(&server);
    let left = server.json(&["sandbox", "list"]);
    for item in left["items"].as_array().unwrap() {
        assert_eq!(server.osb(&["sandbox", "kill", item["id"].as_str().unwrap()]).code, 0);
    }
}

fn programs(server: &Server) {
    let done = server.osb(&["run", "host", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!((done.code, done.out.as_str(), done.err.as_str()), (7, "out\n", "err\n"));
    assert_eq!(server.osb(&["run", "host", "/no/such/program"]).code, 127);
    assert_eq!(server.osb(&["run", "host", "--", "sh", "-c", "kill -9 $$"]).code, 137);

    let mut child =
        server.command(&["run", "-i", "host", "--", "sort"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"b\na\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"a\nb\n"[..]));
    assert!(server.json(&["sandbox", "list"])["items"].as_array().unwrap().is_empty(), "nothing is left");

    let id = server.sandbox();
    let done = server.osb(&["command", "run", &id, "cd", "/tmp"]);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    assert_eq!(server.osb(&["command", "run", &id, "--", "A=1 env | grep ^A="]).out, "A=1\n");
    assert_eq!(server.osb(&["command", "run", &id, "--", "echo", "$HOME", "a  b"]).out, "$HOME a  b\n");
    assert_eq!(server.osb(&["command", "run", &id, "--", "false"]).code, 1);
    let started = server.json(&["command", "run", &id, "-d", "--", "echo one; sleep 0.7; echo two; exit 5"]);
    let execution = started["execution_id"].as_str().unwrap();
    let done = server.osb(&["logs", "-f", &id, execution]);
    assert_eq!((done.code, done.out.as_str()), (5, "one\ntwo\n"), "{done:?}");
    assert_eq!(server.json(&["command", "status", &id, execution])["exit_code"], 5);
    let done = server.osb(&["devops", "summary", &id]);
    assert!(done.out.contains("INSPECT") && done.out.contains(&id), "{done:?}");
}

fn files(server: &Server) {
    let id = server.sandbox();
    let dir = tempfile::tempdir().unwrap();
    let root = tree(dir.path());
    let (local, out) = (root.to_str().unwrap(), dir.path().join("out"));
    let done = server.osb(&["cp", local, &format!("{id}:/tmp/")]);
    assert!(
        done.code == 0 && done.out.contains("2 files") && done.err.contains("left out: link"),
        "{done:?}"
    );
    // A directory that was there before is as it was.
    assert_eq!(server.osb(&["command", "run", &id, "--", "stat -c %a /tmp /tmp/src/a"]).out, "1777\n750\n");
    let done = server.osb(&["cp", &format!("{id}:/tmp/src"), out.to_str().unwrap()]);
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(std::fs::read(out.join("sub/b c")).unwrap(), [0, 255, 10, 13]);
    let mode = std::os::unix::fs::PermissionsExt::mode(&out.join("a").metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o750);
    assert!(out.join("sub/empty").is_dir());
    // Into a directory that exists.
    assert_eq!(server.osb(&["cp", &format!("{id}:/tmp/src/a"), out.to_str().unwrap()]).code, 0);
    assert_eq!(server.osb(&["file", "upload", &id, local, "/w"]).code, 1, "a directory needs -r");
    assert_eq!(server.osb(&["file", "upload", "-r", &id, local, "/w"]).code, 0);
    assert_eq!(server.osb(&["file", "cat", &id, "/w/a"]).out, "one");
    let again = dir.path().join("again");
    assert_eq!(server.osb(&["file", "download", "-r", &id, "/w", again.to_str().unwrap()]).code, 0);
    assert_eq!(std::fs::read_to_string(again.join("a")).unwrap(), "one");
    assert_eq!(server.json(&["file", "info", &id, "/w/a"])[0]["entry_type"], "file");

    let result = dir.path().join("result");
    let (copy_in, copy_out) = (format!("{local}:/work"), format!("/work/made:{}", result.display()));
    let args = ["run", "host", "--copy-in", &copy_in, "--copy-out", &copy_out, "-w", "/work", "--"];
    let done = server.osb(&[&args[..], &["cat a > made; exit 3"]].concat());
    assert_eq!(done.code, 3, "{done:?}");
    assert_eq!(std::fs::read_to_string(result).unwrap(), "one");
    let args = ["run", "host", "--copy-out", "/nothing:x", "--", "true"];
    let done = server.osb(&args);
    assert!(done.code == 125 && done.err.contains("not copied out: /nothing"), "{done:?}");
}

/// An image with one program: no shell, no `tail`.
fn small_images(server: &Server) {
    let dir = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_osb"));
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("bin")).unwrap();
    std::fs::copy(program, root.join("bin/osb")).unwrap();
    let root = root.to_str().unwrap();
    let done = server.osb(&["image", "load", root, "--name", "tiny:1"]);
    assert_eq!(done.code, 0, "{done:?}");
    let done = server.osb(&["run", "tiny:1", "--", "/bin/osb", "--version"]);
    assert!(done.code == 0 && done.out.starts_with("opensandbox, version "), "{done:?}");
    let done = server.osb(&["run", "tiny:1", "--", "tail"]);
    assert_eq!(done.code, 127, "{done:?}");
    // What a root file system runs by itself is a shell, which this one has not.
    let done = server.osb(&["run", "tiny:1"]);
    assert!(done.code == 127 && done.err.contains("/bin/sh"), "{done:?}");
    // What an image runs by itself.
    let args = ["image", "build", root, "--name", "own:1", "--entrypoint", "/bin/osb", "--cmd", "--version"];
    let done = server.osb(&args);
    assert_eq!(done.code, 0, "{done:?}");
    let done = server.osb(&["run", "own:1"]);
    assert!(done.code == 0 && done.out.starts_with("opensandbox, version "), "{done:?}");
}

fn watching(server: &Server) {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("events");
    let mut events = server
        .command(&["events", "--interval", "50"])
        .stdout(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let id = server.sandbox();
    wait_for(&log, "created");
    assert_eq!(server.osb(&["sandbox", "renew", &id, "-t", "20m"]).code, 0);
    wait_for(&log, "renewed");
    let done = server.osb(&["top"]);
    assert!(done.out.contains(&id) && done.out.contains("MiB"), "{done:?}");
    let top = server.json(&["top"]);
    assert!(
        top.as_array().unwrap().iter().any(|line| line["metrics"]["memory_used_in_mib"].is_number()),
        "{top}"
    );
    let mut watch = server.command(&["sandbox", "metrics", &id, "--watch"]).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        assert!(lines.next().unwrap().unwrap().contains("cores=1 mem="));
    }
    assert_eq!(end(&mut watch), 130);
    assert_eq!(server.osb(&["sandbox", "kill", &id]).code, 0);
    wait_for(&log, "deleted");
    assert_eq!(end(&mut events), 130);

    let script = "for i in 1 2 3; do echo line $i; sleep 0.4; done";
    let args =
        ["sandbox", "create", "-i", "host", "--entrypoint", "sh", "--entrypoint", "-c", "--entrypoint"];
    let id = server.json(&[&args[..], &[script]].concat())["id"].as_str().unwrap().to_owned();
    let done = server.osb(&["logs", "-f", &id]);
    assert_eq!((done.code, done.out.as_str()), (0, "line 1\nline 2\nline 3\n"), "{done:?}");
}

fn ports(server: &Server) {
    let id = server.sandbox();
    let script = "import http.server, socketserver\n\
        class H(http.server.BaseHTTPRequestHandler):\n\
        \x20def do_GET(self):\n\
        \x20 if self.path == '/moved': self.send_response(302); self.send_header('Location', '/there?x=1'); self.end_headers(); return\n\
        \x20 if self.path == '/up':\n\
        \x20  self.send_response(101); self.send_header('Connection', 'Upgrade'); self.send_header('Upgrade', 'echo'); self.end_headers()\n\
        \x20  data = self.rfile.read1(100)\n\
        \x20  while data: self.wfile.write(data.upper()); data = self.rfile.read1(100)\n\
        \x20  return\n\
        \x20 body = (self.path + ' ' + self.headers.get('X-Mine', '')).encode()\n\
        \x20 self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers(); self.wfile.write(body)\n\
        \x20def do_POST(self):\n\
        \x20 body = self.rfile.read(int(self.headers['Content-Length']))\n\
        \x20 self.send_response(201); self.send_header('Content-Length', str(len(body))); self.end_headers(); self.wfile.write(body[::-1])\n\
        http.server.HTTPServer(('127.0.0.1', 8000), H).serve_forever()\n";
    assert_eq!(server.osb(&["file", "write", &id, "/tmp/s.py", "-c", script]).code, 0);
    assert_eq!(server.osb(&["command", "run", &id, "-d", "--", "python3", "/tmp/s.py"]).code, 0);
    let wait = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))' 2>/dev/null; do sleep 0.1; done";
    assert_eq!(server.osb(&["command", "run", &id, "-t", "20s", "--", wait]).code, 0);
    let mut forward = server.command(&["port-forward", &id, "0:8000"]).spawn().unwrap();
    let mut said = String::new();
    let mut stderr = BufReader::new(forward.stderr.take().unwrap());
    stderr.read_line(&mut said).unwrap();
    let address = said.split("http://").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(request.replace('\n', "\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let end_of_head = "Host: x\nConnection: close\n";
    let answer = ask(&format!("GET /a/b?c=%20d HTTP/1.1\nX-Mine: yes\n{end_of_head}\n"));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("/a/b?c=%20d yes"), "{answer}");
    let answer = ask(&format!("GET /moved HTTP/1.1\n{end_of_head}\n"));
    assert!(answer.to_lowercase().contains("location: /there?x=1\r\n"), "{answer}");
    let answer = ask(&format!("POST /p HTTP/1.1\nContent-Length: 3\n{end_of_head}\nabc"));
    assert!(answer.starts_with("HTTP/1.1 201") && answer.ends_with("cba"), "{answer}");
    // What begins as HTTP and goes on as something else.
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(b"GET /up HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n").unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(reader.read_line(&mut head).unwrap(), 0, "{head}");
    }
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    for text in ["one\n", "two\n"] {
        stream.write_all(text.as_bytes()).unwrap();
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, text.to_uppercase());
    }
    assert_eq!(end(&mut forward), 130);
}

fn mistakes(server: &Server) {
    let id = server.json(&["sandbox", "create", "-i", "host", "-m", "name=web"])["id"]
        .as_str()
        .unwrap()
        .to_owned();
    for asked in [&id[..8], "web"] {
        let done = server.osb(&["sandbox", "get", asked]);
        let hint = format!("hint: did you mean {id} (name=web)?\n");
        assert!(done.code == 1 && done.err.ends_with(&hint), "{done:?}");
    }
    for (args, words) in [
        (&["sandbox", "pause", &id][..], "not supported"),
        (&["snapshot", "create", &id], "not supported"),
        (&["sandbox", "create", "-i", "no/such:image"], "no/such"),
        (&["file", "cat", &id, "/nonexistent"], "/nonexistent"),
        (&["cp", "/nonexistent", &format!("{id}:/x")], "/nonexistent: No such file"),
        (&["port-forward", "zzz", "80"], "no such sandbox"),
    ] {
        let done = server.osb(args);
        assert!(done.code == 1 && done.err.contains(words), "{args:?}: {done:?}");
        assert!(done.err.lines().count() <= 2 && !done.err.contains("panicked"), "{done:?}");
    }
}
