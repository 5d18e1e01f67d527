//! `clone3` of a child that shares the caller's memory and runs on a stack of its own.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// Memory for the child's stack, with an inaccessible page below.
#[derive(Debug)]
pub(crate) struct Stack {
    base: *mut c_void,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone; the pointer is not tied to a thread.
unsafe impl Send for Stack {}

const GUARD: usize = 4096;

impl Stack {
    /// Maps a stack of `len` bytes.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = len + GUARD;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        // SAFETY: a fresh anonymous mapping; nothing else knows it.
        let base =
            unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self { base, len };
        // SAFETY: the first page of our own mapping, not in use yet.
        if unsafe { libc::mprotect(stack.base, GUARD, libc::PROT_NONE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stack)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; callers keep the value until the child is gone or has executed.
        unsafe { libc::munmap(self.base, self.len) };
    }
}

/// A started child.
#[derive(Debug)]
pub(crate) struct Child {
    /// Process id, as the caller's namespace has it.
    pub(crate) pid: i32,
    /// Descriptor of the process.
    pub(crate) pidfd: OwnedFd,
}

/// Starts a child at `entry(arg)` that shares this process's memory.
///
/// With `CLONE_VFORK` in `flags` the caller sleeps until the child has executed another program or has ended.
///
/// # Safety
/// `entry` must never return, allocate, lock or unwind; what `arg` points to, and `stack`, must live until the
/// child has executed or ended; without `CLONE_VFORK` the two run at the same time and must not race.
pub(crate) unsafe fn clone_shared(
    flags: i32,
    into_cgroup: Option<BorrowedFd<'_>>,
    stack: &Stack,
    entry: unsafe extern "C" fn(*mut c_void) -> !,
    arg: *mut c_void,
) -> io::Result<Child> {
    let mut pidfd: i32 = -1;
    let mut args = libc::clone_args {
        flags: u64::from((flags | libc::CLONE_VM | libc::CLONE_PIDFD).cast_unsigned()),
        pidfd: (&raw mut pidfd) as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.base as u64,
        stack_size: stack.len as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
    if let Some(cgroup) = into_cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `args` is complete and outlives the call; the caller vouches for `entry`, `arg` and `stack`.
    let pid = unsafe { clone3(&raw mut args, size_of::<libc::clone_args>(), entry, arg) };
    if pid < 0 {
        #[allow(clippy::cast_possible_truncation)]
        return Err(io::Error::from_raw_os_error(-pid as i32));
    }
    #[allow(clippy::cast_possible_truncation)]
    let pid = pid as i32;
    // SAFETY: the kernel stored a new descriptor, which nobody else owns.
    Ok(Child { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The bare system call. In the child the kernel has already switched to the new stack, so nothing of the
/// caller's frame may be used there: the child jumps straight to `entry`.
///
/// # Safety
/// As for [`clone_shared`]; `args` must describe a stack.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(
    args: *mut libc::clone_args,
    size: usize,
    entry: unsafe extern "C" fn(*mut c_void) -> !,
    arg: *mut c_void,
) -> i64 {
    let result: i64;
    // SAFETY: the kernel preserves all registers but rax, rcx and r11, in the child too; the stack top is
    // 16-byte aligned, so `call` leaves it as the calling convention wants. The child never comes back here.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {arg}",
            "call {entry}",
            "ud2",
            "2:",
            arg = in(reg) arg,
            entry = in(reg) entry,
            inout("rax") libc::SYS_clone3 => result,
            in("rdi") args,
            in("rsi") size,
            out("rcx") _,
            out("r11") _,
        );
    }
    result
}

/// See above.
///
/// # Safety
/// As for [`clone_shared`]; `args` must describe a stack.
#[cfg(target_arch = "aarch64")]
unsafe fn clone3(
    args: *mut libc::clone_args,
    size: usize,
    entry: unsafe extern "C" fn(*mut c_void) -> !,
    arg: *mut c_void,
) -> i64 {
    let result: i64;
    // SAFETY: the kernel preserves all registers but x0, in the child too. The child never comes back here.
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, {arg}",
            "blr {entry}",
            "brk 1",
            "2:",
            arg = in(reg) arg,
            entry = in(reg) entry,
            inout("x0") args => result,
            in("x1") size,
            in("x8") libc::SYS_clone3,
        );
    }
    result
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI32, Ordering};

    use super::*;

    unsafe extern "C" fn answer(arg: *mut c_void) -> ! {
        // SAFETY: the test passes an atomic that outlives the child; `_exit` does not return.
        unsafe {
            (*arg.cast::<AtomicI32>()).store(42, Ordering::SeqCst);
            libc::syscall(libc::SYS_exit, 7);
        }
        loop {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn child_shares_memory_and_the_parent_waits() {
        let stack = Stack::new(64 << 10).unwrap();
        let value = AtomicI32::new(0);
        // SAFETY: `answer` only stores and exits; stack and value outlive the child, since vfork waits for it.
        let child = unsafe {
            clone_shared(libc::CLONE_VFORK, None, &stack, answer, (&raw const value).cast_mut().cast())
        }
        .unwrap();
        assert_eq!(value.load(Ordering::SeqCst), 42);
        let status = rustix::process::waitpid(
            rustix::process::Pid::from_raw(child.pid),
            rustix::process::WaitOptions::empty(),
        )
        .unwrap()
        .unwrap()
        .1;
        assert_eq!(status.exit_status(), Some(7));
    }
}
