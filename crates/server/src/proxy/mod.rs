//! The way through the server to a port of a sandbox: HTTP, WebSockets, any upgrade.
//!
//! Bodies stream both ways with back-pressure and without a limit in time. Nothing is kept between requests but
//! idle connections, and those never across sandboxes or ports. A client that goes away takes its backend's
//! connection with it, and the other way round.

mod headers;
mod path;
mod pool;
mod problem;
mod tunnel;
mod upgrade;
mod upstream;

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::response::IntoResponse;
use http::header::{ALLOW, CONTENT_LENGTH, HOST, UPGRADE};
use http::{Extensions, HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use osb_protocol::execd::EXECD_PORT;
use osb_protocol::ids::SandboxId;
use osb_runtime::{ConnectError, Runtime, Target};
use tokio::sync::Notify;

pub use self::path::{Matched, matches};
pub use self::pool::Idle;

use self::headers::{Framing, Origin};
use self::path::PortError;
use self::pool::{Key, Pool};
use self::problem::{Broken, Problem, bad_path, malformed, refuse};
use self::upgrade::Wish;
use self::upstream::{Failure, Relay, Upstream};
use crate::error::{ApiError, Issue};
use crate::sandbox::Record;
use crate::state::AppState;

/// How long a broken connection waits for news of its sandbox's end.
const END_PATIENCE: Duration = Duration::from_millis(250);
const METHODS: [Method; 7] =
    [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS];
const ALLOWED: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// What the proxy asks of whoever knows the sandboxes.
pub trait Sandboxes: Send + Sync {
    /// Decides whether a request may go to the sandbox that a path names, and takes note of it.
    ///
    /// # Errors
    /// Not found, or a token is missing.
    fn admit(&self, id: &str, headers: &HeaderMap) -> Result<SandboxId, ApiError>;

    /// State and reason of a sandbox that no longer runs, in words for people.
    fn ended(&self, id: SandboxId) -> Option<String>;
}

/// Sends one request to a port of a sandbox as `path_and_query`, and gives its answer back as it is.
pub(crate) async fn forward(
    state: &AppState,
    record: &Record,
    port: u16,
    path_and_query: &str,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let uri = path_and_query.parse().map_err(|_| bad_path())?;
    Ok(state.proxy().send(state, record.id(), port, uri, request).await)
}

impl Sandboxes for AppState {
    fn admit(&self, id: &str, headers: &HeaderMap) -> Result<SandboxId, ApiError> {
        let record = self.sandbox(id)?;
        self.check_endpoint_token(&record, headers)?;
        self.accessed(&record, headers);
        Ok(record.id())
    }

    fn ended(&self, id: SandboxId) -> Option<String> {
        let record = self.index().get(id)?;
        let now = record.now();
        let status = &now.status;
        status
            .has_ended()
            .then(|| format!("the sandbox is {} ({}): {}", status.state, status.reason, status.message))
    }
}

/// What can be set about the proxy.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a connection may take.
    pub connect: Duration,
    /// How long nothing may move before the head of an answer.
    pub answer: Duration,
    /// What waits for later requests.
    pub idle: Idle,
    /// Address under which the world knows this server: host, port, perhaps a path.
    pub public_address: Option<String>,
    /// Domain below which the names `PORT-ID` lead to sandboxes.
    pub endpoint_suffix: Option<String>,
    /// Believe `X-Forwarded-For` and `X-Forwarded-Proto` of peers on this machine.
    pub trust_local_peers: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(30),
            answer: Duration::from_secs(180),
            idle: Idle::default(),
            public_address: None,
            endpoint_suffix: None,
            trust_local_peers: false,
        }
    }
}

