//! Doors to what reads other people's bytes, for the fuzz targets in `fuzz/`. Compiled for them only.
#![allow(missing_docs)]

use std::io::{Read, Write};

use bytes::Bytes;
use futures_util::{FutureExt as _, stream};
use osb_protocol::execd as wire;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocket};
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::files::{multipart::Multipart, pattern, range};
use crate::pty::{frame, socket};

/// Name and content of each part.
pub type Parts = Vec<(Vec<u8>, Vec<u8>)>;

/// Reads a body that arrives in these pieces.
pub fn multipart(boundary: &[u8], pieces: Vec<Bytes>) -> Result<Parts, String> {
    let read = async {
        let body = stream::iter(pieces.into_iter().map(Ok::<_, std::convert::Infallible>));
        let mut multipart = Multipart::new(body, boundary);
        let mut parts = Vec::new();
        while let Some(name) = multipart.next_part().await? {
            let mut content = Vec::new();
            while let Some(piece) = multipart.chunk().await? {
                assert!(!piece.is_empty(), "an empty piece");
                content.extend_from_slice(&piece);
            }
            parts.push((name, content));
        }
        Ok(parts)
    };
    let read: Result<_, crate::files::multipart::MultipartError> =
        read.now_or_never().expect("nothing is waited for");
    read.map_err(|error| error.to_string())
}

pub fn boundary(content_type: &[u8]) -> Option<Vec<u8>> {
    crate::files::multipart::boundary(content_type).ok()
}

/// A compiled search pattern.
pub struct Glob(pattern::Pattern);

impl Glob {
    pub fn new(text: &str) -> Option<Self> {
        pattern::Pattern::new(text).ok().map(Self)
    }

    pub fn matches(&self, root: &[u8], relative: &[u8]) -> bool {
        self.0.matches(root, relative)
    }
}

/// First byte and length.
pub fn range(text: &str, size: u64) -> Option<(u64, u64)> {
    range::parse(text, size).ok()
}

/// What a terminal's client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    Stdin(Vec<u8>),
    Signal(Option<i32>),
    Resize(u16, u16),
    Ping,
    Bad,
}

fn asked(request: Result<frame::Request, String>) -> Asked {
    match request {
        Ok(frame::Request::Stdin(bytes)) => Asked::Stdin(bytes.to_vec()),
        Ok(frame::Request::Signal(number)) => Asked::Signal(number),
        Ok(frame::Request::Resize(size)) => Asked::Resize(size.cols, size.rows),
        Ok(frame::Request::Ping) => Asked::Ping,
        Err(_) => Asked::Bad,
    }
}

pub fn terminal_text(text: &str) -> Asked {
    asked(frame::from_text(text))
}

pub fn terminal_bytes(bytes: &[u8]) -> Asked {
    asked(frame::from_bytes(&Bytes::copy_from_slice(bytes)))
}

/// Hands bytes out in pieces of these sizes, and takes answers without keeping them.
struct Wire<'a> {
    bytes: &'a [u8],
    sizes: std::iter::Cycle<std::slice::Iter<'a, u8>>,
}

impl Read for Wire<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let size = self.sizes.next().map_or(1, |size| usize::from(*size).max(1));
        let size = size.min(self.bytes.len()).min(buffer.len());
        buffer[..size].copy_from_slice(&self.bytes[..size]);
        self.bytes = &self.bytes[size..];
        Ok(size)
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        Ok(buffer.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// All that a terminal's connection makes of these bytes, up to their end or the first that breaks the protocol,
/// which is named.
pub fn terminal_connection(bytes: &[u8], sizes: &[u8]) -> (Vec<Asked>, String) {
    let sizes = if sizes.is_empty() { &[255][..] } else { sizes };
    let wire = Wire { bytes, sizes: sizes.iter().cycle() };
    let mut socket = WebSocket::from_raw_socket(wire, Role::Server, Some(socket::config()));
    let mut all = Vec::new();
    loop {
        match socket.read() {
            Ok(Message::Text(text)) => all.push(terminal_text(&text)),
            Ok(Message::Binary(bytes)) => {
                assert!(bytes.len() <= socket::LARGEST_MESSAGE);
                all.push(terminal_bytes(&bytes));
            }
            Ok(_) => {}
            Err(
                Error::ConnectionClosed
                | Error::AlreadyClosed
                | Error::Protocol(ProtocolError::ResetWithoutClosingHandshake),
            ) => {
                return (all, String::new());
            }
            Err(error) => return (all, error.to_string()),
        }
    }
}

/// Reads a body as each of the requests of commands, sessions and files.
pub fn bodies(body: &[u8]) {
    use std::collections::BTreeMap;
    let _ = crate::http::parse_json::<wire::CommandRequest>(body);
    let _ = crate::http::parse_json::<wire::CreateSessionRequest>(body);
    let _ = crate::http::parse_json::<wire::RunInSessionRequest>(body);
    let _ = crate::http::parse_json::<wire::UploadMetadata>(body);
    let _ = crate::http::parse_json::<Vec<wire::Rename>>(body);
    let _ = crate::http::parse_json::<BTreeMap<String, wire::Permission>>(body);
    let _ = crate::http::parse_json::<BTreeMap<String, wire::Replacement>>(body);
}
