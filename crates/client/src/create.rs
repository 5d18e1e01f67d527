//! Making a sandbox.

use std::collections::BTreeMap;
use std::time::Duration;

use osb_protocol::lifecycle::{
    CreateSandboxRequest, CreateSandboxResponse, ImageAuth, ImageSpec, NetworkPolicy, Volume,
};
use reqwest::Method;

use crate::client::Client;
use crate::error::Result;
use crate::sandbox::Sandbox;

/// Lifetime unless another is asked for, as with all SDKs of this protocol.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// Program that keeps a sandbox alive when none is named.
pub const DEFAULT_ENTRYPOINT: [&str; 3] = ["tail", "-f", "/dev/null"];
/// How long the server may take. It pulls a missing image within the call.
const DEFAULT_PATIENCE: Duration = Duration::from_secs(600);
/// How long the daemon in the new sandbox may take to answer.
const DEFAULT_READY: Duration = Duration::from_secs(30);

/// A sandbox to make; see [`Client::create`].
#[derive(Debug, Clone)]
#[must_use = "nothing is made until `send` is called"]
pub struct CreateSandbox {
    client: Client,
    request: CreateSandboxRequest,
    patience: Duration,
    ready: Option<Duration>,
}

impl CreateSandbox {
    pub(crate) fn from_image(client: Client, uri: String) -> Self {
        let request = CreateSandboxRequest {
            image: Some(ImageSpec { uri, auth: None }),
            entrypoint: Some(DEFAULT_ENTRYPOINT.map(str::to_owned).to_vec()),
            ..defaults()
        };
        Self::from_request(client, request)
    }

    pub(crate) fn from_snapshot(client: Client, id: String) -> Self {
        Self::from_request(client, CreateSandboxRequest { snapshot_id: Some(id), ..defaults() })
    }

    pub(crate) fn from_request(client: Client, request: CreateSandboxRequest) -> Self {
        Self { client, request, patience: DEFAULT_PATIENCE, ready: Some(DEFAULT_READY) }
    }

    /// Program and arguments; the sandbox ends with it.
    pub fn entrypoint<I>(mut self, argv: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        self.request.entrypoint = Some(argv.into_iter().map(Into::into).collect());
        self
    }

    /// Adds a variable to the environment of entrypoint and commands.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.env.get_or_insert_default().insert(name.into(), Some(value.into()));
        self
    }

    /// Adds a label.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.metadata.get_or_insert_default().insert(key.into(), value.into());
        self
    }

    /// Adds an extension.
    pub fn extension(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.extensions.get_or_insert_default().insert(key.into(), value.into());
        self
    }

    /// Sets a limit: `cpu` (`0.5`, `2`, `500m`), `memory` (`512Mi`) or another that the server knows.
    pub fn resource(mut self, name: impl Into<String>, amount: impl Into<String>) -> Self {
        self.request.resource_limits.get_or_insert_default().insert(name.into(), amount.into());
        self
    }

    /// Lifetime. Whole seconds, at least a minute.
    pub fn timeout(mut self, lifetime: Duration) -> Self {
        self.request.timeout = Some(i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX));
        self
    }

    /// No end of its own: the sandbox lives until it is deleted.
    pub fn no_timeout(mut self) -> Self {
        self.request.timeout = None;
        self
    }

    /// Account for the image's registry.
    pub fn image_auth(mut self, username: impl Into<String>, password: impl Into<String>) -> Self {
        if let Some(image) = &mut self.request.image {
            image.auth = Some(ImageAuth { username: username.into(), password: password.into() });
        }
        self
    }

    /// Which destinations the sandbox may reach.
    pub fn network_policy(mut self, policy: NetworkPolicy) -> Self {
        self.request.network_policy = Some(policy);
        self
    }

    /// Adds a mount.
    pub fn volume(mut self, volume: Volume) -> Self {
        self.request.volumes.get_or_insert_default().push(volume);
        self
    }

    /// How long the server may take to answer; ten minutes unless set.
    pub fn patience(mut self, limit: Duration) -> Self {
        self.patience = limit;
        self
    }

    /// How long the daemon in the sandbox may take to answer; half a minute unless set.
    pub fn ready_timeout(mut self, limit: Duration) -> Self {
        self.ready = Some(limit);
        self
    }

    /// Does not wait for the daemon. Good where the server answers only when a sandbox runs: a first command
    /// then waits by itself.
    pub fn skip_ready_check(mut self) -> Self {
        self.ready = None;
        self
    }

    /// The request as it will be sent.
    #[must_use]
    pub fn request(&self) -> &CreateSandboxRequest {
        &self.request
    }

    /// Makes the sandbox. If it is made but does not become ready, it is deleted again.
    ///
    /// Not cancel safe: when the future is dropped before the server has answered, the sandbox may exist; its
    /// lifetime then ends it.
    ///
    /// # Errors
    /// When the server refuses or cannot be reached, or the sandbox does not become ready.
    pub async fn send(self) -> Result<Sandbox> {
        let call = self.client.request(Method::POST, &["sandboxes"])?.json(&self.request);
        let made: CreateSandboxResponse = self.client.transport().json(call, self.patience).await?;
        let sandbox = self.client.sandbox(made.id);
        if let Some(limit) = self.ready
            && let Err(error) = sandbox.wait_ready(limit).await
        {
            // The first failure is the one to tell; what cannot be deleted now ends with its lifetime.
            let _ = sandbox.kill().await;
            return Err(error);
        }
        Ok(sandbox)
    }
}

