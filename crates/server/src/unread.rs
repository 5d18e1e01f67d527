//! Request bodies that are answered before they are read.
//!
//! Many answers need no body: a missing key, a path that does not exist, a sandbox that is gone. A client may send
//! the head first and the body a moment later. To close the connection under it then would lose the answer, or
//! break the next request of a client that takes the connection for reusable. So what the handler left is read and
//! thrown away, beside the answer, and the connection serves on.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;

/// How long a client may go on sending what nobody wants. Afterwards the connection is closed.
const PATIENCE: Duration = Duration::from_secs(10);

/// A body whose rest is read when it is dropped; or, where the client sends it only when told to, is not asked for.
#[derive(Debug)]
pub(crate) struct ReadToEnd<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    /// Taken when dropped.
    body: Option<B>,
    /// Set when a body that the client holds back was not asked for.
    unasked: Option<Arc<AtomicBool>>,
}

impl<B> ReadToEnd<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    pub(crate) fn new(body: B) -> Self {
        Self { body: Some(body), unasked: None }
    }

    /// For a client that awaits leave to send (`Expect: 100-continue`). `unasked` turns true when it got none: then
    /// whether a body follows the answer is open, and the connection cannot be used again.
    pub(crate) fn held_back(body: B, unasked: Arc<AtomicBool>) -> Self {
        Self { body: Some(body), unasked: Some(unasked) }
    }
}

/// Whether the client awaits leave to send its body.
pub(crate) fn is_held_back(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

impl<B> Body for ReadToEnd<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl<B> Drop for ReadToEnd<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        if let Some(unasked) = &self.unasked {
            unasked.store(true, Ordering::Relaxed);
            return;
        }
        // Outside of a runtime the connection is gone too.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(tokio::time::timeout(PATIENCE, drain(body)));
        }
    }
}

async fn drain<B: Body + Unpin>(mut body: B) {
    // An error is the end as well: of the connection.
    while let Some(Ok(_)) = body.frame().await {}
}
