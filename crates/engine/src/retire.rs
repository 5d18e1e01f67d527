//! What happens to the remains of sandboxes, behind everybody's back: slots are cleared for the next, trees deleted.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::watch;

use crate::pool::Pool;
use crate::slot::{Maker, Slot};

/// Threads that delete. One huge tree must not hold up all others.
const THREADS: usize = 2;

/// The remains of a sandbox. Counted until everything of them is gone.
#[derive(Debug, Default)]
pub(crate) struct Remains {
    pub(crate) slot: Option<Slot>,
    pub(crate) dir: Option<PathBuf>,
}

/// The queue of remains.
#[derive(Debug)]
pub(crate) struct Retire {
    maker: Arc<Maker>,
    pool: Arc<Pool>,
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Remains announced and not yet gone.
    pending: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Slots first: somebody may be waiting for one.
    slots: VecDeque<(Slot, Option<PathBuf>, Announced)>,
    dirs: VecDeque<(PathBuf, Announced)>,
    closed: bool,
}

/// One entry of the count; given back when dropped.
#[derive(Debug)]
pub(crate) struct Announced(watch::Sender<usize>);

impl Drop for Announced {
    fn drop(&mut self) {
        self.0.send_modify(|pending| *pending -= 1);
    }
}

impl Retire {
    pub(crate) fn new(maker: Arc<Maker>, pool: Arc<Pool>) -> Arc<Self> {
        Arc::new(Self {
            maker,
            pool,
            queue: Mutex::default(),
            wake: Condvar::new(),
            pending: watch::Sender::new(0),
        })
    }

    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<Vec<JoinHandle<()>>> {
        (0..THREADS)
            .map(|_| {
                let retire = Arc::clone(self);
                std::thread::Builder::new().name("osb-retire".to_owned()).spawn(move || retire.run())
            })
            .collect()
    }

    /// Counts something that will be handed in later.
    pub(crate) fn announce(&self) -> Announced {
        self.pending.send_modify(|pending| *pending += 1);
        Announced(self.pending.clone())
    }

    /// Hands in remains.
    pub(crate) fn hand_in(&self, remains: Remains, announced: Announced) {
        let mut queue = self.lock();
        match (remains.slot, remains.dir) {
            (Some(slot), dir) => queue.slots.push_back((slot, dir, self.announce())),
            (None, Some(dir)) => queue.dirs.push_back((dir, self.announce())),
            (None, None) => {}
        }
        drop(queue);
        drop(announced);
        self.wake.notify_all();
    }

    /// Waits until nothing is left to do.
    pub(crate) async fn settled(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let _ = self.pending.subscribe().wait_for(|pending| *pending == 0).await;
    }

    /// Ends the threads once they have done everything.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Every critical section leaves the queue whole at each step.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        crate::sys::thread_gives_way();
        loop {
            let mut queue = self.lock();
            let (slot, dir) = loop {
                if let Some(slot) = queue.slots.pop_front() {
                    break (Some(slot), None);
                }
                if let Some(dir) = queue.dirs.pop_front() {
                    break (None, Some(dir));
                }
                if queue.closed {
                    return;
                }
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            if let Some((slot, dir, announced)) = slot {
                // The slot first: somebody may be waiting for it.
                if let Some(dir) = self.slot(slot, dir) {
                    self.lock().dirs.push_back((dir, announced));
                }
            }
            if let Some((dir, _announced)) = dir
                && let Err(error) = crate::tree::remove(&dir)
            {
                tracing::warn!(dir = %dir.display(), %error, "a sandbox's files cannot be removed");
            }
        }
    }

    /// Hands a slot on. The answer is a directory that is still to be removed.
    fn slot(&self, mut slot: Slot, dir: Option<PathBuf>) -> Option<PathBuf> {
        let index = slot.index;
        let _ = std::fs::remove_file(self.maker.socket(index));
        let kept = self.maker.keep(&mut slot, dir.as_deref());
        match self.maker.recycle(slot) {
            Some(slot) => self.pool.give(slot),
            None => self.pool.release(index),
        }
        dir.filter(|_| !kept)
    }
}
