//! Starts a program with `clone(CLONE_VM | CLONE_VFORK)`: the child borrows the parent's memory until its exec, so
//! the cost does not grow with the daemon, and it can tell in that memory what went wrong.
//!
//! The older `clone` is used, not `clone3`: it knows all that is needed here, and there are system call filters
//! in the field that answer `EPERM` to the newer call.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::Duration;

use osb_confine::seccomp::Filter;

use super::signals;
use crate::accounts::Identity;

/// Soft and hard limit of open files for what users run.
const OPEN_FILES: (u64, u64) = (65_536, 1_048_576);
/// How often and how long to wait for a program that was just written.
const BUSY_RETRIES: usize = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Stack of the child until its exec. Only the touched pages cost memory.
const STACK: usize = 64 << 10;

thread_local! {
    /// Stack of this thread's last child, for the next one: mapping and unmapping it each time costs microseconds.
    static SPARE_STACK: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A program ready to be started.
#[derive(Debug)]
pub struct Program {
    /// Paths to try in turn; the first that exists and may be executed is taken.
    pub candidates: Vec<CString>,
    /// Arguments, with the program's name in front.
    pub argv: Vec<CString>,
    /// `NAME=value` each.
    pub env: Vec<CString>,
    /// Working directory, entered as the new user.
    pub cwd: CString,
    /// User to become; `None` stays.
    pub identity: Option<Identity>,
    /// Mark by which [`super::tree`] finds everything that descends from this program.
    pub tag: Option<u64>,
}

/// Descriptors of the child's 0, 1 and 2.
#[derive(Debug, Clone, Copy)]
pub struct Stdio<'a> {
    /// Standard input.
    pub stdin: BorrowedFd<'a>,
    /// Standard output.
    pub stdout: BorrowedFd<'a>,
    /// Standard error.
    pub stderr: BorrowedFd<'a>,
}

/// A started child. The status must be collected through the descriptor.
#[derive(Debug)]
pub struct Spawned {
    /// Process id, also its process group and session.
    pub pid: i32,
    /// Descriptor of the process.
    pub pidfd: OwnedFd,
}

/// Why a program could not be started.
#[derive(Debug)]
pub struct SpawnError {
    /// The system's error number.
    pub errno: i32,
    /// For people; names the step and the program.
    pub message: String,
}

impl std::fmt::Display for SpawnError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for SpawnError {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Clone,
    Session,
    Limits,
    Descriptors,
    Identity,
    Directory,
    Exec,
}

/// What the child reads, prepared before the clone: the child must not allocate.
struct Plan<'a> {
    program: &'a Program,
    argv: *const *const c_char,
    env: *const *const c_char,
    stdio: [RawFd; 3],
    cgroup: &'a [RawFd],
    open_files: libc::rlimit64,
    /// Signals that this process ignores and an exec would pass on.
    ignored: &'a [c_int],
    /// This process comes before others; what it starts must not.
    demote: bool,
    place: Place,
    /// What this process may call and the program may not.
    filter: Option<&'a Filter>,
    switch: bool,
    failed: Option<(Step, i32)>,
}

/// Starts `program` in a session of its own. Returns when its exec has succeeded or failed, which takes as long
/// as the file system takes to hand out the program: call it where that may block.
///
/// `cgroup` are descriptors into which the child writes `0` to move itself.
///
/// # Errors
/// The program cannot be started; nothing is left behind.
pub fn spawn(program: &Program, stdio: Stdio<'_>, cgroup: &[RawFd]) -> Result<Spawned, SpawnError> {
    spawn_with(program, stdio, cgroup, Place::Session, None)
}

/// As [`spawn`], under a system call filter. This process must have given up new privileges.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_under(
    filter: Option<&Filter>,
    program: &Program,
    stdio: Stdio<'_>,
    cgroup: &[RawFd],
) -> Result<Spawned, SpawnError> {
    spawn_with(program, stdio, cgroup, Place::Session, filter)
}

