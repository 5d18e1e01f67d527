//! A terminal session: what it has written, whether its program runs, who is connected.
//!
//! The program belongs to a task of its own (`run`), every connection is another; here is what they share. Output
//! has one place, the ring. Each connection has a number up to which it has sent, and takes from the ring what lies
//! behind it; that is all there is to replay, to a takeover and to slow readers.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use osb_protocol::execd::TerminalStatus;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, watch};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use super::device::{self, Size};
use super::frame;
use super::ring::{Ring, Source};
use super::run;
use crate::app::App;
use crate::command::stop::blocking;
use crate::http::ApiError;
use crate::process::tree;

/// Output in one frame.
const PIECE: usize = 32 << 10;
/// Output in one frame of the replay: clients commonly take no larger messages than a mebibyte.
const REPLAY_PIECE: usize = 512 << 10;
/// How far the holder may be behind before the program has to wait.
const BACKLOG: u64 = 128 << 10;
/// Connections to one terminal, with those that are being made.
const MOST_CONNECTIONS: usize = 16;
/// How long a taken over holder may take to leave.
const TAKEOVER: Duration = Duration::from_secs(5);
/// How long a delete waits for a program that is still being loaded.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// How a program is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Terminal,
    Pipes,
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Terminal => "pty",
            Self::Pipes => "pipe",
        }
    }
}

/// How a run of the program came to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Exit(i32),
    NotStarted(String),
}

/// The last end of the program.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub(super) run: u64,
    pub(super) outcome: Outcome,
    mode: Mode,
    /// Number of the byte behind its output.
    end: u64,
    heard: Heard,
}

/// Whether a client knows how the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    Nobody,
    /// One is being told and has not confirmed yet.
    Perhaps,
    Somebody,
}

/// A running program.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) mode: Mode,
    /// Not reaped before this is gone, so the number is its own.
    pub(super) pid: i32,
    pub(super) master: Option<Arc<AsyncFd<OwnedFd>>>,
    pub(super) input: mpsc::Sender<Bytes>,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Starting,
    Running(Live),
}

#[derive(Debug)]
struct Holder {
    number: u64,
    /// Up to where it has been sent output; nothing is held back for one that is not ready yet.
    cursor: Option<u64>,
    evict: CancellationToken,
}

#[derive(Debug)]
struct State {
    ring: Ring,
    phase: Phase,
    /// Number of the current or last run.
    run: u64,
    last: Option<Ended>,
    holder: Option<Holder>,
    holders: u64,
    connections: usize,
    failed: bool,
    used: Instant,
}

/// A terminal.
#[derive(Debug)]
pub(super) struct Terminal {
    pub(super) id: String,
    /// Mark of its processes, also of those that a run has left behind.
    pub(super) tag: u64,
    pub(super) command: Option<String>,
    pub(super) cwd: PathBuf,
    /// It is being deleted.
    pub(super) gone: CancellationToken,
    /// The program need not wait for its reader any more.
    pub(super) room: Notify,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

/// A connection's view of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) run: u64,
    pub(super) mode: Mode,
    /// Number of the byte to be sent next.
    pub(super) cursor: u64,
}

/// What a connection has to send next.
#[derive(Debug)]
pub(super) enum Next {
    /// A frame, and the cursor behind it.
    Frame(Message, u64),
    Ended(Ended),
}

