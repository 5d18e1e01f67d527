//! Making a sandbox.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use osb_protocol::boot::{Boot, LineEndings, Started};
use osb_protocol::ids::SandboxId;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use crate::boot;
use crate::config::Limits;
use crate::engine::{Engine, Inner};
use crate::error::CreateError;
use crate::helper::child::STAGES;
use crate::helper::message::{Outcome, Spawn};
use crate::helper::spawners::Lost;
use crate::identity::Identity;
use crate::image::Image;
use crate::retire::Remains;
use crate::room::RETRY_AFTER;
use crate::sandbox::{Record, Sandbox};
use crate::slot::{Ready, Slot};

/// How long init may take to execute the entrypoint.
const STARTED_WITHIN: Duration = Duration::from_secs(30);
/// Least size of `/dev/shm`.
const SHM_LEAST: u64 = 64 << 20;
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

impl Engine {
    /// Makes a sandbox and waits until its entrypoint has been executed. On error nothing is left.
    ///
    /// Runs to its end even if the returned future is dropped.
    pub async fn create(&self, params: CreateParams) -> Result<CreatedSandbox, CreateError> {
        let inner = Arc::clone(&self.inner);
        match tokio::spawn(async move { inner.create(params).await }).await {
            Ok(result) => result,
            Err(error) => Err(CreateError::Failed(format!("the create was broken off: {error}"))),
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

/// A started sandbox whose entrypoint has not run yet.
struct Born {
    ready: Ready,
    pidfd: AsyncFd<OwnedFd>,
    pid: i32,
    started: pipe::Receiver,
}

impl Inner {
    async fn create(self: &Arc<Self>, params: CreateParams) -> Result<CreatedSandbox, CreateError> {
        let begin = Instant::now();
        let limits = params.limits.unwrap_or(self.config.default_limits);
        check(&params, limits)?;
        let _place = self.place(params.id)?;
        let _creating = self.pool.creating();
        let mut stages = Vec::with_capacity(STAGES.len() + 4);
        let Born { ready, pidfd, pid, started } = self.bear(&params, limits, begin, &mut stages).await?;
        let spawned = Instant::now();
        let result = match tokio::time::timeout(STARTED_WITHIN, boot::started(started)).await {
            Ok(Ok(Some(Started::Running { .. }))) => Ok(()),
            Ok(Ok(Some(Started::Failed { message, .. }))) => Err(CreateError::Entrypoint {
                program: params.entrypoint.first().cloned().unwrap_or_default(),
                reason: message,
            }),
            Ok(Ok(None)) => {
                Err(CreateError::Failed("the sandbox's init ended before its entrypoint".to_owned()))
            }
            Ok(Err(error)) => Err(CreateError::Failed(format!("init's first word cannot be read: {error}"))),
            Err(_) => Err(CreateError::Failed(format!(
                "the entrypoint was not executed within {} seconds",
                STARTED_WITHIN.as_secs()
            ))),
        };
        let (id, image) = (ready.id, Arc::clone(&ready.image));
        let identity = Identity::of(pid, &pidfd, &self.boot_id);
        let identity = identity.map_err(machine("identify the sandbox's process"));
        let record = match result.and(identity) {
            Ok(init) => Record {
                slot: ready.slot.index,
                init,
                image: image.id.clone(),
                layers: image.roots.iter().flat_map(|root| root.lowers.iter().cloned()).collect(),
                limits,
            },
            Err(error) => {
                self.undo(ready, pidfd).await;
                return Err(error);
            }
        };
        stages.push(("init", micros(spawned)));
        let (socket, dir) = (self.maker.socket(record.slot), self.maker.dir(id));
        let sandbox = Arc::new(Sandbox::new(id, pidfd, ready.slot, socket, dir));
        self.table().live.insert(id, Arc::clone(&sandbox));
        self.watch(sandbox);
        stages.push(("total", micros(begin)));
        Ok(CreatedSandbox { id, record, stages })
    }

    /// Reserves one of the places for sandboxes.
    fn place(&self, id: Option<SandboxId>) -> Result<Place<'_>, CreateError> {
        let exhausted = |what: String| CreateError::Exhausted { what, retry_after: RETRY_AFTER };
        if let Some(what) = self.room.lacking() {
            return Err(exhausted(what));
        }
        let mut table = self.table();
        if table.live.len() + table.making.len() >= self.config.max_sandboxes {
            return Err(exhausted(format!("{} sandboxes are the most", self.config.max_sandboxes)));
        }
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

    /// Starts init. When a helper dies under it, with another slot.
    async fn bear(
        &self,
        params: &CreateParams,
        limits: Limits,
        begin: Instant,
        stages: &mut Vec<(&'static str, u32)>,
    ) -> Result<Born, CreateError> {
        let mut attempt = 1;
        loop {
            let mut ready = self.pool.take(&params.image).await.map_err(|error| no_slot(&error))?;
            stages.clear();
            stages.push(("slot", micros(begin)));
            let fitted = self.fit(&mut ready, params.id, limits);
            let handed = match fitted.and_then(|()| self.hand_over(params, limits, &ready)) {
                Ok(handed) => handed,
                Err(error) => {
                    self.bury(ready.slot, ready.id);
                    return Err(machine("prepare the start")(error));
                }
            };
            let sent = Instant::now();
            let fds = descriptors(&ready, &handed);
            let spawn = Spawn {
                seq: 0,
                hostname: ready.id.short(),
                shm_bytes: (limits.memory_bytes / 2).max(SHM_LEAST),
                root_id: self.maker.root_id(&ready.slot),
                keep: fds.keep,
                mounts: ready.image.roots.iter().map(|root| root.mountpoint.clone()).collect(),
                attach: ready.slot.cgroups.attach.len(),
                born_in: ready.slot.cgroups.born_in.is_some(),
            };
            let reply = self.spawners.request(spawn, &fds.all).await;
            drop(fds);
            let started = handed.started;
            match reply {
                Ok((spawned, Some(pidfd))) => {
                    let Outcome::Running { pid } = spawned.outcome else {
                        self.bury(ready.slot, ready.id);
                        return Err(CreateError::Failed("a spawner contradicts itself".to_owned()));
                    };
                    let inside: u32 = spawned.nanos.iter().sum::<u32>() / 1000;
                    stages.push(("spawner", micros(sent).saturating_sub(inside)));
                    stages
                        .extend(STAGES.iter().zip(&spawned.nanos).map(|(name, nanos)| (*name, nanos / 1000)));
                    let pidfd = match crate::sys::watched(pidfd, Interest::READABLE) {
                        Ok(pidfd) => pidfd,
                        Err(error) => {
                            self.destroy(ready).await;
                            return Err(machine("watch the sandbox's process")(error));
                        }
                    };
                    // The overlays live in the sandbox now, and must end with it.
                    ready.overlays = Vec::new();
                    return Ok(Born { ready, pidfd, pid, started });
                }
                Ok((spawned, None)) => {
                    self.bury(ready.slot, ready.id);
                    return Err(match spawned.outcome {
                        Outcome::Failed { step, errno } => not_started(&step, errno),
                        Outcome::Running { .. } => {
                            CreateError::Failed("a spawner contradicts itself".to_owned())
                        }
                    });
                }
                Err(Lost::NotSent(error)) => {
                    self.bury(ready.slot, ready.id);
                    return Err(machine("ask a spawner")(error));
                }
                Err(Lost::Unknown) => {
                    self.destroy(ready).await;
                    if attempt == ATTEMPTS {
                        return Err(CreateError::Failed(
                            "spawners died while they started the sandbox".to_owned(),
                        ));
                    }
                    attempt += 1;
                }
            }
        }
    }

    fn fit(&self, ready: &mut Ready, id: Option<SandboxId>, limits: Limits) -> io::Result<()> {
        if let Some(id) = id.filter(|id| *id != ready.id) {
            self.maker.rename(ready, id)?;
        }
        // Before anything runs, and kept by the init.
        crate::image::runs(&ready.log)?;
        self.images.touch(&ready.image);
        let slot = &mut ready.slot;
        self.cgroups.limit(slot.index, &mut slot.cgroups, limits)
    }

    fn hand_over(&self, params: &CreateParams, limits: Limits, ready: &Ready) -> io::Result<Handed> {
        let (started, started_end) = boot::started_pipe()?;
        let (fds, _) = boot::lay_out(ready, started_end.as_fd());
        let config = &params.image.config;
        let mut env = params.env.clone();
        env.push(("OPENSANDBOX_ID".to_owned(), ready.id.to_string()));
        let document = boot::document(&Boot {
            sandbox_id: ready.id.to_string(),
            entrypoint: params.entrypoint.clone(),
            env,
            cwd: config.workdir.clone().filter(|dir| !dir.is_empty()),
            volumes: config.volumes.clone(),
            user: config.user.clone().filter(|user| !user.is_empty()),
            line_endings: params.line_endings,
            access_token: params.access_token.clone(),
            listen_tcp: self.config.listen_tcp,
            memory_limit_bytes: Some(limits.memory_bytes),
            cpu_limit_millis: Some(limits.cpu_nanos / 1_000_000),
            fds,
        })?;
        Ok(Handed { document, started_end, started })
    }

    /// Hands in a slot in which no process is.
    fn bury(&self, slot: Slot, id: SandboxId) {
        let announced = self.retire.announce();
        self.retire.hand_in(Remains { slot: Some(slot), dir: Some(self.maker.dir(id)) }, announced);
    }

    /// Ends a sandbox that did not come to life.
    async fn undo(&self, ready: Ready, pidfd: AsyncFd<OwnedFd>) {
        // The only failure for a descriptor of ours is that it is dead already.
        let _ = rustix::process::pidfd_send_signal(pidfd.get_ref(), rustix::process::Signal::KILL);
        let _ = pidfd.readable().await;
        self.bury(ready.slot, ready.id);
    }

    /// Destroys a slot in which processes may be that we know nothing of.
    async fn destroy(&self, ready: Ready) {
        let index = ready.slot.index;
        let (maker, pool) = (Arc::clone(&self.maker), Arc::clone(&self.pool));
        let announced = self.retire.announce();
        let done = tokio::task::spawn_blocking(move || {
            // Groups first: their removal kills.
            let Ready { slot, id, .. } = ready;
            maker.destroy(slot);
            let _ = std::fs::remove_file(maker.socket(index));
            if let Err(error) = crate::tree::remove(&maker.dir(id)) {
                tracing::warn!(%id, %error, "a sandbox's files cannot be removed");
            }
            pool.release(index);
            drop(announced);
        });
        if let Err(error) = done.await {
            tracing::error!(%error, "a slot was not destroyed in order");
        }
    }
}

/// What is made for one start.
struct Handed {
    document: OwnedFd,
    started_end: OwnedFd,
    started: pipe::Receiver,
}

struct Descriptors<'a> {
    all: Vec<BorrowedFd<'a>>,
    keep: usize,
}

/// The descriptors of a start in the order of [`Spawn`].
fn descriptors<'a>(ready: &'a Ready, handed: &'a Handed) -> Descriptors<'a> {
    let (_, kept) = boot::lay_out(ready, handed.started_end.as_fd());
    let mut all = kept.behind(handed.document.as_fd());
    let keep = all.len();
    let slot = &ready.slot;
    all.push(slot.net.netns.as_fd());
    all.extend(slot.user_namespace.iter().map(AsFd::as_fd));
    all.extend(ready.overlays.iter().map(AsFd::as_fd));
    all.extend(slot.cgroups.attach.iter().map(AsFd::as_fd));
    all.extend(slot.cgroups.born_in.iter().map(AsFd::as_fd));
    Descriptors { all, keep }
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

fn micros(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX)
}
