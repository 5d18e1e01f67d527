//! What the child does between its birth and the daemon's first instruction.
//!
//! It shares the spawner's memory and the spawner sleeps meanwhile. So nothing here may allocate, lock, unwind or
//! use a libc function that keeps state: every step is a system call with arguments made ready beforehand, and
//! the result is left in [`Plan::progress`].

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use super::mounts::Dev;
use crate::caps::CapSet;
use osb_confine::seccomp::{Filter, Insn};

/// Names of the stages, in order. The first is the clone itself.
pub(crate) const STAGES: [&str; 11] =
    ["clone", "cgroup", "overlay", "root", "dev", "proc", "sys", "user", "caps", "seccomp", "exec"];

/// How far the child has come, and why it stopped.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Index into [`STAGES`] of the stage it is in.
    stage: AtomicU32,
    /// Error number of the step that failed; 0 while all is well.
    errno: AtomicI32,
    /// Which step within the stage failed.
    step: AtomicU32,
    /// Monotonic nanoseconds (low half) at which each stage ended.
    ends: [AtomicU32; STAGES.len()],
}

impl Progress {
    pub(crate) fn reset(&self) {
        self.stage.store(0, Ordering::Relaxed);
        self.errno.store(0, Ordering::Relaxed);
        self.step.store(0, Ordering::Relaxed);
        for end in &self.ends {
            end.store(0, Ordering::Relaxed);
        }
    }

    /// The failure, as words for the log and an error number.
    pub(crate) fn failure(&self) -> Option<(String, i32)> {
        let errno = self.errno.load(Ordering::Acquire);
        (errno != 0).then(|| {
            let stage = self.stage.load(Ordering::Relaxed) as usize;
            let step = self.step.load(Ordering::Relaxed);
            (format!("{} (step {step})", STAGES.get(stage).unwrap_or(&"?")), errno)
        })
    }

    /// Nanoseconds of each stage; the last ends at `now`.
    pub(crate) fn durations(&self, begin: u32, now: u32) -> Vec<u32> {
        let reached = self.stage.load(Ordering::Acquire) as usize;
        let mut last = begin;
        let mut durations = Vec::with_capacity(STAGES.len());
        for (i, end) in self.ends.iter().enumerate().take(reached + 1) {
            let end = if i == reached { now } else { end.load(Ordering::Relaxed) };
            durations.push(end.wrapping_sub(last));
            last = end;
        }
        durations
    }
}

/// Monotonic clock, low 32 bits of its nanoseconds: enough for the differences within one start.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) fn clock() -> u32 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to a local; answered by the vDSO without state.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    (now.tv_sec as u32).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u32)
}

/// A mount by `mount(2)`.
#[derive(Debug)]
pub(crate) struct Mount {
    pub(crate) source: CString,
    pub(crate) target: CString,
    /// File system type; empty for binds.
    pub(crate) fstype: CString,
    pub(crate) flags: libc::c_ulong,
    pub(crate) data: CString,
    /// Whether a missing target is no error.
    pub(crate) optional: bool,
}

/// Everything that is the same for all sandboxes of a spawner.
#[derive(Debug)]
pub(crate) struct Template {
    /// Descriptor of the daemon's executable.
    pub(crate) execd: RawFd,
    /// Directory on which the new root is assembled.
    pub(crate) stage_dir: CString,
    /// Where the old root goes, below the new one, until a mount of `sys` covers it.
    pub(crate) old_root: CString,
    pub(crate) dev: Dev,
    /// By an absolute path of the spawner.
    pub(crate) hidden_proc: Mount,
    /// Likewise; where [`Plan::uppers`] goes.
    pub(crate) hidden_uppers: CString,
    /// `/proc` and its masks, by paths relative to the new root.
    pub(crate) proc: Vec<Mount>,
    /// `/sys` and its masks. Covers the old root, so it comes last.
    pub(crate) sys: Vec<Mount>,
    pub(crate) caps: CapSet,
    /// Number of the kernel's last capability.
    pub(crate) last_cap: u32,
    pub(crate) filter: Filter,
    /// `execd --boot-fd 3`, null-terminated pointers into `args`.
    pub(crate) argv: [*const c_char; 4],
    pub(crate) envp: [*const c_char; 1],
}

/// One start.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) template: &'a Template,
    pub(crate) progress: &'a Progress,
    /// Files to write `0` into.
    pub(crate) attach: &'a [RawFd],
    /// Detached overlays and where they go, as absolute paths of the spawner.
    pub(crate) overlays: &'a [(RawFd, CString)],
    /// Mounts below `/dev`.
    pub(crate) dev: &'a [Mount],
    pub(crate) hostname: &'a [u8],
    /// A detached mount.
    pub(crate) uppers: Option<RawFd>,
    pub(crate) user_namespace: Option<RawFd>,
    /// First descriptor number that the daemon must not see.
    pub(crate) first_closed: u32,
}

