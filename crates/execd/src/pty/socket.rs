//! From a request to a WebSocket.

use http::header::{CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use crate::http::ApiError;

/// Largest message that is taken: a mebibyte of input and its kind.
pub(crate) const LARGEST_MESSAGE: usize = (1 << 20) + 1;
/// Room for what is read at once; thousands of connections must not cost much.
const READ: usize = 8 << 10;

/// A terminal's connection.
pub(super) type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// A request for a WebSocket that keeps the rules.
#[derive(Debug)]
pub(super) struct Handshake {
    accept: HeaderValue,
    protocol: Option<HeaderValue>,
}

impl Handshake {
    /// Looks at a request's headers.
    ///
    /// # Errors
    /// 400 when it asks for something else.
    pub(super) fn new(headers: &HeaderMap) -> Result<Self, ApiError> {
        let has = |name: HeaderName, word: &str| {
            let values = headers.get_all(name);
            let mut words = values.iter().filter_map(|value| value.to_str().ok()).flat_map(|v| v.split(','));
            words.any(|other| other.trim().eq_ignore_ascii_case(word))
        };
        if !has(CONNECTION, "upgrade") || !has(UPGRADE, "websocket") {
            return Err(ApiError::invalid(
                "this is a WebSocket: the headers 'Connection: Upgrade' and 'Upgrade: websocket' are required",
            ));
        }
        if !has(header::SEC_WEBSOCKET_VERSION, "13") {
            return Err(ApiError::invalid("the header 'Sec-WebSocket-Version' must be 13"));
        }
        let key = headers.get(SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes).unwrap_or_default();
        let accept = (!key.is_empty()).then(|| HeaderValue::try_from(derive_accept_key(key)));
        let Some(Ok(accept)) = accept else {
            return Err(ApiError::invalid("the header 'Sec-WebSocket-Key' is required"));
        };
        // There is but one thing to talk here, whatever it is called; browsers insist on an answer.
        let offered = headers.get(SEC_WEBSOCKET_PROTOCOL).and_then(|value| value.to_str().ok());
        let first = offered.and_then(|names| names.split(',').map(str::trim).find(|name| !name.is_empty()));
        let protocol = first.and_then(|name| HeaderValue::from_str(name).ok());
        Ok(Self { accept, protocol })
    }

    /// The answer that switches protocols.
    pub(super) fn response<B: Default>(self) -> Response<B> {
        let mut response = Response::new(B::default());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_ACCEPT, self.accept);
        if let Some(protocol) = self.protocol {
            headers.insert(SEC_WEBSOCKET_PROTOCOL, protocol);
        }
        response
    }
}

/// The WebSocket on a switched connection.
pub(super) async fn open(upgraded: Upgraded) -> Socket {
    WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(config())).await
}

/// What a connection may cost.
pub(crate) fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ)
        .write_buffer_size(0)
        .max_message_size(Some(LARGEST_MESSAGE))
        .max_frame_size(Some(LARGEST_MESSAGE))
}
