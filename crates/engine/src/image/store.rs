use super::error::{Error, Result};
use super::index::{Index, Stamp};
use super::limits::Limits;
use super::names::{self, Names};
use super::{HOST, Image, host};
use rustix::fs::FlockOperation;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use uuid::Uuid;

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Names that stand for other names, from the configuration. `repository:*` stands for all its tags.
    pub aliases: BTreeMap<String, String>,
    /// Bounds on what is loaded.
    pub limits: Limits,
    /// Root of the machine that the image `host` shows; `None` for a store without it.
    pub host_root: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { aliases: BTreeMap::new(), limits: Limits::default(), host_root: Some("/".into()) }
    }
}

/// The images below one data directory.
///
/// Several processes may have the same store open; what one loads or removes, the others see at their next look-up.
#[derive(Debug)]
pub struct ImageStore {
    root: PathBuf,
    index: PathBuf,
    layers: PathBuf,
    limits: Limits,
    aliases: BTreeMap<String, String>,
    host: Option<Arc<Image>>,
    names: RwLock<Arc<Names>>,
}

/// What a removal did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Whether the image went with its last name.
    pub image: bool,
    /// Layers deleted.
    pub layers: usize,
    /// Bytes of file content deleted.
    pub bytes: u64,
    /// Layers still needed by sandboxes, or by a load that is under way. [`ImageStore::collect`] takes them later.
    pub kept: usize,
}

/// Space taken by images, by the size of file contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Stored images, each counted once whatever its names.
    pub images: usize,
    /// Unpacked layers.
    pub layers: usize,
    /// Bytes in all layers, shared ones counted once.
    pub bytes: u64,
    /// Those of layers that no image uses.
    pub reclaimable_bytes: u64,
}

/// A directory for work in progress on the file system of the store. It is removed when dropped, and after a crash
/// by whoever opens the store next. While it exists no layer is deleted.
#[derive(Debug)]
pub struct Workspace {
    path: PathBuf,
    _lock: Lock,
}

impl Workspace {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove temporary files");
        }
    }
}

/// A lock between processes and threads. The kernel drops it with the process.
#[derive(Debug)]
struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock; `None` when it is taken and the operation does not wait.
    fn take(path: &Path, operation: FlockOperation) -> Result<Option<Self>> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)
            .map_err(|error| Error::io("open", path, error))?;
        loop {
            match rustix::fs::flock(&file, operation) {
                Ok(()) => return Ok(Some(Self { _file: file })),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(errno) => return Err(Error::io("lock", path, errno)),
            }
        }
    }
}

impl ImageStore {
    /// Opens the store below `data_dir`, making it when it is not there, and removes what a crash left behind.
    ///
    /// # Errors
    /// When directories cannot be made or the index cannot be read.
    pub fn open(data_dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(data_dir, Options::default())
    }

    /// Opens the store with options.
    ///
    /// # Errors
    /// As [`ImageStore::open`], and for aliases that are no image names.
    pub fn open_with(data_dir: impl AsRef<Path>, options: Options) -> Result<Self> {
        let data_dir = data_dir.as_ref();
        let data_dir = std::path::absolute(data_dir).map_err(|error| Error::io("open", data_dir, error))?;
        let root = data_dir.join("images");
        for directory in [&root, &root.join("layers"), &root.join("host"), &root.join("tmp")] {
            std::fs::create_dir_all(directory).map_err(|error| Error::io("create", directory, error))?;
        }
        // Set-id programs of images must be out of reach for the host's users.
        std::fs::set_permissions(&root, Permissions::from_mode(0o700))
            .map_err(|error| Error::io("set the mode of", &root, error))?;
        let mut aliases = BTreeMap::new();
        for (name, target) in options.aliases {
            aliases.insert(names::alias_key(&name)?, names::alias_target(&target)?);
        }
        let host = match &options.host_root {
            Some(machine) => {
                let workspace = Self::workspace_in(&root)?;
                Some(Arc::new(host::prepare(machine, &root.join("host"), workspace.path())?))
            }
            None => None,
        };
        let index_path = root.join("index.json");
        let layers = root.join("layers");
        let (index, stamp) = Index::read(&index_path)?;
        let names = Names::new(index, stamp, &layers, host.clone(), &aliases);
        let store = Self {
            index: index_path,
            layers,
            limits: options.limits,
            aliases,
            host,
            names: RwLock::new(Arc::new(names)),
            root,
        };
        store.recover()?;
        Ok(store)
    }

