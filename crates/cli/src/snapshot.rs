//! `osb snapshot`: the state of sandboxes, kept to start others from.

use clap::Subcommand;
use osb_client::{Snapshot, SnapshotFilter};
use serde_json::{Value, json};

use crate::args::{OutputArg, PageArgs, SandboxArg};
use crate::exit;
use crate::output::Cell;
use crate::progress;
use crate::settings::Context;
use crate::streams::Streams;

/// What to do with snapshots.
#[derive(Debug, Clone, Subcommand)]
pub enum SnapshotAction {
    /// Make a snapshot of a sandbox
    Create {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Name of the snapshot
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show a snapshot
    Get {
        /// Id of the snapshot
        snapshot_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
    /// List snapshots, newest first
    List {
        /// Only of this sandbox
        #[arg(long, value_name = "ID")]
        sandbox_id: Option<String>,
        /// Only of this name
        #[arg(long)]
        name: Option<String>,
        /// Only in this state; may be repeated
        #[arg(long)]
        state: Vec<String>,
        #[command(flatten)]
        page: PageArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Delete a snapshot
    Delete {
        /// Id of the snapshot
        snapshot_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

pub(crate) async fn run(
    context: &Context,
    action: SnapshotAction,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    progress::patiently(context, answer(context, action, streams)).await
}

async fn answer(context: &Context, action: SnapshotAction, streams: &mut Streams) -> anyhow::Result<u8> {
    let snapshots = context.client.snapshots();
    match action {
        SnapshotAction::Create { sandbox, name, output } => {
            let made = sandbox.handle(context).create_snapshot(name.as_deref()).await?;
            let properties = vec![
                ("id", Cell::from(&made.id)),
                ("sandbox_id", Cell::from(&made.sandbox_id)),
                ("name", Cell::optional(made.name.as_ref())),
                ("status", Cell::from(&made.status.state)),
            ];
            let json = json!({
                "id": made.id, "sandbox_id": made.sandbox_id, "name": made.name, "status": made.status.state,
            });
            context.printer(output.output).object(streams, properties, &json).await?;
        }
        SnapshotAction::Get { snapshot_id, output } => {
            show(context, &snapshots.get(&snapshot_id).await?, output, streams).await?;
        }
        SnapshotAction::List { sandbox_id, name, state, page, output } => {
            let filter = SnapshotFilter {
                sandbox_id,
                name,
                states: state,
                page: page.page,
                page_size: page.page_size,
            };
            let answer = snapshots.list(&filter).await?;
            let rows = answer
                .items
                .iter()
                .map(|snapshot| {
                    vec![
                        Cell::from(&snapshot.id),
                        Cell::optional(snapshot.name.as_ref()),
                        Cell::from(&snapshot.sandbox_id),
                        Cell::from(&snapshot.status.state),
                        Cell::from(snapshot.created_at),
                    ]
                })
                .collect();
            let items: Vec<Value> = answer.items.iter().map(to_json).collect();
            let headings = ["id", "name", "sandbox_id", "status", "created_at"];
            output.page(context, &headings, rows, items, &answer.pagination, streams).await?;
        }
        SnapshotAction::Delete { snapshot_id, output } => {
            snapshots.delete(&snapshot_id).await?;
            context.printer(output.output).done(streams, &format!("deleted: {snapshot_id}")).await?;
        }
    }
    Ok(exit::SUCCESS)
}

async fn show(
    context: &Context,
    snapshot: &Snapshot,
    output: OutputArg,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let status = &snapshot.status;
    let properties = vec![
        ("id", Cell::from(&snapshot.id)),
        ("sandbox_id", Cell::from(&snapshot.sandbox_id)),
        ("name", Cell::optional(snapshot.name.as_ref())),
        ("status", Cell::from(&status.state)),
        ("status_reason", Cell::optional(status.reason.as_ref())),
        ("status_message", Cell::optional(status.message.as_ref())),
        ("created_at", Cell::from(snapshot.created_at)),
    ];
    context.printer(output.output).object(streams, properties, &to_json(snapshot)).await
}

fn to_json(snapshot: &Snapshot) -> Value {
    let status = &snapshot.status;
    json!({
        "id": snapshot.id,
        "sandbox_id": snapshot.sandbox_id,
        "name": snapshot.name,
        "status": {
            "state": status.state,
            "reason": status.reason,
            "message": status.message,
            "last_transition_at": status.last_transition_at,
        },
        "created_at": snapshot.created_at,
    })
}
