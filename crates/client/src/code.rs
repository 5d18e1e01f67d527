//! Code cells in interpreters that keep their state.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::stream::{Stream, try_unfold};
use osb_protocol::execd::{
    CodeContext, CodeContextRequest, Event, EventKind, ExecutionError, RunCodeRequest,
};
use reqwest::Method;

use crate::error::{Error, Result};
use crate::output::Events;
use crate::sandbox::Sandbox;
use crate::transport::Answer;

/// Interpreters of a sandbox; see [`Sandbox::code`].
#[derive(Debug, Clone, Copy)]
pub struct Code<'a> {
    sandbox: &'a Sandbox,
}

/// A cell to run; made by [`Code::run`].
#[derive(Debug, Clone)]
#[must_use = "nothing runs until `output` or `stream` is called"]
pub struct Cell<'a> {
    sandbox: &'a Sandbox,
    request: RunCodeRequest,
}

impl Sandbox {
    /// Its interpreters: `python`, `javascript`, `typescript`, `java`, `go`, `bash`, as its image has them.
    #[must_use]
    pub fn code(&self) -> Code<'_> {
        Code { sandbox: self }
    }
}

impl<'a> Code<'a> {
    /// A cell in the language's default context.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.code().run("python", "x = 6\nx * 7").output().await?;
    /// assert_eq!(output.text(), Some("42"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn run(&self, language: impl Into<String>, code: impl Into<String>) -> Cell<'a> {
        let context = CodeContext { language: language.into(), ..CodeContext::default() };
        self.run_in(&context, code)
    }

    /// A cell in a context of its own.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let code = sandbox.code();
    /// let context = code.create_context("python", Some("/tmp")).await?;
    /// code.run_in(&context, "x = 1").output().await?;
    /// assert_eq!(code.run_in(&context, "x + 1").output().await?.text(), Some("2"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_in(&self, context: &CodeContext, code: impl Into<String>) -> Cell<'a> {
        let context = CodeContext { cwd: None, ..context.clone() };
        Cell { sandbox: self.sandbox, request: RunCodeRequest { code: code.into(), context: Some(context) } }
    }

    /// Starts an interpreter, in `cwd` if that is given.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let context = sandbox.code().create_context("javascript", None).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the image has no such interpreter or the sandbox cannot be reached.
    pub async fn create_context(&self, language: &str, cwd: Option<&str>) -> Result<CodeContext> {
        let body = CodeContextRequest { language: language.to_owned(), cwd: cwd.map(str::to_owned) };
        let request = self.sandbox.execd(Method::POST, &["code", "context"]).await?.json(&body);
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// The contexts of a language, or all.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// for context in sandbox.code().contexts(Some("python")).await? {
    ///     println!("{:?} {}", context.id, context.language);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox cannot be reached.
    pub async fn contexts(&self, language: Option<&str>) -> Result<Vec<CodeContext>> {
        let mut request = self.sandbox.execd(Method::GET, &["code", "contexts"]).await?;
        if let Some(language) = language {
            request = request.query(&[("language", language)]);
        }
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// One context.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let context = sandbox.code().context("c1").await?;
    /// println!("{}", context.language);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn context(&self, id: &str) -> Result<CodeContext> {
        let request = self.sandbox.execd(Method::GET, &["code", "contexts", id]).await?;
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Ends an interpreter.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.code().delete_context("c1").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn delete_context(&self, id: &str) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["code", "contexts", id]).await?;
        self.sandbox.transport().remove(request, self.sandbox.config().request_timeout).await
    }

    /// Ends all interpreters of a language, the default one included.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.code().delete_contexts("python").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox cannot be reached.
    pub async fn delete_contexts(&self, language: &str) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["code", "contexts"]).await?;
        let request = request.query(&[("language", language)]);
        self.sandbox.transport().done(request, self.sandbox.config().request_timeout).await
    }

    /// Interrupts the cell that runs in a context. `id` is that of [`CodeEvent::Started`] or of the context.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::CodeEvent;
    ///
    /// let code = sandbox.code();
    /// let mut stream = code.run("python", "while True: pass").stream().await?;
    /// if let Some(CodeEvent::Started { id }) = stream.next().await? {
    ///     code.interrupt(&id).await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn interrupt(&self, id: &str) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["code"]).await?.query(&[("id", id)]);
        self.sandbox.transport().done(request, self.sandbox.config().request_timeout).await
    }
}

