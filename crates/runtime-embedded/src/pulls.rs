//! Pulls from registries: one for all who wait for the same image, ended when nobody does.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use osb_engine::Engine;
use osb_engine::image::{Image, LoadOptions, Reference, Workspace};
use osb_registry::{Phase, Platform, Progress, Puller};
use osb_runtime::{CreateError, FetchError, FetchPhase, FetchProgress, ImageSource};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::failure;
use crate::images::{Naming, image_error, is_for, normal};

type Outcome = Result<Arc<Image>, CreateError>;
type Waiting = BoxFuture<'static, Outcome>;

/// Pulls under way. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Pulls {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    naming: Naming,
    puller: Puller,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    begun: u64,
    /// By complete name, platform and account: who has no right to an image gets none by another's.
    under_way: HashMap<ImageSource, Pull>,
}

struct Pull {
    number: u64,
    progress: watch::Receiver<FetchProgress>,
    /// Alive as long as somebody waits.
    done: WeakShared<Waiting>,
}

impl std::fmt::Debug for Pulls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pulls").finish_non_exhaustive()
    }
}

impl Pulls {
    pub(crate) fn new(engine: Engine, naming: Naming, puller: Puller) -> Self {
        let inner = Inner { engine, naming, puller, table: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// Joins the pull of an image, or begins one. It ends when the last of its futures is dropped.
    pub(crate) fn join(
        &self,
        source: ImageSource,
    ) -> Result<(watch::Receiver<FetchProgress>, Shared<Waiting>), CreateError> {
        let target = self.inner.naming.target(self.inner.engine.images(), &source.name)?;
        let key = ImageSource { name: target.to_string(), ..source.clone() };
        let mut table = self.inner.table();
        if let Some(pull) = table.under_way.get(&key)
            && let Some(done) = pull.done.upgrade()
        {
            return Ok((pull.progress.clone(), done));
        }
        let (sender, progress) = watch::channel(FetchProgress::default());
        let number = table.begun;
        table.begun += 1;
        let entry = Entry { inner: Arc::clone(&self.inner), key: key.clone(), number };
        // In a task of its own: those who wait look at it at their own pace.
        let task = AbortOnDropHandle::new(tokio::spawn(async move {
            let outcome = entry.inner.pull(&source, &target, Arc::new(sender)).await;
            drop(entry);
            outcome
        }));
        let waiting: Waiting = Box::pin(async move {
            task.await.unwrap_or_else(|error| {
                Err(CreateError::Failed(format!("the pull of the image was broken off: {error}")))
            })
        });
        let done = waiting.shared();
        if let Some(weak) = done.downgrade() {
            table.under_way.insert(key, Pull { number, progress: progress.clone(), done: weak });
        }
        Ok((progress, done))
    }
}

/// Takes a pull out of the table when it has ended, however it ended.
struct Entry {
    inner: Arc<Inner>,
    key: ImageSource,
    number: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut table = self.inner.table();
        // Another may have begun under the same key once nobody waited for this one.
        if table.under_way.get(&self.key).is_some_and(|pull| pull.number == self.number) {
            table.under_way.remove(&self.key);
        }
    }
}

impl Inner {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing inside the lock can panic half way.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn pull(
        &self,
        source: &ImageSource,
        target: &Reference,
        progress: Arc<watch::Sender<FetchProgress>>,
    ) -> Outcome {
        // Another pull may have ended between the look-up and this one.
        if let Some(image) = self.naming.find(self.engine.images(), source)? {
            return Ok(image);
        }
        let name = target.to_string();
        tracing::info!(image = name, account = source.credentials.is_some(), "pull begins");
        let engine = self.engine.clone();
        let workspace = blocking(move || engine.images().workspace()).await?;
        let workspace = workspace.map_err(|error| image_error(&source.name, &error))?;
        let layout = workspace.path().join("layout");
        let pulled = self.download(source, &name, &workspace, &layout, &progress).await;
        let pulled = pulled.map_err(|error| failure::of_pull(&source.name, error))?;
        // The same image again, and still whole.
        if let Ok(Some(image)) = self.engine.images().resolve(&name)
            && image.id == pulled.config
        {
            return Ok(image);
        }
        let image = self.unpack(workspace, layout, name.clone(), progress).await?;
        let image = image.map_err(|error| failure::of_load(&source.name, &error))?;
        if !is_for(&image, source.platform.as_ref()) {
            return Err(CreateError::Fetch {
                reference: source.name.clone(),
                error: FetchError::Platform(format!(
                    "the registry gave an image for {}/{}",
                    image.config.os, image.config.architecture
                )),
            });
        }
        tracing::info!(image = name, id = image.id, bytes = pulled.size_bytes, "pulled");
        Ok(image)
    }

    async fn download(
        &self,
        source: &ImageSource,
        name: &str,
        workspace: &Workspace,
        layout: &Path,
        told: &watch::Sender<FetchProgress>,
    ) -> Result<osb_registry::Pulled, osb_registry::Error> {
        let platform = source.platform.as_ref().map(|wanted| Platform {
            os: wanted.os.clone(),
            architecture: normal(&wanted.arch).to_owned(),
            variant: None,
        });
        let credentials = source.credentials.as_ref().map(|account| osb_registry::Credentials {
            username: account.username.clone(),
            password: account.password.clone(),
        });
        let known = |digest: &str| self.engine.images().hold_layer(workspace, digest);
        let (sender, mut receiver) = watch::channel(Progress::default());
        let pull = self.puller.pull(name, platform.as_ref(), credentials, layout, &known, &sender);
        let mut pull = std::pin::pin!(pull);
        loop {
            tokio::select! {
                pulled = &mut pull => return pulled,
                // The sender is ours and stays.
                _ = receiver.changed() => {
                    told.send_replace(progress_of(*receiver.borrow_and_update()));
                }
            }
        }
    }

    /// Brings a layout into the store. Goes on to its end when nobody waits any more: half of it would be lost.
    async fn unpack(
        &self,
        workspace: Workspace,
        layout: PathBuf,
        name: String,
        progress: Arc<watch::Sender<FetchProgress>>,
    ) -> Result<osb_engine::image::Result<Arc<Image>>, CreateError> {
        let engine = self.engine.clone();
        blocking(move || {
            let told = |now: osb_engine::image::Progress| {
                progress.send_replace(FetchProgress {
                    phase: FetchPhase::Unpacking,
                    bytes: now.bytes,
                    total_bytes: now.total_bytes,
                    layers: now.layers,
                    total_layers: now.total_layers,
                });
            };
            let options =
                LoadOptions { reference: Some(&name), called: Some(&name), ..LoadOptions::default() };
            let loaded = engine.images().load_with(&layout, options, &told);
            drop(workspace);
            let loaded = loaded?;
            for warning in &loaded.warnings {
                tracing::warn!(image = name, "{warning}");
            }
            loaded.images.into_iter().next().map_or_else(|| engine.images().inspect(&name), Ok)
        })
        .await
    }
}

/// Runs what blocks beside the runtime's own threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, CreateError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| CreateError::Failed(format!("work on the image was broken off: {error}")))
}

fn progress_of(progress: Progress) -> FetchProgress {
    FetchProgress {
        phase: match progress.phase {
            Phase::Resolving => FetchPhase::Resolving,
            Phase::Downloading => FetchPhase::Downloading,
            Phase::Unpacking => FetchPhase::Unpacking,
        },
        bytes: progress.bytes,
        total_bytes: progress.total_bytes,
        layers: progress.layers,
        total_layers: progress.total_layers,
    }
}
