//! `osb logs`: what a sandbox's entrypoint, or a background command, writes.

use std::time::Duration;

use clap::Args;
use osb_client::{LogQuery, Sandbox, SandboxState};

use crate::args::SandboxArg;
use crate::exit;
use crate::settings::Context;
use crate::signals::Signals;
use crate::streams::Streams;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(500);
/// Most lines that the server gives at once.
const MAX_TAIL: u32 = 10_000;

/// Arguments of `logs`.
#[derive(Debug, Clone, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    sandbox: SandboxArg,
    /// Background command whose output is wanted [default: the sandbox's entrypoint]
    execution_id: Option<String>,
    /// Go on as more is written, until the end; of a command, its exit code becomes this program's
    #[arg(short, long)]
    follow: bool,
    /// Lines from the end to begin with, of the entrypoint's output
    #[arg(short = 'n', long, default_value_t = 100, conflicts_with = "execution_id")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_TAIL)))]
    tail: u32,
}

pub(crate) async fn run(context: &Context, args: LogsArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let sandbox = args.sandbox.handle(context);
    match (args.execution_id, args.follow) {
        (Some(id), true) => follow_command(&sandbox, &id, None, streams).await,
        (Some(id), false) => {
            let logs = sandbox.command_logs(&id, None).await?;
            tell_dropped(logs.dropped, streams).await?;
            streams.out(&logs.content).await?;
            Ok(exit::SUCCESS)
        }
        (None, follow) => entrypoint(&sandbox, args.tail, follow, streams).await,
    }
}

/// Says on standard error what is no longer kept of an output, so that nobody takes the rest for the whole.
pub(crate) async fn tell_dropped(bytes: u64, streams: &mut Streams) -> anyhow::Result<()> {
    if bytes > 0 {
        streams.err(format!("note: {bytes} bytes of the output are no longer kept\n").as_bytes()).await?;
    }
    Ok(())
}

/// Passes a background command's output on until it ends.
pub(crate) async fn follow_command(
    sandbox: &Sandbox,
    id: &str,
    mut cursor: Option<u64>,
    streams: &mut Streams,
) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    loop {
        // Asked before the output, so that nothing written before the end is missed.
        let status = sandbox.command_status(id).await?;
        let logs = sandbox.command_logs(id, cursor).await?;
        tell_dropped(logs.dropped, streams).await?;
        streams.out(&logs.content).await?;
        cursor = logs.cursor.or(cursor);
        if !status.running {
            return Ok(status
                .exit_code
                .map_or(exit::NOT_RUN, |code| u8::try_from(code).unwrap_or(exit::FAILURE)));
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            signal = signals.next() => return Ok(exit::SIGNAL + signal),
            gone = streams.unread() => return Err(gone),
        }
    }
}

async fn entrypoint(sandbox: &Sandbox, tail: u32, follow: bool, streams: &mut Streams) -> anyhow::Result<u8> {
    let read = |tail| async move {
        sandbox.diagnostics().logs_text(&LogQuery { tail: Some(tail), ..LogQuery::default() }).await
    };
    let mut seen = read(tail).await?;
    if seen == NOTHING {
        seen.clear();
    }
    write(&seen, streams).await?;
    if !follow {
        return Ok(exit::SUCCESS);
    }
    let mut signals = Signals::new()?;
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            signal = signals.next() => return Ok(exit::SIGNAL + signal),
            gone = streams.unread() => return Err(gone),
        }
        let ended = match sandbox.info().await {
            Ok(info) => {
                matches!(info.status.state, SandboxState::Terminated | SandboxState::Failed)
            }
            // Deleted while being followed: that is the end, not a failure.
            Err(error) if error.is_not_found() => return Ok(exit::SUCCESS),
            Err(error) => return Err(error.into()),
        };
        let text = match read(MAX_TAIL).await {
            Ok(text) => text,
            Err(error) if error.is_not_found() => return Ok(exit::SUCCESS),
            Err(error) => return Err(error.into()),
        };
        write(added(&seen, &text), streams).await?;
        if ended {
            return Ok(exit::SUCCESS);
        }
        if text != NOTHING {
            seen = text;
        }
    }
}

/// What the server says when there is no output.
const NOTHING: &str = "(no logs)";

async fn write(text: &str, streams: &mut Streams) -> std::io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    // The server leaves the last line end out.
    let end = if text.ends_with('\n') { "" } else { "\n" };
    streams.out(format!("{text}{end}").as_bytes()).await
}

/// What `new` has behind the end of `old`. Both are windows, in whole lines, on the end of one growing text.
fn added<'a>(old: &str, new: &'a str) -> &'a str {
    if new == NOTHING {
        return "";
    }
    let old = old.trim_end_matches('\n');
    if old.is_empty() {
        return new;
    }
    let starts_line = |text: &str, at: usize| at == 0 || text.as_bytes()[at - 1] == b'\n';
    // The old window is in the new one as long as less than a window has been written since.
    let mut at = None;
    for (found, _) in new.match_indices(old) {
        if starts_line(new, found) {
            at = Some(found + old.len());
            // What stood at the window's beginning stands there still; only a cut moves it.
            if found == 0 {
                break;
            }
        }
    }
    let rest = match at {
        Some(at) => &new[at..],
        None => {
            let overlap = old
                .match_indices('\n')
                .map(|(at, _)| &old[at + 1..])
                .find(|end| new.starts_with(end) && new[end.len()..].starts_with(['\n']) || new == *end);
            overlap.map_or(new, |end| &new[end.len()..])
        }
    };
    rest.strip_prefix('\n').unwrap_or(rest)
}

#[cfg(test)]
mod tests {
    use super::added;

    #[test]
    fn only_what_is_new_is_shown() {
        for (old, new, expected) in [
            ("", "a\nb", "a\nb"),
            ("a\nb", "a\nb", ""),
            ("a\nb", "a\nb\nc", "c"),
            ("a\nb\n", "a\nb\nc\n", "c\n"),
            ("b", "a\nb\nc", "c"),
            ("a", "a\na\na", "a\na"),
            ("a\nb\nc", "b\nc\nd", "d"),
            ("a\nb\nc", "x\ny", "x\ny"),
            ("a\nb\nc", "c", ""),
            ("a", "(no logs)", ""),
        ] {
            assert_eq!(added(old, new), expected, "{old:?} {new:?}");
        }
    }
}
