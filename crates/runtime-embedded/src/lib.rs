//! The embedded runtime: [`osb_runtime::Runtime`] over [`osb_engine::Engine`].
//!
//! What is decided here: which image a name means, what the environment of a sandbox is, and how the ends that the
//! engine sees are told. How any of it is done belongs to the engine.

mod ended;
mod environment;
mod failure;
mod images;
mod pulls;

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use futures_util::{FutureExt, TryFutureExt};
use osb_engine::image::{ImageStore, Reference};
use osb_engine::{CreateParams, Engine, EngineConfig, Event, Record};
use osb_protocol::ids::SandboxId;
use osb_protocol::quantity::MemoryBytes;
use osb_runtime::{
    Adopted, ConnectError, CreateError, Created, Fetch, FetchProgress, Handle, Image, ImageSource, Limits,
    Runtime, RuntimeError, RuntimeEvent, SandboxSpec, Stream, Target,
};
use tokio::sync::{mpsc, watch};

use images::Naming;
use pulls::Pulls;

pub use images::PullPolicy;
pub use osb_registry::{Credentials, RegistrySettings, Settings};

/// Where images come from.
#[derive(Debug, Clone)]
pub struct Images {
    /// When a registry is asked.
    pub policy: PullPolicy,
    /// Registry of names that name none.
    pub default_registry: String,
    /// How registries are reached.
    pub registries: Settings,
}

impl Images {
    /// Stored images alone.
    pub fn stored_only(data_dir: &Path) -> Self {
        Self {
            policy: PullPolicy::Never,
            default_registry: images::DOCKER_HUB.to_owned(),
            registries: Settings::new(data_dir.join("downloads")),
        }
    }

    fn naming(&self) -> Naming {
        Naming { policy: self.policy, default_registry: self.default_registry.clone() }
    }

    /// What a registry is asked for: the name itself, or what an alias of the store makes of it.
    ///
    /// # Errors
    /// The name can be none, or aliases lead in a circle.
    pub fn target(&self, store: &ImageStore, name: &str) -> Result<Reference, CreateError> {
        self.naming().target(store, name)
    }

    /// Whether pulls could begin with these settings.
    ///
    /// # Errors
    /// Names the setting.
    pub fn check(&self) -> Result<(), osb_registry::Error> {
        osb_registry::Puller::new(self.registries.clone()).map(drop)
    }
}

