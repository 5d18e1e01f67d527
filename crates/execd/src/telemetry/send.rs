//! One export: a connection, a request, an answer of which little is read.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::Settings;

/// Of an answer's head no more is kept.
const MOST_HEAD: usize = 16 << 10;
/// Of an answer's body no more is read.
const MOST_BODY: usize = 64 << 10;

/// What became of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The collector has it.
    Done,
    /// It can be sent again.
    Later,
    /// The collector will never take it.
    Refused,
}

/// Sends exports and tells of trouble once, not each time.
pub(super) struct Exporter {
    endpoint: Uri,
    headers: http::HeaderMap,
    timeout: Duration,
    in_trouble: bool,
}

impl Exporter {
    pub(super) fn new(settings: &Settings) -> Self {
        let mut headers: http::HeaderMap = settings.headers.iter().cloned().collect();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        let agent = concat!("opensandbox-execd/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        let host = settings.endpoint.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
        headers.extend(host.map(|host| (header::HOST, host)));
        Self { endpoint: settings.endpoint.clone(), headers, timeout: settings.timeout, in_trouble: false }
    }

    pub(super) async fn send(&mut self, message: Vec<u8>) -> Outcome {
        let result = match tokio::time::timeout(self.timeout, self.post(message)).await {
            Ok(result) => result,
            Err(_) => Err("it did not answer in time".to_owned()),
        };
        let (outcome, trouble) = match result {
            Ok(status) if status.is_success() => (Outcome::Done, None),
            Ok(status @ (StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)) => {
                (Outcome::Later, Some(format!("it answered {status}")))
            }
            Ok(status) if status.is_server_error() => (Outcome::Later, Some(format!("it answered {status}"))),
            Ok(status) => (Outcome::Refused, Some(format!("it answered {status}; these metrics are lost"))),
            Err(error) => (Outcome::Later, Some(error)),
        };
        let collector = self.endpoint.authority().map_or("", http::uri::Authority::as_str);
        match trouble {
            Some(trouble) if !self.in_trouble => {
                tracing::warn!(collector, trouble, "metrics could not be exported");
            }
            None if self.in_trouble => tracing::info!(collector, "metrics are exported again"),
            _ => {}
        }
        self.in_trouble = outcome != Outcome::Done;
        outcome
    }

    async fn post(&self, message: Vec<u8>) -> Result<StatusCode, String> {
        let host = self.endpoint.host().unwrap_or_default();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let failed = |error: &dyn std::fmt::Display| format!("it cannot be reached: {error}");
        let stream = TcpStream::connect((host, self.endpoint.port_u16().unwrap_or(80)))
            .await
            .map_err(|error| failed(&error))?;
        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(MOST_HEAD)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| failed(&error))?;
        let mut request = Request::new(Full::new(Bytes::from(message)));
        *request.method_mut() = Method::POST;
        if let Some(target) = self.endpoint.path_and_query() {
            *request.uri_mut() = Uri::from(target.clone());
        }
        *request.headers_mut() = self.headers.clone();
        let exchange = async {
            let mut answer = sender.send_request(request).await.map_err(|error| failed(&error))?;
            let mut read = 0;
            // The body says nothing that would be used; a short one lets the connection end in peace.
            while read < MOST_BODY
                && let Some(Ok(frame)) = answer.frame().await
            {
                read += frame.data_ref().map_or(0, Bytes::len);
            }
            Ok(answer.status())
        };
        tokio::pin!(connection);
        tokio::pin!(exchange);
        tokio::select! {
            result = &mut exchange => result,
            // The connection ends with its answer, which may be there already.
            _ = &mut connection => exchange.await,
        }
    }
}
