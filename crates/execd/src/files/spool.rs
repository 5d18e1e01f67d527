//! The content of one uploaded file while it comes in: small ones in memory, others in a nameless file of the
//! target's file system, written by other threads while the next piece is received.

use std::io::{IoSlice, Write as _};
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use tokio::task::JoinHandle;

use super::dir;
use super::error::{FileError, Result};
use super::path::Requested;
use super::temp::Temp;

/// Files up to this size stay in memory until the form is complete.
pub(crate) const SMALL: usize = 64 << 10;
/// Written at a time.
const WRITE: usize = 512 << 10;
/// Received and not yet written; more is not read from the client.
const PENDING: usize = 2 << 20;

/// A complete content.
#[derive(Debug)]
pub(crate) enum Content {
    Memory(Vec<u8>),
    File(Temp),
}

/// A content that grows.
#[derive(Debug, Default)]
pub(crate) struct Spool {
    pending: Vec<Bytes>,
    pending_length: usize,
    disk: Disk,
}

#[derive(Debug, Default)]
enum Disk {
    /// Nothing was written yet.
    #[default]
    None,
    Idle(Temp),
    Busy(JoinHandle<Result<Temp>>),
}

impl Spool {
    /// Bytes held in memory.
    pub(crate) fn pending(&self) -> usize {
        self.pending_length
    }

    /// Takes the next piece. `target` says where the file will go; without it everything stays in memory.
    /// Dropping the future or the spool leaves nothing on disk.
    pub(crate) async fn push(&mut self, piece: Bytes, target: Option<&Requested>) -> Result<()> {
        self.pending_length += piece.len();
        self.pending.push(piece);
        let Some(target) = target else { return Ok(()) };
        if matches!(&self.disk, Disk::None) && self.pending_length <= SMALL {
            return Ok(());
        }
        let may_wait = self.pending_length >= PENDING;
        if matches!(&self.disk, Disk::Busy(writing) if may_wait || writing.is_finished()) {
            self.settle().await?;
        }
        if self.pending_length >= WRITE && !matches!(self.disk, Disk::Busy(_)) {
            self.start(target);
        }
        Ok(())
    }

    /// Writes what is left and hands the content out.
    pub(crate) async fn finish(mut self, target: Option<&Requested>) -> Result<Content> {
        self.settle().await?;
        match (&self.disk, target) {
            (Disk::None, target) if self.pending_length <= SMALL || target.is_none() => {
                let mut content = Vec::with_capacity(self.pending_length);
                self.pending.iter().for_each(|piece| content.extend_from_slice(piece));
                return Ok(Content::Memory(content));
            }
            (_, Some(target)) => self.start(target),
            (_, None) => {}
        }
        self.settle().await?;
        match self.disk {
            Disk::Idle(temp) => Ok(Content::File(temp)),
            // `start` above has begun to write and `settle` has waited for the end.
            Disk::None | Disk::Busy(_) => Ok(Content::Memory(Vec::new())),
        }
    }

    /// Waits for the write in progress.
    async fn settle(&mut self) -> Result<()> {
        if let Disk::Busy(writing) = &mut self.disk {
            let written =
                writing.await.map_err(|error| FileError::Refused(format!("the write failed: {error}")));
            self.disk = Disk::None;
            self.disk = Disk::Idle(written??);
        }
        Ok(())
    }

    /// Begins to write everything pending.
    fn start(&mut self, target: &Requested) {
        let pieces = std::mem::take(&mut self.pending);
        self.pending_length = 0;
        let disk = std::mem::take(&mut self.disk);
        let target = target.clone();
        self.disk = Disk::Busy(tokio::task::spawn_blocking(move || {
            let mut temp = match disk {
                Disk::Idle(temp) => temp,
                Disk::None | Disk::Busy(_) => create(&target)?,
            };
            write_all(temp.file(), pieces)
                .map_err(|error| FileError::of_io(&target.shown, "write", &error))?;
            Ok(temp)
        }));
    }
}

/// Makes the file where the target will be: in its directory, or in the deepest one on the way that exists, so
/// that an upload that breaks off leaves no directories either.
fn create(target: &Requested) -> Result<Temp> {
    let failed = |errno| FileError::of(&target.shown, "make the file", errno);
    let (parent, name) = target.split()?;
    let place = match dir::open(parent) {
        Ok(parent) => dir::resolve(parent, name).map_err(failed)?.dir,
        Err(rustix::io::Errno::NOENT) => dir::open_deepest(parent).map_err(failed)?,
        Err(rustix::io::Errno::NOTDIR) => return Err(dir::in_the_way(&target.shown)),
        Err(errno) => return Err(failed(errno)),
    };
    Temp::new(Arc::new(place)).map_err(failed)
}

fn write_all(file: &mut std::fs::File, pieces: Vec<Bytes>) -> std::io::Result<()> {
    /// The kernel takes no more slices in one call.
    const SLICES: usize = 1024;
    let mut pieces = std::collections::VecDeque::from(pieces);
    while !pieces.is_empty() {
        let slices: Vec<_> = pieces.iter().take(SLICES).map(|piece| IoSlice::new(piece)).collect();
        let mut written = match file.write_vectored(&slices) {
            Ok(0) if slices.iter().any(|slice| !slice.is_empty()) => {
                return Err(std::io::ErrorKind::WriteZero.into());
            }
            Ok(written) => written,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        while let Some(first) = pieces.front_mut() {
            if first.len() > written {
                first.advance(written);
                break;
            }
            written -= first.len();
            pieces.pop_front();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_small_slices_are_written_whole() {
        let mut file = tempfile::tempfile().unwrap();
        let pieces: Vec<Bytes> = (0..5000_u32).map(|n| Bytes::from(n.to_le_bytes().to_vec())).collect();
        let expected = pieces.concat();
        write_all(&mut file, pieces).unwrap();
        use std::io::{Read as _, Seek as _};
        file.rewind().unwrap();
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(content, expected);
    }
}
