//! Events as bytes: a compact JSON object and two newlines.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use osb_protocol::execd::{Event, EventKind, ExecutionError};

/// Which pipe a text came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Unix time in milliseconds.
#[must_use]
pub fn unix_millis() -> i64 {
    // A clock before 1970 gives 0 rather than a failure.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Opening of an output event, up to the text's first byte.
#[must_use]
pub fn prefix(source: Source) -> &'static [u8] {
    match source {
        Source::Stdout => br#"{"type":"stdout","text":""#,
        Source::Stderr => br#"{"type":"stderr","text":""#,
    }
}

/// Closing of an output event, from the text's end. Made once per read, not per line.
#[must_use]
pub fn suffix(now: i64) -> Vec<u8> {
    format!("\",\"timestamp\":{now}}}\n\n").into_bytes()
}

/// Appends an event.
pub fn push(out: &mut Vec<u8>, event: &Event) {
    // Writing a struct of strings and numbers into memory has no way to fail.
    let _ = serde_json::to_writer(&mut *out, event);
    out.extend_from_slice(b"\n\n");
}

/// The first event: its text is the id the client asks with later.
pub fn push_init(out: &mut Vec<u8>, id: &str) {
    push(out, &Event { kind: EventKind::Init, text: Some(id.to_owned()), ..now() });
}

/// A sign of life.
pub fn push_ping(out: &mut Vec<u8>) {
    push(out, &Event { kind: EventKind::Ping, text: Some("pong".to_owned()), ..now() });
}

/// Success. The time is left out when it is zero.
pub fn push_complete(out: &mut Vec<u8>, took: Duration) {
    let millis = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    let execution_time = Some(millis).filter(|millis| *millis > 0);
    push(out, &Event { kind: EventKind::ExecutionComplete, execution_time, ..now() });
}

/// Failure.
pub fn push_error(out: &mut Vec<u8>, error: ExecutionError) {
    push(out, &Event { kind: EventKind::Error, error: Some(error), ..now() });
}

fn now() -> Event {
    Event { timestamp: unix_millis(), ..Event::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_their_wire_form() {
        let mut out = prefix(Source::Stderr).to_vec();
        out.extend_from_slice(b"x");
        out.extend(suffix(7));
        assert_eq!(out, b"{\"type\":\"stderr\",\"text\":\"x\",\"timestamp\":7}\n\n");
        out.clear();
        push_complete(&mut out, Duration::from_micros(900));
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with(r#"{"type":"execution_complete","timestamp":"#), "{text}");
        assert!(text.ends_with("}\n\n"));
    }
}
