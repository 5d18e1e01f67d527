//! Terminals of sandboxes in a terminal of the test's own, with a real server. Needs root and a daemon (built in, or
//! beside the program); says so where one is missing.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, missing_docs)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    child: Child,
    home: tempfile::TempDir,
    port: u16,
    sandbox: String,
}

fn osb(home: &Path, server: u16, domain: u16) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_osb"));
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", home)
        .env("TERM", "xterm")
        .env("OPENSANDBOX_EMBEDDED_DATA_DIR", home.join("data"))
        .env("OPENSANDBOX_EMBEDDED_READY_SLOTS", "2")
        .env("OPENSANDBOX_SERVER_PORT", server.to_string())
        .env("OPENSANDBOX_SERVER_API_KEY", "secret")
        .env("OPEN_SANDBOX_API_KEY", "secret")
        .env("OPEN_SANDBOX_DOMAIN", format!("127.0.0.1:{domain}"))
        .stdin(Stdio::null());
    command
}

impl Server {
    /// A server and a sandbox.
    fn start() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: sandboxes need root");
            return None;
        }
        let home = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let check = osb(home.path(), port, port).args(["server", "--check"]).output().unwrap();
        if String::from_utf8_lossy(&check.stdout).contains("no sandbox daemon") {
            eprintln!(
                "skipped: this build has no sandbox daemon; `cargo build -p osb-execd` makes one beside it"
            );
            return None;
        }
        let log = File::create(home.path().join("server.log")).unwrap();
        let mut command = osb(home.path(), port, port);
        let child = command.arg("server").stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let mut server = Self { child, home, port, sandbox: String::new() };
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(
                server.child.try_wait().unwrap().is_none() && Instant::now() < until,
                "the server is not up"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let made =
            server.command(&["sandbox", "create", "-i", "host", "-t", "10m", "-o", "json"]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let made: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
        server.sandbox = made["id"].as_str().unwrap().to_owned();
        Some(server)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = osb(self.home.path(), self.port, self.port);
        command.args(args);
        command
    }

    /// `osb shell` in a terminal.
    fn shell(&self, args: &[&str]) -> Screen {
        Screen::start(self.command(&[&["shell", &self.sandbox], args].concat()))
    }

    /// Whether a process in the sandbox has this command line.
    fn alive(&self, words: &str) -> bool {
        let done =
            self.command(&["command", "run", &self.sandbox, "--", "pgrep", "-xf", words]).output().unwrap();
        done.status.success()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = self.command(&["sandbox", "kill", &self.sandbox]).output();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        let _ = self.child.wait();
        let purged = osb(self.home.path(), self.port, self.port).args(["server", "--purge"]).output();
        if !std::thread::panicking() {
            assert!(purged.unwrap().status.success(), "purge");
        }
    }
}

/// A terminal with a program in it, as a person has it before them.
struct Screen {
    child: Child,
    master: File,
    slave: OwnedFd,
    before: Termios,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Screen {
    fn start(mut command: Command) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, flags).unwrap();
        let before = tcgetattr(&slave).unwrap();
        let stdio = || Stdio::from(slave.try_clone().unwrap());
        command.stdin(stdio()).stdout(stdio()).stderr(stdio());
        // SAFETY: two system calls, between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            })
        };
        let master = File::from(master);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let mut screen =
            Self { child: command.spawn().unwrap(), master, slave, before, shown: Arc::clone(&shown) };
        screen.resize(90, 33);
        let mut reader = screen.master.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut piece) {
                shown.lock().unwrap().extend_from_slice(&piece[..length]);
            }
        });
        screen
    }

    fn resize(&mut self, cols: u16, rows: u16) {
        tcsetwinsize(&self.master, Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 })
            .unwrap();
    }

    fn typed(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// Waits until this is shown, and gives all up to there.
    fn until(&mut self, text: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let shown = self.text();
            if let Some(at) = shown.find(text) {
                return shown[..at + text.len()].to_owned();
            }
            assert!(Instant::now() < end, "{text:?} does not come: {shown:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_raw(&self) -> bool {
        let now = tcgetattr(&self.slave).unwrap();
        now.local_modes != self.before.local_modes && now.input_modes != self.before.input_modes
    }

    /// Waits for the program's end; the terminal must be as it was.
    fn exit(&mut self) -> i32 {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "no end: {:?}", self.text());
            std::thread::sleep(Duration::from_millis(5));
        };
        let now = tcgetattr(&self.slave).unwrap();
        assert_eq!(
            (now.local_modes, now.input_modes, now.output_modes, now.control_modes),
            (
                self.before.local_modes,
                self.before.input_modes,
                self.before.output_modes,
                self.before.control_modes
            )
        );
        status.code().unwrap_or_else(|| panic!("{status}"))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes connections on to a port until they are cut.
struct Wire {
    port: u16,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let ends = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&ends);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let far = TcpStream::connect(("127.0.0.1", target)).unwrap();
                kept.lock().unwrap().extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)]
                {
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(std::net::Shutdown::Both);
                    });
                }
            }
        });
        Self { port, ends }
    }

    fn cut(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(std::net::Shutdown::Both);
        }
    }
}

#[test]
fn terminals_of_sandboxes() {
    let Some(server) = Server::start() else { return };
    the_shell_is_that_of_the_sandbox(&server);
    leaving_and_coming_back(&server);
    a_lost_connection_is_made_again(&server);
    signals_restore_the_terminal(&server);
    programs_on_a_terminal(&server);
    what_is_no_terminal(&server);
}

