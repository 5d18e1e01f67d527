//! Running commands in a sandbox.

use std::time::Duration;

use bytes::Bytes;
use osb_protocol::execd::{CommandRequest, CommandStatus, DROPPED_HEADER, TAIL_CURSOR_HEADER};
use reqwest::Method;

use crate::error::{Error, Result};
use crate::output::{CommandEvent, CommandStream, Exit, Output};
use crate::sandbox::Sandbox;
use crate::transport::Answer;

/// A command to run; made by [`Sandbox::shell`] and [`Sandbox::argv`].
///
/// ```no_run
/// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
/// use std::time::Duration;
///
/// let output = sandbox
///     .argv(["python3", "job.py"])
///     .cwd("/app")
///     .env("STAGE", "test")
///     .user_and_group(1000, 1000)
///     .timeout(Duration::from_secs(60))
///     .output()
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing runs until `output`, `stream` or `start` is called"]
pub struct Command {
    sandbox: Sandbox,
    request: CommandRequest,
}

impl Command {
    pub(crate) fn new(sandbox: Sandbox, request: CommandRequest) -> Self {
        Self { sandbox, request }
    }

    /// Working directory; must exist in the sandbox.
    pub fn cwd(mut self, directory: impl Into<String>) -> Self {
        self.request.cwd = Some(directory.into());
        self
    }

    /// Adds a variable to the environment.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.envs.get_or_insert_default().insert(name.into(), value.into());
        self
    }

    /// The command and all it started are killed after this time.
    pub fn timeout(mut self, limit: Duration) -> Self {
        // Zero means no limit on the wire.
        let millis = limit.as_millis().max(1);
        self.request.timeout = Some(i64::try_from(millis).unwrap_or(i64::MAX));
        self
    }

    /// Runs as this user, with its groups.
    pub fn user(mut self, uid: u32) -> Self {
        self.request.uid = Some(uid);
        self
    }

    /// Runs as this user and group.
    pub fn user_and_group(mut self, uid: u32, gid: u32) -> Self {
        self.request.uid = Some(uid);
        self.request.gid = Some(gid);
        self
    }

    /// Adds variables to the environment.
    pub fn envs<K: Into<String>, V: Into<String>>(
        mut self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into()));
        self.request.envs.get_or_insert_default().extend(variables);
        self
    }

    /// Starts the command and follows it.
    ///
    /// Dropping the stream does not end the command; see [`Sandbox::interrupt`].
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::CommandEvent;
    ///
    /// let mut stream = sandbox.shell("for i in 1 2 3; do echo $i; sleep 1; done").stream().await?;
    /// while let Some(event) = stream.next().await? {
    ///     if let CommandEvent::Stdout(text) = event {
    ///         print!("{text}");
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the command is refused or the sandbox cannot be reached. A program that cannot be executed is no
    /// error here but the stream's [`CommandEvent::Finished`].
    pub async fn stream(self) -> Result<CommandStream> {
        let request = self.sandbox.execd(Method::POST, &["command"]).await?.json(&self.request);
        let answer = self.sandbox.transport().open(request, self.sandbox.config().request_timeout).await?;
        Ok(CommandStream::new(answer))
    }

    /// Runs the command to its end and gathers what it wrote.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.argv(["python3", "-c", "print(6 * 7)"]).output().await?;
    /// assert_eq!((output.stdout.as_str(), output.exit.code), ("42\n", Some(0)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Command::stream`], and when the stream breaks.
    pub async fn output(self) -> Result<Output> {
        self.output_with(|_| {}).await
    }

    /// Runs the command to its end and gathers what it wrote; `handler` sees each event as it comes.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.shell("make").output_with(|event| println!("{event:?}")).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Command::output`].
    pub async fn output_with(self, handler: impl FnMut(&CommandEvent)) -> Result<Output> {
        self.stream().await?.gather(handler).await
    }

    /// Starts the command in the background and returns its id.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let id = sandbox.argv(["python3", "-m", "http.server"]).start().await?;
    /// println!("{:?}", sandbox.command_status(&id).await?.running);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Command::stream`], and [`Error::NotStarted`] when the program cannot be executed.
    pub async fn start(mut self) -> Result<String> {
        self.request.background = Some(true);
        let mut stream = self.stream().await?;
        let mut id = None;
        while let Some(event) = stream.next().await? {
            match event {
                CommandEvent::Started { id: started } => id = Some(started),
                CommandEvent::Finished(Exit { error: Some(error), .. }) => {
                    return Err(Error::NotStarted(error.traceback.first().cloned().unwrap_or(error.evalue)));
                }
                _ => {}
            }
        }
        id.ok_or_else(|| Error::Unexpected {
            call: "POST /command".into(),
            reason: "a background command without an id".to_owned(),
        })
    }
}

