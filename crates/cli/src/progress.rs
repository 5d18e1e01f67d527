//! Bars and words for what takes long. They are for people: only on a terminal, and gone when the work is done.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use osb_client::ListFilter;

use crate::output::printable;
use crate::settings::Context;
use crate::streams::Streams;

/// What takes longer is worth words.
const PATIENCE: Duration = Duration::from_millis(800);
/// Silence after which a person is told what is waited for, on a terminal or not.
const SILENCE: Duration = Duration::from_secs(3);
/// Time between two looks at a sandbox in the making where they become lines of text.
const SELDOM: Duration = Duration::from_secs(15);
/// Time between two looks at a sandbox in the making.
const LOOK: Duration = Duration::from_millis(500);

/// A bar over a number of bytes; without a number a counter.
pub(crate) fn bytes(total: Option<u64>, what: &str, streams: &Streams) -> ProgressBar {
    if !streams.stderr_is_terminal {
        return ProgressBar::hidden();
    }
    let template = match total {
        Some(_) => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        None => "{spinner} {msg} {bytes} {bytes_per_sec}",
    };
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::new_spinner(),
    };
    styled(bar, template, what)
}

fn styled(bar: ProgressBar, template: &str, what: &str) -> ProgressBar {
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(printable(what));
    bar
}

/// A line for people while `work` is under way and holds the streams.
fn say(text: &str) {
    use std::io::Write as _;
    // Standard error may be closed; there is no other place to say so.
    let _ = writeln!(std::io::stderr(), "osb: {}", printable(text));
}

/// Waits for an answer, and says so when none comes for a while.
pub(crate) async fn patiently<T>(context: &Context, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    if let Ok(done) = tokio::time::timeout(SILENCE, &mut work).await {
        return done;
    }
    let config = context.client.config();
    let limit = config.request_timeout.as_secs();
    say(&format!("no answer yet from {}; waiting {limit} seconds (--request-timeout)", config.base_url()));
    work.await
}

/// What the server says of a sandbox in the making; an error's text when it cannot be asked.
async fn heard(context: &Context, image: Option<&String>) -> Option<String> {
    let filter =
        ListFilter { states: vec!["Pending".to_owned()], page_size: Some(20), ..ListFilter::default() };
    let list = match tokio::time::timeout(SILENCE, context.client.list(&filter)).await {
        // What cannot be asked is no failure of the create.
        Ok(Err(error)) => return Some(error.to_string()),
        Err(_) => return Some(format!("no answer from {}", context.client.config().base_url())),
        Ok(Ok(list)) => list,
    };
    let wanted = |info: &osb_client::SandboxInfo| info.image.as_ref().map(|image| &image.uri) == image;
    list.items.into_iter().find(wanted).and_then(|info| info.status.message)
}

/// Says in lines what [`while_pending`] shows on a terminal.
async fn while_pending_in_lines<T>(
    context: &Context,
    image: Option<&String>,
    made: impl Future<Output = T>,
) -> T {
    tokio::pin!(made);
    let mut said = None;
    let mut pause = SILENCE;
    loop {
        let look = async {
            tokio::time::sleep(pause).await;
            heard(context, image).await
        };
        let told = tokio::select! {
            made = &mut made => return made,
            told = look => told,
        };
        let told = told.unwrap_or_else(|| "waiting for the sandbox".to_owned());
        if said.as_ref() != Some(&told) {
            say(&format!("making the sandbox: {told}"));
            said = Some(told);
        }
        pause = SELDOM;
    }
}

/// Waits for a sandbox in the making and shows what the server says of it: a missing image is fetched first.
pub(crate) async fn while_pending<T>(
    context: &Context,
    image: Option<String>,
    terminal: bool,
    made: impl Future<Output = T>,
) -> T {
    if !terminal {
        return while_pending_in_lines(context, image.as_ref(), made).await;
    }
    tokio::pin!(made);
    if let Ok(made) = tokio::time::timeout(PATIENCE, &mut made).await {
        return made;
    }
    let bar = styled(ProgressBar::new_spinner(), "{spinner} {wide_msg}", "making the sandbox");
    bar.enable_steady_tick(Duration::from_millis(100));
    let made = loop {
        let look = async {
            tokio::time::sleep(LOOK).await;
            heard(context, image.as_ref()).await
        };
        let told = tokio::select! {
            made = &mut made => break made,
            told = look => told,
        };
        if let Some(told) = told {
            bar.set_message(printable(&told));
        }
    };
    bar.finish_and_clear();
    made
}
