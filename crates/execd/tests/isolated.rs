//! Isolated sessions of an ordinary daemon: what they are made of, how runs end, and that nothing gets out or is left.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Daemon, eventually, open_at};
use serde_json::{Value, json};

/// A daemon, and a directory that sessions may write.
struct Host {
    daemon: Daemon,
    work: tempfile::TempDir,
}

struct Session<'a> {
    host: &'a Host,
    id: String,
}

/// As root only: anybody else needs a kernel and a profile that let users make namespaces.
fn host() -> Option<Host> {
    host_with(&[])
}

fn host_with(env: &[(&str, &str)]) -> Option<Host> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return None;
    }
    fs::create_dir_all("/mnt").unwrap();
    Some(Host { daemon: Daemon::with(&[], env), work: tempfile::tempdir_in("/mnt").unwrap() })
}

impl Drop for Host {
    fn drop(&mut self) {
        let pid = i32::try_from(self.daemon.child.id()).unwrap();
        // SAFETY: signals our own child, which has not been reaped.
        unsafe { libc::kill(pid, libc::SIGTERM) };
        for _ in 0..1000 {
            if self.daemon.child.try_wait().unwrap().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Host {
    fn path(&self, name: &str) -> String {
        self.work.path().join(name).display().to_string()
    }

    fn try_make(&self, body: Value) -> (u16, Value) {
        let answer = self.daemon.call("POST", "/v1/isolated/session", Some(body));
        (answer.head.status, answer.json())
    }

    fn make(&self, body: Value) -> Session<'_> {
        let (status, answer) = self.try_make(body);
        assert_eq!(status, 201, "{answer}");
        Session { host: self, id: answer["session_id"].as_str().unwrap().to_owned() }
    }

    /// A session on the directory, in that mode.
    fn open(&self, mode: &str) -> Session<'_> {
        self.make(json!({ "workspace": { "path": self.work.path(), "mode": mode } }))
    }

    /// All processes that descend from the daemon.
    fn processes(&self) -> BTreeSet<i32> {
        let parents: Vec<(i32, i32)> = fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|entry| {
                let pid = entry.file_name().to_str()?.parse().ok()?;
                let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
                Some((pid, stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?))
            })
            .collect();
        let mut found = BTreeSet::from([i32::try_from(self.daemon.child.id()).unwrap()]);
        loop {
            let more: Vec<i32> = parents
                .iter()
                .filter(|(pid, parent)| found.contains(parent) && !found.contains(pid))
                .map(|(pid, _)| *pid)
                .collect();
            if more.is_empty() {
                return found;
            }
            found.extend(more);
        }
    }

    fn isolator(&self) -> i32 {
        self.processes().into_iter().find(|pid| named(*pid) == "isolator").unwrap()
    }

    fn mounts(&self) -> usize {
        fs::read_to_string(format!("/proc/{}/mountinfo", self.daemon.child.id())).unwrap().lines().count()
    }
}

fn named(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// Directories of upper layers of all daemons of this machine that hold this session's.
fn upper_of(session: &str) -> Vec<std::path::PathBuf> {
    let all = fs::read_dir("/var/lib/execd/isolation").into_iter().flatten().flatten();
    all.map(|daemon| daemon.path().join(session)).filter(|path| path.exists()).collect()
}

/// What a run has said and how it ended: text and error name with its value.
type Ran = (String, Option<(String, String)>);

impl Session<'_> {
    fn path(&self, rest: &str) -> String {
        format!("/v1/isolated/session/{}{rest}", self.id)
    }

    fn post(&self, body: Value) -> Ran {
        let mut stream = open_at(self.host.daemon.connect(), &self.path("/run"), body);
        let (mut lines, mut end) = (Vec::new(), None);
        while let Some((_, event)) = stream.next_event() {
            assert!(end.is_none(), "an event after the last: {event}");
            match event["type"].as_str().unwrap() {
                "stdout" => lines.push(event["text"].as_str().unwrap().to_owned()),
                "execution_complete" => end = Some(None),
                "error" => {
                    let word = |name: &str| event["error"][name].as_str().unwrap().to_owned();
                    assert!(event["text"].is_string());
                    end = Some(Some((word("ename"), word("evalue"))));
                }
                other => panic!("unexpected event {other}"),
            }
        }
        (lines.join("\n"), end.expect("a last event"))
    }

    fn run(&self, code: &str) -> Ran {
        self.post(json!({ "code": code }))
    }

    /// Output of a run that succeeds.
    fn out(&self, code: &str) -> String {
        let (text, error) = self.run(code);
        let log = || fs::read_to_string(self.host.daemon.dir.path().join("log")).unwrap_or_default();
        assert_eq!(error, None, "{code}: {text}\n{}", log());
        text
    }

    fn call(&self, method: &str, rest: &str, body: Option<Value>) -> (u16, Value) {
        let answer = self.host.daemon.call(method, &self.path(rest), body);
        let json = serde_json::from_slice(&answer.body);
        (
            answer.head.status,
            json.unwrap_or_else(|_| String::from_utf8_lossy(&answer.body).into_owned().into()),
        )
    }

    /// A call that succeeds.
    fn done(&self, method: &str, rest: &str, body: Option<Value>) {
        let (status, answer) = self.call(method, rest, body);
        assert_eq!(status, 200, "{method} {rest}: {answer}");
    }

    fn status(&self) -> String {
        self.call("GET", "", None).1["status"].as_str().unwrap_or_default().to_owned()
    }

    fn delete(&self) {
        assert_eq!(self.call("DELETE", "", None).0, 200);
    }
}

