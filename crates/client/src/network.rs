//! Which destinations a sandbox may reach, and how it is reached.

use std::collections::BTreeMap;

use osb_protocol::lifecycle::{NetworkPolicy, NetworkRule, ORIGIN_HEADER, PolicyStatusResponse};
use osb_protocol::time::WireTime;
use reqwest::header::HeaderMap;
use reqwest::{Method, RequestBuilder};
use url::Url;

use crate::client::{endpoint_headers, parse_base};
use crate::error::Result;
use crate::sandbox::Sandbox;
use crate::transport::Transport;

/// Where a port of a sandbox is, as the server says it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Endpoint {
    /// `host[:port][/path]`: no scheme, no slash at the end.
    pub endpoint: String,
    /// To be sent with every request.
    pub headers: BTreeMap<String, String>,
    /// What the sandbox was made from: `template`; absent when the server does not say.
    pub origin: Option<String>,
}

/// Where a port of a sandbox is, ready for an HTTP client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// URL of the port's root.
    pub url: Url,
    /// To be sent with every request.
    pub headers: HeaderMap,
}

impl Sandbox {
    /// The address of a port inside as a URL, with the headers to send along.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let service = sandbox.service(8000).await?;
    /// println!("curl {}", service.url);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox does not exist or the server cannot be reached.
    pub async fn service(&self, port: u16) -> Result<Service> {
        let Endpoint { endpoint, headers, .. } = self.endpoint(port).await?;
        let url = parse_base(&format!("{}://{endpoint}/", self.config().protocol.as_str()))?;
        Ok(Service { url, headers: endpoint_headers(&headers)? })
    }

    /// The address of a port inside, with the headers to send along. Carries no scheme; use that of
    /// [`Config::protocol`](crate::Config::protocol).
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let endpoint = sandbox.endpoint(8000).await?;
    /// println!("http://{} {:?}", endpoint.endpoint, endpoint.headers);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox does not exist or the server cannot be reached.
    pub async fn endpoint(&self, port: u16) -> Result<Endpoint> {
        self.endpoint_by(self.transport(), port).await
    }

    pub(crate) async fn endpoint_by(&self, transport: &Transport, port: u16) -> Result<Endpoint> {
        let query = ("use_server_proxy", self.config().use_server_proxy.to_string());
        self.ask_endpoint(transport, port, query).await
    }

    async fn ask_endpoint(
        &self,
        transport: &Transport,
        port: u16,
        query: (&str, String),
    ) -> Result<Endpoint> {
        let request = self
            .client()
            .request(Method::GET, &["sandboxes", self.id(), "endpoints", &port.to_string()])?
            .query(&[query]);
        let limit = self.config().request_timeout;
        let answer = transport.open(request, limit).await?;
        let origin = answer.response.headers().get(ORIGIN_HEADER);
        let origin = origin
            .and_then(|origin| origin.to_str().ok())
            .filter(|origin| !origin.is_empty())
            .map(str::to_owned);
        let wire: osb_protocol::lifecycle::Endpoint = answer.json(limit).await?;
        Ok(Endpoint { endpoint: wire.endpoint, headers: wire.headers.unwrap_or_default(), origin })
    }

    /// The address of a port inside that anybody may use until `expires`, where the server has a gateway for it.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::protocol::time::WireTime;
    ///
    /// if let Some(in_an_hour) = WireTime::now().plus_seconds(3600) {
    ///     println!("https://{}", sandbox.signed_endpoint(8000, in_an_hour).await?.endpoint);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox does not exist, the server has no gateway, or it cannot be reached.
    pub async fn signed_endpoint(&self, port: u16, expires: WireTime) -> Result<Endpoint> {
        let query = ("expires", expires.timestamp().as_second().to_string());
        self.ask_endpoint(self.transport(), port, query).await
    }

    /// Which destinations it may reach.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// println!("{:?}", sandbox.network_policy().await?.policy);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox does not exist, has no policy of its own, or the server cannot be reached.
    pub async fn network_policy(&self) -> Result<PolicyStatusResponse> {
        let request = self.policy(Method::GET)?;
        self.transport().json(request, self.config().request_timeout).await
    }

    /// Replaces the policy.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::{NetworkPolicy, NetworkRule, PolicyAction};
    ///
    /// let pypi = NetworkRule { action: PolicyAction::Allow, target: "pypi.org".to_owned() };
    /// let policy = NetworkPolicy { default_action: Some(PolicyAction::Deny), egress: vec![pypi] };
    /// sandbox.set_network_policy(&policy).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Sandbox::network_policy`], and when a rule cannot be right.
    pub async fn set_network_policy(&self, policy: &NetworkPolicy) -> Result<PolicyStatusResponse> {
        let request = self.policy(Method::PUT)?.json(policy);
        self.transport().json(request, self.config().request_timeout).await
    }

    /// Adds rules; one for a target that has a rule replaces it.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::{NetworkRule, PolicyAction};
    ///
    /// let rule = NetworkRule { action: PolicyAction::Allow, target: "*.example.org".to_owned() };
    /// sandbox.add_network_rules(&[rule]).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Sandbox::set_network_policy`].
    pub async fn add_network_rules(&self, rules: &[NetworkRule]) -> Result<PolicyStatusResponse> {
        let request = self.policy(Method::PATCH)?.json(rules);
        self.transport().json(request, self.config().request_timeout).await
    }

    /// Removes the rules for these targets.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.remove_network_rules(&["*.example.org"]).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Sandbox::network_policy`].
    pub async fn remove_network_rules<T: AsRef<str>>(&self, targets: &[T]) -> Result<PolicyStatusResponse> {
        let targets: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        let request = self.policy(Method::DELETE)?.json(&targets);
        self.transport().json(request, self.config().request_timeout).await
    }

    fn policy(&self, method: Method) -> Result<RequestBuilder> {
        self.client().request(method, &["sandboxes", self.id(), "networkpolicy"])
    }
}
