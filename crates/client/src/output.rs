//! Event streams of commands, and what is gathered from them.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{Stream, try_unfold};
use osb_protocol::execd::{Event, EventKind, ExecutionError};

use crate::error::{Error, Result};
use crate::events::{EventParser, ParseError};
use crate::transport::Answer;

/// How long the rest of a finished stream is read so that its connection can be used again. Daemons close at
/// once; older ones hold the stream for a second.
const DRAIN: Duration = Duration::from_secs(2);

/// The raw events of a stream.
#[derive(Debug)]
pub(crate) struct Events {
    answer: Option<Answer>,
    parser: EventParser,
}

impl Events {
    pub(crate) fn new(answer: Answer) -> Self {
        Self { answer: Some(answer), parser: EventParser::new() }
    }

    /// The next event; `None` at the end of the stream, after an error and after [`Events::release`].
    pub(crate) async fn next(&mut self) -> Result<Option<Event>> {
        let result = self.advance().await;
        if result.is_err() {
            self.answer = None;
        }
        result
    }

    async fn advance(&mut self) -> Result<Option<Event>> {
        loop {
            let Some(answer) = &mut self.answer else { return Ok(None) };
            let unexpected = |answer: &Answer, error: ParseError| Error::Unexpected {
                call: answer.call.clone(),
                reason: error.to_string(),
            };
            match self.parser.next_event() {
                Ok(Some(event)) => return Ok(Some(event)),
                Ok(None) => {}
                Err(error) => return Err(unexpected(answer, error)),
            }
            match answer.chunk().await? {
                Some(bytes) => self.parser.push(&bytes),
                None => {
                    let last = self.parser.finish().map_err(|error| unexpected(answer, error));
                    self.answer = None;
                    return last;
                }
            }
        }
    }

    /// Gives the connection back: reads what little is left, here if it is at hand, else behind.
    pub(crate) fn release(&mut self) {
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

/// What happens to a running command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandEvent {
    /// First event. Runs in isolated sessions have none.
    Started {
        /// For [`Sandbox::command_status`](crate::Sandbox::command_status) and
        /// [`Sandbox::interrupt`](crate::Sandbox::interrupt).
        id: String,
    },
    /// A piece of standard output, by default with its line end.
    Stdout(String),
    /// A piece of standard error, by default with its line end.
    Stderr(String),
    /// Last event.
    Finished(Exit),
}

impl CommandEvent {
    fn from_event(event: Event) -> Option<Self> {
        match event.kind {
            EventKind::Init => Some(Self::Started { id: event.text.unwrap_or_default() }),
            EventKind::Stdout => event.text.map(Self::Stdout),
            EventKind::Stderr => event.text.map(Self::Stderr),
            EventKind::Error | EventKind::ExecutionComplete => Some(Self::Finished(Exit::from_event(event))),
            EventKind::Ping | EventKind::Result | EventKind::ExecutionCount | EventKind::Unknown => None,
        }
    }
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

impl Output {
    /// Whether the exit code is 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.exit.success()
    }

    /// The same as an error when the exit code is not 0, for programs that go on with `?`.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let built = sandbox.shell("make").output().await?.checked()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn checked(self) -> Result<Self> {
        if self.success() { Ok(self) } else { Err(Error::Failed(Box::new(self))) }
    }
}

/// Length from which a piece without line end may be a part of a longer line: daemons cut there.
const CUT: usize = (1 << 20) - 4;

/// Puts pieces of one output stream together.
///
/// ```
/// let mut joiner = opensandbox::Joiner::default();
/// let text: String =
///     ["one", "two\n", "three"].iter().map(|piece| format!("{}{piece}", joiner.separator(piece))).collect();
/// assert_eq!(text, "one\ntwo\nthree");
/// ```
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
    events: Events,
    finished: bool,
}

impl CommandStream {
    pub(crate) fn new(answer: Answer) -> Self {
        Self { events: Events::new(answer), finished: false }
    }

    /// The next event, `None` after [`CommandEvent::Finished`]. Cancel safe.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::CommandEvent;
    ///
    /// let mut stream = sandbox.shell("make").stream().await?;
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
    /// When the connection breaks, when what comes is no event stream, and [`Error::StreamCut`] when the stream
    /// ends without the command's end. Nothing follows an error.
    pub async fn next(&mut self) -> Result<Option<CommandEvent>> {
        while !self.finished {
            let event = match self.events.next().await {
                Ok(Some(event)) => event,
                Ok(None) => {
                    self.finished = true;
                    return Err(Error::StreamCut);
                }
                Err(error) => {
                    self.finished = true;
                    return Err(error);
                }
            };
            if let Some(event) = CommandEvent::from_event(event) {
                if matches!(event, CommandEvent::Finished(_)) {
                    self.finished = true;
                    self.events.release();
                }
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// The next event if it has come already; the outer `None` means that it has not. For writing what has come
    /// in one go.
    ///
    /// # Errors
    /// As [`CommandStream::next`].
    pub fn next_ready(&mut self) -> Option<Result<Option<CommandEvent>>> {
        self.next().now_or_never()
    }

    /// The events as a stream.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use futures_util::TryStreamExt;
    ///
    /// let events = sandbox.shell("seq 3").stream().await?.into_stream();
    /// let all: Vec<opensandbox::CommandEvent> = events.try_collect().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_stream(self) -> impl Stream<Item = Result<CommandEvent>> + Send + 'static {
        try_unfold(self, |mut stream| async move { Ok(stream.next().await?.map(|event| (event, stream))) })
    }

    /// Follows the command to its end and gathers what it writes. `handler` sees each event as it comes.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let stream = sandbox.shell("make").stream().await?;
    /// let output = stream.gather(|event| println!("{event:?}")).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`CommandStream::next`].
    pub async fn gather(mut self, mut handler: impl FnMut(&CommandEvent)) -> Result<Output> {
        let mut output = Output::default();
        let (mut stdout, mut stderr) = (Joiner::default(), Joiner::default());
        while let Some(event) = self.next().await? {
            handler(&event);
            match event {
                CommandEvent::Started { id } => output.id = id,
                CommandEvent::Stdout(text) => stdout.append(&mut output.stdout, &text),
                CommandEvent::Stderr(text) => stderr.append(&mut output.stderr, &text),
                CommandEvent::Finished(exit) => output.exit = exit,
            }
        }
        Ok(output)
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

    #[test]
    fn a_failure_can_be_an_error_with_its_output() {
        let error = ExecutionError { evalue: "3".to_owned(), ..ExecutionError::default() };
        let exit = Exit { code: Some(3), error: Some(error), time: None };
        let output = Output { stderr: "first\nno such target\n".to_owned(), exit, ..Output::default() };
        let error = output.checked().unwrap_err();
        assert_eq!(error.to_string(), "command ended with exit code 3: no such target");
        let fine = Output { exit: Exit { code: Some(0), ..Exit::default() }, ..Output::default() };
        assert!(fine.checked().is_ok());
    }
}