fn the_shell_is_that_of_the_sandbox(server: &Server) {
    let mut screen = server.shell(&[]);
    screen.until("# ");
    assert!(screen.is_raw());
    screen.typed("stty size; tty; [ -t 0 ] && hostname; echo a$((40+2))\r");
    let shown = screen.until("a42");
    assert!(shown.contains("33 90\r\n/dev/pts/"), "{shown:?}");
    screen.resize(120, 40);
    screen.typed("sleep 0.3; stty size\r");
    screen.until("40 120\r\n");
    screen.typed("sleep 700\r");
    let end = Instant::now() + PATIENCE;
    while !server.alive("sleep 700") {
        assert!(Instant::now() < end, "no job");
    }
    screen.typed("\u{3}");
    std::thread::sleep(Duration::from_millis(500));
    screen.typed("echo b$((40+2)); exit 3\r");
    screen.until("b42");
    assert_eq!(screen.exit(), 3);
}

fn leaving_and_coming_back(server: &Server) {
    let mut screen = server.shell(&["-w", "/usr"]);
    screen.typed("pwd; echo a$((40+2)); cat\r");
    screen.until("/usr\r\na42");
    screen.typed("kept\r\u{10}x\u{10}\u{11}");
    assert_eq!(screen.exit(), 0);
    let shown = screen.until("--session ");
    std::thread::sleep(Duration::from_millis(100));
    let id = screen.text()[shown.len()..].lines().next().unwrap().to_owned();

    let mut first = server.shell(&["--session", &id]);
    first.until("kept\r\n");
    // Somebody else wants it too.
    let mut second = server.shell(&["--session", &id]);
    second.until("--takeover takes it");
    assert_eq!(second.exit(), 125);
    let mut second = server.shell(&["--session", &id, "--takeover", "--detach-keys", "ctrl-],q"]);
    first.until("taken this terminal over");
    assert_eq!(first.exit(), 125);
    second.until("kept\r\n");
    second.typed("\u{1d}q");
    assert_eq!(second.exit(), 0);
    let mut third = server.shell(&["--session", &id]);
    third.until("kept");
    third.typed("\u{3}");
    // A shell that comes back from a job takes its time before it reads.
    std::thread::sleep(Duration::from_millis(500));
    third.typed("exit 5\r");
    assert_eq!(third.exit(), 5);
    let mut gone = server.shell(&["--session", &id]);
    gone.until("there is no such terminal");
    assert_eq!(gone.exit(), 125);
}

fn a_lost_connection_is_made_again(server: &Server) {
    let wire = Wire::to(server.port);
    let mut command = osb(server.home.path(), server.port, wire.port);
    command.args(["shell", &server.sandbox, "--"]);
    command.arg("for i in $(seq 400); do echo line $i of 400; sleep 0.01; done; read end; sleep 1; exit 6");
    let mut screen = Screen::start(command);
    for number in [50, 150, 250] {
        screen.until(&format!("line {number} of"));
        wire.cut();
    }
    let shown = screen.until("line 400 of 400\r\n");
    assert!(shown.contains("connection lost"), "{shown:?}");
    let lines: Vec<&str> = shown.lines().filter(|line| line.ends_with("of 400")).collect();
    let numbers: Vec<&str> = lines.iter().map(|line| line.split(' ').nth(1).unwrap()).collect();
    let expected: Vec<String> = (1..=400).map(|number| number.to_string()).collect();
    // The note may have come in the middle of one line.
    assert!(numbers.len() >= 397 && numbers.iter().all(|n| expected.iter().any(|e| e == n)), "{numbers:?}");
    // The program ends while nobody is connected.
    screen.typed("\r");
    std::thread::sleep(Duration::from_millis(500));
    wire.cut();
    assert_eq!(screen.exit(), 6);
}

fn signals_restore_the_terminal(server: &Server) {
    for (signal, code) in [("-TERM", 143), ("-HUP", 129)] {
        let mut screen = server.shell(&["--", "vi -u NONE; sleep 701"]);
        screen.until("\u{1b}[?1049h");
        assert!(screen.is_raw());
        let pid = screen.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
        assert_eq!(screen.exit(), code);
    }
    assert!(!server.alive("vi -u NONE"), "what nobody can come back to is ended");
}

fn programs_on_a_terminal(server: &Server) {
    let script = "stty size; tty; read x; echo \"<$x>\"; exit 4";
    let mut screen =
        Screen::start(server.command(&["run", "-it", "host", "-w", "/usr", "--", "sh", "-c", script]));
    screen.until("33 90\r\n/dev/pts/");
    screen.typed("a \"b\" 'c'\r");
    screen.until("<a \"b\" 'c'>");
    assert_eq!(screen.exit(), 4);
    let left = server.command(&["sandbox", "list", "-o", "json"]).output().unwrap();
    let left: serde_json::Value = serde_json::from_slice(&left.stdout).unwrap();
    assert_eq!(left["items"].as_array().unwrap().len(), 1, "{left}");
}

fn what_is_no_terminal(server: &Server) {
    let cases: [(&[&str], &str); 3] = [
        (&["shell", "x"], "needs a terminal"),
        (&["run", "-it", "host", "--", "sh"], "needs a terminal"),
        (&["run", "-i", "-t", "host"], "needs a terminal"),
    ];
    for (args, words) in cases {
        let done = server.command(args).output().unwrap();
        assert_eq!(done.status.code(), Some(125));
        assert!(String::from_utf8_lossy(&done.stderr).contains(words), "{args:?}");
    }
    let mut screen = Screen::start(server.command(&["run", "-it", "host", "--user", "1", "--", "sh"]));
    screen.until("--user goes with -t");
    assert_eq!(screen.exit(), 125);
}
