//! The server's side of a helper: starting it, and a blocking conversation.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{Hello, Ready};
use crate::sys::scm;

/// How long a helper may take for anything before it counts as stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How to start helpers of one role.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    pub(crate) program: PathBuf,
    pub(crate) role: &'static str,
    /// Name in the process list.
    pub(crate) name: &'static str,
}

/// A running helper. It ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Helper {
    socket: Option<OwnedFd>,
    process: Child,
}

impl Recipe {
    pub(crate) fn new(program: Option<&Path>, role: &'static str, name: &'static str) -> Self {
        let program = program.map_or_else(|| PathBuf::from("/proc/self/exe"), Path::to_owned);
        Self { program, role, name }
    }

    /// Starts a helper and waits until it is ready. The answer is its finding.
    pub(crate) fn start(&self, hello: &Hello, execd: Option<&File>) -> io::Result<(Helper, Ready)> {
        let (ours, theirs) = scm::pair()?;
        let process = Command::new(&self.program)
            .arg0(self.name)
            .arg(self.role)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()?;
        set_socket_timeout(&ours, Timeout::Recv, Some(PATIENCE))?;
        set_socket_timeout(&ours, Timeout::Send, Some(PATIENCE))?;
        let mut helper = Helper { socket: Some(ours), process };
        let fds: Vec<BorrowedFd<'_>> = execd.iter().map(|file| file.as_fd()).collect();
        helper.send(hello, &fds)?;
        let (ready, _): (Ready, _) = helper.receive()?;
        match ready.error {
            Some(error) => Err(io::Error::other(error)),
            None => Ok((helper, ready)),
        }
    }
}

impl Helper {
    pub(crate) fn socket(&self) -> io::Result<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    pub(crate) fn send<M: Serialize>(&self, message: &M, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        scm::send(self.socket()?, &serde_json::to_vec(message)?, fds, true)
    }

    /// Waits for a message. That the helper is gone is an error of kind `UnexpectedEof`.
    pub(crate) fn receive<M: DeserializeOwned>(&mut self) -> io::Result<(M, Vec<OwnedFd>)> {
        let (mut buffer, mut fds) = (vec![0; scm::MAX_BYTES], Vec::new());
        let len = scm::receive(self.socket()?, &mut buffer, &mut fds, RecvFlags::CMSG_CLOEXEC)?
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((serde_json::from_slice(&buffer[..len])?, fds))
    }

    /// Takes the socket out, for a conversation of another kind.
    pub(crate) fn take_socket(&mut self) -> Option<OwnedFd> {
        self.socket.take()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.socket.take());
        // It would end by itself, unless it is stuck; and it holds nothing that needs a farewell.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
