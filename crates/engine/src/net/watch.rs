//! Notices when others change the packet filter: a `flush ruleset` that takes our table away, a Docker that starts
//! after us and drops what it does not know.

use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nlink::netlink::MessageIter;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::netlink::{NETFILTER, Socket};

/// Group 7 of netfilter's netlink: changes of nftables.
const NFTABLES_GROUP: u32 = 1 << 6;
const SUBSYSTEM: u16 = 10;
/// New and deleted tables, chains and rules. Elements of sets change all the time and concern nobody here.
const KINDS: [u16; 6] = [0, 2, 3, 5, 6, 8];
/// Changes come in bursts: wait until they pause, but not for ever.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_millis(500);

/// The watching thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `changed` after every change in the calling thread's namespace, starting from now.
    pub(super) fn start(mut changed: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let socket = Socket::subscribed(NETFILTER, NFTABLES_GROUP)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let thread = std::thread::Builder::new().name("net-watch".to_owned()).spawn(move || {
            loop {
                match next_change(&socket, &stopped) {
                    Ok(true) => changed(),
                    Ok(false) => return,
                    Err(error) => {
                        tracing::error!(%error, "changes of the packet filter are no longer watched");
                        return;
                    }
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Writing to an eventfd of count 0 cannot fail; were it to, joining would hang.
        if rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).is_err() {
            return;
        }
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// Waits for a burst of changes and its end. False when it is time to stop.
fn next_change(socket: &Socket, stop: &OwnedFd) -> io::Result<bool> {
    let mut began: Option<Instant> = None;
    let mut buffer = Vec::new();
    loop {
        let wait = match began {
            None => None,
            Some(began) if began.elapsed() >= LONGEST => return Ok(true),
            Some(_) => Some(Timespec { tv_sec: 0, tv_nsec: i64::from(PAUSE.subsec_nanos()) }),
        };
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut fds, wait.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(0) => return Ok(true),
            other => other?,
        };
        if !fds[1].revents().is_empty() {
            return Ok(false);
        }
        let relevant = match socket.receive(&mut buffer) {
            Ok(datagram) => MessageIter::new(datagram).flatten().any(|(header, _)| {
                header.nlmsg_type >> 8 == SUBSYSTEM && KINDS.contains(&(header.nlmsg_type & 0xff))
            }),
            // So many changes that some were not delivered.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => true,
            Err(error) => return Err(error),
        };
        if relevant {
            began.get_or_insert_with(Instant::now);
        }
    }
}
