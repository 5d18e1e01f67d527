//! The pool of slots made ready ahead, and the thread that fills it.

mod plan;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::boot::{Booter, NotBooted, shm_bytes};
use crate::image::Image;
use crate::slot::{Maker, Ready, Slot};
use crate::standby::Standby;

/// Pauses after failures of preparing ahead, so that a full disk is not hammered.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A sandbox's first command follows its create at once; preparing the next slot would take a processor from it.
const QUIET: Duration = Duration::from_millis(10);
/// A rehearsal is over by then. The next one waits for that, so that no more than a processor is busy with them.
const REHEARSAL: Duration = Duration::from_millis(3);

/// Ready slots per image, bare ones, and what is asked for.
#[derive(Debug)]
pub(crate) struct Pool {
    maker: Arc<Maker>,
    booter: Arc<Booter>,
    state: Mutex<State>,
    wake: Condvar,
    /// Ready slots of the image used most.
    target: usize,
    /// Numbers of slots end here.
    slots: u32,
}

#[derive(Debug, Default)]
struct State {
    images: HashMap<String, Stock>,
    /// Slots without a file system, oldest first: the longer ago a slot was used, the less is left of its
    /// connections out in the network.
    bare: VecDeque<Slot>,
    urgent: VecDeque<Wanted>,
    /// Numbers in use.
    taken: BTreeSet<u32>,
    /// Creates under way; preparing ahead waits for them.
    creating: usize,
    /// When the first commands of the newest sandboxes have had their time, too.
    quiet_at: Option<Instant>,
    /// Set by adoption: until then it is not known which slots are taken.
    open: bool,
    closed: bool,
}

#[derive(Debug)]
struct Wanted {
    image: Arc<Image>,
    answer: oneshot::Sender<io::Result<Ready>>,
}

/// What the pool has of one image.
#[derive(Debug)]
struct Stock {
    image: Arc<Image>,
    ready: VecDeque<Ready>,
    /// Recent use, halved by others' use.
    score: f64,
}

/// Counts as a create under way while it lives.
#[derive(Debug)]
pub(crate) struct Creating(Arc<Pool>);

impl Drop for Creating {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.creating -= 1;
        state.quiet_at = Some(Instant::now() + QUIET);
        if state.creating == 0 {
            self.0.wake.notify_all();
        }
    }
}

enum Job {
    Urgent(Wanted, Option<Slot>),
    Ahead(Arc<Image>, Option<Slot>),
    Dismantle(Ready),
    Shrink(Slot),
}

impl Pool {
    pub(crate) fn new(booter: Arc<Booter>, target: usize, slots: u32) -> Arc<Self> {
        let maker = Arc::clone(&booter.maker);
        Arc::new(Self { maker, booter, state: Mutex::default(), wake: Condvar::new(), target, slots })
    }

