//! One client of a terminal.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use osb_protocol::execd::TerminalMessage;
use tokio::io::AsyncReadExt as _;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval_at, sleep, timeout};
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_util::sync::CancellationToken;

use super::frame::{self, Request};
use super::run::Wanted;
use super::socket::{LARGEST_MESSAGE, Socket};
use super::terminal::{Ended, Heard, Next, Outcome, Place, Seat, Terminal, View};
use crate::app::App;

/// Time between two signs of life that are asked of a client.
const PING: Duration = Duration::from_secs(30);
/// A client that has not been heard of for so long has gone.
const SILENCE: Duration = Duration::from_secs(60);
/// How long a client may take for a frame, beside a second for every [`SLOWEST`] bytes of it.
const PATIENCE: Duration = Duration::from_secs(10);
const SLOWEST: usize = 16 << 10;
/// How long a client may take to leave.
const FAREWELL: Duration = Duration::from_secs(3);
/// A client that has been told what is wrong and sends nothing for so long has heard it.
const QUIET: Duration = Duration::from_millis(200);
/// Input that is passed on at once.
const PIECE: usize = 32 << 10;
/// Answers on their way to the client; one that does not read them is not heard either.
const REPLIES: usize = 8;
/// A viewer that has typed so often is sent away.
const STRIKES: u32 = 5;

/// Closes a connection whose place somebody else takes.
const TAKEN_OVER: u16 = 4001;

type Sink = SplitSink<Socket, Message>;
type Source = SplitStream<Socket>;

/// Who a client is.
#[derive(Debug)]
pub(super) enum Role {
    /// Types. The seat is still to be taken when there is none yet.
    Holder(Option<Seat>),
    /// Watches.
    Viewer,
}

/// Why a connection ends.
#[derive(Debug)]
enum End {
    /// The client has gone, or cannot be reached.
    Left,
    /// It takes nothing any more.
    Stalled,
    /// It says nothing any more.
    Silent,
    /// The program has ended.
    Over(Ended),
    NotStarted(u64, String),
    NotRunning,
    TakenOver,
    NotTaken,
    Gone,
    ReadOnly,
    /// What it sends is no WebSocket, or too much of one: code and reason.
    Broken(u16, &'static str),
}

/// Serves a client until one of the two has enough.
pub(super) async fn serve(
    app: App,
    terminal: Arc<Terminal>,
    wanted: Wanted,
    role: Role,
    place: Place,
    socket: Socket,
) {
    let (mut sink, mut source) = socket.split();
    let viewer = matches!(role, Role::Viewer);
    let opened = match role {
        Role::Viewer => terminal.watch(wanted.since).map(|view| (view, None)).ok_or(End::NotRunning),
        Role::Holder(seat) => sit(&app, &terminal, wanted, seat).await,
    };
    let (end, seat) = match opened {
        Ok((view, seat)) => {
            let client = Client { terminal: &terminal, seat: seat.as_ref(), viewer };
            (client.talk(view, &mut sink, &mut source).await, seat)
        }
        Err(end) => (end, None),
    };
    let run = match &end {
        End::Over(ended) if !viewer => Some(ended.run),
        End::NotStarted(run, _) if !viewer => Some(*run),
        _ => None,
    };
    if let Some(run) = run {
        terminal.heard(run, Heard::Perhaps);
    }
    // Free before the client knows: it may come back at once.
    drop(seat);
    let answered = part(end, sink, source).await;
    if let Some(run) = run {
        terminal.heard(run, if answered { Heard::Somebody } else { Heard::Nobody });
    }
    drop(place);
}

/// Takes the seat, and has the program run.
async fn sit(
    app: &App,
    terminal: &Arc<Terminal>,
    wanted: Wanted,
    seat: Option<Seat>,
) -> Result<(View, Option<Seat>), End> {
    let seat = match seat {
        Some(seat) => seat,
        None => tokio::select! {
            seat = terminal.take_seat() => seat.ok_or(End::NotTaken)?,
            () = terminal.gone.cancelled() => return Err(End::Gone),
        },
    };
    let evicted = seat.evicted.clone();
    let view = tokio::select! {
        view = terminal.run(app, &seat, wanted) => view,
        () = evicted.cancelled() => return Err(End::TakenOver),
        () = terminal.gone.cancelled() => return Err(End::Gone),
    };
    Ok((view, Some(seat)))
}

struct Client<'a> {
    terminal: &'a Terminal,
    seat: Option<&'a Seat>,
    viewer: bool,
}

