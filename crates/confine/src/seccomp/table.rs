//! Which system calls a sandbox may make.
//!
//! Allowed is what programs of a whole user land need: files, memory, processes, signals, timers, sockets, locks,
//! tracing of one's own processes. Not allowed is what reaches the machine (mounts, modules, clocks, boot), what
//! opens new namespaces, and large kernel parts with a history of faults that ordinary programs do without.

use std::collections::BTreeMap;

use super::bpf::{ArgTest, Verdict};
use super::{ENOSYS, EPERM};

macro_rules! numbers {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// On every architecture.
const ALLOWED: &[libc::c_long] = numbers! {
    SYS_accept SYS_accept4 SYS_adjtimex SYS_bind SYS_brk SYS_capget SYS_capset SYS_chdir SYS_chroot
    SYS_clock_adjtime SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_close SYS_close_range
    SYS_connect SYS_copy_file_range SYS_dup SYS_dup3 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
    SYS_epoll_pwait2 SYS_eventfd2 SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_faccessat
    SYS_faccessat2 SYS_fadvise64 SYS_fallocate SYS_fchdir SYS_fchmod SYS_fchmodat SYS_fchmodat2 SYS_fchown
    SYS_fchownat SYS_fcntl SYS_fdatasync SYS_fgetxattr SYS_flistxattr SYS_flock SYS_fremovexattr
    SYS_fsetxattr SYS_fstat SYS_fstatfs SYS_fsync SYS_ftruncate SYS_futex SYS_futex_waitv SYS_get_mempolicy
    SYS_get_robust_list SYS_getcpu SYS_getcwd SYS_getdents64 SYS_getegid SYS_geteuid SYS_getgid
    SYS_getgroups SYS_getitimer SYS_getpeername SYS_getpgid SYS_getpid SYS_getppid SYS_getpriority
    SYS_getrandom SYS_getresgid SYS_getresuid SYS_getrlimit SYS_getrusage SYS_getsid SYS_getsockname
    SYS_getsockopt SYS_gettid SYS_gettimeofday SYS_getuid SYS_getxattr SYS_inotify_add_watch
    SYS_inotify_init1 SYS_inotify_rm_watch SYS_io_cancel SYS_io_destroy SYS_io_getevents SYS_io_setup
    SYS_io_submit SYS_ioprio_get SYS_ioprio_set SYS_kill SYS_landlock_add_rule SYS_landlock_create_ruleset
    SYS_landlock_restrict_self SYS_lgetxattr SYS_linkat SYS_listen SYS_listxattr SYS_llistxattr
    SYS_lremovexattr SYS_lseek SYS_lsetxattr SYS_madvise SYS_mbind SYS_membarrier SYS_memfd_create
    SYS_mincore SYS_mkdirat SYS_mknodat SYS_mlock SYS_mlock2 SYS_mlockall SYS_mmap SYS_mprotect
    SYS_mq_getsetattr SYS_mq_notify SYS_mq_open SYS_mq_timedreceive SYS_mq_timedsend SYS_mq_unlink
    SYS_mremap SYS_mseal SYS_msgctl SYS_msgget SYS_msgrcv SYS_msgsnd SYS_msync SYS_munlock SYS_munlockall
    SYS_munmap SYS_name_to_handle_at SYS_nanosleep SYS_newfstatat SYS_openat SYS_openat2 SYS_pidfd_open
    SYS_pidfd_send_signal SYS_pipe2 SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect SYS_ppoll SYS_prctl
    SYS_pread64 SYS_preadv SYS_preadv2 SYS_prlimit64 SYS_process_madvise SYS_process_mrelease
    SYS_process_vm_readv SYS_process_vm_writev SYS_pselect6 SYS_ptrace SYS_pwrite64 SYS_pwritev
    SYS_pwritev2 SYS_read SYS_readahead SYS_readlinkat SYS_readv SYS_recvfrom SYS_recvmmsg SYS_recvmsg
    SYS_remap_file_pages SYS_removexattr SYS_renameat SYS_renameat2 SYS_restart_syscall SYS_rseq
    SYS_rt_sigaction SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigqueueinfo SYS_rt_sigreturn
    SYS_rt_sigsuspend SYS_rt_sigtimedwait SYS_rt_tgsigqueueinfo SYS_sched_get_priority_max
    SYS_sched_get_priority_min SYS_sched_getaffinity SYS_sched_getattr SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_rr_get_interval SYS_sched_setaffinity SYS_sched_setattr
    SYS_sched_setparam SYS_sched_setscheduler SYS_sched_yield SYS_seccomp SYS_semctl SYS_semget SYS_semop
    SYS_semtimedop SYS_sendfile SYS_sendmmsg SYS_sendmsg SYS_sendto SYS_set_mempolicy
    SYS_set_mempolicy_home_node SYS_set_robust_list SYS_set_tid_address SYS_setfsgid SYS_setfsuid
    SYS_setgid SYS_setgroups SYS_setitimer SYS_setpgid SYS_setpriority SYS_setregid SYS_setresgid
    SYS_setresuid SYS_setreuid SYS_setrlimit SYS_setsid SYS_setsockopt SYS_setuid SYS_setxattr SYS_shmat
    SYS_shmctl SYS_shmdt SYS_shmget SYS_shutdown SYS_sigaltstack SYS_signalfd4 SYS_splice SYS_statfs
    SYS_statx SYS_symlinkat SYS_sync SYS_sync_file_range SYS_syncfs SYS_sysinfo SYS_tee SYS_tgkill
    SYS_timer_create SYS_timer_delete SYS_timer_getoverrun SYS_timer_gettime SYS_timer_settime
    SYS_timerfd_create SYS_timerfd_gettime SYS_timerfd_settime SYS_times SYS_tkill SYS_truncate SYS_umask
    SYS_uname SYS_unlinkat SYS_utimensat SYS_vmsplice SYS_wait4 SYS_waitid SYS_write SYS_writev
};

/// Forms that only x86-64 has; newer architectures have just the `…at` ones.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[libc::c_long] = numbers! {
    SYS_access SYS_alarm SYS_arch_prctl SYS_chmod SYS_chown SYS_creat SYS_dup2 SYS_epoll_create
    SYS_epoll_wait SYS_eventfd SYS_fork SYS_futimesat SYS_get_thread_area SYS_getdents SYS_getpgrp
    SYS_inotify_init SYS_lchown SYS_link SYS_lstat SYS_memfd_secret SYS_mkdir SYS_mknod SYS_open SYS_pause
    SYS_pipe SYS_poll SYS_readlink SYS_rename SYS_rmdir SYS_select SYS_set_thread_area SYS_signalfd SYS_stat
    SYS_symlink SYS_time SYS_unlink SYS_utime SYS_utimes SYS_vfork
};
#[cfg(target_arch = "aarch64")]
const ALLOWED_HERE: &[libc::c_long] = numbers! { SYS_memfd_secret };

