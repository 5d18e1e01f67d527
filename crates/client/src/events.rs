//! Event streams, from bytes to events.
//!
//! A daemon sends each event as one line of JSON and a blank line. Standard SSE framing (`data: {…}`) is read
//! too, for gateways that translate. JSON text has no raw line breaks, so a line is the unit whatever the bytes'
//! grouping on the way.

use osb_protocol::error::ErrorBody;
use osb_protocol::execd::{Event, EventKind, ExecutionError};

use crate::lines::Lines;

/// Longest line taken. A daemon cuts output at 1 MiB, which JSON escapes may make six times as long.
const MAX_LINE: usize = 16 << 20;

/// Why a stream cannot be read on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// A line that should be an event is not.
    #[error("not an event: {0}")]
    NotAnEvent(String),
    /// A line without end.
    #[error("an event of more than 16 MiB")]
    TooLong,
}

/// Turns the bytes of a stream into events, however they are cut.
///
/// ```
/// use opensandbox::EventParser;
///
/// let mut parser = EventParser::new();
/// parser.push(b"{\"type\":\"stdout\",\"text\":\"hi\",\"timest");
/// assert!(parser.next_event()?.is_none());
/// parser.push(b"amp\":1}\n\n");
/// assert_eq!(parser.next_event()?.and_then(|event| event.text).as_deref(), Some("hi"));
/// # Ok::<(), opensandbox::ParseError>(())
/// ```
#[derive(Debug)]
pub struct EventParser {
    lines: Lines,
}

impl Default for EventParser {
    fn default() -> Self {
        Self { lines: Lines::new(MAX_LINE) }
    }
}

