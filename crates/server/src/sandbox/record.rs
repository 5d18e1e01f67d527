//! One sandbox in memory.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::{ImageSpec, PlatformSpec, Sandbox, SandboxState, SandboxStatus};
use osb_protocol::time::WireTime;
use osb_runtime::Handle;

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
    /// Extensions as asked for.
    pub extensions: BTreeMap<String, String>,
    /// Limits as asked for, for diagnostics.
    pub limits: BTreeMap<String, String>,
    /// Value that requests to its endpoints must carry, when they must.
    pub endpoint_token: Option<String>,
    /// What the runtime wants back after a restart.
    pub handle: Handle,
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

/// One sandbox.
#[derive(Debug)]
pub struct Record {
    /// What was fixed when it was made.
    pub origin: Origin,
    changing: Mutex<Changing>,
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
        Arc::new(Self {
            origin,
            changing: Mutex::new(changing),
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

    /// As the wire shows it.
    #[must_use]
    pub fn to_wire(&self) -> Sandbox {
        let now = self.now();
        Sandbox {
            id: self.origin.id.to_string(),
            image: Some(ImageSpec { uri: self.origin.image.clone(), auth: None }),
            snapshot_id: None,
            platform: self.origin.platform.clone(),
            status: status_to_wire(&now.status),
            metadata: Some(now.metadata.clone()).filter(|m| !m.is_empty()),
            extensions: Some(self.origin.extensions.clone()).filter(|m| !m.is_empty()),
            allocation: None,
            entrypoint: self.origin.entrypoint.clone(),
            expires_at: now.expires_at,
            created_at: self.origin.created_at,
        }
    }
}

/// A status as the wire shows it.
#[must_use]
pub(crate) fn status_to_wire(status: &Status) -> SandboxStatus {
    SandboxStatus {
        state: status.state.clone(),
        reason: Some(status.reason.clone()),
        message: Some(status.message.clone()),
        last_transition_at: Some(status.since),
    }
}
