//! When which sandbox is to be removed: an ordered set and one timer on the wall clock.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use osb_protocol::ids::SandboxId;
use osb_protocol::time::WireTime;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

/// Deadlines of sandboxes, in microseconds since the Unix epoch.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    inner: Mutex<Inner>,
    earlier: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    ordered: BTreeSet<(i64, SandboxId)>,
    by_id: HashMap<SandboxId, i64>,
}

impl Deadlines {
    /// Sets, moves or clears the deadline of a sandbox.
    pub(crate) fn set(&self, id: SandboxId, at: Option<i64>) {
        let mut inner = self.lock();
        if let Some(old) = inner.by_id.remove(&id) {
            inner.ordered.remove(&(old, id));
        }
        let Some(at) = at else { return };
        let first = inner.ordered.first().is_none_or(|(first, _)| at < *first);
        inner.ordered.insert((at, id));
        inner.by_id.insert(id, at);
        drop(inner);
        if first {
            self.earlier.notify_one();
        }
    }

    /// Takes out all that are due.
    fn due(&self, now: i64) -> Vec<SandboxId> {
        let mut inner = self.lock();
        let mut due = Vec::new();
        while let Some((at, id)) = inner.ordered.first().copied()
            && at <= now
        {
            inner.ordered.remove(&(at, id));
            inner.by_id.remove(&id);
            due.push(id);
        }
        due
    }

    fn first(&self) -> Option<i64> {
        self.lock().ordered.first().map(|(at, _)| *at)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Both sets are changed together by code that does not panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `fire` for each sandbox whose deadline has come. Never ends by itself.
    ///
    /// # Errors
    /// The kernel gives no timer.
    pub(crate) async fn run(&self, mut fire: impl FnMut(SandboxId)) -> io::Result<()> {
        let timer = Timer::new()?;
        loop {
            for id in self.due(WireTime::now().as_micros()) {
                fire(id);
            }
            let first = self.first();
            timer.arm(first)?;
            tokio::select! {
                () = self.earlier.notified() => {}
                fired = timer.fired(), if first.is_some() => fired?,
            }
        }
    }
}

/// A timer on the wall clock. It also fires when the clock is set or the machine wakes up, so an expiry holds
/// against time that no monotonic timer counts.
struct Timer(AsyncFd<OwnedFd>);

impl Timer {
    fn new() -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        // SAFETY: the descriptor is open and owned by the value handed over, which is never replaced; it is closed
        // only after it was taken off the reactor.
        let registered = unsafe { AsyncFd::register_with_interest(fd, tokio::io::Interest::READABLE) };
        Ok(Self(registered?))
    }

    fn arm(&self, at: Option<i64>) -> io::Result<()> {
        // Zero would disarm; a deadline before the epoch is as due as one just after it.
        let at = at.map_or(0, |at| at.max(1));
        let value = Timespec { tv_sec: at.div_euclid(1_000_000), tv_nsec: at.rem_euclid(1_000_000) * 1000 };
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let flags = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
        timerfd_settime(self.0.get_ref(), flags, &Itimerspec { it_interval: zero, it_value: value })?;
        Ok(())
    }

    async fn fired(&self) -> io::Result<()> {
        loop {
            let mut guard = self.0.readable().await?;
            let read = guard.try_io(|fd| {
                let mut count = [0_u8; 8];
                match rustix::io::read(fd.get_ref(), &mut count) {
                    // The clock was set: the deadlines are looked at again.
                    Ok(_) | Err(rustix::io::Errno::CANCELED) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            });
            if let Ok(result) = read {
                return result;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn fires_in_order_and_not_after_a_change() {
        let deadlines = Arc::new(Deadlines::default());
        let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
        let runner = {
            let deadlines = Arc::clone(&deadlines);
            tokio::spawn(async move { deadlines.run(|id| tx.send(id).unwrap()).await })
        };
        let now = WireTime::now().as_micros();
        let ids: Vec<_> = (0..4).map(|_| SandboxId::random()).collect();
        deadlines.set(ids[0], Some(now + 120_000));
        deadlines.set(ids[1], Some(now + 60_000));
        deadlines.set(ids[2], Some(now + 90_000));
        deadlines.set(ids[3], Some(now - 5));
        deadlines.set(ids[2], Some(now + 3_600_000_000));
        for expected in [ids[3], ids[1], ids[0]] {
            let got = tokio::time::timeout(Duration::from_secs(5), rx.recv()).await.unwrap();
            assert_eq!(got, Some(expected));
        }
        deadlines.set(ids[2], None);
        assert!(deadlines.first().is_none());
        runner.abort();
    }
}
