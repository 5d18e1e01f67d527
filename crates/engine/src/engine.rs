//! The engine: its parts, their start and their end.

use std::collections::HashMap;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use osb_protocol::ids::SandboxId;
use tokio::sync::{mpsc, watch};

use crate::base::Base;
use crate::boot::Booter;
use crate::caps::CapSet;
use crate::cgroup::{self, Cgroups};
use crate::config::{EngineConfig, UserNamespace};
use crate::error::StartError;
use crate::helper::handle::Recipe;
use crate::helper::message::Hello;
use crate::helper::spawners::Spawners;
use crate::helper::{PREPARER_ARG, SPAWNER_ARG};
use crate::image::{self, Image, ImageStore};
use crate::net::{DnsForwarder, NetConfig, Network};
use crate::pool::Pool;
use crate::retire::Retire;
use crate::room::Room;
use crate::sandbox::{Ended, Sandbox};
use crate::slot::{Maker, SANDBOXES};

/// Most slots: 65,536 ids each in the 32 bits of ids, less the host's.
const MOST_SLOTS: u32 = 32_768;

/// A handle on the engine.
#[derive(Debug, Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: EngineConfig,
    pub(crate) instance: String,
    pub(crate) user_namespace: bool,
    pub(crate) images: ImageStore,
    pub(crate) base: Arc<Base>,
    pub(crate) cgroups: Cgroups,
    pub(crate) maker: Arc<Maker>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) retire: Arc<Retire>,
    pub(crate) booter: Arc<Booter>,
    pub(crate) room: Room,
    pub(crate) table: Mutex<Table>,
    pub(crate) events: mpsc::UnboundedSender<Event>,
    /// The server's own network namespace.
    pub(crate) home: OwnedFd,
    /// Becomes true when the engine stops watching its sandboxes.
    pub(crate) stopped: watch::Sender<bool>,
    receiver: Mutex<Option<mpsc::UnboundedReceiver<Event>>>,
    end: Mutex<Option<End>>,
}

/// What [`Engine::shutdown`] takes apart.
#[derive(Debug)]
struct End {
    preparing: JoinHandle<()>,
    retiring: Vec<JoinHandle<()>>,
    dns: Option<DnsForwarder>,
    /// Held as long as this engine uses the directory.
    lock: File,
}

/// All sandboxes that somebody knows of.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) live: HashMap<SandboxId, Arc<Sandbox>>,
    /// Ended by themselves: their directories.
    pub(crate) ended: HashMap<SandboxId, PathBuf>,
    /// Being made: places, with the ids that were asked for.
    pub(crate) making: Vec<Option<SandboxId>>,
}

/// What happens without the caller's doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A sandbox has ended. Its files stay until it is deleted.
    Ended {
        /// Which.
        id: SandboxId,
        /// How.
        ended: Ended,
    },
}

