//! One run of a hook: as the sandbox's user, with the environment that commands have, within its time.

use std::collections::VecDeque;
use std::time::Duration;

use osb_protocol::execd::CommandRequest;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::plan::Hook;
use crate::app::App;
use crate::command::output::{QUIET, QUIET_LIMIT, ended};
use crate::command::pipe::{Found, Pipe};
use crate::command::prepare::{Checked, Way};
use crate::command::run::{OUT_OF_MEMORY, Started, launch, out_of_memory};
use crate::command::stop::Timer;
use crate::process::exit::Exit;
use crate::process::{tree, watch};

/// How much of the output an error repeats.
const TAIL: usize = 2 << 10;
/// Longest line in the log.
const LINE: usize = 8 << 10;
/// How long output may wait for whoever keeps it.
const KEPT_WITHIN: Duration = Duration::from_secs(1);

/// Runs a hook to its end. `stop` ends it before.
///
/// # Errors
/// Why it counts as failed, with the end of its output.
pub(crate) async fn run(app: &App, hook: &Hook, stop: &CancellationToken) -> Result<(), String> {
    let title = &hook.title;
    let began = Instant::now();
    let tag = tree::tag(crate::random::uuid().as_u64_pair().1);
    let request = CommandRequest { argv: Some(hook.argv.clone()), ..CommandRequest::default() };
    let there = app.clone();
    let started = tokio::task::spawn_blocking(move || {
        let ready = Checked::new(request)?.prepare(&there, tag, Way::Shortest)?;
        launch(&there, &ready.program, true).map_err(|error| crate::http::ApiError::runtime(error.message))
    });
    let started = match started.await {
        Ok(Ok(started)) => started,
        Ok(Err(error)) => return Err(format!("{title}: {}", error.message)),
        Err(error) => return Err(format!("{title}: {error}")),
    };
    tracing::info!(hook = title, pid = started.pid, "a hook runs");
    let mut words = Words::new(title);
    let end = follow(app, hook, stop, started, &mut words, began, tag).await;
    words.finish();
    match end {
        Ok(()) => {
            tracing::info!(hook = title, millis = began.elapsed().as_millis(), "a hook has ended");
            Ok(())
        }
        Err(why) => Err(format!("{title} {:?}: {why}{}", hook.argv, words.tail())),
    }
}

async fn follow(
    app: &App,
    hook: &Hook,
    stop: &CancellationToken,
    mut started: Started,
    words: &mut Words<'_>,
    began: Instant,
    tag: u64,
) -> Result<(), String> {
    let lost = |error: std::io::Error| format!("it cannot be followed and was killed: {error}");
    let watched = watch::readable(started.pidfd);
    let pipe = started.outputs.pop().ok_or_else(|| std::io::ErrorKind::NotFound.into()).and_then(Pipe::new);
    let (pidfd, pipe) = match (watched, pipe) {
        (Ok(pidfd), Ok(pipe)) => (pidfd, pipe),
        (Err((_, error)), _) | (_, Err(error)) => {
            let _ = tokio::task::spawn_blocking(move || tree::kill(tag)).await;
            return Err(lost(error));
        }
    };
    let mut timer = Timer::new(began, Some(hook.timeout));
    let (mut open, mut stopped) = (true, false);
    let exit = loop {
        tokio::select! {
            exit = ended(&pidfd) => break exit,
            more = words.take(&pipe), if open => {
                open = more;
                words.keep(app).await;
            }
            () = timer.expired() => timer.kill(tag),
            () = stop.cancelled(), if !stopped && !timer.killed => {
                stopped = true;
                timer.kill(tag);
            }
        }
    };
    let _ = timer.finish().await;
    // What it has left running may hold the pipe for ever, and write for ever.
    let limit = Instant::now() + QUIET_LIMIT;
    while open && Instant::now() < limit {
        match tokio::time::timeout(QUIET, words.take(&pipe)).await {
            Ok(more) => open = more,
            Err(_) => break,
        }
        words.keep(app).await;
    }
    if open {
        tokio::spawn(pipe.discard());
    }
    if stopped {
        return Err("it was stopped".to_owned());
    }
    if timer.killed {
        return Err(format!("its {} seconds have passed; it was killed", hook.timeout.as_secs()));
    }
    match exit {
        Exit::Code(0) => Ok(()),
        Exit::Signal(libc::SIGKILL) if out_of_memory(app, started.oom_kills) => {
            Err(format!("{}; {OUT_OF_MEMORY}", exit.words()))
        }
        exit => Err(exit.words()),
    }
}

/// What a hook says.
struct Words<'a> {
    title: &'a str,
    line: Vec<u8>,
    tail: VecDeque<u8>,
    /// On its way to the keeper.
    fresh: Vec<u8>,
}

impl<'a> Words<'a> {
    fn new(title: &'a str) -> Self {
        Self { title, line: Vec::new(), tail: VecDeque::new(), fresh: Vec::new() }
    }

    /// Waits for words; `false` when there will be none any more. Cancel safe.
    async fn take(&mut self, pipe: &Pipe) -> bool {
        let Ok(mut guard) = pipe.readable().await else { return false };
        let found = pipe.read(|bytes| {
            self.push(bytes);
            self.fresh.extend_from_slice(bytes);
            true
        });
        if found == Found::Idle {
            guard.clear_ready();
        }
        found != Found::Closed
    }

    /// Hands what is new to whoever keeps the output beside the log.
    async fn keep(&mut self, app: &App) {
        let fresh = std::mem::take(&mut self.fresh);
        if let Some(keeper) = &app.lifecycle.keeper
            && !fresh.is_empty()
        {
            let mut keeper = keeper.lock().await;
            // A keeper that is stuck must not hold the hook up.
            let write = tokio::io::AsyncWriteExt::write_all(&mut *keeper, &fresh);
            let _ = tokio::time::timeout(KEPT_WITHIN, write).await;
        }
    }

    fn push(&mut self, piece: &[u8]) {
        self.tail.extend(piece.iter().skip(piece.len().saturating_sub(TAIL)));
        self.tail.drain(..self.tail.len().saturating_sub(TAIL));
        for part in piece.split_inclusive(|&byte| byte == b'\n') {
            let room = LINE.saturating_sub(self.line.len());
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                self.say();
            }
        }
    }

    fn say(&mut self) {
        let line = String::from_utf8_lossy(self.line.trim_ascii_end()).into_owned();
        tracing::info!(hook = self.title, output = line, "a hook says");
        self.line.clear();
    }

    fn finish(&mut self) {
        if !self.line.is_empty() {
            self.say();
        }
    }

    /// `; output: …`, or nothing.
    fn tail(&mut self) -> String {
        let bytes = self.tail.make_contiguous().trim_ascii();
        // A cut may have gone through a character.
        let begin = bytes.iter().take(3).take_while(|&&byte| byte & 0xc0 == 0x80).count();
        match &bytes[begin..] {
            [] => String::new(),
            bytes => format!("; output: {}", String::from_utf8_lossy(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_of_the_output_is_repeated() {
        let mut words = Words::new("t");
        assert_eq!(words.tail(), "");
        words.push(b"\n");
        assert_eq!(words.tail(), "");
        words.push("ä".repeat(TAIL).as_bytes());
        words.push(b"end\n");
        let tail = words.tail();
        assert!(tail.starts_with("; output: ä") && tail.ends_with("äend"), "{tail}");
        assert!(tail.len() <= TAIL + 10 && !tail.contains('\u{fffd}'));
        words.push(&vec![b'x'; 100_000]);
        assert!(words.line.len() <= LINE && words.tail.len() <= TAIL);
    }
}
