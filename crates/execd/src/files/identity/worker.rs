//! The process that serves files as somebody else: this program, executed again, on one socket.
//!
//! It becomes the identity while it has one thread and serves nothing, and cannot go back. That it is not dumpable
//! keeps the sandbox's processes of the same user from tracing it.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::super::workers::READY;
use super::Who;
use crate::accounts::Accounts;
use crate::app::{App, Shared};
use crate::binding::{Binding, Current};

/// The flag that makes this program a worker.
pub(crate) const FLAG: &str = "file-worker";
/// One request at a time needs a thread for the next piece and one for the current.
const BLOCKING_THREADS: usize = 4;

/// Becomes `uid:gid` and serves the connection on standard input to its end. Call it while the process has one
/// thread. What has been begun is finished first.
///
/// # Errors
/// The socket or the runtime fails; nobody is left to be told more.
pub(crate) fn run(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: `reserve_standard` has seen to it that the descriptor is open, and nothing else in this process uses it.
    let mut socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    let identity = Identity::of(&Accounts::read(), Who { uid, gid });
    let word = identity.assume().err().unwrap_or_else(|| READY.to_owned());
    socket.write_all(format!("{word}\n").as_bytes())?;
    if word == READY {
        let binding = Binding { env: vec![("HOME".into(), identity.home.into())], ..Binding::default() };
        serve(socket, Shared { binding: Current::new(binding), ..Shared::default() })
    } else {
        Ok(())
    }
}

/// Serves files on a connection to its end. Call it while the process has one thread.
///
/// # Errors
/// The socket or the runtime fails.
pub(crate) fn serve(socket: UnixStream, shared: Shared) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()?;
    let app = App::new(shared);
    let router = super::super::operations()
        .fallback(crate::http::not_found)
        .method_not_allowed_fallback(crate::http::not_found)
        .with_state(app);
    runtime.block_on(async {
        socket.set_nonblocking(true)?;
        let socket = TokioIo::new(tokio::net::UnixStream::from_std(socket)?);
        // It ends with an error when the client leaves in the middle of something.
        let _ = http1::Builder::new().serve_connection(socket, TowerToHyperService::new(router)).await;
        Ok(())
    })
}

#[derive(Debug, PartialEq, Eq)]
struct Identity {
    who: Who,
    /// Supplementary groups.
    groups: Vec<u32>,
    home: String,
}

impl Identity {
    /// The groups that name the account as a member; the group asked for stands in for the account's own.
    fn of(accounts: &Accounts, who: Who) -> Self {
        let groups = accounts.groups_beside(who.uid, who.gid);
        let account = accounts.user_by_id(who.uid);
        let home = account.map(|user| user.home.clone()).filter(|home| home.starts_with('/'));
        Self { who, groups, home: home.unwrap_or_else(|| "/".to_owned()) }
    }

    /// Takes the identity on, for good.
    fn assume(&self) -> Result<(), String> {
        let Who { uid, gid } = self.who;
        if !self.is_assumed() {
            let groups: Vec<_> = self.groups.iter().copied().map(rustix::process::Gid::from_raw).collect();
            let (user, group) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(gid));
            // While this is still root, groups first.
            rustix::thread::set_thread_groups(&groups)
                .map_err(|errno| self.refused("set the groups", errno))?;
            rustix::thread::set_thread_res_gid(group, group, group)
                .map_err(|errno| self.refused("become the group", errno))?;
            rustix::thread::set_thread_res_uid(user, user, user)
                .map_err(|errno| self.refused("become the user", errno))?;
        }
        if uid != 0 {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            rustix::thread::set_capabilities(None, sets)
                .map_err(|errno| self.refused("give the capabilities up", errno))?;
        }
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
            .map_err(|errno| self.refused("refuse to be traced", errno))?;
        // Nothing is served on the word of calls that returned without an error.
        let capable = rustix::thread::capabilities(None).map_or(true, |sets| !sets.permitted.is_empty());
        if !self.is_assumed() || (uid != 0 && capable) {
            return Err("the kernel did not change the identity".to_owned());
        }
        Ok(())
    }

    fn is_assumed(&self) -> bool {
        let Who { uid, gid } = self.who;
        let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return false };
        // Real, effective, saved and file system ids.
        let all = |name, id: u32| {
            let ids = field(&status, name);
            ids.len() == 4 && ids.iter().all(|found| *found == id)
        };
        let sorted = |mut groups: Vec<u32>| {
            groups.sort_unstable();
            groups.dedup();
            groups.retain(|group| *group != gid);
            groups
        };
        all("Uid:", uid)
            && all("Gid:", gid)
            && sorted(field(&status, "Groups:")) == sorted(self.groups.clone())
    }

    fn refused(&self, action: &str, errno: rustix::io::Errno) -> String {
        let Who { uid, gid } = self.who;
        let mut text = format!("cannot {action}: ");
        // Writing to a string does not fail.
        let _ = match errno {
            rustix::io::Errno::INVAL => write!(
                text,
                "not all of the ids are among those that the sandbox has (users {}, groups {}); choose others",
                ranges("/proc/self/uid_map"),
                ranges("/proc/self/gid_map")
            ),
            rustix::io::Errno::PERM => write!(
                text,
                "execd runs as user {} and may not become others; start it as root, with CAP_SETUID and \
                 CAP_SETGID, to serve {uid}:{gid}",
                rustix::process::geteuid().as_raw()
            ),
            errno => write!(text, "{}", io::Error::from(errno)),
        };
        text
    }
}

/// The numbers of a line of `/proc/self/status`.
fn field(status: &str, name: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// The ids of the user namespace.
fn ranges(map: &str) -> String {
    let map = std::fs::read_to_string(map).unwrap_or_default();
    let range = |line: &str| {
        let mut numbers = line.split_ascii_whitespace().filter_map(|number| number.parse::<u64>().ok());
        let (first, _, count) = (numbers.next()?, numbers.next()?, numbers.next()?);
        Some(format!("{first} to {}", (first + count).saturating_sub(1)))
    };
    map.lines().filter_map(range).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_those_that_name_the_account() {
        let accounts = Accounts::parse(
            b"alice:x:1000:1000::/home/alice:\nodd:x:7:7::relative:\n",
            b"alice:x:1000:\nstaff:x:50:bob,alice\nvideo:x:44:alice\n",
        );
        let of = |uid, gid| {
            let Identity { groups, home, .. } = Identity::of(&accounts, Who { uid, gid });
            (groups, home)
        };
        assert_eq!(of(1000, 1000), (vec![50, 44], "/home/alice".to_owned()));
        assert_eq!(of(1000, 50), (vec![44], "/home/alice".to_owned()));
        assert_eq!(of(1000, 9), (vec![50, 44], "/home/alice".to_owned()));
        assert_eq!(of(7, 7), (vec![], "/".to_owned()));
        assert_eq!(of(12345, 1), (vec![], "/".to_owned()));
    }

    #[test]
    fn lines_of_the_kernel_are_read() {
        assert_eq!(field("Name:\tx\nUid:\t1\t2\t3\t4\nGroups:\t5 6 \n", "Groups:"), [5, 6]);
        assert_eq!(field("Uid:\t1\t2\t3\t4\n", "Gid:"), Vec::<u32>::new());
    }
}
