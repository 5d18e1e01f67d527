//! `/proxy/{port}/…`: requests to programs inside the sandbox.
//!
//! The path after the port and the query go out byte for byte, bodies stream both ways, and an upgraded connection
//! is passed on as raw bytes. There is no limit on the time of an exchange.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use http::header::{self, HeaderName};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version};
use http_body::Body as _;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use osb_protocol::error::code;
use osb_protocol::execd::ACCESS_TOKEN_HEADER;
use tokio::net::TcpStream;

use crate::app::App;
use crate::http::ApiError;

/// A program that does not take the connection at once on loopback has a full queue; it gets this long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle connections are closed before the usual programs close them, so that no request meets a closed one.
const IDLE: Duration = Duration::from_secs(3);
/// Idle connections to one port.
const MAX_IDLE: usize = 16;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Headers for one hop only, beside those that `Connection` names.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers with keys to the platform, which are none of the program's business.
const SECRETS: [HeaderName; 2] =
    [HeaderName::from_static(ACCESS_TOKEN_HEADER), HeaderName::from_static("open-sandbox-api-key")];

/// The module's routes.
pub fn router() -> axum::Router<App> {
    let proxy = Proxy::new();
    let serve = move |State(_): State<App>, request: Request| {
        let proxy = proxy.clone();
        async move { proxy.forward(request).await }
    };
    axum::Router::new()
        .route("/proxy", any(serve.clone()))
        .route("/proxy/", any(serve.clone()))
        .route("/proxy/{*rest}", any(serve))
}

#[derive(Debug, Clone)]
struct Proxy {
    client: Client<Loopback, Body>,
}

impl Proxy {
    fn new() -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(MAX_IDLE)
            .build(Loopback);
        Self { client }
    }

    async fn forward(&self, mut request: Request) -> Result<Response, ApiError> {
        let (port, path) = target(request.uri())?;
        let upgrade = wanted_upgrade(request.method(), request.headers());
        let client_side = upgrade.as_ref().map(|_| hyper::upgrade::on(&mut request));
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0.ip());
        let (mut head, body) = request.into_parts();
        head.uri = Uri::builder()
            .scheme("http")
            .authority(format!("127.0.0.1:{port}"))
            .path_and_query(path)
            .build()
            .map_err(|error| ApiError::invalid(format!("the path cannot be forwarded: {error}")))?;
        head.version = Version::HTTP_11;
        head.extensions.clear();
        clean_request(&mut head.headers, peer);
        if body.size_hint().exact().is_none() {
            // Without this the client leaves out the body of a GET, whose length it does not know.
            head.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        if let Some(protocol) = &upgrade {
            ask_upgrade(&mut head.headers, protocol.clone());
        }
        let answer = self.client.request(Request::from_parts(head, body)).await.map_err(|error| {
            let (code, what) = if error.is_connect() {
                (code::BACKEND_CONNECTION_FAILED, "nothing in the sandbox takes connections there")
            } else {
                (code::BACKEND_RESPONSE_FAILED, "the program there broke off before its answer was complete")
            };
            bad_gateway(
                code,
                format!("port {port}: {what}; start the program or look at its output ({})", Chain(&error)),
            )
        })?;
        let (mut head, body) = answer.into_parts();
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            let (Some(client_side), Some(wanted)) = (client_side, upgrade) else {
                return Err(unexpected_switch(port));
            };
            let given = head.headers.get(header::UPGRADE).cloned();
            let Some(protocol) =
                given.filter(|given| given.as_bytes().eq_ignore_ascii_case(wanted.as_bytes()))
            else {
                return Err(unexpected_switch(port));
            };
            let backend_side = hyper::upgrade::on(http::Response::from_parts(head.clone(), body));
            tokio::spawn(splice(client_side, backend_side));
            strip_hop_by_hop(&mut head.headers);
            ask_upgrade(&mut head.headers, protocol);
            let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
            *response.headers_mut() = head.headers;
            return Ok(response);
        }
        strip_hop_by_hop(&mut head.headers);
        head.version = Version::HTTP_11;
        Ok(Response::from_parts(head, Body::new(body)))
    }
}

fn bad_gateway(code: &'static str, message: String) -> ApiError {
    ApiError::new(StatusCode::BAD_GATEWAY, code, message)
}

