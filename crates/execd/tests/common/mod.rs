//! A daemon of its own for each test, and a small blocking HTTP client that shows the bytes as they come.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A running `execd` on a socket in a directory that goes with it.
pub struct Daemon {
    pub child: Child,
    pub dir: tempfile::TempDir,
}

/// Runs a shell command over a connection of its own.
pub fn run_on(client: Client, body: Value) -> Run {
    let mut stream = open_on(client, body);
    let mut run = Run::default();
    while let Some((at, event)) = stream.next_event() {
        run.times.push(at);
        run.events.push(event);
    }
    run
}

/// Posts a command and gives the open stream.
pub fn open_on(client: Client, body: Value) -> Stream {
    open_at(client, "/command", body)
}

/// Posts a command to this path and gives the open stream.
pub fn open_at(mut client: Client, path: &str, body: Value) -> Stream {
    let head = client.request("POST", path, &[], body.to_string().as_bytes());
    assert_eq!(head.status, 200, "{}", String::from_utf8_lossy(&client.body(&head)));
    assert_eq!(head.header("content-type"), Some("text/event-stream"));
    assert_eq!(head.header("cache-control"), Some("no-cache"));
    assert_eq!(head.header("x-accel-buffering"), Some("no"));
    Stream { client, pending: Vec::new(), ended: false }
}

impl Daemon {
    pub fn start() -> Self {
        Self::with(&[], &[])
    }

    pub fn with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_execd"));
        command.args(args).envs(env.iter().copied());
        Self::launch(command)
    }

    /// One that has nothing from who runs the tests.
    pub fn in_clean_environment() -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_execd"));
        command.env_clear().envs([("PATH", "/usr/bin:/bin"), ("LANG", "C.UTF-8")]);
        Self::launch(command)
    }

    fn launch(mut command: Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let child = command
            .arg("--socket")
            .arg(dir.path().join("socket"))
            .env("EXECD_LOG_FILE", dir.path().join("log"))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let daemon = Self { child, dir };
        eventually("the socket", || UnixStream::connect(daemon.socket()).is_ok());
        daemon
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub fn connect(&self) -> Client {
        Client::connect(self.socket())
    }

    /// Something a shell command waits for until the test says so.
    pub fn gate(&self, name: &str) -> Gate {
        Gate { file: self.dir.path().join(name) }
    }

    /// Runs a shell command to its end.
    pub fn run(&self, command: &str) -> Run {
        self.post(json!({ "command": command }))
    }

    /// Posts a command and reads its stream to the end.
    pub fn post(&self, body: Value) -> Run {
        run_on(self.connect(), body)
    }

    /// Posts a command and gives the open stream.
    pub fn stream(&self, body: Value) -> Stream {
        open_on(self.connect(), body)
    }

    /// A request with an empty or JSON body, and its whole answer.
    pub fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let mut client = self.connect();
        let head = client.request(method, path, &[], body.as_bytes());
        let body = client.body(&head);
        Answer { head, body }
    }

    pub fn status(&self, id: &str) -> Value {
        let answer = self.call("GET", &format!("/command/status/{id}"), None);
        assert_eq!(answer.head.status, 200);
        answer.json()
    }

    pub fn wait_ended(&self, id: &str) -> Value {
        eventually("the command's end", || self.status(id)["running"] == false);
        self.status(id)
    }

    /// Open descriptors of the daemon.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    pub fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Holds a program up until the test has seen what comes before.
pub struct Gate {
    file: PathBuf,
}

impl Gate {
    /// Words of a shell that wait.
    pub fn wait(&self) -> String {
        format!("until [ -e {} ]; do sleep 0.02; done", self.file.display())
    }

    pub fn open(&self) {
        std::fs::write(&self.file, "").unwrap();
    }
}

/// Waits for a level, not for an edge.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "never came: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a process runs whose command line holds these words.
pub fn is_alive(words: &str) -> bool {
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { return false };
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        line.contains(words) && !line.contains("sh -c")
    })
}

pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

pub struct Answer {
    pub head: Head,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

pub struct Client {
    pub reader: BufReader<UnixStream>,
}

impl Client {
    pub fn connect(path: PathBuf) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Self { reader: BufReader::with_capacity(256 << 10, stream) }
    }

