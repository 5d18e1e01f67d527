use super::Image;
use super::error::{Error, Result};
use super::host::HostImage;
use super::index::{Index, Stamp};
use super::last_used::Touched;
use super::limits::Limits;
use super::names::{self, Names};
use super::workspace::{Lock, Temporary, Workspace, lock_layers};
use rustix::fs::FlockOperation;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Names that stand for other names, from the configuration. `repository:*` stands for all its tags.
    pub aliases: BTreeMap<String, String>,
    /// Bounds on what is loaded.
    pub limits: Limits,
    /// Root of the machine that the image `host` shows; `None` for a store without it.
    pub host_root: Option<PathBuf>,
    /// Bytes of disk that all images may take; `None` is as many as there are. Loading more removes images that no
    /// sandbox uses, those not used for the longest time first.
    pub max_disk: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            aliases: BTreeMap::new(),
            limits: Limits::default(),
            host_root: Some("/".into()),
            max_disk: None,
        }
    }
}

/// The images below one data directory.
///
/// Several processes may have the same store open; what one loads or removes, the others see at their next look-up.
pub struct ImageStore {
    data_dir: PathBuf,
    root: PathBuf,
    index: PathBuf,
    layers: PathBuf,
    limits: Limits,
    pub(super) max_disk: Option<u64>,
    aliases: BTreeMap<String, String>,
    pub(super) host: Arc<HostImage>,
    names: RwLock<Arc<Names>>,
    pub(super) release: OnceLock<Release>,
    pub(super) touched: Touched,
}

impl std::fmt::Debug for ImageStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageStore").field("root", &self.root).finish_non_exhaustive()
    }
}

/// Gives up what was prepared of an image that is being removed, told by its id.
type Release = Box<dyn Fn(&str) + Send + Sync>;

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
        for directory in &["", "layers", "host", "tmp", "used"].map(|name| root.join(name)) {
            std::fs::create_dir_all(directory).map_err(|error| Error::io("create", directory, error))?;
        }
        // Set-id programs of images must be out of reach for the host's users.
        std::fs::set_permissions(&root, Permissions::from_mode(0o700))
            .map_err(|error| Error::io("set the mode of", &root, error))?;
        let mut aliases = BTreeMap::new();
        for (name, target) in options.aliases {
            aliases.insert(names::alias_key(&name)?, names::alias_target(&target)?);
        }
        let host = Arc::new(HostImage::new(options.host_root, &root));
        let index_path = root.join("index.json");
        let layers = root.join("layers");
        let (index, stamp) = Index::read(&index_path)?;
        let names = Names::new(index, stamp, &layers, Arc::clone(&host), &aliases);
        let store = Self {
            index: index_path,
            layers,
            limits: options.limits,
            max_disk: options.max_disk,
            aliases,
            host,
            names: RwLock::new(Arc::new(names)),
            release: OnceLock::new(),
            touched: Touched::default(),
            data_dir,
            root,
        };
        store.recover()?;
        Ok(store)
    }

    /// Removes what loads and removals that died left behind.
    pub(super) fn recover(&self) -> Result<()> {
        let lock = self.lock_layers(FlockOperation::LockExclusive)?;
        let mut temporary = Temporary::look(&self.root)?;
        let known = self.current()?;
        let found = list_dir(&self.layers)?;
        for lost in known.index.layers.keys().filter(|layer| !found.contains(*layer)) {
            tracing::warn!(layer = %lost, "an image layer is gone from the store; load its images again");
        }
        if !self.is_complete()? || !found.iter().all(|layer| known.index.layers.contains_key(layer)) {
            self.update(|index| {
                let found = list_dir(&self.layers)?;
                index.layers.retain(|layer, _| found.contains(layer));
                let whole = |layers: &[String]| layers.iter().all(|layer| found.contains(layer));
                index.images.retain(|_, image| whole(&image.layers) && whole(&image.lowers));
                index.references.retain(|_, id| index.images.contains_key(id));
                let orphans = found.iter().filter(|layer| !index.layers.contains_key(*layer));
                // What somebody's load has just put there gets its record in a moment.
                for layer in
                    orphans.filter(|layer| !temporary.pinned.contains(*layer)).cloned().collect::<Vec<_>>()
                {
                    temporary.discard(&self.root, &self.layers.join(layer))?;
                }
                Ok(())
            })?;
        }
        drop(lock);
        temporary.delete()
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

    pub(super) fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    pub(super) fn lock_layers(&self, operation: FlockOperation) -> Result<Lock> {
        lock_layers(&self.root, operation)
    }

    /// Makes a directory for work in progress, such as the layout directory of an image being fetched.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn workspace(&self) -> Result<Workspace> {
        Workspace::new(&self.root)
    }

    /// Whether the store has the layer whose unpacked bytes have this digest; then it stays as long as the workspace is
    /// there, and whoever fetches an image into the workspace can leave it out.
    pub fn hold_layer(&self, workspace: &Workspace, diff_id: &str) -> bool {
        let Some(layer) = diff_id.strip_prefix("sha256:") else { return false };
        let held = || -> Result<bool> {
            let _shared = self.lock_layers(FlockOperation::LockShared)?;
            let has = self.current()?.has_layer(layer);
            if has {
                workspace.pin(&[layer.to_owned()])?;
            }
            Ok(has)
        };
        // One that cannot be held is fetched.
        held().unwrap_or_else(|error| {
            tracing::debug!(layer, %error, "a stored layer cannot be held");
            false
        })
    }

    /// Has `release` called with the id of every image that is removed through this store, for whoever prepares
    /// sandboxes ahead. Can be set once.
    pub fn on_removal(&self, release: impl Fn(&str) + Send + Sync + 'static) {
        // The engine alone does so, when it starts.
        let _ = self.release.set(Box::new(release));
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
        let names = Arc::new(Names::new(index, stamp, &self.layers, Arc::clone(&self.host), &self.aliases));
        *self.names.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&names);
        names
    }

    /// Changes the index while no other process does.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut Index) -> Result<T>) -> Result<T> {
        let _lock = Lock::wait(&self.root.join("index.lock"), FlockOperation::LockExclusive)?;
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
    /// [`Error::NotFound`], [`Error::AliasDangling`], and those of [`ImageStore::resolve`].
    pub fn inspect(&self, name: &str) -> Result<Arc<Image>> {
        let names = self.current()?;
        names.resolve(name)?.ok_or_else(|| match names.alias_target(name) {
            Some(target) => Error::AliasDangling { name: name.into(), target },
            None => Error::NotFound { name: name.into(), similar: names.similar(name) },
        })
    }

    /// All images, one per name, the built-in one first.
    ///
    /// # Errors
    /// When the index cannot be read.
    pub fn list(&self) -> Result<Vec<Arc<Image>>> {
        self.current()?.list()
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
            let names = Names::new(index.clone(), None, &self.layers, Arc::clone(&self.host), &self.aliases);
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
            None => {
                let similar = names::similar(name, index.aliases.keys().map(String::as_str));
                Err(Error::NotFound { name: name.into(), similar })
            }
        })
    }
}

/// Forgets images that lost their last name.
pub(super) fn drop_unnamed(index: &mut Index) {
    let named: BTreeSet<_> = index.references.values().cloned().collect();
    index.images.retain(|id, _| named.contains(id));
}

pub(super) fn list_dir(path: &Path) -> Result<BTreeSet<String>> {
    let failed = |error| Error::io("read", path, error);
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        names.insert(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}
