//! The daemon's own log: one JSON object per line. Never holds command texts, headers or tokens.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Writes events to a file; spans are not followed.
struct JsonLines {
    level: Level,
    out: Mutex<File>,
    spans: AtomicU64,
}

/// Sends the log to `path`, or to `fallback` when there is none. A second call changes nothing.
///
/// # Errors
/// The file cannot be opened.
pub fn install(level: Level, path: Option<&Path>, fallback: File) -> std::io::Result<()> {
    let out = match path {
        Some(path) => File::options().append(true).create(true).open(path)?,
        None => fallback,
    };
    let lines = JsonLines { level, out: Mutex::new(out), spans: AtomicU64::new(1) };
    // Fails only when a log is installed already, as in tests.
    let _ = tracing::subscriber::set_global_default(lines);
    Ok(())
}

/// Numbers of the `--log-level` flag.
#[must_use]
pub fn level(number: i64) -> Level {
    match number {
        ..=3 => Level::ERROR,
        4 => Level::WARN,
        5 | 6 => Level::INFO,
        _ => Level::DEBUG,
    }
}

impl Subscriber for JsonLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
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
        let metadata = event.metadata();
        let mut fields = Fields(Map::new());
        fields.text("level", metadata.level().as_str().to_ascii_lowercase());
        fields.text("ts", jiff::Timestamp::now().to_string());
        fields.text("logger", metadata.target().to_owned());
        event.record(&mut fields);
        let mut line = String::new();
        if writeln!(line, "{}", Value::Object(fields.0)).is_ok()
            && let Ok(mut out) = self.out.lock()
        {
            // A log that cannot be written has nowhere to say so.
            let _ = out.write_all(line.as_bytes());
        }
    }
}

struct Fields(Map<String, Value>);

impl Fields {
    fn text(&mut self, name: &str, value: String) {
        self.0.insert(if name == "message" { "msg" } else { name }.to_owned(), Value::String(value));
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.text(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field.name(), value.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_lines_of_json() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let out = File::options().append(true).create(true).open(&path).unwrap();
        let lines = JsonLines { level: Level::INFO, out: Mutex::new(out), spans: AtomicU64::new(1) };
        tracing::subscriber::with_default(lines, || {
            tracing::info!(port = 7, name = "a\"b", "started");
            tracing::debug!("not shown");
        });
        let text = std::fs::read_to_string(path).unwrap();
        let line: Value = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!(
            (&line["level"], &line["msg"], &line["name"]),
            (&"info".into(), &"started".into(), &"a\"b".into())
        );
        assert_eq!(line["port"], "7");
    }
}