#[test]
fn trees_binds_and_profile_decide_what_can_be_written() {
    let Some(host) = host() else { return };
    fs::write(host.path("f"), "lower\n").unwrap();
    fs::create_dir(host.path("dir")).unwrap();
    let rw = host.open("rw");
    assert_eq!(rw.out("pwd; cat f; echo rw >rw"), format!("{}\nlower", host.work.path().display()));
    assert_eq!(fs::read_to_string(host.path("rw")).unwrap(), "rw\n");
    let ro = host.open("ro");
    assert_eq!(ro.out("cat rw; touch x 2>/dev/null || echo no; touch /tmp/x && echo tmp"), "rw\nno\ntmp");
    let overlay = host.open("overlay");
    assert_eq!(overlay.out("rm f; mkdir dir/in; echo new >rw; cat rw; ls"), "new\ndir\nrw");
    assert_eq!(fs::read_to_string(host.path("f")).unwrap(), "lower\n");
    assert_eq!(upper_of(&overlay.id).len(), 1);
    overlay.delete();
    assert!(upper_of(&overlay.id).is_empty());
    assert_eq!(host.open("overlay").out("cat f rw; ls dir"), "lower\nrw");

    let several = host.make(json!({
        "overlays": [{ "path": host.path("dir"), "persist": false }],
        "extra_writable": [host.work.path()],
        "binds": [{ "source": host.path("f"), "dest": "/etc/hostname", "readonly": true }],
        "profile": "balanced",
    }));
    assert_eq!(
        several.out("cat /etc/hostname; (echo no >/etc/hostname) 2>/dev/null || echo ro"),
        "lower\nro"
    );
    let mark = tempfile::NamedTempFile::new_in("/tmp").unwrap();
    assert_eq!(several.out(&format!("ls {}", mark.path().display())), mark.path().display().to_string());
    for session in [&rw, &ro] {
        assert_eq!(session.run(&format!("ls {} 2>/dev/null", mark.path().display())).1.unwrap().1, "2");
    }
    // Its own memory is bounded.
    let size = host.make(json!({ "overlays": [{ "path": host.path("dir"), "persist": false }] }));
    let left: u64 = size.out("df --output=size -B1 . | tail -1").trim().parse().unwrap();
    assert!(left <= 1 << 30, "{left}");
}

