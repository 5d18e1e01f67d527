//! System call filters: an allow list for sandboxes, and what is taken away of it for whom.
//!
//! The engine starts a sandbox's init under [`Filter::builder`], because init has processes that make isolated
//! sessions. Whatever else runs in the sandbox, daemon, entrypoint and commands, has [`Filter::rest`] on top, and both
//! together are [`Filter::sandbox`]. Two filters cost no more than one: the kernel remembers per call that all allow it.

mod bpf;
mod names;
mod table;

use std::io;

pub use bpf::Insn;
use bpf::Verdict;
pub use names::{Named, named};

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// The program, ready to be installed.
#[derive(Debug, Clone)]
pub struct Filter(Vec<Insn>);

impl Filter {
    /// What programs of a sandbox may call.
    #[must_use]
    pub fn sandbox() -> Self {
        Self::allowing(&table::sandbox())
    }

    /// As [`Filter::sandbox`], and what it takes to make namespaces and mounts.
    #[must_use]
    pub fn builder() -> Self {
        Self::allowing(&table::builder())
    }

    /// Takes away what [`Filter::builder`] allows beyond [`Filter::sandbox`]. Short, since it is installed while
    /// somebody waits.
    #[must_use]
    pub fn rest() -> Self {
        Self::refusing(&table::rest())
    }

    /// For programs of an isolated session. Stands for itself where there is no other filter.
    #[must_use]
    pub fn session() -> Self {
        Self::refusing(&table::session(None))
    }

    /// As [`Filter::session`], with these calls refused instead of the contract's list. What leads out of the session
    /// is refused all the same.
    #[must_use]
    pub fn session_refusing(numbers: &[u32]) -> Self {
        Self::refusing(&table::session(Some(numbers)))
    }

    fn allowing(table: &std::collections::BTreeMap<u32, Verdict>) -> Self {
        // A call that no table knows is newer than the table: programs take ENOSYS as "old kernel" and fall
        // back. A known one that is not offered is refused in plain words.
        Self(bpf::program(ARCH, table, &Verdict::Errno(EPERM), &Verdict::Errno(ENOSYS)))
    }

    fn refusing(table: &std::collections::BTreeMap<u32, Verdict>) -> Self {
        Self(bpf::program(ARCH, table, &Verdict::Allow, &Verdict::Errno(ENOSYS)))
    }

    /// Installs the filter on the calling thread, for good. `no_new_privs` must be set.
    ///
    /// Makes one system call and touches nothing else, so it may run in a child that shares memory.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn install(&self) -> io::Result<()> {
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
    #[must_use]
    pub fn instructions(&self) -> usize {
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
        run(&Filter::sandbox().0, u32::try_from(nr).unwrap(), ARCH, args).0
    }

    fn errno(number: i32) -> u32 {
        0x0005_0000 | u32::try_from(number).unwrap()
    }

    #[test]
    fn filter_is_small_and_shallow() {
        let filter = Filter::builder();
        assert!(filter.instructions() < 400, "{}", filter.instructions());
        for nr in 0..500 {
            let (_, steps) = run(&filter.0, nr, ARCH, [0; 6]);
            assert!(steps < 24, "{nr} takes {steps}");
        }
    }

    /// What the kernel makes of several filters: the strictest answer, of refusals that of the newest filter.
    fn stacked(filters: &[&Filter], nr: u32, args: [u64; 6]) -> u32 {
        let answers = filters.iter().rev().map(|filter| run(&filter.0, nr, ARCH, args).0);
        answers
            .reduce(|newer, older| if older & 0xffff_0000 < newer & 0xffff_0000 { older } else { newer })
            .unwrap()
    }

    #[test]
    fn the_builders_filter_and_the_rest_are_the_sandboxs() {
        let (builder, rest, sandbox) = (Filter::builder(), Filter::rest(), Filter::sandbox());
        assert!(rest.instructions() < 80, "{}", rest.instructions());
        let mut values: Vec<u64> = (0..32).map(|bit| 1 << bit).collect();
        values.extend([0, 2, 10, 16, 0x5412, u64::MAX, u64::from(u32::MAX)]);
        for nr in (0..600).chain([0x4000_0000, 0x4000_00a5]) {
            for &value in &values {
                for args in
                    [[value; 6], [value, 0, 0, 0, 0, 0], [2, 1, value, 0, 0, 0], [0, value, 0, 0, 0, 0]]
                {
                    let alone = run(&sandbox.0, nr, ARCH, args).0;
                    assert_eq!(stacked(&[&builder, &rest], nr, args), alone, "{nr} {args:x?}");
                }
            }
        }
    }

