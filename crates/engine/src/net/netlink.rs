//! A blocking netlink socket for the calls whose time counts. It belongs to the namespace it was opened in, whichever
//! thread uses it. Messages are written and read by nlink's codec.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nlink::netlink::{MessageBuilder, MessageIter, NlMsgType};
use rustix::io::retry_on_intr;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

/// Number 0, which rustix takes for the absence of a choice.
pub(super) const ROUTE: Option<Protocol> = None;
pub(super) const GENERIC: Option<Protocol> = Some(netlink::GENERIC);
pub(super) const NETFILTER: Option<Protocol> = Some(netlink::NETFILTER);
pub(super) const SOCK_DIAG: Option<Protocol> = Some(netlink::SOCK_DIAG);

pub(super) const REQUEST: u16 = 0x001;
pub(super) const ACK: u16 = 0x004;
pub(super) const DUMP: u16 = 0x300;
pub(super) const REPLACE: u16 = 0x100;
pub(super) const EXCLUSIVE: u16 = 0x200;
pub(super) const CREATE: u16 = 0x400;

/// Room for one datagram of answers; the kernel sizes dumps to what it is offered, up to 32 KiB.
const BUFFER: usize = 32 << 10;

#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        Self::subscribed(protocol, 0)
    }

    /// The same, joined to multicast groups given as a mask.
    pub(super) fn subscribed(protocol: Option<Protocol>, groups: u32) -> io::Result<Self> {
        let fd = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, groups))?;
        Ok(Self { fd, sequence: 0 })
    }

    /// From now on waiting for an answer or an event ends with an error after `patience`.
    pub(super) fn limit_waiting(&self, patience: Duration) -> io::Result<()> {
        Ok(sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Recv, Some(patience))?)
    }

    /// Receives one datagram; for sockets that are subscribed.
    pub(super) fn receive<'b>(&self, buffer: &'b mut Vec<u8>) -> io::Result<&'b [u8]> {
        buffer.resize(BUFFER, 0);
        let (length, _) = retry_on_intr(|| rustix::net::recv(&self.fd, &mut buffer[..], RecvFlags::empty()))?;
        Ok(&buffer[..length])
    }

    /// Sends one request and waits for its acknowledgement.
    pub(super) fn request(&mut self, message: MessageBuilder) -> io::Result<()> {
        self.batch([message])
    }

    /// Sends requests in one datagram, which the kernel works through in order, and waits for all their
    /// acknowledgements. The first error is returned; later requests were carried out all the same.
    pub(super) fn batch(&mut self, messages: impl IntoIterator<Item = MessageBuilder>) -> io::Result<()> {
        let mut datagram = Vec::with_capacity(512);
        let first = self.sequence.wrapping_add(1);
        let mut open = 0_u32;
        for message in messages {
            datagram.extend_from_slice(&self.number(message));
            open += 1;
        }
        self.send(&datagram)?;
        let mut failure = None;
        let mut buffer = Vec::new();
        while open > 0 {
            for message in MessageIter::new(self.receive(&mut buffer)?) {
                let (header, payload) = message.map_err(io::Error::other)?;
                if header.nlmsg_type != NlMsgType::ERROR || header.nlmsg_seq.wrapping_sub(first) > 1 << 16 {
                    continue;
                }
                open -= 1;
                if let Some(error) = error_of(payload) {
                    failure.get_or_insert(error);
                }
                if open == 0 {
                    break;
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Sends one request that is answered by a single message, and hands that message's payload to `read`.
    pub(super) fn query<T>(
        &mut self,
        message: MessageBuilder,
        read: impl FnOnce(&[u8]) -> Option<T>,
    ) -> io::Result<T> {
        let datagram = self.number(message);
        let sequence = self.sequence;
        self.send(&datagram)?;
        let mut buffer = Vec::new();
        loop {
            for message in MessageIter::new(self.receive(&mut buffer)?) {
                let (header, payload) = message.map_err(io::Error::other)?;
                if header.nlmsg_seq != sequence {
                    continue;
                }
                if header.nlmsg_type == NlMsgType::ERROR {
                    return Err(error_of(payload).unwrap_or_else(unexpected));
                }
                return read(payload).ok_or_else(unexpected);
            }
        }
    }

    /// Sends a request for a list and hands every entry's payload to `each`. A list that changed while it was read
    /// is read on: callers look for what they own, and nobody else changes that.
    pub(super) fn dump(&mut self, message: MessageBuilder, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let datagram = self.number(message);
        let sequence = self.sequence;
        self.send(&datagram)?;
        let mut buffer = Vec::new();
        loop {
            for message in MessageIter::new(self.receive(&mut buffer)?) {
                let (header, payload) = message.map_err(io::Error::other)?;
                if header.nlmsg_seq != sequence {
                    continue;
                }
                match header.nlmsg_type {
                    NlMsgType::DONE => return Ok(()),
                    NlMsgType::ERROR => return error_of(payload).map_or(Ok(()), Err),
                    _ => each(payload),
                }
            }
        }
    }

    fn number(&mut self, mut message: MessageBuilder) -> Vec<u8> {
        self.sequence = self.sequence.wrapping_add(1);
        message.set_seq(self.sequence);
        let mut bytes = message.finish();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn send(&self, datagram: &[u8]) -> io::Result<()> {
        retry_on_intr(|| rustix::net::send(&self.fd, datagram, SendFlags::empty()))?;
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The error number of an `NLMSG_ERROR`, which is 0 in an acknowledgement.
fn error_of(payload: &[u8]) -> Option<io::Error> {
    let number = payload.first_chunk().map_or(-libc::EPROTO, |bytes| i32::from_ne_bytes(*bytes));
    (number != 0).then(|| io::Error::from_raw_os_error(-number))
}

fn unexpected() -> io::Error {
    io::Error::from_raw_os_error(libc::EPROTO)
}

/// Was the thing asked for not there?
pub(super) fn absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENOENT | libc::ESRCH | libc::ENXIO))
}

/// A number in the machine's byte order at a place of a message.
pub(super) fn u32_at(payload: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*payload.get(offset..)?.first_chunk()?))
}

/// As [`u32_at`].
pub(super) fn u64_at(payload: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*payload.get(offset..)?.first_chunk()?))
}
