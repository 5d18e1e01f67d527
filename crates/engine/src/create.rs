//! Making a sandbox.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use osb_protocol::boot::{LineEndings, Order, Started};
use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::SandboxLifecycle;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::boot::{self, NotBooted, micros, shm_bytes};
use crate::config::Limits;
use crate::engine::{Engine, Inner, Table};
use crate::error::CreateError;
use crate::helper::child::STAGES;
use crate::identity::Identity;
use crate::image::Image;
use crate::retire::Remains;
use crate::room::RETRY_AFTER;
use crate::sandbox::{Record, Sandbox};
use crate::slot::{Ready, Slot};
use crate::standby::Standby;

/// How long init may take to execute the entrypoint.
const STARTED_WITHIN: Duration = Duration::from_secs(30);
/// How long a hook before the entrypoint may take when nothing is said, and how much longer than it may until it is
/// dead and told.
const HOOK_WITHIN: Duration = Duration::from_secs(60);
const HOOK_TOLD_WITHIN: Duration = Duration::from_secs(120);
/// Attempts when helpers die under a create.
const ATTEMPTS: u32 = 3;
/// Least memory that a sandbox can do anything with.
const MEMORY_LEAST: u64 = 4 << 20;

/// A sandbox to make.
#[derive(Debug, Clone)]
pub struct CreateParams {
    /// The id to use; `None` takes a prepared one.
    pub id: Option<SandboxId>,
    /// What it stands on.
    pub image: Arc<Image>,
    /// Program and arguments.
    pub entrypoint: Vec<String>,
    /// The whole environment; `OPENSANDBOX_ID` is added.
    pub env: Vec<(String, String)>,
    /// Limits; `None` takes the engine's default.
    pub limits: Option<Limits>,
    /// How command output treats line ends.
    pub line_endings: LineEndings,
    /// Token that the daemon asks for.
    pub access_token: Option<String>,
    /// Commands beside the entrypoint.
    pub lifecycle: Option<SandboxLifecycle>,
}

/// A sandbox whose entrypoint runs.
#[derive(Debug)]
pub struct CreatedSandbox {
    /// Its id.
    pub id: SandboxId,
    /// For [`Engine::adopt`] after a restart.
    pub record: Record,
    /// Where the time went: name and microseconds.
    pub stages: Vec<(&'static str, u32)>,
}

/// A sandbox that has its order, and whose entrypoint is about to be executed.
#[derive(Debug)]
pub struct Placed {
    /// Its id.
    pub id: SandboxId,
    /// For [`Engine::adopt`] after a restart.
    pub record: Record,
    start: JoinHandle<Result<CreatedSandbox, CreateError>>,
    wanted: oneshot::Sender<()>,
}

impl Placed {
    /// Waits until the entrypoint has been executed. On error nothing is left.
    ///
    /// Whoever drops this, or the future, gives the sandbox up: then it is removed if it did not come to life, and
    /// [`Engine::delete`] removes it otherwise.
    pub fn started(self) -> impl Future<Output = Result<CreatedSandbox, CreateError>> + Send + 'static {
        let Self { start, wanted, .. } = self;
        async move {
            let result = joined(start).await;
            drop(wanted);
            result
        }
    }
}

async fn joined(
    start: JoinHandle<Result<CreatedSandbox, CreateError>>,
) -> Result<CreatedSandbox, CreateError> {
    match start.await {
        Ok(result) => result,
        Err(error) => Err(CreateError::Failed(format!("the create was broken off: {error}"))),
    }
}

impl Engine {
    /// Makes a sandbox and waits until its entrypoint has been executed. On error, or when the returned future is
    /// dropped, nothing is left.
    pub async fn create(&self, params: CreateParams) -> Result<CreatedSandbox, CreateError> {
        self.place(params).await?.started().await
    }

    /// Makes a sandbox up to the point at which its record is known. The rest goes on by itself.
    pub async fn place(&self, params: CreateParams) -> Result<Placed, CreateError> {
        let inner = Arc::clone(&self.inner);
        let (place, is_placed) = oneshot::channel();
        let (wanted, unwanted) = oneshot::channel();
        let start = tokio::spawn(async move { inner.create(params, place, unwanted).await });
        match is_placed.await {
            Ok((id, record)) => Ok(Placed { id, record, start, wanted }),
            // It has failed before.
            Err(_) => match joined(start).await {
                Ok(CreatedSandbox { id, record, .. }) => {
                    self.delete(id);
                    Err(CreateError::Failed(format!("sandbox {id} was made in no place: {record:?}")))
                }
                Err(error) => Err(error),
            },
        }
    }
}

