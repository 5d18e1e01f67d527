//! The system call filter of every sandbox: an allow list, built once and installed by each child.

mod bpf;
mod table;

use std::io;

pub(crate) use bpf::Insn;

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// The program, ready to be installed.
#[derive(Debug, Clone)]
pub(crate) struct Filter(Vec<Insn>);

impl Filter {
    /// Builds the filter for this architecture.
    pub(crate) fn new() -> Self {
        use bpf::Verdict;
        // A call that no table knows is newer than the table: programs take ENOSYS as "old kernel" and fall
        // back. A known one that is not offered is refused in plain words.
        Self(bpf::program(ARCH, &table::table(), &Verdict::Errno(EPERM), &Verdict::Errno(ENOSYS)))
    }

    /// Installs the filter on the calling thread, for good. `no_new_privs` must be set.
    ///
    /// Makes one system call and touches nothing else, so it may run in a child that shares memory.
    pub(crate) fn install(&self) -> io::Result<()> {
        let program = libc::sock_fprog {
            len: u16::try_from(self.0.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?,
            filter: self.0.as_ptr().cast_mut().cast(),
        };
        // SAFETY: `program` points to as many instructions as it says, in the kernel's layout (`Insn` is
        // repr(C) with the members of `sock_filter`); the kernel copies them and does not write.
        let result =
            unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Number of instructions.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const EPERM: u16 = libc::EPERM as u16;
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
const ENOSYS: u16 = libc::ENOSYS as u16;

#[cfg(test)]
mod tests {
    use super::bpf::interpreter::run;
    use super::*;

    const ALLOW: u32 = 0x7fff_0000;

    fn verdict(nr: libc::c_long, args: [u64; 6]) -> u32 {
        run(&Filter::new().0, u32::try_from(nr).unwrap(), ARCH, args).0
    }

    fn errno(number: i32) -> u32 {
        0x0005_0000 | u32::try_from(number).unwrap()
    }

    #[test]
    fn filter_is_small_and_shallow() {
        let filter = Filter::new();
        assert!(filter.len() < 400, "{}", filter.len());
        for nr in 0..500 {
            let (_, steps) = run(&filter.0, nr, ARCH, [0; 6]);
            assert!(steps < 24, "{nr} takes {steps}");
        }
    }

    #[test]
    fn everyday_calls_pass() {
        for nr in [
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_openat,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_close_range,
            libc::SYS_ptrace,
            libc::SYS_chroot,
            libc::SYS_mknodat,
            libc::SYS_futex,
            libc::SYS_statx,
            libc::SYS_pidfd_open,
            libc::SYS_memfd_create,
            libc::SYS_seccomp,
        ] {
            assert_eq!(verdict(nr, [0; 6]), ALLOW, "{nr}");
        }
    }

    #[test]
    fn dangerous_calls_are_refused() {
        for nr in [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            libc::SYS_fsopen,
            libc::SYS_mount_setattr,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_kexec_load,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_open_by_handle_at,
            libc::SYS_pidfd_getfd,
            libc::SYS_reboot,
            libc::SYS_swapon,
            libc::SYS_quotactl,
            libc::SYS_syslog,
            libc::SYS_settimeofday,
        ] {
            assert_eq!(verdict(nr, [0; 6]), errno(libc::EPERM), "{nr}");
        }
        for nr in [libc::SYS_clone3, libc::SYS_io_uring_setup, 9_999, 0x4000_0000] {
            assert_eq!(verdict(nr, [0; 6]), errno(libc::ENOSYS), "{nr}");
        }
    }

    #[test]
    fn new_namespaces_are_refused_threads_are_not() {
        let thread = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_FILES) as u64;
        assert_eq!(verdict(libc::SYS_clone, [thread, 0, 0, 0, 0, 0]), ALLOW);
        for flag in [
            libc::CLONE_NEWUSER,
            libc::CLONE_NEWNS,
            libc::CLONE_NEWPID,
            libc::CLONE_NEWNET,
            libc::CLONE_NEWIPC,
            libc::CLONE_NEWUTS,
            libc::CLONE_NEWCGROUP,
        ] {
            let args = [u64::from(flag.cast_unsigned()), 0, 0, 0, 0, 0];
            assert_eq!(verdict(libc::SYS_clone, args), errno(libc::EPERM), "{flag:#x}");
            assert_eq!(verdict(libc::SYS_unshare, args), errno(libc::EPERM), "{flag:#x}");
        }
        assert_eq!(verdict(libc::SYS_unshare, [libc::CLONE_FS as u64, 0, 0, 0, 0, 0]), ALLOW);
        assert_eq!(verdict(libc::SYS_unshare, [0x80, 0, 0, 0, 0, 0]), errno(libc::EPERM));
    }

    #[test]
    fn only_ordinary_sockets() {
        let socket = |family: i32, protocol: i32| {
            verdict(libc::SYS_socket, [family as u64, libc::SOCK_STREAM as u64, protocol as u64, 0, 0, 0])
        };
        for (family, protocol) in [
            (libc::AF_UNIX, 0),
            (libc::AF_INET, 0),
            (libc::AF_INET, libc::IPPROTO_TCP),
            (libc::AF_INET6, libc::IPPROTO_UDP),
            (libc::AF_INET, libc::IPPROTO_ICMP),
            (libc::AF_NETLINK, libc::NETLINK_ROUTE),
        ] {
            assert_eq!(socket(family, protocol), ALLOW, "{family} {protocol}");
        }
        assert_eq!(socket(libc::AF_NETLINK, libc::NETLINK_AUDIT), errno(libc::EPROTONOSUPPORT));
        assert_eq!(socket(libc::AF_INET, libc::IPPROTO_SCTP), errno(libc::EPROTONOSUPPORT));
        for family in
            [libc::AF_VSOCK, libc::AF_ALG, libc::AF_PACKET, libc::AF_TIPC, libc::AF_XDP, libc::AF_BLUETOOTH]
        {
            assert_eq!(socket(family, 0), errno(libc::EAFNOSUPPORT), "{family}");
        }
    }

    #[test]
    fn terminals_cannot_be_typed_into_and_odd_personalities_are_refused() {
        assert_eq!(verdict(libc::SYS_ioctl, [0, 0x5401, 0, 0, 0, 0]), ALLOW);
        assert_eq!(verdict(libc::SYS_ioctl, [0, 0x5412, 0, 0, 0, 0]), errno(libc::EPERM));
        assert_eq!(verdict(libc::SYS_ioctl, [0, 0xdead_0000_5412, 0, 0, 0, 0]), errno(libc::EPERM));
        assert_eq!(verdict(libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0, 0]), ALLOW);
        assert_eq!(verdict(libc::SYS_personality, [0x040_0000, 0, 0, 0, 0, 0]), errno(libc::EPERM));
    }
}
