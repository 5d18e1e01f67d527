//! A terminal in a sandbox, shown in the one that this program runs in.

use std::time::Duration;

use osb_client::{
    Attach, Error, Terminal, TerminalConnection, TerminalEvent, TerminalReceiver, TerminalSender,
};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::keys::Keys;
use super::local::{Keyboard, Raw, size};
use crate::streams::Streams;

/// A connection on which nothing has come for so long is dead; it is asked for signs of life more often.
const SILENCE: Duration = Duration::from_secs(40);
const PING: Duration = Duration::from_secs(15);
/// How long a lost connection is tried to be made again.
const PATIENCE: Duration = Duration::from_secs(120);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long saying goodbye may take.
const FAREWELL: Duration = Duration::from_secs(1);
/// Input that is kept while the connection takes no more.
const QUEUE: usize = 64 << 10;
/// Takes back what programs commonly ask of a terminal, for one that is left in the middle: keys, cursor, pasting,
/// mouse, the other screen, colours.
const RESTORE: &[u8] =
    b"\x1b[?1l\x1b>\x1b[?25h\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1047l\x1b[0m";

/// How it ended here.
#[derive(Debug)]
pub(crate) enum Left {
    /// The program has ended with this code.
    Exit(i32),
    /// By the keys for it; the program goes on.
    Detached,
    /// The local terminal has gone.
    Hangup,
}

/// Why a connection ended.
enum Cut {
    Left(Left),
    /// It may be made again.
    Lost,
    Failed(anyhow::Error),
}

/// Shows `terminal` until its program ends or it is left. With `again` it has been used before.
///
/// # Errors
/// It cannot be connected to, or not any more.
pub(crate) async fn follow(
    terminal: &Terminal,
    keys: Keys,
    takeover: bool,
    again: bool,
    streams: &mut Streams,
) -> anyhow::Result<Left> {
    let how = Attach { since: Some(0), takeover, size: size(), ..Attach::default() };
    let connection = terminal.attach(&how).await?;
    let raw = Raw::new()?;
    let mut view = View {
        terminal,
        keys,
        keyboard: Keyboard::new()?,
        resized: signal(SignalKind::window_change())?,
        continued: signal(SignalKind::from_raw(CONTINUED))?,
        raw: &raw,
        offset: 0,
    };
    let result = view.show(connection, again, streams).await;
    if !matches!(result, Ok(Left::Exit(_))) && streams.stdout_is_terminal {
        let _ = streams.out(RESTORE).await;
        let _ = streams.out(b"\r\n").await;
    }
    result
}

/// SIGCONT; the number is the same on all architectures with this program.
const CONTINUED: i32 = 18;

struct View<'a> {
    terminal: &'a Terminal,
    keys: Keys,
    keyboard: Keyboard,
    resized: Signal,
    continued: Signal,
    raw: &'a Raw,
    /// Number of the byte that comes next.
    offset: u64,
}

impl View<'_> {
    async fn show(
        &mut self,
        mut connection: TerminalConnection,
        mut again: bool,
        streams: &mut Streams,
    ) -> anyhow::Result<Left> {
        loop {
            let (mut sender, mut receiver) = connection.split();
            let (raw, offset) = (self.raw, &mut self.offset);
            let typing = Typing {
                keys: &mut self.keys,
                keyboard: &mut self.keyboard,
                resized: &mut self.resized,
                continued: &mut self.continued,
                raw,
            };
            // Neither waits for the other: a program that reads nothing may still write.
            let cut = tokio::select! {
                cut = typing.pass_on(&mut sender, again) => cut,
                cut = print(&mut receiver, offset, streams) => cut,
            };
            match cut {
                Cut::Left(left) => {
                    // In order, so that nothing is lost of what was typed last.
                    let farewell = async {
                        let _ = sender.close().await;
                        while let Ok(Some(_)) = receiver.recv().await {}
                    };
                    let _ = timeout(FAREWELL, farewell).await;
                    return Ok(left);
                }
                Cut::Failed(error) => return Err(error),
                Cut::Lost => {
                    let _ = streams.err(b"\r\nosb: connection lost, connecting again\r\n").await;
                }
            }
            match self.reconnect().await? {
                Ok(new) => connection = new,
                Err(left) => return Ok(left),
            }
            again = true;
        }
    }

    /// Connects again, in place of what may be left of the old connection.
    async fn reconnect(&mut self) -> anyhow::Result<Result<TerminalConnection, Left>> {
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let how = Attach { since: Some(self.offset), takeover: true, size: size(), ..Attach::default() };
            let (terminal, wait) = (self.terminal, pause);
            let attempt = async {
                let result = terminal.attach(&how).await;
                if result.is_err() {
                    sleep(wait).await;
                }
                result
            };
            tokio::pin!(attempt);
            let result = loop {
                tokio::select! {
                    result = &mut attempt => break result,
                    keys = self.keyboard.next() => match keys {
                        None => return Ok(Err(Left::Hangup)),
                        // What is typed now goes nowhere, as nothing shows where it would go.
                        Some(keys) if self.keys.take(&keys, &mut Vec::new()) => return Ok(Err(Left::Detached)),
                        Some(_) => {}
                    },
                }
            };
            match result {
                Ok(connection) => return Ok(Ok(connection)),
                Err(error) if error.is_not_found() => {
                    anyhow::bail!(
                        "the terminal is not there any more: it was deleted, or its daemon was started anew"
                    )
                }
                Err(error) if began.elapsed() > PATIENCE => {
                    return Err(anyhow::Error::new(error).context("the connection was lost for good"));
                }
                Err(_) => pause = (pause * 2).min(LONGEST_PAUSE),
            }
        }
    }
}

