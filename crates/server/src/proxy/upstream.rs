//! One HTTP/1.1 connection into a sandbox, driven by whoever waits for it.
//!
//! No task runs behind a connection: the client's own task polls it while it waits for the answer and while it
//! passes the body on. A request so costs no hand-over between threads, and dropping the response, for whatever
//! reason, closes the connection.

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use osb_runtime::Stream;
use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::pool::{Key, Pool};

type Connection = http1::Connection<TokioIo<Metered>, Body>;

/// An open connection and its sender of requests.
pub(super) struct Upstream {
    sender: http1::SendRequest<Body>,
    /// `None` once it has come to its end.
    connection: Option<Box<Connection>>,
    traffic: Arc<Traffic>,
    fd: RawFd,
}

/// Why there is no response.
#[derive(Debug)]
pub(super) enum Failure {
    /// The connection had ended before it took the request, which comes back untouched.
    Unsent(Box<Request<Body>>),
    /// Nothing moved in either direction for too long.
    Timeout,
    /// The connection ended without a byte of an answer.
    Unanswered(hyper::Error),
    /// The connection ended within the answer, or did not speak HTTP.
    Broken(hyper::Error),
}

impl Upstream {
    /// Makes a connection out of a fresh stream.
    pub(super) async fn new(stream: Stream) -> Result<Self, hyper::Error> {
        let fd = match &stream {
            Stream::Tcp(tcp) => {
                // Heads and small bodies go out in one write; waiting for more to send only delays them. A socket
                // that refuses the option works all the same.
                let _ = tcp.set_nodelay(true);
                tcp.as_raw_fd()
            }
            Stream::Unix(unix) => unix.as_raw_fd(),
        };
        let traffic = Arc::<Traffic>::default();
        let metered = Metered { stream, traffic: traffic.clone() };
        let (sender, connection) = http1::Builder::new().handshake(TokioIo::new(metered)).await?;
        Ok(Self { sender, connection: Some(Box::new(connection)), traffic, fd })
    }

    /// Whether the connection is still open and silent, asked of the kernel: the reactor may not have heard yet.
    pub(super) fn is_fresh(&self) -> bool {
        if self.connection.is_none() {
            return false;
        }
        // SAFETY: the descriptor belongs to the socket inside `self.connection`, which is alive (see above) and is
        // closed nowhere else; it is not kept beyond this call.
        let socket = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let mut byte = [0_u8; 1];
        let peeked = rustix::net::recv(socket, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        matches!(peeked, Err(rustix::io::Errno::AGAIN))
    }

    /// Sends a request and waits for the head of its response, as long as bytes move now and then.
    pub(super) async fn exchange(
        &mut self,
        request: Request<Body>,
        patience: Duration,
    ) -> Result<Response<Incoming>, Failure> {
        let mut answer = pin!(self.sender.try_send_request(request));
        let connection = &mut self.connection;
        let traffic = &self.traffic;
        let received_before = traffic.received();
        let mut seen = traffic.moved();
        let mut timer = pin!(tokio::time::sleep(patience));
        poll_fn(|cx| {
            let ended = connection.as_mut().is_some_and(|open| open.poll_without_shutdown(cx).is_ready());
            match answer.as_mut().poll(cx) {
                Poll::Ready(Ok(response)) => {
                    // A connection that switched protocols ends too, but its stream is still wanted.
                    if ended && response.status() != http::StatusCode::SWITCHING_PROTOCOLS {
                        *connection = None;
                    }
                    return Poll::Ready(Ok(response));
                }
                Poll::Ready(Err(mut error)) => {
                    *connection = None;
                    return Poll::Ready(Err(match error.take_message() {
                        Some(request) => Failure::Unsent(Box::new(request)),
                        None if traffic.received() == received_before => {
                            Failure::Unanswered(error.into_error())
                        }
                        None => Failure::Broken(error.into_error()),
                    }));
                }
                Poll::Pending if ended => {
                    // Ended with the request still in its queue: dropping it hands the request back.
                    *connection = None;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Pending => {}
            }
            while timer.as_mut().poll(cx).is_ready() {
                let now = traffic.moved();
                if now == seen {
                    return Poll::Ready(Err(Failure::Timeout));
                }
                seen = now;
                timer.as_mut().reset(Instant::now() + patience);
            }
            Poll::Pending
        })
        .await
    }

    /// After a `101`: the bare stream, and what was read beyond the head.
    pub(super) fn into_stream(self) -> Option<(Stream, Bytes)> {
        let parts = self.connection?.into_parts();
        Some((parts.io.into_inner().stream, parts.read_buf))
    }

    /// Polls the connection; false when it has ended.
    fn drive(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        if connection.poll_without_shutdown(cx).is_ready() {
            self.connection = None;
            return false;
        }
        true
    }
}

/// A response body on its way to the client; gives the connection back to the pool at its end.
pub(super) struct Relay {
    incoming: Incoming,
    upstream: Option<Upstream>,
    home: Option<(Arc<Pool>, Key)>,
    broken: Option<hyper::Error>,
}

impl Relay {
    pub(super) fn new(incoming: Incoming, upstream: Upstream, pool: Arc<Pool>, key: Key) -> Self {
        Self { incoming, upstream: Some(upstream), home: Some((pool, key)), broken: None }
    }

    /// Gives the connection back if the response is complete, which for one without a body it is at once: its body
    /// will never be polled.
    pub(super) fn settle(&mut self, cx: &mut Context<'_>) {
        if self.incoming.is_end_stream() {
            self.finish(cx);
        }
    }

    fn finish(&mut self, cx: &mut Context<'_>) {
        let Some(mut upstream) = self.upstream.take() else { return };
        // A connection whose request is still being sent is not ready, and is closed.
        if upstream.drive(cx)
            && upstream.sender.is_ready()
            && let Some((pool, key)) = self.home.take()
        {
            pool.put(key, upstream);
        }
    }

    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.incoming).poll_frame(cx);
        match polled {
            Poll::Ready(Some(Ok(_))) => self.settle(cx),
            Poll::Ready(None) => self.finish(cx),
            Poll::Ready(Some(Err(error))) => {
                self.upstream = None;
                self.broken = Some(error);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Pending => {}
        }
        polled
    }
}

impl HttpBody for Relay {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        // The server drops what it has not sent when a body fails. Told a turn later, it has sent head and chunks
        // that came before the break.
        if let Some(error) = this.broken.take() {
            return Poll::Ready(Some(Err(error)));
        }
        // First the body, which tells the connection that more is wanted; then the connection, which reads it.
        let polled = this.poll_incoming(cx);
        if polled.is_ready() || this.broken.is_some() {
            return polled;
        }
        if let Some(upstream) = &mut this.upstream
            && !upstream.drive(cx)
        {
            this.upstream = None;
        }
        this.poll_incoming(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// Bytes that went through a connection.
#[derive(Default)]
struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Traffic {
    fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    fn moved(&self) -> u64 {
        self.sent.load(Ordering::Relaxed) + self.received()
    }
}

/// A stream that counts what goes through it, so that slow and dead can be told apart.
struct Metered {
    stream: Stream,
    traffic: Arc<Traffic>,
}

impl Metered {
    fn count_sent(&self, bytes: usize) {
        self.traffic.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.traffic.received.fetch_add((buf.filled().len() - before) as u64, Ordering::Relaxed);
        polled
    }
}

impl AsyncWrite for Metered {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        if let Poll::Ready(Ok(bytes)) = polled {
            self.count_sent(bytes);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        if let Poll::Ready(Ok(bytes)) = polled {
            self.count_sent(bytes);
        }
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