#[test]
fn what_cannot_be_is_refused_with_the_contracts_codes() {
    let Some(host) = host() else { return };
    let path = host.work.path();
    let outside = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(outside.path(), host.path("link")).unwrap();
    let workspace = json!({ "path": path });
    for (body, status, code) in [
        (json!({}), 400, "INVALID_REQUEST_BODY"),
        (json!({ "overlays": [] }), 400, "INVALID_REQUEST_BODY"),
        (json!({ "workspace": { "path": "relative" } }), 400, "INVALID_REQUEST_BODY"),
        (json!({ "workspace": { "path": "/a/../b" } }), 400, "INVALID_REQUEST_BODY"),
        (json!({ "workspace": { "path": path, "mode": "odd" } }), 400, "INVALID_REQUEST_BODY"),
        (
            json!({ "workspace": workspace, "overlays": [{ "path": host.path("x") }] }),
            400,
            "INVALID_REQUEST_BODY",
        ),
        (
            json!({ "overlays": [{ "path": path, "mode": "rw", "persist": true }] }),
            400,
            "INVALID_REQUEST_BODY",
        ),
        (json!({ "workspace": workspace, "uid_mode": "odd" }), 400, "INVALID_REQUEST_BODY"),
        (json!({ "workspace": workspace, "idle_timeout_seconds": -1 }), 400, "INVALID_REQUEST_BODY"),
        (
            json!({ "workspace": workspace, "env_passthrough": { "mode": "odd" } }),
            400,
            "INVALID_REQUEST_BODY",
        ),
        (json!({ "workspace": workspace, "profile": "odd" }), 400, "RUNTIME_ERROR"),
        (json!({ "workspace": { "path": host.path("absent") } }), 400, "RUNTIME_ERROR"),
        (json!({ "workspace": { "path": "/dev/shm" } }), 400, "RUNTIME_ERROR"),
        (json!({ "workspace": { "path": "/proc" } }), 400, "RUNTIME_ERROR"),
        (json!({ "workspace": workspace, "extra_writable": ["/etc"] }), 400, "RUNTIME_ERROR"),
        (json!({ "workspace": workspace, "extra_writable": [host.path("link")] }), 400, "RUNTIME_ERROR"),
        (json!({ "workspace": workspace, "binds": [{ "source": "x" }] }), 400, "RUNTIME_ERROR"),
        (json!({ "workspace": workspace, "binds": [{ "source": host.path("no") }] }), 400, "RUNTIME_ERROR"),
        (
            json!({ "workspace": workspace, "binds": [{ "source": path, "dest": "/no/such/place" }] }),
            400,
            "RUNTIME_ERROR",
        ),
        (
            json!({ "workspace": workspace, "binds": [{ "source": path, "dest": "/proc" }] }),
            400,
            "RUNTIME_ERROR",
        ),
    ] {
        let (found, answer) = host.try_make(body.clone());
        assert_eq!((found, answer["code"].as_str()), (status, Some(code)), "{body}: {answer}");
    }
    assert_eq!(host.daemon.call("GET", "/v1/isolated/sessions", None).json(), json!({ "sessions": [] }));
    let session = host.open("rw");
    for (method, rest, code) in [("GET", "/diff", "NOT_SUPPORTED"), ("POST", "/commit", "NOT_SUPPORTED")] {
        let (status, answer) = session.call(method, rest, None);
        assert_eq!((status, answer["code"].as_str()), (503, Some(code)));
    }
    for body in [
        json!({}),
        json!({ "code": " " }),
        json!({ "code": "a\0" }),
        json!({ "code": "x", "envs": { "a b": "c" } }),
    ] {
        assert_eq!(session.call("POST", "/run", Some(body)).0, 400);
    }
    session.delete();
    for (method, rest) in [("GET", ""), ("DELETE", ""), ("GET", "/runs/x"), ("GET", "/files/info?path=f")] {
        let (status, answer) = session.call(method, rest, None);
        assert_eq!((status, answer["code"].as_str()), (404, Some("SESSION_NOT_FOUND")), "{method} {rest}");
    }
    assert_eq!(session.call("POST", "/run", Some(json!({ "code": "true" }))).0, 404);
}

#[test]
fn only_wanted_variables_pass() {
    let env = [("MY_API_KEY", "1"), ("aws_x", "1"), ("KEEP", "k"), ("EXECD_ENVS", "")];
    let Some(host) = host_with(&env) else { return };
    let seen = |rule: Value| {
        let session =
            host.make(json!({ "workspace": { "path": host.work.path() }, "env_passthrough": rule }));
        session.out("echo ${MY_API_KEY-} ${aws_x-} ${KEEP-} ${EXECD_ACCESS_TOKEN-}; [ -n \"$HOME\" ] && echo home || :")
    };
    assert_eq!(seen(Value::Null), "k\nhome");
    assert_eq!(seen(json!({ "mode": "deny", "keys": ["KEEP"] })), "1 1\nhome");
    assert_eq!(seen(json!({ "mode": "allow", "keys": ["KEEP", "MY_API_KEY", "EXECD_ACCESS_TOKEN"] })), "1 k");
}

