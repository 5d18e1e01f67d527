//! `osb top`: what sandboxes use at the moment.

use std::cmp::Reverse;
use std::time::Duration;

use clap::{Args, ValueEnum};
use futures_util::{StreamExt as _, stream};
use indicatif::HumanDuration;
use osb_client::{ListFilter, Metrics, SandboxInfo, SandboxState};
use serde_json::{Value, json};

use crate::args::{OutputArg, key_value};
use crate::exit;
use crate::output::{Cell, Format, Room, Row, fitted, table};
use crate::sandbox::metrics_json;
use crate::settings::Context;
use crate::signals::Signals;
use crate::streams::{self, Streams};

/// Sandboxes that are asked at a time.
const PARALLEL: usize = 16;
/// A sandbox that answers later than this has no figures this time.
const PATIENCE: Duration = Duration::from_secs(2);

/// Arguments of `top`.
#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// Only sandboxes with this label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// Order of the table
    #[arg(short, long, value_enum, ignore_case = true, default_value_t = Order::Cpu)]
    sort: Order,
    /// Seconds between two tables
    #[arg(short, long, value_name = "SECONDS", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Show one table and end, as always when the output is not a terminal
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    output: OutputArg,
}

/// Orders of the table; the largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// By processor time
    Cpu,
    /// By memory
    Memory,
    /// By age, the oldest first
    Age,
    /// By what is left of the lifetime, the shortest first
    Expiry,
}

struct Line {
    info: SandboxInfo,
    metrics: Option<Metrics>,
}

pub(crate) async fn run(context: &Context, args: TopArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let format = args.output.output;
    let lines = measure(context, &args).await?;
    if args.once || format != Format::Table || !streams.stdout_is_terminal {
        show(context, &lines, format, streams).await?;
        return Ok(exit::SUCCESS);
    }
    let mut signals = Signals::new()?;
    let mut lines = Some(lines);
    loop {
        let now = match lines.take() {
            Some(lines) => lines,
            None => tokio::select! {
                lines = measure(context, &args) => match lines {
                    Ok(lines) => lines,
                    // A server that starts again is no end of the story.
                    Err(error) if streams::is_passing(&error) => {
                        streams.note(&format!("{error:#}; trying again")).await;
                        match pause(&args, &mut signals).await {
                            None => continue,
                            Some(signal) => return Ok(exit::SIGNAL + signal),
                        }
                    }
                    Err(error) => return Err(error),
                },
                signal = signals.next() => return Ok(exit::SIGNAL + signal),
            },
        };
        // In one write, from the corner on: the terminal never shows half a table.
        let frame = format!("\x1b[H\x1b[2J{}", frame(context, &now, streams));
        streams.out(frame.as_bytes()).await?;
        if let Some(signal) = pause(&args, &mut signals).await {
            return Ok(exit::SIGNAL + signal);
        }
    }
}

/// Waits between two tables; the signal when somebody wants to leave.
async fn pause(args: &TopArgs, signals: &mut Signals) -> Option<u8> {
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs(args.interval)) => None,
        signal = signals.next() => Some(signal),
    }
}

/// The columns.
const HEADINGS: [&str; 8] = ["id", "status", "image", "cpu", "memory", "limit", "age", "expires in"];
/// Those that a narrow terminal can do without, the least important first; then ids are cut.
const SPARE: [&str; 5] = ["limit", "image", "age", "expires in", "status"];
/// Columns and lines where a terminal does not tell.
const USUAL: (usize, usize) = (80, 24);

/// The table as it fits onto the terminal: nothing wraps, nothing scrolls.
fn frame(context: &Context, lines: &[Line], streams: &Streams) -> String {
    let (width, height) = (streams.size)().unwrap_or(USUAL);
    // The heading, and the line in which the cursor stands.
    let room = height.saturating_sub(2).max(1);
    let (shown, more) = match lines.len() > room {
        true => (room.saturating_sub(1), lines.len() + 1 - room),
        false => (lines.len(), 0),
    };
    let rows = lines.iter().take(shown).map(row).collect();
    let (headings, rows) = fitted(&HEADINGS, rows, Room { width, spare: &SPARE });
    let mut text = table(&headings, &rows, context.printer(Format::Table).color);
    if more > 0 {
        text.push_str(&format!("{more} more\n"));
    }
    text
}

