//! `execd bootstrap`, in the place of the script.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::{eventually, is_alive};

/// The real daemon, at a socket of the test's: the role itself names no place to listen at.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let place = Self { dir };
        let script = format!(
            "#!/bin/sh\nexport EXECD_LOG_FILE={log}\nexec {execd} --socket {socket} \"$@\"\n",
            log = place.path("log").display(),
            socket = place.path("socket").display(),
            execd = env!("CARGO_BIN_EXE_execd"),
        );
        place.program("execd", &script);
        std::fs::create_dir(place.path("home")).unwrap();
        std::fs::create_dir(place.path("tmp")).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_execd"));
        command
            .arg("bootstrap")
            .args(args)
            .env("EXECD", self.path("execd"))
            .env("EXECD_ENVS", self.path("kept/env"))
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.path("tmp"))
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
        let Output { status, stdout, stderr } =
            self.command(args).envs(env.iter().copied()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        // Nothing of a report is left behind.
        assert_eq!(std::fs::read_dir(self.path("tmp")).unwrap().count(), 0);
        (status.code().unwrap_or(-1), text(&stdout), text(&stderr))
    }
}

#[test]
fn the_command_is_what_was_asked_for_and_its_status_ours() {
    let place = Place::new();
    let (code, out, _) = place.run(&["sh", "-c", "echo \"$@\"; exit 3", "x", "a b", "c"], &[]);
    assert_eq!((code, out.as_str()), (3, "a b c\n"));
    assert_eq!(place.run(&["-c", "echo one &&", "echo two"], &[]).1, "one\ntwo\n");
    assert_eq!(place.run(&["echo", "x"], &[("BOOTSTRAP_CMD", "echo wins; exit 4")]).0, 4);
    assert_eq!(place.run(&[], &[("BOOTSTRAP_SHELL", "/bin/true")]).0, 0);
    assert_eq!(place.run(&["-c", "x"], &[("BOOTSTRAP_SHELL", "/bin/echo")]).1, "-c x\n");
    assert_eq!(place.run(&["/no/such/program"], &[]).0, 127);
    assert_eq!(place.run(&["sh", "-c", "kill -9 $$"], &[]).0, 137);
    // A command that ends takes the daemon along.
    let pattern = place.path("socket").display().to_string();
    assert!(!is_alive(&pattern));
}

#[test]
fn the_daemon_runs_beside_the_command() {
    let place = Place::new();
    let script = "while [ ! -S socket ]; do sleep 0.02; done; echo up; ls -l kept/env | cut -c1; env";
    let env = [("EXECD_ACCESS_TOKEN", "t0ken"), ("OPENSANDBOX_LIFECYCLE", "{}")];
    let (code, out, err) = place.run(&["sh", "-c", script], &env);
    assert_eq!(code, 0, "{err}");
    assert!(out.starts_with("up\n-\n"), "{out}");
    assert!(out.contains(&format!("EXECD_ENVS={}", place.path("kept/env").display())), "{out}");
    for hidden in ["t0ken", "LIFECYCLE", "_EXECD_"] {
        assert!(!out.contains(hidden), "{out}");
    }
}

#[test]
fn hooks_come_before_the_command() {
    let place = Place::new();
    let hooks = r#"{"preStart":{"command":["sh","-c","sleep 0.2; echo hook >> order"]}}"#;
    let (code, _, err) =
        place.run(&["sh", "-c", "echo command >> order"], &[("OPENSANDBOX_LIFECYCLE", hooks)]);
    assert_eq!((code, place.read("order").as_str()), (0, "hook\ncommand\n"), "{err}");
    // It was kept, and counts again where only the file tells of it.
    assert!(place.path("home/.execd/lifecycle.toml").exists());
    assert_eq!(place.run(&["sh", "-c", "echo command >> order"], &[]).0, 0);
    assert_eq!(place.read("order"), "hook\ncommand\nhook\ncommand\n");
    for hooks in [r#"{"preStart":{"command":["sh","-c","echo why; exit 9"]}}"#, r#"{"unknown":1}"#] {
        let (code, out, err) = place.run(&["echo", "command"], &[("OPENSANDBOX_LIFECYCLE", hooks)]);
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
    }
}

#[test]
fn daemons_that_report_nonsense_or_nothing_fail_the_start() {
    let place = Place::new();
    let env = [("EXECD_LIFECYCLE_CONFIG", "any")];
    for (script, code) in [
        ("exit 17", 17),
        ("exit 0", 1),
        ("echo running 0 >> $2; exec sleep 60", 1),
        ("echo running 99999999999 >> $2; exec sleep 60", 1),
        ("echo what >> $2; exec sleep 60", 1),
        ("rm $2; exec sleep 60", 1),
        ("echo done 42 >> $2; exec sleep 60", 42),
        ("echo done 400 >> $2; exec sleep 60", 1),
    ] {
        place.program("execd", &format!("#!/bin/sh\n{script}\n"));
        let (status, out, err) = place.run(&["echo", "command"], &env);
        assert_eq!((status, out.as_str()), (code, ""), "{script}: {err}");
    }
}

