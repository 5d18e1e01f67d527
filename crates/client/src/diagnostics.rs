//! What the server knows of a sandbox's inner life.

use osb_protocol::lifecycle::DiagnosticContentResponse;
use reqwest::Method;
use reqwest::header::ACCEPT;

use crate::error::Result;
use crate::sandbox::Sandbox;

/// Diagnostics of a sandbox; see [`Sandbox::diagnostics`].
#[derive(Debug, Clone, Copy)]
pub struct Diagnostics<'a> {
    sandbox: &'a Sandbox,
}

/// Which lines of a log to read; the default is the server's: the last 100.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogQuery {
    /// This many lines from the end.
    pub tail: Option<u32>,
    /// Not older than this: `10m`, `1h`, or a time.
    pub since: Option<String>,
}

impl Sandbox {
    /// Its logs and events, for people and programs.
    #[must_use]
    pub fn diagnostics(&self) -> Diagnostics<'_> {
        Diagnostics { sandbox: self }
    }
}

impl Diagnostics<'_> {
    /// Output of the entrypoint. `scope` is `container` or `all`.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let logs = sandbox.diagnostics().logs("container").await?;
    /// print!("{}", logs.content.unwrap_or_default());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox does not exist, the scope is unknown, or the server cannot be reached.
    pub async fn logs(&self, scope: &str) -> Result<DiagnosticContentResponse> {
        self.content("logs", scope).await
    }

    /// What happened to the sandbox. `scope` is `runtime` or `all`.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let events = sandbox.diagnostics().events("runtime").await?;
    /// print!("{}", events.content.unwrap_or_default());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Diagnostics::logs`].
    pub async fn events(&self, scope: &str) -> Result<DiagnosticContentResponse> {
        self.content("events", scope).await
    }

    /// The last lines of the entrypoint's output, as they are.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::LogQuery;
    ///
    /// let last = LogQuery { tail: Some(20), ..LogQuery::default() };
    /// print!("{}", sandbox.diagnostics().logs_text(&last).await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox does not exist or the server cannot be reached.
    pub async fn logs_text(&self, query: &LogQuery) -> Result<String> {
        let tail = query.tail.map(|tail| ("tail", tail.to_string()));
        let since = query.since.clone().map(|since| ("since", since));
        self.text("logs", &tail.into_iter().chain(since).collect::<Vec<_>>()).await
    }

    /// The last `limit` events as text.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// print!("{}", sandbox.diagnostics().events_text(50).await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Diagnostics::logs_text`].
    pub async fn events_text(&self, limit: u32) -> Result<String> {
        self.text("events", &[("limit", limit.to_string())]).await
    }

    /// State, limits and labels as text.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// print!("{}", sandbox.diagnostics().inspect().await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Diagnostics::logs_text`].
    pub async fn inspect(&self) -> Result<String> {
        self.text("inspect", &[]).await
    }

    /// All of the above in one text, with the last `tail` lines and `event_limit` events.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// print!("{}", sandbox.diagnostics().summary(50, 20).await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Diagnostics::logs_text`].
    pub async fn summary(&self, tail: u32, event_limit: u32) -> Result<String> {
        self.text("summary", &[("tail", tail.to_string()), ("event_limit", event_limit.to_string())]).await
    }

    async fn content(&self, part: &str, scope: &str) -> Result<DiagnosticContentResponse> {
        let request = self.request(part)?.query(&[("scope", scope)]);
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    async fn text(&self, part: &str, query: &[(&str, String)]) -> Result<String> {
        let request = self.request(part)?.query(query).header(ACCEPT, "text/plain");
        self.sandbox.transport().text(request, self.sandbox.config().request_timeout).await
    }

    fn request(&self, part: &str) -> Result<reqwest::RequestBuilder> {
        let path = ["sandboxes", self.sandbox.id(), "diagnostics", part];
        self.sandbox.client().request(Method::GET, &path)
    }
}