    #[test]
    fn a_builder_may_do_what_no_other_may() {
        let builder = Filter::builder();
        for nr in
            [libc::SYS_mount, libc::SYS_move_mount, libc::SYS_open_tree, libc::SYS_setns, libc::SYS_unshare]
        {
            let args = [libc::CLONE_NEWUSER as u64, 0, 0, 0, 0, 0];
            assert_eq!(run(&builder.0, u32::try_from(nr).unwrap(), ARCH, args).0, ALLOW, "{nr}");
        }
        for nr in [
            libc::SYS_bpf,
            libc::SYS_open_by_handle_at,
            libc::SYS_keyctl,
            libc::SYS_fsopen,
            libc::SYS_quotactl,
        ] {
            assert_eq!(
                run(&builder.0, u32::try_from(nr).unwrap(), ARCH, [0; 6]).0,
                errno(libc::EPERM),
                "{nr}"
            );
        }
    }

    #[test]
    fn a_session_is_refused_with_the_contracts_error() {
        let (builder, session) = (Filter::builder(), Filter::session());
        for filters in [&[&session][..], &[&builder, &session]] {
            for nr in [
                libc::SYS_mount,
                libc::SYS_ptrace,
                libc::SYS_chroot,
                libc::SYS_unshare,
                libc::SYS_setns,
                libc::SYS_bpf,
            ] {
                let nr = u32::try_from(nr).unwrap();
                assert_eq!(stacked(filters, nr, [0; 6]), errno(libc::EACCES), "{nr}");
            }
            let namespaces = [libc::CLONE_NEWUSER as u64, 0, 0, 0, 0, 0];
            assert_eq!(
                stacked(filters, u32::try_from(libc::SYS_clone).unwrap(), namespaces),
                errno(libc::EPERM)
            );
            assert_eq!(stacked(filters, u32::try_from(libc::SYS_clone).unwrap(), [17, 0, 0, 0, 0, 0]), ALLOW);
            assert_eq!(
                stacked(filters, u32::try_from(libc::SYS_open_tree).unwrap(), [0; 6]),
                errno(libc::EPERM)
            );
            assert_eq!(
                stacked(filters, u32::try_from(libc::SYS_clone3).unwrap(), [0; 6]),
                errno(libc::ENOSYS)
            );
            // The other numbering of the same calls.
            assert_eq!(stacked(filters, 0x4000_0000 | 165, [0; 6]), errno(libc::ENOSYS));
        }
    }

    #[test]
    fn another_list_for_sessions_replaces_the_contracts_but_opens_no_door() {
        let Some(Named::Call(sethostname)) = named("sethostname") else { panic!() };
        let Some(Named::Call(mkdirat)) = named("mkdirat") else { panic!() };
        assert_eq!((named("SYS_mkdirat"), named("mkdirrat"), named("")), (None, None, None));
        assert_eq!(u32::try_from(libc::SYS_mkdirat).unwrap(), mkdirat);
        let filter = Filter::session_refusing(&[mkdirat, sethostname]);
        let answer = |nr: libc::c_long| run(&filter.0, u32::try_from(nr).unwrap(), ARCH, [0; 6]).0;
        assert_eq!(answer(libc::SYS_mkdirat), errno(libc::EACCES));
        assert_eq!(answer(libc::SYS_sethostname), errno(libc::EACCES));
        assert_eq!((answer(libc::SYS_ptrace), answer(libc::SYS_personality)), (ALLOW, ALLOW));
        for nr in [libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_setns, libc::SYS_bpf] {
            assert_ne!(answer(nr), ALLOW, "{nr}");
        }
        assert_eq!(answer(libc::SYS_clone3), errno(libc::ENOSYS));
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
