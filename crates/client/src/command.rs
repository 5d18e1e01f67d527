//! Running commands in a sandbox.

use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use osb_protocol::execd::{
    CommandRequest, CommandStatus, Event, EventKind, ExecutionError, TAIL_CURSOR_HEADER,
};
use reqwest::Method;

use crate::error::{Error, Result};
use crate::events::EventParser;
use crate::sandbox::Sandbox;
use crate::transport::Answer;

/// How long the rest of a finished stream is read so that its connection can be used again. Daemons close at
/// once; older ones hold the stream for a second.
const DRAIN: Duration = Duration::from_secs(2);

/// A command to run; made by [`Sandbox::shell`] and [`Sandbox::argv`].
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

    /// Starts the command and follows it.
    ///
    /// Dropping the stream does not end the command; see [`Sandbox::interrupt`].
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
    /// # Errors
    /// As [`Command::stream`], and when the stream breaks.
    pub async fn output(self) -> Result<Output> {
        let mut stream = self.stream().await?;
        let mut output = Output::default();
        let (mut stdout, mut stderr) = (Joiner::default(), Joiner::default());
        while let Some(event) = stream.next().await? {
            match event {
                CommandEvent::Started { id } => output.id = id,
                CommandEvent::Stdout(text) => stdout.append(&mut output.stdout, &text),
                CommandEvent::Stderr(text) => stderr.append(&mut output.stderr, &text),
                CommandEvent::Finished(exit) => output.exit = exit,
            }
        }
        Ok(output)
    }

    /// Starts the command in the background and returns its id.
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

/// What happens to a running command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandEvent {
    /// First event.
    Started {
        /// For [`Sandbox::command_status`] and [`Sandbox::interrupt`].
        id: String,
    },
    /// A piece of standard output, by default with its line end.
    Stdout(String),
    /// A piece of standard error, by default with its line end.
    Stderr(String),
    /// Last event.
    Finished(Exit),
}

/// How a command ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, 128 + signal for a death by signal; absent when the program could not be executed.
    pub code: Option<i32>,
    /// What the daemon said of a failure.
    pub error: Option<ExecutionError>,
    /// How long it ran, when told.
    pub time: Option<Duration>,
}

impl Exit {
    /// Whether the exit code is 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    fn from_event(event: Event) -> Self {
        match event.error {
            None if event.kind == EventKind::ExecutionComplete => Self {
                code: Some(0),
                error: None,
                time: Some(Duration::from_millis(event.execution_time.unwrap_or(0))),
            },
            error => {
                let error = error.unwrap_or_default();
                Self { code: error.evalue.parse().ok(), error: Some(error), time: None }
            }
        }
    }
}

/// All of a command that has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// Its id.
    pub id: String,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How it ended.
    pub exit: Exit,
}

/// Length from which a piece without line end may be a part of a longer line: daemons cut there.
const CUT: usize = (1 << 20) - 4;

/// Puts pieces of one output stream together.
///
/// By default pieces carry their line ends and are simply written one after the other. Daemons set to strip line
/// ends send one bare line per piece; between two such pieces a line break belongs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Joiner {
    break_due: bool,
}

impl Joiner {
    /// What to write before `piece`: nothing or a line break. Pieces are to be given in order.
    pub fn separator(&mut self, piece: &str) -> &'static str {
        let is_end = |c: char| c == '\n' || c == '\r';
        let due = self.break_due && !piece.starts_with(is_end);
        self.break_due = !piece.ends_with(is_end) && piece.len() < CUT;
        if due { "\n" } else { "" }
    }

    fn append(&mut self, text: &mut String, piece: &str) {
        text.push_str(self.separator(piece));
        text.push_str(piece);
    }
}

/// The events of a running command, in the order in which they happened.
#[derive(Debug)]
pub struct CommandStream {
    answer: Option<Answer>,
    parser: EventParser,
    finished: bool,
}

impl CommandStream {
    fn new(answer: Answer) -> Self {
        Self { answer: Some(answer), parser: EventParser::new(), finished: false }
    }

    /// The next event, `None` after [`CommandEvent::Finished`]. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks, when what comes is no event stream, and [`Error::StreamCut`] when the stream
    /// ends without the command's end. Nothing follows an error.
    pub async fn next(&mut self) -> Result<Option<CommandEvent>> {
        let result = self.advance().await;
        match &result {
            Ok(Some(CommandEvent::Finished(_))) => self.release(),
            Err(_) => {
                self.finished = true;
                self.answer = None;
            }
            Ok(_) => {}
        }
        result
    }

    /// The next event if it has come already; the outer `None` means that it has not. For writing what has come
    /// in one go.
    ///
    /// # Errors
    /// As [`CommandStream::next`].
    pub fn next_ready(&mut self) -> Option<Result<Option<CommandEvent>>> {
        self.next().now_or_never()
    }

    async fn advance(&mut self) -> Result<Option<CommandEvent>> {
        loop {
            if self.finished {
                return Ok(None);
            }
            while let Some(event) = self.parser.next_event().map_err(|error| self.unexpected(&error))? {
                if let Some(event) = convert(event) {
                    return Ok(Some(event));
                }
            }
            match self.read().await? {
                Some(bytes) => self.parser.push(&bytes),
                None => {
                    let last = self.parser.finish().map_err(|error| self.unexpected(&error))?;
                    return match last.and_then(convert) {
                        Some(event) => Ok(Some(event)),
                        None => Err(Error::StreamCut),
                    };
                }
            }
        }
    }