#[test]
fn the_shell_lives_on_through_failures_time_limits_and_clients_that_leave() {
    let Some(host) = host() else { return };
    let session = host.open("rw");
    session.out("x=5; f() { echo \"f$x\"; }; alias hi='echo hi there'; set -- a b; cd /usr");
    assert_eq!(session.out("f; hi; echo $2; pwd"), "f5\nhi there\nb\n/usr");
    assert_eq!(session.run("(exit 42)"), (String::new(), Some(("ExitError".into(), "42".into()))));
    assert_eq!(session.run("echo 'unbalanced").1.unwrap().0, "ExitError");
    assert_eq!(session.out("printf 'a\\n\\nb'; printf 'no end' >&2"), "a\n\n\nbno end");
    assert_eq!(session.out("sleep 300 & echo quiet"), "quiet");
    assert_eq!(session.post(json!({ "code": "echo \"$A\"; x=9", "envs": { "A": "it's\n2" } })).0, "it's\n2");
    assert_eq!(session.out("echo ${A-none} $x"), "none 5");
    assert_eq!(session.out("exec 3</etc/passwd; exec 1>&-; :"), "");
    assert_eq!(session.out("echo \"R0 0 h\" >/dev/shm/.execd/control; echo forged"), "forged");
    for code in
        ["echo a; sleep 300; echo never", "while :; do :; done", "f() { while :; do sleep 0.01; done; }; f"]
    {
        let began = Instant::now();
        let (text, error) = session.post(json!({ "code": code, "timeout_seconds": 1 }));
        assert!(!text.contains("never"), "{text}");
        assert!(error.as_ref().is_some_and(|(name, _)| name == "RuntimeError"), "{error:?}");
        assert!(began.elapsed() < Duration::from_secs(20));
        assert_eq!(session.out("echo $x"), "5", "{code}");
    }
    // One that does not listen is killed; a run in the background is not.
    let background = session.call("POST", "/run", Some(json!({ "code": "sleep 304", "background": true }))).1;
    let run = format!("/runs/{}", background["run_id"].as_str().unwrap());
    let (_, error) =
        session.post(json!({ "code": "sh -c 'trap \"\" INT; sleep 303; sleep 303'", "timeout_seconds": 1 }));
    assert_eq!(error.unwrap().0, "RuntimeError");
    assert_eq!(session.out("echo $x"), "5");
    assert_eq!(session.call("GET", &run, None).1["running"], true);
    // A client that leaves takes the run with it.
    let mut stream =
        open_at(host.daemon.connect(), &session.path("/run"), json!({ "code": "echo up; sleep 301" }));
    assert_eq!(stream.next_event().unwrap().1["text"], "up");
    eventually("its program", || common::is_alive("sleep 301"));
    drop(stream);
    eventually("the end of what nobody listens to", || !common::is_alive("sleep 301"));
    assert_eq!(session.out("echo $x"), "5");
    // Runs take turns.
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..4).map(|_| scope.spawn(|| session.out("n=$((n+1)); sleep 0.05; echo $n"))).collect();
        let seen: BTreeSet<String> = all.into_iter().map(|run| run.join().unwrap()).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>().join(""), "1234");
    });
    assert_eq!(session.status(), "active");
    let (_, error) = session.run("exit 3");
    assert!(
        error
            .as_ref()
            .is_some_and(|(name, value)| name == "RuntimeError" && value.contains("session terminated"))
    );
    eventually("the word of its end", || session.status() == "dead");
    assert_eq!(session.run("true").1.unwrap(), ("RuntimeError".into(), "session terminated".into()));
    eventually("the word of its end", || session.call("GET", &run, None).1["running"] == false);
    assert_eq!(session.call("GET", &run, None).1["error"], "session terminated");
    assert!(!common::is_alive("sleep 304"));
    session.delete();
}

