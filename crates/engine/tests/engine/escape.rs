//! Attempts to get out of a sandbox, made by its root.

use std::ffi::CString;
use std::fs;
use std::io;
use std::process::ExitCode;

use crate::Test;
use crate::support::{empty_image, inside, with_engine};

pub(crate) const TESTS: &[Test] = &[("escape_attempts_fail", escape_attempts_fail)];

fn escape_attempts_fail() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    let path = secret.path().to_str().unwrap().to_owned();
    with_engine(
        |_| {},
        async |mut bed| {
            let image = empty_image();
            let mut request = inside(&image, &["attack"]);
            request.env.push(("SECRET".into(), path.clone()));
            let (ended, log) = bed.run(request).await;
            assert_eq!(ended.exit_code, Some(0), "{log}");
            assert!(log.lines().count() > 40, "{log}");
            bed
        },
    );
}

/// Calls the kernel and expects one of these errors.
fn refused(name: &str, errors: &[i32], number: libc::c_long, args: [libc::c_long; 5]) -> bool {
    // SAFETY: the arguments are numbers, or pointers to strings that outlive the call.
    let result = unsafe { libc::syscall(number, args[0], args[1], args[2], args[3], args[4]) };
    let errno = if result < 0 { io::Error::last_os_error().raw_os_error().unwrap() } else { 0 };
    let ok = errors.contains(&errno);
    println!("{} {name}: {errno}", if ok { "refused" } else { "BREACH" });
    ok
}

fn fails<T>(name: &str, result: io::Result<T>) -> bool {
    match result {
        Ok(_) => {
            println!("BREACH {name}");
            false
        }
        Err(error) => {
            println!("refused {name}: {error}");
            true
        }
    }
}

fn write(path: &str, text: &str) -> io::Result<()> {
    use std::io::Write;
    fs::File::options().write(true).open(path)?.write_all(text.as_bytes())
}

