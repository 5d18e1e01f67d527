//! Answers what a registry asks before it lets anybody read.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_auth::parser::ChallengeParser;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use serde::Deserialize;
use url::Url;

use crate::backoff::Failure;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pace::Body;
use crate::settings::{Credentials, Patience};

/// Most of a token service's answer that is read.
const MOST_TOKEN: u64 = 1 << 20;

/// What proves who pulls.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Secret {
    /// User and password.
    Basic(Credentials),
    /// Exchanged at the token service for tokens of single repositories.
    IdentityToken(String),
    /// Sent to the registry as it is.
    RegistryToken(String),
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A secret, or none, and where it came from.
#[derive(Clone, Debug)]
pub(crate) struct Login {
    pub(crate) secret: Option<Secret>,
    /// For messages.
    pub(crate) origin: &'static str,
}

impl Login {
    pub(crate) const ANONYMOUS: Self = Self { secret: None, origin: "access without credentials" };

    /// The text of a peer without our secrets: it may quote what it was sent.
    pub(crate) fn redact(&self, text: String) -> String {
        const SHORTEST: usize = 3;
        let secret = match &self.secret {
            Some(Secret::Basic(Credentials { password, .. })) => password,
            Some(Secret::IdentityToken(token) | Secret::RegistryToken(token)) => token,
            None => return text,
        };
        let sent = match &self.secret {
            Some(Secret::Basic(credentials)) => pair(credentials),
            _ => secret.clone(),
        };
        if secret.len() < SHORTEST || !(text.contains(secret.as_str()) || text.contains(&sent)) {
            return text;
        }
        text.replace(secret.as_str(), "***").replace(&sent, "***")
    }
}

/// What the registry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    /// User and password with each request.
    Basic,
    /// A token, from the service at `realm`.
    Bearer {
        /// Address of the service.
        realm: String,
        /// The registry's name there.
        service: Option<String>,
    },
}

impl Challenge {
    /// The best of those in an answer: a token rather than the password.
    pub(crate) fn read(headers: &HeaderMap) -> Option<Self> {
        let mut best = None;
        for value in headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok()) {
            // What was understood before a syntax error counts.
            for challenge in ChallengeParser::new(value).map_while(Result::ok) {
                let parameter = |name: &str| {
                    let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
                    found.map(|(_, value)| value.to_unescaped())
                };
                if challenge.scheme.eq_ignore_ascii_case("bearer")
                    && let Some(realm) = parameter("realm")
                {
                    return Some(Self::Bearer { realm, service: parameter("service") });
                }
                if challenge.scheme.eq_ignore_ascii_case("basic") {
                    best = Some(Self::Basic);
                }
            }
        }
        best
    }
}

#[derive(Deserialize)]
struct Token {
    #[serde(default)]
    token: String,
    #[serde(default)]
    access_token: String,
}

/// The `Authorization` that answers a challenge.
pub(crate) async fn answer(
    challenge: Option<Challenge>,
    login: &Login,
    endpoint: &Endpoint,
    repository: &str,
    patience: &Patience,
) -> Result<HeaderValue, Failure> {
    match (challenge, &login.secret) {
        (_, Some(Secret::RegistryToken(token))) => bearer(token, endpoint),
        (Some(Challenge::Basic), Some(Secret::Basic(credentials))) => basic(credentials, endpoint),
        (Some(Challenge::Bearer { realm, service }), _) => {
            let scope = format!("repository:{repository}:pull");
            token(&realm, service.as_deref(), &scope, login, endpoint, repository, patience).await
        }
        _ => Err(refused(login, endpoint, repository, String::new())),
    }
}

/// The error of refused credentials.
pub(crate) fn refused(login: &Login, endpoint: &Endpoint, repository: &str, message: String) -> Failure {
    Failure::last(Error::Unauthorized {
        registry: endpoint.name().into(),
        repository: repository.into(),
        credentials: login.origin,
        message,
    })
}