/// Forwards requests into sandboxes.
pub struct Proxy {
    runtime: Arc<dyn Runtime>,
    pool: Arc<Pool>,
    options: Options,
    /// Wakes when some sandbox has ended.
    endings: Notify,
    /// Path of the public address, if there is such an address; without a slash at its end.
    public_path: Option<String>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Where a request goes.
struct Way {
    id: SandboxId,
    port: u16,
    /// Path and query for the backend.
    uri: Uri,
    /// Path under which the client sees the backend's root.
    prefix: String,
}

impl Proxy {
    /// A proxy into the sandboxes of a runtime.
    #[must_use]
    pub fn new(runtime: Arc<dyn Runtime>, options: Options) -> Self {
        let public_path = options.public_address.as_deref().map(|address| {
            let host_and_path = address.split_once("://").map_or(address, |(_, rest)| rest);
            let start = host_and_path.find('/').unwrap_or(host_and_path.len());
            host_and_path[start..].trim_end_matches('/').to_owned()
        });
        Self {
            runtime,
            pool: Arc::new(Pool::new(options.idle)),
            options,
            endings: Notify::new(),
            public_path,
        }
    }

    /// Answers a request whose path is one of the proxy's; gives any other back.
    ///
    /// # Errors
    /// The request, untouched, if it is not for a sandbox.
    pub async fn call<S: Sandboxes>(
        &self,
        sandboxes: &S,
        request: Request<Body>,
    ) -> Result<Response<Body>, Request<Body>> {
        let uri = request.uri().clone();
        let host = request.headers().get(HOST).cloned();
        let Some(matched) = self.destination(&uri, host.as_ref()) else { return Err(request) };
        if !METHODS.contains(request.method()) {
            let mut response = ApiError::MethodNotAllowed.into_response();
            response.headers_mut().insert(ALLOW, HeaderValue::from_static(ALLOWED));
            return Ok(response);
        }
        let found = self.find(sandboxes, &matched, &uri, request.headers());
        Ok(self.answer(sandboxes, found, request).await)
    }

    /// Sends a request to a port of a sandbox that has been looked up and checked, with another path, and gives its
    /// answer back.
    pub async fn send<S: Sandboxes>(
        &self,
        sandboxes: &S,
        id: SandboxId,
        port: u16,
        path_and_query: Uri,
        request: Request<Body>,
    ) -> Response<Body> {
        let way = Way { id, port, uri: path_and_query, prefix: String::new() };
        self.answer(sandboxes, Ok(way), request).await
    }

    /// Closes the idle connections of a sandbox that has ended, and tells those who wait to hear why their own
    /// broke. To be called after the end can be seen.
    pub fn forget(&self, id: SandboxId) {
        self.pool.forget(id);
        self.endings.notify_waiters();
    }

    /// Number of connections that wait for a next request.
    #[must_use]
    pub fn idle(&self) -> usize {
        self.pool.len()
    }

    /// Where the request goes, if it may.
    fn find<S: Sandboxes>(
        &self,
        sandboxes: &S,
        matched: &Matched<'_>,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Way, ApiError> {
        let port = path::parse_port(matched.port).map_err(|error| match error {
            PortError::OutOfRange => ApiError::InvalidPort,
            PortError::NoNumber => ApiError::Validation(vec![Issue::new(
                "int_parsing",
                &["path", "port"],
                "the port must be a number from 1 to 65535",
            )]),
        })?;
        let id = sandboxes.admit(matched.id, headers)?;
        let uri = path::backend_uri(uri, matched.rest_start).map_err(|_| bad_path())?;
        Ok(Way { id, port, uri, prefix: self.prefix(matched) })
    }

    /// Answers a request: with the backend's answer, or with an error in the form that the client can read.
    async fn answer<S: Sandboxes>(
        &self,
        sandboxes: &S,
        found: Result<Way, ApiError>,
        mut request: Request<Body>,
    ) -> Response<Body> {
        let wish = upgrade::wish(&request);
        let mut client = match &wish {
            Wish::Malformed(status, message) => return malformed(*status, message),
            Wish::Plain => None,
            Wish::WebSocket(_) | Wish::Other(_) => Some(hyper::upgrade::on(&mut request)),
        };
        let forwarded = match found {
            Ok(way) => self.forward(sandboxes, way, &wish, &mut client, request).await,
            Err(error) => Err(error.into()),
        };
        let problem = match forwarded {
            Ok(response) => return response,
            Err(problem) => problem,
        };
        match (wish, client) {
            (Wish::WebSocket(handshake), Some(client)) => refuse(client, handshake, problem),
            _ => problem.into_response(),
        }
    }