async fn measure(context: &Context, args: &TopArgs) -> anyhow::Result<Vec<Line>> {
    let filter = ListFilter { metadata: args.metadata.iter().cloned().collect(), ..ListFilter::default() };
    let sandboxes = context.client.list_all(filter).collect().await?;
    let mut lines: Vec<Line> = stream::iter(sandboxes)
        .map(|info| async {
            let metrics = match info.status.state {
                SandboxState::Running => {
                    let asked = context.client.sandbox(&info.id);
                    // One that ends meanwhile has no figures; that is no failure of the table.
                    tokio::time::timeout(PATIENCE, asked.metrics()).await.ok().and_then(Result::ok)
                }
                _ => None,
            };
            Line { info, metrics }
        })
        .buffered(PARALLEL)
        .collect()
        .await;
    lines.sort_by_key(|line| key(args.sort, line));
    Ok(lines)
}

/// Sorts ascending.
fn key(order: Order, line: &Line) -> (Reverse<i64>, i64) {
    let thousandths = |figure: Option<f64>| {
        #[allow(clippy::cast_possible_truncation)] // Far from the bounds, and saturating.
        figure.map_or(-1, |figure| (figure * 1000.0) as i64)
    };
    let none = Reverse(0);
    match order {
        Order::Cpu => (Reverse(thousandths(line.metrics.as_ref().map(|m| m.cpu_used_pct))), 0),
        Order::Memory => (Reverse(thousandths(line.metrics.as_ref().map(|m| m.mem_used_mib))), 0),
        Order::Age => (none, seconds_until(&line.info.created_at.to_string()).unwrap_or(i64::MAX)),
        Order::Expiry => {
            (none, line.info.expires_at.and_then(|at| seconds_until(&at.to_string())).unwrap_or(i64::MAX))
        }
    }
}

/// Seconds from now to a time of the wire; negative when it is past.
pub(crate) fn seconds_until(time: &str) -> Option<i64> {
    let at: jiff::Timestamp = time.parse().ok()?;
    Some(at.as_second() - jiff::Timestamp::now().as_second())
}

/// A span as people say it, in its largest unit.
fn span(seconds: i64) -> String {
    HumanDuration(Duration::from_secs(seconds.unsigned_abs())).to_string()
}

async fn show(
    context: &Context,
    lines: &[Line],
    format: Format,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let rows = lines.iter().map(row).collect();
    let json: Vec<Value> = lines.iter().map(line_json).collect();
    context.printer(format).list(streams, &HEADINGS, rows, &json).await
}

fn row(line: &Line) -> Row {
    let info = &line.info;
    let metrics = line.metrics.as_ref();
    let until = |time: Option<String>| Cell::optional(time.and_then(|time| seconds_until(&time)).map(span));
    vec![
        Cell::from(&info.id),
        Cell::from(&info.status.state),
        Cell::optional(info.image.as_ref().map(|image| &image.uri)),
        Cell::optional(metrics.map(|m| format!("{:.1}%", m.cpu_used_pct))),
        Cell::optional(metrics.map(|m| format!("{:.1} MiB", m.mem_used_mib))),
        Cell::optional(metrics.map(|m| format!("{:.0} MiB", m.mem_total_mib))),
        until(Some(info.created_at.to_string())),
        until(info.expires_at.map(|at| at.to_string())),
    ]
}

fn line_json(line: &Line) -> Value {
    json!({
        "id": line.info.id,
        "status": line.info.status.state,
        "image": line.info.image.as_ref().map(|image| &image.uri),
        "metrics": line.metrics.as_ref().map(metrics_json),
        "created_at": line.info.created_at,
        "expires_at": line.info.expires_at,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str, created: &str, expires: Option<&str>, cpu: Option<f64>) -> Line {
        let info = serde_json::from_value(json!({
            "id": id, "status": {"state": "Running"}, "entrypoint": [], "createdAt": created,
            "expiresAt": expires,
        }));
        let metrics = cpu.map(|cpu| Metrics {
            cpu_count: 1,
            cpu_used_pct: cpu,
            mem_total_mib: 100.0,
            mem_used_mib: 100.0 - cpu,
            timestamp: 0,
        });
        Line { info: info.unwrap(), metrics }
    }

    #[test]
    fn orders() {
        let mut lines = [
            line("a", "2026-01-01T00:00:00Z", None, Some(1.0)),
            line("b", "2026-01-01T00:00:01Z", Some("2036-01-01T00:00:00Z"), None),
            line("c", "2026-01-01T00:00:02Z", Some("2035-01-01T00:00:00Z"), Some(50.0)),
        ];
        for (order, expected) in
            [(Order::Cpu, "cab"), (Order::Memory, "acb"), (Order::Age, "abc"), (Order::Expiry, "cba")]
        {
            lines.sort_by_key(|line| key(order, line));
            assert_eq!(lines.iter().map(|line| line.info.id.as_str()).collect::<String>(), expected);
        }
    }
}