impl Engine {
    /// Starts the engine. To be called within a tokio runtime; blocks for some 30 milliseconds.
    ///
    /// Nothing is prepared before [`Engine::adopt`] has been called, since it is not known yet what still runs.
    pub fn start(config: EngineConfig) -> Result<Self, StartError> {
        if !rustix::process::geteuid().is_root() {
            return Err(StartError::NotRoot);
        }
        if let Some(text) = crate::check::too_old() {
            return Err(StartError::Missing(text));
        }
        let caps = CapSet::usual_without(&config.drop_capabilities)
            .map_err(|error| StartError::Setting(format!("drop_capabilities: {error}")))?;
        let layout = cgroup::discover().map_err(StartError::io("find cgroups"))?;
        raise_descriptor_limit();
        let data_dir = data_dir(&config.data_dir)?;
        let lock = lock_dir(&data_dir)?;
        let instance = instance(&data_dir).map_err(StartError::io("read the instance's id"))?;
        let run_dir = config.run_dir.clone().unwrap_or_else(|| format!("/run/opensandbox-{instance}").into());
        let mut undo = Undo { run_dir: Some(run_dir.clone()), cgroups: None };
        private_dir(&run_dir)?;
        private_dir(&data_dir.join(SANDBOXES))?;
        spread(&data_dir.join(SANDBOXES));
        let cgroups = Cgroups::new(layout, &instance).map_err(StartError::io("make cgroups"))?;
        undo.cgroups = Some(cgroups.clone());
        let base = Arc::new(Base::set_up(&data_dir, &config.execd)?);
        let options = image::Options {
            aliases: config.image_aliases.clone(),
            max_disk: config.image_max_disk,
            ..image::Options::default()
        };
        let images = ImageStore::open_with(&data_dir, options)
            .map_err(|error| StartError::Missing(format!("the image store cannot be opened: {error}")))?;

        let probe_dir = data_dir.join("probe");
        fresh_dir(&probe_dir).map_err(StartError::io("make a directory to try overlays in"))?;
        let mut hello = Hello {
            caps: caps.0,
            user_namespace: config.user_namespace != UserNamespace::Off,
            id_base: config.id_base,
            probe_dir: probe_dir.to_string_lossy().into_owned(),
        };
        let recipe = Recipe::new(config.helper.as_deref(), PREPARER_ARG, "osb-preparer");
        let (preparer, ready) = recipe.start(&hello, None).map_err(StartError::io("start the preparer"))?;
        if let Some(reason) = ready.no_user_namespace {
            if config.user_namespace == UserNamespace::Required {
                return Err(StartError::Missing(format!("user namespaces cannot be used: {reason}")));
            }
            tracing::warn!(reason, "sandboxes run without user namespaces: root inside is root outside");
            hello.user_namespace = false;
        }
        if !hello.user_namespace {
            // Without the id mapping a device made inside would be the host's.
            hello.caps = caps.without("MKNOD").0;
        }

        let execd = base.execd.try_clone().map_err(StartError::io("share the sandbox daemon"))?;
        let spawner = Recipe::new(config.helper.as_deref(), SPAWNER_ARG, "osb-spawner");
        let spawners = Spawners::start(spawner, hello.clone(), execd, config.spawners.clamp(1, 8))
            .map_err(StartError::io("start the spawners"))?;
        let network = Network::start(NetConfig { instance: instance.clone(), ..config.network.clone() })
            .map_err(|error| StartError::Missing(format!("the network cannot be set up: {error}")))?;
        let dns = match network.serve_dns() {
            Ok(dns) => dns,
            Err(error) => {
                // Stays when sandboxes of an earlier server have it.
                let _ = network.stop();
                let text = format!("DNS for sandboxes cannot be set up: {error}");
                return Err(StartError::Missing(text));
            }
        };

        let most = config.max_sandboxes.saturating_add(config.ready_slots).saturating_add(16);
        let ids = (u32::MAX - config.id_base) / crate::helper::preparer::IDS;
        let slots = u32::try_from(most).unwrap_or(u32::MAX).min(network.slots()).min(MOST_SLOTS).min(ids);
        let user_namespace = hello.user_namespace;
        let maker = Arc::new(Maker {
            network: RwLock::new(Some(network)),
            cgroups: cgroups.clone(),
            base: Arc::clone(&base),
            data_dir: data_dir.clone(),
            run_dir,
            default_limits: config.default_limits,
            id_base: config.id_base,
            recipe,
            hello,
            keeps: config.ready_slots > 0 && crate::kept::change_times_are_exact(&probe_dir),
            preparer: Mutex::new(Some(preparer)),
        });
        let booter = Arc::new(Booter {
            maker: Arc::clone(&maker),
            spawners,
            boot_id: crate::identity::boot_id().map_err(StartError::io("read the boot id"))?,
            listen_tcp: config.listen_tcp,
        });
        let pool = Pool::new(Arc::clone(&booter), config.ready_slots, slots);
        let prepared = Arc::downgrade(&pool);
        images.on_removal(move |id| {
            if let Some(pool) = prepared.upgrade() {
                pool.forget(id);
            }
        });
        let retire = Retire::new(Arc::clone(&maker), Arc::clone(&pool));
        let preparing = pool.start().map_err(StartError::io("start a thread"))?;
        let retiring = retire.start().map_err(StartError::io("start a thread"))?;
        let (events, receiver) = mpsc::unbounded_channel();
        let inner = Inner {
            instance,
            user_namespace,
            images,
            base,
            cgroups,
            maker,
            pool,
            retire,
            booter,
            room: Room::new(data_dir, config.memory_floor_bytes, config.disk_floor_bytes),
            table: Mutex::default(),
            events,
            home: File::open("/proc/self/ns/net")
                .map_err(StartError::io("open the network namespace"))?
                .into(),
            stopped: watch::Sender::new(false),
            receiver: Mutex::new(Some(receiver)),
            end: Mutex::new(Some(End { preparing, retiring, dns, lock })),
            config,
        };
        undo.disarm();
        let engine = Self { inner: Arc::new(inner) };
        tokio::spawn(keep_images(Arc::downgrade(&engine.inner), engine.inner.stopped.subscribe()));
        Ok(engine)
    }

