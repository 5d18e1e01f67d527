//! `osb diagnostics` and `osb devops`: what the server knows of a sandbox's inner life.

use clap::{Args, Subcommand};
use osb_client::LogQuery;
use osb_client::protocol::lifecycle::{DiagnosticContentResponse, DiagnosticDelivery};
use serde_json::{Value, json};

use crate::args::{OnlyRawArg, SandboxArg};
use crate::exit;
use crate::output::{Cell, RawFormat, printable_lines};
use crate::progress;
use crate::settings::Context;
use crate::streams::Streams;

/// What to look at, by scope.
#[derive(Debug, Clone, Subcommand)]
pub enum DiagnosticsAction {
    /// Output of the entrypoint
    Logs(ScopeArgs),
    /// What happened to the sandbox
    Events(ScopeArgs),
}

/// A sandbox and a scope.
#[derive(Debug, Clone, Args)]
pub struct ScopeArgs {
    #[command(flatten)]
    sandbox: SandboxArg,
    /// Logs: container or all; events: runtime or all
    #[arg(short, long)]
    scope: String,
    /// Form of the output; raw is the text, or where it can be had
    #[arg(short, long, value_enum, ignore_case = true, default_value_t = RawFormat::Raw, value_name = "FORMAT")]
    output: RawFormat,
}

/// What to look at, as text.
#[derive(Debug, Clone, Subcommand)]
pub enum DevopsAction {
    /// Output of the entrypoint; `osb diagnostics logs` and `osb logs` are newer
    Logs {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Lines from the end
        #[arg(short = 'n', long, default_value_t = 100)]
        tail: u32,
        /// Only lines of this last time, such as 10m or 1h
        #[arg(short, long, value_name = "DURATION")]
        since: Option<String>,
        #[command(flatten)]
        output: OnlyRawArg,
    },
    /// State, limits and labels
    Inspect {
        #[command(flatten)]
        sandbox: SandboxArg,
        #[command(flatten)]
        output: OnlyRawArg,
    },
    /// What happened to the sandbox; `osb diagnostics events` is newer
    Events {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Most events
        #[arg(short, long, default_value_t = 50)]
        limit: u32,
        #[command(flatten)]
        output: OnlyRawArg,
    },
    /// All of it in one text
    Summary {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Lines from the end of the output
        #[arg(short = 'n', long, default_value_t = 50)]
        tail: u32,
        /// Most events
        #[arg(long, default_value_t = 20)]
        event_limit: u32,
        #[command(flatten)]
        output: OnlyRawArg,
    },
}

pub(crate) async fn diagnostics(
    context: &Context,
    action: DiagnosticsAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let (content, output) = match action {
        DiagnosticsAction::Logs(args) => {
            let sandbox = args.sandbox.handle(context);
            let asked = async { sandbox.diagnostics().logs(&args.scope).await };
            (progress::patiently(context, asked).await?, args.output)
        }
        DiagnosticsAction::Events(args) => {
            let sandbox = args.sandbox.handle(context);
            let asked = async { sandbox.diagnostics().events(&args.scope).await };
            (progress::patiently(context, asked).await?, args.output)
        }
    };
    let Some(format) = output.structured() else {
        if content.truncated {
            streams.note("there is more than this: the server has cut the text").await;
        }
        for warning in content.warnings.iter().flatten() {
            streams.note(&crate::output::printable(warning)).await;
        }
        let text = match content.delivery {
            DiagnosticDelivery::Inline => content.content.unwrap_or_default(),
            DiagnosticDelivery::Url => content.content_url.unwrap_or_default(),
        };
        text_out(&text, streams).await?;
        return Ok(exit::SUCCESS);
    };
    let json = to_json(&content);
    let properties = MEMBERS.iter().map(|name| (*name, Cell::of_json(&json[*name]))).collect();
    context.printer(format).object(streams, properties, &json).await?;
    Ok(exit::SUCCESS)
}

/// Members of an answer, in the order of its table.
const MEMBERS: [&str; 11] = [
    "sandbox_id",
    "kind",
    "scope",
    "delivery",
    "content_type",
    "content_length",
    "expires_at",
    "truncated",
    "warnings",
    "content_url",
    "content",
];

fn to_json(content: &DiagnosticContentResponse) -> Value {
    json!({
        "sandbox_id": content.sandbox_id,
        "kind": content.kind,
        "scope": content.scope,
        "delivery": content.delivery,
        "content_type": content.content_type,
        "content_length": content.content_length,
        "expires_at": content.expires_at,
        "truncated": content.truncated,
        "warnings": content.warnings,
        "content_url": content.content_url,
        "content": content.content,
    })
}

pub(crate) async fn devops(
    context: &Context,
    action: DevopsAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let text = match action {
        DevopsAction::Logs { sandbox, tail, since, .. } => {
            streams.note("`osb devops logs` is old: use `osb diagnostics logs` or `osb logs`").await;
            let query = LogQuery { tail: Some(tail), since };
            sandbox.handle(context).diagnostics().logs_text(&query).await?
        }
        DevopsAction::Inspect { sandbox, .. } => sandbox.handle(context).diagnostics().inspect().await?,
        DevopsAction::Events { sandbox, limit, .. } => {
            streams.note("`osb devops events` is old: use `osb diagnostics events`").await;
            sandbox.handle(context).diagnostics().events_text(limit).await?
        }
        DevopsAction::Summary { sandbox, tail, event_limit, .. } => {
            sandbox.handle(context).diagnostics().summary(tail, event_limit).await?
        }
    };
    text_out(&text, streams).await?;
    Ok(exit::SUCCESS)
}

/// Text with a line end behind it; for a terminal without what it would obey.
async fn text_out(text: &str, streams: &mut Streams) -> std::io::Result<()> {
    let shown = if streams.stdout_is_terminal { printable_lines(text) } else { text.to_owned() };
    let text = shown.as_str();
    let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    streams.out(format!("{text}{end}").as_bytes()).await
}