/// As [`spawn`], on a terminal that becomes the controlling one of the program's session.
///
/// # Errors
/// As [`spawn`]; also when the terminal controls another session.
pub fn spawn_on_terminal(
    program: &Program,
    terminal: BorrowedFd<'_>,
    cgroup: &[RawFd],
) -> Result<Spawned, SpawnError> {
    let stdio = Stdio { stdin: terminal, stdout: terminal, stderr: terminal };
    spawn_with(program, stdio, cgroup, Place::Terminal, None)
}

/// As [`spawn`], in this process's session, in a group of its own which comes to the foreground of the session's
/// terminal, if there is one.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_in_group(program: &Program, stdio: Stdio<'_>) -> Result<Spawned, SpawnError> {
    spawn_with(program, stdio, &[], Place::Group, None)
}

/// Where a program belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In a session of its own.
    Session,
    /// In a session of its own which standard input, a terminal, is to control.
    Terminal,
    /// In a group of its own.
    Group,
}

fn spawn_with(
    program: &Program,
    stdio: Stdio<'_>,
    cgroup: &[RawFd],
    place: Place,
    filter: Option<&Filter>,
) -> Result<Spawned, SpawnError> {
    for _ in 0..BUSY_RETRIES {
        match spawn_once(program, stdio, cgroup, place, filter) {
            // A child of another thread holds the file open for writing until its own exec, a matter of
            // microseconds; nothing tells when that is over.
            Err(error) if error.errno == libc::ETXTBSY => std::thread::sleep(BUSY_PAUSE),
            result => return result,
        }
    }
    spawn_once(program, stdio, cgroup, place, filter)
}

fn spawn_once(
    program: &Program,
    stdio: Stdio<'_>,
    cgroup: &[RawFd],
    place: Place,
    filter: Option<&Filter>,
) -> Result<Spawned, SpawnError> {
    let facts = facts();
    let argv = pointers(&program.argv);
    let env = pointers(&program.env);
    let mut plan = Plan {
        program,
        argv: argv.as_ptr(),
        env: env.as_ptr(),
        stdio: [stdio.stdin.as_raw_fd(), stdio.stdout.as_raw_fd(), stdio.stderr.as_raw_fd()],
        cgroup,
        open_files: facts.open_files,
        ignored: &facts.ignored,
        demote: facts.first_served,
        place,
        filter,
        switch: program.identity.as_ref().is_some_and(|identity| !facts.runs_as(identity)),
        failed: None,
    };
    // Taken out of its place, so that nobody else can use it meanwhile.
    let mut stack = SPARE_STACK.take();
    stack.reserve_exact(STACK);
    // SAFETY: the offset is inside the allocation of at least STACK bytes.
    let top = unsafe { stack.as_mut_ptr().add(STACK) };
    let top = top.wrapping_sub(top.addr() % 16);
    let mut pidfd: c_int = -1;

    let blocked = signals::Blocked::new();
    // SAFETY: CLONE_VFORK suspends this thread until the child has left `plan`, `stack` and this thread's own
    // storage by exec or exit, so nothing of them is used by two at once. `run_child` restricts itself to system
    // calls. The signals are blocked, so no handler runs on the shared memory.
    let pid = unsafe {
        libc::clone(
            run_child,
            top.cast(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD,
            (&raw mut plan).cast(),
            &raw mut pidfd,
            std::ptr::null_mut::<c_void>(),
            std::ptr::null_mut::<c_void>(),
        )
    };
    let clone_error = io::Error::last_os_error();
    drop(blocked);
    SPARE_STACK.set(stack);

    if pid < 0 {
        return Err(explain(program, Step::Clone, clone_error.raw_os_error().unwrap_or(libc::EAGAIN)));
    }
    let pidfd = if pidfd >= 0 {
        // SAFETY: the kernel has just made this descriptor for us.
        unsafe { OwnedFd::from_raw_fd(pidfd) }
    } else {
        // Kernels before 5.2 ignore the flag. The pid cannot be taken by another process before it is reaped.
        open_pidfd(pid).map_err(|error| {
            // SAFETY: plain calls on our own unreaped child.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            explain(program, Step::Clone, error.raw_os_error().unwrap_or(libc::EAGAIN))
        })?
    };
    match plan.failed {
        None => Ok(Spawned { pid, pidfd }),
        Some((step, errno)) => {
            // The child has left by `_exit`; only its status is to be collected.
            let _ = super::exit::wait_blocking(&pidfd);
            Err(explain(program, step, errno))
        }
    }
}

/// A descriptor of a running process.
pub fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain(std::iter::once(std::ptr::null())).collect()
}

