//! Bars and words for what takes long. They are for people: only on a terminal, and gone when the work is done.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use osb_client::ListFilter;

use crate::output::printable;
use crate::settings::Context;
use crate::streams::Streams;

/// What takes longer is worth words.
const PATIENCE: Duration = Duration::from_millis(800);
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

/// Waits for a sandbox in the making and shows, on a terminal, what the server says of it: a missing image is
/// fetched first.
pub(crate) async fn while_pending<T>(
    context: &Context,
    image: Option<String>,
    terminal: bool,
    made: impl Future<Output = T>,
) -> T {
    if !terminal {
        return made.await;
    }
    tokio::pin!(made);
    if let Ok(made) = tokio::time::timeout(PATIENCE, &mut made).await {
        return made;
    }
    let bar = styled(ProgressBar::new_spinner(), "{spinner} {wide_msg}", "making the sandbox");
    bar.enable_steady_tick(Duration::from_millis(100));
    let filter =
        ListFilter { states: vec!["Pending".to_owned()], page_size: Some(20), ..ListFilter::default() };
    let made = loop {
        tokio::select! {
            made = &mut made => break made,
            () = tokio::time::sleep(LOOK) => {}
        }
        // What cannot be asked is no failure of the create.
        let asked = tokio::select! {
            made = &mut made => break made,
            asked = context.client.list(&filter) => asked,
        };
        let asked = match asked {
            Ok(list) => list,
            Err(error) => {
                bar.set_message(printable(&error.to_string()));
                continue;
            }
        };
        let found = Some(asked).and_then(|list| {
            list.items.into_iter().find(|info| info.image.as_ref().map(|image| &image.uri) == image.as_ref())
        });
        if let Some(message) = found.and_then(|info| info.status.message) {
            bar.set_message(printable(&message));
        }
    };
    bar.finish_and_clear();
    made
}