impl Terminal {
    pub(super) fn new(command: Option<String>, cwd: PathBuf) -> Self {
        Self {
            id: crate::random::uuid().to_string(),
            tag: tree::tag(crate::random::uuid().as_u64_pair().1),
            command,
            cwd,
            gone: CancellationToken::new(),
            room: Notify::new(),
            state: Mutex::new(State {
                ring: Ring::new(),
                phase: Phase::Idle,
                run: 0,
                last: None,
                holder: None,
                holders: 0,
                connections: 0,
                failed: false,
                used: Instant::now(),
            }),
            changed: watch::Sender::new(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every holder leaves the state whole between its statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        self.changed.send_replace(());
    }

    pub(super) fn follow(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn status(&self) -> TerminalStatus {
        let state = self.lock();
        TerminalStatus {
            session_id: self.id.clone(),
            running: matches!(state.phase, Phase::Running(_)),
            output_offset: state.ring.end(),
            launch_attempted: Some(state.run > 0),
            launch_failed: Some(state.failed),
        }
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.lock().phase, Phase::Running(_))
    }

    /// Since when nobody and nothing uses it.
    pub(super) fn idle_since(&self) -> Option<(bool, Instant)> {
        let state = self.lock();
        let idle = matches!(state.phase, Phase::Idle) && state.connections == 0;
        idle.then_some((state.run > 0, state.used))
    }

    /// Ends all its processes. Not cancel safe.
    ///
    /// # Errors
    /// Some are left.
    pub(super) async fn close(&self) -> Result<(), ApiError> {
        self.gone.cancel();
        let tag = self.tag;
        blocking(move || tree::kill(tag)).await?;
        let mut changed = self.follow();
        let ended = async {
            while !matches!(self.lock().phase, Phase::Idle) {
                let _ = changed.changed().await;
            }
        };
        // A program that a file system does not hand out is killed when it does.
        let _ = tokio::time::timeout(CLOSE_PATIENCE, ended).await;
        Ok(())
    }

    // === connections

    /// A place among the connections; `None` when there are too many.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Place> {
        let mut state = self.lock();
        if state.connections == MOST_CONNECTIONS {
            return None;
        }
        state.connections += 1;
        Some(Place(Arc::clone(self)))
    }

    /// The seat of the one who types; `None` when it is taken.
    pub(super) fn sit(self: &Arc<Self>) -> Option<Seat> {
        let mut state = self.lock();
        if state.holder.is_some() {
            return None;
        }
        state.holders += 1;
        let (number, evict) = (state.holders, CancellationToken::new());
        state.holder = Some(Holder { number, cursor: None, evict: evict.clone() });
        Some(Seat { terminal: Arc::clone(self), number, evicted: evict })
    }

    /// Has the holder leave and takes the seat; `None` when it does not in time.
    pub(super) async fn take_seat(self: &Arc<Self>) -> Option<Seat> {
        let mut changed = self.follow();
        let taken = async {
            loop {
                if let Some(seat) = self.sit() {
                    return seat;
                }
                if let Some(holder) = &self.lock().holder {
                    holder.evict.cancel();
                }
                let _ = changed.changed().await;
            }
        };
        tokio::time::timeout(TAKEOVER, taken).await.ok()
    }

    /// View of the running program, for one who only watches.
    pub(super) fn watch(&self, since: Option<u64>) -> Option<View> {
        let state = self.lock();
        let Phase::Running(live) = &state.phase else { return None };
        Some(View { run: state.run, mode: live.mode, cursor: state.ring.cursor(since) })
    }

    /// View of the program, which is started unless it runs. One who comes back for what was missed gets an end
    /// that nobody has heard of instead of another run.
    pub(super) async fn run(self: &Arc<Self>, app: &App, seat: &Seat, wanted: run::Wanted) -> View {
        let mut changed = self.follow();
        let mut begun = None;
        let cursor = {
            let mut state = self.lock();
            let cursor = state.ring.cursor(wanted.since);
            state.advance(seat.number, cursor);
            cursor
        };
        loop {
            {
                let mut state = self.lock();
                let run = state.run;
                match &state.phase {
                    Phase::Running(live) => return View { run, mode: live.mode, cursor },
                    Phase::Starting => {}
                    Phase::Idle => {
                        let back = wanted.since.is_some();
                        match &state.last {
                            Some(last)
                                if begun == Some(last.run) || (back && last.heard == Heard::Nobody) =>
                            {
                                return View { run: last.run, mode: last.mode, cursor };
                            }
                            Some(last) if back && last.heard == Heard::Perhaps => {}
                            _ => {
                                state.run += 1;
                                state.phase = Phase::Starting;
                                begun = Some(state.run);
                                tokio::spawn(run::live(app.clone(), Arc::clone(self), state.run, wanted));
                            }
                        }
                    }
                }
            }
            let _ = changed.changed().await;
        }
    }

    /// Earlier output for one who asked for it, in frames; the cursor moves behind it.
    pub(super) fn replay(&self, view: &mut View) -> Vec<Message> {
        let state = self.lock();
        let end = state.limit(view.run);
        let mut frames = Vec::new();
        while view.cursor < end {
            let (message, next) = state.replay(view.cursor, end, REPLAY_PIECE);
            frames.push(message);
            view.cursor = next;
        }
        frames
    }

    /// What comes next. Cancel safe.
    pub(super) async fn next(&self, view: View, viewer: bool, changed: &mut watch::Receiver<()>) -> Next {
        loop {
            changed.mark_unchanged();
            {
                let state = self.lock();
                let end = state.limit(view.run);
                if view.cursor < end {
                    let (message, next) = match viewer || view.cursor < state.ring.start() {
                        true => state.replay(view.cursor, end, PIECE),
                        false => state.output(view.cursor, end),
                    };
                    return Next::Frame(message, next);
                }
                if let Some(last) = state.last.as_ref().filter(|last| last.run >= view.run) {
                    return Next::Ended(last.clone());
                }
            }
            let _ = changed.changed().await;
        }
    }

    /// Whether a client knows how this run ended.
    pub(super) fn heard(&self, run: u64, heard: Heard) {
        if let Some(last) = self.lock().last.as_mut().filter(|last| last.run == run) {
            last.heard = heard;
        }
        self.tell();
    }

    /// Where input goes.
    pub(super) fn input(&self) -> Option<mpsc::Sender<Bytes>> {
        match &self.lock().phase {
            Phase::Running(live) => Some(live.input.clone()),
            _ => None,
        }
    }

    pub(super) fn resize(&self, size: Size) {
        if let Phase::Running(Live { master: Some(master), .. }) = &self.lock().phase {
            // A terminal takes any size.
            let _ = device::resize(master.get_ref(), size);
        }
    }

    /// Sends a signal to the program's group; what the keyboard could send goes to the foreground too.
    pub(super) fn signal(&self, signal: i32) {
        let state = self.lock();
        let Phase::Running(live) = &state.phase else { return };
        if let Some(master) = &live.master
            && matches!(signal, libc::SIGINT | libc::SIGQUIT)
            && device::foreground(master.get_ref()).is_some_and(|group| group != live.pid)
        {
            device::signal_foreground(master.get_ref(), signal);
        }
        // SAFETY: a signal to the group of our own child, which is reaped under the lock that is held here.
        unsafe { libc::kill(-live.pid, signal) };
    }

    // === the program

    /// It runs.
    pub(super) fn running(&self, live: Live) {
        let mut state = self.lock();
        state.phase = Phase::Running(live);
        state.failed = false;
        drop(state);
        self.tell();
    }

    /// It does not run any more, or never did. `reap` collects its status.
    pub(super) fn ended(&self, mode: Mode, reap: impl FnOnce() -> Outcome) {
        let mut state = self.lock();
        let outcome = reap();
        state.failed = matches!(outcome, Outcome::NotStarted(_));
        let (run, end) = (state.run, state.ring.end());
        state.last = Some(Ended { run, outcome, mode, end, heard: Heard::Nobody });
        state.phase = Phase::Idle;
        state.used = Instant::now();
        drop(state);
        self.tell();
    }

    /// Whether more output can be taken without pushing out what the holder has not been sent.
    pub(super) fn has_room(&self) -> bool {
        let state = self.lock();
        state.holder.as_ref().and_then(|holder| holder.cursor).is_none_or(|cursor| {
            state.ring.end().saturating_sub(cursor) < BACKLOG && !state.ring.changes_much()
        })
    }

    /// Adds output; [`Terminal::written`] makes it known.
    pub(super) fn write(&self, source: Source, piece: &[u8]) {
        let mut state = self.lock();
        state.ring.push(source, piece);
        if state.holder.as_ref().is_none_or(|holder| holder.cursor.is_none()) {
            let end = state.ring.end();
            state.ring.forget_sources(end);
        }
    }

    pub(super) fn written(&self) {
        self.tell();
    }
}

impl Ring {
    /// Where somebody begins who has seen all before `since`, or wants nothing old.
    fn cursor(&self, since: Option<u64>) -> u64 {
        since.map_or_else(|| self.end(), |since| since.clamp(self.start(), self.end()))
    }
}

impl State {
    /// End of a run's output so far.
    fn limit(&self, run: u64) -> u64 {
        self.last.as_ref().filter(|last| last.run == run).map_or_else(|| self.ring.end(), |last| last.end)
    }