extern "C" fn run_child(plan: *mut c_void) -> c_int {
    // SAFETY: the parent passed a `Plan` that lives until this child leaves its memory, and is suspended.
    let plan = unsafe { &mut *plan.cast::<Plan<'_>>() };
    plan.failed = Some(match prepare_child(plan) {
        Ok(()) => (Step::Exec, execute(plan)),
        Err(failed) => failed,
    });
    // SAFETY: leaves without running anything of the parent's.
    unsafe { libc::_exit(127) }
}

/// Everything between clone and exec. System calls only: the wrappers of the C library for identities would
/// signal the parent's other threads.
fn prepare_child(plan: &Plan<'_>) -> Result<(), (Step, i32)> {
    // SAFETY: system calls whose pointers refer to `plan`, which outlives them.
    unsafe {
        if plan.place == Place::Group {
            check(Step::Session, libc::syscall(libc::SYS_setpgid, 0, 0))?;
        } else {
            check(Step::Session, i64::from(libc::setsid()))?;
        }
        for &fd in plan.cgroup {
            check(Step::Limits, libc::syscall(libc::SYS_write, fd, c"0".as_ptr(), 1usize))?;
        }
        for (target, &fd) in (0..).zip(&plan.stdio) {
            // The sources are never 0, 1 or 2 (see `inherited`), so no duplicate overwrites one.
            check(Step::Descriptors, i64::from(libc::dup2(fd, target)))?;
        }
        match plan.place {
            Place::Session => {}
            Place::Terminal => check(Step::Session, libc::syscall(libc::SYS_ioctl, 0, libc::TIOCSCTTY, 0))?,
            Place::Group => {
                let group = libc::getpid();
                // Commonly there is no terminal.
                libc::syscall(libc::SYS_ioctl, 0, libc::TIOCSPGRP, &raw const group);
            }
        }
        for &signal in plan.ignored {
            signals::set_default(signal);
        }
        if plan.demote {
            check(Step::Limits, libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, 0))?;
        }
        libc::umask(0o022);
        set_limit(libc::RLIMIT_NOFILE, plan.open_files);
        set_limit(libc::RLIMIT_CORE, libc::rlimit64 { rlim_cur: 0, rlim_max: 0 });
        if let Some(tag) = plan.program.tag {
            super::tree::apply_tag(tag);
        }
        if plan.switch
            && let Some(identity) = &plan.program.identity
        {
            let groups = &identity.groups;
            check(Step::Identity, libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()))?;
            let (uid, gid) = (identity.uid, identity.gid);
            check(Step::Identity, libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
            check(Step::Identity, libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
        }
        if let Some(filter) = plan.filter
            && let Err(error) = filter.install()
        {
            return Err((Step::Limits, error.raw_os_error().unwrap_or(libc::EINVAL)));
        }
        check(Step::Directory, libc::syscall(libc::SYS_chdir, plan.program.cwd.as_ptr()))?;
        let none = 0u64;
        let unblock = libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const none,
            std::ptr::null_mut::<u64>(),
            size_of::<u64>(),
        );
        check(Step::Session, unblock)
    }
}

