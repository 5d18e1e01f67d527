//! `osb command`: commands in an existing sandbox.

use std::time::Duration;

use clap::{Args, Subcommand};
use osb_client::{Command, CommandEvent, CommandStatus, CommandStream, Exit, Joiner, Sandbox};
use serde_json::json;

use crate::args::{OutputArg, RawOutputArg, SandboxArg, key_value};
use crate::duration::parse as parse_duration;
use crate::exit;
use crate::logs;
use crate::output::{Cell, RawFormat};
use crate::session::{self, SessionAction};
use crate::settings::Context;
use crate::signals::Signals;
use crate::streams::Streams;

/// What to do with commands.
#[derive(Debug, Clone, Subcommand)]
pub enum CommandAction {
    /// Run a command; its exit code becomes this program's
    Run(RunArgs),
    /// Show how a command is doing
    Status {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Id of the command
        execution_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show what a background command wrote
    Logs {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Id of the command
        execution_id: String,
        /// Where to go on, as an earlier call told
        #[arg(long, value_name = "N")]
        cursor: Option<u64>,
        /// Go on until the command ends; its exit code becomes this program's
        #[arg(short, long)]
        follow: bool,
        #[command(flatten)]
        output: RawOutputArg,
    },
    /// Shells that keep their variables and directory
    #[command(subcommand)]
    Session(SessionAction),
    /// End a command and all it started
    #[command(visible_alias = "kill")]
    Interrupt {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Id of the command
        execution_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

/// How to run a command; shared by `run` and `command run`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProgramArgs {
    /// Working directory; must exist
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Kill the command after this time: 30s, 10m, 1h30m or seconds
    #[arg(short, long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// Run as this user: UID or UID:GID
    #[arg(short, long, value_name = "UID[:GID]", value_parser = parse_user)]
    user: Option<(u32, Option<u32>)>,
}

/// What is to be executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Program {
    /// Text for the shell of the sandbox.
    Shell(String),
    /// A program and its arguments.
    Argv(Vec<String>),
}

impl ProgramArgs {
    /// The working directory, for a program on a terminal.
    ///
    /// # Errors
    /// Something is asked for that terminals do not have.
    pub(crate) fn for_terminal(&self) -> anyhow::Result<Option<&str>> {
        if self.timeout.is_some() || self.user.is_some() {
            anyhow::bail!(
                "neither --timeout nor --user goes with -t: a terminal has no limit and the sandbox's user"
            );
        }
        Ok(self.workdir.as_deref())
    }

    pub(crate) fn build(
        self,
        program: Program,
        sandbox: &Sandbox,
        env: impl IntoIterator<Item = (String, String)>,
    ) -> Command {
        let mut command = match program {
            Program::Shell(text) => sandbox.shell(text),
            Program::Argv(words) => sandbox.argv(words),
        };
        if let Some(workdir) = self.workdir {
            command = command.cwd(workdir);
        }
        if let Some(timeout) = self.timeout {
            command = command.timeout(timeout);
        }
        command = match self.user {
            Some((uid, Some(gid))) => command.user_and_group(uid, gid),
            Some((uid, None)) => command.user(uid),
            None => command,
        };
        env.into_iter().fold(command, |command, (name, value)| command.env(name, value))
    }
}

impl Program {
    /// The words as a program and its arguments; one word with blanks is text for the shell.
    pub(crate) fn from_words(words: Vec<String>, argv: bool) -> Self {
        match &words[..] {
            [text] if !argv && text.contains(char::is_whitespace) => Self::Shell(text.clone()),
            _ => Self::Argv(words),
        }
    }

    /// As [`Program::from_words`], but by way of the shell, which has commands of its own such as `cd`.
    fn through_shell(words: Vec<String>, argv: bool) -> Self {
        if argv { Self::Argv(words) } else { Self::Shell(joined(&words)) }
    }
}

/// Words as text for a shell; one with blanks is such text already.
pub(crate) fn joined(words: &[String]) -> String {
    match words {
        [text] if text.contains(char::is_whitespace) => text.clone(),
        words => words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "),
    }
}

/// A word as a shell reads it back.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r#"'"'"'"#))
}

fn parse_user(text: &str) -> Result<(u32, Option<u32>), String> {
    let wrong = |_| format!("'{text}' is no user; use numbers, UID or UID:GID");
    match text.split_once(':') {
        Some((uid, gid)) => Ok((uid.parse().map_err(wrong)?, Some(gid.parse().map_err(wrong)?))),
        None => Ok((text.parse().map_err(wrong)?, None)),
    }
}

/// Arguments of `command run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    #[command(flatten)]
    sandbox: SandboxArg,
    /// Return at once and print the command's id
    #[arg(short = 'd', long)]
    background: bool,
    /// Variable for the command; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    env: Vec<(String, String)>,
    /// Pass all words on as they are, without a shell
    #[arg(long)]
    argv: bool,
    /// Form of the output: raw, or with --background table, json or yaml
    #[arg(short, long, value_enum, ignore_case = true, value_name = "FORMAT")]
    output: Option<RawFormat>,
    #[command(flatten)]
    program: ProgramArgs,
    /// The command, best behind --; one word with blanks is text for the shell
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    words: Vec<String>,
}

