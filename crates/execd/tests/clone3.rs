//! Under a filter that answers `EPERM` to `clone3`, as old container engines have it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use common::{Daemon, eventually};
use serde_json::json;

/// Installs the filter in a child between fork and exec: system calls only.
fn forbid_clone3() -> std::io::Result<()> {
    let op = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_clone3 as u32, 0, 1),
        op(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        op(libc::BPF_RET, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: plain numbers, and a program that lives until the calls return.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The build that is released, whose C library never makes the call. That of the tests does for each thread, so it
/// cannot do without help.
fn released() -> Option<std::path::PathBuf> {
    let built = std::env::var_os("OSB_EXECD").map(std::path::PathBuf::from);
    match built {
        Some(path) => Some(path),
        None if cfg!(target_env = "musl") => Some(env!("CARGO_BIN_EXE_execd").into()),
        None => None,
    }
}

fn filtered(execd: &std::path::Path, compat: &str) -> Daemon {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(execd);
    command
        .arg("--socket")
        .arg(dir.path().join("socket"))
        .env("EXECD_LOG_FILE", dir.path().join("log"))
        .env("EXECD_CLONE3_COMPAT", compat)
        .env("EXECD_LIFECYCLE_CONFIG", dir.path().join("hooks.toml"))
        .current_dir(dir.path())
        .stdin(Stdio::null());
    // SAFETY: the function makes system calls only.
    unsafe { command.pre_exec(forbid_clone3) };
    let daemon = Daemon { child: command.spawn().unwrap(), dir };
    eventually("the socket", || UnixStream::connect(daemon.socket()).is_ok());
    daemon
}

/// Ends well where threads can be started.
const THREADS: &str = "python3 -c 'import threading; t = threading.Thread(target=print, args=(\"in a thread\",)); \
                       t.start(); t.join()'";

#[test]
fn the_daemon_starts_programs_and_threads_of_its_own_all_the_same() {
    let Some(execd) = released() else { return eprintln!("skipped: OSB_EXECD names no released build") };
    let daemon = filtered(&execd, "0");
    for command in ["true", "/bin/true | cat", "bash -c 'sleep 0 & wait; echo $(echo sub)'"] {
        assert_eq!(daemon.run(command).check().exit_code(), 0, "{command}");
    }
    // Threads of the daemon: files are read in them.
    let written = daemon.run("echo x > file; echo $?");
    assert_eq!(written.stdout(), "0\n");
    let answer = daemon.call("GET", "/files/info?path=file", None);
    assert_eq!(answer.head.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    let background = daemon.post(json!({"command": "echo back", "background": true}));
    assert_eq!(daemon.wait_ended(background.id())["exit_code"], 0);
}

#[test]
fn programs_that_need_enosys_get_it() {
    let execd = std::path::Path::new(env!("CARGO_BIN_EXE_execd"));
    for compat in ["1", "on", "reexec"] {
        let daemon = filtered(execd, compat);
        let run = daemon.run(THREADS);
        assert_eq!(
            (run.stdout().as_str(), run.exit_code()),
            ("in a thread\n", 0),
            "{compat}: {:?}",
            run.events
        );
        assert_eq!(daemon.run("env").stdout().matches("COMPAT_APPLIED").count(), 0);
    }
    // Without help they do not work, or this would prove nothing.
    if let Some(execd) = released() {
        assert_ne!(filtered(&execd, "off").run(THREADS).exit_code(), 0, "python3 does without help here");
    }
}

#[test]
fn other_words_end_the_start() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_execd")).env("EXECD_CLONE3_COMPAT", "maybe").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("EXECD_CLONE3_COMPAT"), "{output:?}");
}
