//! `osb sandbox`: making, looking at and ending sandboxes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, Subcommand};
use osb_client::{ListFilter, Sandbox, SandboxInfo};
use serde_json::{Value, json};

use crate::duration::{Lifetime, format as format_duration, parse as parse_duration, parse_lifetime};
use crate::exit;
use crate::output::{Cell, Format};
use crate::settings::Context;
use crate::streams::Streams;

/// The sandbox to work on.
#[derive(Debug, Clone, Args)]
pub struct SandboxArg {
    /// Id of the sandbox
    sandbox_id: String,
}

impl SandboxArg {
    pub(crate) fn handle(&self, context: &Context) -> Sandbox {
        context.client.sandbox(&self.sandbox_id)
    }
}

/// Reads `KEY=VALUE`; the value may be empty and may hold `=`.
pub(crate) fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("use KEY=VALUE".to_owned()),
    }
}

/// What to do with sandboxes.
#[derive(Debug, Clone, Subcommand)]
pub enum SandboxAction {
    /// Make a sandbox
    Create(CreateArgs),
    /// List sandboxes, newest first
    List(ListArgs),
    /// Show one sandbox
    Get {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// End sandboxes
    Kill {
        /// Ids of the sandboxes
        #[arg(required = true, value_name = "SANDBOX_ID")]
        sandbox_ids: Vec<String>,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Let a sandbox live this long from now
    Renew {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// 30s, 10m, 1h30m or seconds
        #[arg(short, long, value_name = "DURATION", value_parser = parse_duration)]
        timeout: Duration,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
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
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Show how to reach a port in a sandbox
    Endpoint {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Port inside the sandbox
        #[arg(short, long, value_parser = clap::value_parser!(u16).range(1..))]
        port: u16,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Say whether a sandbox answers; exit code 1 when it does not
    Health {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Show CPU and memory in use
    Metrics {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
}

/// Arguments of `sandbox create`.
#[derive(Debug, Clone, Args)]
pub struct CreateArgs {
    /// Image: a stored name, an alias, a registry reference, or host
    #[arg(short, long)]
    image: Option<String>,
    /// Snapshot to start from instead of an image
    #[arg(long, value_name = "ID", conflicts_with = "image")]
    snapshot_id: Option<String>,
    /// Name at the image's registry
    #[arg(long, value_name = "NAME", requires = "image_auth_password")]
    image_auth_username: Option<String>,
    /// Password at the image's registry
    #[arg(long, value_name = "PASSWORD", requires = "image_auth_username")]
    image_auth_password: Option<String>,
    /// Lifetime: 30s, 10m, 1h30m, seconds, or none [default: 10m]
    #[arg(short, long, value_name = "DURATION", value_parser = parse_lifetime)]
    timeout: Option<Lifetime>,
    /// Variable; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    env: Vec<(String, String)>,
    /// Label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// Extension; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    extension: Vec<(String, String)>,
    /// Limit such as cpu=2 or memory=512Mi; may be repeated
    #[arg(long, value_name = "NAME=AMOUNT", value_parser = key_value)]
    resource: Vec<(String, String)>,
    /// Word of the entrypoint; repeat for each [default: tail -f /dev/null]
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    entrypoint: Vec<String>,
    /// Do not wait until the sandbox answers
    #[arg(long)]
    skip_health_check: bool,
    /// How long the sandbox may take to answer [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ready_timeout: Option<Duration>,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Arguments of `sandbox list`.
#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// Only in this state; may be repeated
    #[arg(short, long)]
    state: Vec<String>,
    /// Only with this label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// Page, from 1
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    page: Option<u32>,
    /// Sandboxes per page, at most 200
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    page_size: Option<u32>,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

pub(crate) async fn run(
    context: &Context,
    action: SandboxAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    match action {
        SandboxAction::Create(args) => create(context, args, streams).await,
        SandboxAction::List(args) => list(context, args, streams).await,
        SandboxAction::Get { sandbox, output } => {
            let info = sandbox.handle(context).info().await?;
            context.printer(output).object(streams, properties(&info), &to_json(&info)).await?;
            Ok(exit::SUCCESS)
        }
        SandboxAction::Kill { sandbox_ids, output } => kill(context, sandbox_ids, output, streams).await,
        SandboxAction::Renew { sandbox, timeout, output } => {
            let sandbox = sandbox.handle(context);
            let end = sandbox.renew(timeout).await?;
            let properties = vec![("sandbox_id", Cell::from(sandbox.id())), ("expires_at", Cell::from(end))];
            let json = json!({"sandbox_id": sandbox.id(), "expires_at": end});
            context.printer(output).object(streams, properties, &json).await?;
            Ok(exit::SUCCESS)
        }
        SandboxAction::Patch { sandbox, metadata, remove, output } => {
            if metadata.is_empty() && remove.is_empty() {
                bail!("nothing to change: give --metadata KEY=VALUE or --remove KEY");
            }
            let set = metadata.into_iter().map(|(key, value)| (key, Some(value)));
            let patch = remove.into_iter().map(|key| (key, None)).chain(set).collect();
            let info = sandbox.handle(context).patch_metadata(patch).await?;
            context.printer(output).object(streams, properties(&info), &to_json(&info)).await?;
            Ok(exit::SUCCESS)
        }
        SandboxAction::Endpoint { sandbox, port, output } => {
            let endpoint = sandbox.handle(context).endpoint(port).await?;
            let headers = endpoint.headers.unwrap_or_default();
            let shown: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
            let properties =
                vec![("endpoint", Cell::from(&endpoint.endpoint)), ("headers", Cell::from(shown.join(", ")))];
            let json = json!({"endpoint": endpoint.endpoint, "headers": headers});
            context.printer(output).object(streams, properties, &json).await?;
            Ok(exit::SUCCESS)
        }
        SandboxAction::Health { sandbox, output } => {
            let sandbox = sandbox.handle(context);
            let result = sandbox.ping().await;
            let healthy = result.is_ok();
            let properties = vec![("sandbox_id", Cell::from(sandbox.id())), ("healthy", Cell::from(healthy))];
            let json = json!({"sandbox_id": sandbox.id(), "healthy": healthy});
            context.printer(output).object(streams, properties, &json).await?;
            if let Err(error) = result {
                streams.note(&error.to_string()).await;
                return Ok(exit::FAILURE);
            }
            Ok(exit::SUCCESS)
        }
        SandboxAction::Metrics { sandbox, output } => {
            let metrics = sandbox.handle(context).metrics().await?;
            let properties = vec![
                ("cpu_count", Cell::from(metrics.cpu_count)),
                ("cpu_used_percentage", Cell::from(format!("{:.1}", metrics.cpu_used_pct))),
                ("memory_total_in_mib", Cell::from(format!("{:.1}", metrics.mem_total_mib))),
                ("memory_used_in_mib", Cell::from(format!("{:.1}", metrics.mem_used_mib))),
                ("timestamp", Cell::from(metrics.timestamp)),
            ];
            let json = json!({
                "cpu_count": metrics.cpu_count,
                "cpu_used_percentage": metrics.cpu_used_pct,
                "memory_total_in_mib": metrics.mem_total_mib,
                "memory_used_in_mib": metrics.mem_used_mib,
                "timestamp": metrics.timestamp,
            });
            context.printer(output).object(streams, properties, &json).await?;
            Ok(exit::SUCCESS)
        }
    }
}

async fn create(context: &Context, args: CreateArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let mut source = ("image", String::new());
    let mut create = match (args.image.or_else(|| context.image.clone()), args.snapshot_id) {
        (_, Some(id)) => {
            source = ("snapshot_id", id.clone());
            context.client.create_from_snapshot(id)
        }
        (Some(image), None) => {
            source.1.clone_from(&image);
            context.client.create(image)
        }
        (None, None) => bail!("no image: give --image NAME, for instance --image host"),
    };
    if let (Some(username), Some(password)) = (args.image_auth_username, args.image_auth_password) {
        create = create.image_auth(username, password);
    }
    let lifetime = args.timeout.or(context.lifetime);
    create = match lifetime {
        Some(Lifetime::For(lifetime)) => create.timeout(lifetime),
        Some(Lifetime::Endless) => create.no_timeout(),
        None => create,
    };
    for (name, value) in args.env {
        create = create.env(name, value);
    }
    for (key, value) in args.metadata {
        create = create.metadata(key, value);
    }
    for (key, value) in args.extension {
        create = create.extension(key, value);
    }
    for (name, amount) in args.resource {
        create = create.resource(name, amount);
    }
    if !args.entrypoint.is_empty() {
        create = create.entrypoint(args.entrypoint);
    }
    if let Some(limit) = args.ready_timeout {
        create = create.ready_timeout(limit);
    }
    if args.skip_health_check {
        create = create.skip_ready_check();
    }
    let sandbox = create.send().await?;
    let timeout = match lifetime {
        None => "sdk-default".to_owned(),
        Some(Lifetime::Endless) => "manual-cleanup".to_owned(),
        Some(Lifetime::For(lifetime)) => format_duration(lifetime),
    };
    let properties = vec![
        ("id", Cell::from(sandbox.id())),
        ("status", Cell::from("created")),
        ("timeout", Cell::from(&timeout)),
        (source.0, Cell::from(&source.1)),
    ];
    let mut json = json!({"id": sandbox.id(), "status": "created", "timeout": timeout});
    json[source.0] = Value::from(source.1);
    context.printer(args.output).object(streams, properties, &json).await?;
    Ok(exit::SUCCESS)
}

async fn list(context: &Context, args: ListArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let filter = ListFilter {
        states: args.state,
        metadata: args.metadata.into_iter().collect::<BTreeMap<_, _>>(),
        page: args.page,
        page_size: args.page_size,
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
    let page = answer.pagination;
    let json = json!({
        "items": answer.items.iter().map(to_json).collect::<Vec<_>>(),
        "pagination": {
            "page": page.page,
            "page_size": page.page_size,
            "total_items": page.total_items,
            "total_pages": page.total_pages,
            "has_next_page": page.has_next_page,
        },
    });
    let headings = ["id", "status", "image", "created_at", "expires_at"];
    context.printer(args.output).list(streams, &headings, rows, &json).await?;
    if page.has_next_page && args.output == Format::Table {
        let text = format!("page {} of {}; more with --page {}", page.page, page.total_pages, page.page + 1);
        streams.note(&text).await;
    }
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
        let status = match context.client.sandbox(&id).kill().await {
            Ok(()) => "terminated".to_owned(),
            Err(error) => {
                streams.error(&error.into(), context.color_errors).await;
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

fn properties(info: &SandboxInfo) -> Vec<(&'static str, Cell)> {
    let labels = |map: &Option<BTreeMap<String, String>>| {
        let pairs: Option<Vec<String>> =
            map.as_ref().map(|map| map.iter().map(|(key, value)| format!("{key}={value}")).collect());
        Cell::optional(pairs.map(|pairs| pairs.join(" ")))
    };
    vec![
        ("id", Cell::from(&info.id)),
        ("state", Cell::from(&info.status.state)),
        ("reason", Cell::optional(info.status.reason.as_ref())),
        ("message", Cell::optional(info.status.message.as_ref())),
        ("image", Cell::optional(info.image.as_ref().map(|image| &image.uri))),
        ("snapshot_id", Cell::optional(info.snapshot_id.as_ref())),
        ("entrypoint", Cell::from(info.entrypoint.join(" "))),
        ("metadata", labels(&info.metadata)),
        ("extensions", labels(&info.extensions)),
        ("created_at", Cell::from(info.created_at)),
        ("expires_at", Cell::optional(info.expires_at)),
    ]
}

/// A sandbox as this program's JSON has it: names in snake_case, absent members as null.
fn to_json(info: &SandboxInfo) -> Value {
    json!({
        "id": info.id,
        "status": {
            "state": info.status.state,
            "reason": info.status.reason,
            "message": info.status.message,
            "last_transition_at": info.status.last_transition_at,
        },
        "entrypoint": info.entrypoint,
        "image": info.image.as_ref().map(|image| json!({"image": image.uri})),
        "snapshot_id": info.snapshot_id,
        "platform": info.platform,
        "metadata": info.metadata,
        "extensions": info.extensions,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
    })
}

#[cfg(test)]
mod tests {
    use super::key_value;

    #[test]
    fn pairs() {
        assert_eq!(key_value("A=b=c"), Ok(("A".to_owned(), "b=c".to_owned())));
        assert_eq!(key_value("A="), Ok(("A".to_owned(), String::new())));
        assert!(key_value("A").is_err() && key_value("=x").is_err());
    }
}