/// A place among the sandboxes, held while one is made.
struct Place<'a> {
    inner: &'a Inner,
    id: Option<SandboxId>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut table = self.inner.table();
        if let Some(at) = table.making.iter().position(|id| *id == self.id) {
            table.making.swap_remove(at);
        }
    }
}

/// A sandbox that has its order.
struct Ordered {
    ready: Ready,
    init: Identity,
    pidfd: AsyncFd<OwnedFd>,
    orders: AsyncFd<OwnedFd>,
}

impl Inner {
    async fn create(
        self: &Arc<Self>,
        params: CreateParams,
        place: oneshot::Sender<(SandboxId, Record)>,
        mut unwanted: oneshot::Receiver<()>,
    ) -> Result<CreatedSandbox, CreateError> {
        let begin = Instant::now();
        let limits = params.limits.unwrap_or(self.config.default_limits);
        check(&params, limits)?;
        let _place = self.place(params.id)?;
        let _creating = self.pool.creating();
        let mut stages = Vec::with_capacity(STAGES.len() + 4);
        let Ordered { ready, init, pidfd, orders } = self.order(&params, limits, begin, &mut stages).await?;
        let ordered = Instant::now();
        let (id, image) = (ready.id, Arc::clone(&ready.image));
        let record = Record {
            slot: ready.slot.index,
            init,
            image: image.id.clone(),
            layers: image.roots.iter().flat_map(|root| root.lowers.iter().cloned()).collect(),
            limits,
        };
        // Whoever asked may have given up, which is seen below.
        let _ = place.send((id, record.clone()));
        let within = started_within(params.lifecycle.as_ref());
        let started = tokio::select! {
            biased;
            started = tokio::time::timeout(within, boot::started(&orders)) => started,
            _ = &mut unwanted => {
                self.undo(ready, &pidfd).await;
                return Err(given_up());
            }
        };
        let result = match started {
            Ok(Ok(Some(Started::Running { .. }))) => Ok(()),
            Ok(Ok(Some(Started::Refused { message }))) => Err(CreateError::Hook(message)),
            Ok(Ok(Some(Started::Failed { message, .. }))) => Err(CreateError::Entrypoint {
                program: params.entrypoint.first().cloned().unwrap_or_default(),
                reason: message,
            }),
            Ok(Ok(None)) => {
                Err(CreateError::Failed("the sandbox's init ended before its entrypoint".to_owned()))
            }
            Ok(Err(error)) => Err(CreateError::Failed(format!("init's answer cannot be read: {error}"))),
            Err(_) => Err(CreateError::Failed(format!(
                "the entrypoint was not executed within {} seconds",
                within.as_secs()
            ))),
        };
        if let Err(error) = result {
            self.undo(ready, &pidfd).await;
            return Err(error);
        }
        stages.push(("init", micros(ordered)));
        let (socket, dir) = (self.maker.socket(record.slot), self.maker.dir(id));
        let sandbox = Arc::new(Sandbox::new(id, pidfd, ready.slot, socket, dir));
        {
            let mut table = self.table();
            table.live.insert(id, Arc::clone(&sandbox));
            // Given up before this: nobody will ask to delete it. Given up after it: whoever did so will.
            if matches!(unwanted.try_recv(), Err(oneshot::error::TryRecvError::Closed)) {
                table.live.remove(&id);
                *sandbox.deleted() = Some(self.retire.announce());
                sandbox.kill();
            }
        }
        self.watch(sandbox);
        stages.push(("total", micros(begin)));
        Ok(CreatedSandbox { id, record, stages })
    }