#[test]
fn runs_in_the_background_are_kept_track_of() {
    let Some(host) = host() else { return };
    let session = host.open("overlay");
    let start = |code: &str| {
        let (status, answer) =
            session.call("POST", "/run", Some(json!({ "code": code, "background": true })));
        assert_eq!(status, 202, "{answer}");
        format!("/runs/{}", answer["run_id"].as_str().unwrap())
    };
    session.out("x=seen");
    let one = start("echo $x; x=changed; while [ ! -e go ]; do sleep 0.01; done; exit 9");
    assert_eq!(session.call("GET", &one, None).1["running"], true);
    assert_eq!(session.out("echo $x; touch go"), "seen");
    eventually("its end", || session.call("GET", &one, None).1["running"] == false);
    assert_eq!(session.call("GET", &one, None).1["exit_code"], 9);
    let logs = |rest: &str| host.daemon.call("GET", &session.path(rest), None);
    let answer = logs(&format!("{one}/logs"));
    assert_eq!(
        (&answer.body[..], answer.head.header("execd-isolated-tail-cursor")),
        (&b"seen\n"[..], Some("5"))
    );
    let answer = logs(&format!("{one}/logs?cursor=2"));
    assert_eq!(
        (&answer.body[..], answer.head.header("execd-isolated-tail-cursor")),
        (&b"en\n"[..], Some("5"))
    );
    for cursor in ["-1", "x", "1.5"] {
        assert_eq!(session.call("GET", &format!("{one}/logs?cursor={cursor}"), None).0, 400);
    }
    // What is kept is bounded, and counted from the beginning.
    let much = start("head -c 20000000 /dev/zero | tr '\\0' x");
    eventually("its end", || session.call("GET", &much, None).1["running"] == false);
    let answer = logs(&format!("{much}/logs"));
    assert_eq!(answer.head.header("execd-isolated-tail-cursor"), Some("20000000"));
    assert!(answer.body.len() <= 17 << 20 && answer.body.len() >= 14 << 20, "{}", answer.body.len());
    // Killed by somebody, it says nothing.
    let killed = start("echo up; exec sleep 302");
    eventually("its start", || logs(&format!("{killed}/logs")).body == b"up\n");
    session.out("kill -9 $!; sleep 0.2");
    assert_eq!(session.call("GET", &killed, None).1["running"], true);
    session.out("pkill -9 -x sleep");
    eventually("its end", || session.call("GET", &killed, None).1["running"] == false);
    let status = session.call("GET", &killed, None).1;
    assert!(
        status["exit_code"].is_null() && status["error"].as_str().unwrap().contains("killed"),
        "{status}"
    );
}

#[test]
fn idle_sessions_end() {
    let Some(host) = host() else { return };
    let short = host.make(json!({ "workspace": { "path": host.work.path() }, "idle_timeout_seconds": 1 }));
    let long = host.make(json!({ "workspace": { "path": host.work.path() }, "idle_timeout_seconds": 1000 }));
    let busy = host.make(json!({ "workspace": { "path": host.work.path() }, "idle_timeout_seconds": 1 }));
    busy.call("POST", "/run", Some(json!({ "code": "sleep 3", "background": true })));
    let state = long.call("GET", "", None).1;
    assert!(
        state["idle_remaining_seconds"].as_i64().is_some_and(|left| (990..=1000).contains(&left)),
        "{state}"
    );
    eventually("the end of the idle one", || short.call("GET", "", None).0 == 404);
    assert!(upper_of(&short.id).is_empty());
    assert_eq!(busy.status(), "active");
    eventually("the end of the other", || busy.call("GET", "", None).0 == 404);
    assert_eq!(long.status(), "active");
}

