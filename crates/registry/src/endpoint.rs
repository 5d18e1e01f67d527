//! Places that images come from, and how requests reach them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::Value;
use tokio::time::{Instant, timeout};
use url::Url;

use crate::auth::Login;
use crate::backoff::{Again, Failure};
use crate::error::{Error, Result, causes, printable};
use crate::pace::Body;
use crate::settings::{Patience, RegistrySettings, Settings};

/// Docker Hub in image names, and the host that serves it.
const HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");

const MOST_REDIRECTS: usize = 8;

/// Most of an error answer that is read.
const MOST_ERROR: usize = 16 << 10;

/// How long a mirror that does not answer is left alone.
const MIRROR_REST: Duration = Duration::from_secs(60);

/// A registry or a mirror of one.
#[derive(Debug)]
pub(crate) struct Endpoint {
    name: String,
    base: Url,
    /// Put before the names of repositories.
    prefix: String,
    http: Client,
    /// Does not answer; not asked before then.
    rests_until: Mutex<Option<Instant>>,
}

/// All endpoints, made from the settings.
#[derive(Debug)]
pub(crate) struct Endpoints {
    clients: Clients,
    registries: BTreeMap<String, RegistrySettings>,
    mirrors: BTreeMap<String, Vec<Arc<Endpoint>>>,
}

#[derive(Debug)]
struct Clients {
    usual: Client,
    loopback: Client,
    /// Of registries with own authorities.
    own: BTreeMap<String, Client>,
}

// === impl Endpoints ===

impl Endpoints {
    pub(crate) fn new(settings: &Settings) -> Result<Self> {
        let mut own = BTreeMap::new();
        for (host, registry) in &settings.registries {
            if let Some(path) = &registry.ca_file {
                let wrong = |reason: String| Error::InvalidSettings {
                    setting: format!("ca_file of {host}"),
                    reason: format!("{}: {reason}", path.display()),
                };
                let read = CertificateDer::pem_file_iter(path)
                    .and_then(Iterator::collect::<Result<Vec<_>, _>>)
                    .map_err(|error| wrong(error.to_string()))?;
                if read.is_empty() {
                    return Err(wrong("no certificate in it".into()));
                }
                own.insert(host.clone(), client(host, read)?);
            }
        }
        let clients = Clients { usual: client("", vec![])?, loopback: client("localhost", vec![])?, own };
        let mut mirrors = BTreeMap::new();
        for (host, registry) in &settings.registries {
            // A mistake is told at the start, not by the first pull.
            endpoint(host, &clients, &settings.registries)?;
            let of_host: Result<Vec<_>> = registry
                .mirrors
                .iter()
                .map(|mirror| endpoint(mirror, &clients, &settings.registries).map(Arc::new))
                .collect();
            mirrors.insert(host.clone(), of_host?);
        }
        Ok(Self { clients, registries: settings.registries.clone(), mirrors })
    }

    /// Mirrors of a registry in their order, and the registry itself last.
    pub(crate) fn of(&self, host: &str) -> Result<Vec<Arc<Endpoint>>> {
        let mut endpoints = self.mirrors.get(host).cloned().unwrap_or_default();
        endpoints.push(Arc::new(endpoint(host, &self.clients, &self.registries)?));
        Ok(endpoints)
    }
}

fn client(host: &str, authorities: Vec<CertificateDer<'static>>) -> Result<Client> {
    osb_client::http::client(osb_client::http::Options {
        user_agent: concat!("opensandbox/", env!("CARGO_PKG_VERSION")).into(),
        direct: osb_client::http::is_loopback(host),
        authorities,
        ..Default::default()
    })
    .map_err(|error| Error::InvalidSettings { setting: "HTTP client".into(), reason: error.to_string() })
}

/// Reads `[http[s]://]host[:port][/prefix]`.
fn endpoint(
    text: &str,
    clients: &Clients,
    registries: &BTreeMap<String, RegistrySettings>,
) -> Result<Endpoint> {
    let wrong = |reason: &str| Error::InvalidSettings {
        // Somebody may have written a password into it.
        setting: format!("registry or mirror {:?}", printable(text.rsplit('@').next().unwrap_or(""), 100)),
        reason: reason.into(),
    };
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme @ ("http" | "https"), rest)) => (Some(scheme), rest),
        Some(_) => return Err(wrong("only http and https are spoken")),
        None => (None, text),
    };
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let plain = registries.get(name).is_some_and(|registry| registry.plain_http);
    let scheme = scheme.unwrap_or(if plain { "http" } else { "https" });
    let host = if name == HUB.0 { HUB.1 } else { name };
    let base = Url::parse(&format!("{scheme}://{host}/")).map_err(|_| wrong("that is no host"))?;
    if !base.username().is_empty() || base.password().is_some() || base.query().is_some() {
        return Err(wrong("a host, a port and a path are expected; credentials have their own settings"));
    }
    let prefix = prefix.trim_matches('/');
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
    let fallback = if osb_client::http::is_loopback(host) { &clients.loopback } else { &clients.usual };
    let http = clients.own.get(name).unwrap_or(fallback).clone();
    Ok(Endpoint { name: name.into(), base, prefix, http, rests_until: Mutex::new(None) })
}