/// Calls newer than the constants of the libc crate; these numbers are the same everywhere.
const ALLOWED_NEW: &[u32] = &[
    451, // cachestat
    453, // map_shadow_stack
    454, 455, 456, // futex_wake, futex_wait, futex_requeue
    457, 458, // statmount, listmount: one's own mount namespace
    459, 461, // lsm_get_self_attr, lsm_list_modules
    463, 464, 465, 466, // setxattrat, getxattrat, listxattrat, removexattrat
    468, 469, // file_getattr, file_setattr
];

/// `uretprobe` (335) comes from a trampoline of the kernel's in traced programs; refusing it kills them.
#[cfg(target_arch = "x86_64")]
const ALLOWED_PROBE: &[u32] = &[335];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_PROBE: &[u32] = &[];

/// Answered with "no such call", for which programs have a fallback.
const ABSENT: &[libc::c_long] = numbers! {
    SYS_clone3 SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register
};

/// The largest number that this table knows.
const LAST_KNOWN: u32 = 469;

const CLONE_NEWTIME: u32 = 0x80;
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;
const IPPROTO_RAW: i32 = 255;

/// Verdicts by number. Numbers in between that have none are refused.
pub(super) fn sandbox() -> BTreeMap<u32, Verdict> {
    let mut table = BTreeMap::new();
    for &number in ALLOWED.iter().chain(ALLOWED_HERE) {
        table.insert(nr(number), Verdict::Allow);
    }
    for &number in ALLOWED_NEW.iter().chain(ALLOWED_PROBE) {
        table.insert(number, Verdict::Allow);
    }
    for &number in ABSENT {
        table.insert(nr(number), Verdict::Errno(ENOSYS));
    }
    table.entry(LAST_KNOWN).or_insert(Verdict::Errno(EPERM));

    table.extend(no_namespaces());
    table.insert(nr(libc::SYS_socket), socket());
    let unix = (libc::AF_UNIX.cast_unsigned(), Verdict::Allow);
    table.insert(nr(libc::SYS_socketpair), one_of(0, vec![unix], errno(libc::EAFNOSUPPORT)));

    // Linux, 32-bit Linux, each with 2.6-style versions, without address randomisation (debuggers), and "ask".
    let personalities = [0, 8, 0x0002_0000, 0x0002_0008, 0x0004_0000, 0x0004_0008, u32::MAX];
    table.insert(
        nr(libc::SYS_personality),
        one_of(0, personalities.map(|value| (value, Verdict::Allow)).to_vec(), Verdict::Errno(EPERM)),
    );

    // Typing into somebody's terminal.
    let typing = vec![(TIOCSTI, Verdict::Errno(EPERM)), (TIOCLINUX, Verdict::Errno(EPERM))];
    table.insert(nr(libc::SYS_ioctl), one_of(1, typing, Verdict::Allow));
    table
}