#[test]
fn nothing_gets_out() {
    let Some(host) = host() else { return };
    let session = host.open("rw");
    let other = host.open("rw");
    other.out("sleep 305 & echo secret >/tmp/secret; echo secret >/dev/shm/secret");
    let daemon = host.daemon.child.id();
    for attempt in [
        "touch /etc/x /usr/x /x".to_owned(),
        "mount -t tmpfs none /tmp".to_owned(),
        "mount -o remount,rw /".to_owned(),
        "umount /tmp || umount -l /proc".to_owned(),
        "unshare -U true || unshare -m true || unshare -r true".to_owned(),
        "chroot /proc/1/root true".to_owned(),
        "ls /proc/1/root /proc/1/fd /proc/1/cwd/".to_owned(),
        "cat /proc/1/environ /proc/1/mem /proc/1/maps".to_owned(),
        "nsenter -t 1 -m true".to_owned(),
        format!("kill -0 {daemon}"),
        format!("ls /proc/{daemon}"),
        "cat /tmp/secret /dev/shm/secret".to_owned(),
        "ls /dev/shm/disk /dev/shm/memory".to_owned(),
        "mknod /tmp/disk b 1 0".to_owned(),
        "echo 1 >/proc/sys/kernel/panic".to_owned(),
        "hostname other".to_owned(),
        "setpriv --inh-caps +sys_admin true".to_owned(),
        "strace -f true".to_owned(),
    ] {
        let (text, error) = session.run(&format!("( {attempt} ) 2>&1"));
        assert!(error.is_some(), "{attempt}: {text}");
    }
    assert_eq!(session.out("ps -e -o comm= | grep -c sleep || :"), "0");
    // Its first process cannot be stopped or killed from inside.
    session.out("kill -9 1; kill -STOP 1; kill -TERM 1; :");
    assert_eq!(session.out("echo still"), "still");
    // Nobody outside may look into what makes sessions.
    let isolator = host.isolator();
    let status = fs::read_to_string(format!("/proc/{isolator}/status")).unwrap();
    assert!(status.contains("Seccomp:"));
    assert_eq!(session.out("grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status | tr -d ' \\t\\n'"), {
        let caps = session.out("grep CapEff /proc/self/status | cut -f2");
        assert_eq!(u64::from_str_radix(&caps, 16).unwrap() & !0x8000_05fb, 0, "{caps}");
        format!("CapEff:{caps}NoNewPrivs:1Seccomp:2")
    });
    let user = host
        .make(json!({ "workspace": { "path": host.work.path(), "mode": "rw" }, "uid": 1000, "gid": 1000 }));
    assert_eq!(
        user.out("id -u; id -G; grep CapEff /proc/self/status | cut -f2"),
        "1000\n1000\n0000000000000000"
    );
    assert_eq!(user.run("cat /etc/shadow >/dev/null 2>&1").1.unwrap().1, "1");
    let seeming = host.make(json!({
        "workspace": { "path": host.work.path(), "mode": "rw" }, "uid": 77, "gid": 78, "uid_mode": "userns", "share_net": false,
    }));
    assert_eq!(
        seeming.out("id -u; id -g; touch mine; stat -c %u mine; tail -n +3 /proc/net/dev | cut -d: -f1"),
        "77\n78\n77\n    lo"
    );
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&fs::metadata(host.path("mine")).unwrap()), 0);
}

#[test]
fn a_name_that_is_swapped_leads_nowhere_else() {
    let Some(host) = host() else { return };
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("f"), "outside").unwrap();
    let (place, link) = (host.path("place"), host.path("link"));
    fs::create_dir(&place).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::os::unix::fs::symlink(outside.path(), &link).unwrap();
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                let _ = rustix::fs::renameat_with(rustix::fs::CWD, &link, rustix::fs::CWD, &place, flags);
            }
        });
        for _ in 0..40 {
            let body =
                json!({ "workspace": { "path": host.work.path(), "mode": "ro" }, "extra_writable": [place] });
            let (status, answer) = host.try_make(body);
            if status != 201 {
                continue;
            }
            let session = Session { host: &host, id: answer["session_id"].as_str().unwrap().to_owned() };
            session.run(&format!("echo in >{}/f", outside.path().display()));
            session.delete();
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(fs::read_to_string(outside.path().join("f")).unwrap(), "outside");
}