    /// The image store.
    #[must_use]
    pub fn images(&self) -> &ImageStore {
        &self.inner.images
    }

    /// The id of this instance: it names cgroups, interfaces and rules.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.inner.instance
    }

    /// Whether sandboxes have user namespaces.
    #[must_use]
    pub fn has_user_namespaces(&self) -> bool {
        self.inner.user_namespace
    }

    /// The events; can be taken once.
    #[must_use]
    pub fn events(&self) -> Option<mpsc::UnboundedReceiver<Event>> {
        self.inner.receiver.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether another sandbox could be made now.
    ///
    /// # Errors
    /// [`CreateError::Exhausted`](crate::CreateError::Exhausted) says what is used up.
    pub fn room(&self) -> Result<(), crate::CreateError> {
        self.inner.table_with_room().map(drop)
    }

    /// Begins to prepare sandboxes of an image before anybody asks for one.
    pub fn expect_image(&self, image: &Arc<Image>) {
        self.inner.pool.expect(image);
    }

    /// Gives up what is prepared of an image, so that it can be removed. Blocks for some milliseconds.
    pub fn forget_image(&self, image_id: &str) {
        self.inner.pool.forget(image_id);
    }

    /// Sandboxes prepared of an image.
    #[must_use]
    pub fn ready_slots(&self, image_id: &str) -> usize {
        self.inner.pool.ready(image_id)
    }

    /// Process ids of the inits that wait in prepared sandboxes.
    #[must_use]
    pub fn standby_pids(&self) -> Vec<i32> {
        self.inner.pool.standby_pids()
    }

    /// Process ids of the helpers: spawners, then the preparer.
    #[must_use]
    pub fn helper_pids(&self) -> Vec<u32> {
        let mut pids = self.inner.booter.spawners.pids();
        pids.extend(self.inner.maker.preparer_pid());
        pids
    }

    /// Waits until everything of deleted sandboxes is gone.
    pub async fn settled(&self) {
        self.inner.retire.settled().await;
    }

    /// Stops the engine; sandboxes go on and can be adopted by the next. Blocks until deleted sandboxes and
    /// prepared slots are gone.
    pub async fn shutdown(&self) {
        let Some(end) = self.inner.end.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let End { preparing, retiring, dns, lock } = end;
        self.inner.pool.close();
        let pool = Arc::clone(&self.inner.pool);
        // What dies does so before its parents end: those reap it.
        let blocking = tokio::task::spawn_blocking(move || {
            join(preparing);
            pool.end_standbys();
        });
        if let Err(error) = blocking.await {
            tracing::error!(%error, "prepared sandboxes did not end in order");
        }
        let inner = Arc::clone(&self.inner);
        inner.retire.settled().await;
        inner.booter.spawners.close();
        inner.stopped.send_replace(true);
        let blocking = tokio::task::spawn_blocking(move || {
            inner.retire.close();
            retiring.into_iter().for_each(join);
            inner.pool.clear();
            inner.maker.close();
            drop(dns);
            inner.maker.stop_network();
            inner.cgroups.remove_bases();
            // Succeeds only when no sandbox has its socket in it.
            let _ = std::fs::remove_dir(&inner.maker.run_dir);
            drop(lock);
        });
        if let Err(error) = blocking.await {
            tracing::error!(%error, "the engine did not stop in order");
        }
    }
}

/// Removes what a start has made before it failed, unless sandboxes of an earlier server are in it.
#[derive(Debug)]
struct Undo {
    run_dir: Option<PathBuf>,
    cgroups: Option<Cgroups>,
}

