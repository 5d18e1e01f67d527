//! The daemon's own log: one JSON object per line, in the shape that upstream's tools read.
//!
//! Headers, tokens and bodies are never logged. Command lines and all else that callers write pass through
//! [`redact`], whatever a place in the code hands over.

mod output;
pub mod redact;

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

pub use output::Output;

/// Of each message so many are written in a second…
const FIRST: u64 = 100;
/// …and then one of so many.
const THEN: u64 = 100;
/// Longest text of one field.
const LONGEST_FIELD: usize = 2048;

/// The log of this process, once it is installed.
static LOG: JsonLines = JsonLines {
    level: AtomicUsize::new(0),
    out: Mutex::new(Vec::new()),
    seen: Mutex::new(None),
    spans: AtomicU64::new(1),
};

/// Writes events to outputs; spans are not followed.
struct JsonLines {
    level: AtomicUsize,
    out: Mutex<Vec<Output>>,
    seen: Mutex<Option<HashMap<Identifier, Window>>>,
    spans: AtomicU64,
}

/// How often a message has come since a moment.
struct Window {
    since: Instant,
    count: u64,
}

/// Where the log goes, by the variables `EXECD_LOG_FILE` and `OPENSANDBOX_LOG_OUTPUT`; `None` when they name nothing.
#[must_use]
pub fn places(var: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<Vec<PathBuf>> {
    let file = var("EXECD_LOG_FILE").filter(|path| !path.is_empty());
    if let Some(file) = file {
        return Some(vec![file.into()]);
    }
    let list = var("OPENSANDBOX_LOG_OUTPUT")?.into_string().ok()?;
    let places: Vec<PathBuf> =
        list.split(',').map(str::trim).filter(|place| !place.is_empty()).map(PathBuf::from).collect();
    Some(places).filter(|places| !places.is_empty())
}

/// Opens the outputs; `stdout` and `stderr` are names.
///
/// # Errors
/// One cannot be opened; the message names it.
pub fn open(places: &[PathBuf]) -> std::io::Result<Vec<Output>> {
    let standard = |fd: std::os::fd::BorrowedFd<'_>| {
        rustix::io::fcntl_dupfd_cloexec(fd, 3).map(|fd| Output::stream(File::from(fd))).map_err(Into::into)
    };
    places
        .iter()
        .map(|place| match place.to_str() {
            Some("stdout") => standard(rustix::stdio::stdout()),
            Some("stderr") => standard(rustix::stdio::stderr()),
            _ => Output::file(place),
        })
        .collect()
}

/// Sends the log to these outputs from now on.
pub fn install(level: LevelFilter, out: Vec<Output>) {
    *LOG.out.lock().unwrap_or_else(PoisonError::into_inner) = out;
    LOG.level.store(rank(level), Ordering::Relaxed);
    // Fails only when it is installed already.
    let _ = tracing::subscriber::set_global_default(&LOG);
    tracing::callsite::rebuild_interest_cache();
}

fn rank(level: LevelFilter) -> usize {
    [LevelFilter::OFF, LevelFilter::ERROR, LevelFilter::WARN, LevelFilter::INFO, LevelFilter::DEBUG]
        .iter()
        .position(|known| *known == level)
        .unwrap_or(5)
}

/// Numbers of the `--log-level` flag.
#[must_use]
pub fn level(number: i64) -> LevelFilter {
    match number {
        // What is fatal is said on standard error, by a process that ends.
        ..=2 => LevelFilter::OFF,
        3 => LevelFilter::ERROR,
        4 => LevelFilter::WARN,
        5 | 6 => LevelFilter::INFO,
        _ => LevelFilter::DEBUG,
    }
}

impl JsonLines {
    /// Whether an event of this place in the code is to be written, or is one of too many.
    fn counts(&self, metadata: &Metadata<'_>) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let windows = seen.get_or_insert_with(HashMap::new);
        // As many as there are places in the code, so they need no bound.
        let window = windows.entry(metadata.callsite()).or_insert(Window { since: now, count: 0 });
        if now.duration_since(window.since) >= Duration::from_secs(1) {
            *window = Window { since: now, count: 0 };
        }
        window.count += 1;
        window.count <= FIRST || (window.count - FIRST).is_multiple_of(THEN)
    }
}