#[test]
fn files_are_those_that_the_session_sees() {
    let Some(host) = host() else { return };
    fs::write(host.path("a"), "lower").unwrap();
    fs::write(host.path("gone"), "gone").unwrap();
    let session = host.open("overlay");
    session.out(
        "rm gone; echo upper >b; mkdir d; ln -s /etc/passwd out; ln -s ../../../../etc/passwd up; ln -s a in",
    );
    let info = |path: &str| session.call("GET", &format!("/files/info?path={path}"), None);
    // A deleted file stays deleted.
    for path in ["gone", "out", "up"] {
        let answer = host.daemon.call("GET", &session.path(&format!("/files/download?path={path}")), None);
        assert_eq!(answer.head.status, 404, "{path}: {}", String::from_utf8_lossy(&answer.body));
    }
    for path in ["in", "a", "/a", &host.path("a"), "d/../a"] {
        let answer = host.daemon.call("GET", &session.path(&format!("/files/download?path={path}")), None);
        assert_eq!(&answer.body[..], b"lower", "{path}");
    }
    assert_eq!(info("a").1["a"]["owner"], "");
    for path in ["../x", "d/../../x", &host.path("../x")] {
        let (status, answer) = info(path);
        assert_eq!((status, answer["code"].as_str()), (500, Some("RUNTIME_ERROR")), "{path}: {answer}");
    }
    session.done("POST", "/directories", Some(json!({ "/x/y": { "mode": "750" } })));
    session.done("POST", "/files/mv", Some(json!([{ "src": "a", "dest": "/x/y/a" }])));
    session.done("POST", "/files/replace", Some(json!({ "b": { "old": "upper", "new": "over" } })));
    session.done("POST", "/files/permissions", Some(json!({ "b": { "mode": "600", "owner": "root" } })));
    assert_eq!(session.out("cat x/y/a b; stat -c %a x/y b"), "lowerover\n750\n600");
    session.done("DELETE", "/files?path=b", None);
    session.done("DELETE", "/directories?path=d", None);
    let found = session.call("GET", "/files/search?path=/&pattern=a", None).1;
    assert_eq!(found.as_array().unwrap().iter().map(|one| &one["path"]).collect::<Vec<_>>(), ["x/y/a"]);
    assert!(Path::new(&host.path("a")).exists() && !Path::new(&host.path("x")).exists());

    let ro = host.open("ro");
    let (status, answer) = ro.call("POST", "/directories", Some(json!({ "n": null })));
    assert_eq!((status, answer["code"].as_str()), (500, Some("RUNTIME_ERROR")));
    assert!(answer["message"].as_str().unwrap().ends_with("denied: workspace is read-only"), "{answer}");

    for name in ["one", "two"] {
        fs::create_dir(host.path(name)).unwrap();
    }
    let several = host.make(
        json!({ "overlays": [{ "path": host.path("one") }, { "path": host.path("two"), "mode": "rw" }] }),
    );
    several.out(&format!("echo x >{}", host.path("one/f")));
    let mv = json!([{ "src": host.path("one/f"), "dest": host.path("two/f") }]);
    assert_eq!(several.call("POST", "/files/mv", Some(mv)).0, 500);
    assert_eq!(several.call("GET", &format!("/files/info?path={}", host.path("a")), None).0, 500);
    assert_eq!(several.call("GET", &format!("/files/info?path={}", host.path("one/f")), None).0, 200);
}

#[test]
fn nothing_is_left_of_sessions_however_they_end() {
    let Some(mut host) = host() else { return };
    // Everything has been used once.
    let warm = host.open("overlay");
    warm.out("true");
    warm.call("GET", "/files/info?path=.", None);
    warm.delete();
    eventually("a quiet daemon", || host.processes().len() == 2);
    std::thread::sleep(Duration::from_millis(2500));
    let (mounts, descriptors) = (host.mounts(), host.daemon.descriptors());
    for round in 0..20 {
        let session = host.open(["overlay", "rw", "ro"][round % 3]);
        session.out("sleep 306 & (setsid sleep 306 &) ; echo x >/tmp/x");
        match round % 4 {
            0 => session.delete(),
            1 => {
                session.run("kill -9 $$");
                session.delete();
            }
            2 => {
                let first = host.processes().into_iter().find(|pid| {
                    fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| {
                        status.lines().any(|line| line.starts_with("NSpid:") && line.ends_with("\t1"))
                    })
                });
                // SAFETY: a process of this test's daemon.
                unsafe { libc::kill(first.unwrap(), libc::SIGKILL) };
                eventually("its end", || session.status() == "dead");
                session.delete();
            }
            _ => {
                // SAFETY: a process of this test's daemon.
                unsafe { libc::kill(host.isolator(), libc::SIGKILL) };
                eventually("its end", || session.status() == "dead");
                session.delete();
            }
        }
        assert!(upper_of(&session.id).is_empty(), "{round}");
        eventually("the end of all processes", || !common::is_alive("sleep 306"));
    }
    host.open("rw").delete();
    eventually("as few processes", || host.processes().len() == 2);
    eventually("as few descriptors", || host.daemon.descriptors() <= descriptors);
    assert_eq!(host.mounts(), mounts);
    // The daemon's own death.
    let session = host.open("overlay");
    session.out("sleep 307 & echo x >f");
    let id = session.id.clone();
    let all = host.processes();
    host.daemon.child.kill().unwrap();
    host.daemon.child.wait().unwrap();
    eventually("the end of all processes", || !common::is_alive("sleep 307"));
    eventually("the end of all processes", || {
        all.iter().all(|pid| !Path::new(&format!("/proc/{pid}/ns")).exists())
    });
    let Some(next) = self::host() else { return };
    next.open("rw");
    assert!(upper_of(&id).is_empty());
}
