//! The connection to a server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use osb_protocol::lifecycle::{
    API_KEY_HEADER, HealthResponse, MetricsEvent, REQUEST_ID_HEADER, VersionResponse,
};
use reqwest::header::{HeaderMap, HeaderValue};
use reqwest::{Method, RequestBuilder};
use url::Url;

use crate::config::Config;
use crate::create::CreateSandbox;
use crate::error::{Error, Result};
use crate::http;
use crate::retry::RetryPolicy;
use crate::sandbox::Sandbox;
use crate::transport::Transport;

/// How long [`Client::connect`] waits.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);

/// A server's API. Cheap to clone; clones share connections.
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: Config,
    base: Url,
    key: Option<HeaderValue>,
    transport: Transport,
}

impl Client {
    /// A client with these settings.
    ///
    /// ```no_run
    /// # async fn example() -> opensandbox::Result<()> {
    /// use opensandbox::{Client, Config};
    ///
    /// let mut config = Config::new("https://sandboxes.example.org")?;
    /// config.api_key = Some("…".to_owned());
    /// let client = Client::new(config)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a setting cannot be used.
    pub fn new(config: Config) -> Result<Self> {
        Self::with_retry(config, RetryPolicy::default())
    }

    /// A client with these settings and this policy of repetition.
    ///
    /// ```no_run
    /// # async fn example() -> opensandbox::Result<()> {
    /// use opensandbox::{Client, Config, RetryPolicy};
    ///
    /// let client = Client::with_retry(Config::from_env()?, RetryPolicy::disabled())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a setting cannot be used.
    pub fn with_retry(config: Config, retry: RetryPolicy) -> Result<Self> {
        let base = parse_base(&config.base_url())?;
        let key = match &config.api_key {
            Some(key) => Some(secret(key).ok_or_else(|| {
                Error::InvalidArgument("the API key has characters that a header cannot hold".to_owned())
            })?),
            None => None,
        };
        let http = http::client(http::Options {
            headers: config.headers.clone(),
            user_agent: config.user_agent.clone(),
            direct: base.host_str().is_some_and(http::is_loopback),
            ..http::Options::default()
        })?;
        let request_id = config.headers.get(REQUEST_ID_HEADER).cloned();
        let transport = Transport { http, retry, request_id };
        Ok(Self { inner: Arc::new(Inner { config, base, key, transport }) })
    }

    /// A client as the environment describes it; see [`Config::from_env`].
    ///
    /// ```no_run
    /// # async fn example() -> opensandbox::Result<()> {
    /// let client = opensandbox::Client::from_env()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a setting cannot be used.
    pub fn from_env() -> Result<Self> {
        Self::new(Config::from_env()?)
    }

