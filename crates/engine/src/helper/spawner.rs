//! A spawner: takes requests from the server and clones sandboxes.

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr;

use rustix::fs::{FileType, Mode, mknodat};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::net::RecvFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use super::child::{self, Plan, Progress, Template};
use super::message::{Hello, Outcome, Spawn, Spawned};
use super::mounts::{self, HIDDEN_PROC, HIDDEN_UPPERS, OLD_ROOT, SPAWNER_DEV, STAGE};
use super::startup::{self, KEPT_FROM, Link, while_doing};
use crate::caps::CapSet;
use crate::sys::clone::{Child, Stack, clone_shared};
use osb_confine::seccomp::Filter;

const STACK_BYTES: usize = 64 << 10;
/// The first number of a request's descriptors.
const FIRST: RawFd = 3;

pub(super) fn run() -> io::Result<()> {
    let (mut link, hello, fds) = startup::begin(c"osb-spawner")?;
    match Spawner::new(&hello, fds) {
        Ok(mut spawner) => {
            startup::answer(&mut link, &Ok(None))?;
            spawner.serve(&mut link)
        }
        Err(error) => startup::answer(&mut link, &Err(error)),
    }
}

struct Spawner {
    template: Template,
    progress: Progress,
    stack: Stack,
    /// The network namespace to return to, so that the last sandbox's is not kept alive.
    home: OwnedFd,
    _execd: OwnedFd,
    _args: [CString; 3],
}

impl Spawner {
    fn new(hello: &Hello, fds: Vec<OwnedFd>) -> io::Result<Self> {
        let execd = fds
            .into_iter()
            .next()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no executable was sent"))?;
        let last_cap = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap")
            .map_err(while_doing("read cap_last_cap"))?
            .trim()
            .parse()
            .map_err(|_| io::Error::other("cap_last_cap is no number"))?;
        let home = high(File::open("/proc/self/ns/net")?.into())?;
        mount_namespace().map_err(while_doing("set up the spawner's mount namespace"))?;

        let args = [c"execd".to_owned(), c"--boot-fd".to_owned(), CString::new(FIRST.to_string())?];
        let template = Template {
            execd: execd.as_raw_fd(),
            stage_dir: CString::new(STAGE)?,
            old_root: CString::new(OLD_ROOT)?,
            dev: mounts::Dev::new()?,
            hidden_proc: mounts::hidden_proc()?,
            hidden_uppers: CString::new(HIDDEN_UPPERS)?,
            proc: mounts::proc(hello.user_namespace)?,
            sys: mounts::sys(hello.user_namespace)?,
            caps: CapSet(hello.caps),
            last_cap,
            filter: Filter::builder(),
            argv: [args[0].as_ptr(), args[1].as_ptr(), args[2].as_ptr(), ptr::null()],
            envp: [ptr::null()],
        };
        Ok(Self {
            template,
            progress: Progress::default(),
            stack: Stack::new(STACK_BYTES)?,
            home,
            _execd: execd,
            _args: args,
        })
    }

    fn serve(&mut self, link: &mut Link) -> io::Result<()> {
        // Without the close-on-exec flag: the daemon inherits the first ones as they are.
        let flags = RecvFlags::empty();
        let mut fds = Vec::new();
        while let Some(request) = link.receive::<Spawn>(&mut fds, flags)? {
            let begin = child::clock();
            let result = self.spawn(&request, &fds);
            let nanos = self.progress.durations(begin, child::clock());
            let (outcome, pidfd) = match result {
                Ok(child) => (Outcome::Running { pid: child.pid }, Some(child.pidfd)),
                Err((step, errno)) => (Outcome::Failed { step, errno }, None),
            };
            let pidfd: Vec<BorrowedFd<'_>> = pidfd.iter().map(AsFd::as_fd).collect();
            link.send(&Spawned { seq: request.seq, outcome, nanos }, &pidfd)?;
            // After the answer, since nobody waits for it.
            fds.clear();
            enter_network(self.home.as_fd())?;
        }
        Ok(())
    }

