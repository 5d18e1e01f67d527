//! One line per request for the access log. Whether anybody reads them is the logging's affair.

use std::net::SocketAddr;
use std::time::Instant;

use axum::extract::{ConnectInfo, Request};
use http::{HeaderValue, Method, StatusCode};
use tracing::Level;

/// Target of these lines, by which the logging sends them to a file of their own.
pub const TARGET: &str = "access";

/// A request under way. The query is left out: it may hold what must not be written down.
pub(crate) struct Access {
    began: Instant,
    method: Method,
    path: String,
    peer: Option<SocketAddr>,
}

impl Access {
    /// Nothing when nobody reads the lines.
    pub(crate) fn begin(request: &Request) -> Option<Self> {
        tracing::enabled!(target: TARGET, Level::INFO).then(|| Self {
            began: Instant::now(),
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            peer: request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0),
        })
    }

    /// Writes the line as soon as the head of the answer is known.
    pub(crate) fn end(self, status: StatusCode, id: &HeaderValue) {
        let Self { began, method, path, peer } = self;
        let peer = peer.map_or_else(|| "-".to_owned(), |peer| peer.to_string());
        let (status, id) = (status.as_u16(), id.to_str().unwrap_or("-"));
        let millis = began.elapsed().as_secs_f64() * 1000.0;
        tracing::info!(target: TARGET, "[{id}] {peer} {method} {path:?} {status} {millis:.3} ms");
    }
}
