//! `osb sandbox`: making, looking at and ending sandboxes.

mod create;
mod request;

pub(crate) use request::read_part;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Subcommand};
use osb_client::{ListFilter, Metrics, SandboxInfo};
use serde_json::{Value, json};

use crate::args::{OutputArg, PageArgs, RawOutputArg, SandboxArg, key_value};
use crate::duration::parse as parse_duration;
use crate::exit;
use crate::output::{Cell, Format, RawFormat};
use crate::progress;
use crate::settings::Context;
use crate::signals::{self, Signals};
use crate::streams::Streams;

/// What to do with sandboxes.
#[derive(Debug, Clone, Subcommand)]
pub enum SandboxAction {
    /// Make a sandbox from an image, a snapshot, a template or a request file
    Create(Box<create::CreateArgs>),
    /// List sandboxes, newest first
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show one sandbox
    Get {
        #[command(flatten)]
        sandbox: SandboxArg,
        #[command(flatten)]
        output: OutputArg,
    },
    /// End sandboxes
    #[command(visible_alias = "rm")]
    Kill {
        /// Ids of the sandboxes
        #[arg(required = true, value_name = "SANDBOX_ID")]
        sandbox_ids: Vec<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Stop a sandbox's processes without ending them
    Pause {
        #[command(flatten)]
        sandbox: SandboxArg,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Let a paused sandbox go on
    Resume {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Do not wait until the sandbox answers
        #[arg(long)]
        skip_health_check: bool,
        /// How long the sandbox may take to answer
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        resume_timeout: Option<Duration>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Let a sandbox live this long from now
    Renew {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// 30s, 10m, 1h30m or seconds
        #[arg(short, long, value_name = "DURATION", value_parser = parse_duration)]
        timeout: Duration,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Change labels
    Patch {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Label to set; may be repeated
        #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
        metadata: Vec<(String, String)>,
        /// Label to remove; may be repeated
        #[arg(long, value_name = "KEY")]
        remove: Vec<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show how to reach a port in a sandbox
    Endpoint {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Port inside the sandbox
        #[arg(short, long, value_parser = clap::value_parser!(u16).range(1..))]
        port: u16,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Say whether a sandbox answers; exit code 1 when it does not
    Health {
        #[command(flatten)]
        sandbox: SandboxArg,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show CPU and memory in use
    Metrics {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// A line each second until interrupted
        #[arg(long)]
        watch: bool,
        #[command(flatten)]
        output: RawOutputArg,
    },
}

/// Arguments of `sandbox list`.
#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// Only in this state; may be repeated
    #[arg(short, long, ignore_case = true, value_parser = PossibleValuesParser::new(STATES).map(canonical))]
    state: Vec<String>,
    /// Only with this label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    output: OutputArg,
}

/// The states that there are; a server takes any other word too and finds nothing.
const STATES: [&str; 9] =
    ["Pending", "Running", "Pausing", "Paused", "Resuming", "Stopping", "Terminated", "Failed", "Unknown"];

/// A state as the wire writes it, however a person did.
fn canonical(word: String) -> String {
    STATES.iter().find(|state| state.eq_ignore_ascii_case(&word)).map_or(word, |state| (*state).to_owned())
}

/// How long a sandbox may take to answer after it was paused.
const READY: Duration = Duration::from_secs(30);

pub(crate) async fn run(
    context: &Context,
    action: SandboxAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    match action {
        SandboxAction::Create(args) => signals::undone_by(create::run(context, *args, streams)).await,
        SandboxAction::Metrics { sandbox, watch: true, output } => {
            metrics(context, &sandbox, true, output.output, streams).await
        }
        action => progress::patiently(context, answer(context, action, streams)).await,
    }
}

/// Carries out what takes as long as an answer of the server.
async fn answer(context: &Context, action: SandboxAction, streams: &mut Streams) -> anyhow::Result<u8> {
    match action {
        SandboxAction::Create(args) => return create::run(context, *args, streams).await,
        SandboxAction::List(args) => return list(context, args, streams).await,
        SandboxAction::Get { sandbox, output } => {
            let info = sandbox.handle(context).info().await?;
            context.printer(output.output).object(streams, properties(&info), &to_json(&info)).await?;
        }
        SandboxAction::Kill { sandbox_ids, output } => {
            return kill(context, sandbox_ids, output.output, streams).await;
        }
        SandboxAction::Pause { sandbox, output } => {
            let sandbox = sandbox.handle(context);
            sandbox.pause().await?;
            let message = format!("pausing: {}", sandbox.id());
            context.printer(output.output).done(streams, &message).await?;
        }
        SandboxAction::Resume { sandbox, skip_health_check, resume_timeout, output } => {
            let sandbox = sandbox.handle(context);
            sandbox.resume().await?;
            if !skip_health_check {
                sandbox.wait_ready(resume_timeout.unwrap_or(READY)).await?;
            }
            let message = format!("resumed: {}", sandbox.id());
            context.printer(output.output).done(streams, &message).await?;
        }
        SandboxAction::Renew { sandbox, timeout, output } => {
            let sandbox = sandbox.handle(context);
            let end = sandbox.renew(timeout).await?;
            let properties = vec![("sandbox_id", Cell::from(sandbox.id())), ("expires_at", Cell::from(end))];
            let json = json!({"sandbox_id": sandbox.id(), "expires_at": end});
            context.printer(output.output).object(streams, properties, &json).await?;
        }
        SandboxAction::Patch { sandbox, metadata, remove, output } => {
            if metadata.is_empty() && remove.is_empty() {
                bail!("nothing to change: give --metadata KEY=VALUE or --remove KEY");
            }
            let set = metadata.into_iter().map(|(key, value)| (key, Some(value)));
            let patch = remove.into_iter().map(|key| (key, None)).chain(set).collect();
            let info = sandbox.handle(context).patch_metadata(patch).await?;
            context.printer(output.output).object(streams, properties(&info), &to_json(&info)).await?;
        }
        SandboxAction::Endpoint { sandbox, port, output } => {
            let endpoint = sandbox.handle(context).endpoint(port).await?;
            let shown: Vec<String> =
                endpoint.headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
            let properties = vec![
                ("endpoint", Cell::from(&endpoint.endpoint)),
                ("headers", Cell::from(shown.join(", "))),
                ("origin", Cell::optional(endpoint.origin.as_ref())),
            ];
            let json = json!({
                "endpoint": endpoint.endpoint, "headers": endpoint.headers, "origin": endpoint.origin,
            });
            context.printer(output.output).object(streams, properties, &json).await?;
        }
        SandboxAction::Health { sandbox, output } => {
            let sandbox = sandbox.handle(context);
            let result = sandbox.ping().await;
            let healthy = result.is_ok();
            let properties = vec![("sandbox_id", Cell::from(sandbox.id())), ("healthy", Cell::from(healthy))];
            let json = json!({"sandbox_id": sandbox.id(), "healthy": healthy});
            context.printer(output.output).object(streams, properties, &json).await?;
            if let Err(error) = result {
                streams.note(&error.to_string()).await;
                return Ok(exit::FAILURE);
            }
        }
        SandboxAction::Metrics { sandbox, watch, output } => {
            return metrics(context, &sandbox, watch, output.output, streams).await;
        }
    }
    Ok(exit::SUCCESS)
}

async fn list(context: &Context, args: ListArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let filter = ListFilter {
        states: args.state,
        metadata: args.metadata.into_iter().collect::<BTreeMap<_, _>>(),
        page: args.page.page,
        page_size: args.page.page_size,
    };
    let answer = context.client.list(&filter).await?;
    let rows = answer
        .items
        .iter()
        .map(|info| {
            vec![
                Cell::from(&info.id),
                Cell::from(&info.status.state),
                Cell::optional(info.image.as_ref().map(|image| &image.uri)),
                Cell::from(info.created_at),
                Cell::optional(info.expires_at),
            ]
        })
        .collect();
    let items = answer.items.iter().map(to_json).collect();
    let headings = ["id", "status", "image", "created_at", "expires_at"];
    args.output.page(context, &headings, rows, items, &answer.pagination, streams).await?;
    Ok(exit::SUCCESS)
}

/// Ends all of them, whatever becomes of one.
async fn kill(
    context: &Context,
    ids: Vec<String>,
    output: Format,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let mut rows = Vec::new();
    let mut json = Vec::new();
    let mut code = exit::SUCCESS;
    for id in ids {
        let status = match context.sandbox(&id).kill().await {
            Ok(()) => "terminated".to_owned(),
            Err(error) => {
                streams.failure(context, &error.into()).await;
                code = exit::FAILURE;
                "failed".to_owned()
            }
        };
        rows.push(vec![Cell::from(&id), Cell::from(&status)]);
        json.push(json!({"sandbox_id": id, "status": status}));
    }
    context.printer(output).list(streams, &["sandbox_id", "status"], rows, &json).await?;
    Ok(code)
}

async fn metrics(
    context: &Context,
    sandbox: &SandboxArg,
    watch: bool,
    output: RawFormat,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let sandbox = sandbox.handle(context);
    if !watch {
        let measured = sandbox.metrics().await?;
        show_metrics(context, sandbox.id(), &measured, output, streams).await?;
        return Ok(exit::SUCCESS);
    }
    let mut signals = Signals::new()?;
    let mut measurements = sandbox.watch_metrics().await?;
    loop {
        let measured = tokio::select! {
            measured = measurements.next() => measured?,
            signal = signals.next() => return Ok(exit::SIGNAL + signal),
            gone = streams.unread() => return Err(gone),
        };
        let Some(measured) = measured else { return Ok(exit::SUCCESS) };
        match output {
            // One line for each measurement, so that the output can be read as it comes.
            RawFormat::Json => {
                let line = format!("{}\n", metrics_json(&measured));
                streams.out(line.as_bytes()).await?;
            }
            RawFormat::Yaml => {
                streams.out(b"---\n").await?;
                show_metrics(context, sandbox.id(), &measured, output, streams).await?;
            }
            RawFormat::Table | RawFormat::Raw => {
                streams.out(metrics_line(&measured).as_bytes()).await?;
            }
        }
    }
}

async fn show_metrics(
    context: &Context,
    id: &str,
    metrics: &Metrics,
    output: RawFormat,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let Some(format) = output.structured() else {
        return Ok(streams.out(metrics_line(metrics).as_bytes()).await?);
    };
    let properties = vec![
        ("sandbox_id", Cell::from(id)),
        ("cpu_count", Cell::from(metrics.cpu_count)),
        ("cpu_used_percentage", Cell::from(format!("{:.1}", metrics.cpu_used_pct))),
        ("memory_total_in_mib", Cell::from(format!("{:.1}", metrics.mem_total_mib))),
        ("memory_used_in_mib", Cell::from(format!("{:.1}", metrics.mem_used_mib))),
        ("timestamp", Cell::from(metrics.timestamp)),
    ];
    context.printer(format).object(streams, properties, &metrics_json(metrics)).await
}

/// Measurements under the names that the SDKs give them.
pub(crate) fn metrics_json(metrics: &Metrics) -> Value {
    json!({
        "cpu_count": metrics.cpu_count,
        "cpu_used_percentage": metrics.cpu_used_pct,
        "memory_total_in_mib": metrics.mem_total_mib,
        "memory_used_in_mib": metrics.mem_used_mib,
        "timestamp": metrics.timestamp,
    })
}

fn metrics_line(metrics: &Metrics) -> String {
    let at = jiff::Timestamp::from_millisecond(metrics.timestamp).unwrap_or_default();
    format!(
        "[{}] cpu={:.1}% cores={} mem={:.1}/{:.1}MiB\n",
        at.strftime("%H:%M:%S"),
        metrics.cpu_used_pct,
        metrics.cpu_count,
        metrics.mem_used_mib,
        metrics.mem_total_mib
    )
}

fn properties(info: &SandboxInfo) -> Vec<(&'static str, Cell)> {
    let labels = |map: &Option<BTreeMap<String, String>>| {
        let pairs: Option<Vec<String>> =
            map.as_ref().map(|map| map.iter().map(|(key, value)| format!("{key}={value}")).collect());
        Cell::optional(pairs.map(|pairs| pairs.join(" ")))
    };
    let json = to_json(info);
    vec![
        ("id", Cell::from(&info.id)),
        ("status", Cell::from(&info.status.state)),
        ("status_reason", Cell::optional(info.status.reason.as_ref())),
        ("status_message", Cell::optional(info.status.message.as_ref())),
        ("image", Cell::optional(info.image.as_ref().map(|image| &image.uri))),
        ("snapshot_id", Cell::optional(info.snapshot_id.as_ref())),
        ("platform", Cell::of_json(&json["platform"])),
        ("allocation", Cell::of_json(&json["allocation"])),
        ("entrypoint", Cell::from(info.entrypoint.join(" "))),
        ("metadata", labels(&info.metadata)),
        ("extensions", labels(&info.extensions)),
        ("created_at", Cell::from(info.created_at)),
        ("expires_at", Cell::optional(info.expires_at)),
    ]
}

/// A sandbox as this program's JSON has it: names in snake_case, absent members as null.
pub(crate) fn to_json(info: &SandboxInfo) -> Value {
    json!({
        "id": info.id,
        "status": {
            "state": info.status.state,
            "reason": info.status.reason,
            "message": info.status.message,
            "last_transition_at": info.status.last_transition_at,
        },
        "entrypoint": info.entrypoint,
        "image": info.image.as_ref().map(|image| json!({"image": image.uri, "auth": null})),
        "snapshot_id": info.snapshot_id,
        "platform": info.platform,
        "allocation": info.allocation.as_ref().map(|allocation| json!({
            "mode": allocation.mode,
            "pool_ref": allocation.pool_ref,
            "state": allocation.state,
        })),
        "metadata": info.metadata,
        "extensions": info.extensions,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
    })
}

#[cfg(test)]
mod tests {
    use osb_client::SandboxState;

    use super::*;

    #[test]
    fn states_are_the_protocols() {
        for state in STATES {
            assert!(!matches!(SandboxState::from(state), SandboxState::Other(_)), "{state}");
            assert_eq!(canonical(state.to_lowercase()), state);
        }
    }
}
