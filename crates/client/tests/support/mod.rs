//! A server whose answers the test decides.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub type Body = BoxBody<Bytes, std::io::Error>;

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    /// Path and query.
    pub target: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Seen {
    pub fn call(&self) -> String {
        format!("{} {}", self.method, self.target)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

/// A running server; stops when dropped.
pub struct Fake {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    connections: Arc<Mutex<usize>>,
    task: JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fake {
    /// Answers every request with what `answer` makes of it and of the number of requests before it.
    pub async fn start<F, R>(answer: F) -> Self
    where
        F: Fn(usize, Seen) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Response<Body>> + Send,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let connections = Arc::new(Mutex::new(0));
        let (log, count) = (seen.clone(), connections.clone());
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                *count.lock().unwrap() += 1;
                let (log, answer) = (log.clone(), answer.clone());
                tokio::spawn(async move {
                    let service = service_fn(move |request: Request<Incoming>| {
                        let (log, answer) = (log.clone(), answer.clone());
                        async move {
                            let request = read(request).await;
                            let number = {
                                let mut log = log.lock().unwrap();
                                log.push(request.clone());
                                log.len() - 1
                            };
                            Ok::<_, Infallible>(answer(number, request).await)
                        }
                    });
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self { address, seen, connections, task }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn calls(&self) -> Vec<String> {
        self.seen().iter().map(Seen::call).collect()
    }

    pub fn connections(&self) -> usize {
        *self.connections.lock().unwrap()
    }
}

async fn read(request: Request<Incoming>) -> Seen {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    Seen { method: head.method.to_string(), target: head.uri.to_string(), headers: head.headers, body }
}

/// An answer with this body.
pub fn reply(status: u16, body: impl Into<Bytes>) -> Response<Body> {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed();
    Response::builder().status(status).body(body).unwrap()
}

/// A JSON answer.
pub fn json(status: u16, body: serde_json::Value) -> Response<Body> {
    reply(status, body.to_string())
}

/// An answer whose body comes in these pieces and then ends, or breaks.
pub fn pieces(pieces: Vec<Bytes>, breaks: bool) -> Response<Body> {
    let frames = futures_util::stream::iter(pieces.into_iter().map(|piece| Ok(Frame::data(piece))));
    // What was written before has to leave before the break.
    let end = futures_util::stream::once(async {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        Err(std::io::Error::other("cut"))
    });
    let end = if breaks { end.left_stream() } else { futures_util::stream::empty().right_stream() };
    Response::new(BodyExt::boxed(StreamBody::new(frames.chain(end))))
}

/// An answer whose body begins with these pieces and never ends.
#[allow(dead_code, reason = "not every test program has one")]
pub fn endless(pieces: Vec<Bytes>) -> Response<Body> {
    let frames = futures_util::stream::iter(pieces.into_iter().map(|piece| Ok(Frame::data(piece))));
    Response::new(BodyExt::boxed(StreamBody::new(frames.chain(futures_util::stream::pending()))))
}

/// Endpoint answer for the daemon behind this fake's own proxy path.
pub fn endpoint(seen: &Seen) -> Response<Body> {
    let host = seen.header("host").unwrap();
    json(
        200,
        serde_json::json!({
            "endpoint": format!("{host}/v1/sandboxes/s1/proxy/44772"),
            "headers": {"OpenSandbox-Secure-Access": "token"},
        }),
    )
}