    async fn forward<S: Sandboxes>(
        &self,
        sandboxes: &S,
        way: Way,
        wish: &Wish,
        client: &mut Option<OnUpgrade>,
        request: Request<Body>,
    ) -> Result<Response<Body>, Problem> {
        let Way { id, port, uri, prefix } = way;
        let target = if port == EXECD_PORT { Target::Execd } else { Target::Port(port) };
        let wants_trailers = headers::wants_trailers(request.headers());
        let is_head = request.method() == Method::HEAD;
        let request = self.prepare(request, uri, port, &prefix, wish)?;

        let (response, upstream) = match self.exchange(id, target, port, request).await {
            Ok(exchanged) => exchanged,
            Err(broken) => return Err(self.explain(sandboxes, id, port, broken).await.into()),
        };

        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            if client.is_none() {
                return Err(ApiError::BackendResponse("it switched protocols unasked".to_owned()).into());
            }
            return switch(response, upstream, client, wish, &prefix).map_err(Problem::from);
        }
        if matches!(wish, Wish::WebSocket(_)) {
            return Err(Problem::HandshakeRefused(response.status()));
        }
        if headers::framing(response.headers()) == Framing::Unknown {
            return Err(ApiError::BackendResponse("its transfer coding is not known here".to_owned()).into());
        }
        let (mut parts, incoming) = response.into_parts();
        parts.version = Version::HTTP_11;
        headers::prepare_response(&mut parts.headers, &prefix, wants_trailers);
        let body = self.relay(incoming, upstream, Key::new(id, target)).await;
        let body = if is_head && !parts.headers.contains_key(CONTENT_LENGTH) {
            // An empty body would show as a length of zero, which is not what GET would say.
            Body::from_stream(futures_util::stream::empty::<Result<bytes::Bytes, std::convert::Infallible>>())
        } else {
            body
        };
        Ok(Response::from_parts(parts, body))
    }

    /// Where a request goes: what its host names, or else its path; `None` if it is not for a sandbox.
    #[must_use]
    pub fn destination<'a>(&self, uri: &'a Uri, host: Option<&'a HeaderValue>) -> Option<Matched<'a>> {
        if let Some(suffix) = &self.options.endpoint_suffix
            && let Some(matched) = host.and_then(|host| path::matches_host(host.to_str().ok()?, suffix))
        {
            return Some(matched);
        }
        matches(uri.path())
    }

    /// Path under which the client sees the backend's root.
    fn prefix(&self, matched: &Matched<'_>) -> String {
        match &self.public_path {
            Some(public) if !matched.prefix.is_empty() => {
                let start = matched.prefix.find("/sandboxes/").unwrap_or(0);
                format!("{public}{}", &matched.prefix[start..])
            }
            _ => matched.prefix.to_owned(),
        }
    }

    fn prepare(
        &self,
        request: Request<Body>,
        uri: Uri,
        port: u16,
        prefix: &str,
        wish: &Wish,
    ) -> Result<Request<Body>, ApiError> {
        let (mut parts, body) = request.into_parts();
        if headers::framing(&parts.headers) == Framing::Unknown {
            return Err(ApiError::BadRequest("no transfer coding but 'chunked' is taken".to_owned()));
        }
        let peer = peer(&parts.extensions);
        let host = HeaderValue::try_from(format!("127.0.0.1:{port}"))
            .map_err(|error| ApiError::Internal(error.to_string()))?;
        let trusted =
            self.options.trust_local_peers && peer.is_some_and(|peer| peer.to_canonical().is_loopback());
        headers::prepare_request(&mut parts.headers, &Origin { peer, prefix, host, trusted });
        match wish {
            Wish::WebSocket(_) => upgrade::ask(&mut parts.headers, HeaderValue::from_static("websocket")),
            Wish::Other(protocol) => upgrade::ask(&mut parts.headers, protocol.clone()),
            Wish::Plain | Wish::Malformed(..) => {}
        }
        parts.uri = uri;
        parts.version = Version::HTTP_11;
        // What this server noted about the request is not for the connection to the backend.
        parts.extensions = Extensions::new();
        Ok(Request::from_parts(parts, body))
    }

