//! A client of terminals that shows every frame.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};

use super::common::Daemon;

/// Far more than anything here takes.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Makes a terminal and gives its id.
pub fn create(daemon: &Daemon, body: Value) -> String {
    let answer = daemon.call("POST", "/pty", Some(body));
    assert_eq!(answer.head.status, 201, "{}", String::from_utf8_lossy(&answer.body));
    answer.json()["session_id"].as_str().unwrap().to_owned()
}

/// Makes a terminal that runs this.
pub fn running(daemon: &Daemon, command: &str) -> String {
    create(daemon, json!({ "command": command }))
}

pub fn status(daemon: &Daemon, id: &str) -> Value {
    daemon.call("GET", &format!("/pty/{id}"), None).json()
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closed {
    pub code: u16,
    pub reason: String,
}

pub struct Socket {
    pub stream: WebSocketStream<UnixStream>,
    /// All output, of whatever kind of frame.
    pub output: Vec<u8>,
    /// Standard error of pipe mode.
    pub stderr: Vec<u8>,
    /// Text frames.
    pub texts: Vec<Value>,
    /// Number of the byte that comes next; frames of replay must begin here, or later when something was lost.
    pub offset: u64,
    pub lost: u64,
    pub replayed: usize,
    pub largest: usize,
    pub closed: Option<Option<Closed>>,
}

/// Connects; or the answer that refuses.
pub async fn try_attach(daemon: &Daemon, id: &str, query: &str) -> Result<Socket, (u16, Value)> {
    let request = format!("ws://sandbox/pty/{id}/ws?{query}").into_client_request().unwrap();
    let stream = UnixStream::connect(daemon.socket()).await.unwrap();
    match timeout(PATIENCE, tokio_tungstenite::client_async(request, stream)).await.unwrap() {
        Ok((stream, _)) => {
            let since = query.split('&').find_map(|pair| pair.strip_prefix("since="));
            let offset = since.map_or(0, |since| since.parse().unwrap());
            Ok(Socket {
                stream,
                output: Vec::new(),
                stderr: Vec::new(),
                texts: Vec::new(),
                offset,
                lost: 0,
                replayed: 0,
                largest: 0,
                closed: None,
            })
        }
        Err(Error::Http(answer)) => {
            let body = answer.body().clone().unwrap_or_default();
            Err((answer.status().as_u16(), serde_json::from_slice(&body).unwrap_or(Value::Null)))
        }
        Err(error) => panic!("{error}"),
    }
}

pub async fn attach(daemon: &Daemon, id: &str, query: &str) -> Socket {
    try_attach(daemon, id, query).await.unwrap_or_else(|refused| panic!("{refused:?}"))
}

impl Socket {
    /// Takes one frame; `false` at the end.
    pub async fn step(&mut self) -> bool {
        if self.closed.is_some() {
            return false;
        }
        match timeout(PATIENCE, self.stream.next()).await.expect("a frame") {
            Some(Ok(Message::Binary(frame))) => {
                self.largest = self.largest.max(frame.len());
                match frame[0] {
                    1 => {
                        self.output.extend(&frame[1..]);
                        self.offset += frame.len() as u64 - 1;
                    }
                    2 => {
                        self.stderr.extend(&frame[1..]);
                        self.offset += frame.len() as u64 - 1;
                    }
                    3 => {
                        let offset = u64::from_be_bytes(frame[1..9].try_into().unwrap());
                        assert!(offset >= self.offset, "{offset} after {}", self.offset);
                        self.lost += offset - self.offset;
                        self.offset = offset + frame.len() as u64 - 9;
                        self.replayed += frame.len() - 9;
                        self.output.extend(&frame[9..]);
                    }
                    other => panic!("frame of kind {other}"),
                }
            }
            Some(Ok(Message::Text(text))) => self.texts.push(serde_json::from_str(&text).unwrap()),
            Some(Ok(Message::Close(frame))) => {
                let closed =
                    frame.map(|frame| Closed { code: frame.code.into(), reason: frame.reason.to_string() });
                self.closed = Some(closed);
                // The library's answer goes out with the next read.
                let _ = timeout(PATIENCE, self.stream.next()).await;
            }
            Some(Ok(_)) => {}
            Some(Err(_)) | None => self.closed = Some(None),
        }
        true
    }

    /// Reads until the output holds this.
    pub async fn until(&mut self, text: &str) {
        while !self.has(text) {
            assert!(self.step().await, "the end came before {text:?}: {self:?}");
        }
    }

    /// As [`Socket::until`], and forgets the output up to there.
    pub async fn past(&mut self, text: &str) {
        self.until(text).await;
        let at = self.output.windows(text.len()).position(|window| window == text.as_bytes()).unwrap();
        self.output.drain(..at + text.len());
    }

    pub fn has(&self, text: &str) -> bool {
        self.output.windows(text.len()).any(|window| window == text.as_bytes())
    }

    /// Reads until a text frame of this type comes, and gives the last one.
    pub async fn text(&mut self, kind: &str) -> Value {
        while self.texts.last().is_none_or(|text| text["type"] != kind) {
            assert!(self.step().await, "the end came before {kind}: {self:?}");
        }
        self.texts.last().unwrap().clone()
    }

    /// Reads to the end.
    pub async fn rest(&mut self) -> Option<Closed> {
        while self.step().await {}
        self.closed.clone().unwrap()
    }

    /// Reads to the end of the program and gives its exit code.
    pub async fn exit(&mut self) -> i64 {
        let code = self.text("exit").await["exit_code"].as_i64().unwrap();
        let expected = Closed { code: 1000, reason: "process exited".to_owned() };
        assert_eq!(self.rest().await, Some(expected));
        code
    }

    pub async fn send(&mut self, message: Message) {
        timeout(PATIENCE, self.stream.send(message)).await.expect("room to send").unwrap();
    }

    /// Types.
    pub async fn typed(&mut self, input: impl AsRef<[u8]>) {
        let frame = [&[0], input.as_ref()].concat();
        self.send(Message::Binary(frame.into())).await;
    }

    pub async fn json(&mut self, frame: Value) {
        self.send(Message::text(frame.to_string())).await;
    }

    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = self.shown();
        let tail = shown.char_indices().rev().nth(2000).map_or(0, |(at, _)| at);
        write!(f, "output {:?}, texts {:?}, closed {:?}", &shown[tail..], self.texts, self.closed)
    }
}