/// The way from the keyboard to the sandbox.
struct Typing<'a> {
    keys: &'a mut Keys,
    keyboard: &'a mut Keyboard,
    resized: &'a mut Signal,
    continued: &'a mut Signal,
    raw: &'a Raw,
}

impl Typing<'_> {
    async fn pass_on(mut self, sender: &mut TerminalSender, again: bool) -> Cut {
        if let Some((columns, rows)) = size() {
            // A program that fills the screen draws it anew when the size changes, so it has to.
            if again && rows > 1 && sender.resize(columns, rows - 1).await.is_err() {
                return Cut::Lost;
            }
            if sender.resize(columns, rows).await.is_err() {
                return Cut::Lost;
            }
        }
        let mut ping = interval(PING);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut queue = Vec::new();
        loop {
            let todo = match queue.is_empty() {
                false => Todo::Type(std::mem::take(&mut queue)),
                true => tokio::select! {
                    keys = self.keyboard.next() => match self.take(keys, &mut queue) {
                        Some(left) => {
                            let _ = timeout(FAREWELL, sender.send(&queue)).await;
                            return Cut::Left(left);
                        }
                        None => continue,
                    },
                    _ = self.resized.recv() => Todo::Resize,
                    _ = self.continued.recv() => {
                        let _ = self.raw.enter();
                        Todo::Resize
                    }
                    _ = ping.tick() => Todo::Ping,
                },
            };
            let doing = todo.carry_out(sender);
            tokio::pin!(doing);
            // The keys that leave are heard while the sandbox takes no input.
            let done = loop {
                tokio::select! {
                    done = &mut doing => break done,
                    keys = self.keyboard.next(), if queue.len() < QUEUE => {
                        if let Some(left) = self.take(keys, &mut queue) {
                            // A sandbox that takes no input gets none of this either.
                            let _ = timeout(FAREWELL, doing).await;
                            return Cut::Left(left);
                        }
                    }
                }
            };
            if done.is_err() {
                return Cut::Lost;
            }
        }
    }

    /// Puts what was typed behind `queue`, unless it means to leave.
    fn take(&mut self, keys: Option<Vec<u8>>, queue: &mut Vec<u8>) -> Option<Left> {
        let Some(keys) = keys else { return Some(Left::Hangup) };
        self.keys.take(&keys, queue).then_some(Left::Detached)
    }
}

enum Todo {
    Type(Vec<u8>),
    Resize,
    Ping,
}

impl Todo {
    async fn carry_out(self, sender: &mut TerminalSender) -> osb_client::Result<()> {
        match (self, size()) {
            (Self::Type(input), _) => sender.send(&input).await,
            (Self::Resize, Some((columns, rows))) => sender.resize(columns, rows).await,
            (Self::Resize, None) => Ok(()),
            (Self::Ping, _) => sender.ping().await,
        }
    }
}

/// The way from the sandbox to the screen.
async fn print(receiver: &mut TerminalReceiver, offset: &mut u64, streams: &mut Streams) -> Cut {
    let mut refused = None;
    loop {
        let event = match timeout(SILENCE, receiver.recv()).await {
            Err(_) => return Cut::Lost,
            Ok(Ok(Some(event))) => event,
            Ok(Ok(None)) => match refused {
                Some(error) => return Cut::Failed(error),
                None => return Cut::Lost,
            },
            Ok(Err(Error::Closed { code: 4001, .. })) => {
                return Cut::Failed(anyhow::anyhow!("another client has taken this terminal over"));
            }
            Ok(Err(_)) => match refused {
                Some(error) => return Cut::Failed(error),
                None => return Cut::Lost,
            },
        };
        let bytes = match event {
            TerminalEvent::Output(bytes) | TerminalEvent::Stderr(bytes) => bytes,
            TerminalEvent::Replay { offset: from, bytes } => {
                *offset = from;
                bytes
            }
            TerminalEvent::Exit { code } => {
                // Confirms that the end is known here.
                let _ = timeout(PING, receiver.recv()).await;
                return Cut::Left(Left::Exit(code));
            }
            TerminalEvent::Error { code, message } => {
                match &*code {
                    "SESSION_GONE" | "START_FAILED" | "ALREADY_CONNECTED" | "TAKEN_OVER" => {
                        refused = Some(anyhow::anyhow!("{message}"));
                    }
                    // Such as input to a program that reads no more.
                    _ => {}
                }
                continue;
            }
            TerminalEvent::Connected { .. } | TerminalEvent::Pong => continue,
        };
        *offset += bytes.len() as u64;
        if let Err(error) = streams.out(&bytes).await {
            return Cut::Failed(error.into());
        }
    }
}
