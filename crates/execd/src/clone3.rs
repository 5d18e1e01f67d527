//! `EXECD_CLONE3_COMPAT`: some containers' filters answer `EPERM` to `clone3`, where programs take the older call only
//! after `ENOSYS`. A filter of ours says so, to the daemon and to all it starts. The daemon itself never makes the
//! call; see [`crate::process::spawn`].

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;

use crate::args::Clone3;

/// Set for the program that follows itself, so that it does so once.
pub const APPLIED: &str = "_EXECD_CLONE3_COMPAT_APPLIED";

/// Does what was asked for. The process must still have one thread. Returns the error when it cannot be done; with
/// [`Clone3::AbsentFromStart`] it does not return after success.
///
/// # Errors
/// The kernel takes no filter.
pub fn apply(mode: Clone3) -> io::Result<()> {
    match mode {
        Clone3::AsItIs => Ok(()),
        Clone3::Absent => install(),
        Clone3::AbsentFromStart if std::env::var_os(APPLIED).is_some() => Ok(()),
        Clone3::AbsentFromStart => {
            install()?;
            let args: Vec<OsString> = std::env::args_os().collect();
            let mut itself = std::process::Command::new("/proc/self/exe");
            if let Some(name) = args.first() {
                itself.arg0(name);
            }
            Err(itself.args(args.iter().skip(1)).env(APPLIED, "1").exec())
        }
    }
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// Offsets in the kernel's `seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;

fn install() -> io::Result<()> {
    let op = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter {
        // All operations fit.
        code: u16::try_from(code).unwrap_or_default(),
        jt,
        jf,
        k,
    };
    let (load, equal, answer) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET,
    );
    let clone3 = u32::try_from(libc::SYS_clone3).map_err(io::Error::other)?;
    let absent = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned();
    let mut program = [
        op(load, ARCH, 0, 0),
        // Other architectures number their calls otherwise; 32-bit programs are left alone.
        op(equal, ARCHITECTURE, 0, 3),
        op(load, NUMBER, 0, 0),
        op(equal, clone3, 0, 1),
        op(answer, absent, 0, 0),
        op(answer, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: both calls take plain numbers and a program that lives until they return.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
        if libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