    /// The table, in which there is a place for one more.
    pub(crate) fn table_with_room(&self) -> Result<MutexGuard<'_, Table>, CreateError> {
        let exhausted = |what: String| Err(CreateError::Exhausted { what, retry_after: RETRY_AFTER });
        if let Some(what) = self.room.lacking() {
            return exhausted(what);
        }
        let table = self.table();
        let most = self.config.max_sandboxes;
        if table.live.len() + table.making.len() >= most {
            return exhausted(format!("{most} sandboxes are the most"));
        }
        Ok(table)
    }

    /// Reserves one of the places for sandboxes.
    fn place(&self, id: Option<SandboxId>) -> Result<Place<'_>, CreateError> {
        let mut table = self.table_with_room()?;
        if let Some(wanted) = id {
            let taken = table.live.contains_key(&wanted)
                || table.ended.contains_key(&wanted)
                || table.making.contains(&Some(wanted));
            if taken {
                return Err(CreateError::Invalid(format!("sandbox {wanted} exists already")));
            }
        }
        table.making.push(id);
        Ok(Place { inner: self, id })
    }

    /// Gives the order to a standby, or to an init started now. When one dies under it, to another.
    async fn order(
        &self,
        params: &CreateParams,
        limits: Limits,
        begin: Instant,
        stages: &mut Vec<(&'static str, u32)>,
    ) -> Result<Ordered, CreateError> {
        let shm = shm_bytes(limits.memory_bytes);
        let mut attempt = 0;
        loop {
            attempt += 1;
            // The name of a standby's machine is its id's.
            let taken = match params.id {
                None => self.pool.take(&params.image).await,
                Some(_) => self.pool.take_unbooted(&params.image).await,
            };
            let mut ready = taken.map_err(|error| no_slot(&error))?;
            stages.clear();
            stages.push(("slot", micros(begin)));
            if let Some(id) = params.id
                && let Err(error) = self.maker.rename(&mut ready, id)
            {
                self.bury(ready.slot, ready.id);
                return Err(machine("name the sandbox")(error));
            }
            let waited = ready.standby.take();
            let ahead = waited.is_some();
            let mut standby = match waited {
                Some(standby) => standby,
                None => match self.booter.boot(&mut ready, shm, stages).await {
                    Ok(standby) => standby,
                    Err(NotBooted::Unknown) if attempt < ATTEMPTS => {
                        self.destroy(ready).await;
                        continue;
                    }
                    Err(error) => return Err(self.not_booted(ready, error).await),
                },
            };
            let began = Instant::now();
            let sent = self.equip(params, limits, shm, &mut ready, &mut standby);
            let Standby { init, pidfd, orders, .. } = standby;
            let watched = crate::sys::watched(pidfd, Interest::READABLE)
                .and_then(|pidfd| Ok((pidfd, crate::sys::watched(orders, Interest::READABLE)?)));
            let (pidfd, orders) = match watched {
                Ok(watched) => watched,
                Err(error) => {
                    self.destroy(ready).await;
                    return Err(machine("watch the sandbox's process")(error));
                }
            };
            match sent {
                Ok(()) => {
                    stages.push(("order", micros(began)));
                    return Ok(Ordered { ready, init, pidfd, orders });
                }
                // Something has killed it while it waited. The others may be well.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe && (ahead || attempt < ATTEMPTS) => {
                    tracing::warn!(id = %ready.id, "a prepared sandbox was dead already");
                    self.undo(ready, &pidfd).await;
                }
                Err(error) => {
                    self.undo(ready, &pidfd).await;
                    return Err(machine("equip the sandbox")(error));
                }
            }
        }
    }

    /// Sets the limits, then sends the order.
    fn equip(
        &self,
        params: &CreateParams,
        limits: Limits,
        shm: u64,
        ready: &mut Ready,
        standby: &mut Standby,
    ) -> io::Result<()> {
        // Before anything runs, and kept by the init.
        crate::image::runs(&ready.log)?;
        self.images.touch(&ready.image);
        let slot = &mut ready.slot;
        self.cgroups.limit(slot.index, &mut slot.cgroups, limits)?;
        standby.resize_shm(shm)?;
        let config = &params.image.config;
        let mut env = params.env.clone();
        env.push(("OPENSANDBOX_ID".to_owned(), ready.id.to_string()));
        let document = boot::document(&Order {
            sandbox_id: ready.id.to_string(),
            entrypoint: params.entrypoint.clone(),
            env,
            cwd: config.workdir.clone().filter(|dir| !dir.is_empty()),
            volumes: config.volumes.clone(),
            user: config.user.clone().filter(|user| !user.is_empty()),
            line_endings: params.line_endings,
            access_token: params.access_token.clone(),
            lifecycle: params.lifecycle.clone(),
            memory_limit_bytes: Some(limits.memory_bytes),
            cpu_limit_millis: Some(limits.cpu_nanos / 1_000_000),
        })?;
        standby.order(&document)
    }

    /// Clears up behind a start that failed and puts it into words.
    async fn not_booted(&self, ready: Ready, error: NotBooted) -> CreateError {
        match error {
            NotBooted::Machine(action, error) => {
                self.bury(ready.slot, ready.id);
                machine(action)(error)
            }
            NotBooted::Stage(step, errno) => {
                self.bury(ready.slot, ready.id);
                not_started(&step, errno)
            }
            NotBooted::Unknown => {
                self.destroy(ready).await;
                CreateError::Failed("spawners died while they started the sandbox".to_owned())
            }
        }
    }

    /// Hands in a slot in which no process is.
    fn bury(&self, slot: Slot, id: SandboxId) {
        let announced = self.retire.announce();
        self.retire.hand_in(Remains { slot: Some(slot), dir: Some(self.maker.dir(id)) }, announced);
    }

    /// Ends a sandbox that did not come to life.
    async fn undo(&self, ready: Ready, pidfd: &AsyncFd<OwnedFd>) {
        // The only failure for a descriptor of ours is that it is dead already.
        let _ = rustix::process::pidfd_send_signal(pidfd.get_ref(), rustix::process::Signal::KILL);
        let _ = pidfd.readable().await;
        self.bury(ready.slot, ready.id);
    }

    /// Destroys a slot in which processes may be that we know nothing of.
    async fn destroy(&self, ready: Ready) {
        let (maker, pool) = (Arc::clone(&self.maker), Arc::clone(&self.pool));
        let announced = self.retire.announce();
        let done = tokio::task::spawn_blocking(move || {
            pool.release(maker.destroy_ready(ready));
            drop(announced);
        });
        if let Err(error) = done.await {
            tracing::error!(%error, "a slot was not destroyed in order");
        }
    }
}