impl Client<'_> {
    async fn talk(&self, view: View, sink: &mut Sink, source: &mut Source) -> End {
        let (replies, mut queue) = mpsc::channel(REPLIES);
        let end = tokio::select! {
            end = self.listen(source, &replies) => end,
            end = self.speak(view, sink, &mut queue) => end,
        };
        if matches!(end, End::ReadOnly | End::Broken(..)) {
            let last = async {
                while let Ok(reply) = queue.try_recv() {
                    let _ = sink.send(reply).await;
                }
            };
            let _ = timeout(FAREWELL, last).await;
        }
        end
    }

    /// Reads what the client sends.
    async fn listen(&self, source: &mut Source, replies: &mpsc::Sender<Message>) -> End {
        let mut strikes = 0;
        loop {
            let request = match timeout(SILENCE, source.next()).await {
                Err(_) => return End::Silent,
                Ok(None | Some(Ok(Message::Close(_)))) => return End::Left,
                Ok(Some(Err(error))) => return broken(&error),
                Ok(Some(Ok(Message::Binary(bytes)))) => frame::from_bytes(&bytes),
                Ok(Some(Ok(Message::Text(text)))) => frame::from_text(&text),
                // Pings are answered by the library.
                Ok(Some(Ok(_))) => continue,
            };
            let reply = match request {
                Ok(Request::Ping) => Some(frame::text(&TerminalMessage::Pong)),
                Err(reason) => Some(frame::error("INVALID_FRAME", reason)),
                Ok(_) if self.viewer => {
                    strikes += 1;
                    if strikes == STRIKES {
                        return End::ReadOnly;
                    }
                    Some(read_only())
                }
                Ok(Request::Stdin(input)) => self.pass_on(input).await,
                Ok(Request::Signal(signal)) => {
                    signal.into_iter().for_each(|signal| self.terminal.signal(signal));
                    None
                }
                Ok(Request::Resize(size)) => {
                    self.terminal.resize(size);
                    None
                }
            };
            if let Some(reply) = reply
                && replies.send(reply).await.is_err()
            {
                return End::Left;
            }
        }
    }

    /// Hands input to the program, which may take its time.
    async fn pass_on(&self, mut input: bytes::Bytes) -> Option<Message> {
        while !input.is_empty() {
            let piece = input.split_to(input.len().min(PIECE));
            let sent = match self.terminal.input() {
                Some(sender) => sender.send(piece).await.is_ok(),
                None => false,
            };
            if !sent {
                let reason = "the program has closed its input, or has ended";
                return Some(frame::error("STDIN_WRITE_FAILED", reason));
            }
        }
        None
    }

    /// Sends what there is to send.
    async fn speak(&self, mut view: View, sink: &mut Sink, replies: &mut mpsc::Receiver<Message>) -> End {
        let never = CancellationToken::new();
        let out = Out { evicted: self.seat.map_or(&never, |seat| &seat.evicted), gone: &self.terminal.gone };
        let mut changed: watch::Receiver<()> = self.terminal.follow();
        // A program that was never started has nothing to be connected to.
        if let Some(end) = self.not_started(view, &mut changed) {
            return end;
        }
        for message in self.terminal.replay(&mut view) {
            if let Err(end) = out.send(sink, message).await {
                return end;
            }
            self.advance(view.cursor);
        }
        let connected = frame::text(&TerminalMessage::Connected {
            session_id: self.terminal.id.clone(),
            mode: view.mode.name().to_owned(),
            role: if self.viewer { "viewer" } else { "holder" }.to_owned(),
        });
        if let Err(end) = out.send(sink, connected).await {
            return end;
        }
        let mut ping = interval_at(tokio::time::Instant::now() + PING, PING);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let message = tokio::select! {
                biased;
                () = out.evicted.cancelled() => return End::TakenOver,
                () = out.gone.cancelled() => return End::Gone,
                Some(reply) = replies.recv() => reply,
                _ = ping.tick() => Message::Ping(bytes::Bytes::new()),
                next = self.terminal.next(view, self.viewer, &mut changed) => match next {
                    Next::Ended(ended) => return End::Over(ended),
                    Next::Frame(message, cursor) => {
                        view.cursor = cursor;
                        message
                    }
                },
            };
            if let Err(end) = out.send(sink, message).await {
                return end;
            }
            self.advance(view.cursor);
            tokio::task::consume_budget().await;
        }
    }

    fn not_started(&self, view: View, changed: &mut watch::Receiver<()>) -> Option<End> {
        let at_end = View { cursor: u64::MAX, ..view };
        match futures_util::FutureExt::now_or_never(self.terminal.next(at_end, self.viewer, changed)) {
            Some(Next::Ended(Ended { run, outcome: Outcome::NotStarted(message), .. })) => {
                Some(End::NotStarted(run, message))
            }
            _ => None,
        }
    }

    fn advance(&self, cursor: u64) {
        if let Some(seat) = self.seat {
            seat.advance(cursor);
        }
    }
}

