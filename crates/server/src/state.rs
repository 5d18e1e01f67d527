//! What every handler can reach.

use std::sync::Arc;

use http::HeaderMap;
use osb_protocol::ids::SandboxId;
use osb_protocol::lifecycle::SECURE_ACCESS_HEADER;
use osb_runtime::Runtime;
use subtle::ConstantTimeEq;

use crate::config::Config;
use crate::error::ApiError;
use crate::proxy::Proxy;
use crate::sandbox::{Index, Record};

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
}

impl AppState {
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

    /// Tells that a request for a sandbox was accepted by the proxy, before it is forwarded.
    pub fn accessed(&self, _record: &Arc<Record>, _headers: &HeaderMap) {}
}