    /// Starts the thread that prepares. To be called within a tokio runtime.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let (pool, runtime) = (Arc::clone(self), Handle::current());
        std::thread::Builder::new().name("osb-prepare".to_owned()).spawn(move || pool.run(&runtime))
    }

    /// Announces a create.
    pub(crate) fn creating(self: &Arc<Self>) -> Creating {
        self.lock().creating += 1;
        Creating(Arc::clone(self))
    }

    /// Takes a slot made ready for `image`, with a standby in it if possible, or waits until one has been made.
    pub(crate) async fn take(&self, image: &Arc<Image>) -> io::Result<Ready> {
        self.take_by(image, VecDeque::pop_front).await
    }

    /// As [`Pool::take`], but without a standby.
    pub(crate) async fn take_unbooted(&self, image: &Arc<Image>) -> io::Result<Ready> {
        self.take_by(image, |stock| {
            let at = stock.iter().position(|ready| ready.standby.is_none())?;
            stock.remove(at)
        })
        .await
    }

    async fn take_by(
        &self,
        image: &Arc<Image>,
        pick: impl FnOnce(&mut VecDeque<Ready>) -> Option<Ready> + Send,
    ) -> io::Result<Ready> {
        let receiver = {
            let mut state = self.lock();
            if state.closed {
                return Err(io::Error::other("the engine has been shut down"));
            }
            if let Some(ready) = pick(&mut state.use_image(image).ready) {
                return Ok(ready);
            }
            let (answer, receiver) = oneshot::channel();
            state.urgent.push_back(Wanted { image: Arc::clone(image), answer });
            self.wake.notify_all();
            receiver
        };
        receiver.await.map_err(|_| io::Error::other("the engine has been shut down"))?
    }

    /// Tells the pool of an image before it is first used.
    pub(crate) fn expect(&self, image: &Arc<Image>) {
        self.lock().use_image(image);
        self.wake.notify_all();
    }

    /// Gives up what was prepared of an image. Its layers are free when this returns.
    pub(crate) fn forget(&self, image_id: &str) {
        let (stock, bare) = {
            let mut state = self.lock();
            (state.images.remove(image_id), std::mem::take(&mut state.bare))
        };
        for mut slot in bare {
            self.maker.forget(&mut slot, image_id);
            self.give(slot);
        }
        for ready in stock.into_iter().flat_map(|stock| stock.ready) {
            let slot = self.maker.unready(ready);
            self.give(slot);
        }
    }

    /// Takes back a slot.
    pub(crate) fn give(&self, mut slot: Slot) {
        let mut state = self.lock();
        if let Some(kept) = &slot.kept
            && !state.images.contains_key(&kept.image.id)
        {
            // Forgotten meanwhile.
            let image_id = kept.image.id.clone();
            drop(state);
            self.maker.forget(&mut slot, &image_id);
            state = self.lock();
        }
        state.bare.push_back(slot);
        drop(state);
        self.wake.notify_all();
    }

    /// The slot with this number no longer exists.
    pub(crate) fn release(&self, index: u32) {
        self.lock().taken.remove(&index);
        self.wake.notify_all();
    }

    /// Begins work, with the numbers that running sandboxes have.
    pub(crate) fn open(&self, taken: impl IntoIterator<Item = u32>) {
        let mut state = self.lock();
        state.taken.extend(taken);
        state.open = true;
        self.wake.notify_all();
    }

    /// Ids of the images that there are ready slots of, or files in bare ones.
    pub(crate) fn prepared_images(&self) -> BTreeSet<String> {
        let state = self.lock();
        let ready = state.images.iter().filter(|(_, stock)| !stock.ready.is_empty()).map(|(id, _)| id);
        ready.chain(state.bare.iter().filter_map(Slot::image_id)).cloned().collect()
    }

    /// Ready slots of an image.
    pub(crate) fn ready(&self, image_id: &str) -> usize {
        self.lock().images.get(image_id).map_or(0, |stock| stock.ready.len())
    }

    /// Process ids of the inits that wait.
    pub(crate) fn standby_pids(&self) -> Vec<i32> {
        let state = self.lock();
        let ready = state.images.values().flat_map(|stock| &stock.ready);
        ready.filter_map(|ready| Some(ready.standby.as_ref()?.init.pid())).collect()
    }

    /// Ends the processes of all that is ready. Blocks until they are gone.
    pub(crate) fn end_standbys(&self) {
        let standbys: Vec<_> = {
            let mut state = self.lock();
            let ready = state.images.values_mut().flat_map(|stock| &mut stock.ready);
            ready.filter_map(|ready| ready.standby.take()).collect()
        };
        // All at once, then one by one.
        standbys.iter().for_each(Standby::kill);
        for standby in standbys {
            if !standby.end() {
                tracing::error!("a prepared sandbox does not die and is left for the next start");
            }
        }
    }

    /// Ends the thread. What it holds is removed by [`Pool::clear`].
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.urgent.clear();
        self.wake.notify_all();
    }

    /// Removes all slots that no sandbox uses.
    pub(crate) fn clear(&self) {
        let (stocks, bare) = {
            let mut state = self.lock();
            (std::mem::take(&mut state.images), std::mem::take(&mut state.bare))
        };
        let unready =
            stocks.into_values().flat_map(|stock| stock.ready).map(|ready| self.maker.unready(ready));
        self.maker.destroy_all(unready.chain(bare).collect());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state whole at each step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, runtime: &Handle) {
        crate::sys::thread_gives_way();
        let mut pause = FIRST_PAUSE;
        let mut pausing = false;
        loop {
            let job = {
                let mut state = self.lock();
                loop {
                    if state.closed {
                        return;
                    }
                    if let Some(job) = state.next(self.target, self.slots, !pausing) {
                        break job;
                    }
                    state = if pausing {
                        let (state, waited) =
                            self.wake.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
                        pausing = !waited.timed_out();
                        state
                    } else if let Some(left) = state.quiet_in() {
                        self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                    } else if state.rehearse_one() {
                        self.wake.wait_timeout(state, REHEARSAL).unwrap_or_else(PoisonError::into_inner).0
                    } else {
                        self.wake.wait(state).unwrap_or_else(PoisonError::into_inner)
                    };
                }
            };
            match self.work(job, runtime) {
                Ok(()) => pause = FIRST_PAUSE,
                Err(error) => {
                    tracing::warn!(%error, "a sandbox cannot be prepared ahead; trying again later");
                    pause = if pausing { pause } else { (pause * 2).min(LONGEST_PAUSE) };
                    pausing = true;
                }
            }
        }
    }

    /// Does one job. Errors of urgent ones go to those who asked.
    fn work(&self, job: Job, runtime: &Handle) -> io::Result<()> {
        match job {
            Job::Urgent(wanted, slot) => {
                let result = self.prepare(slot, &wanted.image);
                if let Err(Ok(ready)) = wanted.answer.send(result) {
                    // Nobody waits any more.
                    self.keep(ready);
                }
                Ok(())
            }
            Job::Ahead(image, slot) => {
                let ready = self.prepare(slot, &image)?;
                runtime.block_on(self.boot(ready)).map(|ready| self.keep(ready))
            }
            Job::Dismantle(ready) => {
                let slot = self.maker.unready(ready);
                self.give(slot);
                Ok(())
            }
            Job::Shrink(slot) => {
                let index = slot.index;
                self.maker.destroy(slot);
                self.release(index);
                Ok(())
            }
        }
    }

    fn keep(&self, ready: Ready) {
        let mut state = self.lock();
        match state.images.get_mut(&ready.image.id) {
            Some(stock) => stock.ready.push_back(ready),
            None => {
                // Forgotten meanwhile.
                drop(state);
                let slot = self.maker.unready(ready);
                self.give(slot);
            }
        }
    }

    fn prepare(&self, slot: Option<Slot>, image: &Arc<Image>) -> io::Result<Ready> {
        let slot = match slot {
            Some(slot) => slot,
            None => self.make()?,
        };
        self.maker.ready(slot, image).map_err(|failed| {
            let (slot, error) = *failed;
            self.give(slot);
            error
        })
    }

    /// Starts the processes that wait for an order.
    async fn boot(&self, mut ready: Ready) -> io::Result<Ready> {
        let shm = shm_bytes(self.maker.default_limits.memory_bytes);
        match self.booter.boot(&mut ready, shm, &mut Vec::new()).await {
            Ok(standby) => {
                ready.standby = Some(standby);
                Ok(ready)
            }
            Err(NotBooted::Unknown) => {
                self.release(self.maker.destroy_ready(ready));
                Err(io::Error::other("a spawner died"))
            }
            Err(NotBooted::Machine(action, error)) => {
                self.give(self.maker.unready(ready));
                Err(io::Error::new(error.kind(), format!("{action}: {error}")))
            }
            Err(NotBooted::Stage(step, errno)) => {
                self.give(self.maker.unready(ready));
                Err(io::Error::other(format!("{step}: {}", io::Error::from_raw_os_error(errno))))
            }
        }
    }

    fn make(&self) -> io::Result<Slot> {
        let index = self
            .lock()
            .number(self.slots)
            .ok_or_else(|| io::Error::new(io::ErrorKind::ResourceBusy, "all slots are in use"))?;
        self.maker.make(index).inspect_err(|_| self.release(index))
    }
}

