//! Terminals in a sandbox.

use std::time::Duration;

use base64::Engine as _;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use osb_protocol::execd::{
    CreateSessionRequest, SessionCreated, TerminalMessage, TerminalRequest, TerminalStatus, frame,
};
use reqwest::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use reqwest::{Method, StatusCode, Upgraded};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role, WebSocketConfig};

use crate::error::{Call, Error, Result, chain};
use crate::sandbox::Sandbox;

/// Largest message taken. A daemon replays 1 MiB at most and cuts live output into small pieces.
const MAX_MESSAGE: usize = 4 << 20;

/// A terminal in a sandbox. Dropping it does not end it; see [`Terminal::delete`].
#[derive(Debug, Clone)]
pub struct Terminal {
    sandbox: Sandbox,
    id: String,
}

/// How to connect to a terminal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attach {
    /// Separate standard output and standard error, without a terminal.
    pub pipe: bool,
    /// Also what was written from this offset on.
    pub since: Option<u64>,
    /// In place of whoever is connected.
    pub takeover: bool,
    /// Only to watch.
    pub viewer: bool,
}

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

impl Sandbox {
    /// Makes a terminal for an interactive shell, or for `command` if that is given. Its program starts when
    /// somebody connects.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::{Attach, TerminalEvent};
    ///
    /// let terminal = sandbox.create_terminal(Some("/tmp"), None).await?;
    /// let mut connection = terminal.attach(&Attach::default()).await?;
    /// connection.resize(120, 40).await?;
    /// connection.send("ls -l\nexit\n").await?;
    /// while let Some(event) = connection.recv().await? {
    ///     if let TerminalEvent::Output(bytes) = event {
    ///         print!("{}", String::from_utf8_lossy(&bytes));
    ///     }
    /// }
    /// terminal.delete().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the directory cannot be used, the daemon has no terminals, or the sandbox cannot be reached.
    pub async fn create_terminal(&self, cwd: Option<&str>, command: Option<&str>) -> Result<Terminal> {
        let body = CreateSessionRequest { cwd: cwd.map(str::to_owned), command: command.map(str::to_owned) };
        let request = self.execd(Method::POST, &["pty"]).await?.json(&body);
        let created: SessionCreated = self.transport().json(request, self.config().request_timeout).await?;
        Ok(self.terminal(created.session_id))
    }

    /// A handle on an existing terminal. Nothing is asked of the sandbox.
    pub fn terminal(&self, id: impl Into<String>) -> Terminal {
        Terminal { sandbox: self.clone(), id: id.into() }
    }
}

impl Terminal {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The sandbox it is in.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Whether its program runs, and how much it has written.
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn status(&self) -> Result<TerminalStatus> {
        let request = self.sandbox.execd(Method::GET, &["pty", &self.id]).await?;
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Ends it and its program.
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn delete(&self) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["pty", &self.id]).await?;
        self.sandbox.transport().remove(request, self.sandbox.config().request_timeout).await
    }

    /// Connects, and starts the program if it does not run. Its first event is usually
    /// [`TerminalEvent::Connected`].
    ///
    /// ```no_run
    /// # async fn example(terminal: opensandbox::Terminal) -> opensandbox::Result<()> {
    /// use opensandbox::Attach;
    ///
    /// let again = Attach { since: Some(0), takeover: true, ..Attach::default() };
    /// let connection = terminal.attach(&again).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, somebody else is connected ([`Error::is_conflict`]), or the sandbox cannot be
    /// reached.
    pub async fn attach(&self, how: &Attach) -> Result<TerminalConnection> {
        let key = nonce();
        let request = self
            .sandbox
            .execd(Method::GET, &["pty", &self.id, "ws"])
            .await?
            .query(&how.query())
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, &key);
        let limit: Duration = self.sandbox.config().request_timeout;
        let answer = self.sandbox.transport().open(request, limit).await?;
        let unexpected =
            |reason: &str| Error::Unexpected { call: answer.call.clone(), reason: reason.to_owned() };
        if answer.response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(unexpected("no WebSocket; a proxy in between may not let one pass"));
        }
        let accepted = answer.response.headers().get(SEC_WEBSOCKET_ACCEPT);
        if accepted.is_none_or(|value| value.as_bytes() != derive_accept_key(key.as_bytes()).as_bytes()) {
            return Err(unexpected("the answer to the WebSocket handshake is not right"));
        }
        let call = answer.call;
        let stream = answer.response.upgrade().await.map_err(|error| Error::Broken {
            call: call.clone(),
            reason: chain(&error),
            early_end: false,
        })?;
        let config =
            WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE));
        let socket = WebSocketStream::from_raw_socket(stream, Role::Client, Some(config)).await;
        let (sink, stream) = socket.split();
        Ok(TerminalConnection {
            sender: TerminalSender { sink, call: call.clone() },
            receiver: TerminalReceiver { stream: Some(stream), call },
        })
    }
}

impl Attach {
    fn query(&self) -> Vec<(&'static str, String)> {
        let mut query = Vec::new();
        if self.pipe {
            query.push(("pty", "0".to_owned()));
        }
        query.extend(self.since.map(|offset| ("since", offset.to_string())));
        if self.takeover {
            query.push(("takeover", "1".to_owned()));
        }
        if self.viewer {
            query.push(("mode", "viewer".to_owned()));
        }
        query
    }
}

/// What the handshake wants: 16 bytes that a cache cannot know.
fn nonce() -> String {
    base64::engine::general_purpose::STANDARD.encode(uuid::Uuid::new_v4().as_bytes())
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
    sink: SplitSink<WebSocketStream<Upgraded>, Message>,
    call: Call,
}

/// The half of a connection that receives.
#[derive(Debug)]
pub struct TerminalReceiver {
    stream: Option<SplitStream<WebSocketStream<Upgraded>>>,
    call: Call,
}

impl TerminalConnection {
    /// Both halves, for tasks of their own. The receiver has to be read for the connection to stay alive.
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
    /// # Errors
    /// When the connection is gone.
    pub async fn send(&mut self, input: impl AsRef<[u8]>) -> Result<()> {
        let input = input.as_ref();
        let mut bytes = BytesMut::with_capacity(input.len() + 1);
        bytes.put_u8(frame::STDIN);
        bytes.put_slice(input);
        self.message(Message::Binary(bytes.freeze())).await
    }

    /// Changes the terminal's size.
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn resize(&mut self, columns: u16, rows: u16) -> Result<()> {
        self.request(&TerminalRequest::Resize { cols: columns, rows }).await
    }

    /// Sends a signal to the program and those in its group.
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn signal(&mut self, signal: TerminalSignal) -> Result<()> {
        self.request(&TerminalRequest::Signal { signal: signal.name().to_owned() }).await
    }

    /// Asks for [`TerminalEvent::Pong`].
    ///
    /// # Errors
    /// When the connection is gone.
    pub async fn ping(&mut self) -> Result<()> {
        self.request(&TerminalRequest::Ping).await
    }

    /// Says goodbye. The program goes on.
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
    /// # Errors
    /// When the connection breaks, or what comes is not of the protocol. Nothing follows an error.
    pub async fn recv(&mut self) -> Result<Option<TerminalEvent>> {
        loop {
            let Some(stream) = &mut self.stream else { return Ok(None) };
            let event = match stream.next().await {
                None | Some(Ok(Message::Close(_))) => {
                    self.stream = None;
                    return Ok(None);
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