fn defaults() -> CreateSandboxRequest {
    CreateSandboxRequest {
        timeout: Some(DEFAULT_TIMEOUT.as_secs().cast_signed()),
        // Other servers of this protocol demand limits; these are what every SDK sends.
        resource_limits: Some(BTreeMap::from(
            [("cpu", "1"), ("memory", "2Gi")].map(|(k, v)| (k.to_owned(), v.to_owned())),
        )),
        ..CreateSandboxRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn client() -> Client {
        Client::new(Config::default()).unwrap()
    }

    #[test]
    fn a_plain_create_is_what_other_sdks_send() {
        let request = client().create("host");
        assert_eq!(
            serde_json::to_value(request.request()).unwrap(),
            serde_json::json!({
                "image": {"uri": "host"},
                "entrypoint": ["tail", "-f", "/dev/null"],
                "timeout": 600,
                "resourceLimits": {"cpu": "1", "memory": "2Gi"},
                "secureAccess": false,
            })
        );
        let request = client().create_from_snapshot("s").no_timeout();
        assert_eq!(
            serde_json::to_value(request.request()).unwrap(),
            serde_json::json!({
                "snapshotId": "s",
                "resourceLimits": {"cpu": "1", "memory": "2Gi"},
                "secureAccess": false,
            })
        );
    }

    #[test]
    fn everything_that_can_be_set_is_sent() {
        let request = client()
            .create("r/i:1")
            .image_auth("u", "p")
            .entrypoint(["sleep", "9"])
            .env("A", "1")
            .env("B", "2")
            .metadata("team", "x")
            .extension("access.renew.extend.seconds", "300")
            .resource("cpu", "500m")
            .timeout(Duration::from_secs(90));
        assert_eq!(
            serde_json::to_value(request.request()).unwrap(),
            serde_json::json!({
                "image": {"uri": "r/i:1", "auth": {"username": "u", "password": "p"}},
                "entrypoint": ["sleep", "9"],
                "env": {"A": "1", "B": "2"},
                "metadata": {"team": "x"},
                "extensions": {"access.renew.extend.seconds": "300"},
                "timeout": 90,
                "resourceLimits": {"cpu": "500m", "memory": "2Gi"},
                "secureAccess": false,
            })
        );
    }
}
