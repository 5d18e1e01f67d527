//! The way of event bytes from the task that makes them to the connection.
//!
//! One buffer, filled by the writer and taken whole by the reader: what is ready at once leaves in one write. When
//! it is full the writer waits, so a slow client slows the program down instead of filling memory. When either
//! side is dropped the other one is told.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// The writer waits while more than this is unread. One push may go beyond it.
const FULL: usize = 256 << 10;
/// Buffers up to this size are used again.
const KEEP_CAPACITY: usize = 4 << 20;
const KEEP_BUFFERS: usize = 2;

#[derive(Debug, Default)]
struct State {
    buffer: Vec<u8>,
    spare: VecDeque<Vec<u8>>,
    ended: bool,
    abandoned: bool,
    /// Bytes at the beginning that may wait for company.
    opening: usize,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

type Shared = Arc<Mutex<State>>;

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    // The state is whole between any two statements of a holder, so a panic leaves nothing half done.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes both ends.
#[must_use]
pub fn feed() -> (Writer, Reader) {
    let shared = Shared::default();
    (Writer { shared: Arc::clone(&shared) }, Reader { shared })
}

/// The end that makes events. Dropping it ends the stream.
#[derive(Debug)]
pub struct Writer {
    shared: Shared,
}

impl Writer {
    /// Lets `fill` append to what goes to the client, unless the client has gone.
    pub fn push(&self, fill: impl FnOnce(&mut Vec<u8>)) {
        let mut state = lock(&self.shared);
        if state.abandoned {
            return;
        }
        if state.buffer.capacity() == 0
            && let Some(spare) = state.spare.pop_back()
        {
            state.buffer = spare;
        }
        fill(&mut state.buffer);
        if !state.buffer.is_empty()
            && let Some(reader) = state.reader.take()
        {
            drop(state);
            reader.wake();
        }
    }

    /// As [`Writer::push`], for what comes first and need not leave alone: see [`Reader::gather`].
    pub fn open(&self, fill: impl FnOnce(&mut Vec<u8>)) {
        let mut state = lock(&self.shared);
        fill(&mut state.buffer);
        state.opening = state.buffer.len();
    }

    /// Whether a push should wait for [`Writer::room`].
    #[must_use]
    pub fn is_full(&self) -> bool {
        let state = lock(&self.shared);
        state.buffer.len() > FULL && !state.abandoned
    }

    /// Whether the client has gone: pushes are for nothing.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        lock(&self.shared).abandoned
    }

    /// Waits until the buffer has room or the client has gone.
    pub async fn room(&self) {
        std::future::poll_fn(|context| self.poll_state(context, |state| state.buffer.len() <= FULL)).await;
    }

    /// Waits until the client has gone.
    pub async fn abandoned(&self) {
        std::future::poll_fn(|context| self.poll_state(context, |_| false)).await;
    }

    fn poll_state(&self, context: &mut Context<'_>, ready: impl FnOnce(&State) -> bool) -> Poll<()> {
        let mut state = lock(&self.shared);
        if state.abandoned || ready(&state) {
            return Poll::Ready(());
        }
        state.writer = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let mut state = lock(&self.shared);
        state.ended = true;
        if let Some(reader) = state.reader.take() {
            drop(state);
            reader.wake();
        }
    }
}

/// The end that is a response's body. Dropping it tells the writer that the client has gone.
#[derive(Debug)]
pub struct Reader {
    shared: Shared,
}

impl Reader {
    /// Waits until there is more than the opening, or the end, but no longer than `limit`. Each piece wakes everybody
    /// on its way to the client; most commands are over so soon that one piece is enough.
    pub async fn gather(&self, limit: Duration) {
        let more = std::future::poll_fn(|context| {
            let mut state = lock(&self.shared);
            if state.ended || state.buffer.len() > state.opening {
                return Poll::Ready(());
            }
            state.reader = Some(context.waker().clone());
            Poll::Pending
        });
        let _ = tokio::time::timeout(limit, more).await;
    }
}

impl Body for Reader {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut state = lock(&self.shared);
        if state.buffer.is_empty() {
            if state.ended {
                return Poll::Ready(None);
            }
            state.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        let buffer = std::mem::take(&mut state.buffer);
        let writer = state.writer.take();
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
        let lent = Lent { buffer, shared: Arc::clone(&self.shared) };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(lent)))))
    }

    fn is_end_stream(&self) -> bool {
        let state = lock(&self.shared);
        state.ended && state.buffer.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = lock(&self.shared);
        state.abandoned = true;
        state.buffer = Vec::new();
        state.spare.clear();
        if let Some(writer) = state.writer.take() {
            drop(state);
            writer.wake();
        }
    }
}

/// A buffer on its way to the socket; it comes back when it is written.
struct Lent {
    buffer: Vec<u8>,
    shared: Shared,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut state = lock(&self.shared);
        if !state.abandoned
            && !state.ended
            && state.spare.len() < KEEP_BUFFERS
            && buffer.capacity() <= KEEP_CAPACITY
        {
            buffer.clear();
            state.spare.push_back(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().build().unwrap()
    }

    #[test]
    fn what_is_ready_leaves_at_once_and_the_end_is_seen() {
        runtime().block_on(async {
            let (writer, mut reader) = feed();
            writer.push(|out| out.extend_from_slice(b"a"));
            writer.push(|out| out.extend_from_slice(b"b"));
            let frame = reader.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(frame, "ab");
            writer.push(|out| out.extend_from_slice(b"c"));
            drop(writer);
            assert!(!reader.is_end_stream());
            assert_eq!(reader.frame().await.unwrap().unwrap().into_data().unwrap(), "c");
            assert!(reader.is_end_stream());
            assert!(reader.frame().await.is_none());
        });
    }

    #[test]
    fn an_opening_waits_for_company_but_not_long() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            const LONG: Duration = Duration::from_secs(60);
            let began = std::time::Instant::now();
            let (writer, mut reader) = feed();
            writer.open(|out| out.extend_from_slice(b"a"));
            reader.gather(Duration::from_millis(1)).await;
            assert!(began.elapsed() >= Duration::from_millis(1));
            tokio::join!(reader.gather(LONG), async { writer.push(|out| out.extend_from_slice(b"b")) });
            // What is there already is not waited for.
            reader.gather(LONG).await;
            assert_eq!(reader.frame().await.unwrap().unwrap().into_data().unwrap(), "ab");
            let (writer, reader) = feed();
            writer.open(|out| out.extend_from_slice(b"a"));
            tokio::join!(reader.gather(LONG), async { drop(writer) });
            assert!(began.elapsed() < LONG);
        });
    }

    #[test]
    fn a_full_buffer_makes_the_writer_wait() {
        runtime().block_on(async {
            let (writer, mut reader) = feed();
            writer.push(|out| out.resize(FULL + 1, b'x'));
            assert!(writer.is_full());
            let (frame, ()) = tokio::join!(reader.frame(), writer.room());
            assert_eq!(frame.unwrap().unwrap().into_data().unwrap().len(), FULL + 1);
            assert!(!writer.is_full());
        });
    }

    #[test]
    fn a_client_that_goes_frees_the_writer() {
        runtime().block_on(async {
            let (writer, reader) = feed();
            writer.push(|out| out.resize(FULL + 1, b'x'));
            drop(reader);
            writer.room().await;
            writer.abandoned().await;
            assert!(!writer.is_full() && writer.is_abandoned());
            writer.push(|_| unreachable!("nobody reads"));
        });
    }
}
