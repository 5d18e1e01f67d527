//! The terminal that this program runs in.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

/// Keys read at once.
const READ: usize = 4096;
/// Pieces of input on their way.
const QUEUE: usize = 16;

/// Standard input passes on every key as it is typed, until this is dropped: at the end, at an error, at a panic.
#[derive(Debug)]
pub(super) struct Raw(Termios);

impl Raw {
    pub(super) fn new() -> io::Result<Self> {
        let raw = Self(tcgetattr(io::stdin())?);
        raw.enter()?;
        Ok(raw)
    }

    /// Once more: whoever stopped this program may have changed it.
    pub(super) fn enter(&self) -> io::Result<()> {
        let mut modes = self.0.clone();
        modes.make_raw();
        Ok(tcsetattr(io::stdin(), OptionalActions::Now, &modes)?)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that has gone needs no modes.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Columns and rows.
pub(super) fn size() -> Option<(u16, u16)> {
    let size = tcgetwinsize(io::stdin()).or_else(|_| tcgetwinsize(io::stdout())).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// What is typed. A thread of its own reads it: a terminal cannot be read without blocking unless all that share it
/// put up with that. It ends with this, so no key is lost to who reads the terminal next.
#[derive(Debug)]
pub(super) struct Keyboard {
    keys: mpsc::Receiver<Vec<u8>>,
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Keyboard {
    pub(super) fn new() -> io::Result<Self> {
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (sender, keys) = mpsc::channel(QUEUE);
        let thread = std::thread::Builder::new().name("keyboard".to_owned()).spawn(move || {
            while let Some(keys) = read(&stopped) {
                if sender.blocking_send(keys).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { keys, stop: Some(stop), thread: Some(thread) })
    }

    /// What comes next; `None` when the terminal has gone. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Vec<u8>> {
        self.keys.recv().await
    }
}

/// Waits for keys; `None` at the end.
fn read(stopped: &OwnedFd) -> Option<Vec<u8>> {
    let stdin = io::stdin();
    loop {
        let mut both = [PollFd::new(&stdin, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
        match poll(&mut both, None) {
            Ok(_) if !both[1].revents().is_empty() => return None,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return None,
        }
        let mut keys = vec![0; READ];
        match rustix::io::read(stdin.as_fd(), &mut keys[..]) {
            Ok(0) => return None,
            Ok(length) => {
                keys.truncate(length);
                return Some(keys);
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(_) => return None,
        }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        self.keys.close();
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
