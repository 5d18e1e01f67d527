//! A registry that does as it is told, and remembers what it was asked.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::images::{Image, OCI_MANIFEST, digest};

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
    /// How many came before it for the same path.
    pub(crate) earlier: usize,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// First byte asked for.
    pub(crate) fn range(&self) -> Option<usize> {
        Some(self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().unwrap())
    }
}

type Hook = Box<dyn Fn(&Seen) -> Option<Response> + Send + Sync>;

struct Registry {
    manifests: HashMap<String, (String, Vec<u8>)>,
    blobs: HashMap<String, Vec<u8>>,
    hook: Hook,
    seen: Mutex<Vec<Seen>>,
}

/// Contents to serve and the hook that may answer first.
#[derive(Default)]
pub(crate) struct Contents {
    manifests: HashMap<String, (String, Vec<u8>)>,
    blobs: HashMap<String, Vec<u8>>,
}

impl Contents {
    /// `image` under the tag `it`.
    pub(crate) fn of(image: &Image) -> Self {
        Self::default().blobs(image).manifest("it", OCI_MANIFEST, &image.manifest_bytes())
    }

    pub(crate) fn blobs(mut self, image: &Image) -> Self {
        self.blobs.extend(image.blobs.clone());
        self.manifest(&digest(&image.manifest_bytes()), OCI_MANIFEST, &image.manifest_bytes())
    }

    pub(crate) fn blob(mut self, digest: &str, bytes: &[u8]) -> Self {
        self.blobs.insert(digest.into(), bytes.into());
        self
    }

    pub(crate) fn manifest(mut self, name: &str, media_type: &str, bytes: &[u8]) -> Self {
        self.manifests.insert(name.into(), (media_type.into(), bytes.into()));
        self
    }

    pub(crate) async fn serve(
        self,
        hook: impl Fn(&Seen) -> Option<Response> + Send + Sync + 'static,
    ) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (registry, app) = self.app(Box::new(hook));
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Fake { address, registry, task: task.abort_handle() }
    }

    pub(crate) async fn serve_tls(
        self,
        config: rustls::ServerConfig,
        hook: impl Fn(&Seen) -> Option<Response> + Send + Sync + 'static,
    ) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (registry, app) = self.app(Box::new(hook));
        let listener = TlsListener { listener, acceptor: TlsAcceptor::from(Arc::new(config)) };
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Fake { address, registry, task: task.abort_handle() }
    }

    fn app(self, hook: Hook) -> (Arc<Registry>, Router) {
        let registry = Arc::new(Registry {
            manifests: self.manifests,
            blobs: self.blobs,
            hook,
            seen: Mutex::new(Vec::new()),
        });
        (Arc::clone(&registry), Router::new().fallback(answer).with_state(registry))
    }
}

struct TlsListener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let Ok((stream, address)) = self.listener.accept().await else { continue };
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A running fake; it ends with its value.
pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    registry: Arc<Registry>,
    task: tokio::task::AbortHandle,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fake {
    pub(crate) fn host(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn image(&self) -> String {
        format!("{}/team/image:it", self.address)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.registry.seen.lock().unwrap().clone()
    }

    /// Requests whose path ends so.
    pub(crate) fn seen_of(&self, end: &str) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.path.ends_with(end)).collect()
    }
}

async fn answer(State(registry): State<Arc<Registry>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let seen = {
        let mut all = registry.seen.lock().unwrap();
        let path = parts.uri.path().to_owned();
        let seen = Seen {
            earlier: all.iter().filter(|seen| seen.path == path).count(),
            method: parts.method,
            path,
            query: parts.uri.query().unwrap_or_default().into(),
            headers: parts.headers,
            body: String::from_utf8(body.into()).unwrap(),
        };
        all.push(seen.clone());
        seen
    };
    if let Some(response) = (registry.hook)(&seen) {
        return response;
    }
    let name = seen.path.rsplit('/').next().unwrap();
    if seen.path.contains("/manifests/")
        && let Some((media_type, bytes)) = registry.manifests.get(name)
    {
        return ([("content-type", media_type.clone())], bytes.clone()).into_response();
    }
    if seen.path.contains("/blobs/")
        && let Some(bytes) = registry.blobs.get(name)
    {
        return blob(bytes, seen.range());
    }
    refusal(404, "MANIFEST_UNKNOWN", "manifest unknown")
}

/// A blob, or the rest of it.
pub(crate) fn blob(bytes: &[u8], from: Option<usize>) -> Response {
    match from {
        None => bytes.to_vec().into_response(),
        Some(from) if from >= bytes.len() => StatusCode::RANGE_NOT_SATISFIABLE.into_response(),
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
            let rest = bytes[from..].to_vec();
            (StatusCode::PARTIAL_CONTENT, [("content-range", range)], rest).into_response()
        }
    }
}

/// The same, but the connection breaks after `count` bytes.
pub(crate) fn breaking(bytes: &[u8], from: Option<usize>, count: usize) -> Response {
    let broken = stream::once(async {
        // What was sent before is on its way by then.
        tokio::time::sleep(Duration::from_millis(50)).await;
        Err(std::io::Error::other("broken on purpose"))
    });
    part(bytes, from, count, broken.boxed())
}

/// The same, but nothing comes after `count` bytes.
pub(crate) fn stalling(bytes: &[u8], from: Option<usize>, count: usize) -> Response {
    part(bytes, from, count, stream::pending().boxed())
}

fn part(
    bytes: &[u8],
    from: Option<usize>,
    count: usize,
    end: stream::BoxStream<'static, std::io::Result<Bytes>>,
) -> Response {
    let whole = blob(bytes, from);
    let start = from.unwrap_or(0);
    let some = Bytes::copy_from_slice(&bytes[start..start + count]);
    let (mut head, _) = whole.into_parts();
    head.headers.insert("content-length", (bytes.len() - start).into());
    Response::from_parts(head, Body::from_stream(stream::iter([Ok(some)]).chain(end)))
}

/// An error in the form of the distribution protocol.
pub(crate) fn refusal(status: u16, code: &str, message: &str) -> Response {
    let body = serde_json::json!({"errors": [{"code": code, "message": message}]}).to_string();
    (StatusCode::from_u16(status).unwrap(), [("content-type", "application/json")], body).into_response()
}

pub(crate) fn redirect(to: &str) -> Response {
    (StatusCode::TEMPORARY_REDIRECT, [("location", to)]).into_response()
}

pub(crate) fn challenge(header: &str) -> Response {
    (StatusCode::UNAUTHORIZED, [("www-authenticate", header)]).into_response()
}