// === impl Endpoint ===

impl Endpoint {
    /// Host and port, as in image names.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn http(&self) -> &Client {
        &self.http
    }

    /// Whether it was configured to be reached without TLS.
    pub(crate) fn is_plain(&self) -> bool {
        self.base.scheme() == "http"
    }

    /// The repository's name here.
    pub(crate) fn repository(&self, path: &str) -> String {
        format!("{}{path}", self.prefix)
    }

    /// Address of a manifest or blob. The parts were proven to be plain before.
    pub(crate) fn url(&self, repository: &str, kind: &str, reference: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("/v2/{repository}/{kind}/{reference}"));
        url
    }

    pub(crate) fn rests(&self) -> bool {
        let until = self.rests_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Leaves it alone for a while if the error says that it does not work at all.
    pub(crate) fn note(&self, error: &Error) {
        if matches!(error, Error::Unavailable { .. } | Error::Stalled { .. } | Error::PlainHttp { .. }) {
            let mut until = self.rests_until.lock().unwrap_or_else(PoisonError::into_inner);
            *until = Some(Instant::now() + MIRROR_REST);
        }
    }

    /// Gets an address and follows redirects. `Authorization` stays with the host it was meant for. The answer is
    /// told to be from this endpoint (`true`) or from where it sent us.
    pub(crate) async fn get(
        &self,
        mut url: Url,
        mut authorization: Option<HeaderValue>,
        headers: &HeaderMap,
        what: &str,
        patience: &Patience,
    ) -> Result<(Response, bool), Failure> {
        let mut at_home = true;
        for _ in 0..=MOST_REDIRECTS {
            let mut request = self.http.get(url.clone()).headers(headers.clone());
            if let Some(authorization) = &authorization {
                request = request.header(AUTHORIZATION, authorization.clone());
            }
            let response = self.execute(request, what, patience).await?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok((response, at_home));
            }
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| url.join(location).ok());
            let Some(mut next) = next.filter(|next| matches!(next.scheme(), "http" | "https")) else {
                return Err(self.malformed(what, "it redirects to no address"));
            };
            if url.scheme() == "https" && next.scheme() == "http" {
                let target = next.host_str().unwrap_or_default();
                return Err(Failure::last(Error::PlainHttp {
                    registry: self.name.clone(),
                    reason: format!("it redirects {what} to {target} without TLS, which is refused"),
                }));
            }
            let _ = (next.set_username(""), next.set_password(None));
            if next.origin() != self.base.origin() {
                authorization = None;
                at_home = false;
            }
            url = next;
        }
        Err(self.malformed(what, "it redirects in circles"))
    }

    /// Sends a request and waits for the head of the answer.
    pub(crate) async fn execute(
        &self,
        request: RequestBuilder,
        what: &str,
        patience: &Patience,
    ) -> Result<Response, Failure> {
        match timeout(patience.stall, request.send()).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(self.unreachable(error)),
            Err(_) => Err(Failure::passing(Error::Stalled {
                registry: self.name.clone(),
                what: what.into(),
                least: patience.least_bytes,
                after: patience.stall,
            })),
        }
    }

    fn unreachable(&self, error: reqwest::Error) -> Failure {
        let unavailable = |reason| Error::Unavailable { registry: self.name.clone(), reason };
        match tls_error(&error) {
            Some(rustls::Error::InvalidMessage(_)) => Failure::last(Error::PlainHttp {
                registry: self.name.clone(),
                reason: "it speaks no TLS; set plain_http = true for this registry if that is meant".into(),
            }),
            Some(rustls::Error::InvalidCertificate(reason)) => Failure::last(unavailable(format!(
                "its certificate is not trusted ({reason:?}); name its authority by ca_file"
            ))),
            _ => Failure::passing(unavailable(causes(error))),
        }
    }

    pub(crate) fn malformed(&self, what: &str, reason: impl Into<String>) -> Failure {
        Failure::last(Error::Malformed {
            registry: self.name.clone(),
            what: what.into(),
            reason: reason.into(),
        })
    }

    /// The failure that any other answer than a good one stands for.
    pub(crate) async fn failed(
        &self,
        response: Response,
        what: &str,
        patience: &Patience,
        login: &Login,
    ) -> Failure {
        let status = response.status();
        let asked = retry_after(response.headers());
        let message = login.redact(message(response, patience).await);
        let again = asked.map_or(Again::Later, Again::After);
        match status.as_u16() {
            429 => {
                let registry = self.name.clone();
                let error = Box::new(Error::RateLimited { registry, retry_after: asked, message });
                Failure { error, again }
            }
            code => {
                let words = if message.is_empty() { String::new() } else { format!(": {message}") };
                let reason = format!("{status} for {what}{words}");
                let again = if code == 408 || code >= 500 { again } else { Again::Never };
                let error = Box::new(Error::Unavailable { registry: self.name.clone(), reason });
                Failure { error, again }
            }
        }
    }
}