fn unexpected_switch(port: u16) -> ApiError {
    bad_gateway(
        code::BACKEND_RESPONSE_FAILED,
        format!("port {port}: the program there switched to a protocol that was not asked for"),
    )
}

/// An error with its causes: the outer one alone says only that there is an inner one.
struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

/// Port, and what follows it as it was sent.
fn target(uri: &Uri) -> Result<(u16, PathAndQuery), ApiError> {
    let sent = uri.path_and_query().map_or("", PathAndQuery::as_str);
    let rest = sent.strip_prefix("/proxy").and_then(|rest| rest.strip_prefix('/')).unwrap_or_default();
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (port, tail) = rest.split_at(end);
    if port.is_empty() {
        return Err(ApiError::invalid("port is required: /proxy/PORT/PATH"));
    }
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let number = port.parse().ok().filter(|number| digits && *number > 0);
    let number = number.ok_or_else(|| ApiError::invalid("the port must be a number from 1 to 65535"))?;
    let path = if tail.starts_with('/') { tail.to_owned() } else { format!("/{tail}") };
    let path = PathAndQuery::try_from(path)
        .map_err(|error| ApiError::invalid(format!("the path cannot be forwarded: {error}")))?;
    Ok((number, path))
}

/// The protocol that the client asks to switch to. A WebSocket is asked for with GET only.
fn wanted_upgrade(method: &Method, headers: &HeaderMap) -> Option<HeaderValue> {
    if !connection_tokens(headers).any(|token| token.eq_ignore_ascii_case("upgrade")) {
        return None;
    }
    let protocol = headers.get(header::UPGRADE)?;
    let is_websocket = protocol.as_bytes().eq_ignore_ascii_case(b"websocket");
    (!is_websocket || method == Method::GET).then(|| protocol.clone())
}

fn connection_tokens(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> =
        connection_tokens(headers).filter_map(|token| HeaderName::try_from(token).ok()).collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn clean_request(headers: &mut HeaderMap, peer: Option<IpAddr>) {
    strip_hop_by_hop(headers);
    for name in &SECRETS {
        headers.remove(name);
    }
    // The daemon's own HTTP server has answered the expectation by reading the body.
    headers.remove(header::EXPECT);
    headers.remove(X_FORWARDED_HOST);
    let first = |value: &HeaderValue| {
        let first = value.to_str().ok()?.split(',').next()?.trim();
        HeaderValue::try_from(first).ok().filter(|value| !value.is_empty())
    };
    let client = headers
        .get(X_FORWARDED_FOR)
        .and_then(first)
        .or_else(|| headers.get(X_REAL_IP).and_then(first))
        .or_else(|| HeaderValue::try_from(peer?.to_canonical().to_string()).ok());
    headers.remove(X_FORWARDED_FOR);
    if let Some(client) = client {
        headers.insert(X_FORWARDED_FOR, client);
    }
    headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
}

fn ask_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Passes bytes both ways until both sides have ended.
async fn splice(client_side: hyper::upgrade::OnUpgrade, backend_side: hyper::upgrade::OnUpgrade) {
    /// Per direction.
    const BUFFER: usize = 64 << 10;
    let (client_side, backend_side) = match tokio::try_join!(client_side, backend_side) {
        Ok(sides) => sides,
        Err(error) => {
            tracing::debug!(error = %error, "an upgrade was not completed");
            return;
        }
    };
    let (mut client_side, mut backend_side) = (TokioIo::new(client_side), TokioIo::new(backend_side));
    // Either side may break off at any time; that is how most of these connections end.
    if let Err(error) =
        tokio::io::copy_bidirectional_with_sizes(&mut client_side, &mut backend_side, BUFFER, BUFFER).await
    {
        tracing::debug!(error = %error, "an upgraded connection broke off");
    }
}

/// Connects to the URI's port on loopback: 127.0.0.1, then ::1, where some programs listen alone.
#[derive(Debug, Clone, Copy)]
struct Loopback;

impl tower::Service<Uri> for Loopback {
    type Response = LoopbackStream;
    type Error = std::io::Error;
    type Future = futures_util::future::BoxFuture<'static, std::io::Result<LoopbackStream>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(async move {
            let port = uri.port_u16().ok_or(std::io::ErrorKind::InvalidInput)?;
            let stream = match connect(Ipv4Addr::LOCALHOST.into(), port).await {
                Ok(stream) => stream,
                // What IPv4 says is what most people can make sense of.
                Err(error) => connect(Ipv6Addr::LOCALHOST.into(), port).await.map_err(|_| error)?,
            };
            stream.set_nodelay(true)?;
            Ok(LoopbackStream(TokioIo::new(stream)))
        })
    }
}