    pub fn request(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Head {
        let mut text = format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str("\r\n");
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(body);
        self.reader.get_mut().write_all(&bytes).unwrap();
        self.head()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn head(&mut self) -> Head {
        let status = self.line();
        let status =
            status.split(' ').nth(1).unwrap_or_else(|| panic!("no head: {status:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Head { status, headers }
    }

    pub fn body(&mut self, head: &Head) -> Vec<u8> {
        let mut body = Vec::new();
        if let Some(length) = head.header("content-length") {
            body.resize(length.parse().unwrap(), 0);
            self.reader.read_exact(&mut body).unwrap();
        } else {
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        }
        body
    }

    /// The next chunk of a chunked body.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_str_radix(&self.line(), 16).expect("a chunk's length");
        let mut chunk = vec![0; length];
        self.reader.read_exact(&mut chunk).unwrap();
        assert_eq!(self.line(), "");
        (length > 0).then_some(chunk)
    }
}

/// An event stream that is being read.
pub struct Stream {
    pub client: Client,
    pending: Vec<u8>,
    ended: bool,
}

impl Stream {
    /// The next event and when it came.
    pub fn next_event(&mut self) -> Option<(Instant, Value)> {
        loop {
            if let Some(end) = self.pending.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.pending.drain(..end + 2).collect();
                return Some((Instant::now(), serde_json::from_slice(&event[..end]).unwrap()));
            }
            if self.ended {
                assert!(self.pending.is_empty(), "a stream ends with an event");
                return None;
            }
            match self.client.chunk() {
                Some(chunk) => self.pending.extend(chunk),
                None => self.ended = true,
            }
        }
    }

    /// Reads the first event, which must be `init`, and gives the id.
    pub fn id(&mut self) -> String {
        let (_, event) = self.next_event().unwrap();
        assert_eq!(event["type"], "init");
        let id = event["text"].as_str().unwrap().to_owned();
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        id
    }

    /// Reads events until one of this type comes.
    pub fn until(&mut self, kind: &str) -> Value {
        loop {
            let (_, event) = self.next_event().unwrap_or_else(|| panic!("the stream ended before {kind}"));
            if event["type"] == kind {
                return event;
            }
        }
    }

    /// Reads to the end.
    pub fn rest(&mut self) -> Vec<Value> {
        std::iter::from_fn(|| self.next_event()).map(|(_, event)| event).collect()
    }
}

/// A whole stream.
#[derive(Default, Debug)]
pub struct Run {
    pub events: Vec<Value>,
    pub times: Vec<Instant>,
}

impl Run {
    /// Texts of one kind of event.
    pub fn texts(&self, kind: &str) -> Vec<&str> {
        let events = self.events.iter().filter(|event| event["type"] == kind);
        events.map(|event| event["text"].as_str().unwrap()).collect()
    }

    pub fn stdout(&self) -> String {
        self.texts("stdout").concat()
    }

    pub fn stderr(&self) -> String {
        self.texts("stderr").concat()
    }

    pub fn id(&self) -> &str {
        self.texts("init")[0]
    }

    pub fn last(&self) -> &Value {
        self.events.last().unwrap()
    }

    /// The exit code as clients compute it.
    pub fn exit_code(&self) -> i32 {
        let last = self.last();
        match last["type"].as_str().unwrap() {
            "execution_complete" => 0,
            "error" => last["error"]["evalue"].as_str().unwrap().parse().unwrap(),
            other => panic!("the last event is {other}"),
        }
    }

    /// Checks what holds for every stream.
    pub fn check(&self) -> &Self {
        assert_eq!(self.events[0]["type"], "init");
        assert_eq!(self.events[1]["type"], "ping");
        let terminal = |event: &&Value| event["type"] == "execution_complete" || event["type"] == "error";
        assert_eq!(self.events.iter().filter(terminal).count(), 1, "one terminal event");
        assert!(terminal(&self.last()), "the terminal event is last");
        assert!(self.events.iter().all(|event| event["timestamp"].is_i64()));
        assert_eq!(self.texts("init").len(), 1);
        self
    }
}
