//! The daemon's hold on the process that makes sessions.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use http::StatusCode;
use osb_protocol::execd::code;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, socketpair,
};

use super::config::Config;
use super::isolator::wire::{self, Answer, Fault, FaultKind, Hello, Request};
use super::isolator::{self};
use super::spec::refused;
use crate::files::remove;
use crate::http::ApiError;
use crate::process::spawn::{Program, Stdio, spawn};

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
    pub(super) config: Arc<Config>,
    /// The daemon's own place for upper layers, if it is the one who starts the process.
    uppers: Arc<OnceLock<Option<OwnUppers>>>,
    link: tokio::sync::Mutex<Option<Arc<Link>>>,
}

/// The process and what it has said of itself.
#[derive(Debug)]
pub(super) struct Link {
    socket: Mutex<OwnedFd>,
    hello: Hello,
    /// Directory of upper layers on disk.
    disk: Option<Arc<OwnedFd>>,
    /// Bound of what lies in it.
    upper_max_bytes: Option<u64>,
    broken: AtomicBool,
}

impl Keeper {
    pub(super) fn new(source: Source, config: Config) -> Self {
        Self { source, config: Arc::new(config), ..Self::default() }
    }

    /// The process; started if there is none. Not cancel safe.
    pub(super) async fn link(&self) -> Result<Arc<Link>, ApiError> {
        let mut held = self.link.lock().await;
        if let Some(link) = held.as_ref().filter(|link| link.is_alive()) {
            return Ok(Arc::clone(link));
        }
        let first = held.is_none();
        let (ours, theirs) = pair().map_err(unavailable)?;
        self.start(theirs).await.map_err(unavailable)?;
        let bound = self.config.upper_max_bytes;
        let link = tokio::task::spawn_blocking(move || Link::greet(ours, first, bound)).await;
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
                let (uppers, config) = (Arc::clone(&self.uppers), Arc::clone(&self.config));
                let started = tokio::task::spawn_blocking(move || {
                    let uppers = uppers.get_or_init(|| OwnUppers::make(&config.upper_root));
                    start_own(&socket, uppers.as_ref().map(|uppers| uppers.dir.as_fd()))
                });
                let started = started.await;
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
fn start_own(socket: &OwnedFd, uppers: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let program = Program {
        candidates: vec![c"/proc/self/exe".to_owned()],
        argv: vec![c"execd".to_owned(), std::ffi::CString::new(format!("--{}", isolator::FLAG))?],
        env: Vec::new(),
        cwd: c"/".to_owned(),
        identity: None,
        tag: None,
    };
    let stdio =
        Stdio { stdin: socket.as_fd(), stdout: uppers.unwrap_or_else(|| null.as_fd()), stderr: null.as_fd() };
    Ok(spawn(&program, stdio, &[]).map_err(io::Error::other)?.pidfd)
}

/// A directory of an ordinary daemon for upper layers. It is locked as long as the daemon or its isolator lives.
#[derive(Debug)]
struct OwnUppers {
    dir: OwnedFd,
    path: PathBuf,
}

impl Drop for OwnUppers {
    fn drop(&mut self) {
        // Empty by now, unless something is left for the next daemon to remove.
        let _ = std::fs::remove_dir(&self.path);
    }
}

impl OwnUppers {
    /// `None` where there is no place for it: not on an overlay itself.
    fn make(place: &Path) -> Option<Self> {
        const OVERLAY: u32 = 0x794c_7630;
        std::fs::create_dir_all(place).ok()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = rustix::fs::open(place, flags, Mode::empty()).ok()?;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let kind = rustix::fs::fstatfs(&root).ok()?.f_type as u32;
        if kind == OVERLAY {
            return None;
        }
        // Of daemons that are no more: nobody holds their locks.
        for (name, _) in crate::files::dir::read_sorted(&root, usize::MAX).unwrap_or_default() {
            let name: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(&name);
            let Ok(dir) = rustix::fs::openat(&root, name, flags, Mode::empty()) else { continue };
            if !is_ours(name, &dir) {
                continue;
            }
            if rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok()
                && let Err(error) = remove::tree_at(root.as_fd(), name)
            {
                tracing::warn!(%error, name = %Path::new(name).display(), "upper layers are left");
            }
        }
        let name = crate::random::uuid().to_string();
        rustix::fs::mkdirat(&root, &name, Mode::RWXU).ok()?;
        let path = place.join(&name);
        let dir = rustix::fs::openat(&root, &name, flags, Mode::empty()).ok()?;
        rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive).ok()?;
        Some(Self { dir, path })
    }
}

/// Whether a daemon has made it: the place may hold what is somebody else's.
fn is_ours(name: &std::ffi::OsStr, dir: &OwnedFd) -> bool {
    name.to_str().is_some_and(|name| uuid::Uuid::try_parse(name).is_ok())
        && rustix::fs::fstat(dir).is_ok_and(|stat| {
            stat.st_uid == rustix::process::geteuid().as_raw()
                && Mode::from_raw_mode(stat.st_mode) == Mode::RWXU
        })
}

impl Link {
    fn greet(socket: OwnedFd, first: bool, upper_max_bytes: Option<u64>) -> io::Result<Self> {
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
        Ok(Self { socket: Mutex::new(socket), hello, disk, upper_max_bytes, broken: AtomicBool::new(false) })
    }

    fn is_alive(&self) -> bool {
        if self.broken.load(Ordering::Relaxed) {
            return false;
        }
        // While somebody is being answered, he will find out.
        let Ok(socket) = self.socket.try_lock() else { return true };
        let mut fds = [PollFd::new(&*socket, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0))
    }

    pub(super) fn hello(&self) -> &Hello {
        &self.hello
    }

    pub(super) fn disk(&self) -> Option<&Arc<OwnedFd>> {
        self.disk.as_ref()
    }

    /// Bound of all upper layers on disk together.
    pub(super) fn upper_max_bytes(&self) -> Option<u64> {
        self.upper_max_bytes
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