    /// Sends the request over an idle connection, or over a new one if there is none or it ends before it takes the
    /// request. A request of which a backend may have seen anything is not repeated, but for [`spare`] ones.
    async fn exchange(
        &self,
        id: SandboxId,
        target: Target,
        port: u16,
        mut request: Request<Body>,
    ) -> Result<(Response<Incoming>, Upstream), Broken> {
        if let Some(mut upstream) = self.pool.take(Key::new(id, target)) {
            let spare = spare(&request, target);
            match upstream.exchange(request, self.options.answer).await {
                Ok(response) => return Ok((response, upstream)),
                Err(Failure::Unsent(returned)) => request = *returned,
                Err(failure @ Failure::Unanswered(_)) => request = spare.ok_or(failure)?,
                Err(failure) => return Err(failure.into()),
            }
        }
        let connecting = tokio::time::timeout(self.options.connect, self.runtime.connect(id, target));
        let connected = connecting.await.unwrap_or_else(|_elapsed| {
            let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
            Err(ConnectError::Io(error))
        });
        let stream = connected.map_err(|error| Broken::connect(target, port, &error))?;
        let mut upstream = Upstream::new(stream).await.map_err(Failure::Broken)?;
        let response = upstream.exchange(request, self.options.answer).await?;
        Ok((response, upstream))
    }

    /// Says what happened to a request: that the sandbox has ended, if that is why. A sandbox's connections break
    /// some moments before the server hears of its end.
    async fn explain<S: Sandboxes>(
        &self,
        sandboxes: &S,
        id: SandboxId,
        port: u16,
        broken: Broken,
    ) -> ApiError {
        let known = async {
            loop {
                let heard = self.endings.notified();
                if let Some(reason) = sandboxes.ended(id) {
                    return reason;
                }
                heard.await;
            }
        };
        let patience = if broken.perhaps_ended { END_PATIENCE } else { Duration::ZERO };
        match tokio::time::timeout(patience, known).await {
            Ok(reason) => ApiError::BackendConnection { port, reason },
            Err(_elapsed) => broken.error,
        }
    }

    /// Makes the client's body out of the backend's.
    async fn relay(&self, incoming: Incoming, upstream: Upstream, key: Key) -> Body {
        use http_body::Body as _;
        let mut relay = Relay::new(incoming, upstream, Arc::clone(&self.pool), key);
        if !relay.is_end_stream() {
            return Body::new(relay);
        }
        poll_fn(|cx| {
            relay.settle(cx);
            Poll::Ready(())
        })
        .await;
        Body::empty()
    }
}

/// A second copy of a request that may be sent again when an idle connection turns out to end with its daemon, which
/// init starts anew: one without a body whose repetition changes nothing (RFC 9110, 9.2.2). What answers at other
/// ports is unknown, and a request that kills it must not come twice.
fn spare(request: &Request<Body>, target: Target) -> Option<Request<Body>> {
    use http_body::Body as _;
    let may_repeat =
        target == Target::Execd && request.method().is_idempotent() && request.body().is_end_stream();
    may_repeat.then(|| {
        let mut copy = Request::new(Body::empty());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        copy
    })
}

fn peer(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip())
}

/// Hands the client's connection over to the backend's.
fn switch(
    response: Response<Incoming>,
    upstream: Upstream,
    client: &mut Option<OnUpgrade>,
    wish: &Wish,
    prefix: &str,
) -> Result<Response<Body>, ApiError> {
    let (mut parts, _empty) = response.into_parts();
    let protocol = parts.headers.get(UPGRADE).cloned();
    let (Some(protocol), Some((stream, early))) = (protocol, upstream.into_stream()) else {
        return Err(ApiError::BackendResponse("it switched protocols without naming one".to_owned()));
    };
    headers::prepare_response(&mut parts.headers, prefix, false);
    upgrade::ask(&mut parts.headers, protocol);
    parts.version = Version::HTTP_11;
    parts.extensions = Extensions::new();
    if let Some(client) = client.take() {
        upgrade::join(client, stream, early, matches!(wish, Wish::WebSocket(_)));
    }
    Ok(Response::from_parts(parts, Body::empty()))
}
