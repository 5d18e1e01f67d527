//! `osb events`: what happens to sandboxes, as it happens. The protocol has no stream of it, so that the list is
//! looked at again and again; what comes and goes between two looks is not seen.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::{Args, ValueEnum};
use osb_client::{ListFilter, SandboxInfo};
use serde_json::{Value, json};

use crate::args::key_value;
use crate::exit;
use crate::output::printable;
use crate::settings::Context;
use crate::signals::Signals;
use crate::streams::{self, Streams};

/// Arguments of `events`.
#[derive(Debug, Clone, Args)]
pub struct EventsArgs {
    /// Only of these sandboxes [default: all]
    sandbox_ids: Vec<String>,
    /// Only of sandboxes with this label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// Begin with the sandboxes that exist already
    #[arg(long)]
    existing: bool,
    /// Milliseconds between two looks
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    #[arg(value_parser = clap::value_parser!(u64).range(50..=60_000))]
    interval: u64,
    /// Form of the output; json is one document a line
    #[arg(short, long, value_enum, ignore_case = true, default_value_t, value_name = "FORMAT")]
    output: EventFormat,
}

/// Forms of events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum EventFormat {
    /// A line each, for people
    #[default]
    Table,
    /// A JSON document each
    Json,
}

/// Something that happened.
#[derive(Debug, PartialEq, Eq)]
struct Happening {
    id: String,
    kind: &'static str,
    detail: String,
}

type Known = BTreeMap<String, SandboxInfo>;

pub(crate) async fn run(context: &Context, args: EventsArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    let mut known = look(context, &args).await?;
    if args.existing {
        for happening in compare(&Known::new(), &known) {
            show(&Happening { kind: "existing", ..happening }, args.output, streams).await?;
        }
    }
    loop {
        let now = tokio::select! {
            now = async {
                tokio::time::sleep(Duration::from_millis(args.interval)).await;
                look(context, &args).await
            } => now,
            signal = signals.next() => return Ok(exit::SIGNAL + signal),
            gone = streams.unread() => return Err(gone),
        };
        let now = match now {
            Ok(now) => now,
            // A server that starts again is no end of the story.
            Err(error) if streams::is_passing(&error) => {
                streams.note(&printable(&format!("{error:#}; trying again"))).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        for happening in compare(&known, &now) {
            show(&happening, args.output, streams).await?;
        }
        known = now;
    }
}

async fn look(context: &Context, args: &EventsArgs) -> anyhow::Result<Known> {
    let filter = ListFilter { metadata: args.metadata.iter().cloned().collect(), ..ListFilter::default() };
    let all = context.client.list_all(filter).collect().await?;
    let wanted = |info: &SandboxInfo| args.sandbox_ids.is_empty() || args.sandbox_ids.contains(&info.id);
    Ok(all.into_iter().filter(wanted).map(|info| (info.id.clone(), info)).collect())
}

/// What must have happened between two looks.
fn compare(before: &Known, after: &Known) -> Vec<Happening> {
    let mut happenings = Vec::new();
    let mut add = |id: &str, kind: &'static str, detail: String| {
        happenings.push(Happening { id: id.to_owned(), kind, detail });
    };
    for (id, info) in after {
        let state = || {
            let status = &info.status;
            let said = [status.reason.as_deref(), status.message.as_deref()];
            let said: Vec<&str> = said.into_iter().flatten().filter(|text| !text.is_empty()).collect();
            match said.is_empty() {
                true => status.state.to_string(),
                false => format!("{} ({})", status.state, said.join(": ")),
            }
        };
        let Some(old) = before.get(id) else {
            let image = info.image.as_ref().map_or_else(String::new, |image| format!(" of {}", image.uri));
            add(id, "created", format!("{}{image}", state()));
            continue;
        };
        if old.status.state != info.status.state {
            add(id, "state", format!("{} -> {}", old.status.state, state()));
        } else if old.status.message != info.status.message {
            add(id, "progress", state());
        }
        if old.expires_at != info.expires_at {
            let until = info.expires_at.map_or_else(|| "never".to_owned(), |at| at.to_string());
            add(id, "renewed", format!("expires {until}"));
        }
        if old.metadata != info.metadata {
            let labels = info.metadata.iter().flatten().map(|(key, value)| format!("{key}={value}"));
            add(id, "labels", labels.collect::<Vec<_>>().join(" "));
        }
    }
    for (id, info) in before.iter().filter(|(id, _)| !after.contains_key(*id)) {
        add(id, "deleted", format!("was {}", info.status.state));
    }
    happenings
}

async fn show(happening: &Happening, output: EventFormat, streams: &mut Streams) -> std::io::Result<()> {
    let at = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let line = match output {
        EventFormat::Table => format!(
            "{at}  {}  {:<8}  {}\n",
            printable(&happening.id),
            happening.kind,
            printable(&happening.detail)
        ),
        EventFormat::Json => {
            let event: Value = json!({
                "time": at, "sandbox_id": happening.id, "event": happening.kind, "detail": happening.detail,
            });
            format!("{event}\n")
        }
    };
    streams.out(line.as_bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(sandboxes: &[Value]) -> Known {
        sandboxes
            .iter()
            .map(|value| {
                let info: SandboxInfo = serde_json::from_value(value.clone()).unwrap();
                (info.id.clone(), info)
            })
            .collect()
    }

    fn sandbox(id: &str, state: &str) -> Value {
        json!({"id": id, "status": {"state": state}, "entrypoint": [], "image": {"uri": "host"},
            "createdAt": "2026-11-30T17:49:18Z", "expiresAt": "2026-11-30T17:59:18Z"})
    }

    #[test]
    fn differences_are_told() {
        let mut renewed = sandbox("b", "Running");
        renewed["expiresAt"] = json!("2026-11-30T18:59:18Z");
        renewed["metadata"] = json!({"k": "v"});
        let mut ended = sandbox("c", "Failed");
        ended["status"]["reason"] = json!("OOM_KILLED");
        let before = known(&[sandbox("a", "Running"), sandbox("b", "Running"), sandbox("c", "Running")]);
        let after = known(&[renewed, ended, sandbox("d", "Running")]);
        let told: Vec<String> = compare(&before, &after)
            .iter()
            .map(|happening| format!("{} {} {}", happening.id, happening.kind, happening.detail))
            .collect();
        assert_eq!(
            told,
            [
                "b renewed expires 2026-11-30T18:59:18Z",
                "b labels k=v",
                "c state Running -> Failed (OOM_KILLED)",
                "d created Running of host",
                "a deleted was Running",
            ]
        );
        assert!(compare(&after, &after).is_empty());
    }
}
