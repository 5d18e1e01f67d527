//! The daemon's hold on the process that makes sessions.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http::StatusCode;
use osb_protocol::execd::code;
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, socketpair,
};

use super::isolator::wire::{self, Answer, Fault, FaultKind, Hello, Request};
use super::isolator::{self};
use super::spec::refused;
use crate::files::remove;
use crate::http::ApiError;
use crate::process::spawn::{Program, Stdio, spawn};

/// Where an ordinary daemon looks for a place for upper layers.
const UPPER_ROOT: &str = "/var/lib/execd/isolation";

/// Who starts the process.
#[derive(Debug, Default)]
pub enum Source {
    /// The daemon itself.
    #[default]
    Own,
    /// Init, asked through this socket.
    Init(OwnedFd),
}

/// Starts the process when it is needed, and again when it has died.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    source: Source,
    link: tokio::sync::Mutex<Option<Arc<Link>>>,
}

/// The process and what it has said of itself.
#[derive(Debug)]
pub(super) struct Link {
    socket: Mutex<OwnedFd>,
    hello: Hello,
    /// Directory of upper layers on disk.
    disk: Option<Arc<OwnedFd>>,
    broken: AtomicBool,
}

impl Keeper {
    pub(super) fn new(source: Source) -> Self {
        Self { source, link: tokio::sync::Mutex::default() }
    }

    /// The process; started if there is none. Not cancel safe.
    pub(super) async fn link(&self) -> Result<Arc<Link>, ApiError> {
        let mut held = self.link.lock().await;
        if let Some(link) = held.as_ref().filter(|link| !link.broken.load(Ordering::Relaxed)) {
            return Ok(Arc::clone(link));
        }
        let first = held.is_none();
        let (ours, theirs) = pair().map_err(unavailable)?;
        self.start(theirs).await.map_err(unavailable)?;
        let link = tokio::task::spawn_blocking(move || Link::greet(ours, first)).await;
        let link = link.map_err(|error| unavailable(io::Error::other(error)))?.map_err(unavailable)?;
        let link = Arc::new(link);
        // One that cannot work ends at once; the next request may find another world.
        *held = link.hello.unavailable.is_none().then(|| Arc::clone(&link));
        Ok(link)
    }

    async fn start(&self, socket: OwnedFd) -> io::Result<()> {
        match &self.source {
            Source::Init(init) => {
                let fds = [socket.as_fd()];
                let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                control.push(SendAncillaryMessage::ScmRights(&fds));
                rustix::net::sendmsg(init, &[io::IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
                Ok(())
            }
            Source::Own => {
                let started = tokio::task::spawn_blocking(move || start_own(&socket)).await;
                let pidfd = started.map_err(io::Error::other)??;
                let pidfd = crate::process::watch::readable(pidfd).map_err(|(_, error)| error)?;
                // It ends with its socket, whenever that is.
                tokio::spawn(async move { crate::command::output::ended(&pidfd).await });
                Ok(())
            }
        }
    }
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn unavailable(error: io::Error) -> ApiError {
    not_available(&error.to_string())
}

/// 503: no session can be made.
pub(super) fn not_available(reason: &str) -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        code::SERVICE_UNAVAILABLE,
        format!("isolated sessions are not available here: {reason}"),
    )
}

/// Executes this very program again.
fn start_own(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let uppers = own_uppers();
    let program = Program {
        candidates: vec![c"/proc/self/exe".to_owned()],
        argv: vec![c"execd".to_owned(), std::ffi::CString::new(format!("--{}", isolator::FLAG))?],
        env: Vec::new(),
        cwd: c"/".to_owned(),
        identity: None,
        tag: None,
    };
    let stdio = Stdio {
        stdin: socket.as_fd(),
        stdout: uppers.as_ref().map_or(null.as_fd(), OwnedFd::as_fd),
        stderr: null.as_fd(),
    };
    Ok(spawn(&program, stdio, &[]).map_err(io::Error::other)?.pidfd)
}

/// A directory that can hold upper layers: not on an overlay itself.
fn own_uppers() -> Option<OwnedFd> {
    const OVERLAY: u32 = 0x794c_7630;
    std::fs::create_dir_all(UPPER_ROOT).ok()?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::open(UPPER_ROOT, flags, Mode::empty()).ok()?;
    let kind = rustix::fs::fstatfs(&dir).ok()?.f_type;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let kind = kind as u32;
    (kind != OVERLAY).then_some(dir)
}

impl Link {
    fn greet(socket: OwnedFd, first: bool) -> io::Result<Self> {
        let Some((hello, fds)) = wire::receive::<Hello>(&socket)? else {
            return Err(io::Error::other(
                "the process that makes them ended at its start; the sandbox may be short of memory",
            ));
        };
        let disk = fds.into_iter().next().map(Arc::new);
        if first && let Some(disk) = &disk {
            // Of sessions of a daemon before this one.
            clear(disk)?;
        }
        Ok(Self { socket: Mutex::new(socket), hello, disk, broken: AtomicBool::new(false) })
    }

    pub(super) fn hello(&self) -> &Hello {
        &self.hello
    }

    pub(super) fn disk(&self) -> Option<&Arc<OwnedFd>> {
        self.disk.as_ref()
    }

    /// Whether it can make sessions.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        match &self.hello.unavailable {
            Some(reason) => Err(not_available(reason)),
            None => Ok(()),
        }
    }

    /// Asks for something; gives the descriptors beside the answer. Blocks.
    pub(super) fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>, ApiError> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = wire::send(&*socket, request, fds).and_then(|()| wire::receive::<Answer>(&*socket));
        match answer {
            Ok(Some((Answer::Made { .. }, fds))) => Ok(fds),
            Ok(Some((Answer::Failed(fault), _))) => Err(explain(fault)),
            Ok(None) => {
                self.broken.store(true, Ordering::Relaxed);
                Err(not_available("the process that makes them has died; try again"))
            }
            Err(error) => {
                self.broken.store(true, Ordering::Relaxed);
                Err(unavailable(error))
            }
        }
    }
}

fn explain(fault: Fault) -> ApiError {
    match fault.kind {
        FaultKind::Request => refused(fault.message),
        FaultKind::Identity => {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code::NOT_SUPPORTED, fault.message)
        }
        FaultKind::Machine => ApiError::runtime(format!("the session cannot be made: {}", fault.message)),
    }
}

fn clear(dir: &OwnedFd) -> io::Result<()> {
    for (name, _) in crate::files::dir::read_sorted(dir, usize::MAX)? {
        let name: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(&name);
        if let Err(error) = remove::tree_at(dir.as_fd(), name) {
            tracing::warn!(%error, name = %Path::new(name).display(), "an upper layer is left");
        }
    }
    Ok(())
}
