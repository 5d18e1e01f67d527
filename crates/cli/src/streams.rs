//! Standard output and error, as values so that tests can look at what is written.

use std::io::IsTerminal;
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::Pin;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::unix::pipe::Sender;

/// Where input comes from and output goes.
pub struct Streams {
    /// Standard input.
    pub stdin: Pin<Box<dyn AsyncRead + Send>>,
    /// Standard output.
    pub stdout: Pin<Box<dyn AsyncWrite + Send>>,
    /// Standard error.
    pub stderr: Pin<Box<dyn AsyncWrite + Send>>,
    /// Whether input is typed by a person.
    pub stdin_is_terminal: bool,
    /// Whether output is read by a person.
    pub stdout_is_terminal: bool,
    /// Whether messages are read by a person.
    pub stderr_is_terminal: bool,
    /// Columns and lines of the terminal that standard output is now; `None` when it is none.
    pub size: fn() -> Option<(usize, usize)>,
    /// Comes true when nobody reads standard output any more.
    pub reader_gone: fn() -> Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl std::fmt::Debug for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streams").finish_non_exhaustive()
    }
}

impl Streams {
    /// Those of the process. Call inside a runtime.
    #[must_use]
    pub fn standard() -> Self {
        Self {
            stdin: Box::pin(tokio::io::stdin()),
            stdout: Box::pin(tokio::io::stdout()),
            stderr: Box::pin(tokio::io::stderr()),
            stdin_is_terminal: std::io::stdin().is_terminal(),
            stdout_is_terminal: std::io::stdout().is_terminal(),
            stderr_is_terminal: std::io::stderr().is_terminal(),
            size: terminal_size,
            reader_gone: || Box::pin(stdout_gone()),
        }
    }

    /// Waits until nobody reads standard output any more, and says so as a write would. Cancel safe.
    pub(crate) async fn unread(&self) -> anyhow::Error {
        (self.reader_gone)().await;
        std::io::Error::from(std::io::ErrorKind::BrokenPipe).into()
    }

    /// Writes to standard output at once.
    pub(crate) async fn out(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stdout.write_all(bytes).await?;
        self.stdout.flush().await
    }

    /// Writes to standard error at once.
    pub(crate) async fn err(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stderr.write_all(bytes).await?;
        self.stderr.flush().await
    }

    /// A remark for people, in one line.
    pub async fn note(&mut self, text: &str) {
        let text = crate::output::printable(text);
        // Standard error may be closed; there is no other place to say so.
        let _ = self.err(format!("osb: {text}\n").as_bytes()).await;
    }

    /// An error with its causes, in one line.
    pub(crate) async fn error(&mut self, error: &anyhow::Error, color: bool) {
        let label = if color { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
        let text = crate::output::printable(&format!("{error:#}"));
        let _ = self.err(format!("{label} {text}\n").as_bytes()).await;
    }

    /// An error with its causes and, when it is about a sandbox that does not exist, the ids that may be meant.
    pub(crate) async fn failure(&mut self, context: &crate::settings::Context, error: &anyhow::Error) {
        self.error(error, context.color_errors).await;
        if let Some(hint) = crate::suggest::for_error(context, error).await {
            let _ = self.err(format!("hint: {}\n", crate::output::printable(&hint)).as_bytes()).await;
        }
    }

    /// Whether messages on standard error may be coloured.
    pub(crate) fn wants_color(&self, no_color: bool, var: &impl Fn(&str) -> Option<String>) -> bool {
        self.stderr_is_terminal && color_allowed(no_color, var)
    }
}

/// Size of the terminal on standard output.
fn terminal_size() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then(|| (size.ws_col.into(), size.ws_row.into()))
}

/// Waits until the other end of a pipe on standard output is closed: what writes seldom would notice late.
async fn stdout_gone() {
    let copy: std::io::Result<OwnedFd> = std::io::stdout().as_fd().try_clone_to_owned();
    // Unchecked: nothing is written through it, and a mode of its own would be that of the other writers, too.
    let watched = copy.and_then(Sender::from_owned_fd_unchecked);
    // What cannot be watched, such as a file, is always read.
    let Ok(watched) = watched else { return std::future::pending().await };
    if watched.ready(Interest::ERROR).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Whether neither the option, nor `NO_COLOR`, nor a terminal without colours forbids them.
pub(crate) fn color_allowed(no_color: bool, var: &impl Fn(&str) -> Option<String>) -> bool {
    !no_color
        && var("NO_COLOR").is_none_or(|value| value.is_empty())
        && var("TERM").as_deref() != Some("dumb")
}

/// Whether an error is of a server that is away for a while, as when it starts again.
pub(crate) fn is_passing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<osb_client::Error>().is_some_and(|error| {
        // A connection that the server left open when it ended breaks.
        error.is_retryable()
            || matches!(error, osb_client::Error::Broken { .. } | osb_client::Error::Timeout { .. })
    })
}

/// Whether an error comes from a closed standard output.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
