//! Frames of a terminal's connection.

use std::borrow::Cow;

use bytes::Bytes;
use osb_protocol::execd::{TerminalMessage, frame};
use serde::Deserialize;
use tokio_tungstenite::tungstenite::Message;

use super::device::Size;
use super::ring::Source;

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    Stdin(Bytes),
    /// `None` is a signal that is not sent: such are ignored.
    Signal(Option<i32>),
    Resize(Size),
    Ping,
}

/// A text frame. One structure for all kinds, so that members that nobody knows are skipped, never stored.
#[derive(Deserialize)]
struct Text<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(default, borrow)]
    data: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    signal: Option<Cow<'a, str>>,
    #[serde(default)]
    cols: Option<u16>,
    #[serde(default)]
    rows: Option<u16>,
}

/// Reads a binary frame.
pub(crate) fn from_bytes(bytes: &Bytes) -> Result<Request, String> {
    match bytes.first() {
        Some(&frame::STDIN) => Ok(Request::Stdin(bytes.slice(1..))),
        Some(kind) => Err(format!("a binary frame of kind {kind} is not known; 0 is input")),
        None => Err("a binary frame must begin with its kind; 0 is input".to_owned()),
    }
}

/// Reads a text frame.
pub(crate) fn from_text(text: &str) -> Result<Request, String> {
    let text: Text<'_> =
        serde_json::from_str(text).map_err(|error| format!("the frame is not the expected JSON: {error}"))?;
    Ok(match &*text.kind {
        "stdin" => {
            Request::Stdin(text.data.map_or_else(Bytes::new, |data| data.into_owned().into_bytes().into()))
        }
        "signal" => Request::Signal(text.signal.and_then(|name| signal(&name))),
        "resize" => match (text.cols, text.rows) {
            (Some(cols @ 1..), Some(rows @ 1..)) => Request::Resize(Size { cols, rows }),
            _ => return Err("'cols' and 'rows' must be numbers from 1 to 65535".to_owned()),
        },
        "ping" => Request::Ping,
        _ => return Err("unknown type; 'stdin', 'signal', 'resize' and 'ping' are known".to_owned()),
    })
}

fn signal(name: &str) -> Option<i32> {
    Some(match name {
        "SIGINT" => libc::SIGINT,
        "SIGTERM" => libc::SIGTERM,
        "SIGKILL" => libc::SIGKILL,
        "SIGQUIT" => libc::SIGQUIT,
        "SIGHUP" => libc::SIGHUP,
        _ => return None,
    })
}

/// The beginning of a frame with output.
pub(super) fn output_head(source: Source) -> Vec<u8> {
    vec![match source {
        Source::Out => frame::STDOUT,
        Source::Err => frame::STDERR,
    }]
}

/// The beginning of a frame with output from `offset` on.
pub(super) fn replay_head(offset: u64) -> Vec<u8> {
    let mut head = vec![frame::REPLAY];
    head.extend(offset.to_be_bytes());
    head
}

/// A text frame.
pub(super) fn text(message: &TerminalMessage) -> Message {
    // These are structures of strings and numbers, which always have a JSON form.
    Message::text(serde_json::to_string(message).unwrap_or_default())
}

/// A text frame that tells of a failure.
pub(super) fn error(code: &str, error: impl Into<String>) -> Message {
    text(&TerminalMessage::Error { error: error.into(), code: code.to_owned() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_of_every_kind() {
        let stdin = |bytes: &[u8]| Ok(Request::Stdin(Bytes::copy_from_slice(bytes)));
        let bytes = |frame: &[u8]| from_bytes(&Bytes::copy_from_slice(frame));
        assert_eq!(bytes(b"\0\0\x03\xff"), stdin(b"\0\x03\xff"));
        assert_eq!(bytes(b"\0"), stdin(b""));
        assert_eq!(from_text(r#"{"type":"stdin","data":"ä\u0000\n","x":[{}]}"#), stdin("ä\0\n".as_bytes()));
        assert_eq!(from_text(r#"{"type":"stdin"}"#), stdin(b""));
        assert_eq!(from_text(r#"{"type":"signal","signal":"SIGQUIT"}"#), Ok(Request::Signal(Some(3))));
        assert_eq!(from_text(r#"{"type":"signal","signal":"SIGSEGV"}"#), Ok(Request::Signal(None)));
        let size = Request::Resize(Size { cols: 120, rows: 40 });
        assert_eq!(from_text(r#"{"cols":120,"rows":40,"type":"resize"}"#), Ok(size));
        assert_eq!(from_text(r#"{"type":"ping"}"#), Ok(Request::Ping));
        for bad in [&b""[..], b"\x01x", b"\x03", b"\xff"] {
            assert!(bytes(bad).is_err(), "{bad:?}");
        }
        for bad in [
            "",
            "{",
            "[]",
            "null",
            r#"{"type":1}"#,
            r#"{"type":"resize"}"#,
            r#"{"type":"Ping"}"#,
            r#"{}"#,
            r#"{"type":"resize","cols":0,"rows":1}"#,
            r#"{"type":"resize","cols":-1,"rows":1}"#,
            r#"{"type":"resize","cols":65536,"rows":1}"#,
            r#"{"type":"ping"} x"#,
            r#"{"type":"stdin","data":1}"#,
        ] {
            assert!(from_text(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn input_is_kept_byte_for_byte(input in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut frame = vec![frame::STDIN];
            frame.extend(&input);
            prop_assert_eq!(from_bytes(&frame.into()), Ok(Request::Stdin(input.into())));
        }

        #[test]
        fn text_is_kept_and_junk_is_refused(data in ".*", junk in ".*") {
            let frame = serde_json::json!({"type": "stdin", "data": data}).to_string();
            prop_assert_eq!(from_text(&frame), Ok(Request::Stdin(data.into_bytes().into())));
            let _ = from_text(&junk);
        }
    }
}
