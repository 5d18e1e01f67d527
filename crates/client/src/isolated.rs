//! Isolated sessions: shells in namespaces of their own within a sandbox.

use std::time::Duration;

use osb_protocol::execd::{
    ISOLATED_TAIL_CURSOR_HEADER, IsolatedRunRequest, IsolatedRunStarted, IsolatedRunStatus,
    IsolatedSessionCreated, IsolatedSessionSpec, IsolatedSessionState, IsolatedSessionSummary,
    IsolationCapabilities, ListIsolatedSessionsResponse,
};
use reqwest::{Method, RequestBuilder};

use crate::command::Logs;
use crate::error::Result;
use crate::files::Files;
use crate::output::{CommandEvent, CommandStream, Output};
use crate::sandbox::Sandbox;

/// Isolated sessions of a sandbox; see [`Sandbox::isolation`].
#[derive(Debug, Clone, Copy)]
pub struct Isolation<'a> {
    sandbox: &'a Sandbox,
}

/// A shell in namespaces of its own. Dropping it does not end it; see [`IsolatedSession::delete`].
#[derive(Debug, Clone)]
pub struct IsolatedSession {
    sandbox: Sandbox,
    id: String,
}

/// A run in an isolated session; made by [`IsolatedSession::shell`].
#[derive(Debug, Clone)]
#[must_use = "nothing runs until `output`, `stream` or `start` is called"]
pub struct IsolatedRun {
    session: IsolatedSession,
    request: IsolatedRunRequest,
}

impl Sandbox {
    /// Its isolated sessions.
    #[must_use]
    pub fn isolation(&self) -> Isolation<'_> {
        Isolation { sandbox: self }
    }
}

impl Isolation<'_> {
    /// What the sandbox can do.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let can = sandbox.isolation().capabilities().await?;
    /// println!("{} {:?}", can.available, can.message);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the daemon knows no isolation or the sandbox cannot be reached.
    pub async fn capabilities(&self) -> Result<IsolationCapabilities> {
        let request = self.sandbox.execd(Method::GET, &["v1", "isolated", "capabilities"]).await?;
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Opens a session.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::{IsolatedSessionSpec, IsolatedWorkspace};
    ///
    /// let workspace = IsolatedWorkspace { path: "/workspace".to_owned(), mode: None };
    /// let spec = IsolatedSessionSpec { workspace: Some(workspace), ..Default::default() };
    /// let session = sandbox.isolation().create(&spec).await?;
    /// session.shell("touch only-here").output().await?;
    /// session.delete().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the specification cannot be met, the sandbox cannot isolate, or it cannot be reached.
    pub async fn create(&self, spec: &IsolatedSessionSpec) -> Result<IsolatedSession> {
        let request = self.sandbox.execd(Method::POST, &["v1", "isolated", "session"]).await?.json(spec);
        let created: IsolatedSessionCreated =
            self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await?;
        Ok(self.attach(created.session_id))
    }

    /// A handle on an existing session. Nothing is asked of the sandbox.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.isolation().attach("7d5e…").shell("pwd").output().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn attach(&self, id: impl Into<String>) -> IsolatedSession {
        IsolatedSession { sandbox: self.sandbox.clone(), id: id.into() }
    }

    /// All sessions.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// for session in sandbox.isolation().list().await? {
    ///     println!("{} {}", session.session_id, session.status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the daemon knows no isolation or the sandbox cannot be reached.
    pub async fn list(&self) -> Result<Vec<IsolatedSessionSummary>> {
        let request = self.sandbox.execd(Method::GET, &["v1", "isolated", "sessions"]).await?;
        let answer: ListIsolatedSessionsResponse =
            self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await?;
        Ok(answer.sessions)
    }
}