/// Why the runtime cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The engine cannot.
    #[error(transparent)]
    Engine(#[from] osb_engine::StartError),
    /// The settings of registries cannot work.
    #[error(transparent)]
    Registries(#[from] osb_registry::Error),
}

/// Sandboxes on this host's kernel.
#[derive(Debug)]
pub struct EmbeddedRuntime {
    engine: Engine,
    naming: Naming,
    pulls: Pulls,
    defaults: osb_engine::Limits,
    events: Mutex<Option<mpsc::UnboundedReceiver<RuntimeEvent>>>,
}

impl EmbeddedRuntime {
    /// Starts the engine and prepares sandboxes of the image `host` as soon as the earlier ones are taken back.
    /// To be called within a tokio runtime; blocks for some tens of milliseconds.
    ///
    /// # Errors
    /// Says what this machine lacks, or that another server uses the data directory.
    pub fn start(config: EngineConfig, images: Images) -> Result<Self, StartError> {
        let naming = images.naming();
        let puller = osb_registry::Puller::new(images.registries)?;
        let defaults = config.default_limits;
        let engine = Engine::start(config)?;
        let (sender, receiver) = mpsc::unbounded_channel();
        if let Some(events) = engine.events() {
            tokio::spawn(translate(events, sender));
        }
        let pulls = Pulls::new(engine.clone(), naming.clone(), puller);
        Ok(Self { engine, naming, pulls, defaults, events: Mutex::new(Some(receiver)) })
    }

    /// The engine, for what only it can tell (`osb server --check`, image commands).
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    fn limits(&self, limits: Limits) -> Result<osb_engine::Limits, CreateError> {
        if limits.disk.is_some() {
            return Err(CreateError::InvalidParameter(
                "resourceLimits.disk is not offered on this machine: its file system has no project quotas; leave the key out"
                    .to_owned(),
            ));
        }
        Ok(osb_engine::Limits {
            cpu_nanos: limits.cpu.map_or(self.defaults.cpu_nanos, |cpu| cpu.0),
            memory_bytes: limits.memory.map_or(self.defaults.memory_bytes, |MemoryBytes(bytes)| bytes),
            pids: limits.pids.unwrap_or(self.defaults.pids),
        })
    }
}

async fn translate(mut events: mpsc::UnboundedReceiver<Event>, sender: mpsc::UnboundedSender<RuntimeEvent>) {
    while let Some(event) = events.recv().await {
        let Event::Ended { id, ended } = event;
        if sender.send(RuntimeEvent::Ended { id, ended: ended::told(&ended) }).is_err() {
            return;
        }
    }
}

#[async_trait]
impl Runtime for EmbeddedRuntime {
    async fn find_image(&self, source: &ImageSource) -> Result<Option<Image>, CreateError> {
        Ok(self.naming.find(self.engine.images(), source)?.map(Image::new))
    }

    fn room(&self) -> Result<(), CreateError> {
        self.engine.room().map_err(create_error)
    }

    fn fetch_image(&self, source: ImageSource) -> Fetch {
        match self.pulls.join(source) {
            Ok((progress, done)) => Fetch { progress, done: done.map_ok(Image::new).boxed() },
            Err(error) => {
                let (_, progress) = watch::channel(FetchProgress::default());
                Fetch { progress, done: std::future::ready(Err(error)).boxed() }
            }
        }
    }

    async fn create(&self, spec: SandboxSpec, image: Image) -> Result<Created, CreateError> {
        let limits = self.limits(spec.limits)?;
        let image = image
            .get::<osb_engine::image::Image>()
            .ok_or_else(|| CreateError::Failed("the image belongs to another runtime".to_owned()))?;
        let environment = environment::of(&image.config.env, spec.env, spec.line_endings);
        let placed = self
            .engine
            .place(CreateParams {
                id: spec.id,
                image,
                entrypoint: spec.entrypoint,
                env: environment.variables,
                limits: Some(limits),
                line_endings: environment.line_endings,
                access_token: environment.access_token,
                lifecycle: spec.lifecycle,
            })
            .await
            .map_err(create_error)?;
        let id = placed.id;
        let handle = serde_json::to_value(&placed.record)
            .map_err(|error| CreateError::Failed(format!("the record cannot be written: {error}")));
        let started = placed.started();
        match handle {
            Ok(handle) => Ok(Created {
                id,
                handle: Handle(handle),
                started: async { started.await.map(|created| created.stages).map_err(create_error) }.boxed(),
            }),
            Err(error) => {
                if started.await.is_ok() {
                    self.engine.delete(id);
                }
                Err(error)
            }
        }
    }

    async fn adopt(
        &self,
        known: Vec<(SandboxId, Handle)>,
    ) -> Result<Vec<(SandboxId, Adopted)>, RuntimeError> {
        let mut lost = Vec::new();
        let mut records = Vec::new();
        for (id, Handle(value)) in known {
            match serde_json::from_value::<Record>(value) {
                Ok(record) => records.push((id, record)),
                Err(error) => {
                    tracing::warn!(%id, %error, "the stored record cannot be read; the sandbox counts as lost");
                    lost.push((id, Adopted::Ended(ended::lost())));
                }
            }
        }
        let found = self.engine.adopt(records).await.map_err(engine_error)?;
        lost.extend(found.into_iter().map(|(id, found)| {
            let adopted = match found {
                osb_engine::Adopted::Running => Adopted::Running,
                osb_engine::Adopted::Ended(ended) => Adopted::Ended(ended::told(&ended)),
            };
            (id, adopted)
        }));
        // Beside everything else: at the first start on a machine this takes a while.
        let engine = self.engine.clone();
        tokio::task::spawn_blocking(move || match engine.images().resolve(osb_engine::image::HOST) {
            Ok(Some(host)) => engine.expect_image(&host),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "the image 'host' cannot be prepared"),
        });
        Ok(lost)
    }

    async fn delete(&self, id: SandboxId) -> Result<(), RuntimeError> {
        self.engine.delete(id);
        Ok(())
    }

    async fn settled(&self) {
        self.engine.settled().await;
    }

    fn events(&self) -> Option<mpsc::UnboundedReceiver<RuntimeEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    async fn connect(&self, id: SandboxId, target: Target) -> Result<Stream, ConnectError> {
        let stream = match target {
            Target::Execd => self.engine.connect_execd(id).await.map(Stream::Unix),
            Target::Port(port) => self.engine.connect_port(id, port).await.map(Stream::Tcp),
        };
        stream.map_err(|error| match error {
            osb_engine::ConnectError::NotRunning => ConnectError::NotRunning,
            osb_engine::ConnectError::Io(error) => ConnectError::Io(error),
        })
    }

    async fn entrypoint_log(&self, id: SandboxId, max_bytes: usize) -> Result<Vec<u8>, RuntimeError> {
        self.engine.log(id, max_bytes).map_err(engine_error)
    }

    async fn shutdown(&self) {
        self.engine.shutdown().await;
    }
}

fn create_error(error: osb_engine::CreateError) -> CreateError {
    match error {
        osb_engine::CreateError::Entrypoint { program, reason } => {
            CreateError::Entrypoint { program, reason }
        }
        osb_engine::CreateError::Hook(message) => CreateError::Hook(message),
        osb_engine::CreateError::Invalid(message) => CreateError::InvalidParameter(message),
        osb_engine::CreateError::Exhausted { what, retry_after } => {
            CreateError::Exhausted { what, retry_after }
        }
        osb_engine::CreateError::Failed(message) => CreateError::Failed(message),
    }
}

fn engine_error(error: osb_engine::EngineError) -> RuntimeError {
    match error {
        osb_engine::EngineError::NotFound => RuntimeError::NotFound,
        osb_engine::EngineError::Failed(message) => RuntimeError::Failed(message),
    }
}

/// An error and its causes in one line.
pub(crate) fn told(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