    async fn read(&mut self) -> Result<Option<Bytes>> {
        let Some(answer) = &mut self.answer else { return Ok(None) };
        answer.chunk().await
    }

    fn unexpected(&self, error: &crate::events::ParseError) -> Error {
        let call = self.answer.as_ref().map(|answer| answer.call.clone()).unwrap_or_default();
        Error::Unexpected { call, reason: error.to_string() }
    }

    /// Gives the connection back: reads what little is left, here if it is at hand, else behind.
    fn release(&mut self) {
        self.finished = true;
        let Some(Answer { mut response, .. }) = self.answer.take() else { return };
        match response.chunk().now_or_never() {
            Some(Ok(None) | Err(_)) => {}
            Some(Ok(Some(_))) | None => {
                let rest = async move { while let Ok(Some(_)) = response.chunk().await {} };
                tokio::spawn(tokio::time::timeout(DRAIN, rest));
            }
        }
    }
}

fn convert(event: Event) -> Option<CommandEvent> {
    match event.kind {
        EventKind::Init => Some(CommandEvent::Started { id: event.text.unwrap_or_default() }),
        EventKind::Stdout => event.text.map(CommandEvent::Stdout),
        EventKind::Stderr => event.text.map(CommandEvent::Stderr),
        EventKind::Error | EventKind::ExecutionComplete => {
            Some(CommandEvent::Finished(Exit::from_event(event)))
        }
        EventKind::Ping | EventKind::Result | EventKind::ExecutionCount | EventKind::Unknown => None,
    }
}

/// Output of a background command so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logs {
    /// From the cursor asked for to the present end, both streams in order of arrival.
    pub content: Bytes,
    /// Where to go on.
    pub cursor: Option<u64>,
}

impl Sandbox {
    /// Text for the sandbox's shell (`bash`, else `sh`).
    pub fn shell(&self, text: impl Into<String>) -> Command {
        Command::new(self.clone(), CommandRequest { command: Some(text.into()), ..CommandRequest::default() })
    }

    /// A program and its arguments, each passed on as it is, without a shell.
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
    /// # Errors
    /// When the id is not known or the sandbox cannot be reached.
    pub async fn command_status(&self, id: &str) -> Result<CommandStatus> {
        let request = self.execd(Method::GET, &["command", "status", id]).await?;
        self.transport().json(request, self.config().request_timeout).await
    }

    /// Output of a background command from `cursor` (`None`: from the beginning).
    ///
    /// # Errors
    /// When the id is not that of a background command or the sandbox cannot be reached.
    pub async fn command_logs(&self, id: &str, cursor: Option<u64>) -> Result<Logs> {
        let mut request = self.execd(Method::GET, &["command", id, "logs"]).await?;
        if let Some(cursor) = cursor {
            request = request.query(&[("cursor", cursor)]);
        }
        let limit = self.config().request_timeout;
        let answer = self.transport().open(request, limit).await?;
        let cursor = answer
            .response
            .headers()
            .get(TAIL_CURSOR_HEADER)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| text.parse().ok());
        let (_, content) = answer.within(limit).await?;
        Ok(Logs { content, cursor })
    }

    /// Ends a command and all it started: first politely, after three seconds by force.
    ///
    /// # Errors
    /// When the id is not known or the sandbox cannot be reached.
    pub async fn interrupt(&self, id: &str) -> Result<()> {
        let request = self.execd(Method::DELETE, &["command"]).await?.query(&[("id", id)]);
        self.transport().done(request, self.config().request_timeout).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_with_and_without_line_ends() {
        for (pieces, joined) in [
            (&["a\n", "b\n"][..], "a\nb\n"),
            (&["a", "b"], "a\nb"),
            (&["a", "\n", "b"], "a\nb"),
            (&["50%\r", "100%\r\n", "x"], "50%\r100%\r\nx"),
            (&[], ""),
        ] {
            let (mut text, mut joiner) = (String::new(), Joiner::default());
            for piece in pieces {
                joiner.append(&mut text, piece);
            }
            assert_eq!(text, joined, "{pieces:?}");
        }
        let long = "x".repeat(1 << 20);
        let (mut text, mut joiner) = (String::new(), Joiner::default());
        joiner.append(&mut text, &long);
        joiner.append(&mut text, "y\n");
        assert_eq!(text, format!("{long}y\n"));
    }

    #[test]
    fn exits() {
        let error = |evalue: &str| Event {
            kind: EventKind::Error,
            error: Some(ExecutionError { evalue: evalue.to_owned(), ..ExecutionError::default() }),
            ..Event::default()
        };
        assert_eq!(Exit::from_event(error("137")).code, Some(137));
        assert_eq!(Exit::from_event(error("no such file")).code, None);
        let done = Exit::from_event(Event { kind: EventKind::ExecutionComplete, ..Event::default() });
        assert!(done.success());
        let odd = Exit::from_event(Event { kind: EventKind::Error, ..Event::default() });
        assert!(!odd.success() && odd.error.is_some());
    }
}