pub(crate) async fn run(
    context: &Context,
    action: CommandAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    match action {
        CommandAction::Run(args) => {
            let structured = args.output.map(RawFormat::structured);
            let sandbox = args.sandbox.handle(context);
            let program = Program::through_shell(args.words, args.argv);
            let command = args.program.build(program, &sandbox, args.env);
            if !args.background {
                if let Some(Some(_)) = structured {
                    return usage(
                        "-o other than raw needs --background: output is passed on as it comes",
                        streams,
                    )
                    .await;
                }
                return foreground(&sandbox, command, streams).await;
            }
            let format = match structured {
                None => crate::output::Format::default(),
                Some(Some(format)) => format,
                Some(None) => return usage("-o raw does not go with --background", streams).await,
            };
            let id = command.start().await?;
            let json = json!({"execution_id": id, "sandbox_id": sandbox.id(), "mode": "background"});
            let properties = vec![
                ("execution_id", Cell::from(&id)),
                ("sandbox_id", Cell::from(sandbox.id())),
                ("mode", Cell::from("background")),
            ];
            context.printer(format).object(streams, properties, &json).await?;
            Ok(exit::SUCCESS)
        }
        CommandAction::Session(action) => session::run(context, action, streams).await,
        CommandAction::Status { sandbox, execution_id, output } => {
            let status = sandbox.handle(context).command_status(&execution_id).await?;
            let used = status.usage;
            let properties = vec![
                ("id", Cell::from(&status.id)),
                ("content", Cell::from(&status.content)),
                ("running", Cell::from(status.running)),
                ("exit_code", Cell::optional(status.exit_code)),
                ("error", Cell::optional(status.error.as_ref())),
                ("started_at", Cell::from(&status.started_at)),
                ("finished_at", Cell::optional(status.finished_at.as_ref())),
                ("cpu_user_us", Cell::optional(used.map(|used| used.cpu_user_us))),
                ("cpu_system_us", Cell::optional(used.map(|used| used.cpu_system_us))),
                ("peak_memory_bytes", Cell::optional(used.map(|used| used.peak_memory_bytes))),
            ];
            context.printer(output.output).object(streams, properties, &status_json(&status)).await?;
            Ok(exit::SUCCESS)
        }
        CommandAction::Logs { sandbox, execution_id, cursor, follow, output } => {
            let sandbox = sandbox.handle(context);
            let structured = output.output.structured();
            if follow {
                if !matches!(output.output, RawFormat::Raw | RawFormat::Table) {
                    return usage("--follow passes the text on: leave out -o", streams).await;
                }
                return logs::follow_command(&sandbox, &execution_id, cursor, streams).await;
            }
            let logs = sandbox.command_logs(&execution_id, cursor).await?;
            logs::tell_dropped(logs.dropped, streams).await?;
            match structured {
                None | Some(crate::output::Format::Table) => streams.out(&logs.content).await?,
                Some(format) => {
                    let content = String::from_utf8_lossy(&logs.content);
                    let json = json!({"content": content, "cursor": logs.cursor});
                    context.printer(format).data(streams, &json).await?;
                }
            }
            Ok(exit::SUCCESS)
        }
        CommandAction::Interrupt { sandbox, execution_id, output } => {
            sandbox.handle(context).interrupt(&execution_id).await?;
            let message = format!("command {execution_id} interrupted");
            context.printer(output.output).done(streams, &message).await?;
            Ok(exit::SUCCESS)
        }
    }
}

/// A command line that only this command finds wrong.
async fn usage(text: &str, streams: &mut Streams) -> anyhow::Result<u8> {
    streams.err(format!("error: {text}\n").as_bytes()).await?;
    Ok(exit::USAGE)
}

/// A status with every member, also those that are not known.
fn status_json(status: &CommandStatus) -> serde_json::Value {
    json!({
        "id": status.id,
        "content": status.content,
        "running": status.running,
        "exit_code": status.exit_code,
        "error": status.error,
        "started_at": status.started_at,
        "finished_at": status.finished_at,
        "usage": status.usage,
    })
}

/// Follows a command in a sandbox that stays. A signal ends the command too: it is this program's to the person
/// who pressed Ctrl-C.
async fn foreground(sandbox: &Sandbox, command: Command, streams: &mut Streams) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    let mut running = None;
    let ended = tokio::select! {
        ended = follow(command, &mut running, streams) => ended.map(Some),
        signal = signals.next() => {
            if let Some(id) = &running {
                let _ = sandbox.interrupt(id).await;
            }
            return Ok(exit::SIGNAL + signal);
        }
    };
    match ended {
        Ok(Some(exit)) => finish(&exit, streams).await,
        Ok(None) => Ok(exit::NOT_RUN),
        Err(error) => {
            // Output that nobody reads any more must not keep the command alive.
            if let Some(id) = running.filter(|_| crate::streams::is_broken_pipe(&error)) {
                let _ = sandbox.interrupt(&id).await;
            }
            Err(error)
        }
    }
}