fn stop(mut child: Child) -> Option<i32> {
    // SAFETY: a signal to our own child, which has not been reaped.
    unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
    child.wait().unwrap().code()
}

#[test]
fn a_stop_reaches_the_command_and_its_status_counts() {
    let place = Place::new();
    let script = "trap 'echo bye > bye; exit 5' TERM; touch up; while :; do sleep 0.02; done";
    let child = place.command(&["sh", "-c", script]).spawn().unwrap();
    eventually("the command", || place.path("up").exists());
    assert_eq!(stop(child), Some(5));
    assert_eq!(place.read("bye"), "bye\n");
    // While a hook holds the start up.
    let hooks = r#"{"preStart":{"command":["sh","-c","touch hooked; sleep 300"],"timeoutSeconds":300}}"#;
    let child = place.command(&["touch", "never"]).env("OPENSANDBOX_LIFECYCLE", hooks).spawn().unwrap();
    eventually("the hook", || place.path("hooked").exists());
    assert_eq!(stop(child), Some(143));
    assert!(!place.path("never").exists());
    assert_eq!(std::fs::read_dir(place.path("tmp")).unwrap().count(), 0);
}

#[test]
fn a_script_is_sourced_first_and_what_it_exports_counts() {
    let place = Place::new();
    std::fs::write(place.path("pre"), "export A='from script' EXECD_ENVS=/other\nB=not-exported\n").unwrap();
    let script = "echo $A $B $EXECD_ENVS $_EXECD_BOOTSTRAP_SOURCED \"$@\"";
    let env = [("EXECD_BOOTSTRAP_PRE_SCRIPT", "pre")];
    let (code, out, err) = place.run(&["sh", "-c", script, "x", "a  b"], &env);
    assert_eq!((code, out.as_str()), (0, "from script /other a  b\n"), "{err}");
    let env = [("EXECD_BOOTSTRAP_PRE_SCRIPT", "/no/such")];
    let (code, out, err) = place.run(&["echo", "x"], &env);
    assert_eq!((code, out.as_str()), (0, "x\n"));
    assert!(err.contains("EXECD_BOOTSTRAP_PRE_SCRIPT"), "{err}");
}

#[test]
fn as_init_the_daemon_takes_our_place() {
    let place = Place::new();
    for on in ["1", "true", "Yes", "on"] {
        let (code, out, err) = place.run(&["-c", "ps -o args= -p $PPID; exit 6"], &[("EXECD_INIT", on)]);
        assert_eq!(code, 6, "{err}");
        assert!(out.contains("--init -- ") && out.contains("--socket"), "{out}");
    }
    let (_, out, _) = place.run(&["-c", "ps -o args= -p $PPID"], &[("EXECD_INIT", "0")]);
    assert!(out.contains("bootstrap"), "{out}");
}

#[test]
fn the_proxys_authority_is_trusted_everywhere() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let place = Place::new();
    let log = place.path("calls").display().to_string();
    for tool in ["bin/update-ca-certificates", "bin/certutil", "java/bin/keytool"] {
        place.program(tool, &format!("#!/bin/sh\necho {} \"$@\" >> {log}\n", Path::new(tool).display()));
    }
    std::fs::create_dir_all(place.path("java/lib/security")).unwrap();
    std::fs::write(place.path("java/lib/security/cacerts"), "").unwrap();
    // In mounts of its own: the paths are those of a container.
    let script = "mkdir -p /opt/opensandbox /usr/local/share/ca-certificates && \
                  mount -t tmpfs none /opt/opensandbox && mount -t tmpfs none /usr/local/share/ca-certificates && \
                  (sleep 0.5; echo proxy-certificate > /opt/opensandbox/mitmproxy-ca-cert.pem) & exec \"$@\"";
    let show = "env | grep -E 'CA|SSL'; cat /usr/local/share/ca-certificates/*; \
                tail -1 $SSL_CERT_FILE; wc -l < $SSL_CERT_FILE; echo end";
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", place.path("bin").display());
    let mut command = Command::new("unshare");
    let inner = place.command(&["sh", "-c", show]);
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    command.arg(inner.get_program()).args(inner.get_args());
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
        .env("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT", "yes")
        .env("PATH", path)
        .env("JAVA_HOME", place.path("java"))
        .current_dir(place.dir.path());
    let output = command.output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && out.ends_with("end\n"), "{out}{err}");
    assert!(out.contains("NODE_EXTRA_CA_CERTS=/opt/opensandbox/mitmproxy-ca-cert.pem\n"), "{out}");
    assert!(out.matches("proxy-certificate\n").count() >= 2, "{out}");
    let calls = place.read("calls");
    for call in [
        "bin/update-ca-certificates",
        "bin/certutil -A -d sql:",
        "-n opensandbox-mitmproxy -t C,, -i /opt/opensandbox/mitmproxy-ca-cert.pem",
        "java/bin/keytool -importcert -alias opensandbox-mitmproxy",
    ] {
        assert!(calls.contains(call), "{call}: {calls}");
    }
}
