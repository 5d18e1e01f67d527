//! A daemon on loopback and a client to it.

#![allow(dead_code, missing_docs, unreachable_pub)] // Each test program uses a part.
#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests are tests.

pub mod files;

use std::net::SocketAddr;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use osb_execd::app::{App, Shared};
use osb_execd::serve;

pub struct Daemon {
    pub address: SocketAddr,
    client: Client<HttpConnector, Body>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.text()))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self
    }

    /// Checks status and code of an error and returns its message.
    #[track_caller]
    pub fn refused(&self, status: u16, code: &str) -> String {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        assert_eq!(self.json()["code"], code, "{}", self.text());
        let message = self.json()["message"].as_str().unwrap().to_owned();
        assert!(!message.is_empty());
        message
    }
}

impl Daemon {
    pub async fn start(shared: Shared) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = serve::router(App::new(shared));
        let server = tokio::spawn(async move {
            let service = router.into_make_service_with_connect_info::<SocketAddr>();
            axum::serve(listener, service).await.unwrap();
        });
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { address, client, server }
    }

    pub async fn open(
        &self,
        request: http::request::Builder,
        body: impl Into<Body>,
    ) -> http::Response<hyper::body::Incoming> {
        self.client.request(request.body(body.into()).unwrap()).await.unwrap()
    }

    pub fn request(&self, method: Method, path: &str) -> http::request::Builder {
        Request::builder().method(method).uri(format!("http://{}{path}", self.address))
    }

    pub async fn send(&self, request: http::request::Builder, body: impl Into<Body>) -> Answer {
        let (head, body) = self.open(request, body).await.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: head.status, headers: head.headers, body }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path), Body::empty()).await
    }

    pub async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut request = self.request(Method::GET, path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request, Body::empty()).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path), Body::empty()).await
    }

    pub async fn post(&self, path: &str, json: serde_json::Value) -> Answer {
        self.send(self.request(Method::POST, path), json.to_string()).await
    }
}

/// Percent-encodes everything but letters and digits.
pub fn encode(text: impl AsRef<std::ffi::OsStr>) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    let bytes = text.as_ref().as_bytes();
    bytes
        .iter()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() { char::from(*byte).to_string() } else { format!("%{byte:02X}") }
        })
        .collect()
}