impl State {
    fn use_image(&mut self, image: &Arc<Image>) -> &mut Stock {
        for stock in self.images.values_mut() {
            stock.score *= 0.98;
        }
        let stock = self.images.entry(image.id.clone()).or_insert_with(|| Stock {
            image: Arc::clone(image),
            ready: VecDeque::new(),
            score: 0.0,
        });
        stock.score += 1.0;
        stock
    }

    /// Time left until the newest creates count as over.
    fn quiet_in(&self) -> Option<Duration> {
        self.quiet_at?.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// Has the standby rehearse that will be taken next of those that have not. Nothing else is to do by then: under load
    /// a rehearsal would only take the processor from those who wait.
    fn rehearse_one(&mut self) -> bool {
        if self.creating > 0 {
            return false;
        }
        let ready = self.images.values_mut().flat_map(|stock| &mut stock.ready);
        match ready.filter_map(|ready| ready.standby.as_mut()).find(|standby| !standby.rehearsed) {
            Some(standby) => {
                standby.rehearse();
                true
            }
            None => false,
        }
    }

    /// The lowest free number.
    fn number(&mut self, slots: u32) -> Option<u32> {
        let index = (0..slots).find(|index| !self.taken.contains(index))?;
        self.taken.insert(index);
        Some(index)
    }

    fn next(&mut self, target: usize, slots: u32, ahead: bool) -> Option<Job> {
        if !self.open {
            return None;
        }
        if let Some(wanted) = self.urgent.pop_front() {
            // Somebody else's preparation may have come back in the meantime.
            let slot = self.bare_for(&wanted.image.id);
            if slot.is_none()
                && self.taken.len() >= slots as usize
                && let Some(ready) = self.spare()
            {
                self.urgent.push_front(wanted);
                return Some(Job::Dismantle(ready));
            }
            return Some(Job::Urgent(wanted, slot));
        }
        if !ahead {
            return None;
        }
        let uses: Vec<plan::Use<'_>> = self
            .images
            .iter()
            .map(|(id, stock)| plan::Use { id, score: stock.score, ready: stock.ready.len() })
            .collect();
        let can_make = (self.taken.len() as u64) < u64::from(slots);
        let busy = self.creating > 0 || self.quiet_in().is_some();
        let action = plan::next(&uses, target, self.bare.len(), can_make, busy)?;
        match action {
            plan::Action::Prepare(id) => {
                let image = Arc::clone(&self.images.get(&id)?.image);
                Some(Job::Ahead(image, self.bare_for(&id)))
            }
            plan::Action::Dismantle(id) => self.images.get_mut(&id)?.ready.pop_back().map(Job::Dismantle),
            plan::Action::Forget(id) => {
                self.images.remove(&id);
                self.next(target, slots, ahead)
            }
            plan::Action::Shrink => self.bare.pop_front().map(Job::Shrink),
        }
    }

    /// A bare slot, one that has files of this image if there is one.
    fn bare_for(&mut self, image_id: &str) -> Option<Slot> {
        let fits = |slot: &Slot| slot.image_id().is_some_and(|id| id == image_id);
        let at = self.bare.iter().position(fits).unwrap_or(0);
        self.bare.remove(at)
    }

    /// A ready slot of the image that has most of them.
    fn spare(&mut self) -> Option<Ready> {
        self.images.values_mut().max_by_key(|stock| stock.ready.len())?.ready.pop_back()
    }
}
