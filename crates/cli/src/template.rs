//! `osb template`: images prepared for starts.

use std::collections::BTreeMap;

use clap::{Args, Subcommand, ValueEnum};
use osb_client::protocol::lifecycle::{FsbTemplateReadiness, TemplateFormat as WireFormat};
use osb_client::{CreateTemplateRequest, Template, TemplateFilter};
use serde_json::{Value, json};

use crate::args::{OutputArg, PageArgs, key_value};
use crate::exit;
use crate::output::Cell;
use crate::progress;
use crate::sandbox::read_part;
use crate::settings::Context;
use crate::streams::Streams;

/// What to do with templates.
#[derive(Debug, Clone, Subcommand)]
pub enum TemplateAction {
    /// Make a template and start its build
    Create(Box<TemplateArgs>),
    /// Show a template
    Get {
        /// Id of the template
        template_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
    /// List templates
    List {
        /// Only with this label; may be repeated
        #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
        metadata: Vec<(String, String)>,
        #[command(flatten)]
        page: PageArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Delete a template; its sandboxes go on
    Delete {
        /// Id of the template
        template_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

/// Arguments of `template create`.
#[derive(Debug, Clone, Args)]
pub struct TemplateArgs {
    /// Image to build from
    #[arg(short, long, required_unless_present = "file")]
    image: Option<String>,
    /// Where the result goes, such as s3://bucket/name
    #[arg(short, long, required_unless_present = "file")]
    publish: Option<String>,
    /// The whole request as JSON, in the names of the API, instead of the other options
    #[arg(short, long, value_name = "FILE")]
    #[arg(conflicts_with_all = ["image", "publish", "resource", "entrypoint", "env", "metadata"])]
    #[arg(conflicts_with_all = ["format", "readiness_probe", "warmup_seconds"])]
    file: Option<std::path::PathBuf>,
    /// Size such as cpu=1, memory=512Mi or disk=2Gi; may be repeated
    #[arg(long, value_name = "NAME=AMOUNT", value_parser = key_value)]
    resource: Vec<(String, String)>,
    /// Word of the entrypoint; repeat for each
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    entrypoint: Vec<String>,
    /// Variable; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    env: Vec<(String, String)>,
    /// Label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// How the result is stored [default: overlaybd]
    #[arg(long, value_enum, ignore_case = true)]
    format: Option<TemplateFormat>,
    /// Probe that tells when the build is ready, such as tcp://127.0.0.1:44772
    #[arg(long, value_name = "PROBE")]
    readiness_probe: Option<String>,
    /// How long to wait when there is no probe
    #[arg(long, value_name = "SECONDS")]
    warmup_seconds: Option<u32>,
    #[command(flatten)]
    output: OutputArg,
}

/// Encodings of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TemplateFormat {
    /// Plain
    Native,
    /// Overlay block device
    Overlaybd,
}

pub(crate) async fn run(
    context: &Context,
    action: TemplateAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    progress::patiently(context, answer(context, action, streams)).await
}

async fn answer(context: &Context, action: TemplateAction, streams: &mut Streams) -> anyhow::Result<u8> {
    let templates = context.client.templates();
    match action {
        TemplateAction::Create(args) => {
            let output = args.output;
            let template = templates.create(&request(*args)?).await?;
            let status = serde_json::to_value(template.status.phase)?;
            let properties = vec![
                ("template_id", Cell::from(&template.template_id)),
                ("image", Cell::from(&template.image)),
                ("status", Cell::from(status.as_str().unwrap_or_default())),
            ];
            let json =
                json!({"template_id": template.template_id, "image": template.image, "status": status});
            context.printer(output.output).object(streams, properties, &json).await?;
        }
        TemplateAction::Get { template_id, output } => {
            let json = to_json(&templates.get(&template_id).await?)?;
            let shown = |name: &&'static str| {
                let value = match *name {
                    "status" => &json["status"]["phase"],
                    "status_message" => &json["status"]["message"],
                    name => &json[name],
                };
                (*name, Cell::of_json(value))
            };
            let properties = MEMBERS.iter().map(shown).collect();
            context.printer(output.output).object(streams, properties, &json).await?;
        }
        TemplateAction::List { metadata, page, output } => {
            let filter = TemplateFilter {
                metadata: metadata.into_iter().collect(),
                page: page.page,
                page_size: page.page_size,
            };
            let answer = templates.list(&filter).await?;
            let items = answer.items.iter().map(to_json).collect::<Result<Vec<_>, _>>()?;
            let headings = ["template_id", "status", "image", "format", "created_at", "updated_at"];
            let rows = items
                .iter()
                .map(|item| {
                    let cell = |name: &&str| match *name {
                        "status" => Cell::of_json(&item["status"]["phase"]),
                        name => Cell::of_json(&item[name]),
                    };
                    headings.iter().map(cell).collect()
                })
                .collect();
            output.page(context, &headings, rows, items, &answer.pagination, streams).await?;
        }
        TemplateAction::Delete { template_id, output } => {
            templates.delete(&template_id).await?;
            context.printer(output.output).done(streams, &format!("deleted: {template_id}")).await?;
        }
    }
    Ok(exit::SUCCESS)
}

fn request(args: TemplateArgs) -> anyhow::Result<CreateTemplateRequest> {
    if let Some(path) = &args.file {
        return read_part(path);
    }
    let filled = |pairs: Vec<(String, String)>| {
        let map: BTreeMap<String, String> = pairs.into_iter().collect();
        (!map.is_empty()).then_some(map)
    };
    let readiness =
        (args.readiness_probe.is_some() || args.warmup_seconds.is_some()).then(|| FsbTemplateReadiness {
            probe: args.readiness_probe,
            warmup_seconds: args.warmup_seconds.map(i64::from),
        });
    Ok(CreateTemplateRequest {
        image: args.image.unwrap_or_default(),
        publish: args.publish.unwrap_or_default(),
        resource_limits: filled(args.resource),
        entrypoint: (!args.entrypoint.is_empty()).then_some(args.entrypoint),
        env: filled(args.env),
        metadata: filled(args.metadata),
        readiness,
        format: match args.format {
            Some(TemplateFormat::Native) => WireFormat::Native,
            Some(TemplateFormat::Overlaybd) => WireFormat::Overlaybd,
            None => WireFormat::default(),
        },
    })
}

/// Members of a template, in the order of its table.
const MEMBERS: [&str; 13] = [
    "template_id",
    "status",
    "status_message",
    "image",
    "publish",
    "format",
    "resource_limits",
    "entrypoint",
    "env",
    "readiness",
    "metadata",
    "created_at",
    "updated_at",
];

/// A template under this program's names, absent members as null.
fn to_json(template: &Template) -> anyhow::Result<Value> {
    Ok(json!({
        "template_id": template.template_id,
        "image": template.image,
        "resource_limits": template.resource_limits,
        "entrypoint": template.entrypoint,
        "env": template.env,
        "metadata": template.metadata,
        "readiness": template.readiness.as_ref().map(|readiness| json!({
            "probe": readiness.probe,
            "warmup_seconds": readiness.warmup_seconds,
        })),
        "publish": template.publish,
        "format": template.format,
        "status": {
            "phase": template.status.phase,
            "manifest_ref": template.status.manifest_ref,
            "message": template.status.message,
        },
        "created_at": template.created_at,
        "updated_at": template.updated_at,
    }))
}