/// How long init may take to answer its order.
fn started_within(lifecycle: Option<&SandboxLifecycle>) -> Duration {
    match lifecycle.and_then(|hooks| hooks.pre_start.as_ref()) {
        None => STARTED_WITHIN,
        Some(hook) => {
            let seconds = hook.timeout_seconds.and_then(|seconds| u64::try_from(seconds).ok());
            let hook = seconds.filter(|seconds| *seconds > 0).map_or(HOOK_WITHIN, Duration::from_secs);
            STARTED_WITHIN + hook.saturating_add(HOOK_TOLD_WITHIN)
        }
    }
}

fn given_up() -> CreateError {
    CreateError::Failed("nobody waits for the sandbox any more".to_owned())
}

fn check(params: &CreateParams, limits: Limits) -> Result<(), CreateError> {
    let invalid = |text: &str| Err(CreateError::Invalid(text.to_owned()));
    if params.entrypoint.first().is_none_or(String::is_empty) {
        return invalid("the entrypoint is empty");
    }
    if params.entrypoint.iter().any(|word| word.contains('\0')) {
        return invalid("the entrypoint holds a zero byte");
    }
    if params
        .env
        .iter()
        .any(|(name, value)| name.is_empty() || name.contains(['\0', '=']) || value.contains('\0'))
    {
        return invalid("a variable has no name, a name with '=', or a zero byte");
    }
    if limits.memory_bytes < MEMORY_LEAST {
        return Err(CreateError::Invalid(format!(
            "a memory limit below {} MiB starts nothing",
            MEMORY_LEAST >> 20
        )));
    }
    if limits.pids == 0 || limits.cpu_nanos == 0 {
        return invalid("limits of processes and CPU begin at 1");
    }
    Ok(())
}

fn no_slot(error: &io::Error) -> CreateError {
    use io::ErrorKind::{QuotaExceeded, ResourceBusy, StorageFull};
    match error.kind() {
        ResourceBusy | StorageFull | QuotaExceeded => {
            CreateError::Exhausted { what: error.to_string(), retry_after: RETRY_AFTER }
        }
        _ => CreateError::Failed(format!("prepare a sandbox: {error}")),
    }
}

fn not_started(step: &str, errno: i32) -> CreateError {
    let error = io::Error::from_raw_os_error(errno);
    if matches!(errno, libc::EAGAIN | libc::ENOMEM | libc::ENOSPC) {
        return CreateError::Exhausted { what: format!("{step}: {error}"), retry_after: RETRY_AFTER };
    }
    CreateError::Failed(format!("start the sandbox, stage {step}: {error}"))
}

fn machine(action: &str) -> impl FnOnce(io::Error) -> CreateError {
    move |error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            CreateError::Invalid("a sandbox of this id has files here".to_owned())
        }
        io::ErrorKind::StorageFull => {
            CreateError::Exhausted { what: format!("{action}: {error}"), retry_after: RETRY_AFTER }
        }
        _ => CreateError::Failed(format!("{action}: {error}")),
    }
}
