//! What a shell reads, on its way there.

use std::io;
use std::os::fd::OwnedFd;

use tokio::net::unix::pipe::Sender;

/// The pipe that a shell reads its orders from, and what has not gone into it yet.
#[derive(Debug)]
pub(crate) struct Feeder {
    pipe: Sender,
    pending: Vec<u8>,
    fed: usize,
}

impl Feeder {
    /// Takes the writing end of a pipe; `begin` is the first text.
    pub(crate) fn new(pipe: OwnedFd, begin: Vec<u8>) -> io::Result<Self> {
        Ok(Self { pipe: Sender::from_owned_fd(pipe)?, pending: begin, fed: 0 })
    }

    /// Adds to what the shell reads next.
    pub(crate) fn tell(&mut self, text: &[u8]) {
        self.pending.extend_from_slice(text);
    }

    fn is_hungry(&self) -> bool {
        self.fed < self.pending.len()
    }

    /// Moves some of it on; waits for ever when there is nothing to move. Cancel safe.
    pub(crate) async fn turn(&mut self) {
        if !self.is_hungry() {
            return std::future::pending().await;
        }
        let writable = self.pipe.writable().await.is_ok();
        match self.pipe.try_write(&self.pending[self.fed..]) {
            Ok(length) if writable => {
                self.fed += length;
                if !self.is_hungry() {
                    self.drop_pending();
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The shell reads no more; its end will be seen.
            _ => self.drop_pending(),
        }
    }

    fn drop_pending(&mut self) {
        self.fed = 0;
        self.pending = Vec::new();
    }

    /// Whether the shell has read all there is.
    pub(crate) fn has_read_all(&self) -> bool {
        !self.is_hungry() && rustix::io::ioctl_fionread(&self.pipe).is_ok_and(|left| left == 0)
    }
}