/// Threads and processes, but no namespaces.
fn no_namespaces() -> [(u32, Verdict); 2] {
    let namespaces = (libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET)
        .cast_unsigned();
    [
        (nr(libc::SYS_clone), without_bits(0, namespaces)),
        // In `clone` the bit of the time namespace is part of the exit signal.
        (nr(libc::SYS_unshare), without_bits(0, namespaces | CLONE_NEWTIME)),
    ]
}

/// What isolated sessions are made with.
const BUILDING: &[libc::c_long] = numbers! {
    SYS_mount SYS_mount_setattr SYS_move_mount SYS_open_tree SYS_setns SYS_sethostname
};

/// The contract's list for isolated sessions (`execd.md` 12.7), and the error that it names for them.
const REFUSED_TO_SESSIONS: &[libc::c_long] = numbers! {
    SYS_mount SYS_umount2 SYS_chroot SYS_pivot_root SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_kcmp
    SYS_init_module SYS_finit_module SYS_delete_module SYS_bpf SYS_seccomp SYS_personality SYS_add_key
    SYS_request_key SYS_keyctl SYS_reboot SYS_syslog SYS_swapon SYS_swapoff SYS_setns SYS_unshare
    SYS_name_to_handle_at SYS_open_by_handle_at SYS_userfaultfd SYS_kexec_load SYS_kexec_file_load SYS_acct
};
#[cfg(target_arch = "x86_64")]
const REFUSED_TO_SESSIONS_HERE: &[libc::c_long] = numbers! { SYS_iopl SYS_ioperm };
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_TO_SESSIONS_HERE: &[libc::c_long] = &[];

/// Doors to mounts that the contract's list is older than, and to the kernel beside all filters.
const REFUSED_TO_SESSIONS_TOO: &[libc::c_long] = numbers! {
    SYS_open_tree SYS_move_mount SYS_mount_setattr SYS_fsopen SYS_fsconfig SYS_fsmount SYS_fspick SYS_sethostname
    SYS_setdomainname SYS_perf_event_open SYS_pidfd_getfd SYS_umount2 SYS_pivot_root SYS_bpf
};

