//! The reading ends of a command's output.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::pipe::PipeFlags;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

/// Bytes taken by one read.
pub const READ: usize = 64 << 10;
/// Reads in a row before other work of the run gets its turn.
const READS: usize = 4;
/// Size a pipe is raised to when a program writes much.
const WIDE: usize = 256 << 10;
/// Size of a new pipe.
const USUAL: usize = 64 << 10;

thread_local! {
    /// One buffer for all reads of the thread: it is never held over an await.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A new pipe: reading end that does not block, writing end that does. Both close on exec.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((read, write))
}

/// What a turn of reading has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// There may be more at hand.
    More,
    /// Everything at hand has been read.
    Idle,
    /// All writers have gone.
    Closed,
}

/// A reading end that waits by readiness.
#[derive(Debug)]
pub struct Pipe {
    fd: AsyncFd<OwnedFd>,
    wide: AtomicBool,
}

impl Pipe {
    /// Takes a reading end of [`pair`].
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let fd = crate::process::watch::readable(fd).map_err(|(_, error)| error)?;
        Ok(Self { fd, wide: AtomicBool::new(false) })
    }

    /// Waits until there is something to read, or all writers have gone.
    pub async fn readable(&self) -> io::Result<AsyncFdReadyGuard<'_, OwnedFd>> {
        self.fd.readable().await
    }

    /// Number of bytes that wait in the pipe.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        rustix::io::ioctl_fionread(self.fd.get_ref()).unwrap_or(0)
    }

    /// Reads what is at hand, a few buffers at most, and hands it to `take` piece by piece until that says to stop.
    /// An error of the pipe counts as its end. Needs no readiness: it never waits.
    pub fn read(&self, mut take: impl FnMut(&[u8]) -> bool) -> Found {
        for _ in 0..READS {
            let (found, on) = SCRATCH.with_borrow_mut(|buffer| {
                // Left as it is: clearing it would touch sixteen pages for the one that most commands need.
                buffer.clear();
                buffer.reserve_exact(READ);
                match rustix::io::read(self.fd.get_ref(), rustix::buffer::spare_capacity(buffer)) {
                    Ok(0) => (Found::Closed, false),
                    // A short read has emptied the pipe.
                    Ok(length) if length < READ => (Found::Idle, take(&buffer[..length])),
                    Ok(length) => (Found::More, take(&buffer[..length])),
                    Err(rustix::io::Errno::AGAIN) => (Found::Idle, false),
                    Err(rustix::io::Errno::INTR) => (Found::More, true),
                    Err(_) => (Found::Closed, false),
                }
            });
            if found == Found::More {
                self.widen();
            }
            if found != Found::More || !on {
                return found;
            }
        }
        Found::More
    }

    /// A program that fills the pipe gets a larger one, so that it and we take turns less often.
    fn widen(&self) {
        if !self.wide.swap(true, Ordering::Relaxed)
            && rustix::pipe::fcntl_getpipe_size(self.fd.get_ref()).is_ok_and(|size| size <= USUAL)
        {
            // The kernel may refuse; the pipe then stays as it is.
            let _ = rustix::pipe::fcntl_setpipe_size(self.fd.get_ref(), WIDE);
        }
    }

    /// Reads and forgets until all writers have gone, so that programs which outlive their command neither die of
    /// a broken pipe nor wait for a full one.
    pub async fn discard(self) {
        loop {
            let Ok(mut guard) = self.fd.readable().await else { return };
            match self.read(|_| true) {
                Found::Closed => return,
                Found::Idle => guard.clear_ready(),
                Found::More => {}
            }
            drop(guard);
            tokio::task::consume_budget().await;
        }
    }
}
