//! The outputs of a run on their way to events, and the end of its process.

use std::os::fd::OwnedFd;
use std::time::Duration;

use osb_protocol::boot::LineEndings;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

use super::pipe::{Found, Pipe};
use crate::process::exit::{self, Consumed, Exit};
use crate::stream::event::{self, Source};
use crate::stream::feed::Writer;
use crate::stream::lines::LineSplitter;

/// Once the run has ended and others hold its output, this long without a byte is the end…
pub(crate) const QUIET: Duration = Duration::from_millis(50);
/// …and this long altogether.
pub(crate) const QUIET_LIMIT: Duration = Duration::from_millis(250);

/// An output of a run on its way to events.
#[derive(Debug)]
pub(crate) struct Output {
    pipe: Option<Pipe>,
    lines: LineSplitter,
}

impl Output {
    /// An output at its start.
    pub(crate) fn new(pipe: Pipe, source: Source, line_endings: LineEndings) -> Self {
        Self { pipe: Some(pipe), lines: LineSplitter::new(source, line_endings) }
    }

    /// One that has nothing to say.
    pub(crate) fn closed(source: Source, line_endings: LineEndings) -> Self {
        Self { pipe: None, lines: LineSplitter::new(source, line_endings) }
    }

    /// Whether somebody may still write.
    pub(crate) fn is_open(&self) -> bool {
        self.pipe.is_some()
    }

    /// What others write from now on is read and forgotten.
    pub(crate) fn forget(self) {
        if let Some(pipe) = self.pipe {
            tokio::spawn(pipe.discard());
        }
    }

    /// Waits until there is something, and makes events of it. Cancel safe.
    pub(crate) async fn turn(&mut self, writer: &Writer) {
        let Some(pipe) = &self.pipe else { return std::future::pending().await };
        let Ok(mut guard) = pipe.readable().await else { return self.pipe = None };
        let (found, _) = self.lines.take(pipe, writer);
        if found == Found::Idle {
            guard.clear_ready();
        }
        drop(guard);
        if found == Found::Closed {
            self.pipe = None;
        }
    }

    /// Makes events of what is at hand; tells how many bytes these were.
    fn read(&mut self, writer: &Writer) -> (Found, u64) {
        let Some(pipe) = &self.pipe else { return (Found::Closed, 0) };
        let result = self.lines.take(pipe, writer);
        if result.0 == Found::Closed {
            self.pipe = None;
        }
        result
    }
}

impl LineSplitter {
    fn take(&mut self, pipe: &Pipe, writer: &Writer) -> (Found, u64) {
        let suffix = event::suffix(event::unix_millis());
        let mut length = 0;
        let found = pipe.read(|piece| {
            length += piece.len() as u64;
            writer.push(|out| self.push(piece, &suffix, out));
            !writer.is_full()
        });
        match found {
            Found::More => {}
            Found::Idle => writer.push(|out| self.idle(&suffix, out)),
            Found::Closed => writer.push(|out| self.finish(&suffix, out)),
        }
        (found, length)
    }
}

/// Delivers what the outputs hold after the process has ended.
pub(crate) async fn drain(writer: &Writer, out: &mut Output, err: &mut Output) {
    for output in [&mut *out, &mut *err] {
        // Somebody else may be writing without end, so only what is there now is certain to be read.
        let waiting = output.pipe.as_ref().map_or(0, Pipe::waiting);
        let mut taken = 0;
        while taken <= waiting {
            if writer.is_full() {
                writer.room().await;
            }
            let (found, length) = output.read(writer);
            taken += length;
            if found != Found::More {
                break;
            }
        }
    }
    let limit = Instant::now() + QUIET_LIMIT;
    let mut quiet = Instant::now() + QUIET;
    while out.pipe.is_some() || err.pipe.is_some() {
        let full = writer.is_full();
        tokio::select! {
            biased;
            () = sleep_until(quiet.min(limit)) => break,
            () = out.turn(writer), if !full && out.pipe.is_some() => quiet = Instant::now() + QUIET,
            () = err.turn(writer), if !full && err.pipe.is_some() => quiet = Instant::now() + QUIET,
            () = writer.room(), if full => {}
        }
    }
    let suffix = event::suffix(event::unix_millis());
    for output in [out, err] {
        writer.push(|events| output.lines.finish(&suffix, events));
    }
}

/// Waits for the end of the process and collects its status.
pub(crate) async fn ended(pidfd: &AsyncFd<OwnedFd>) -> Exit {
    ended_counted(pidfd).await.0
}

/// As [`ended`], with what the process has used; nothing is known of it when the status was lost.
pub(crate) async fn ended_counted(pidfd: &AsyncFd<OwnedFd>) -> (Exit, Option<Consumed>) {
    loop {
        let readable = pidfd.readable().await;
        match (readable, exit::reap_counted(pidfd.get_ref())) {
            (_, Ok(Some((exit, consumed)))) => return (exit, Some(consumed)),
            (Ok(mut guard), Ok(None)) => guard.clear_ready(),
            // The runtime is going down, or the status was taken by a stranger: neither can be waited for.
            (Err(_), _) | (_, Err(_)) => return (Exit::Signal(libc::SIGKILL), None),
        }
    }
}