/// Output that has come and is not written yet. All of it goes to one stream, so that what a person sees keeps the
/// order in which it happened.
#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    is_stderr: bool,
}

/// Pending output from which it is written although more is at hand.
const WRITE_SIZE: usize = 64 << 10;

impl Pending {
    async fn add(
        &mut self,
        text: &str,
        joiner: &mut Joiner,
        is_stderr: bool,
        streams: &mut Streams,
    ) -> std::io::Result<()> {
        if self.is_stderr != is_stderr || self.bytes.len() >= WRITE_SIZE {
            self.write(streams).await?;
        }
        self.is_stderr = is_stderr;
        self.bytes.extend_from_slice(joiner.separator(text).as_bytes());
        self.bytes.extend_from_slice(text.as_bytes());
        Ok(())
    }

    async fn write(&mut self, streams: &mut Streams) -> std::io::Result<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let written = match self.is_stderr {
            true => streams.err(&self.bytes).await,
            false => streams.out(&self.bytes).await,
        };
        self.bytes.clear();
        written
    }
}

/// Runs a command and passes its output on.
pub(crate) async fn follow(
    command: Command,
    running: &mut Option<String>,
    streams: &mut Streams,
) -> anyhow::Result<Exit> {
    pass_on(&mut command.stream().await?, running, streams).await
}

/// Passes a running command's output on: at once, but in one write what came together.
pub(crate) async fn pass_on(
    stream: &mut CommandStream,
    running: &mut Option<String>,
    streams: &mut Streams,
) -> anyhow::Result<Exit> {
    let (mut stdout, mut stderr) = (Joiner::default(), Joiner::default());
    let mut pending = Pending::default();
    loop {
        let event = match stream.next_ready() {
            Some(event) => event,
            None => {
                pending.write(streams).await?;
                stream.next().await
            }
        };
        match event {
            Ok(Some(CommandEvent::Started { id })) => *running = Some(id),
            Ok(Some(CommandEvent::Stdout(text))) => pending.add(&text, &mut stdout, false, streams).await?,
            Ok(Some(CommandEvent::Stderr(text))) => pending.add(&text, &mut stderr, true, streams).await?,
            Ok(Some(CommandEvent::Finished(exit))) => {
                pending.write(streams).await?;
                return Ok(exit);
            }
            Ok(None) => return Err(osb_client::Error::StreamCut.into()),
            Err(error) => {
                // What came before the break belongs to the person who waits for it.
                pending.write(streams).await?;
                return Err(error.into());
            }
        }
    }
}

/// The exit code for a command that ended. What could not be executed is said in words.
pub(crate) async fn finish(exit: &Exit, streams: &mut Streams) -> anyhow::Result<u8> {
    if let Some(code) = exit.code {
        // The first line names signal or code; behind it stands why, such as that its time was over.
        for reason in exit.error.iter().flat_map(|error| error.traceback.iter().skip(1)) {
            streams.note(&crate::output::printable(reason)).await;
        }
        // A shell sees eight bits; a code that has none of them must not look like success.
        return Ok(u8::try_from(code).unwrap_or(exit::FAILURE));
    }
    let reason = match &exit.error {
        Some(error) => error.traceback.first().unwrap_or(&error.evalue).as_str(),
        None => "no reason given",
    };
    streams.note(&format!("command could not be executed: {}", crate::output::printable(reason))).await;
    Ok(exit::NOT_FOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_what_a_shell_reads_back() {
        let through = |words: &[&str], argv| {
            Program::through_shell(words.iter().map(|word| (*word).to_owned()).collect(), argv)
        };
        let shell = |text: &str| Program::Shell(text.to_owned());
        assert_eq!(through(&["cd", "/tmp"], false), shell("cd /tmp"));
        assert_eq!(
            through(&["A=1", "echo", "$HOME", "it's", ""], false),
            shell("A=1 echo '$HOME' 'it'\"'\"'s' ''")
        );
        assert_eq!(through(&["echo hi | cat"], false), shell("echo hi | cat"));
        assert_eq!(through(&["ls"], false), shell("ls"));
        assert_eq!(through(&["a b"], true), Program::Argv(vec!["a b".to_owned()]));
        assert_eq!(
            Program::from_words(vec!["a".to_owned(), "b c".to_owned()], false),
            Program::Argv(vec!["a".to_owned(), "b c".to_owned()])
        );
    }

    #[test]
    fn users() {
        assert_eq!(parse_user("0"), Ok((0, None)));
        assert_eq!(parse_user("1000:100"), Ok((1000, Some(100))));
        for bad in ["", "root", "1:", ":1", "-1", "4294967296"] {
            assert!(parse_user(bad).is_err(), "{bad}");
        }
    }
}