impl Subscriber for &'static JsonLines {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // The level may change.
        Interest::sometimes()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match self.level.load(Ordering::Relaxed) {
            0 => LevelFilter::OFF,
            1 => LevelFilter::ERROR,
            2 => LevelFilter::WARN,
            3 => LevelFilter::INFO,
            4 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        rank(LevelFilter::from_level(*metadata.level())) <= self.level.load(Ordering::Relaxed)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        // Wraps after centuries; zero is not an id.
        Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed).max(1))
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        if !self.counts(event.metadata()) {
            return;
        }
        let line = line(event);
        for out in self.out.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            out.write(&line);
        }
    }
}

fn line(event: &Event<'_>) -> String {
    let metadata = event.metadata();
    let mut fields = Fields(Map::new());
    event.record(&mut fields);
    for (name, value) in [
        ("level", metadata.level().as_str().to_ascii_lowercase()),
        ("ts", jiff::Timestamp::now().to_string()),
        ("logger", metadata.target().replace("::", ".")),
    ] {
        fields.0.insert(name.to_owned(), value.into());
    }
    let mut line = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(line, "{}", Value::Object(fields.0));
    line
}

struct Fields(Map<String, Value>);

impl Fields {
    fn insert(&mut self, field: &Field, value: impl Into<Value>) {
        let name = if field.name() == "message" { "msg" } else { field.name() };
        self.0.insert(name.to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        // Cut first: what is left of a quote that has lost its end is masked.
        let cut = &value[..value.floor_char_boundary(LONGEST_FIELD)];
        let mut shown = redact::text(cut).into_owned();
        if cut.len() < value.len() {
            shown.push('…');
        }
        self.insert(field, shown);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.insert(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.insert(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.insert(field, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that `log` writes.
    fn lines(log: impl FnOnce()) -> Vec<Value> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let subscriber: &'static JsonLines = Box::leak(Box::new(JsonLines {
            level: AtomicUsize::new(rank(LevelFilter::INFO)),
            out: Mutex::new(vec![Output::file(&path).unwrap()]),
            seen: Mutex::new(None),
            spans: AtomicU64::new(1),
        }));
        tracing::subscriber::with_default(subscriber, log);
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn events_are_lines_of_json() {
        let lines = lines(|| {
            tracing::info!(port = 7_u64, name = "a\"b", on = true, "started");
            tracing::debug!("not shown");
            tracing::warn!(error = %"http://u:s3cr3t@h failed", level = "forged", "two");
        });
        assert_eq!(lines.len(), 2);
        let [one, two] = &lines[..] else { panic!("two lines") };
        assert_eq!((&one["level"], &one["msg"]), (&"info".into(), &"started".into()));
        assert_eq!((&one["port"], &one["name"], &one["on"]), (&7.into(), &"a\"b".into(), &true.into()));
        assert_eq!(one["logger"], "osb_execd.log.tests");
        assert!(one["ts"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok());
        assert_eq!((&two["level"], &two["error"]), (&"warn".into(), &"http://****@h failed".into()));
    }

    #[test]
    fn a_flood_of_one_message_is_thinned() {
        let lines = lines(|| {
            for number in 0..450_u64 {
                tracing::info!(number, "again");
            }
            tracing::info!("another");
        });
        let again = lines.iter().filter(|line| line["msg"] == "again").count();
        // A slow machine may have seen a second pass.
        assert!((103..=206).contains(&again), "{again}");
        assert_eq!(lines.last().unwrap()["msg"], "another");
    }

    #[test]
    fn long_texts_are_cut() {
        let long = "ä".repeat(5000);
        let lines = lines(|| tracing::info!(long, "x"));
        let shown = lines[0]["long"].as_str().unwrap();
        assert!(shown.len() < 2100 && shown.ends_with('…'));
    }

    #[test]
    fn outputs_are_named_by_variables() {
        let var = |file: &'static str, list: &'static str| {
            places(move |name| match name {
                "EXECD_LOG_FILE" => Some(file.into()),
                "OPENSANDBOX_LOG_OUTPUT" => Some(list.into()),
                _ => None,
            })
        };
        assert_eq!(var("", " , "), None);
        assert_eq!(var("/f", "stdout"), Some(vec!["/f".into()]));
        assert_eq!(var("", "stderr, /a"), Some(vec!["stderr".into(), "/a".into()]));
        assert!(open(&["/no/such/dir/log".into()]).err().unwrap().to_string().contains("/no/such/dir/log"));
    }
}