/// Runs inside. `root` says that root inside is root outside.
pub(crate) fn attack(root: bool) -> ExitCode {
    const P: &[i32] = &[libc::EPERM];
    const N: &[i32] = &[libc::ENOSYS];
    let string = |text: &str| CString::new(text).unwrap();
    let (tmpfs, tmp, proc, dev) = (string("tmpfs"), string("/tmp"), string("/proc"), string("/tmp/disk"));
    let p = |text: &CString| text.as_ptr() as libc::c_long;
    let cwd = libc::c_long::from(libc::AT_FDCWD);
    let mut ok = true;

    for (name, errors, number, args) in [
        ("mount", P, libc::SYS_mount, [p(&tmpfs), p(&tmp), p(&tmpfs), 0, 0]),
        ("bind", P, libc::SYS_mount, [p(&proc), p(&tmp), 0, libc::MS_BIND as i64, 0]),
        ("umount", P, libc::SYS_umount2, [p(&proc), 2, 0, 0, 0]),
        ("pivot_root", P, libc::SYS_pivot_root, [p(&tmp), p(&tmp), 0, 0, 0]),
        ("fsopen", P, libc::SYS_fsopen, [p(&tmpfs), 0, 0, 0, 0]),
        ("open_tree", P, libc::SYS_open_tree, [cwd, p(&tmp), 1, 0, 0]),
        ("mount_setattr", P, libc::SYS_mount_setattr, [cwd, p(&tmp), 0, 0, 0]),
        ("unshare user", P, libc::SYS_unshare, [i64::from(libc::CLONE_NEWUSER), 0, 0, 0, 0]),
        ("unshare mount", P, libc::SYS_unshare, [i64::from(libc::CLONE_NEWNS), 0, 0, 0, 0]),
        ("clone3", N, libc::SYS_clone3, [0, 0, 0, 0, 0]),
        ("setns", P, libc::SYS_setns, [0, 0, 0, 0, 0]),
        ("keyctl", P, libc::SYS_keyctl, [0, -3, 0, 0, 0]),
        ("bpf", P, libc::SYS_bpf, [0, 0, 0, 0, 0]),
        ("perf", P, libc::SYS_perf_event_open, [0, 0, 0, 0, 0]),
        ("userfaultfd", P, libc::SYS_userfaultfd, [0, 0, 0, 0, 0]),
        ("io_uring", N, libc::SYS_io_uring_setup, [8, 0, 0, 0, 0]),
        ("open_by_handle", P, libc::SYS_open_by_handle_at, [cwd, 0, 0, 0, 0]),
        ("kexec", P, libc::SYS_kexec_load, [0, 0, 0, 0, 0]),
        ("module", P, libc::SYS_finit_module, [0, 0, 0, 0, 0]),
        ("reboot", P, libc::SYS_reboot, [0, 0, 0, 0, 0]),
        ("syslog", P, libc::SYS_syslog, [3, 0, 0, 0, 0]),
        ("clock", P, libc::SYS_clock_settime, [0, 0, 0, 0, 0]),
        ("hostname", P, libc::SYS_sethostname, [p(&tmp), 2, 0, 0, 0]),
        ("pidfd_getfd", P, libc::SYS_pidfd_getfd, [0, 0, 0, 0, 0]),
        ("mknod disk", P, libc::SYS_mknodat, [cwd, p(&dev), i64::from(libc::S_IFBLK | 0o600), 254 << 8, 0]),
        ("raw socket", P, libc::SYS_socket, [libc::AF_INET.into(), libc::SOCK_RAW.into(), 1, 0, 0]),
        ("packet socket", &[libc::EAFNOSUPPORT], libc::SYS_socket, [libc::AF_PACKET.into(), 3, 0, 0, 0]),
        ("vsock", &[libc::EAFNOSUPPORT], libc::SYS_socket, [libc::AF_VSOCK.into(), 1, 0, 0, 0]),
        ("alg", &[libc::EAFNOSUPPORT], libc::SYS_socket, [libc::AF_ALG.into(), 5, 0, 0, 0]),
        ("nice", &[libc::EACCES, libc::EPERM], libc::SYS_setpriority, [0, 0, -5, 0, 0]),
    ] {
        ok &= refused(name, errors, number, args);
    }

    for path in [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sysrq-trigger",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/kernel/uevent_helper",
    ] {
        ok &= fails(&format!("write {path}"), write(path, "1"));
    }
    for path in ["/proc/kcore", "/proc/kmsg", "/proc/vmallocinfo", "/proc/timer_list"] {
        let read = fs::File::open(path).and_then(|mut file| {
            let mut byte = [0];
            match io::Read::read(&mut file, &mut byte)? {
                0 => Err(io::Error::other("empty")),
                _ => Ok(()),
            }
        });
        ok &= fails(&format!("read {path}"), read);
    }
    for path in ["/proc/kallsyms", "/proc/interrupts", "/proc/keys", "/proc/cmdline"] {
        let text = fs::read(path).unwrap_or_default();
        println!("{} {path}: {} bytes", if text.is_empty() { "masked" } else { "BREACH" }, text.len());
        ok &= text.is_empty();
    }
    for path in ["/dev/null2", "/dev/sda", "/sys/x"] {
        ok &= fails(&format!("make {path}"), fs::write(path, "x"));
    }
    if let Ok(secret) = std::env::var("SECRET") {
        for prefix in ["", "/proc/1/root", "/proc/self/root/../..", "/proc/1/cwd/.."] {
            ok &= fails(&format!("read {prefix}{secret}"), fs::read(format!("{prefix}{secret}")));
        }
        for fd in 0..64 {
            let path = format!("/proc/1/fd/{fd}/{secret}");
            ok &= fs::read(path).is_err();
        }
    }
    // The groups whose limits hold the sandbox; their files belong to the host's root. Where that is root inside, it
    // is the daemon that keeps its descriptors from being looked at.
    if !root && let Ok(entries) = fs::read_dir("/proc/1/fd") {
        for entry in entries.flatten() {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            let target = target.to_string_lossy().into_owned();
            if target.contains("cgroup") || target.contains("tasks") || target.contains("memory.") {
                ok &= fails(
                    &format!("write to init's {target}"),
                    fs::File::options().write(true).open(entry.path()),
                );
            }
        }
    }
    ok &= fails("write init's memory limit", write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1G"));
    ok &= fails("write the memory limit", write("/sys/fs/cgroup/memory.max", "max"));
    ok &= fails("raise the out-of-memory preference", write("/proc/self/oom_score_adj", "-900"));
    ok &= fails("overwrite the daemon", fs::File::options().write(true).open("/proc/1/exe"));
    ok &= identities(root);
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the process is, as the kernel sees it.
fn identities(root: bool) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned();
    let map = fs::read_to_string("/proc/self/uid_map").unwrap();
    let host_id: u32 = map.split_whitespace().nth(1).unwrap().parse().unwrap();
    let mut ok = true;
    for (name, have, want) in [
        ("no_new_privs", field("NoNewPrivs:"), "1".to_owned()),
        ("seccomp", field("Seccomp:"), "2".to_owned()),
        ("bounding", field("CapBnd:"), "00000000800405fb".to_owned()),
        ("effective", field("CapEff:"), "00000000800405fb".to_owned()),
        ("permitted", field("CapPrm:"), "00000000800405fb".to_owned()),
        ("inheritable", field("CapInh:"), "0000000000000000".to_owned()),
        ("ambient", field("CapAmb:"), "0000000000000000".to_owned()),
        ("namespace depth of pids", field("NSpid:").split_whitespace().count().to_string(), "1".to_owned()),
        ("root is the host's", (host_id == 0).to_string(), root.to_string()),
    ] {
        println!("{} {name}: {have}", if have == want { "good" } else { "BREACH" });
        ok &= have == want;
    }
    ok
}
