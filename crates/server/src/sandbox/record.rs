//! One sandbox in memory.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::{ImageSpec, PlatformSpec, Sandbox, SandboxState, SandboxStatus};
use osb_protocol::time::WireTime;
use osb_runtime::FetchProgress;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Prefix of the extensions that answers show; others have an effect or none, and are not told.
pub(crate) const SHOWN_EXTENSIONS: &str = "opensandbox.extensions.";

/// What was fixed when the sandbox was made.
#[derive(Debug, Clone, PartialEq)]
pub struct Origin {
    /// Id.
    pub id: SandboxId,
    /// When it was made. One value for every answer.
    pub created_at: WireTime,
    /// Image as asked for.
    pub image: String,
    /// Platform as asked for.
    pub platform: Option<PlatformSpec>,
    /// Program and arguments as asked for.
    pub entrypoint: Vec<String>,
    /// Extensions that are shown or have an effect.
    pub extensions: BTreeMap<String, String>,
    /// Limits as asked for, for diagnostics.
    pub limits: BTreeMap<String, String>,
    /// Value that requests to its endpoints must carry, when they must.
    pub endpoint_token: Option<String>,
}

/// State with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// State.
    pub state: SandboxState,
    /// Stable word.
    pub reason: String,
    /// For people.
    pub message: String,
    /// When it was entered.
    pub since: WireTime,
    /// How the entrypoint ended, once it did and if somebody could tell.
    pub exit_code: Option<i32>,
}

impl Status {
    /// The image is on its way since `since`. What is shown tells how far it is.
    #[must_use]
    pub fn pulling(since: WireTime) -> Self {
        Self {
            state: SandboxState::Pending,
            reason: "IMAGE_PULLING".to_owned(),
            message: String::new(),
            since,
            exit_code: None,
        }
    }

    /// The entrypoint runs since `since`.
    #[must_use]
    pub fn running(since: WireTime) -> Self {
        Self {
            state: SandboxState::Running,
            reason: "CONTAINER_RUNNING".to_owned(),
            message: "The entrypoint is running.".to_owned(),
            since,
            exit_code: None,
        }
    }

    /// Whether the sandbox has ended by itself.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.state, SandboxState::Terminated | SandboxState::Failed)
    }
}

/// What changes over a sandbox's life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changing {
    /// State.
    pub status: Status,
    /// Labels.
    pub metadata: BTreeMap<String, String>,
    /// When it will be removed; `None` is never.
    pub expires_at: Option<WireTime>,
    /// It is gone: whoever still holds the record must answer 404.
    pub gone: bool,
}

/// What a sandbox waits for before it is made.
#[derive(Debug)]
pub(crate) struct Waiting {
    progress: watch::Receiver<FetchProgress>,
    given_up: CancellationToken,
}

/// One sandbox.
#[derive(Debug)]
pub struct Record {
    /// What was fixed when it was made.
    pub origin: Origin,
    changing: Mutex<Changing>,
    /// Of a sandbox whose image had to be fetched. Such a record is in the store only once the sandbox runs.
    waiting: Option<Waiting>,
    /// Held by whoever changes the sandbox, over the write to the store: patches, renewals, expiry and deletion
    /// exclude each other.
    pub(crate) turn: tokio::sync::Mutex<()>,
    /// When access last renewed it, in microseconds.
    pub(crate) renewed_at: AtomicI64,
}

impl Record {
    /// A record.
    #[must_use]
    pub fn new(origin: Origin, changing: Changing) -> Arc<Self> {
        Self::with(origin, changing, None)
    }

    /// A record of a sandbox that cannot be made yet.
    pub(crate) fn pending(
        origin: Origin,
        changing: Changing,
        progress: watch::Receiver<FetchProgress>,
    ) -> Arc<Self> {
        Self::with(origin, changing, Some(Waiting { progress, given_up: CancellationToken::new() }))
    }

    fn with(origin: Origin, changing: Changing, waiting: Option<Waiting>) -> Arc<Self> {
        Arc::new(Self {
            origin,
            changing: Mutex::new(changing),
            waiting,
            turn: tokio::sync::Mutex::new(()),
            renewed_at: AtomicI64::new(i64::MIN),
        })
    }

    /// The id.
    #[must_use]
    pub fn id(&self) -> SandboxId {
        self.origin.id
    }

    /// Looks at what changes. Never held over an await.
    pub fn now(&self) -> MutexGuard<'_, Changing> {
        // A panic while it was held leaves plain values behind, each valid by itself.
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the entrypoint runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let now = self.now();
        !now.gone && now.status.state == SandboxState::Running
    }

    /// Ends the wait of a pending sandbox.
    pub(crate) fn give_up(&self) {
        if let Some(waiting) = &self.waiting {
            waiting.given_up.cancel();
        }
    }

    /// Resolves once nobody wants the sandbox any more; of one that was made at once, never.
    pub(crate) async fn given_up(&self) {
        match &self.waiting {
            Some(waiting) => waiting.given_up.cancelled().await,
            None => std::future::pending().await,
        }
    }

    /// The status for people: that of a pending sandbox tells how far it is.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut status = self.now().status.clone();
        if status.state == SandboxState::Pending
            && let Some(waiting) = &self.waiting
        {
            let progress = *waiting.progress.borrow();
            status.message = format!("Pulling image {}: {progress}.", self.origin.image);
        }
        status
    }

    /// As the wire shows it.
    #[must_use]
    pub fn to_wire(&self) -> Sandbox {
        let status = status_to_wire(self.status());
        let now = self.now();
        Sandbox {
            id: self.origin.id.to_string(),
            image: Some(ImageSpec { uri: self.origin.image.clone(), auth: None }),
            snapshot_id: None,
            platform: self.origin.platform.clone(),
            status,
            metadata: Some(now.metadata.clone()).filter(|m| !m.is_empty()),
            extensions: Some(shown(&self.origin.extensions)).filter(|m| !m.is_empty()),
            allocation: None,
            entrypoint: self.origin.entrypoint.clone(),
            expires_at: now.expires_at,
            created_at: self.origin.created_at,
        }
    }
}

fn shown(extensions: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let shown = extensions.iter().filter(|(key, _)| key.starts_with(SHOWN_EXTENSIONS));
    shown.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// A status as the wire shows it.
#[must_use]
fn status_to_wire(status: Status) -> SandboxStatus {
    SandboxStatus {
        state: status.state,
        reason: Some(status.reason),
        message: Some(status.message),
        last_transition_at: Some(status.since),
    }
}
