//! `osb command session`: shells that keep their variables and directory.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;

use crate::args::{OnlyRawArg, OutputArg, SandboxArg};
use crate::command::{finish, joined, pass_on};
use crate::duration::parse as parse_duration;
use crate::exit;
use crate::output::Cell;
use crate::settings::Context;
use crate::signals::Signals;
use crate::streams::Streams;

/// What to do with shell sessions.
#[derive(Debug, Clone, Subcommand)]
pub enum SessionAction {
    /// Start a shell that keeps its variables and directory
    Create {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Working directory
        #[arg(short, long, value_name = "DIR")]
        workdir: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Run a command in such a shell; its exit code becomes this program's
    Run {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Id of the session
        session_id: String,
        /// Working directory of this command
        #[arg(short, long, value_name = "DIR")]
        workdir: Option<String>,
        /// Kill the command after this time
        #[arg(short, long, value_name = "DURATION", value_parser = parse_duration)]
        timeout: Option<Duration>,
        #[command(flatten)]
        output: OnlyRawArg,
        /// The command, best behind --; one word with blanks is text for the shell
        #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
        words: Vec<String>,
    },
    /// End such a shell
    Delete {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Id of the session
        session_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

pub(crate) async fn run(
    context: &Context,
    action: SessionAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    act(context, action, streams).await.map_err(|error| match error.downcast_ref::<osb_client::Error>() {
        Some(osb_client::Error::Api(answer)) if answer.is_unsupported() => anyhow::anyhow!(
            "`osb command session` comes later: this sandbox's daemon has no sessions; `osb command run` runs one command"
        ),
        _ => error,
    })
}

async fn act(context: &Context, action: SessionAction, streams: &mut Streams) -> anyhow::Result<u8> {
    match action {
        SessionAction::Create { sandbox, workdir, output } => {
            let sandbox = sandbox.handle(context);
            let session = sandbox.create_session(workdir.as_deref()).await?;
            let properties = vec![
                ("sandbox_id", Cell::from(sandbox.id())),
                ("session_id", Cell::from(session.id())),
                ("working_directory", Cell::optional(workdir.as_ref())),
            ];
            let json = json!({
                "sandbox_id": sandbox.id(), "session_id": session.id(), "working_directory": workdir,
            });
            context.printer(output.output).object(streams, properties, &json).await?;
            Ok(exit::SUCCESS)
        }
        SessionAction::Run { sandbox, session_id, workdir, timeout, words, .. } => {
            let mut signals = Signals::new()?;
            let session = sandbox.handle(context).session(session_id);
            let mut command = session.shell(joined(&words));
            if let Some(workdir) = workdir {
                command = command.cwd(workdir);
            }
            if let Some(timeout) = timeout {
                command = command.timeout(timeout);
            }
            let mut stream = command.stream().await?;
            let mut running = None;
            let ended = tokio::select! {
                ended = pass_on(&mut stream, &mut running, streams) => ended,
                signal = signals.next() => {
                    // The signal was meant for what runs; the session stays.
                    let _ = session.interrupt().await;
                    return Ok(exit::SIGNAL + signal);
                }
            };
            finish(&ended?, streams).await
        }
        SessionAction::Delete { sandbox, session_id, output } => {
            sandbox.handle(context).session(&session_id).delete().await?;
            context.printer(output.output).done(streams, &format!("session ended: {session_id}")).await?;
            Ok(exit::SUCCESS)
        }
    }
}