impl Cell<'_> {
    /// Starts the cell and follows it.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::CodeEvent;
    ///
    /// let mut stream = sandbox.code().run("python", "print('working')").stream().await?;
    /// while let Some(event) = stream.next().await? {
    ///     if let CodeEvent::Stdout(text) = event {
    ///         print!("{text}");
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the cell is refused, the image has no such interpreter, or the sandbox cannot be reached.
    pub async fn stream(self) -> Result<CodeStream> {
        let request = self.sandbox.execd(Method::POST, &["code"]).await?.json(&self.request);
        let answer = self.sandbox.transport().open(request, self.sandbox.config().request_timeout).await?;
        Ok(CodeStream::new(answer))
    }

    /// Runs the cell to its end and gathers what comes. An exception is no error here but
    /// [`CodeOutput::error`].
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.code().run("python", "1 / 0").output().await?;
    /// assert_eq!(output.error.map(|error| error.ename).as_deref(), Some("ZeroDivisionError"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Cell::stream`], and when the stream breaks.
    pub async fn output(self) -> Result<CodeOutput> {
        self.output_with(|_| {}).await
    }

    /// As [`Cell::output`]; `handler` sees each event as it comes.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let cell = sandbox.code().run("bash", "make");
    /// let output = cell.output_with(|event| println!("{event:?}")).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Cell::output`].
    pub async fn output_with(self, mut handler: impl FnMut(&CodeEvent)) -> Result<CodeOutput> {
        let mut stream = self.stream().await?;
        let mut output = CodeOutput::default();
        while let Some(event) = stream.next().await? {
            handler(&event);
            match event {
                CodeEvent::Started { id } => output.id = id,
                CodeEvent::Stdout(text) => output.stdout.push_str(&text),
                CodeEvent::Stderr(text) => output.stderr.push_str(&text),
                CodeEvent::Result(result) => output.results.push(result),
                CodeEvent::Count(count) => output.count = Some(count),
                CodeEvent::Error(error) => output.error = Some(error),
                CodeEvent::Finished { time } => output.time = time,
            }
        }
        Ok(output)
    }
}

/// What happens to a running cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CodeEvent {
    /// First event.
    Started {
        /// For [`Code::interrupt`].
        id: String,
    },
    /// A piece of standard output.
    Stdout(String),
    /// A piece of standard error.
    Stderr(String),
    /// A value: texts by media type.
    Result(CodeResult),
    /// The cell's number in its context.
    Count(u64),
    /// An exception, or a failure to run the cell.
    Error(ExecutionError),
    /// Last event.
    Finished {
        /// How long the cell ran, when told.
        time: Option<Duration>,
    },
}

/// A value that a cell gave: its forms by media type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CodeResult(pub BTreeMap<String, String>);

impl CodeResult {
    /// As text.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        self.0.get("text/plain").or_else(|| self.0.get("text")).map(String::as_str)
    }

    /// In a media type such as `image/png` (in Base64) or `text/html`.
    #[must_use]
    pub fn form(&self, media_type: &str) -> Option<&str> {
        self.0.get(media_type).map(String::as_str)
    }
}

/// All of a cell that has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CodeOutput {
    /// Its id.
    pub id: String,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Values, in order.
    pub results: Vec<CodeResult>,
    /// Its number in its context.
    pub count: Option<u64>,
    /// The exception that ended it.
    pub error: Option<ExecutionError>,
    /// How long it ran, when told.
    pub time: Option<Duration>,
}

impl CodeOutput {
    /// The last value as text.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        self.results.last().and_then(CodeResult::text)
    }

    /// Whether no exception ended it.
    #[must_use]
    pub fn success(&self) -> bool {
        self.error.is_none()
    }
}

/// The events of a running cell, in the order in which they came.
#[derive(Debug)]
pub struct CodeStream {
    events: Events,
    /// How long the cell ran, once it is known to have ended.
    ended: Option<Option<Duration>>,
    finished: bool,
}

impl CodeStream {
    fn new(answer: Answer) -> Self {
        Self { events: Events::new(answer), ended: None, finished: false }
    }

    /// The next event, `None` after [`CodeEvent::Finished`]. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks, when what comes is no event stream, and [`Error::StreamCut`] when the stream
    /// ends without the cell's end. Nothing follows an error.
    pub async fn next(&mut self) -> Result<Option<CodeEvent>> {
        while !self.finished {
            match self.events.next().await {
                Ok(Some(event)) => {
                    if let Some(event) = self.convert(event) {
                        return Ok(Some(event));
                    }
                }
                // Some daemons send the value after the end: only the stream's end is the end.
                Ok(None) => {
                    self.finished = true;
                    let time = self.ended.ok_or(Error::StreamCut)?;
                    return Ok(Some(CodeEvent::Finished { time }));
                }
                Err(error) => {
                    self.finished = true;
                    return Err(error);
                }
            }
        }
        Ok(None)
    }

    /// The events as a stream.
    pub fn into_stream(self) -> impl Stream<Item = Result<CodeEvent>> + Send + 'static {
        try_unfold(self, |mut stream| async move { Ok(stream.next().await?.map(|event| (event, stream))) })
    }

    fn convert(&mut self, event: Event) -> Option<CodeEvent> {
        match event.kind {
            EventKind::Init => Some(CodeEvent::Started { id: event.text.unwrap_or_default() }),
            EventKind::Stdout => event.text.map(CodeEvent::Stdout),
            EventKind::Stderr => event.text.map(CodeEvent::Stderr),
            EventKind::Result => event.results.map(|forms| CodeEvent::Result(CodeResult(forms))),
            EventKind::ExecutionCount => event.execution_count.map(CodeEvent::Count),
            EventKind::Error => {
                self.ended.get_or_insert(None);
                Some(CodeEvent::Error(event.error.unwrap_or_default()))
            }
            EventKind::ExecutionComplete => {
                self.ended = Some(Some(Duration::from_millis(event.execution_time.unwrap_or(0))));
                None
            }
            EventKind::Ping | EventKind::Unknown => None,
        }
    }
}
