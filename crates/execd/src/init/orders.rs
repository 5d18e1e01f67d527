//! The socket through which a waiting init is told what its sandbox shall be.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use osb_protocol::boot::{Order, Started};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::de::DeserializeOwned;

/// What the other end wants.
pub(super) enum Told {
    /// To go the way of an order once, with nothing at its end.
    Rehearse,
    /// This, with the document that says so, and where the output of hooks goes.
    Order(Box<Order>, OwnedFd, Option<OwnedFd>),
    /// Nothing any more: it has gone.
    Leave,
}

/// One end of a `SEQPACKET` pair. The engine has the other; between init and a waiting daemon init has it.
#[derive(Debug)]
pub(super) struct Orders(OwnedFd);

impl AsFd for Orders {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Orders {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Orders {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Two ends that close on exec.
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self(one), Self(other)))
    }

    /// Waits for a word.
    pub(super) fn take(&self) -> io::Result<Told> {
        let Some(fds) = self.receive()? else { return Ok(Told::Leave) };
        let mut fds = fds.into_iter();
        match fds.next() {
            Some(document) => Ok(Told::Order(Box::new(read(&document)?), document, fds.next())),
            None => Ok(Told::Rehearse),
        }
    }

    /// Waits for a message and gives its descriptors, two at most. `None`: the other end has gone.
    pub(super) fn receive(&self) -> io::Result<Option<Vec<OwnedFd>>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut pieces = [io::IoSliceMut::new(&mut byte)];
        let message = match rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(&self.0, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC)
        }) {
            Ok(message) => message,
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut received = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                received.extend(fds);
            }
        }
        Ok(Some(received).filter(|fds| message.bytes > 0 || !fds.is_empty()))
    }

    /// Passes the word on to rehearse. Whoever has gone needs none.
    pub(super) fn rehearse(&self) {
        let _ = rustix::net::send(&self.0, &[0], SendFlags::NOSIGNAL);
    }

    /// Passes a document on, perhaps with one descriptor more. Whoever has gone needs none.
    pub(super) fn pass_on(&self, document: &OwnedFd, beside: Option<&OwnedFd>) {
        let fds: Vec<BorrowedFd<'_>> =
            [Some(document), beside].into_iter().flatten().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let _ = rustix::net::sendmsg(&self.0, &[io::IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL);
    }

    /// Tells how the start went, and hangs up. The engine may have gone, which is its own affair.
    pub(super) fn answer(self, started: &Started) {
        if let Ok(text) = serde_json::to_vec(started) {
            let _ = rustix::net::send(&self.0, &text, SendFlags::NOSIGNAL);
        }
        // Whoever else has inherited the socket has no say in this.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

/// The descriptor beside a word; `None` when there is none, or nobody to send it.
pub(super) fn descriptor(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut pieces = [io::IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| rustix::net::recvmsg(socket, &mut pieces, &mut control, flags))?;
    Ok(control.drain().find_map(|part| match part {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    }))
}

/// Reads and parses a whole document.
pub(super) fn read<T: DeserializeOwned>(document: &OwnedFd) -> io::Result<T> {
    let mut text = Vec::new();
    let mut piece = [0u8; 4096];
    loop {
        // By offset: whoever wrote the document has left the file's position at its end.
        match rustix::io::pread(document, &mut piece, text.len() as u64) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&piece[..length]),
            Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::other(format!("the document cannot be read: {error}"))),
        }
    }
    serde_json::from_slice(&text)
        .map_err(|error| io::Error::other(format!("the document is not understood: {error}")))
}