impl Undo {
    fn disarm(&mut self) {
        (self.run_dir, self.cgroups) = (None, None);
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(dir) = &self.run_dir {
            // Succeeds only when it is empty.
            let _ = std::fs::remove_dir(dir);
        }
        if let Some(cgroups) = &self.cgroups {
            cgroups.remove_bases();
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a thread of the engine had panicked");
    }
}

impl Inner {
    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        // Every critical section leaves the table whole at each step.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Follows what other processes do to the images: gives up what is prepared of removed ones, and deletes layers that
/// nobody needs any more.
async fn keep_images(inner: Weak<Inner>, mut stopped: watch::Receiver<bool>) {
    const LOOK: Duration = Duration::from_secs(2);
    /// The longest wait, while sandboxes stand on what is to be deleted.
    const LATER: Duration = Duration::from_secs(30);
    let mut wait = LOOK;
    loop {
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = stopped.wait_for(|stopped| *stopped) => return,
        }
        let Some(inner) = inner.upgrade() else { return };
        let done = tokio::task::spawn_blocking(move || {
            if !inner.images.has_garbage()? {
                return Ok(0);
            }
            let known = inner.images.list()?;
            for id in inner.pool.prepared_images() {
                if !known.iter().any(|image| image.id == id) {
                    inner.pool.forget(&id);
                }
            }
            inner.images.collect().map(|removed| removed.kept)
        });
        match done.await {
            Ok(Ok(kept)) => wait = if kept > 0 { (wait * 2).min(LATER) } else { LOOK },
            Ok(Err(error)) => tracing::warn!(%error, "removed images cannot be deleted from the disk"),
            Err(error) => tracing::error!(%error, "removed images were not deleted in order"),
        }
    }
}

fn data_dir(path: &Path) -> Result<PathBuf, StartError> {
    let action = format!("make the data directory '{}'", path.display());
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(StartError::io(action.clone()))?;
    // Absolute: helpers work from elsewhere.
    path.canonicalize().map_err(StartError::io(action))
}

fn lock_dir(data_dir: &Path) -> Result<File, StartError> {
    let path = data_dir.join("lock");
    let action = format!("lock '{}'", data_dir.display());
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(StartError::io(action.clone()))?;
    // Whoever only asks whether a server runs has the lock for a moment.
    const ATTEMPTS: u32 = 20;
    for attempt in 1.. {
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) if attempt < ATTEMPTS => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StartError::InUse(data_dir.to_owned())),
            Err(error) => return Err(StartError::io(action)(error.into())),
        }
    }
    Ok(file)
}

/// Eight hexadecimal digits, chosen once per data directory.
fn instance(data_dir: &Path) -> io::Result<String> {
    let path = data_dir.join("instance");
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let text = text.trim();
            let good = text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            if good {
                Ok(text.to_owned())
            } else {
                Err(io::Error::other(format!("'{}' does not hold eight hexadecimal digits", path.display())))
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let instance = SandboxId::random().short();
            let part = data_dir.join("instance.part");
            std::fs::write(&part, format!("{instance}\n"))?;
            std::fs::rename(part, path)?;
            Ok(instance)
        }
        Err(error) => Err(error),
    }
}

/// A directory that only root can enter.
fn private_dir(path: &Path) -> Result<(), StartError> {
    let action = format!("make '{}'", path.display());
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(StartError::io(action)(error));
        }
        Err(_) => {}
    }
    let meta = path.symlink_metadata().map_err(StartError::io(action.clone()))?;
    if !meta.is_dir() || meta.uid() != 0 {
        return Err(StartError::Setting(format!("'{}' is not a directory of root's", path.display())));
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).map_err(StartError::io(action))
}

/// Asks ext4 to put the directories in here far from each other. Otherwise all sandboxes use the inodes of one block
/// group, where, in some modes, each new file looks through all that were deleted in the last minutes.
fn spread(dir: &Path) {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let Ok(dir) = File::open(dir) else { return };
    if let Ok(flags) = ioctl_getflags(&dir) {
        // Only a wish, which other file systems do not know.
        let _ = ioctl_setflags(&dir, flags | IFlags::TOPDIR);
    }
}

fn fresh_dir(path: &Path) -> io::Result<()> {
    crate::tree::remove(path)?;
    DirBuilder::new().mode(0o700).create(path)
}

/// A ready slot holds about twenty descriptors.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const WANTED: u64 = 1_048_576;
    let now = getrlimit(Resource::Nofile);
    if now.current.is_some_and(|current| current < WANTED) {
        let both = Rlimit { current: Some(WANTED), maximum: now.maximum.map(|hard| hard.max(WANTED)) };
        if setrlimit(Resource::Nofile, both).is_err() {
            let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
        }
    }
}
