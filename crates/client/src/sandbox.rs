//! A handle on one sandbox.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use osb_protocol::execd::EXECD_PORT;
use osb_protocol::lifecycle::{
    PatchSandboxMetadataRequest, RenewSandboxExpirationRequest, RenewSandboxExpirationResponse,
    Sandbox as SandboxInfo, SandboxState,
};
use osb_protocol::time::WireTime;
use reqwest::header::HeaderMap;
use reqwest::{Method, RequestBuilder};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};
use url::Url;

use crate::client::{Client, endpoint_headers, join, parse_base};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::transport::Transport;

/// How long an endpoint is used before it is asked for again. The protocol makes it good for ten minutes.
const ENDPOINT_LIFE: Duration = Duration::from_secs(540);
/// Time between two questions to a sandbox that is not ready.
const READY_INTERVAL: Duration = Duration::from_millis(200);
/// The one 404 that means "not yet".
const NO_ADDRESS_YET: &str = "KUBERNETES::POD_IP_NOT_AVAILABLE";

/// A sandbox. Cheap to clone. Dropping it does nothing to the sandbox; see [`Sandbox::kill`].
#[derive(Debug, Clone)]
pub struct Sandbox {
    client: Client,
    id: String,
    route: Arc<Mutex<Option<Route>>>,
}

/// The way to the daemon inside.
#[derive(Debug, Clone)]
struct Route {
    base: Url,
    headers: HeaderMap,
    until: Instant,
}

impl Sandbox {
    pub(crate) fn new(client: Client, id: String) -> Self {
        Self { client, id, route: Arc::default() }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What the server knows of it.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let info = sandbox.info().await?;
    /// println!("{} until {:?}", info.status.state, info.expires_at);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the server cannot be reached.
    pub async fn info(&self) -> Result<SandboxInfo> {
        self.info_by(self.transport()).await
    }

    async fn info_by(&self, transport: &Transport) -> Result<SandboxInfo> {
        let request = self.client.request(Method::GET, &["sandboxes", &self.id])?;
        transport.json(request, self.config().request_timeout).await
    }

    /// The error to give when it has ended.
    fn ended(&self, info: SandboxInfo) -> Option<Error> {
        let over = matches!(info.status.state, SandboxState::Terminated | SandboxState::Failed);
        over.then(|| Error::Ended {
            id: self.id.clone(),
            reason: info.status.message.or(info.status.reason).unwrap_or_default(),
        })
    }

    /// Ends it and removes all it had.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.kill().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the server cannot be reached.
    pub async fn kill(&self) -> Result<()> {
        *self.route.lock().await = None;
        let request = self.client.request(Method::DELETE, &["sandboxes", &self.id])?;
        self.transport().remove(request, self.config().request_timeout).await
    }

    /// Lets it live for this long from now, whatever was set before. Returns the new end.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let end = sandbox.renew(std::time::Duration::from_secs(3600)).await?;
    /// println!("lives until {end}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, has no end, or the server cannot be reached.
    pub async fn renew(&self, lifetime: Duration) -> Result<WireTime> {
        let expires_at = i64::try_from(lifetime.as_secs())
            .ok()
            .and_then(|seconds| WireTime::now().plus_seconds(seconds))
            .ok_or_else(|| Error::InvalidArgument("lifetime goes beyond the year 9999".to_owned()))?;
        let request = self
            .client
            .request(Method::POST, &["sandboxes", &self.id, "renew-expiration"])?
            .json(&RenewSandboxExpirationRequest { expires_at });
        let answer: RenewSandboxExpirationResponse =
            self.transport().json(request, self.config().request_timeout).await?;
        Ok(answer.expires_at)
    }

    /// Freezes it. The answer comes when the server has begun; see [`Sandbox::wait_state`].
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::SandboxState;
    ///
    /// sandbox.pause().await?;
    /// sandbox.wait_state(&SandboxState::Paused, std::time::Duration::from_secs(30)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, does not run, the runtime cannot pause, or the server cannot be reached.
    pub async fn pause(&self) -> Result<()> {
        self.change("pause").await
    }

    /// Lets a paused sandbox run again. The answer comes when the server has begun; see
    /// [`Sandbox::wait_ready`].
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.resume().await?;
    /// sandbox.wait_ready(std::time::Duration::from_secs(30)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, is not paused, the runtime cannot pause, or the server cannot be reached.
    pub async fn resume(&self) -> Result<()> {
        self.change("resume").await
    }

    async fn change(&self, what: &str) -> Result<()> {
        // Addresses may be others afterwards.
        *self.route.lock().await = None;
        let request = self.client.request(Method::POST, &["sandboxes", &self.id, what])?;
        self.transport().done(request, self.config().request_timeout).await
    }

    /// Waits until it is in this state. Returns what the server then knows.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::SandboxState;
    ///
    /// let limit = std::time::Duration::from_secs(60);
    /// let ended = sandbox.wait_state(&SandboxState::Terminated, limit).await?;
    /// println!("{:?}", ended.status.reason);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotReady`] after `limit`; at once when it has ended in another state, does not exist, or the
    /// server cannot be reached.
    pub async fn wait_state(&self, state: &SandboxState, limit: Duration) -> Result<SandboxInfo> {
        let deadline = Instant::now() + limit;
        loop {
            let info = match timeout_at(deadline, self.info()).await {
                Ok(info) => info?,
                Err(_) => return Err(Error::NotReady { id: self.id.clone(), limit }),
            };
            if info.status.state == *state {
                return Ok(info);
            }
            if let Some(ended) = self.ended(info) {
                return Err(ended);
            }
            let next = Instant::now() + READY_INTERVAL;
            if next >= deadline {
                return Err(Error::NotReady { id: self.id.clone(), limit });
            }
            sleep_until(next).await;
        }
    }

    /// Changes labels: a value adds or replaces, `None` removes, the others stay.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let patch = [("team".to_owned(), Some("search".to_owned())), ("draft".to_owned(), None)];
    /// sandbox.patch_metadata(patch.into()).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a label is not allowed, the sandbox does not exist, or the server cannot be reached.
    pub async fn patch_metadata(&self, patch: BTreeMap<String, Option<String>>) -> Result<SandboxInfo> {
        let request = self
            .client
            .request(Method::PATCH, &["sandboxes", &self.id, "metadata"])?
            .json(&PatchSandboxMetadataRequest(patch));
        self.transport().json(request, self.config().request_timeout).await
    }

    /// Waits until the daemon inside answers.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.wait_ready(std::time::Duration::from_secs(30)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotReady`] after `limit`; at once when the server says that waiting is of no use.
    pub async fn wait_ready(&self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        // The repetition is here, at a steady pace, not below with growing waits.
        let transport = self.transport().once();
        loop {
            match timeout_at(deadline, self.ping_by(&transport)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) if is_final(&error) => return Err(error),
                Ok(Err(_)) | Err(_) => {}
            }
            // What has ended does not answer any more.
            if let Ok(Ok(info)) = timeout_at(deadline, self.info_by(&transport)).await
                && let Some(ended) = self.ended(info)
            {
                return Err(ended);
            }
            let next = Instant::now() + READY_INTERVAL;
            if next >= deadline {
                return Err(Error::NotReady { id: self.id.clone(), limit });
            }
            sleep_until(next).await;
        }
    }

