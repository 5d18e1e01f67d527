//! The one place where HTTP clients are built.
//!
//! A client takes its trust from the root certificates built in, plus the system's bundle where there is one:
//! a minimal root file system has none, and a company's own authority is only in the system's. Neither is looked at
//! before a server has to be believed.

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::HeaderMap;
use rustls::pki_types::CertificateDer;

use crate::error::{Error, Result, chain};
use crate::trust::Trust;

/// Time to make a connection, name look-up and TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// What a client is for.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Sent with every request.
    pub headers: HeaderMap,
    /// The value of `User-Agent`.
    pub user_agent: String,
    /// Never use the proxies that the environment names. Set for loopback addresses: a proxy elsewhere cannot
    /// reach them, and `NO_PROXY` is easily forgotten.
    pub direct: bool,
    /// Authorities to trust besides the built-in ones and the system's.
    pub authorities: Vec<CertificateDer<'static>>,
}

/// TLS settings of every client: ring, TLS 1.2 and 1.3, HTTP/1.1.
///
/// # Errors
/// When the cryptography provider does not offer these versions, which the one built in does.
pub fn tls_config(authorities: Vec<CertificateDer<'static>>) -> Result<rustls::ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::InvalidArgument(format!("TLS cannot be set up: {error}")))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Trust::new(authorities, provider)))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Builds a client. It follows no redirects (the API key would travel with them) and has no time limit for
/// whole answers, because streams last; see [`crate::Config::request_timeout`].
///
/// # Errors
/// When TLS cannot be set up.
pub fn client(options: Options) -> Result<reqwest::Client> {
    let mut builder = reqwest::Client::builder()
        .tls_backend_preconfigured(tls_config(options.authorities)?)
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .pool_idle_timeout(Duration::from_secs(30))
        .default_headers(options.headers);
    if !options.user_agent.is_empty() {
        builder = builder.user_agent(options.user_agent);
    }
    if options.direct {
        builder = builder.no_proxy();
    }
    builder.build().map_err(|error| Error::InvalidArgument(format!("HTTP client: {}", chain(&error))))
}

/// Whether a host (`localhost`, an address, both with or without port) is this machine's loopback.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    let bare = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None if host.matches(':').count() == 1 => host.split(':').next().unwrap_or_default(),
        None => host,
    };
    bare.eq_ignore_ascii_case("localhost")
        || bare.to_ascii_lowercase().ends_with(".localhost")
        || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_without_a_certificate_bundle() {
        client(Options::default()).unwrap();
        assert!(!tls_config(Vec::new()).unwrap().alpn_protocols.is_empty());
    }

    #[test]
    fn loopback_hosts() {
        for host in
            ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.3.2.1", "[::1]:80", "::1", "a.localhost:9"]
        {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["example.org", "10.0.0.1:80", "[fe80::1]:80", "localhost.example.org", ""] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
