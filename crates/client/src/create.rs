//! Making a sandbox.

use std::collections::BTreeMap;
use std::time::Duration;

use osb_protocol::lifecycle::{
    CreateSandboxRequest, CreateSandboxResponse, CredentialProxyConfig, ImageAuth, ImageSpec, NetworkPolicy,
    PlatformSpec, SandboxLifecycle, Volume,
};
use reqwest::Method;

use crate::client::Client;
use crate::error::{Error, Result};
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
///
/// ```no_run
/// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
/// use opensandbox::{HostVolume, LifecycleHook, NetworkPolicy, SandboxLifecycle, Volume};
///
/// let data = Volume {
///     name: "data".to_owned(),
///     host: Some(HostVolume { path: "/srv/data".to_owned() }),
///     pvc: None,
///     ossfs: None,
///     mount_path: "/data".to_owned(),
///     read_only: true,
///     sub_path: None,
/// };
/// let hook = LifecycleHook { command: vec!["/data/prepare".to_owned()], timeout_seconds: Some(30) };
/// let sandbox = client
///     .create("registry.example/team/image:1")
///     .image_auth("robot", "password")
///     .entrypoint(["python3", "-m", "http.server"])
///     .envs([("STAGE", "test"), ("LANG", "C.UTF-8")])
///     .metadata("team", "search")
///     .resource("cpu", "500m")
///     .resource("memory", "1Gi")
///     .platform("linux", "amd64")
///     .secure_access()
///     .volume(data)
///     .lifecycle(SandboxLifecycle { pre_start: Some(hook), periodic: None })
///     .network_policy(NetworkPolicy::default())
///     .extension("access.renew.extend.seconds", "300")
///     .no_timeout()
///     .send()
///     .await?;
/// # Ok(())
/// # }
/// ```
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

    pub(crate) fn from_template(client: Client, id: String) -> Self {
        // A template has its limits and its entrypoint; a request that names them is refused.
        let request = CreateSandboxRequest { template_id: Some(id), resource_limits: None, ..defaults() };
        Self::from_request(client, request)
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

    /// Adds variables to the environment of entrypoint and commands.
    pub fn envs<K: Into<String>, V: Into<String>>(
        mut self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), Some(value.into())));
        self.request.env.get_or_insert_default().extend(variables);
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

    /// Sets what a scheduler puts aside, where there is one: `cpu`, `memory`.
    pub fn resource_request(mut self, name: impl Into<String>, amount: impl Into<String>) -> Self {
        self.request.resource_requests.get_or_insert_default().insert(name.into(), amount.into());
        self
    }

    /// Operating system (`linux`) and processor (`amd64`, `arm64`) that it must run on.
    pub fn platform(mut self, os: impl Into<String>, arch: impl Into<String>) -> Self {
        self.request.platform = Some(PlatformSpec { os: os.into(), arch: arch.into() });
        self
    }

    /// Its ports answer only to who sends the token that comes with an endpoint. This client sends it.
    pub fn secure_access(mut self) -> Self {
        self.request.secure_access = true;
        self
    }

    /// Takes it from a pool of prepared ones; see [`Client::pools`].
    pub fn pool(self, name: impl Into<String>) -> Self {
        self.extension("poolRef", name)
    }

    /// Commands that run inside beside the entrypoint.
    pub fn lifecycle(mut self, hooks: SandboxLifecycle) -> Self {
        self.request.lifecycle = Some(hooks);
        self
    }

    /// Credentials are put into outgoing requests, where the server can do that.
    pub fn credential_proxy(mut self) -> Self {
        self.request.credential_proxy = Some(CredentialProxyConfig { enabled: true });
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

    /// Makes the sandbox, does something with it, and deletes it in the end, whatever became of that.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let text = client
    ///     .create("host")
    ///     .run(async |sandbox| Ok(sandbox.shell("uname -a").output().await?.stdout))
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// When the future is dropped before its end, the sandbox stays until its lifetime ends it.
    ///
    /// # Errors
    /// As [`CreateSandbox::send`], and what `work` gives.
    pub async fn run<T, E: From<Error>>(
        self,
        work: impl AsyncFnOnce(&Sandbox) -> Result<T, E>,
    ) -> Result<T, E> {
        let sandbox = self.send().await?;
        let result = work(&sandbox).await;
        match sandbox.kill().await {
            // It may have ended by itself, or been killed by the work.
            Err(error) if result.is_ok() && !error.is_not_found() => Err(error.into()),
            _ => result,
        }
    }

    /// Makes the sandbox. If it is made but does not become ready, it is deleted again.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// use std::time::Duration;
    ///
    /// let sandbox = client
    ///     .create("python:3.12")
    ///     .env("STAGE", "test")
    ///     .metadata("team", "search")
    ///     .resource("memory", "512Mi")
    ///     .timeout(Duration::from_secs(900))
    ///     .send()
    ///     .await?;
    /// println!("{}", sandbox.id());
    /// # Ok(())
    /// # }
    /// ```
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
        let request = client().create_from_template("t");
        assert_eq!(
            serde_json::to_value(request.request()).unwrap(),
            serde_json::json!({"templateId": "t", "timeout": 600, "secureAccess": false})
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
            .resource_request("cpu", "100m")
            .platform("linux", "arm64")
            .pool("small")
            .secure_access()
            .credential_proxy()
            .lifecycle(SandboxLifecycle::default())
            .network_policy(NetworkPolicy::default())
            .timeout(Duration::from_secs(90));
        assert_eq!(
            serde_json::to_value(request.request()).unwrap(),
            serde_json::json!({
                "image": {"uri": "r/i:1", "auth": {"username": "u", "password": "p"}},
                "entrypoint": ["sleep", "9"],
                "env": {"A": "1", "B": "2"},
                "metadata": {"team": "x"},
                "extensions": {"access.renew.extend.seconds": "300", "poolRef": "small"},
                "timeout": 90,
                "resourceLimits": {"cpu": "500m", "memory": "2Gi"},
                "resourceRequests": {"cpu": "100m"},
                "platform": {"os": "linux", "arch": "arm64"},
                "credentialProxy": {"enabled": true},
                "lifecycle": {},
                "networkPolicy": {"egress": []},
                "secureAccess": true,
            })
        );
    }
}