/// What breaks off the sending of a frame.
struct Out<'a> {
    evicted: &'a CancellationToken,
    gone: &'a CancellationToken,
}

impl Out<'_> {
    async fn send(&self, sink: &mut Sink, message: Message) -> Result<(), End> {
        let patience = PATIENCE + Duration::from_secs((message.len() / SLOWEST) as u64);
        tokio::select! {
            biased;
            sent = sink.send(message) => sent.map_err(|_| End::Left),
            () = self.evicted.cancelled() => Err(End::TakenOver),
            () = self.gone.cancelled() => Err(End::Gone),
            () = sleep(patience) => Err(End::Stalled),
        }
    }
}

fn read_only() -> Message {
    frame::error("READ_ONLY", "a viewer can only watch")
}

fn broken(error: &Error) -> End {
    match error {
        Error::Capacity(_) => End::Broken(1009, "message is larger than 1 MiB"),
        Error::Utf8(_) => End::Broken(1007, "text is not UTF-8"),
        Error::Protocol(error) if error.to_string().contains("handshake") => End::Left,
        Error::Protocol(_) => End::Broken(1002, "not the WebSocket protocol"),
        _ => End::Left,
    }
}

const _: () = assert!(LARGEST_MESSAGE == (1 << 20) + 1, "the reason above names it");

/// Reads what a client that broke the protocol is still sending. A connection that is closed before may take the
/// reason along.
async fn discard(socket: Socket) {
    let mut stream = socket.into_inner();
    let mut piece = vec![0; PIECE];
    while let Ok(Ok(1..)) = timeout(QUIET, stream.read(&mut piece)).await {}
}

/// Says goodbye; whether the client has answered.
async fn part(end: End, mut sink: Sink, mut source: Source) -> bool {
    let error = |code: &str, reason: &str| Some(frame::error(code, reason));
    let broken = matches!(end, End::Broken(..));
    let (last, code, reason) = match end {
        End::Stalled => return false,
        End::Left => {
            // The library has an answer to the client's close ready.
            let _ = timeout(FAREWELL, sink.close()).await;
            return false;
        }
        End::Over(Ended { outcome: Outcome::Exit(exit_code), .. }) => {
            (Some(frame::text(&TerminalMessage::Exit { exit_code })), 1000, "process exited")
        }
        End::NotStarted(_, message) | End::Over(Ended { outcome: Outcome::NotStarted(message), .. }) => {
            (error("START_FAILED", &message), 1011, "START_FAILED")
        }
        End::NotRunning => (error("SESSION_GONE", "the program has ended meanwhile"), 1000, "process exited"),
        End::TakenOver => {
            (error("TAKEN_OVER", "another client has taken this terminal over"), TAKEN_OVER, "TAKEN_OVER")
        }
        End::NotTaken => {
            let reason = "another client is connected and does not leave; try again";
            (error("ALREADY_CONNECTED", reason), 1008, "ALREADY_CONNECTED")
        }
        End::Gone => (error("SESSION_GONE", "the terminal was deleted"), 1001, "SESSION_GONE"),
        End::ReadOnly => (Some(read_only()), 1008, "READ_ONLY"),
        End::Silent => (None, 1001, "no sign of life for 60 s"),
        End::Broken(code, reason) => (None, code, reason),
    };
    let answered = async {
        if let Some(last) = last {
            sink.send(last).await.ok()?;
        }
        sink.send(Message::Close(Some(CloseFrame { code: code.into(), reason: reason.into() })))
            .await
            .ok()?;
        if broken {
            discard(sink.reunite(source).ok()?).await;
            return None;
        }
        loop {
            match source.next().await? {
                Ok(Message::Close(_)) => return Some(()),
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    };
    timeout(FAREWELL, answered).await.is_ok_and(|answered| answered.is_some())
}
