//! Connections to terminals.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use osb_protocol::execd::{TerminalMessage, TerminalRequest, frame};
use reqwest::Upgraded;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Message};

use crate::error::{Call, Error, Result, chain};

/// Input sent in one message.
const PIECE: usize = 32 << 10;
/// How long the other side may take to end the connection after it has said so.
const FAREWELL: Duration = Duration::from_secs(1);

type Sink = SplitSink<WebSocketStream<Upgraded>, Message>;
type Source = SplitStream<WebSocketStream<Upgraded>>;

/// A signal that a terminal can send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TerminalSignal {
    /// `SIGINT`.
    Interrupt,
    /// `SIGTERM`.
    Terminate,
    /// `SIGKILL`.
    Kill,
    /// `SIGQUIT`.
    Quit,
    /// `SIGHUP`.
    Hangup,
}

impl TerminalSignal {
    fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::Kill => "SIGKILL",
            Self::Quit => "SIGQUIT",
            Self::Hangup => "SIGHUP",
        }
    }
}

/// What comes from a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalEvent {
    /// The connection stands.
    Connected {
        /// Whether it is a terminal, or pipes.
        terminal: bool,
        /// Whether it only watches.
        viewer: bool,
    },
    /// Output of the terminal; standard output when connected with pipes.
    Output(Bytes),
    /// Standard error when connected with pipes.
    Stderr(Bytes),
    /// Earlier output, or any output for those who only watch.
    Replay {
        /// Number of its first byte since the terminal's beginning.
        offset: u64,
        /// The output.
        bytes: Bytes,
    },
    /// The program has ended.
    Exit {
        /// Its exit code.
        code: i32,
    },
    /// Something that was sent was refused, or the connection ends.
    Error {
        /// Stable word such as `TAKEN_OVER`.
        code: String,
        /// For people.
        message: String,
    },
    /// Answer to [`TerminalSender::ping`].
    Pong,
}

/// A connection to a terminal.
#[derive(Debug)]
pub struct TerminalConnection {
    sender: TerminalSender,
    receiver: TerminalReceiver,
}

/// The half of a connection that sends.
#[derive(Debug)]
pub struct TerminalSender {
    sink: Sink,
    call: Call,
}

/// The half of a connection that receives.
#[derive(Debug)]
pub struct TerminalReceiver {
    stream: Option<Source>,
    /// Came while the connection was made.
    first: Option<TerminalEvent>,
    call: Call,
}

impl TerminalConnection {
    pub(crate) fn new(sink: Sink, source: Source, call: Call) -> Self {
        Self {
            sender: TerminalSender { sink, call: call.clone() },
            receiver: TerminalReceiver { stream: Some(source), first: None, call },
        }
    }

    /// Waits for the first event, which says that the connection stands, and keeps it.
    pub(crate) async fn begin(&mut self) -> Result<()> {
        match self.receiver.recv().await? {
            Some(event) => {
                self.receiver.first = Some(event);
                Ok(())
            }
            None => Err(closed(&self.receiver.call, None)),
        }
    }

    /// Both halves, for tasks of their own. The receiver has to be read for the connection to stay alive.
    ///
    /// ```no_run
    /// # async fn example(terminal: opensandbox::Terminal) -> opensandbox::Result<()> {
    /// use opensandbox::{Attach, TerminalEvent};
    ///
    /// let (mut sender, mut receiver) = terminal.attach(&Attach::default()).await?.split();
    /// let reader = tokio::spawn(async move {
    ///     while let Ok(Some(event)) = receiver.recv().await {
    ///         if let TerminalEvent::Exit { code } = event {
    ///             return Some(code);
    ///         }
    ///     }
    ///     None
    /// });
    /// sender.send("exit 3\n").await?;
    /// assert_eq!(reader.await.ok().flatten(), Some(3));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn split(self) -> (TerminalSender, TerminalReceiver) {
        (self.sender, self.receiver)
    }

    /// See [`TerminalSender::send`].
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn send(&mut self, input: impl AsRef<[u8]>) -> Result<()> {
        self.sender.send(input).await
    }

    /// See [`TerminalSender::resize`].
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn resize(&mut self, columns: u16, rows: u16) -> Result<()> {
        self.sender.resize(columns, rows).await
    }

    /// See [`TerminalSender::signal`].
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn signal(&mut self, signal: TerminalSignal) -> Result<()> {
        self.sender.signal(signal).await
    }

    /// See [`TerminalReceiver::recv`].
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn recv(&mut self) -> Result<Option<TerminalEvent>> {
        self.receiver.recv().await
    }
}

