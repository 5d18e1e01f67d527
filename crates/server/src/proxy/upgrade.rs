//! Switches of protocol: which requests ask for one, and how a refused WebSocket is told so.

use std::time::Duration;

use axum::body::Body;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use osb_runtime::Stream;
use sha1::{Digest, Sha1};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::headers::{has_token, tokens};
use super::tunnel::Tunnel;

/// Closes a tunnel whose one end has closed: a WebSocket has no half-closed state.
const WEBSOCKET_LINGER: Duration = Duration::from_secs(2);
/// Other protocols may go on for long in one direction.
const OTHER_LINGER: Duration = Duration::from_secs(300);
/// How long a refused client has to answer the close frame.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// What RFC 6455 appends to the key.
const WEBSOCKET_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// Longest reason that fits into a control frame.
const MAX_REASON: usize = 123;

/// What a request wants beside an answer.
#[derive(Debug)]
pub(super) enum Wish {
    /// Nothing.
    Plain,
    /// A WebSocket.
    WebSocket(Handshake),
    /// Some other protocol.
    Other(HeaderValue),
    /// A WebSocket, but not in a way that can be had.
    Malformed(StatusCode, &'static str),
}

/// What it takes to answer a WebSocket handshake without the backend.
#[derive(Debug, Clone)]
pub(super) struct Handshake {
    accept: HeaderValue,
    protocol: Option<HeaderValue>,
}

/// Status codes of close frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseCode {
    /// The backend refused the handshake.
    Policy = 1008,
    /// The backend cannot be reached.
    Internal = 1011,
}

/// Finds out what a request wants.
pub(super) fn wish(request: &Request<Body>) -> Wish {
    let headers = request.headers();
    let Some(protocol) = headers.get(UPGRADE) else { return Wish::Plain };
    let asked = request.version() == Version::HTTP_11 && has_token(headers, &CONNECTION, "upgrade");
    if has_token(headers, &UPGRADE, "websocket") {
        return match websocket(request, asked) {
            Ok(handshake) => Wish::WebSocket(handshake),
            Err((status, message)) => Wish::Malformed(status, message),
        };
    }
    // HTTP/2 over clear text would end what this proxy knows of requests, and is deprecated; like any protocol a
    // server does not want, it is ignored. So is a switch in a request that carries a body.
    if asked && !has_body(headers) && !has_token(headers, &UPGRADE, "h2c") {
        Wish::Other(protocol.clone())
    } else {
        Wish::Plain
    }
}

fn websocket(request: &Request<Body>, asked: bool) -> Result<Handshake, (StatusCode, &'static str)> {
    const BAD: StatusCode = StatusCode::BAD_REQUEST;
    let headers = request.headers();
    if !asked {
        return Err((BAD, "a WebSocket needs HTTP/1.1 and 'Connection: Upgrade'"));
    }
    if request.method() != Method::GET || has_body(headers) {
        return Err((BAD, "a WebSocket is opened by GET without a body"));
    }
    if headers.get(SEC_WEBSOCKET_VERSION).is_none_or(|version| version != "13") {
        return Err((
            StatusCode::UPGRADE_REQUIRED,
            "only version 13 of the WebSocket protocol is spoken here",
        ));
    }
    let mut keys = headers.get_all(SEC_WEBSOCKET_KEY).iter();
    let (Some(key), None) = (keys.next(), keys.next()) else {
        return Err((BAD, "a WebSocket needs exactly one Sec-WebSocket-Key"));
    };
    if STANDARD.decode(key.as_bytes()).map_or(0, |nonce| nonce.len()) != 16 {
        return Err((BAD, "Sec-WebSocket-Key is not 16 bytes in base64"));
    }
    let protocol = headers
        .get(SEC_WEBSOCKET_PROTOCOL)
        .and_then(|offered| tokens(offered).next())
        .and_then(|first| HeaderValue::from_str(first).ok());
    let accept = accept_key(key.as_bytes()).ok_or((BAD, "Sec-WebSocket-Key cannot be answered"))?;
    Ok(Handshake { accept, protocol })
}

fn has_body(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) || headers.get(CONTENT_LENGTH).is_some_and(|length| length != "0")
}

fn accept_key(key: &[u8]) -> Option<HeaderValue> {
    let digest = Sha1::new().chain_update(key).chain_update(WEBSOCKET_GUID).finalize();
    HeaderValue::from_str(&STANDARD.encode(digest)).ok()
}

/// Puts the wish into a request whose hop-by-hop headers are gone.
pub(super) fn ask(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}

/// Joins client and backend as soon as the client has its `101`.
pub(super) fn join(client: OnUpgrade, backend: Stream, early: Bytes, websocket: bool) {
    let linger = if websocket { WEBSOCKET_LINGER } else { OTHER_LINGER };
    tokio::spawn(async move {
        match client.await {
            Ok(upgraded) => {
                // A tunnel ends by its peers' doing; how is theirs to know.
                let _ = Tunnel::new(TokioIo::new(upgraded), backend, &early, linger).await;
            }
            Err(error) => tracing::debug!(%error, "client left before its connection was switched"),
        }
    });
}