    /// The settings in use.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// Prepares a sandbox from an image: a stored name, an alias or a registry reference. See
    /// [`CreateSandbox`] for all that can be set.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let sandbox = client.create("python:3.12").env("A", "1").send().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn create(&self, image: impl Into<String>) -> CreateSandbox {
        CreateSandbox::from_image(self.clone(), image.into())
    }

    /// Prepares a sandbox from a snapshot.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let copy = client.create_from_snapshot("5f2c…").send().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn create_from_snapshot(&self, snapshot_id: impl Into<String>) -> CreateSandbox {
        CreateSandbox::from_snapshot(self.clone(), snapshot_id.into())
    }

    /// Prepares a sandbox from a template; see [`Client::templates`].
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// use std::time::Duration;
    ///
    /// let sandbox = client.create_from_template("t-1").timeout(Duration::from_secs(600)).send().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn create_from_template(&self, template_id: impl Into<String>) -> CreateSandbox {
        CreateSandbox::from_template(self.clone(), template_id.into())
    }

    /// Prepares a sandbox from a request of the wire, for members that have no method of their own.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let text = r#"{"image": {"uri": "host"}, "timeout": 600, "entrypoint": ["sleep", "600"]}"#;
    /// match serde_json::from_str(text) {
    ///     Ok(request) => println!("{}", client.create_with(request).send().await?.id()),
    ///     Err(error) => eprintln!("not a request: {error}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn create_with(&self, request: osb_protocol::lifecycle::CreateSandboxRequest) -> CreateSandbox {
        CreateSandbox::from_request(self.clone(), request)
    }

    /// A handle on an existing sandbox whose daemon answers.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let sandbox = client.connect("0b1d…").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, is not ready within half a minute, or the server cannot be reached.
    pub async fn connect(&self, id: impl Into<String>) -> Result<Sandbox> {
        let sandbox = self.sandbox(id);
        sandbox.wait_ready(CONNECT_PATIENCE).await?;
        Ok(sandbox)
    }

    /// A handle on an existing sandbox. Nothing is asked of the server.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// client.sandbox("0b1d…").kill().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn sandbox(&self, id: impl Into<String>) -> Sandbox {
        Sandbox::new(self.clone(), id.into())
    }

    /// The server's version.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// println!("server {}", client.server_version().await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn server_version(&self) -> Result<String> {
        let request = self.transport().http.get(self.at_root("version")?);
        let answer: VersionResponse = self.transport().json(request, self.config().request_timeout).await?;
        Ok(answer.version)
    }

    /// Whether the server is up; asks for no key.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// client.health().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it is not, or cannot be reached.
    pub async fn health(&self) -> Result<()> {
        let request = self.transport().http.get(self.at_root("health")?);
        let _: HealthResponse = self.transport().json(request, self.config().request_timeout).await?;
        Ok(())
    }

    /// Tells the server how long a create took. Nothing is told unless you call this.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// use opensandbox::MetricsEvent;
    ///
    /// let event = MetricsEvent {
    ///     event_type: "sandbox.create".to_owned(),
    ///     sandbox_id: None,
    ///     image: Some("host".to_owned()),
    ///     create_duration_ms: 12,
    ///     success: true,
    /// };
    /// client.report(&event).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the server refuses or cannot be reached.
    pub async fn report(&self, event: &MetricsEvent) -> Result<()> {
        let request = self.request(Method::POST, &["metrics", "events"])?.json(event);
        self.transport().done(request, self.config().request_timeout).await
    }

    /// Routes that have no form below `/v1`.
    fn at_root(&self, name: &str) -> Result<Url> {
        let base = self.inner.base.as_str().trim_end_matches('/');
        join(&parse_base(base.strip_suffix("/v1").unwrap_or(base))?, &[name])
    }

    pub(crate) fn transport(&self) -> &Transport {
        &self.inner.transport
    }

    /// A request to the lifecycle API.
    pub(crate) fn request(&self, method: Method, path: &[&str]) -> Result<RequestBuilder> {
        Ok(self.with_key(self.transport().http.request(method, join(&self.inner.base, path)?)))
    }

    /// Adds the API key. Only for requests to the server: the key must never reach a sandbox.
    pub(crate) fn with_key(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.inner.key {
            Some(key) => request.header(API_KEY_HEADER, key.clone()),
            None => request,
        }
    }
}

/// A header value that is kept out of debug output.
pub(crate) fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Headers that came with an endpoint.
pub(crate) fn endpoint_headers(headers: &BTreeMap<String, String>) -> Result<HeaderMap> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = reqwest::header::HeaderName::from_bytes(name.as_bytes()).ok();
        let (Some(name), Some(value)) = (name, secret(value)) else {
            return Err(Error::Unexpected {
                call: "GET endpoint".into(),
                reason: "a header that cannot be sent".to_owned(),
            });
        };
        map.insert(name, value);
    }
    Ok(map)
}

pub(crate) fn parse_base(text: &str) -> Result<Url> {
    Url::parse(text)
        .ok()
        .filter(Url::has_host)
        .ok_or_else(|| Error::InvalidArgument(format!("'{text}' is no URL of a server")))
}

/// Appends path segments, encoded so that each stays one segment.
pub(crate) fn join(base: &Url, segments: &[&str]) -> Result<Url> {
    if let Some(bad) = segments.iter().find(|segment| matches!(**segment, "" | "." | "..")) {
        return Err(Error::InvalidArgument(format!("'{bad}' is no id")));
    }
    let mut url = base.clone();
    match url.path_segments_mut() {
        Ok(mut path) => {
            path.pop_if_empty().extend(segments);
        }
        Err(()) => return Err(Error::InvalidArgument(format!("'{base}' is no URL of a server"))),
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_stay_one_segment() {
        let base = parse_base("http://h:1/v1").unwrap();
        let path = |id| join(&base, &["sandboxes", id]).map(|url| url.path().to_owned());
        assert_eq!(path("abc").unwrap(), "/v1/sandboxes/abc");
        assert_eq!(path("a/../b?c#d").unwrap(), "/v1/sandboxes/a%2F..%2Fb%3Fc%23d");
        for bad in ["", ".", ".."] {
            assert!(path(bad).is_err(), "{bad:?}");
        }
        let slash = parse_base("http://h/x/").unwrap();
        assert_eq!(join(&slash, &["ping"]).unwrap().as_str(), "http://h/x/ping");
    }

    #[test]
    fn an_impossible_key_is_refused() {
        let config = Config { api_key: Some("a\nb".to_owned()), ..Config::default() };
        let error = Client::new(config).unwrap_err().to_string();
        assert!(error.contains("API key") && !error.contains("a\nb"), "{error}");
    }
}