/// The TLS error among an error's causes.
fn tls_error(error: &reqwest::Error) -> Option<&rustls::Error> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(tls) = error.downcast_ref() {
            return Some(tls);
        }
        // An `io::Error` does not name what it wraps as its source.
        let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        next = match wrapped {
            Some(wrapped) => Some(wrapped),
            None => error.source(),
        };
    }
    None
}

/// Seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(text).ok()?;
    let left = date.timestamp().duration_since(jiff::Timestamp::now());
    Some(Duration::try_from(left).unwrap_or_default())
}

/// What an error answer says, in the shapes that registries and token services use; empty if in none of them.
pub(crate) async fn message(response: Response, patience: &Patience) -> String {
    let mut body = Body::new(response, patience, "", "");
    let mut bytes = Vec::new();
    while let Ok(Some(chunk)) = body.chunk().await {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > MOST_ERROR {
            return String::new();
        }
    }
    let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
    let words = if let Some(first) = value.pointer("/errors/0") {
        let words = [text(first, "code"), text(first, "message")];
        words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(": ")
    } else {
        let keys = ["message", "details", "error_description", "error"];
        keys.iter().map(|key| text(&value, key)).find(|text| !text.is_empty()).unwrap_or_default()
    };
    printable(&words, 200)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        let mut settings = Settings::new("/nowhere");
        let hub = RegistrySettings {
            mirrors: vec![
                "m.example/proxy/hub/".into(),
                "http://10.0.0.1:5000".into(),
                "plain.example".into(),
            ],
            ..Default::default()
        };
        settings.registries.insert("docker.io".into(), hub);
        let plain = RegistrySettings { plain_http: true, ..Default::default() };
        settings.registries.insert("plain.example".into(), plain);
        settings
    }

    #[test]
    fn addresses() {
        let endpoints = Endpoints::new(&settings()).unwrap();
        let urls = |host: &str| {
            let endpoints = endpoints.of(host).unwrap();
            let url = |endpoint: &Arc<Endpoint>| {
                let repository = endpoint.repository("library/python");
                endpoint.url(&repository, "manifests", "3").to_string()
            };
            endpoints.iter().map(url).collect::<Vec<_>>()
        };
        assert_eq!(
            urls("docker.io"),
            [
                "https://m.example/v2/proxy/hub/library/python/manifests/3",
                "http://10.0.0.1:5000/v2/library/python/manifests/3",
                "http://plain.example/v2/library/python/manifests/3",
                "https://registry-1.docker.io/v2/library/python/manifests/3",
            ]
        );
        assert_eq!(urls("localhost:5000"), ["https://localhost:5000/v2/library/python/manifests/3"]);
        assert_eq!(urls("[::1]:5000"), ["https://[::1]:5000/v2/library/python/manifests/3"]);
        assert_eq!(urls("plain.example"), ["http://plain.example/v2/library/python/manifests/3"]);
    }

    #[test]
    fn wrong_settings_are_refused() {
        for mirror in ["ftp://a.example", "https://u:p@a.example", "a b", "", "a.example:x", "a.example?x"] {
            let mut settings = settings();
            let hub = RegistrySettings { mirrors: vec![mirror.into()], ..Default::default() };
            settings.registries.insert("docker.io".into(), hub);
            let error = Endpoints::new(&settings).unwrap_err();
            assert!(matches!(error, Error::InvalidSettings { .. }), "{mirror}: {error}");
            assert!(!error.to_string().contains("u:p"), "{error}");
        }
        let mut settings = settings();
        let own = RegistrySettings { ca_file: Some("/dev/null".into()), ..Default::default() };
        settings.registries.insert("a.example".into(), own);
        assert!(matches!(Endpoints::new(&settings), Err(Error::InvalidSettings { .. })));
    }

    #[test]
    fn waits_that_registries_ask_for() {
        let asked = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, HeaderValue::from_str(text).unwrap());
            retry_after(&headers)
        };
        assert_eq!(asked("7"), Some(Duration::from_secs(7)));
        assert_eq!(asked("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert!(asked("Mon, 21 Oct 2115 07:28:00 GMT").unwrap() > Duration::from_secs(3600));
        assert_eq!(asked("soon"), None);
    }
}
