//! `osb shell`: a terminal in a sandbox.

mod follow;
mod keys;
mod local;

use std::time::Duration;

use clap::Args;
use osb_client::{Sandbox, Terminal};

use crate::args::SandboxArg;
use crate::command::{Program, joined, quoted};
use crate::exit;
use crate::settings::Context;
use crate::signals::Signals;
use crate::streams::Streams;
use follow::{Left, follow};
use keys::Keys;

/// How long the end of a terminal may take when nobody waits for it any more.
const FAREWELL: Duration = Duration::from_secs(3);

/// Arguments of `shell`.
#[derive(Debug, Clone, Args)]
pub struct ShellArgs {
    #[command(flatten)]
    sandbox: SandboxArg,
    /// Working directory; must exist
    #[arg(short, long, value_name = "DIR", conflicts_with = "session")]
    workdir: Option<String>,
    /// Come back to the terminal that was left under this id
    #[arg(short, long, value_name = "ID")]
    session: Option<String>,
    /// Take the terminal from who is connected to it
    #[arg(long, requires = "session")]
    takeover: bool,
    /// Keys that leave the terminal and let it go on; an empty text is none
    #[arg(long, value_name = "KEYS", default_value = keys::USUAL, value_parser = keys::parse)]
    detach_keys: Keys,
    /// Program instead of a shell, best behind --; one word with blanks is text for the shell
    #[arg(trailing_var_arg = true, value_name = "COMMAND", conflicts_with = "session")]
    words: Vec<String>,
}

pub(crate) async fn run(context: &Context, args: ShellArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    if !streams.stdin_is_terminal {
        anyhow::bail!(
            "a shell needs a terminal as standard input; `osb command run` runs a command without one"
        );
    }
    let mut signals = Signals::new()?;
    let sandbox = args.sandbox.handle(context);
    let again = args.session.is_some();
    let terminal = match args.session {
        Some(id) => sandbox.terminal(id),
        None => {
            let command = (!args.words.is_empty()).then(|| joined(&args.words));
            sandbox.create_terminal(args.workdir.as_deref(), command.as_deref()).await?
        }
    };
    let ended = tokio::select! {
        ended = follow(&terminal, args.detach_keys, args.takeover, again, streams) => ended,
        signal = signals.next() => {
            if !again {
                end(&terminal).await;
            }
            return Ok(exit::SIGNAL + signal);
        }
    };
    match ended {
        Ok(Left::Exit(code)) => {
            end(&terminal).await;
            Ok(eight_bits(code))
        }
        Ok(Left::Detached) => {
            let (sandbox, id) = (sandbox.id(), terminal.id());
            streams.note(&format!("left running; come back with: osb shell {sandbox} --session {id}")).await;
            Ok(exit::SUCCESS)
        }
        Ok(Left::Hangup) => {
            if !again {
                end(&terminal).await;
            }
            Ok(exit::SIGNAL + 1)
        }
        Err(error) => Err(explain(error, &terminal)),
    }
}

/// Runs a program on a terminal of its own; its exit code.
pub(crate) async fn run_program(
    sandbox: &Sandbox,
    workdir: Option<&str>,
    program: &Program,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let command = match program {
        Program::Shell(text) => text.clone(),
        Program::Argv(words) => words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "),
    };
    let terminal = sandbox.create_terminal(workdir, Some(&command)).await?;
    // The sandbox ends with its program, so there is nothing to come back to.
    let keys = keys::parse("").map_err(anyhow::Error::msg)?;
    match follow(&terminal, keys, false, false, streams).await? {
        Left::Exit(code) => Ok(eight_bits(code)),
        Left::Detached | Left::Hangup => Ok(exit::SIGNAL + 1),
    }
}

/// Ends a terminal that is of no more use; what is left of it ends with the sandbox.
async fn end(terminal: &Terminal) {
    let _ = tokio::time::timeout(FAREWELL, terminal.delete()).await;
}

/// An exit code as this program can have it.
fn eight_bits(code: i32) -> u8 {
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// Says what to do about a failure, where that is known.
fn explain(error: anyhow::Error, terminal: &Terminal) -> anyhow::Error {
    match error.downcast_ref::<osb_client::Error>() {
        Some(cause) if cause.is_conflict() => anyhow::anyhow!(
            "another client is connected to terminal {}; --takeover takes it from there",
            terminal.id()
        ),
        Some(cause) if cause.is_not_found() => error.context(format!("terminal {}", terminal.id())),
        _ => error,
    }
}
