//! Signals around the start of a program.

use std::ffi::c_int;

/// Ignored signals stay ignored over an exec, and whoever started the daemon may have left any.
pub(super) fn ignored() -> Vec<c_int> {
    (1..=64).filter(|&signal| action_of(signal).is_some_and(|handler| handler == libc::SIG_IGN)).collect()
}

/// The kernel's own form of a signal's action: handler first. The library's calls refuse the two signals that it
/// uses itself, yet these may come ignored from outside as well.
type RawAction = [usize; 4];

fn action_of(signal: c_int) -> Option<usize> {
    let mut action: RawAction = [0; 4];
    // SAFETY: only asks; `action` has room for the kernel's structure and lives during the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            std::ptr::null::<RawAction>(),
            &raw mut action,
            size_of::<u64>(),
        )
    };
    (result == 0).then_some(action[0])
}

/// Gives a signal its default action. Only a system call; used between clone and exec.
pub(super) fn set_default(signal: c_int) {
    let action: RawAction = [libc::SIG_DFL, 0, 0, 0];
    // SAFETY: `action` is the kernel's structure with no handler to run, and lives during the call.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            &raw const action,
            std::ptr::null_mut::<RawAction>(),
            size_of::<u64>(),
        );
    }
}

/// All signals of this thread blocked until dropped.
pub(super) struct Blocked(u64);

impl Blocked {
    pub(super) fn new() -> Self {
        let mut before = 0u64;
        let all = u64::MAX;
        // SAFETY: raw call because the library's version leaves its own signals out; both sets are eight bytes.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                &raw const all,
                &raw mut before,
                size_of::<u64>(),
            );
        }
        Self(before)
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: restores what `new` found.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                &raw const self.0,
                std::ptr::null_mut::<u64>(),
                size_of::<u64>(),
            );
        }
    }
}
