//! A line on the terminal that says how far a load is.

use std::io::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use osb_engine::image::Progress;

use super::show::size_in_words;

/// Time between two updates.
const EVERY: Duration = Duration::from_millis(100);
const BAR: usize = 30;

/// Shows progress; does nothing where nobody looks.
pub(super) struct Meter {
    enabled: bool,
    last: Mutex<Option<Instant>>,
}

impl Meter {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, last: Mutex::new(None) }
    }

    /// Called from several threads, thousands of times a second.
    pub(super) fn show(&self, progress: Progress) {
        let layers = format!("layer {} of {}", progress.layers, progress.total_layers);
        self.line("loading", progress.bytes, progress.total_bytes, &layers);
    }

    /// Shows a bar where the whole is known, else how much it is so far.
    pub(super) fn line(&self, what: &str, bytes: u64, total: u64, rest: &str) {
        if !self.enabled {
            return;
        }
        let now = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| now.duration_since(last) < EVERY) {
            return;
        }
        *last = Some(now);
        write_err(&format!("\r\x1b[K{}", text(what, bytes, total, rest)));
    }

    pub(super) fn clear(&self) {
        if self.enabled {
            write_err("\r\x1b[K");
        }
    }
}

fn text(what: &str, bytes: u64, total: u64, rest: &str) -> String {
    if total == 0 && bytes == 0 {
        return format!("{what}  {rest}");
    }
    if total == 0 {
        return format!("{what} {}  {rest}", size_in_words(bytes));
    }
    let done = usize::try_from(bytes.min(total).saturating_mul(BAR as u64) / total).unwrap_or(BAR);
    let bar = format!("{}{}", "█".repeat(done), "░".repeat(BAR - done));
    format!("{what} {bar} {}/{}  {rest}", size_in_words(bytes), size_in_words(total))
}

fn write_err(text: &str) {
    // A terminal that is gone needs no progress.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_never_overflows() {
        assert_eq!((text("x", 5, 0, "r"), text("x", 0, 0, "r")), ("x 5 B  r".into(), "x  r".into()));
        assert_eq!(text("x", 0, 10, "").matches('█').count(), 0);
        assert_eq!(text("x", 5, 10, "").matches('█').count(), BAR / 2);
        assert_eq!(text("x", u64::MAX, 10, "").matches('░').count(), 0);
    }
}
