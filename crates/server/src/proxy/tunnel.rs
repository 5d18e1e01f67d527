//! Bytes both ways between two streams, after a switch of protocols.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

const BUFFER: usize = 16 * 1024;

/// Joins two streams until both ends have closed, one of them fails, or one has closed and the other stays silent
/// for `linger`.
pub(super) struct Tunnel<A, B> {
    client: A,
    backend: B,
    up: Pump,
    down: Pump,
    linger: Duration,
    /// Runs once one direction has ended.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<A, B> Tunnel<A, B>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    /// `early` is what the backend sent together with its answer.
    pub(super) fn new(client: A, backend: B, early: &Bytes, linger: Duration) -> Self {
        Self { client, backend, up: Pump::new(&[]), down: Pump::new(early), linger, timer: None }
    }
}

impl<A, B> Future for Tunnel<A, B>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    type Output = io::Result<()>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let moved = this.up.moved + this.down.moved;
        let up = this.up.poll(cx, &mut this.client, &mut this.backend)?;
        let down = this.down.poll(cx, &mut this.backend, &mut this.client)?;
        if up.is_ready() && down.is_ready() {
            return Poll::Ready(Ok(()));
        }
        if up.is_ready() || down.is_ready() {
            let linger = this.linger;
            let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(linger)));
            if this.up.moved + this.down.moved != moved {
                timer.as_mut().reset(Instant::now() + linger);
            }
            ready!(timer.as_mut().poll(cx));
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    }
}

/// One direction.
struct Pump {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    moved: u64,
    dirty: bool,
    state: PumpState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PumpState {
    Open,
    /// The reader has ended; what is left is written, then the end passed on.
    Closing,
    Done,
}

impl Pump {
    fn new(early: &[u8]) -> Self {
        let mut buffer = vec![0; BUFFER.max(early.len())].into_boxed_slice();
        buffer[..early.len()].copy_from_slice(early);
        Self { buffer, start: 0, end: early.len(), moved: 0, dirty: false, state: PumpState::Open }
    }

    fn poll<R, W>(&mut self, cx: &mut Context<'_>, reader: &mut R, writer: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            while self.start < self.end {
                let waiting = &self.buffer[self.start..self.end];
                let written = ready!(Pin::new(&mut *writer).poll_write(cx, waiting))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.start += written;
                self.moved += written as u64;
                self.dirty = true;
            }
            match self.state {
                PumpState::Done => return Poll::Ready(Ok(())),
                PumpState::Closing => {
                    ready!(Pin::new(&mut *writer).poll_shutdown(cx))?;
                    self.state = PumpState::Done;
                }
                PumpState::Open => {
                    let mut buffer = ReadBuf::new(&mut self.buffer);
                    match Pin::new(&mut *reader).poll_read(cx, &mut buffer) {
                        Poll::Ready(read) => {
                            read?;
                            (self.start, self.end) = (0, buffer.filled().len());
                            if self.end == 0 {
                                self.state = PumpState::Closing;
                            }
                        }
                        Poll::Pending => {
                            if self.dirty {
                                ready!(Pin::new(&mut *writer).poll_flush(cx))?;
                                self.dirty = false;
                            }
                            return Poll::Pending;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn passes_bytes_and_ends_both_ways() {
        let (mut client, near) = duplex(64);
        let (mut backend, far) = duplex(64);
        let early = Bytes::from_static(b"early ");
        let tunnel = tokio::spawn(Tunnel::new(near, far, &early, Duration::from_secs(60)));
        let payload = vec![7_u8; 100_000];
        let (sent, echoed) = tokio::join!(
            async {
                client.write_all(&payload).await.unwrap();
                client.shutdown().await.unwrap();
                let mut all = Vec::new();
                client.read_to_end(&mut all).await.unwrap();
                all
            },
            async {
                let mut all = Vec::new();
                backend.read_to_end(&mut all).await.unwrap();
                // Half-closed: an answer still comes through.
                backend.write_all(b"answer").await.unwrap();
                backend.shutdown().await.unwrap();
                all
            }
        );
        assert_eq!(sent, b"early answer");
        assert_eq!(echoed, payload);
        tunnel.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_silent_end_does_not_keep_the_other() {
        let (client, near) = duplex(64);
        let (mut backend, far) = duplex(64);
        let tunnel = tokio::spawn(Tunnel::new(near, far, &Bytes::new(), Duration::from_millis(20)));
        drop(client);
        assert_eq!(backend.read(&mut [0; 8]).await.unwrap(), 0);
        tunnel.await.unwrap().unwrap();
        assert!(backend.write_all(b"x").await.is_err());
    }
}
