//! As PID 1 of a PID namespace with a boot document, the way the engine starts it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::fs::File;
use std::io::{IoSlice, Seek as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use common::{Client, Run, eventually, open_on, run_on};
use osb_protocol::boot::{Boot, BootFds, Ended, LineEndings, Order, Started, UsageFds};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::json;

struct Sandbox {
    /// `unshare`, which leaves with the status of init.
    child: Child,
    dir: tempfile::TempDir,
    started: Started,
}

/// Runs `test` only where PID namespaces can be made.
fn as_root(test: impl FnOnce()) {
    if rustix::process::geteuid().is_root() { test() } else { eprintln!("skipped: needs root") }
}

fn boot(entrypoint: &[&str]) -> Sandbox {
    boot_with(entrypoint, |_| {})
}

fn order(entrypoint: &[&str]) -> Order {
    Order {
        sandbox_id: "00000000-0000-4000-8000-000000000000".to_owned(),
        entrypoint: entrypoint.iter().map(|&arg| arg.to_owned()).collect(),
        env: vec![
            ("PATH".to_owned(), "/usr/bin:/bin".to_owned()),
            ("EXECD_ACCESS_TOKEN".to_owned(), "s3cret".to_owned()),
            ("JUPYTER_TOKEN".to_owned(), "notebook".to_owned()),
        ],
        cwd: None,
        volumes: Vec::new(),
        user: None,
        line_endings: LineEndings::Keep,
        access_token: None,
        lifecycle: None,
        memory_limit_bytes: None,
        cpu_limit_millis: None,
    }
}

fn boot_with(entrypoint: &[&str], change: impl FnOnce(&mut Order)) -> Sandbox {
    let mut order = order(entrypoint);
    change(&mut order);
    standby().order(&order)
}

/// A sandbox that has no order yet.
struct Standby {
    child: Child,
    dir: tempfile::TempDir,
    orders: OwnedFd,
}

fn standby() -> Standby {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let listener = UnixListener::bind(path("socket")).unwrap();
    let (orders, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let ended = File::create(path("ended")).unwrap();
    let log = File::create_new(path("log")).unwrap();
    let cgroup = File::create(path("cgroup")).unwrap();
    std::fs::write(path("oom"), "low 0\noom_kill 2\n").unwrap();
    let oom = File::open(path("oom")).unwrap();
    let boot = Boot {
        listen_tcp: false,
        may_build: false,
        fds: BootFds {
            listen: listener.as_raw_fd(),
            orders: theirs.as_raw_fd(),
            ended: ended.as_raw_fd(),
            log: log.as_raw_fd(),
            work_cgroup: vec![cgroup.as_raw_fd()],
            uppers: None,
            usage: UsageFds { oom_events: Some(oom.as_raw_fd()), ..UsageFds::default() },
        },
    };
    let document = document(&boot);
    let inherited: Vec<OwnedFd> =
        vec![listener.into(), theirs, ended.into(), log.into(), cgroup.into(), oom.into()];
    let numbers: Vec<i32> = inherited.iter().map(AsRawFd::as_raw_fd).chain([document.as_raw_fd()]).collect();
    let mut command = Command::new("unshare");
    command
        .args(["--fork", "--pid", "--mount-proc", "--kill-child", env!("CARGO_BIN_EXE_execd"), "--boot-fd"])
        .arg(document.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    // SAFETY: only `fcntl` is called in the child, on descriptors that live until after the spawn.
    unsafe {
        command.pre_exec(move || {
            for &number in &numbers {
                libc::fcntl(number, libc::F_SETFD, 0);
            }
            Ok(())
        });
    }
    let child = command.spawn().unwrap();
    drop(inherited);
    Standby { child, dir, orders }
}

fn document(content: &impl serde::Serialize) -> File {
    let mut document = tempfile::tempfile().unwrap();
    document.write_all(&serde_json::to_vec(content).unwrap()).unwrap();
    document
}

impl Standby {
    fn rehearse(&self) {
        sendmsg(
            &self.orders,
            &[IoSlice::new(&[0])],
            &mut SendAncillaryBuffer::default(),
            SendFlags::NOSIGNAL,
        )
        .unwrap();
    }

    fn order(self, order: &Order) -> Sandbox {
        let Self { child, dir, orders } = self;
        let document = document(order);
        let fds = [document.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&orders, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).unwrap();
        let mut text = [0; 4096];
        let (len, _) = rustix::net::recv(&orders, &mut text[..], RecvFlags::empty()).unwrap();
        let started = serde_json::from_slice(&text[..len]).unwrap();
        assert_eq!(
            rustix::net::recv(&orders, &mut text[..], RecvFlags::empty()).unwrap().0,
            0,
            "it hangs up"
        );
        Sandbox { child, dir, started }
    }
}

impl Sandbox {
    fn connect(&self) -> Client {
        Client::connect(self.dir.path().join("socket"))
    }

    fn run(&self, command: &str) -> Run {
        run_on(self.connect(), json!({ "command": command }))
    }

    fn wait(&mut self) -> (ExitStatus, Ended) {
        let status = self.child.wait().unwrap();
        let line = std::fs::read_to_string(self.dir.path().join("ended")).unwrap();
        assert_eq!(line.lines().count(), 1, "{line:?}");
        (status, serde_json::from_str(&line).unwrap())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn children_of(pid: u32) -> Vec<u32> {
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    fn init(&self) -> u32 {
        Self::children_of(self.child.id())[0]
    }

    fn daemon(&self) -> Option<u32> {
        Self::children_of(self.init()).into_iter().find(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "execd\n")
        })
    }

    /// The one that was forked ahead.
    fn first_daemon(&self) -> u32 {
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(pid) = self.daemon() {
                return pid;
            }
            assert!(std::time::Instant::now() < deadline, "no daemon was forked");
            std::thread::yield_now();
        }
    }

    fn signal_init(&self, signal: i32) {
        kill(self.init(), signal);
    }
}

fn kill(pid: u32, signal: i32) {
    // SAFETY: a process of this test's own sandbox.
    unsafe { libc::kill(pid.cast_signed(), signal) };
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_entrypoints_end_is_the_sandboxes_end() {
    as_root(|| {
        let script =
            "echo out; echo err >&2; echo [$EXECD_ACCESS_TOKEN$JUPYTER_TOKEN] $HOME $USER; pwd; cat; exit 7";
        let mut sandbox = boot(&["sh", "-c", script]);
        assert!(matches!(sandbox.started, Started::Running { pid: Some(pid) } if pid > 1));
        let (status, ended) = sandbox.wait();
        assert_eq!(status.code(), Some(7));
        assert_eq!(ended, Ended { exit_code: 7, signal: None, oom_kills: Some(2) });
        assert_eq!(sandbox.log(), "out\nerr\n[notebook] /root root\n/\n");
    });
}

#[test]
fn a_killed_entrypoint_is_told_from_one_that_failed() {
    as_root(|| {
        let mut sandbox = boot(&["sh", "-c", "kill -9 $$"]);
        let (status, ended) = sandbox.wait();
        assert_eq!(status.code(), Some(137));
        assert_eq!((ended.exit_code, ended.signal), (137, Some(9)));
    });
}

#[test]
fn an_entrypoint_that_cannot_be_executed_is_named() {
    as_root(|| {
        for (entrypoint, errno, code) in [
            (&["/no/such/program"][..], Some(libc::ENOENT), 127),
            (&["no-such-name"], Some(libc::ENOENT), 127),
            (&["/etc/passwd"], Some(libc::EACCES), 126),
        ] {
            let mut sandbox = boot(entrypoint);
            let Started::Failed { errno: told, message } = &sandbox.started else { panic!("started") };
            assert_eq!(*told, errno);
            assert!(message.contains(entrypoint[0]), "{message}");
            assert_eq!(sandbox.child.wait().unwrap().code(), Some(code));
        }
        let sandbox = boot_with(&["true"], |order| order.user = Some("nobody-here".to_owned()));
        assert!(
            matches!(&sandbox.started, Started::Failed { message, .. } if message.contains("nobody-here"))
        );
    });
}

#[test]
fn what_only_keeps_the_sandbox_alive_is_no_process() {
    as_root(|| {
        let without_tail = |order: &mut Order| order.env[0].1 = "/var/empty".to_owned();
        let idle = ["tail", "-f", "/dev/null"];
        let sandbox = boot_with(&idle, without_tail);
        assert!(matches!(sandbox.started, Started::Running { pid: None }), "{:?}", sandbox.started);
        assert_eq!(sandbox.run("PATH=/bin:/usr/bin; pwd").stdout(), "/\n");
        // It ends as that program would.
        for (signal, code) in [(libc::SIGTERM, 143), (libc::SIGHUP, 129), (libc::SIGUSR1, 138)] {
            let mut sandbox = boot(&idle);
            sandbox.signal_init(libc::SIGWINCH);
            let began = Instant::now();
            sandbox.signal_init(signal);
            let (status, ended) = sandbox.wait();
            assert_eq!((status.code(), ended.exit_code, ended.signal), (Some(code), code, Some(signal)));
            assert!(began.elapsed() < Duration::from_secs(9), "nobody had to be killed");
        }
        // What it needs is missed all the same, and so is another program.
        let lost = boot_with(&idle, |order| order.user = Some("nobody-here".to_owned()));
        assert!(matches!(lost.started, Started::Failed { .. }), "{:?}", lost.started);
        let other = boot_with(&["tail", "-f", "/dev/zero"], without_tail);
        assert!(matches!(other.started, Started::Failed { .. }), "{:?}", other.started);
    });
}

#[test]
fn signals_reach_the_entrypoint() {
    as_root(|| {
        let script = "trap 'echo one' USR1; trap 'echo bye; exit 3' TERM; echo ready; \
                      while :; do sleep 1000 & wait $!; done";
        let mut sandbox = boot(&["sh", "-c", script]);
        eventually("the trap", || sandbox.log().contains("ready"));
        sandbox.signal_init(libc::SIGUSR1);
        eventually("the first signal", || sandbox.log().contains("one"));
        let began = Instant::now();
        sandbox.signal_init(libc::SIGTERM);
        let (status, ended) = sandbox.wait();
        assert!(began.elapsed() < Duration::from_secs(9), "nobody had to be killed");
        assert_eq!((status.code(), ended.exit_code), (Some(3), 3));
        // The shell may say of its own accord that `sleep` was terminated.
        assert!(sandbox.log().ends_with("bye\n"), "{}", sandbox.log());
    });
}

#[test]
fn what_ignores_a_stop_is_killed() {
    as_root(|| {
        let mut sandbox = boot(&["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1000; done"]);
        eventually("the trap", || sandbox.log().contains("ready"));
        let began = Instant::now();
        sandbox.signal_init(libc::SIGTERM);
        let (status, ended) = sandbox.wait();
        assert!((9..40).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        assert_eq!((status.code(), ended.signal), (Some(137), Some(9)));
    });
}

#[test]
fn commands_run_in_the_sandbox_and_hold_none_of_its_descriptors() {
    as_root(|| {
        let sandbox = boot(&["sleep", "1000"]);
        let run = sandbox.run(
            "echo [$EXECD_ACCESS_TOKEN$JUPYTER_TOKEN] $HOME; ls /proc/self/fd | wc -l; cat /proc/1/comm",
        );
        assert_eq!(run.check().stdout(), "[] /root\n4\nexecd\n");
        let cgroup = std::fs::read_to_string(sandbox.dir.path().join("cgroup")).unwrap();
        assert_eq!(cgroup, "00", "entrypoint and command have moved themselves");
        // Inert from inside.
        assert_eq!(sandbox.run("kill -9 1; sleep 0.1; echo on").stdout(), "on\n");
    });
}

#[test]
fn a_daemon_that_dies_is_started_again() {
    as_root(|| {
        let mut sandbox = boot(&["sh", "-c", "echo alive; exec sleep 1000"]);
        let mut stream = open_on(sandbox.connect(), json!({ "command": "exec sleep 1000" }));
        stream.id();
        for _ in 0..3 {
            let old = sandbox.first_daemon();
            kill(old, libc::SIGKILL);
            eventually("another daemon", || sandbox.daemon().is_some_and(|pid| pid != old));
            assert_eq!(sandbox.run("echo again").check().stdout(), "again\n");
        }
        assert!(sandbox.child.try_wait().unwrap().is_none());
        assert_eq!(sandbox.log(), "alive\n");
    });
}

#[test]
fn the_log_keeps_the_newest_mebibyte() {
    as_root(|| {
        let mut sandbox = boot(&["sh", "-c", "seq 1 1000000; echo last"]);
        sandbox.wait();
        let log = sandbox.log();
        assert!(log.len() <= 1 << 20 && log.len() >= 1 << 19, "{}", log.len());
        assert!(log.ends_with("999999\n1000000\nlast\n"));
    });
}

#[test]
fn orphans_are_reaped() {
    as_root(|| {
        let sandbox = boot(&["sleep", "1000"]);
        sandbox.run("for i in $(seq 500); do (sleep 0.01 &) ; done");
        let run = "grep -c '^State:.Z' /proc/[0-9]*/status | grep -v ':0' | wc -l";
        eventually("no zombies", || sandbox.run(run).stdout() == "0\n");
    });
}

#[test]
fn the_images_user_and_directories_are_used() {
    as_root(|| {
        let cwd = format!("/tmp/boot-test-{}/made", std::process::id());
        let cleanup = cwd.clone();
        let sandbox = boot_with(&["sh", "-c", "id -u; id -G; pwd; exec sleep 1000"], |order| {
            order.user = Some("65534:65534".to_owned());
            order.cwd = Some(cwd.clone());
            order.volumes = vec![format!("{cwd}/../data/deep"), "/dev/null/never".to_owned()];
        });
        eventually("the log", || sandbox.log().lines().count() == 3);
        assert_eq!(sandbox.log(), format!("65534\n65534\n{cleanup}\n"));
        assert_eq!(sandbox.run("id -u; pwd").stdout(), format!("65534\n{cleanup}\n"));
        assert_eq!(sandbox.run(&format!("ls -A {cleanup}/../data")).stdout(), "deep\n");
        let root = run_on(sandbox.connect(), json!({ "command": "id -u", "uid": 0 }));
        assert_eq!(root.stdout(), "0\n");
        std::fs::remove_dir_all(std::path::Path::new(&cleanup).parent().unwrap()).unwrap();
    });
}

#[test]
fn an_out_of_memory_kill_is_told() {
    as_root(|| {
        let sandbox = boot(&["sleep", "1000"]);
        let oom = sandbox.dir.path().join("oom");
        let mut stream =
            open_on(sandbox.connect(), json!({ "command": "echo ready; kill -STOP $$; kill -9 $$" }));
        let id = stream.id();
        stream.until("stdout");
        let mut file = File::options().write(true).open(oom).unwrap();
        file.rewind().unwrap();
        file.write_all(b"low 0\noom_kill 3\n").unwrap();
        sandbox.run("until pgrep -r T -f 'kill -STOP'; do sleep 0.01; done; pkill -CONT -f 'kill -STOP'");
        let last = stream.rest().pop().unwrap();
        assert_eq!(last["error"]["evalue"], "137");
        assert!(last["error"]["traceback"][1].as_str().unwrap().contains("out of memory"), "{id} {last}");
    });
}

#[test]
fn the_sandboxes_environment_has_log_metrics_and_bounds() {
    as_root(|| {
        let collector = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let logs = tempfile::tempdir().unwrap();
        let path = logs.path().join("execd.log");
        let settings = [
            ("EXECD_LOG_FILE", path.to_str().unwrap().to_owned()),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", collector.local_addr().unwrap())),
            ("OTEL_METRIC_EXPORT_INTERVAL", "100".to_owned()),
            ("EXECD_COMMAND_RETENTION_COUNT", "1".to_owned()),
            ("EXECD_COMMAND_LOG_BYTES", "much".to_owned()),
        ];
        let sandbox = boot_with(&["sleep", "1000"], |order| {
            order.env.extend(settings.map(|(name, value)| (name.to_owned(), value)));
        });
        // It exports before anybody has talked to it.
        let mut head = [0; 64];
        std::io::Read::read_exact(&mut collector.accept().unwrap().0, &mut head).unwrap();
        assert!(head.starts_with(b"POST /v1/metrics HTTP/1.1\r\n"));
        let first = sandbox.run("export TOKEN=s3cret; true").id().to_owned();
        sandbox.run("true");
        let mut client = sandbox.connect();
        let head = client.request("GET", &format!("/command/status/{first}"), &[], b"");
        assert_eq!(head.status, 404, "one ended command is kept");
        let log = || std::fs::read_to_string(&path).unwrap();
        eventually("the requests are noted", || log().contains("/command/status/"));
        assert!(log().contains("TOKEN=****") && !log().contains("s3cret"), "{}", log());
        assert!(log().contains("EXECD_COMMAND_LOG_BYTES"), "{}", log());
    });
}

#[test]
fn a_daemon_that_is_started_again_removes_what_its_predecessor_left() {
    as_root(|| {
        let temporary = tempfile::tempdir().unwrap();
        let sandbox = boot_with(&["sleep", "1000"], |order| {
            order.env.push(("TMPDIR".to_owned(), temporary.path().to_str().unwrap().to_owned()));
        });
        let left = temporary.path().join(format!(".execd-{}", "0".repeat(32)));
        std::fs::write(&left, "output").unwrap();
        sandbox.run("true");
        assert!(left.exists());
        kill(sandbox.first_daemon(), libc::SIGKILL);
        eventually("it is removed", || !left.exists());
    });
}

#[test]
fn idle_processes_wake_for_nothing() {
    as_root(|| {
        let standby = standby();
        standby.rehearse();
        let sandbox = standby.order(&order(&["sleep", "1000"]));
        // The thread of the rehearsal leaves after a while.
        let daemon = sandbox.first_daemon();
        let threads = || std::fs::read_dir(format!("/proc/{daemon}/task")).unwrap().count();
        eventually("a single thread", || threads() == 1);
        let switches = |pid: u32| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt")).unwrap().to_owned();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        };
        sandbox.run("true");
        UnixStream::connect(sandbox.dir.path().join("socket")).unwrap();
        // What the request has left to do is done at some time; then nothing more comes.
        let quiet = (0..10).any(|_| {
            let before = (switches(sandbox.init()), switches(daemon));
            std::thread::sleep(Duration::from_secs(3));
            (switches(sandbox.init()), switches(daemon)) == before
        });
        assert!(quiet, "{:?}", (switches(sandbox.init()), switches(daemon)));
    });
}

#[test]
fn a_standby_that_nobody_wants_leaves() {
    as_root(|| {
        let Standby { mut child, dir, orders } = standby();
        std::thread::sleep(Duration::from_millis(100));
        assert!(child.try_wait().unwrap().is_none(), "it waits");
        drop(orders);
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert_eq!(std::fs::read(dir.path().join("ended")).unwrap(), b"", "nothing ended that had begun");
    });
}

#[test]
fn a_rehearsal_leaves_nothing_behind() {
    as_root(|| {
        let standby = standby();
        let init = || Sandbox::children_of(standby.child.id()).first().copied();
        eventually("the daemon", || init().is_some_and(|init| !Sandbox::children_of(init).is_empty()));
        let init = init().unwrap();
        let daemon = Sandbox::children_of(init)[0];
        let threads = || std::fs::read_dir(format!("/proc/{daemon}/task")).unwrap().count();
        assert_eq!(threads(), 1, "nothing happens unasked");
        for _ in 0..3 {
            standby.rehearse();
        }
        eventually("the rehearsal", || threads() > 1);
        let fifo = standby.dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
        let script = format!("echo out; read x <{}; exit 7", fifo.display());
        let mut sandbox = standby.order(&order(&["sh", "-c", &script]));
        assert_eq!(sandbox.run("ps --no-headers -eo comm").stdout(), "execd\nexecd\nsh\nps\n");
        std::fs::write(fifo, "\n").unwrap();
        let (status, _) = sandbox.wait();
        assert_eq!((status.code(), sandbox.log().as_str()), (Some(7), "out\n"));
    });
}

#[test]
fn a_daemon_that_dies_before_the_order_is_started_again() {
    as_root(|| {
        let standby = standby();
        let init = || Sandbox::children_of(standby.child.id()).first().copied();
        eventually("the daemon", || init().is_some_and(|init| !Sandbox::children_of(init).is_empty()));
        let init = init().unwrap();
        let old = Sandbox::children_of(init)[0];
        kill(old, libc::SIGKILL);
        eventually("its successor", || Sandbox::children_of(init).first().is_some_and(|pid| *pid != old));
        let sandbox = standby.order(&order(&["sleep", "1000"]));
        assert_eq!(sandbox.run("echo here").check().stdout(), "here\n");
    });
}

fn hooks(text: &serde_json::Value) -> impl FnOnce(&mut Order) + use<'_> {
    move |order| order.lifecycle = Some(serde_json::from_value(text.clone()).unwrap())
}

#[test]
fn the_entrypoint_waits_for_the_hook_before_it_and_the_api_does_not() {
    as_root(|| {
        let standby = standby();
        let dir = standby.dir.path().to_path_buf();
        let go = dir.join("go");
        let script = format!("echo hook; env; while [ ! -e {} ]; do sleep 0.02; done", go.display());
        let mut order = order(&["sh", "-c", "echo entrypoint; exec sleep 300"]);
        let text = json!({"preStart": {"command": ["sh", "-c", script]}});
        hooks(&text)(&mut order);
        let log = || std::fs::read_to_string(dir.join("log")).unwrap();
        std::thread::scope(|scope| {
            let sandbox = scope.spawn(|| standby.order(&order));
            eventually("the hook", || log().contains("hook\n"));
            let run = run_on(Client::connect(dir.join("socket")), json!({"command": "echo works"}));
            assert_eq!(run.stdout(), "works\n");
            let mut client = Client::connect(dir.join("socket"));
            assert_eq!(client.request("GET", "/ready", &[], b"").status, 503);
            std::fs::write(&go, "").unwrap();
            let sandbox = sandbox.join().unwrap();
            assert!(matches!(sandbox.started, Started::Running { pid: Some(_) }), "{:?}", sandbox.started);
            eventually("the entrypoint", || log().ends_with("entrypoint\n"));
            assert!(log().starts_with("hook\n") && !log().contains("s3cret"), "{}", log());
            eventually("readiness", || {
                let mut client = Client::connect(dir.join("socket"));
                client.request("GET", "/ready", &[], b"").status == 200
            });
            // The binding is the order's.
            let body = json!({"sandboxId": "x", "generation": 1}).to_string();
            let mut client = Client::connect(dir.join("socket"));
            assert_eq!(client.request("POST", "/internal/init", &[], body.as_bytes()).status, 404);
        });
    });
}

#[test]
fn a_hook_that_fails_is_told_and_nothing_runs() {
    as_root(|| {
        for (command, words) in [
            (json!(["sh", "-c", "echo words >&2; exit 9"]), "exit status 9; output: words"),
            (json!(["/no/such"]), "/no/such"),
            (json!(["sh", "-c", "kill -9 $PPID; sleep 300"]), "the daemon died"),
        ] {
            let text = json!({"preStart": {"command": command}, "periodic": []});
            let mut sandbox = boot_with(&["sh", "-c", "echo entrypoint"], hooks(&text));
            let Started::Refused { message } = &sandbox.started else { panic!("{:?}", sandbox.started) };
            assert!(message.contains("preStart hook") && message.contains(words), "{message}");
            assert_eq!(sandbox.child.wait().unwrap().code(), Some(1));
            assert!(!sandbox.log().contains("entrypoint"), "{}", sandbox.log());
        }
    });
}

#[test]
fn a_sandbox_that_nobody_waits_for_leaves_its_hook() {
    as_root(|| {
        let Standby { mut child, dir, orders } = standby();
        let text = json!({"preStart": {"command": ["sh", "-c", "echo up; sleep 300"]}});
        let mut order = order(&["sleep", "300"]);
        hooks(&text)(&mut order);
        let document = document(&order);
        let fds = [document.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&orders, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).unwrap();
        eventually("the hook", || std::fs::read_to_string(dir.path().join("log")).unwrap() == "up\n");
        drop(orders);
        assert!(child.wait().unwrap().success());
    });
}

#[test]
fn hooks_go_on_under_another_daemon() {
    as_root(|| {
        let periodic = json!([{"name": "p", "schedule": "@every 1s", "command": ["echo", "tick"]}]);
        let text = json!({"preStart": {"command": ["echo", "first"]}, "periodic": periodic});
        let sandbox = boot_with(&["sleep", "300"], hooks(&text));
        assert!(matches!(sandbox.started, Started::Running { .. }), "{:?}", sandbox.started);
        let ticks = || sandbox.log().matches("tick\n").count();
        eventually("a tick", || ticks() > 0);
        let first = sandbox.daemon().unwrap();
        kill(first, libc::SIGKILL);
        eventually("another daemon", || sandbox.daemon().is_some_and(|pid| pid != first));
        let before = ticks();
        eventually("ticks of the other", || ticks() > before + 1);
        assert_eq!(sandbox.log().matches("first\n").count(), 1, "{}", sandbox.log());
        assert_eq!(sandbox.run("echo works").stdout(), "works\n");
    });
}