async fn connect(address: IpAddr, port: u16) -> std::io::Result<TcpStream> {
    tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect((address, port)))
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// A connection that the client's pool may hold.
struct LoopbackStream(TokioIo<TcpStream>);

impl Connection for LoopbackStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl hyper::rt::Read for LoopbackStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: hyper::rt::ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl hyper::rt::Write for LoopbackStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, slices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_keep_every_byte() {
        for (uri, port, path) in [
            ("/proxy/8000", 8000, "/"),
            ("/proxy/8000/", 8000, "/"),
            ("/proxy/8000?a=1", 8000, "/?a=1"),
            ("/proxy/8000/?", 8000, "/?"),
            ("/proxy/8000/a%2Fb//c/../d?x=%ff&y=a+b&&", 8000, "/a%2Fb//c/../d?x=%ff&y=a+b&&"),
            ("/proxy/1//x", 1, "//x"),
            ("http://host/proxy/80/x", 80, "/x"),
            ("/proxy/80/proxy/81/x", 80, "/proxy/81/x"),
        ] {
            let (found, tail) = target(&uri.parse().unwrap()).unwrap();
            assert_eq!((found, tail.as_str()), (port, path), "{uri}");
        }
        for uri in [
            "/proxy",
            "/proxy/",
            "/proxy//x",
            "/proxy/0/",
            "/proxy/65536/",
            "/proxy/+80/",
            "/proxy/x/",
            "/proxy/%38/",
        ] {
            assert_eq!(
                target(&uri.parse().unwrap()).err().map(|error| error.status.as_u16()),
                Some(400),
                "{uri}"
            );
        }
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn headers_of_one_hop_and_secrets_stay_behind() {
        let mut map = headers(&[
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("trailer", "T"),
            ("te", "trailers"),
            ("keep-alive", "1"),
            ("upgrade", "h2c"),
            ("x-execd-access-token", "t"),
            ("open-sandbox-api-key", "k"),
            ("x-forwarded-host", "h"),
            ("x-forwarded-for", "1.1.1.1, 2.2.2.2"),
            ("host", "app.example"),
            ("x-kept", "yes"),
        ]);
        clean_request(&mut map, None);
        let mut names: Vec<_> = map.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["host", "x-forwarded-for", "x-forwarded-proto", "x-kept"]);
        assert_eq!(map["x-forwarded-for"], "1.1.1.1");
    }

    #[test]
    fn the_client_is_named_by_the_best_source() {
        let check = |pairs: &[(&'static str, &'static str)], peer: Option<IpAddr>| {
            let mut map = headers(pairs);
            clean_request(&mut map, peer);
            map.get(X_FORWARDED_FOR).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let peer = Some("::ffff:10.0.0.9".parse().unwrap());
        assert_eq!(check(&[("x-real-ip", "3.3.3.3")], peer).as_deref(), Some("3.3.3.3"));
        assert_eq!(check(&[], peer).as_deref(), Some("10.0.0.9"));
        assert_eq!(check(&[("x-forwarded-for", "")], None), None);
    }

    #[test]
    fn upgrades_are_recognised_whatever_the_case() {
        let asked = headers(&[("connection", "keep-alive, UPGRADE"), ("upgrade", "WebSocket")]);
        assert!(wanted_upgrade(&Method::GET, &asked).is_some());
        assert!(wanted_upgrade(&Method::POST, &asked).is_none());
        assert!(wanted_upgrade(&Method::GET, &headers(&[("upgrade", "websocket")])).is_none());
        let other = headers(&[("connection", "upgrade"), ("upgrade", "tcp")]);
        assert!(wanted_upgrade(&Method::POST, &other).is_some());
    }
}
