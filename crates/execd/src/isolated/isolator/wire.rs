//! What the daemon and the process that makes isolated sessions say to each other: a document in memory per message,
//! its descriptor and others beside one byte.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Descriptors beside one message, the document's among them.
const MOST_FDS: usize = 8;
/// Longest document.
const LONGEST: u64 = 8 << 20;

/// What is asked.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::isolated) enum Request {
    /// A session. Beside it: its control socket and the pipe that its shell reads.
    Make(Box<Plan>),
    /// A process that serves the files of a session on the socket beside it; behind that, the session's pidfd.
    Serve {
        /// What may be seen: as it was named, and without symlinks.
        trees: Vec<(String, String)>,
    },
}

/// A session to be made. All paths are absolute and hold no NUL byte.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) struct Plan {
    /// Names the directory of its upper layers.
    pub(in crate::isolated) id: String,
    /// The workspace first.
    pub(in crate::isolated) trees: Vec<Tree>,
    /// Mounted as they are, in this order, after the trees.
    pub(in crate::isolated) binds: Vec<Bind>,
    /// Where binds may come from.
    pub(in crate::isolated) allowed: Vec<String>,
    /// Whether it has a `/tmp` of its own.
    pub(in crate::isolated) own_tmp: bool,
    /// Whether it sees the sandbox's network.
    pub(in crate::isolated) share_net: bool,
    /// Whom it runs as.
    pub(in crate::isolated) who: Who,
    /// `NAME=value` each, bytes.
    pub(in crate::isolated) env: Vec<Vec<u8>>,
    /// The shell's path.
    pub(in crate::isolated) shell: String,
    /// Its arguments, its name first.
    pub(in crate::isolated) argv: Vec<String>,
    /// Bound of everything that it keeps in memory, each by itself.
    pub(in crate::isolated) memory_bytes: u64,
    /// Bound of its upper layers that lie in memory.
    pub(in crate::isolated) upper_bytes: u64,
    /// System calls that its programs may not make, if not the usual ones.
    pub(in crate::isolated) refused_calls: Option<Vec<u32>>,
}

/// A directory that the session works on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) struct Tree {
    pub(in crate::isolated) path: String,
    pub(in crate::isolated) mode: Mode,
}

/// What changes to a tree mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) enum Mode {
    /// They are changes of the sandbox.
    ReadWrite,
    /// There are none.
    ReadOnly,
    /// They end with the session.
    Overlay {
        /// They lie on disk, where there is a place for them.
        on_disk: bool,
    },
}

/// A path mounted in the session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) struct Bind {
    pub(in crate::isolated) source: String,
    pub(in crate::isolated) dest: String,
    pub(in crate::isolated) readonly: bool,
}

/// User and group of a session.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) enum Who {
    /// Those of the daemon.
    #[default]
    Daemon,
    /// These, with nothing left of the daemon's.
    Real { uid: u32, gid: u32 },
    /// The daemon's, under these numbers.
    Seeming { uid: u32, gid: u32 },
}

/// First word of the isolator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) struct Hello {
    /// Why no session can be made.
    pub(in crate::isolated) unavailable: Option<String>,
    /// Why none can run as somebody else.
    pub(in crate::isolated) no_other_users: Option<String>,
    /// Whether upper layers can lie on disk. Their directory comes beside it.
    pub(in crate::isolated) disk: bool,
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::isolated) enum Answer {
    /// Beside it: the pidfd, and for a session the directory of its pipes.
    Made {
        /// As the daemon's namespace has it.
        pid: i32,
    },
    /// Nothing is left of it.
    Failed(Fault),
}

/// Why something was not made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) struct Fault {
    pub(in crate::isolated) kind: FaultKind,
    pub(in crate::isolated) message: String,
}

/// Whose fault it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::isolated) enum FaultKind {
    /// What was asked for cannot be had.
    Request,
    /// This identity cannot be taken on.
    Identity,
    /// The machine's.
    Machine,
}

impl Fault {
    pub(super) fn request(message: impl Into<String>) -> Self {
        Self { kind: FaultKind::Request, message: message.into() }
    }

    /// Adds what was tried.
    pub(super) fn doing<E: Into<io::Error>>(action: impl std::fmt::Display) -> impl FnOnce(E) -> Self {
        move |error| {
            let error: io::Error = error.into();
            Self { kind: FaultKind::Machine, message: format!("{action}: {error}") }
        }
    }
}

/// Sends a message.
pub(in crate::isolated) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut file = File::from(rustix::fs::memfd_create("message", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(message)?)?;
    let mut all = vec![file.as_fd()];
    all.extend_from_slice(fds);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&all));
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Waits for a message; `None` when the other end is gone.
pub(in crate::isolated) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut pieces = [IoSliceMut::new(&mut byte)];
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    match received {
        Ok(message) if message.bytes > 0 => {}
        Ok(_) | Err(rustix::io::Errno::CONNRESET) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    if fds.is_empty() {
        return Err(io::Error::other("a message without a document"));
    }
    let document = File::from(fds.remove(0));
    let length = document.metadata()?.len().min(LONGEST);
    let mut text = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    document.read_exact_at(&mut text, 0)?;
    Ok(Some((serde_json::from_slice(&text)?, fds)))
}