/// Entry of the child; `arg` points to a [`Plan`].
///
/// # Safety
/// To be called only as the entry of [`crate::sys::clone::clone_shared`] with `CLONE_VFORK`, with a `Plan` that
/// lives until the child has executed or ended.
pub(crate) unsafe extern "C" fn entry(arg: *mut c_void) -> ! {
    // SAFETY: the caller's promise; the spawner sleeps, so nobody else touches the plan.
    let plan = unsafe { &*arg.cast::<Plan<'_>>() };
    let mut run = Run { progress: plan.progress, step: 0 };
    let (Ok(()) | Err(())) = run.all(plan);
    // Only reached when a step failed.
    loop {
        // SAFETY: ends this process; the spawner reads the reason from `progress`.
        unsafe { libc::syscall(libc::SYS_exit_group, 127) };
    }
}

struct Run<'a> {
    progress: &'a Progress,
    step: u32,
}

type Step = Result<(), ()>;

/// `syscall` with all arguments widened, as a [`Step`].
macro_rules! call {
    ($run:expr, $number:expr $(, $arg:expr)*) => {{
        // SAFETY: every pointer comes from a C string, slice or struct of the plan or of this frame, which
        // outlive the call; the kernel checks the rest.
        let result = unsafe { libc::syscall($number $(, $arg)*) };
        $run.check(result)
    }};
}