    /// Removes what loads and removals that died left behind, unless one is under way.
    fn recover(&self) -> Result<()> {
        let Some(_gc) = self.lock_gc(FlockOperation::NonBlockingLockExclusive)? else {
            return Ok(());
        };
        self.empty_temporary()?;
        let orphans: Vec<_> = {
            let known = self.current()?;
            let (found, index) = (list_dir(&self.layers)?, &known.index.layers);
            for lost in index.keys().filter(|layer| !found.contains(*layer)) {
                tracing::warn!(layer = %lost, "an image layer is gone from the store; load its images again");
            }
            found.into_iter().filter(|layer| !index.contains_key(layer)).collect()
        };
        if orphans.is_empty() && self.is_complete()? {
            return Ok(());
        }
        self.update(|index| {
            let found = list_dir(&self.layers)?;
            index.layers.retain(|layer, _| found.contains(layer));
            let whole = |layers: &[String]| layers.iter().all(|layer| found.contains(layer));
            index.images.retain(|_, image| whole(&image.layers) && whole(&image.lowers));
            index.references.retain(|_, id| index.images.contains_key(id));
            for layer in found.iter().filter(|layer| !index.layers.contains_key(*layer)) {
                self.discard(&self.layers.join(layer))?;
            }
            Ok(())
        })?;
        self.empty_temporary()
    }

    /// Whether every layer of the index is there.
    fn is_complete(&self) -> Result<bool> {
        let found = list_dir(&self.layers)?;
        Ok(self.current()?.index.layers.keys().all(|layer| found.contains(layer)))
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn layer_path(&self, layer: &str) -> PathBuf {
        self.layers.join(layer)
    }

    fn lock_gc(&self, operation: FlockOperation) -> Result<Option<Lock>> {
        Lock::take(&self.root.join("gc.lock"), operation)
    }

    /// Makes a directory for work in progress, such as the layout directory of an image being fetched.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn workspace(&self) -> Result<Workspace> {
        Self::workspace_in(&self.root)
    }

    fn workspace_in(root: &Path) -> Result<Workspace> {
        let lock = root.join("gc.lock");
        let Some(lock) = Lock::take(&lock, FlockOperation::LockShared)? else {
            // A waiting lock call only returns with the lock.
            return Err(Error::io("lock", lock, io::Error::from(io::ErrorKind::WouldBlock)));
        };
        let path = root.join("tmp").join(Uuid::new_v4().to_string());
        std::fs::create_dir(&path).map_err(|error| Error::io("create", &path, error))?;
        Ok(Workspace { path, _lock: lock })
    }

    /// The names as they are now. Costs one `stat` when nothing changed.
    pub(super) fn current(&self) -> Result<Arc<Names>> {
        let stamp = Stamp::of(&self.index)?;
        let known = Arc::clone(&self.names.read().unwrap_or_else(PoisonError::into_inner));
        if known.stamp == stamp {
            return Ok(known);
        }
        let (index, stamp) = Index::read(&self.index)?;
        Ok(self.set_names(index, stamp))
    }

