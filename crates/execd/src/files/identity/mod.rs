//! `/v1/filesystem/{uid}/{gid}/files…` and `/directories…`: the routes of [`super::router`] as somebody else.
//!
//! A request goes, unchanged but for its prefix, over a socket to a process of that identity ([`worker`]), which
//! serves it with the very handlers of the daemon. So every permission is the kernel's to check, and nothing that
//! the daemon holds can be reached: threads that only change their file system identity could open each descriptor
//! of the daemon by `/proc/self/fd`, and would keep its right to set capabilities and extended attributes.

mod worker;
mod workers;

pub(crate) use worker::{FLAG, run};

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::any;
use bytes::Bytes;
use http::header::{self, HeaderName};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use osb_protocol::execd::ACCESS_TOKEN_HEADER;

use self::workers::{Worker, Workers};
use crate::app::App;
use crate::http::ApiError;

/// Segments of a path before the part that the worker sees: an empty one, `v1`, `filesystem` and the two ids.
const PREFIX_SEGMENTS: usize = 5;

/// Headers of one hop, and what is none of the worker's business.
const NOT_FORWARDED: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    // The daemon has answered that itself.
    header::EXPECT,
    HeaderName::from_static(ACCESS_TOKEN_HEADER),
];

/// Whom a request wants to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Who {
    uid: u32,
    gid: u32,
}

impl Who {
    /// Decimal digits only. The largest number means "no change" to the kernel and is nobody's id.
    fn parse(uid: &str, gid: &str) -> Result<Self, ApiError> {
        let id = |name: &str, text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|id| digits && *id != u32::MAX).ok_or_else(|| {
                ApiError::invalid(format!("{name} {text:?}: give a decimal number from 0 to 4294967294"))
            })
        };
        Ok(Self { uid: id("uid", uid)?, gid: id("gid", gid)? })
    }
}

/// The module's routes.
pub(super) fn router() -> axum::Router<App> {
    let workers = Workers::default();
    let serve = move |State(app): State<App>, request: Request| {
        let workers = workers.clone();
        async move { forward(&workers, &app, request).await }
    };
    axum::Router::new()
        .route("/v1/filesystem/{uid}/{gid}/files", any(serve.clone()))
        .route("/v1/filesystem/{uid}/{gid}/files/{*rest}", any(serve.clone()))
        .route("/v1/filesystem/{uid}/{gid}/directories", any(serve.clone()))
        .route("/v1/filesystem/{uid}/{gid}/directories/{*rest}", any(serve))
}

async fn forward(workers: &Workers, app: &App, request: Request) -> Result<Response, ApiError> {
    let (mut head, body) = request.into_parts();
    let who;
    (who, head.uri) = split(&head.uri)?;
    head.extensions.clear();
    clean(&mut head.headers);
    head.headers.insert(header::HOST, HeaderValue::from_static("files"));
    if body.size_hint().exact().is_none() {
        // Without this the client leaves out a body whose length it does not know.
        head.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    let (worker, answer) = workers.send(who, app, Request::from_parts(head, body)).await?;
    let (mut head, body) = answer.into_parts();
    clean(&mut head.headers);
    head.extensions.clear();
    Ok(Response::from_parts(
        head,
        Body::new(Answer { body, ended: false, worker: Some(worker), workers: workers.clone() }),
    ))
}

/// Takes the identity off the path. Nothing is decoded: ids need no encoding, and the rest is the worker's.
fn split(uri: &Uri) -> Result<(Who, Uri), ApiError> {
    let text = uri.path_and_query().map_or("", PathAndQuery::as_str);
    let mut segments = text.splitn(PREFIX_SEGMENTS + 1, '/').skip(PREFIX_SEGMENTS - 2);
    let (uid, gid) = (segments.next().unwrap_or_default(), segments.next().unwrap_or_default());
    let who = Who::parse(uid, gid)?;
    let rest = format!("/{}", segments.next().unwrap_or_default()).parse::<PathAndQuery>();
    Ok((who, rest.map_err(|error| ApiError::invalid(format!("the path cannot be read: {error}")))?.into()))
}

fn clean(headers: &mut HeaderMap) {
    for name in NOT_FORWARDED {
        headers.remove(name);
    }
}

/// A worker's answer, which gives the worker back when it has been read to its end. Dropped before that, it ends
/// the worker's connection and thereby the worker.
struct Answer {
    body: Incoming,
    ended: bool,
    worker: Option<Worker>,
    workers: Workers,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        self.ended = frame.is_none();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if (self.ended || self.body.is_end_stream())
            && let Some(worker) = self.worker.take()
        {
            self.workers.give_back(worker);
        }
    }
}

/// The worker is gone, or never became who it should be.
fn unavailable(who: Who, reason: impl std::fmt::Display) -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        osb_protocol::execd::code::FILESYSTEM_IDENTITY_UNAVAILABLE,
        format!("files cannot be served as {}:{}: {reason}", who.uid, who.gid),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_decimal_numbers() {
        assert_eq!(Who::parse("0", "4294967294").unwrap(), Who { uid: 0, gid: 4_294_967_294 });
        for bad in ["", "4294967295", "4294967296", "-1", "+1", " 1", "1 ", "0x1", "1e3", "root", "1.0", "١"]
        {
            for (uid, gid) in [(bad, "1"), ("1", bad)] {
                let error = Who::parse(uid, gid).unwrap_err();
                assert_eq!((error.status.as_u16(), error.code), (400, "INVALID_REQUEST_BODY"), "{bad:?}");
            }
        }
    }

    #[test]
    fn the_rest_of_the_path_stays_as_it_is() {
        for (uri, rest) in [
            (
                "/v1/filesystem/1/2/files/info?path=%2Fa+b%25&path=/v1/filesystem/3/4",
                "/files/info?path=%2Fa+b%25&path=/v1/filesystem/3/4",
            ),
            ("http://host/v1/filesystem/1/2/directories", "/directories"),
        ] {
            assert_eq!(
                split(&uri.parse().unwrap()).unwrap(),
                (Who { uid: 1, gid: 2 }, rest.parse().unwrap())
            );
        }
    }
}
