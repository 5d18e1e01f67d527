//! Datagrams with descriptors over a `SEQPACKET` pair.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors in one message.
pub(crate) const MAX_FDS: usize = 60;
/// Largest message.
pub(crate) const MAX_BYTES: usize = 64 << 10;

/// A connected pair. Both ends close on exec.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = rustix::net::SocketFlags::CLOEXEC;
    Ok(rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Sends one message.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    wait: bool,
) -> io::Result<()> {
    if fds.len() > MAX_FDS || bytes.len() > MAX_BYTES {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
    let sent = rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))?;
    if sent == bytes.len() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EMSGSIZE)) }
}

/// Receives one message into `buffer`. `None` is the end: the peer is gone.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> io::Result<Option<usize>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        rustix::io::retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags))?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    if message.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
        fds.clear();
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    if message.bytes == 0 { Ok(None) } else { Ok(Some(message.bytes)) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn bytes_and_descriptors_arrive_together_and_the_end_is_seen() {
        let (ours, theirs) = pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"hello").unwrap();
        send(ours.as_fd(), b"one", &[file.as_fd()], true).unwrap();
        send(ours.as_fd(), b"two", &[], true).unwrap();
        drop(ours);
        let (mut buffer, mut fds) = ([0; 16], Vec::new());
        let flags = RecvFlags::CMSG_CLOEXEC;
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds, flags).unwrap(), Some(3));
        assert_eq!((&buffer[..3], fds.len()), (&b"one"[..], 1));
        let mut copy = std::fs::File::from(fds.pop().unwrap());
        copy.rewind().unwrap();
        let mut text = String::new();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds, flags).unwrap(), Some(3));
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds, flags).unwrap(), None);
    }

    #[test]
    fn a_message_that_does_not_fit_is_an_error_not_a_piece() {
        let (ours, theirs) = pair().unwrap();
        send(ours.as_fd(), b"too long", &[], true).unwrap();
        let got = receive(theirs.as_fd(), &mut [0; 4], &mut Vec::new(), RecvFlags::empty());
        assert_eq!(got.unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
    }
}
