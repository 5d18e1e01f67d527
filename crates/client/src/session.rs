//! Shells that keep directory and environment between commands.

use std::time::Duration;

use osb_protocol::execd::{CreateSessionRequest, RunInSessionRequest, SessionCreated};
use reqwest::Method;

use crate::error::{Error, Result};
use crate::output::{CommandEvent, CommandStream, Output};
use crate::sandbox::Sandbox;

/// A shell in a sandbox that keeps working directory and exported variables between commands. Dropping it does
/// not end it; see [`Session::delete`].
#[derive(Debug, Clone)]
pub struct Session {
    sandbox: Sandbox,
    id: String,
}

/// A command to run in a session; made by [`Session::shell`].
#[derive(Debug, Clone)]
#[must_use = "nothing runs until `output` or `stream` is called"]
pub struct SessionCommand {
    session: Session,
    request: RunInSessionRequest,
}

impl Sandbox {
    /// Opens a shell session, in `cwd` if that is given.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let session = sandbox.create_session(Some("/tmp")).await?;
    /// session.shell("export NAME=world; cd /").output().await?;
    /// let output = session.shell("echo hello $NAME from $PWD").output().await?;
    /// assert_eq!(output.stdout.trim(), "hello world from /");
    /// session.delete().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the directory cannot be used or the sandbox cannot be reached.
    pub async fn create_session(&self, cwd: Option<&str>) -> Result<Session> {
        let request = self.execd(Method::POST, &["session"]).await?;
        let body = CreateSessionRequest { cwd: cwd.map(str::to_owned), command: None };
        let created: SessionCreated =
            self.transport().json(request.json(&body), self.config().request_timeout).await?;
        Ok(self.session(created.session_id))
    }

    /// A handle on an existing session. Nothing is asked of the sandbox.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let output = sandbox.session("9a1f…").shell("pwd").output().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn session(&self, id: impl Into<String>) -> Session {
        Session { sandbox: self.clone(), id: id.into() }
    }

    /// Sets a variable for all later commands and sessions of the sandbox.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.set_env("STAGE", "test").await?;
    /// assert_eq!(sandbox.shell("echo $STAGE").output().await?.stdout, "test\n");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the name is none, the value holds both `'` and `$`, which cannot be written, or the sandbox has no
    /// file for variables or cannot be reached.
    pub async fn set_env(&self, name: &str, value: &str) -> Result<()> {
        const APPEND: &str = r#"set -e
: "${EXECD_ENVS:?this sandbox keeps no variables}"
mkdir -p "$(dirname "$EXECD_ENVS")"
printf '%s\n' "$OSB_ENTRY" >> "$EXECD_ENVS""#;
        let entry = format!("{name}={}", quoted(name, value)?);
        self.shell(APPEND).env("OSB_ENTRY", entry).output().await?.checked().map(drop)
    }
}

/// A value as the file of variables has it.
fn quoted(name: &str, value: &str) -> Result<String> {
    let plain = |c: char| c == '_' || c.is_ascii_alphanumeric();
    if name.is_empty() || !name.chars().all(plain) || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(Error::InvalidArgument(format!("'{name}' is no name of a variable")));
    }
    if value.contains('\0') {
        return Err(Error::InvalidArgument(format!("the value of {name} holds a NUL byte")));
    }
    if !value.contains('\'') {
        return Ok(format!("'{value}'"));
    }
    if value.contains('$') {
        return Err(Error::InvalidArgument(format!(
            "the value of {name} holds both ' and $, which the sandbox's file of variables cannot hold; write \
             it to a file instead"
        )));
    }
    let mut text = String::from('"');
    for c in value.chars() {
        match c {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' | '"' => text.extend(['\\', c]),
            c => text.push(c),
        }
    }
    text.push('"');
    Ok(text)
}

impl Session {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Text for its shell.
    pub fn shell(&self, text: impl Into<String>) -> SessionCommand {
        let request = RunInSessionRequest { command: text.into(), ..RunInSessionRequest::default() };
        SessionCommand { session: self.clone(), request }
    }

    /// Ends what runs in it; the session stays.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::Session) -> opensandbox::Result<()> {
    /// session.interrupt().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn interrupt(&self) -> Result<()> {
        self.sandbox.interrupt(&self.id).await
    }

    /// Ends it and what runs in it.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::Session) -> opensandbox::Result<()> {
    /// session.delete().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the sandbox cannot be reached.
    pub async fn delete(&self) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["session", &self.id]).await?;
        self.sandbox.transport().remove(request, self.sandbox.config().request_timeout).await
    }
}

impl SessionCommand {
    /// Working directory of this command and of those after it.
    pub fn cwd(mut self, directory: impl Into<String>) -> Self {
        self.request.cwd = Some(directory.into());
        self
    }

    /// The command and all it started are killed after this time.
    pub fn timeout(mut self, limit: Duration) -> Self {
        // Zero means the daemon's own limit on the wire.
        self.request.timeout = Some(i64::try_from(limit.as_millis().max(1)).unwrap_or(i64::MAX));
        self
    }

    /// Starts the command and follows it. Standard error comes as standard output.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::Session) -> opensandbox::Result<()> {
    /// let mut stream = session.shell("make").stream().await?;
    /// while let Some(event) = stream.next().await? {
    ///     println!("{event:?}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the command is refused, the session does not exist, or the sandbox cannot be reached.
    pub async fn stream(self) -> Result<CommandStream> {
        let Session { sandbox, id } = &self.session;
        let request = sandbox.execd(Method::POST, &["session", id, "run"]).await?.json(&self.request);
        let answer = sandbox.transport().open(request, sandbox.config().request_timeout).await?;
        Ok(CommandStream::new(answer))
    }

    /// Runs the command to its end and gathers what it wrote.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::Session) -> opensandbox::Result<()> {
    /// use std::time::Duration;
    ///
    /// let command = session.shell("make").cwd("/app").timeout(Duration::from_secs(60));
    /// let output = command.output().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`SessionCommand::stream`], and when the stream breaks.
    pub async fn output(self) -> Result<Output> {
        self.output_with(|_| {}).await
    }

    /// As [`SessionCommand::output`]; `handler` sees each event as it comes.
    ///
    /// ```no_run
    /// # async fn example(session: opensandbox::Session) -> opensandbox::Result<()> {
    /// let output = session.shell("make").output_with(|event| println!("{event:?}")).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`SessionCommand::output`].
    pub async fn output_with(self, handler: impl FnMut(&CommandEvent)) -> Result<Output> {
        self.stream().await?.gather(handler).await
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn values_are_quoted_so_that_nothing_in_them_counts() {
        for (value, text) in [
            ("plain", "'plain'"),
            ("a $HOME \"b\"\n", "'a $HOME \"b\"\n'"),
            ("it's\n\"so\" \\", "\"it's\\n\\\"so\\\" \\\\\""),
        ] {
            assert_eq!(quoted("K", value).unwrap(), text);
        }
        assert!(quoted("K", "it's $5").is_err() && quoted("K", "\0").is_err());
        for name in ["", "1A", "A-B", "A B", "Ä"] {
            assert!(quoted(name, "x").is_err(), "{name}");
        }
    }
}