    /// Whether the daemon inside answers.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let alive = sandbox.ping().await.is_ok();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not.
    pub async fn ping(&self) -> Result<()> {
        self.ping_by(self.transport()).await
    }

    async fn ping_by(&self, transport: &Transport) -> Result<()> {
        let request = self.execd_by(transport, Method::GET, &["ping"]).await?;
        transport.done(request, self.config().request_timeout).await
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn config(&self) -> &Config {
        self.client.config()
    }

    pub(crate) fn transport(&self) -> &Transport {
        self.client.transport()
    }

    /// A request to the daemon inside.
    pub(crate) async fn execd(&self, method: Method, path: &[&str]) -> Result<RequestBuilder> {
        self.execd_by(self.transport(), method, path).await
    }

    async fn execd_by(&self, transport: &Transport, method: Method, path: &[&str]) -> Result<RequestBuilder> {
        let route = self.route(transport).await?;
        let request = transport.http.request(method, join(&route.base, path)?);
        // Through the server the key may be asked for; straight into a sandbox it must not go.
        let request = if self.config().use_server_proxy { self.client.with_key(request) } else { request };
        Ok(request.headers(route.headers))
    }

    async fn route(&self, transport: &Transport) -> Result<Route> {
        let mut known = self.route.lock().await;
        if let Some(route) = known.as_ref().filter(|route| route.until > Instant::now()) {
            return Ok(route.clone());
        }
        let endpoint = self.endpoint_by(transport, EXECD_PORT).await?;
        let base = format!("{}://{}", self.config().protocol.as_str(), endpoint.endpoint);
        let route = Route {
            base: parse_base(&base)?,
            headers: endpoint_headers(&endpoint.headers)?,
            until: Instant::now() + ENDPOINT_LIFE,
        };
        *known = Some(route.clone());
        Ok(route)
    }
}

/// Whether waiting on cannot help.
fn is_final(error: &Error) -> bool {
    match error {
        Error::Api(api) => match api.status {
            401 | 403 => true,
            404 => api.code != NO_ADDRESS_YET,
            _ => false,
        },
        Error::InvalidArgument(_) => true,
        _ => false,
    }
}