/// Tries the candidates as `execvp` does; gives the error that says most.
fn execute(plan: &Plan<'_>) -> i32 {
    let mut result = libc::ENOENT;
    let several = plan.program.candidates.len() > 1;
    for candidate in &plan.program.candidates {
        if several && is_absent(candidate) {
            continue;
        }
        // SAFETY: the three pointers are to strings and null-terminated arrays that live in the parent.
        let _ = unsafe { libc::execve(candidate.as_ptr(), plan.argv, plan.env) };
        match errno() {
            libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP => {}
            libc::EACCES => result = libc::EACCES,
            other => return other,
        }
    }
    result
}

/// Whether nothing has that name. Asking costs a fifth of trying in vain.
fn is_absent(path: &CStr) -> bool {
    // SAFETY: a system call with a string that outlives it.
    let found = unsafe { libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path.as_ptr(), libc::F_OK) };
    found != 0 && matches!(errno(), libc::ENOENT | libc::ENOTDIR)
}

fn check(step: Step, result: i64) -> Result<(), (Step, i32)> {
    if result < 0 { Err((step, errno())) } else { Ok(()) }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

/// Sets a limit where it is allowed; a smaller limit is no reason not to run.
fn set_limit(resource: impl TryInto<c_int>, limit: libc::rlimit64) {
    if let Ok(resource) = resource.try_into() {
        // SAFETY: changes limits of the calling process only; `limit` lives during the call.
        unsafe {
            libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const limit, std::ptr::null_mut::<c_void>());
        }
    }
}

/// What does not change while the daemon runs.
struct Facts {
    open_files: libc::rlimit64,
    ignored: Vec<c_int>,
    first_served: bool,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl Facts {
    /// Whether becoming that identity would change nothing.
    fn runs_as(&self, identity: &Identity) -> bool {
        self.uid == identity.uid
            && self.gid == identity.gid
            && other_groups(&identity.groups, self.gid) == other_groups(&self.groups, self.gid)
    }
}

/// Groups beside the primary one, which counts as a member whether the list names it or not.
fn other_groups(groups: &[u32], primary: u32) -> std::collections::BTreeSet<u32> {
    groups.iter().copied().filter(|&group| group != primary).collect()
}

fn facts() -> &'static Facts {
    static FACTS: OnceLock<Facts> = OnceLock::new();
    FACTS.get_or_init(|| {
        let groups = rustix::process::getgroups()
            .map(|groups| groups.into_iter().map(rustix::process::Gid::as_raw).collect())
            .unwrap_or_default();
        Facts {
            open_files: raise_open_files(),
            ignored: signals::ignored(),
            first_served: rustix::process::getpriority_process(None).is_ok_and(|nice| nice < 0),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups,
        }
    })
}

/// Gives this process as many descriptors as it may have, and says what its children shall have.
fn raise_open_files() -> libc::rlimit64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let (soft, hard) = OPEN_FILES;
    let wanted = Rlimit { current: Some(hard), maximum: Some(hard) };
    let hard = if setrlimit(Resource::Nofile, wanted).is_ok() {
        hard
    } else {
        let maximum = getrlimit(Resource::Nofile).maximum;
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
        maximum.unwrap_or(libc::RLIM_INFINITY)
    };
    libc::rlimit64 { rlim_cur: soft.min(hard), rlim_max: hard }
}

fn explain(program: &Program, step: Step, errno: i32) -> SpawnError {
    let name = program.argv.first().map(|name| name.to_string_lossy()).unwrap_or_default();
    let why = reason(errno);
    let message = match step {
        Step::Clone => format!("cannot start a process for {name:?}: {why}"),
        Step::Session => format!("cannot prepare the process for {name:?}: {why}"),
        Step::Limits => format!("cannot put {name:?} under the limits of the sandbox: {why}"),
        Step::Descriptors => format!("cannot connect input and output of {name:?}: {why}"),
        Step::Identity => {
            let (uid, gid) =
                program.identity.as_ref().map_or((0, 0), |identity| (identity.uid, identity.gid));
            let hint = if errno == libc::EPERM {
                "; execd needs the capabilities CAP_SETUID and CAP_SETGID for this"
            } else {
                ""
            };
            format!("cannot run {name:?} as uid {uid}, gid {gid}: {why}{hint}")
        }
        Step::Directory => {
            format!("cannot enter the working directory {:?} as this user: {why}", lossy(&program.cwd))
        }
        Step::Exec => format!("cannot execute {name:?}: {why}"),
    };
    SpawnError { errno, message }
}