impl TerminalSender {
    /// Types input.
    ///
    /// ```no_run
    /// # async fn example(mut sender: opensandbox::TerminalSender) -> opensandbox::Result<()> {
    /// sender.send("\u{3}").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn send(&mut self, input: impl AsRef<[u8]>) -> Result<()> {
        // A daemon takes messages of a certain size only.
        for piece in input.as_ref().chunks(PIECE) {
            let mut bytes = BytesMut::with_capacity(piece.len() + 1);
            bytes.put_u8(frame::STDIN);
            bytes.put_slice(piece);
            self.message(Message::Binary(bytes.freeze())).await?;
        }
        Ok(())
    }

    /// Changes the terminal's size.
    ///
    /// ```no_run
    /// # async fn example(mut sender: opensandbox::TerminalSender) -> opensandbox::Result<()> {
    /// sender.resize(120, 40).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn resize(&mut self, columns: u16, rows: u16) -> Result<()> {
        self.request(&TerminalRequest::Resize { cols: columns, rows }).await
    }

    /// Sends a signal to the program and those in its group.
    ///
    /// ```no_run
    /// # async fn example(mut sender: opensandbox::TerminalSender) -> opensandbox::Result<()> {
    /// sender.signal(opensandbox::TerminalSignal::Hangup).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn signal(&mut self, signal: TerminalSignal) -> Result<()> {
        self.request(&TerminalRequest::Signal { signal: signal.name().to_owned() }).await
    }

    /// Asks for [`TerminalEvent::Pong`].
    ///
    /// ```no_run
    /// # async fn example(mut sender: opensandbox::TerminalSender) -> opensandbox::Result<()> {
    /// sender.ping().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn ping(&mut self) -> Result<()> {
        self.request(&TerminalRequest::Ping).await
    }

    /// Says goodbye. The program goes on.
    ///
    /// ```no_run
    /// # async fn example(mut sender: opensandbox::TerminalSender) -> opensandbox::Result<()> {
    /// sender.close().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the connection is gone already.
    pub async fn close(&mut self) -> Result<()> {
        self.sink.close().await.map_err(|error| lost(&self.call, &error))
    }

    async fn request(&mut self, request: &TerminalRequest) -> Result<()> {
        let text = serde_json::to_string(request)
            .map_err(|error| Error::InvalidArgument(format!("terminal request: {error}")))?;
        self.message(Message::Text(text.into())).await
    }

    async fn message(&mut self, message: Message) -> Result<()> {
        self.sink.send(message).await.map_err(|error| lost(&self.call, &error))
    }
}

impl TerminalReceiver {
    /// What comes next; `None` when the connection has been closed in order. Cancel safe.
    ///
    /// ```no_run
    /// # async fn example(mut receiver: opensandbox::TerminalReceiver) -> opensandbox::Result<()> {
    /// while let Some(event) = receiver.recv().await? {
    ///     println!("{event:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Closed`] when the other side closed it for a reason, and when the connection breaks, or what
    /// comes is not of the protocol. Nothing follows an error.
    pub async fn recv(&mut self) -> Result<Option<TerminalEvent>> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        loop {
            let Some(stream) = &mut self.stream else { return Ok(None) };
            let event = match stream.next().await {
                None => {
                    self.stream = None;
                    return Ok(None);
                }
                Some(Ok(Message::Close(frame))) => {
                    // The library's answer goes out with the next read; the daemon takes it for a receipt.
                    let _ = timeout(FAREWELL, stream.next()).await;
                    self.stream = None;
                    let ordinary = [CloseCode::Normal, CloseCode::Away, CloseCode::Status];
                    return match frame {
                        Some(frame) if !ordinary.contains(&frame.code) => {
                            Err(closed(&self.call, Some(frame)))
                        }
                        _ => Ok(None),
                    };
                }
                Some(Ok(Message::Text(text))) => from_text(&text),
                Some(Ok(Message::Binary(bytes))) => from_bytes(bytes),
                // Pings are answered by the library.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => Ok(None),
                Some(Err(error)) => {
                    self.stream = None;
                    return Err(lost(&self.call, &error));
                }
            };
            match event {
                Ok(Some(event)) => return Ok(Some(event)),
                Ok(None) => {}
                Err(reason) => {
                    self.stream = None;
                    return Err(Error::Unexpected { call: self.call.clone(), reason });
                }
            }
        }
    }
}