/// On x86-64 the calls from here on are the same ones again, with shorter pointers.
const OTHER_NUMBERS: u32 = 0x4000_0000;

/// As [`sandbox`], for what makes isolated sessions.
pub(super) fn builder() -> BTreeMap<u32, Verdict> {
    let mut table = sandbox();
    for &number in BUILDING {
        table.insert(nr(number), Verdict::Allow);
    }
    for number in [libc::SYS_clone, libc::SYS_unshare] {
        table.insert(nr(number), Verdict::Allow);
    }
    table
}

/// What [`builder`] allows beyond [`sandbox`].
pub(super) fn rest() -> BTreeMap<u32, Verdict> {
    let mut table: BTreeMap<u32, Verdict> =
        BUILDING.iter().map(|&number| (nr(number), Verdict::Errno(EPERM))).collect();
    table.extend(no_namespaces());
    table.insert(OTHER_NUMBERS, Verdict::Errno(ENOSYS));
    table
}

/// What is refused to programs of an isolated session: `chosen`, or the contract's list.
pub(super) fn session(chosen: Option<&[u32]>) -> BTreeMap<u32, Verdict> {
    let mut table = rest();
    for &number in REFUSED_TO_SESSIONS_TOO {
        table.insert(nr(number), Verdict::Errno(EPERM));
    }
    let usual = REFUSED_TO_SESSIONS.iter().chain(REFUSED_TO_SESSIONS_HERE).map(|&number| nr(number));
    match chosen {
        None => table.extend(usual.map(|number| (number, errno(libc::EACCES)))),
        Some(chosen) => table.extend(chosen.iter().map(|&number| (number, errno(libc::EACCES)))),
    }
    for &number in ABSENT {
        table.insert(nr(number), Verdict::Errno(ENOSYS));
    }
    table
}

/// Unix, IP with the usual protocols, and the netlink families that show addresses, routes and sockets. Raw and
/// packet sockets are a matter of capabilities; rare families and protocols would load kernel modules.
fn socket() -> Verdict {
    let protocols = |list: &[i32]| {
        let cases = list.iter().map(|protocol| (protocol.cast_unsigned(), Verdict::Allow)).collect();
        one_of(2, cases, errno(libc::EPROTONOSUPPORT))
    };
    let ip = protocols(&[
        0,
        libc::IPPROTO_ICMP,
        libc::IPPROTO_TCP,
        libc::IPPROTO_UDP,
        libc::IPPROTO_ICMPV6,
        IPPROTO_RAW,
    ]);
    let netlink = protocols(&[libc::NETLINK_ROUTE, libc::NETLINK_SOCK_DIAG, libc::NETLINK_KOBJECT_UEVENT]);
    let families = vec![
        (libc::AF_UNIX.cast_unsigned(), Verdict::Allow),
        (libc::AF_INET.cast_unsigned(), ip.clone()),
        (libc::AF_INET6.cast_unsigned(), ip),
        (libc::AF_NETLINK.cast_unsigned(), netlink),
    ];
    one_of(0, families, errno(libc::EAFNOSUPPORT))
}

fn without_bits(index: u8, mask: u32) -> Verdict {
    let otherwise = Box::new(Verdict::Errno(EPERM));
    Verdict::Arg(ArgTest { index, mask, cases: vec![(0, Verdict::Allow)], otherwise })
}

fn one_of(index: u8, cases: Vec<(u32, Verdict)>, otherwise: Verdict) -> Verdict {
    Verdict::Arg(ArgTest { index, mask: u32::MAX, cases, otherwise: Box::new(otherwise) })
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn errno(number: i32) -> Verdict {
    Verdict::Errno(number as u16)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn nr(number: libc::c_long) -> u32 {
    number as u32
}