    fn replay(&self, cursor: u64, end: u64, most: usize) -> (Message, u64) {
        let from = cursor.clamp(self.ring.start(), end);
        let mut frame = frame::replay_head(from);
        let head = frame.len();
        self.ring.read(from, length(from, end, most), &mut frame);
        let next = from + (frame.len() - head) as u64;
        // At least to the end: a viewer may have missed all there was.
        let next = if frame.len() == head { end } else { next };
        (Message::Binary(frame.into()), next)
    }

    fn output(&self, cursor: u64, end: u64) -> (Message, u64) {
        let (source, until) = self.ring.source(cursor);
        let mut frame = frame::output_head(source);
        self.ring.read(cursor, length(cursor, end.min(until), PIECE), &mut frame);
        let next = cursor + (frame.len() - 1) as u64;
        (Message::Binary(frame.into()), next)
    }

    fn advance(&mut self, number: u64, cursor: u64) {
        if let Some(holder) = self.holder.as_mut().filter(|holder| holder.number == number) {
            holder.cursor = Some(cursor);
            self.ring.forget_sources(cursor);
        }
    }
}

fn length(from: u64, end: u64, most: usize) -> usize {
    usize::try_from(end.saturating_sub(from)).map_or(most, |length| length.min(most))
}

/// A place among a terminal's connections.
#[derive(Debug)]
pub(super) struct Place(Arc<Terminal>);

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.connections -= 1;
        state.used = Instant::now();
    }
}

/// The seat of the one who types.
#[derive(Debug)]
pub(super) struct Seat {
    terminal: Arc<Terminal>,
    number: u64,
    /// Somebody else takes it.
    pub(super) evicted: CancellationToken,
}

impl Seat {
    /// All before `cursor` has been sent.
    pub(super) fn advance(&self, cursor: u64) {
        self.terminal.lock().advance(self.number, cursor);
        self.terminal.room.notify_one();
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.terminal.lock();
        if state.holder.as_ref().is_some_and(|holder| holder.number == self.number) {
            state.holder = None;
        }
        drop(state);
        self.terminal.room.notify_one();
        self.terminal.tell();
    }
}
