//! Programs that run inside the tests' sandboxes.

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;
use std::time::Duration;

pub(crate) fn main(args: &[String]) -> ExitCode {
    match args[0].as_str() {
        "describe" => describe(),
        "sleep" => sleep(),
        "forks" => forks(args[1].parse().unwrap()),
        "greet" => greet(&args[1]),
        "attack" => crate::escape::attack(args.iter().any(|arg| arg == "--root")),
        "eat" => eat(args[1].parse().unwrap()),
        "eat-child" => eat_child(&args[1]),
        "bomb" => bomb(),
        "storm" => storm(),
        "spin" => spin(args[1].parse().unwrap()),
        other => panic!("no program '{other}'"),
    }
}

fn sleep() -> ExitCode {
    std::thread::sleep(Duration::from_secs(3600));
    ExitCode::SUCCESS
}

fn status(field: &str) -> String {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    text.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

fn describe() -> ExitCode {
    use rustix::process::{Resource, getrlimit};
    println!("hostname {}", fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim());
    println!("file /etc/hostname {}", fs::read_to_string("/etc/hostname").unwrap().trim());
    for (name, value) in std::env::vars() {
        println!("env {name} {value}");
    }
    println!(
        "uid {} gid {} groups [{}]",
        rustix::process::getuid(),
        rustix::process::getgid(),
        status("Groups:")
    );
    println!("pid1 {}", std::os::unix::process::parent_id());
    println!("tmp {:o}", fs::metadata("/tmp").unwrap().permissions().mode() & 0o7777);
    println!("umask {}", status("Umask:"));
    let files = getrlimit(Resource::Nofile);
    println!("nofile {} {}", files.current.unwrap(), files.maximum.unwrap());
    println!("core {}", getrlimit(Resource::Core).maximum.unwrap());
    let ignored = u64::from_str_radix(&status("SigIgn:"), 16).unwrap();
    // The Rust runtime ignores SIGPIPE itself; of what was inherited only it may be ignored.
    println!(
        "signals {}",
        if ignored & !(1 << 12) == 0 { "default".to_owned() } else { format!("{ignored:x}") }
    );
    let dir = fs::File::open("/proc/self/fd").unwrap();
    let mut fds: Vec<i32> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .filter(|fd| *fd < dir.as_raw_fd())
        .collect();
    fds.sort_unstable();
    println!("fds {}", fds.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
    let pty = fs::File::options().read(true).write(true).open("/dev/ptmx");
    println!("pty {}", pty.map_or_else(|error| error.to_string(), |_| "ok".to_owned()));
    let shm = fs::write("/dev/shm/x", "x").and_then(|()| fs::write("/tmp/x", "x"));
    println!("shm {}", shm.map_or_else(|error| error.to_string(), |()| "ok".to_owned()));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
    let memory = groups.lines().find(|line| line.contains(":memory:") || line.starts_with("0::")).unwrap();
    println!("cgroup {}", memory.rsplit(':').next().unwrap().trim_start_matches("/.."));
    println!("{}", fs::read_to_string("/etc/hosts").unwrap());
    ExitCode::from(7)
}

fn forks(count: u32) -> ExitCode {
    let children: Vec<_> = (0..count)
        .map(|_| std::process::Command::new("/proc/self/exe").args(["__inside", "sleep"]).spawn().unwrap())
        .collect();
    println!("{} children", children.len());
    sleep()
}

fn greet(address: &str) -> ExitCode {
    let listener = std::net::TcpListener::bind(address).unwrap();
    println!("listening");
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"hello").unwrap();
    }
}

fn eat(megabytes: usize) -> ExitCode {
    let mut kept = Vec::new();
    for _ in 0..megabytes {
        let mut block = vec![1u8; 1 << 20];
        block.fill(2);
        kept.push(block);
    }
    println!("ate {megabytes}");
    std::hint::black_box(&kept);
    ExitCode::SUCCESS
}

/// Lets a child eat and tells how it ended.
fn eat_child(megabytes: &str) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;
    let status =
        std::process::Command::new("/proc/self/exe").args(["__inside", "eat", megabytes]).status().unwrap();
    println!("child signal {:?}", status.signal());
    ExitCode::SUCCESS
}

fn bomb() -> ExitCode {
    let mut children = Vec::new();
    let error = loop {
        match std::process::Command::new("/proc/self/exe").args(["__inside", "sleep"]).spawn() {
            Ok(child) => children.push(child),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    println!("stopped after {}", children.len());
    ExitCode::SUCCESS
}

/// Keeps a processor busy and prints how many milliseconds of it were had.
fn spin(milliseconds: u64) -> ExitCode {
    use rustix::time::{ClockId, clock_gettime};
    let begin = std::time::Instant::now();
    while begin.elapsed() < Duration::from_millis(milliseconds) {
        std::hint::black_box(milliseconds);
    }
    let used = clock_gettime(ClockId::ProcessCPUTime);
    println!("{}", used.tv_sec * 1000 + used.tv_nsec / 1_000_000);
    ExitCode::SUCCESS
}

/// As many processes as may be, all of them trying for more.
fn storm() -> ! {
    loop {
        // SAFETY: the process has one thread, and the child does the same as its parent.
        unsafe { libc::fork() };
    }
}
