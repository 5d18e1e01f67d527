//! What every handler can reach.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::SECURE_ACCESS_HEADER;
use osb_runtime::Runtime;
use subtle::ConstantTimeEq;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::error::ApiError;
use crate::proxy::{self, Proxy};
use crate::sandbox::{Arrivals, Deadlines, Index, Record};
use crate::store::Store;

/// Shared by all requests; cloning is cheap.
#[derive(Clone)]
pub struct AppState {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    runtime: Arc<dyn Runtime>,
    index: Index,
    proxy: Proxy,
    store: Store,
    deadlines: Deadlines,
    arrivals: Arrivals,
    tasks: TaskTracker,
    stopping: CancellationToken,
    background: Background,
}

/// Tasks that end with the server.
#[derive(Default)]
pub(crate) struct Background {
    tasks: Mutex<Vec<AbortHandle>>,
}

impl Background {
    /// Starts a task.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let handle = tokio::spawn(task).abort_handle();
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
    }

    fn stop(&self) {
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }
}

impl AppState {
    /// A server's state, before [`AppState::start`].
    #[must_use]
    pub fn new(config: Config, runtime: Arc<dyn Runtime>, store: Store) -> Self {
        let options = proxy::Options {
            public_address: config.server.eip.clone(),
            endpoint_suffix: config.embedded.endpoint_suffix.clone(),
            ..proxy::Options::default()
        };
        let inner = Inner {
            proxy: Proxy::new(Arc::clone(&runtime), options),
            config,
            runtime,
            index: Index::default(),
            store,
            deadlines: Deadlines::default(),
            arrivals: Arrivals::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            background: Background::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// Where sandboxes run.
    #[must_use]
    pub fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.inner.runtime
    }

    /// All sandboxes.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.inner.index
    }

    /// The way to sandboxes' ports.
    #[must_use]
    pub fn proxy(&self) -> &Proxy {
        &self.inner.proxy
    }

    /// The sandbox that a path names.
    ///
    /// # Errors
    /// 404 when there is none; a text that is no id names none.
    pub fn sandbox(&self, id: &str) -> Result<Arc<Record>, ApiError> {
        let id: SandboxId = id.parse().map_err(|_| ApiError::SandboxNotFound)?;
        self.inner.index.get(id).ok_or(ApiError::SandboxNotFound)
    }

    /// Checks the token of a sandbox whose endpoints demand one.
    ///
    /// # Errors
    /// 401 when it is absent or another.
    pub fn check_endpoint_token(&self, record: &Record, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(token) = &record.origin.endpoint_token else { return Ok(()) };
        let sent = headers.get(SECURE_ACCESS_HEADER).map_or(&[][..], http::HeaderValue::as_bytes);
        if bool::from(sent.ct_eq(token.as_bytes())) { Ok(()) } else { Err(ApiError::MissingSecureAccess) }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.inner.store
    }

    pub(crate) fn deadlines(&self) -> &Deadlines {
        &self.inner.deadlines
    }

    pub(crate) fn arrivals(&self) -> &Arrivals {
        &self.inner.arrivals
    }

    /// Changes under way. The server waits for them when it stops.
    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.inner.tasks
    }

    /// What goes on as long as the server runs.
    pub(crate) fn background(&self) -> &Background {
        &self.inner.background
    }

    /// Gives up whatever may take long, so that the server's end does not wait for it.
    pub fn begin_stop(&self) {
        self.inner.stopping.cancel();
    }

    /// Resolves when the server is about to end.
    pub(crate) async fn stopping(&self) {
        self.inner.stopping.cancelled().await;
    }

    /// Ends what runs in the background and waits, at most `grace`, for changes under way.
    pub async fn stop(&self, grace: Duration) {
        self.begin_stop();
        self.inner.tasks.close();
        if tokio::time::timeout(grace, self.inner.tasks.wait()).await.is_err() {
            tracing::warn!(left = self.inner.tasks.len(), "changes under way did not end in time");
        }
        self.inner.background.stop();
    }
}