async fn token(
    realm: &str,
    service: Option<&str>,
    scope: &str,
    login: &Login,
    endpoint: &Endpoint,
    repository: &str,
    patience: &Patience,
) -> Result<HeaderValue, Failure> {
    let what = "its token service";
    let malformed = |reason: &str| {
        Failure::last(Error::Malformed {
            registry: endpoint.name().into(),
            what: what.into(),
            reason: reason.into(),
        })
    };
    let mut url = Url::parse(realm).map_err(|_| malformed("the realm is no address"))?;
    match url.scheme() {
        "https" => {}
        "http" if endpoint.is_plain() => {}
        "http" => {
            return Err(Failure::last(Error::PlainHttp {
                registry: endpoint.name().into(),
                reason: "its token service has no TLS; nothing is sent there".into(),
            }));
        }
        _ => return Err(malformed("the realm is neither http nor https")),
    }
    // Whoever names the realm must not choose the credentials.
    let _ = (url.set_username(""), url.set_password(None));
    let request = match &login.secret {
        Some(Secret::IdentityToken(refresh)) => {
            let mut form = form_urlencoded::Serializer::new(String::new());
            form.append_pair("grant_type", "refresh_token").append_pair("refresh_token", refresh);
            form.append_pair("client_id", "opensandbox").append_pair("scope", scope);
            let form = form.extend_pairs(service.map(|service| ("service", service))).finish();
            endpoint.http().post(url).header(CONTENT_TYPE, "application/x-www-form-urlencoded").body(form)
        }
        secret => {
            let mut query = url.query_pairs_mut();
            query.extend_pairs(service.map(|service| ("service", service)));
            query.append_pair("scope", scope).finish();
            drop(query);
            let request = endpoint.http().get(url);
            match secret {
                Some(Secret::Basic(credentials)) => {
                    request.header(AUTHORIZATION, basic(credentials, endpoint)?)
                }
                _ => request,
            }
        }
    };
    let response = endpoint.execute(request, what, patience).await?;
    let status = response.status().as_u16();
    match status {
        200..300 => {}
        // The service says so where the registry would have said "not allowed" or "not found".
        400 | 401 | 403 | 404 => {
            let message = login.redact(crate::endpoint::message(response, patience).await);
            return Err(refused(login, endpoint, repository, message));
        }
        _ => return Err(endpoint.failed(response, what, patience, login).await),
    }
    let body = Body::new(response, patience, endpoint.name(), what).whole(MOST_TOKEN).await?;
    let token: Token = serde_json::from_slice(&body).map_err(|_| malformed("its answer is not JSON"))?;
    let token = if token.token.is_empty() { token.access_token } else { token.token };
    if token.is_empty() {
        return Err(malformed("its answer holds no token"));
    }
    bearer(&token, endpoint)
}

fn pair(credentials: &Credentials) -> String {
    STANDARD.encode(format!("{}:{}", credentials.username, credentials.password))
}

fn basic(credentials: &Credentials, endpoint: &Endpoint) -> Result<HeaderValue, Failure> {
    header(&format!("Basic {}", pair(credentials)), endpoint)
}

fn bearer(token: &str, endpoint: &Endpoint) -> Result<HeaderValue, Failure> {
    header(&format!("Bearer {token}"), endpoint)
}

fn header(text: &str, endpoint: &Endpoint) -> Result<HeaderValue, Failure> {
    let mut value = HeaderValue::from_str(text).map_err(|_| {
        Failure::last(Error::Malformed {
            registry: endpoint.name().into(),
            what: "authentication".into(),
            reason: "the token has characters that no token may have".into(),
        })
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &[&'static str]) -> Option<Challenge> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(WWW_AUTHENTICATE, HeaderValue::from_static(value));
        }
        Challenge::read(&headers)
    }

    #[test]
    fn challenges() {
        let bearer = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer { realm: realm.into(), service: service.map(str::to_owned) })
        };
        assert_eq!(
            read(&[r#"Bearer realm="https://a/t",service="r",scope="repository:x:pull""#]),
            bearer("https://a/t", Some("r"))
        );
        assert_eq!(read(&[r#"Basic realm="x", bearer realm="https://a""#]), bearer("https://a", None));
        assert_eq!(read(&[r#"Basic realm="x""#, r#"Bearer realm="https://a""#]), bearer("https://a", None));
        assert_eq!(read(&["basic realm=x"]), Some(Challenge::Basic));
        assert_eq!(read(&[r#"Bearer service="r""#, "Negotiate", ",,=\""]), None);
        assert_eq!(read(&[]), None);
    }

    #[test]
    fn what_a_peer_quotes_is_hidden() {
        let credentials = Credentials { username: "u".into(), password: "hunter2".into() };
        let login = Login { secret: Some(Secret::Basic(credentials)), origin: "x" };
        for text in ["no hunter2 here".to_owned(), format!("got {}", STANDARD.encode("u:hunter2"))] {
            assert!(login.redact(text).contains("***"));
        }
        assert_eq!(login.redact("plain".into()), "plain");
        assert!(!format!("{login:?}").contains("hunter2"));
    }
}