impl EventParser {
    /// A parser at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.lines.push(bytes);
    }

    /// The next event that is complete; `None` until more bytes come.
    ///
    /// # Errors
    /// When the bytes are no event stream.
    pub fn next_event(&mut self) -> Result<Option<Event>, ParseError> {
        while let Some(line) = self.lines.next_line().map_err(|_| ParseError::TooLong)? {
            if let Some(event) = parse_line(line)? {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// The end of the stream has come: the event that its last line may hold without a line end.
    ///
    /// # Errors
    /// When the rest is no event.
    pub fn finish(&mut self) -> Result<Option<Event>, ParseError> {
        match self.next_event()? {
            Some(event) => Ok(Some(event)),
            None => parse_line(self.lines.rest()),
        }
    }
}

fn parse_line(line: &[u8]) -> Result<Option<Event>, ParseError> {
    let line = line.trim_ascii();
    let json = match line.first() {
        None | Some(b':') => return Ok(None),
        Some(b'{') => line,
        Some(_) => match line.strip_prefix(b"data:") {
            Some(data) => data.trim_ascii(),
            None if is_sse_field(line) => return Ok(None),
            None => return Err(not_an_event(line)),
        },
    };
    if json.is_empty() {
        return Ok(None);
    }
    match serde_json::from_slice::<Event>(json) {
        Ok(event) => Ok(Some(event)),
        // A daemon that fails in the middle of an answer may append its error body to the stream.
        Err(_) => match serde_json::from_slice::<ErrorBody>(json) {
            Ok(body) => Ok(Some(failure(body))),
            Err(_) => Err(not_an_event(line)),
        },
    }
}

fn is_sse_field(line: &[u8]) -> bool {
    [&b"event:"[..], b"id:", b"retry:"].iter().any(|field| line.starts_with(field))
}

fn failure(body: ErrorBody) -> Event {
    Event {
        kind: EventKind::Error,
        error: Some(ExecutionError {
            ename: body.code,
            evalue: body.message.clone(),
            traceback: vec![body.message],
        }),
        ..Event::default()
    }
}

fn not_an_event(line: &[u8]) -> ParseError {
    let text = String::from_utf8_lossy(line);
    ParseError::NotAnEvent(text.chars().take(120).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(parser: &mut EventParser) -> Vec<Event> {
        std::iter::from_fn(|| parser.next_event().unwrap()).collect()
    }

    fn event(kind: EventKind, text: &str) -> Event {
        Event { kind, text: Some(text.to_owned()), timestamp: 1, ..Event::default() }
    }

    #[test]
    fn reads_bare_json_and_sse_framing() {
        for stream in [
            "{\"type\":\"init\",\"text\":\"a\",\"timestamp\":1}\n\n{\"type\":\"stdout\",\"text\":\"b\",\"timestamp\":1}\n\n",
            ": hello\r\nevent: x\r\nid: 3\r\ndata: {\"type\":\"init\",\"text\":\"a\",\"timestamp\":1}\r\n\r\ndata:{\"type\":\"stdout\",\"text\":\"b\",\"timestamp\":1}\r\n\r\nretry: 4\n",
        ] {
            let mut parser = EventParser::new();
            parser.push(stream.as_bytes());
            assert_eq!(all(&mut parser), [event(EventKind::Init, "a"), event(EventKind::Stdout, "b")]);
            assert_eq!(parser.finish(), Ok(None));
        }
    }

    #[test]
    fn last_line_needs_no_end() {
        let mut parser = EventParser::new();
        parser.push(b"{\"type\":\"execution_complete\",\"timestamp\":1}");
        assert_eq!(parser.next_event(), Ok(None));
        assert_eq!(parser.finish().unwrap().unwrap().kind, EventKind::ExecutionComplete);
        assert_eq!(parser.finish(), Ok(None));
    }

    #[test]
    fn unknown_kinds_pass_and_error_bodies_become_errors() {
        let mut parser = EventParser::new();
        parser.push(b"{\"type\":\"status\",\"text\":\"x\",\"timestamp\":1}\n\n{\"code\":\"RUNTIME_ERROR\",\"message\":\"m\"}");
        assert_eq!(parser.next_event().unwrap().unwrap().kind, EventKind::Unknown);
        assert_eq!(parser.next_event(), Ok(None));
        let last = parser.finish().unwrap().unwrap();
        assert_eq!((last.kind, last.error.unwrap().ename.as_str()), (EventKind::Error, "RUNTIME_ERROR"));
    }

    #[test]
    fn what_is_no_stream_is_refused() {
        for bad in ["<html>\n", "{\"type\":1}\n", "{\"type\":\"stdout\"\n", "data: x\n"] {
            let mut parser = EventParser::new();
            parser.push(bad.as_bytes());
            assert!(matches!(parser.next_event(), Err(ParseError::NotAnEvent(_))), "{bad}");
        }
        let mut parser = EventParser::new();
        for _ in 0..17 {
            parser.push(&[b'{'; 1 << 20]);
        }
        assert_eq!(parser.next_event(), Err(ParseError::TooLong));
    }

    proptest! {
        /// Any cut of the bytes gives the same events.
        #[test]
        fn cuts_do_not_matter(
            texts in prop::collection::vec(".*", 0..8),
            cuts in prop::collection::vec(1usize..40, 1..40),
            end in prop::bool::ANY,
        ) {
            let events: Vec<Event> = texts.iter().map(|text| event(EventKind::Stdout, text)).collect();
            let mut bytes = Vec::new();
            for event in &events {
                bytes.extend(serde_json::to_vec(event).unwrap());
                bytes.extend(b"\n\n");
            }
            if !end {
                bytes.truncate(bytes.len().saturating_sub(2));
            }
            let mut parser = EventParser::new();
            let mut seen = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                rest = later;
                parser.push(now);
                seen.extend(all(&mut parser));
            }
            seen.extend(parser.finish().unwrap());
            prop_assert_eq!(seen, events);
        }

        /// Whatever comes, the parser neither panics nor loops.
        #[test]
        fn any_bytes_are_survived(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..20)) {
            let mut parser = EventParser::new();
            for chunk in &chunks {
                parser.push(chunk);
                while let Ok(Some(_)) = parser.next_event() {}
            }
            let _ = parser.finish();
        }
    }
}
