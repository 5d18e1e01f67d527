//! Terminals in a sandbox.

use std::time::Duration;

use base64::Engine as _;
use futures_util::StreamExt;
use osb_protocol::execd::{CreateSessionRequest, SessionCreated, TerminalStatus};
use reqwest::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use reqwest::{Method, StatusCode};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use crate::connection::TerminalConnection;
use crate::error::{Error, Result, chain};
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
    /// Columns and rows, should the program be started now; 80 and 24 otherwise.
    pub size: Option<(u16, u16)>,
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
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let status = sandbox.terminal("4c0d…").status().await?;
    /// # Ok(())
    /// # }
    /// ```
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
    /// ```no_run
    /// # async fn example(terminal: opensandbox::Terminal) -> opensandbox::Result<()> {
    /// println!("{}", terminal.status().await?.running);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn status(&self) -> Result<TerminalStatus> {
        let request = self.sandbox.execd(Method::GET, &["pty", &self.id]).await?;
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Ends it and its program.
    ///
    /// ```no_run
    /// # async fn example(terminal: opensandbox::Terminal) -> opensandbox::Result<()> {
    /// terminal.delete().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn delete(&self) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["pty", &self.id]).await?;
        self.sandbox.transport().remove(request, self.sandbox.config().request_timeout).await
    }

    /// Connects, and starts the program if it does not run. One who comes back with [`Attach::since`] after the
    /// program has ended, and nobody was there to hear of it, gets the rest and the exit code instead. Returns when the connection stands; its first events
    /// are a replay, if one was asked for, and [`TerminalEvent::Connected`](crate::TerminalEvent::Connected).
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
        let mut connection = TerminalConnection::new(sink, stream, call.clone());
        match timeout(limit, connection.begin()).await {
            Ok(Ok(())) => Ok(connection),
            Ok(Err(error @ Error::Closed { .. })) => {
                // A proxy lets every handshake succeed and closes then; the daemon knows the reason.
                self.status().await?;
                Err(error)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::Timeout { call, limit }),
        }
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
        if let Some((columns, rows)) = self.size {
            query.extend([("cols", columns.to_string()), ("rows", rows.to_string())]);
        }
        query
    }
}

/// What the handshake wants: 16 bytes that a cache cannot know.
fn nonce() -> String {
    base64::engine::general_purpose::STANDARD.encode(uuid::Uuid::new_v4().as_bytes())
}