/// Accepts a WebSocket for the sole purpose of closing it: clients in browsers learn nothing of a refused
/// handshake, but they do read a close frame.
pub(super) fn refuse(
    client: OnUpgrade,
    handshake: Handshake,
    code: CloseCode,
    reason: &str,
) -> Response<Body> {
    let frame = close_frame(code, reason);
    tokio::spawn(async move {
        let Ok(upgraded) = client.await else { return };
        let mut stream = TokioIo::new(upgraded);
        let farewell = async {
            stream.write_all(&frame).await?;
            stream.flush().await?;
            stream.shutdown().await?;
            // Closing with unread bytes would reset the connection, and the frame be lost.
            let mut sink = [0; 1024];
            while stream.read(&mut sink).await? > 0 {}
            std::io::Result::Ok(())
        };
        // Whether the client heard it changes nothing.
        let _ = tokio::time::timeout(CLOSE_WAIT, farewell).await;
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    ask(headers, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, handshake.accept);
    if let Some(protocol) = handshake.protocol {
        // Browsers that offered some fail without one, and so never see the frame.
        headers.insert(SEC_WEBSOCKET_PROTOCOL, protocol);
    }
    response
}

fn close_frame(code: CloseCode, reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let reason = &reason.as_bytes()[..end];
    // FIN and opcode 8, then the length, which fits seven bits; servers do not mask.
    let mut frame = vec![0x88, 2 + reason.len() as u8];
    frame.extend_from_slice(&(code as u16).to_be_bytes());
    frame.extend_from_slice(reason);
    frame
}

/// Names the version in a `426`.
pub(super) const VERSION_HEADER: (HeaderName, HeaderValue) =
    (SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, headers: &[(&str, &str)]) -> Request<Body> {
        let mut builder = Request::builder().method(method).uri("/");
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(Body::empty()).unwrap()
    }

    const KEY: (&str, &str) = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
    const VERSION: (&str, &str) = ("sec-websocket-version", "13");

    #[test]
    fn accept_key_of_the_standard() {
        assert_eq!(accept_key(KEY.1.as_bytes()).unwrap(), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn websockets_in_any_case() {
        for (connection, upgrade) in
            [("Upgrade", "websocket"), ("keep-alive, upgrade", "WebSocket"), ("UPGRADE", "WEBSOCKET")]
        {
            let asking = request("GET", &[("connection", connection), ("upgrade", upgrade), KEY, VERSION]);
            assert!(matches!(wish(&asking), Wish::WebSocket(_)), "{connection} {upgrade}");
        }
    }

    #[test]
    fn malformed_websockets() {
        let connection = ("connection", "upgrade");
        let upgrade = ("upgrade", "websocket");
        for (case, status) in [
            (request("POST", &[connection, upgrade, KEY, VERSION]), 400),
            (request("GET", &[upgrade, KEY, VERSION]), 400),
            (request("GET", &[connection, upgrade, VERSION]), 400),
            (request("GET", &[connection, upgrade, KEY, KEY, VERSION]), 400),
            (request("GET", &[connection, upgrade, ("sec-websocket-key", "short"), VERSION]), 400),
            (request("GET", &[connection, upgrade, KEY]), 426),
            (request("GET", &[connection, upgrade, KEY, ("sec-websocket-version", "8")]), 426),
            (request("GET", &[connection, upgrade, KEY, VERSION, ("content-length", "1")]), 400),
        ] {
            let Wish::Malformed(got, _) = wish(&case) else { panic!("{case:?}") };
            assert_eq!(got, status, "{case:?}");
        }
    }

    #[test]
    fn other_protocols() {
        let connection = ("connection", "Upgrade");
        assert!(matches!(wish(&request("POST", &[connection, ("upgrade", "tcp")])), Wish::Other(_)));
        assert!(matches!(wish(&request("GET", &[("upgrade", "tcp")])), Wish::Plain));
        assert!(matches!(wish(&request("GET", &[connection])), Wish::Plain));
        assert!(matches!(wish(&request("GET", &[connection, ("upgrade", "h2c")])), Wish::Plain));
        let with_body = request("POST", &[connection, ("upgrade", "tcp"), ("content-length", "3")]);
        assert!(matches!(wish(&with_body), Wish::Plain));
    }

    #[test]
    fn reasons_are_cut_between_characters() {
        let frame = close_frame(CloseCode::Policy, &"é".repeat(100));
        assert_eq!(&frame[..4], [0x88, 2 + 122, 0x03, 0xf0]);
        assert_eq!(std::str::from_utf8(&frame[4..]).unwrap(), "é".repeat(61));
        assert_eq!(close_frame(CloseCode::Internal, "no"), [0x88, 4, 0x03, 0xf3, b'n', b'o']);
    }
}