    fn set_names(&self, index: Index, stamp: Option<Stamp>) -> Arc<Names> {
        let names = Arc::new(Names::new(index, stamp, &self.layers, self.host.clone(), &self.aliases));
        *self.names.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&names);
        names
    }

    /// Changes the index while no other process does.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut Index) -> Result<T>) -> Result<T> {
        let _lock = Lock::take(&self.root.join("index.lock"), FlockOperation::LockExclusive)?;
        let (mut index, _) = Index::read(&self.index)?;
        let before = index.clone();
        let answer = change(&mut index)?;
        if index != before {
            index.write(&self.index)?;
            let stamp = Stamp::of(&self.index)?;
            self.set_names(index, stamp);
        }
        Ok(answer)
    }

    /// Finds the image that a name stands for: a stored reference first, then an alias, then [`HOST`], then an id or
    /// the start of one.
    ///
    /// # Errors
    /// [`Error::InvalidName`] for what can be no image's name, [`Error::AliasLoop`], and failures to read the index.
    pub fn resolve(&self, name: &str) -> Result<Option<Arc<Image>>> {
        self.current()?.resolve(name)
    }

    /// As [`ImageStore::resolve`], for a name that must be known.
    ///
    /// # Errors
    /// [`Error::NotFound`], and those of [`ImageStore::resolve`].
    pub fn inspect(&self, name: &str) -> Result<Arc<Image>> {
        self.resolve(name)?.ok_or_else(|| Error::NotFound { name: name.into() })
    }

    /// All images, one per name, the built-in one first.
    ///
    /// # Errors
    /// When the index cannot be read.
    pub fn list(&self) -> Result<Vec<Arc<Image>>> {
        Ok(self.current()?.list())
    }

    /// All aliases, those of the configuration included.
    ///
    /// # Errors
    /// When the index cannot be read.
    pub fn aliases(&self) -> Result<BTreeMap<String, String>> {
        Ok(self.current()?.aliases.clone())
    }

    /// Makes `name` stand for `target`; `repository:*` stands for all its tags. The target need not exist yet.
    ///
    /// # Errors
    /// [`Error::InvalidName`], [`Error::Reserved`], and [`Error::AliasLoop`] when aliases would lead to themselves.
    pub fn set_alias(&self, name: &str, target: &str) -> Result<()> {
        let (key, target) = (names::alias_key(name)?, names::alias_target(target)?);
        self.update(|index| {
            index.aliases.insert(key.clone(), target.clone());
            let names = Names::new(index.clone(), None, &self.layers, self.host.clone(), &self.aliases);
            names.resolve(&target).map(drop)
        })
    }

    /// Forgets an alias. Those of the configuration come back when the store is opened again.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no stored alias has that name.
    pub fn remove_alias(&self, name: &str) -> Result<()> {
        let key = names::alias_key(name)?;
        self.update(|index| match index.aliases.remove(&key) {
            Some(_) => Ok(()),
            None => Err(Error::NotFound { name: name.into() }),
        })
    }

    /// Removes a name, and with its last name the image. An id removes all names of its image.
    ///
    /// Layers go when no image needs them and `in_use`, asked with a layer's directory, says that no sandbox does, nor
    /// one that is being made of an image resolved earlier. A process that does not know the sandboxes answers `true`;
    /// the one that does calls [`ImageStore::collect`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Reserved`] for the built-in image, and failures of the file system.
    pub fn remove(&self, name: &str, in_use: &dyn Fn(&Path) -> bool) -> Result<Removed> {
        if names::is_host(name) {
            return Err(Error::Reserved { name: HOST.into() });
        }
        let image = self.update(|index| {
            let key = super::Reference::parse(name).map(|reference| reference.to_string());
            let names = match key {
                Ok(key) if index.references.contains_key(&key) => BTreeSet::from([key]),
                _ => {
                    let names = Names::new(index.clone(), None, &self.layers, None, &BTreeMap::new());
                    let image = names.by_id(name).ok_or_else(|| Error::NotFound { name: name.into() })?;
                    let same = index.references.iter().filter(|(_, id)| **id == image.id);
                    same.map(|(reference, _)| reference.clone()).collect()
                }
            };
            let images = index.images.len();
            index.references.retain(|reference, _| !names.contains(reference));
            drop_unnamed(index);
            Ok(index.images.len() < images)
        })?;
        Ok(Removed { image, ..self.collect(in_use)? })
    }

    /// Deletes layers that neither an image nor, as `in_use` says, a sandbox needs, and old states of [`HOST`].
    ///
    /// # Errors
    /// Failures of the file system. What was not deleted stays known and is tried again next time.
    pub fn collect(&self, in_use: &dyn Fn(&Path) -> bool) -> Result<Removed> {
        let unused = |index: &Index| -> Vec<String> {
            let used = index.used_layers();
            index.layers.keys().filter(|layer| !used.contains(layer.as_str())).cloned().collect()
        };
        let Some(_gc) = self.lock_gc(FlockOperation::NonBlockingLockExclusive)? else {
            return Ok(Removed { kept: unused(&self.current()?.index).len(), ..Removed::default() });
        };
        let mut removed = Removed::default();
        self.update(|index| {
            for layer in unused(index) {
                let path = self.layers.join(&layer);
                if in_use(&path) {
                    removed.kept += 1;
                    continue;
                }
                self.discard(&path)?;
                removed.layers += 1;
                removed.bytes += index.layers.remove(&layer).map_or(0, |record| record.bytes);
            }
            Ok(())
        })?;
        let hosts = self.root.join("host");
        let current = self.host.as_ref().and_then(|host| host.roots.first()?.lowers.first());
        for old in list_dir(&hosts)?.into_iter().map(|name| hosts.join(name)) {
            if self.host.is_some() && Some(&old) != current && !in_use(&old) {
                self.discard(&old)?;
            }
        }
        self.empty_temporary()?;
        Ok(removed)
    }

    /// Space taken by images.
    ///
    /// # Errors
    /// When the index cannot be read.
    pub fn disk_usage(&self) -> Result<DiskUsage> {
        let names = self.current()?;
        let used = names.index.used_layers();
        let mut usage = DiskUsage {
            images: names.index.images.len(),
            layers: names.index.layers.len(),
            ..DiskUsage::default()
        };
        for (layer, record) in &names.index.layers {
            usage.bytes += record.bytes;
            if !used.contains(layer.as_str()) {
                usage.reclaimable_bytes += record.bytes;
            }
        }
        Ok(usage)
    }

    /// Takes a directory out of sight at once; its content is deleted with the other temporary files.
    fn discard(&self, path: &Path) -> Result<()> {
        let trash = self.root.join("tmp").join(Uuid::new_v4().to_string());
        match std::fs::rename(path, &trash) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, error)),
            _ => Ok(()),
        }
    }

    /// The caller holds the lock that keeps loads out.
    fn empty_temporary(&self) -> Result<()> {
        let temporary = self.root.join("tmp");
        for name in list_dir(&temporary)? {
            let path = temporary.join(name);
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(|error| Error::io("remove", &path, error))?;
        }
        Ok(())
    }
}

/// Forgets images that lost their last name.
pub(super) fn drop_unnamed(index: &mut Index) {
    let named: BTreeSet<_> = index.references.values().cloned().collect();
    index.images.retain(|id, _| named.contains(id));
}

fn list_dir(path: &Path) -> Result<BTreeSet<String>> {
    let failed = |error| Error::io("read", path, error);
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        names.insert(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}