fn from_text(text: &str) -> Result<Option<TerminalEvent>, String> {
    let message = serde_json::from_str(text).map_err(|error| format!("not a terminal message: {error}"))?;
    Ok(match message {
        TerminalMessage::Connected { mode, role, .. } => {
            Some(TerminalEvent::Connected { terminal: mode == "pty", viewer: role == "viewer" })
        }
        TerminalMessage::Exit { exit_code } => Some(TerminalEvent::Exit { code: exit_code }),
        TerminalMessage::Error { error, code } => Some(TerminalEvent::Error { code, message: error }),
        TerminalMessage::Pong => Some(TerminalEvent::Pong),
        TerminalMessage::Unknown => None,
    })
}

fn from_bytes(mut bytes: Bytes) -> Result<Option<TerminalEvent>, String> {
    let Some(&kind) = bytes.first() else { return Ok(None) };
    let rest = bytes.split_off(1);
    match kind {
        frame::STDOUT => Ok(Some(TerminalEvent::Output(rest))),
        frame::STDERR => Ok(Some(TerminalEvent::Stderr(rest))),
        frame::REPLAY => match rest.split_first_chunk::<8>() {
            Some((offset, _)) => Ok(Some(TerminalEvent::Replay {
                offset: u64::from_be_bytes(*offset),
                bytes: rest.slice(8..),
            })),
            None => Err("a replay without offset".to_owned()),
        },
        _ => Ok(None),
    }
}

fn closed(call: &Call, frame: Option<CloseFrame>) -> Error {
    let (code, reason) = frame.map_or_else(
        || (CloseCode::Normal.into(), "before it began".to_owned()),
        |frame| (frame.code.into(), frame.reason.to_string()),
    );
    Error::Closed { call: call.clone(), code, reason }
}

fn lost(call: &Call, error: &tokio_tungstenite::tungstenite::Error) -> Error {
    Error::Broken { call: call.clone(), reason: chain(error), early_end: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_every_kind() {
        let bytes = |frame: &[u8]| from_bytes(Bytes::copy_from_slice(frame));
        assert_eq!(bytes(b"\x01out"), Ok(Some(TerminalEvent::Output("out".into()))));
        assert_eq!(bytes(b"\x02err"), Ok(Some(TerminalEvent::Stderr("err".into()))));
        let replay = TerminalEvent::Replay { offset: 258, bytes: "old".into() };
        assert_eq!(bytes(b"\x03\0\0\0\0\0\0\x01\x02old"), Ok(Some(replay)));
        assert!(bytes(b"\x03short").is_err());
        assert_eq!((bytes(b""), bytes(b"\x09x")), (Ok(None), Ok(None)));

        let connected = r#"{"type":"connected","session_id":"s","mode":"pty","role":"holder"}"#;
        assert_eq!(
            from_text(connected),
            Ok(Some(TerminalEvent::Connected { terminal: true, viewer: false }))
        );
        assert_eq!(from_text(r#"{"type":"exit","exit_code":3}"#), Ok(Some(TerminalEvent::Exit { code: 3 })));
        assert_eq!(from_text(r#"{"type":"later","x":1}"#), Ok(None));
        assert!(from_text("<html>").is_err());
    }
}