impl Run<'_> {
    fn check(&mut self, result: libc::c_long) -> Step {
        self.step += 1;
        if result >= 0 { Ok(()) } else { self.fail(errno()) }
    }

    fn fail(&self, errno: i32) -> Step {
        self.progress.step.store(self.step, Ordering::Relaxed);
        self.progress.errno.store(errno, Ordering::Release);
        Err(())
    }

    fn stage_ends(&mut self) {
        let stage = self.progress.stage.load(Ordering::Relaxed);
        if let Some(end) = self.progress.ends.get(stage as usize) {
            end.store(clock(), Ordering::Relaxed);
        }
        self.progress.stage.store(stage + 1, Ordering::Release);
        self.step = 0;
    }

    fn all(&mut self, plan: &Plan<'_>) -> Step {
        let template = plan.template;
        self.stage_ends();

        // The cgroup namespace's root is the cgroup at the moment of unsharing, so attach first.
        for &file in plan.attach {
            call!(self, libc::SYS_write, file, c"0".as_ptr(), 1)?;
        }
        call!(self, libc::SYS_unshare, libc::CLONE_NEWCGROUP)?;
        // Within the sandbox's share of the processors init and daemon come before the work, which they start at the
        // usual priority: among thousands of processes that fork all the time their turn would come too late.
        call!(self, libc::SYS_setpriority, libc::PRIO_PROCESS, 0, FIRST_SERVED)?;
        self.stage_ends();

        for (overlay, target) in plan.overlays {
            call!(
                self,
                libc::SYS_move_mount,
                *overlay,
                c"".as_ptr(),
                libc::AT_FDCWD,
                target.as_ptr(),
                MOVE_MOUNT_F_EMPTY_PATH
            )?;
        }
        if let Some(uppers) = plan.uppers {
            call!(
                self,
                libc::SYS_move_mount,
                uppers,
                c"".as_ptr(),
                libc::AT_FDCWD,
                template.hidden_uppers.as_ptr(),
                MOVE_MOUNT_F_EMPTY_PATH
            )?;
        }
        self.mount(&template.hidden_proc)?;
        self.stage_ends();

        // The old root is not unmounted, which would wait for every processor of the machine: `/sys` is mounted over
        // it, and taking that away again needs a capability over this mount namespace that no sandbox has. It is
        // read-only and holds nothing but the spawner's `null` and what isolated sessions need.
        call!(self, libc::SYS_chdir, template.stage_dir.as_ptr())?;
        call!(self, libc::SYS_pivot_root, c".".as_ptr(), template.old_root.as_ptr())?;
        call!(self, libc::SYS_chdir, c"/".as_ptr())?;
        call!(self, libc::SYS_sethostname, plan.hostname.as_ptr(), plan.hostname.len())?;
        self.stage_ends();

        self.dev(&template.dev)?;
        self.mounts(plan.dev)?;
        self.stage_ends();

        self.mounts(&template.proc)?;
        self.stage_ends();

        self.mounts(&template.sys)?;
        self.stage_ends();

        if let Some(namespace) = plan.user_namespace {
            call!(self, libc::SYS_setns, namespace, libc::CLONE_NEWUSER)?;
        }
        call!(self, libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>())?;
        call!(self, libc::SYS_setresgid, 0, 0, 0)?;
        call!(self, libc::SYS_setresuid, 0, 0, 0)?;
        self.stage_ends();

        self.capabilities(template)?;
        self.stage_ends();

        call!(self, libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, ONE, ZERO, ZERO, ZERO)?;
        self.step += 1;
        if let Err(error) = template.filter.install() {
            return self.fail(error.raw_os_error().unwrap_or(libc::EINVAL));
        }
        self.stage_ends();

        call!(self, libc::SYS_setsid)?;
        call!(self, libc::SYS_close_range, plan.first_closed, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)?;
        call!(
            self,
            libc::SYS_execveat,
            template.execd,
            c"".as_ptr(),
            template.argv.as_ptr(),
            template.envp.as_ptr(),
            libc::AT_EMPTY_PATH
        )
    }

    fn mounts(&mut self, mounts: &[Mount]) -> Step {
        for mount in mounts {
            if self.mount(mount).is_err() {
                if !(mount.optional && errno() == libc::ENOENT) {
                    return Err(());
                }
                self.progress.errno.store(0, Ordering::Release);
            }
        }
        Ok(())
    }

    fn mount(&mut self, mount: &Mount) -> Step {
        call!(
            self,
            libc::SYS_mount,
            mount.source.as_ptr(),
            mount.target.as_ptr(),
            mount.fstype.as_ptr(),
            mount.flags,
            mount.data.as_ptr()
        )
    }

    /// A `/dev` of its own.
    fn dev(&mut self, dev: &Dev) -> Step {
        self.mount(&dev.mount)?;
        // The daemon gets the mask back with which the spawner was born.
        // SAFETY: cannot fail.
        let mask = unsafe { libc::syscall(libc::SYS_umask, 0) };
        for (name, number) in &dev.devices {
            let mode = libc::S_IFCHR | 0o666;
            call!(self, libc::SYS_mknodat, libc::AT_FDCWD, name.as_ptr(), mode, *number)?;
        }
        for (target, name) in &dev.links {
            call!(self, libc::SYS_symlinkat, target.as_ptr(), libc::AT_FDCWD, name.as_ptr())?;
        }
        for name in &dev.directories {
            call!(self, libc::SYS_mkdirat, libc::AT_FDCWD, name.as_ptr(), 0o755)?;
        }
        call!(self, libc::SYS_umask, mask)?;
        self.mount(&dev.close)
    }

    /// Bounding, ambient and own sets, in this order: dropping from the bounding set needs a capability.
    fn capabilities(&mut self, template: &Template) -> Step {
        let keep = template.caps.0;
        for number in 0..=template.last_cap {
            if keep >> number & 1 == 0 {
                call!(
                    self,
                    libc::SYS_prctl,
                    libc::PR_CAPBSET_DROP,
                    libc::c_ulong::from(number),
                    ZERO,
                    ZERO,
                    ZERO
                )?;
            }
        }
        call!(self, libc::SYS_prctl, libc::PR_CAP_AMBIENT, AMBIENT_CLEAR_ALL, ZERO, ZERO, ZERO)?;
        let header = CapHeader { version: CAPABILITY_VERSION_3, pid: 0 };
        #[allow(clippy::cast_possible_truncation)]
        let half = |bits: u64| CapData { effective: bits as u32, permitted: bits as u32, inheritable: 0 };
        let data = [half(keep), half(keep >> 32)];
        call!(self, libc::SYS_capset, &raw const header, data.as_ptr())
    }
}

// `prctl` reads whole words and refuses what is not zero where it should be.
const ZERO: libc::c_ulong = 0;
const ONE: libc::c_ulong = 1;
const FIRST_SERVED: c_int = -20;
const AMBIENT_CLEAR_ALL: libc::c_ulong = 4;

const MOVE_MOUNT_F_EMPTY_PATH: c_int = 4;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: c_int,
}

#[repr(C)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn errno() -> i32 {
    // SAFETY: libc's per-thread variable; the child borrows the sleeping spawner's.
    unsafe { *libc::__errno_location() }
}

impl Mount {
    pub(crate) fn new(
        fstype: &CStr,
        target: &CStr,
        flags: libc::c_ulong,
        data: impl Into<Vec<u8>>,
    ) -> std::io::Result<Self> {
        Ok(Self {
            source: fstype.to_owned(),
            target: target.to_owned(),
            fstype: fstype.to_owned(),
            flags,
            data: CString::new(data)?,
            optional: false,
        })
    }
}

// The kernel reads the filter where it lies, so an instruction must have the size that it expects.
const _: () = assert!(size_of::<Insn>() == size_of::<libc::sock_filter>());