impl IsolatedSession {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its files, as it sees them.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// session.files().write("/workspace/a.txt", "seen by this session only").await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn files(&self) -> Files<'_> {
        Files::isolated(&self.sandbox, &self.id)
    }

    /// What state it is in.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// println!("{}", session.info().await?.status);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn info(&self) -> Result<IsolatedSessionState> {
        let request = self.request(Method::GET, &[]).await?;
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Text for its shell, whose state lasts from run to run.
    pub fn shell(&self, text: impl Into<String>) -> IsolatedRun {
        let request = IsolatedRunRequest { code: text.into(), ..IsolatedRunRequest::default() };
        IsolatedRun { session: self.clone(), request }
    }

    /// How a background run is doing, or how it ended.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// let run = session.shell("make").start().await?;
    /// println!("{:?}", session.run_status(&run.run_id).await?.exit_code);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn run_status(&self, run: &str) -> Result<IsolatedRunStatus> {
        let request = self.request(Method::GET, &["runs", run]).await?;
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Output of a background run from `cursor`, a number of bytes.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// let run = session.shell("make").start().await?;
    /// let logs = session.run_logs(&run.run_id, 0).await?;
    /// println!("{}", String::from_utf8_lossy(&logs.content));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn run_logs(&self, run: &str, cursor: u64) -> Result<Logs> {
        let request = self.request(Method::GET, &["runs", run, "logs"]).await?.query(&[("cursor", cursor)]);
        let limit = self.sandbox.config().request_timeout;
        let answer = self.sandbox.transport().open(request, limit).await?;
        let logs = Logs::read(answer, ISOLATED_TAIL_CURSOR_HEADER, limit).await?;
        let next = logs.cursor.unwrap_or_else(|| cursor.saturating_add(logs.content.len() as u64));
        Ok(Logs { cursor: Some(next), ..logs })
    }

    /// Ends it and what runs in it.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// session.delete().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn delete(&self) -> Result<()> {
        let request = self.request(Method::DELETE, &[]).await?;
        self.sandbox.transport().remove(request, self.sandbox.config().request_timeout).await
    }

    async fn request(&self, method: Method, path: &[&str]) -> Result<RequestBuilder> {
        let prefix = ["v1", "isolated", "session", &self.id];
        self.sandbox.execd(method, &[&prefix[..], path].concat()).await
    }
}

impl IsolatedRun {
    /// Adds a variable for this run only.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.envs.get_or_insert_default().insert(name.into(), value.into());
        self
    }

    /// Interrupts the run after this time, in whole seconds. Not for runs in the background.
    pub fn timeout(mut self, limit: Duration) -> Self {
        // Zero means no limit on the wire.
        self.request.timeout_seconds = Some(limit.as_secs().max(1));
        self
    }

    /// Starts the run and follows it. Dropping the stream interrupts the run.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// let mut stream = session.shell("make").stream().await?;
    /// while let Some(event) = stream.next().await? {
    ///     println!("{event:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the run is refused, the session does not exist, or the sandbox cannot be reached.
    pub async fn stream(self) -> Result<CommandStream> {
        let request = self.session.request(Method::POST, &["run"]).await?.json(&self.request);
        let sandbox = &self.session.sandbox;
        let answer = sandbox.transport().open(request, sandbox.config().request_timeout).await?;
        Ok(CommandStream::new(answer))
    }

    /// Runs to the end and gathers what was written.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// use std::time::Duration;
    ///
    /// let run = session.shell("echo $A").env("A", "1").timeout(Duration::from_secs(5));
    /// assert_eq!(run.output().await?.stdout.trim(), "1");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`IsolatedRun::stream`], and when the stream breaks.
    pub async fn output(self) -> Result<Output> {
        self.output_with(|_| {}).await
    }

    /// As [`IsolatedRun::output`]; `handler` sees each event as it comes.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// let output = session.shell("make").output_with(|event| println!("{event:?}")).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`IsolatedRun::output`].
    pub async fn output_with(self, handler: impl FnMut(&CommandEvent)) -> Result<Output> {
        self.stream().await?.gather(handler).await
    }

    /// Starts the run in the background.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::IsolatedSession) -> opensandbox::Result<()> {
    /// let run = session.shell("sleep 100").start().await?;
    /// println!("{}", run.run_id);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`IsolatedRun::stream`].
    pub async fn start(mut self) -> Result<IsolatedRunStarted> {
        self.request.background = Some(true);
        let request = self.session.request(Method::POST, &["run"]).await?.json(&self.request);
        let sandbox = &self.session.sandbox;
        sandbox.transport().json(request, sandbox.config().request_timeout).await
    }
}