    fn spawn(&mut self, request: &Spawn, fds: &[OwnedFd]) -> Result<Child, (String, i32)> {
        self.progress.reset();
        let parts = Parts::of(request, fds).ok_or_else(|| ("request".to_owned(), libc::EINVAL))?;
        let plain = |step: &str| {
            let step = step.to_owned();
            move |error: io::Error| (step, error.raw_os_error().unwrap_or(libc::EINVAL))
        };
        let dev = mounts::dev(request.root_id, request.shm_bytes).map_err(plain("mount list"))?;
        let mut overlays = Vec::with_capacity(request.mounts.len());
        for (fd, mountpoint) in parts.overlays.iter().zip(&request.mounts) {
            let target = if mountpoint == "/" { STAGE.to_owned() } else { format!("{STAGE}{mountpoint}") };
            overlays.push((
                fd.as_raw_fd(),
                CString::new(target).map_err(|_| ("mountpoint".to_owned(), libc::EINVAL))?,
            ));
        }
        let plan = Plan {
            template: &self.template,
            progress: &self.progress,
            attach: &parts.attach,
            overlays: &overlays,
            dev: &dev,
            hostname: request.hostname.as_bytes(),
            uppers: parts.uppers,
            user_namespace: parts.user_namespace,
            first_closed: parts.first_closed,
        };
        enter_network(parts.network).map_err(plain("enter network namespace"))?;
        // SAFETY: `entry` is made for this; `plan` and all it borrows live in this frame, and with CLONE_VFORK
        // the call returns only after the child has executed the daemon or ended.
        let child = unsafe {
            clone_shared(
                libc::CLONE_VFORK
                    | libc::CLONE_NEWNS
                    | libc::CLONE_NEWPID
                    | libc::CLONE_NEWIPC
                    | libc::CLONE_NEWUTS,
                parts.born_in,
                &self.stack,
                child::entry,
                (&raw const plan).cast_mut().cast::<c_void>(),
            )
        }
        .map_err(plain("clone"))?;
        match self.progress.failure() {
            None => Ok(child),
            Some(failure) => Err(failure),
        }
    }
}

/// The descriptors of a request by their meaning.
struct Parts<'a> {
    network: BorrowedFd<'a>,
    user_namespace: Option<RawFd>,
    overlays: &'a [OwnedFd],
    attach: Vec<RawFd>,
    born_in: Option<BorrowedFd<'a>>,
    uppers: Option<RawFd>,
    first_closed: u32,
}

impl<'a> Parts<'a> {
    /// `None` when number or positions are not as promised.
    fn of(request: &Spawn, fds: &'a [OwnedFd]) -> Option<Self> {
        let in_order = fds.iter().zip(FIRST..).all(|(fd, number)| fd.as_raw_fd() == number);
        if !in_order || request.mounts.is_empty() || request.keep == 0 {
            return None;
        }
        let (kept, rest) = fds.split_at_checked(request.keep)?;
        if request.uppers.is_some_and(|number| !kept.iter().any(|fd| fd.as_raw_fd() == number)) {
            return None;
        }
        let (network, rest) = rest.split_first()?;
        let user =
            rest.len().checked_sub(request.mounts.len() + request.attach + usize::from(request.born_in))?;
        if user > 1 {
            return None;
        }
        let (user_namespace, rest) = rest.split_at_checked(user)?;
        let (overlays, rest) = rest.split_at_checked(request.mounts.len())?;
        let (attach, born_in) = rest.split_at_checked(request.attach)?;
        Some(Self {
            network: network.as_fd(),
            user_namespace: user_namespace.first().map(AsRawFd::as_raw_fd),
            overlays,
            attach: attach.iter().map(AsRawFd::as_raw_fd).collect(),
            born_in: born_in.first().map(AsFd::as_fd),
            uppers: request.uppers,
            first_closed: u32::try_from(FIRST.unsigned_abs() as usize + request.keep).ok()?,
        })
    }
}

fn enter_network(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

fn high(fd: OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, KEPT_FROM)?)
}

/// Gives the spawner a mount namespace with nothing of the host in it: every mount in it is copied at each
/// clone, and whatever a sandbox might wrongly reach should not be there.
fn mount_namespace() -> io::Result<()> {
    // SAFETY: this process has one thread, and nothing in it relies on the old mount namespace.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    // Any directory will do to mount on; `/proc` exists wherever this program runs.
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("tmpfs", "/proc", "tmpfs", quiet, c"size=64k,mode=755")?;
    rustix::process::chdir("/proc")?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    for dir in [STAGE, SPAWNER_DEV, HIDDEN_PROC, HIDDEN_UPPERS] {
        std::fs::create_dir(dir)?;
    }
    own_null()?;
    // Every sandbox has this root below its own.
    rustix::mount::mount_remount("/", MountFlags::BIND | MountFlags::RDONLY | quiet, c"")?;
    Ok(())
}

/// What the standard descriptors of a sandbox's init are until it has others: no path leads there from inside.
fn own_null() -> io::Result<()> {
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
    rustix::mount::mount("tmpfs", SPAWNER_DEV, "tmpfs", quiet, c"size=64k,mode=755")?;
    let null = Path::new(SPAWNER_DEV).join("null");
    let device = rustix::fs::makedev(1, 3);
    mknodat(rustix::fs::CWD, &null, FileType::CharacterDevice, Mode::from_raw_mode(0o600), device)?;
    startup::standard_to(&File::options().read(true).write(true).open(&null)?)?;
    rustix::mount::mount_remount(SPAWNER_DEV, MountFlags::BIND | MountFlags::RDONLY | quiet, c"")?;
    Ok(())
}