fn lossy(text: &CStr) -> std::borrow::Cow<'_, str> {
    text.to_string_lossy()
}

/// The system's words for an error number, with the number left out.
fn reason(errno: i32) -> String {
    let text = match errno {
        libc::ENOENT => return "no such file, or its interpreter is missing".to_owned(),
        libc::ENOEXEC => return "not a program of this machine, and no script with a #! line".to_owned(),
        libc::E2BIG => return "arguments and environment are too long together".to_owned(),
        _ => io::Error::from_raw_os_error(errno).to_string(),
    };
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::AsFd as _;

    fn program(path: &str, argv: &[&str]) -> Program {
        let text = |text: &str| CString::new(text).unwrap();
        Program {
            candidates: vec![text(path)],
            argv: argv.iter().map(|arg| text(arg)).collect(),
            env: vec![text("PATH=/usr/bin:/bin")],
            cwd: text("/"),
            identity: None,
            tag: None,
        }
    }

    fn run(program: &Program) -> Result<(String, super::super::exit::Exit), SpawnError> {
        let null = File::open("/dev/null").unwrap();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let stdio = Stdio { stdin: null.as_fd(), stdout: write.as_fd(), stderr: write.as_fd() };
        let spawned = spawn(program, stdio, &[])?;
        drop(write);
        let mut text = String::new();
        File::from(read).read_to_string(&mut text).unwrap();
        let exit = super::super::exit::wait_blocking(&spawned.pidfd).unwrap().unwrap();
        Ok((text, exit))
    }

    #[test]
    fn the_child_has_a_clean_start() {
        super::super::inherited::close_on_exec().unwrap();
        let script = "grep -E 'SigBlk|SigIgn' /proc/self/status; umask; ulimit -c; ulimit -n; \
                      [ $$ = \"$(ps -o sid= -p $$ | tr -d ' ')\" ] && echo leader; ls /proc/self/fd | wc -l; exit 3";
        let (text, exit) = run(&program("/bin/sh", &["sh", "-c", script])).unwrap();
        assert_eq!(exit.code(), 3);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].ends_with("\t0000000000000000") && lines[1].ends_with("\t0000000000000000"),
            "{text}"
        );
        assert_eq!(lines[2..4], ["0022", "0"], "{text}");
        assert!(lines[4].parse::<u64>().unwrap() <= 65_536);
        // 0, 1, 2 and the directory itself.
        assert_eq!(lines[5..], ["leader", "4"], "{text}");
    }

    #[test]
    fn failures_name_program_and_reason_and_leave_no_zombie() {
        let error = run(&program("/no/such", &["such"])).unwrap_err();
        assert_eq!(error.errno, libc::ENOENT);
        assert_eq!(error.message, "cannot execute \"such\": no such file, or its interpreter is missing");
        let error = run(&program("/etc/passwd", &["passwd"])).unwrap_err();
        assert_eq!(error.errno, libc::EACCES);
        let mut nowhere = program("/bin/true", &["true"]);
        nowhere.cwd = c"/no/such".to_owned();
        let error = run(&nowhere).unwrap_err();
        assert!(error.message.contains("working directory"), "{error}");
    }

    #[test]
    fn root_can_become_somebody_else() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: needs root");
        }
        let mut other = program("/bin/sh", &["sh", "-c", "id -u; id -g; id -G"]);
        let identity = crate::accounts::Accounts::default().identity(1234, Some(77));
        other.identity = Some(identity);
        assert_eq!(run(&other).unwrap().0, "1234\n77\n77\n");
    }
}