/// Output of a background command so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logs {
    /// From the cursor asked for to the present end, both streams in order of arrival.
    pub content: Bytes,
    /// Where to go on.
    pub cursor: Option<u64>,
    /// Bytes from the cursor asked for on that are no longer kept: `content` begins behind them.
    pub dropped: u64,
}

impl Logs {
    /// Reads an answer whose header `cursor_header` tells where to go on.
    pub(crate) async fn read(answer: Answer, cursor_header: &str, limit: Duration) -> Result<Self> {
        let number = |name: &str| answer.response.headers().get(name)?.to_str().ok()?.parse().ok();
        let (cursor, dropped) = (number(cursor_header), number(DROPPED_HEADER).unwrap_or(0));
        let (_, content) = answer.within(limit).await?;
        Ok(Self { content, cursor, dropped })
    }
}

impl Sandbox {
    /// Text for the sandbox's shell (`bash`, else `sh`).
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.shell("ls /usr | wc -l").output().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn shell(&self, text: impl Into<String>) -> Command {
        Command::new(self.clone(), CommandRequest { command: Some(text.into()), ..CommandRequest::default() })
    }

    /// A program and its arguments, each passed on as it is, without a shell.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.argv(["printf", "%s", "a b; $HOME"]).cwd("/tmp").output().await?;
    /// assert_eq!(output.stdout, "a b; $HOME");
    /// # Ok(())
    /// # }
    /// ```
    pub fn argv<I>(&self, argv: I) -> Command
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let argv = argv.into_iter().map(Into::into).collect();
        Command::new(self.clone(), CommandRequest { argv: Some(argv), ..CommandRequest::default() })
    }

    /// How a command is doing, or how it ended.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let id = sandbox.shell("sleep 1; exit 3").start().await?;
    /// let status = sandbox.command_status(&id).await?;
    /// println!("{:?}", status.exit_code);
    /// if let Some(usage) = status.usage {
    ///     println!("{} bytes at most", usage.peak_memory_bytes);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the id is not known or the sandbox cannot be reached.
    pub async fn command_status(&self, id: &str) -> Result<CommandStatus> {
        let request = self.execd(Method::GET, &["command", "status", id]).await?;
        self.transport().json(request, self.config().request_timeout).await
    }

    /// Output of a background command from `cursor` (`None`: from the beginning).
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let id = sandbox.shell("make").start().await?;
    /// let first = sandbox.command_logs(&id, None).await?;
    /// let more = sandbox.command_logs(&id, first.cursor).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the id is not that of a background command or the sandbox cannot be reached.
    pub async fn command_logs(&self, id: &str, cursor: Option<u64>) -> Result<Logs> {
        let mut request = self.execd(Method::GET, &["command", id, "logs"]).await?;
        if let Some(cursor) = cursor {
            request = request.query(&[("cursor", cursor)]);
        }
        let limit = self.config().request_timeout;
        Logs::read(self.transport().open(request, limit).await?, TAIL_CURSOR_HEADER, limit).await
    }

    /// Ends a command and all it started: first politely, after three seconds by force.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let id = sandbox.shell("sleep 1000").start().await?;
    /// sandbox.interrupt(&id).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the id is not known or the sandbox cannot be reached.
    pub async fn interrupt(&self, id: &str) -> Result<()> {
        let request = self.execd(Method::DELETE, &["command"]).await?.query(&[("id", id)]);
        self.transport().done(request, self.config().request_timeout).await
    }
}
