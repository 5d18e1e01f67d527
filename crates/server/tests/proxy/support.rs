//! A server with the proxy, a runtime that hands out connections to backends of the test, and plain-text clients.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use axum::Router;
use axum::extract::Request;
use axum::response::IntoResponse;
use http::{HeaderMap, StatusCode};
use osb_protocol::ids::SandboxId;
use osb_runtime::{
    Adopted, ConnectError, CreateError, Created, Fetch, Handle, Image, ImageSource, Runtime, RuntimeError,
    RuntimeEvent, SandboxSpec, Stream, Target,
};
use osb_server::error::ApiError;
use osb_server::proxy::{Options, Proxy, Sandboxes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::mpsc;

/// What answers a connection to a target.
#[derive(Clone)]
pub(crate) enum Backend {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// Never connects.
    Silent,
    Gone,
}

#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) targets: Mutex<HashMap<(SandboxId, Option<u16>), Backend>>,
    pub(crate) connects: AtomicUsize,
    pub(crate) admitted: AtomicUsize,
    pub(crate) ended: Mutex<Option<String>>,
    pub(crate) token: Mutex<Option<String>>,
}

impl Fake {
    pub(crate) fn connects(&self) -> usize {
        self.connects.load(Ordering::SeqCst)
    }
}

fn unused() -> RuntimeError {
    RuntimeError::Failed("only connects".to_owned())
}

#[async_trait]
impl Runtime for Fake {
    fn room(&self) -> Result<(), CreateError> {
        Ok(())
    }

    async fn find_image(&self, _source: &ImageSource) -> Result<Option<Image>, CreateError> {
        Ok(None)
    }
    fn fetch_image(&self, _source: ImageSource) -> Fetch {
        unreachable!("nothing is created")
    }
    async fn create(&self, _spec: SandboxSpec, _image: Image) -> Result<Created, CreateError> {
        Err(CreateError::Failed("only connects".to_owned()))
    }
    async fn adopt(
        &self,
        _known: Vec<(SandboxId, Handle)>,
    ) -> Result<Vec<(SandboxId, Adopted)>, RuntimeError> {
        Err(unused())
    }
    async fn delete(&self, _id: SandboxId) -> Result<(), RuntimeError> {
        Ok(())
    }
    async fn settled(&self) {}
    fn events(&self) -> Option<mpsc::UnboundedReceiver<RuntimeEvent>> {
        None
    }
    async fn connect(&self, id: SandboxId, target: Target) -> Result<Stream, ConnectError> {
        self.connects.fetch_add(1, Ordering::SeqCst);
        let port = match target {
            Target::Execd => None,
            Target::Port(port) => Some(port),
        };
        let backend = self.targets.lock().unwrap().get(&(id, port)).cloned();
        match backend {
            Some(Backend::Tcp(address)) => Ok(Stream::Tcp(TcpStream::connect(address).await?)),
            Some(Backend::Unix(path)) => Ok(Stream::Unix(UnixStream::connect(path).await?)),
            Some(Backend::Silent) => std::future::pending().await,
            Some(Backend::Gone) => Err(ConnectError::NotRunning),
            None => Err(ConnectError::Io(std::io::ErrorKind::ConnectionRefused.into())),
        }
    }
    async fn entrypoint_log(&self, _id: SandboxId, _max_bytes: usize) -> Result<Vec<u8>, RuntimeError> {
        Err(unused())
    }
    async fn shutdown(&self) {}
}

/// The sandboxes of a test: those with a target.
#[derive(Clone)]
pub(crate) struct Known(pub(crate) Arc<Fake>);

impl Sandboxes for Known {
    fn admit(&self, id: &str, headers: &HeaderMap) -> Result<SandboxId, ApiError> {
        let id: SandboxId = id.parse().map_err(|_| ApiError::SandboxNotFound)?;
        if !self.0.targets.lock().unwrap().keys().any(|(known, _)| *known == id) {
            return Err(ApiError::SandboxNotFound);
        }
        if let Some(token) = &*self.0.token.lock().unwrap()
            && headers.get("opensandbox-secure-access").is_none_or(|sent| sent != token)
        {
            return Err(ApiError::MissingSecureAccess);
        }
        self.0.admitted.fetch_add(1, Ordering::SeqCst);
        Ok(id)
    }

    fn ended(&self, _id: SandboxId) -> Option<String> {
        self.0.ended.lock().unwrap().clone()
    }
}

/// A running server.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) id: SandboxId,
    pub(crate) fake: Arc<Fake>,
    pub(crate) proxy: Arc<Proxy>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::with(Options::default()).await
    }

    pub(crate) async fn with(options: Options) -> Self {
        let fake = Arc::new(Fake::default());
        let proxy = Arc::new(Proxy::new(fake.clone(), options));
        let id = SandboxId::random();
        fake.targets.lock().unwrap().insert((id, Some(1)), Backend::Gone);
        let (app_proxy, known) = (proxy.clone(), Known(fake.clone()));
        let app = Router::new().fallback(move |request: Request| {
            let (proxy, known) = (app_proxy.clone(), known.clone());
            async move {
                let answered = proxy.call(&known, request).await;
                Ok::<_, Infallible>(
                    answered
                        .unwrap_or_else(|_| (StatusCode::IM_A_TEAPOT, "not for the proxy").into_response()),
                )
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = app.into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, service).await });
        Self { address, id, fake, proxy }
    }

    /// `/v1/sandboxes/{id}/proxy/{port}`.
    pub(crate) fn base(&self, port: u16) -> String {
        format!("/v1/sandboxes/{}/proxy/{port}", self.id)
    }

    pub(crate) fn place(&self, port: u16, backend: Backend) {
        let port = if port == 44772 { None } else { Some(port) };
        self.fake.targets.lock().unwrap().insert((self.id, port), backend);
    }

    /// Puts a backend behind a port: `serve` is run for each of its connections.
    pub(crate) async fn backend<F, Fut>(&self, port: u16, serve: F)
    where
        F: Fn(TcpStream) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.place(port, Backend::Tcp(listener.local_addr().unwrap()));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        });
    }

    /// Puts a backend behind a port that answers each connection's first request with these bytes and closes.
    pub(crate) async fn scripted(&self, port: u16, answer: impl Into<Vec<u8>>) {
        let answer = Arc::new(answer.into());
        self.backend(port, move |mut stream| {
            let answer = answer.clone();
            async move {
                read_request(&mut stream, &mut Vec::new()).await;
                let _ = stream.write_all(&answer).await;
            }
        })
        .await;
    }

    /// Puts a backend behind a port that answers every request with the request's own bytes.
    pub(crate) async fn reflecting(&self, port: u16) {
        self.backend(port, reflect).await;
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends bytes and reads the answer until the server closes.
    pub(crate) async fn raw(&self, request: impl AsRef<[u8]>) -> Answer {
        let mut stream = self.connect().await;
        // The server may refuse before it has read all.
        let _ = stream.write_all(request.as_ref()).await;
        Answer::read(&mut stream).await
    }

    /// A request without a body; `path` comes behind the prefix of `port`.
    pub(crate) async fn get(&self, port: u16, path: &str) -> Answer {
        self.send("GET", port, path, "", "").await
    }

    /// `headers` are lines that each end in CR LF.
    pub(crate) async fn send(
        &self,
        method: &str,
        port: u16,
        path: &str,
        headers: &str,
        body: &str,
    ) -> Answer {
        let target = format!("{}{path}", self.base(port));
        self.raw(format!(
            "{method} {target} HTTP/1.1\r\nHost: front:81\r\nConnection: close\r\n{headers}\r\n{body}"
        ))
        .await
    }
}

/// Answers every request with the request's own bytes.
pub(crate) async fn reflect(mut stream: TcpStream) {
    let mut buffer = Vec::new();
    while let Some(request) = read_request(&mut stream, &mut buffer).await {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", request.len());
        if stream.write_all(head.as_bytes()).await.is_err() || stream.write_all(&request).await.is_err() {
            return;
        }
    }
}

/// Head and body of one request, as they came.
pub(crate) async fn read_request<S: AsyncRead + Unpin>(
    stream: &mut S,
    buffer: &mut Vec<u8>,
) -> Option<Vec<u8>> {
    let head_end = loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&buffer[..head_end]).to_lowercase();
    let end = if head.contains("transfer-encoding: chunked") {
        loop {
            if let Some(at) = buffer[head_end - 2..].windows(7).position(|window| window == b"\r\n0\r\n\r\n")
            {
                break head_end - 2 + at + 7;
            }
            if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
                return None;
            }
        }
    } else {
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        let end = head_end + length.unwrap_or(0_usize);
        while buffer.len() < end {
            if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
                return None;
            }
        }
        end
    };
    Some(buffer.drain(..end).collect())
}

/// What a client got until the server closed.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    /// As it came, in chunks if it came in chunks.
    pub(crate) raw_body: Vec<u8>,
}

impl Answer {
    pub(crate) async fn read<S: AsyncRead + Unpin>(stream: &mut S) -> Self {
        let mut all = Vec::new();
        // A reset after the answer is an end too.
        let reading = async { while stream.read_buf(&mut all).await.unwrap_or(0) > 0 {} };
        tokio::time::timeout(Duration::from_secs(20), reading)
            .await
            .expect("the server keeps the connection open");
        Self::parse(&all)
    }

    pub(crate) fn parse(all: &[u8]) -> Self {
        let end = all.windows(4).position(|window| window == b"\r\n\r\n");
        let end = end.unwrap_or_else(|| panic!("no head: {:?}", String::from_utf8_lossy(all)));
        let head = std::str::from_utf8(&all[..end]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines
            .map(|line| line.split_once(": ").map(|(n, v)| (n.to_owned(), v.to_owned())).unwrap())
            .collect();
        Self { status, headers, raw_body: all[end + 4..].to_vec() }
    }

    pub(crate) fn all(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, v)| v.as_str()).collect()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.all(name).first().copied()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.raw_body).into_owned()
    }

    /// `code` of an error body; its form is checked as well.
    #[track_caller]
    pub(crate) fn code(&self) -> String {
        let json: serde_json::Value = serde_json::from_slice(&self.raw_body).unwrap();
        assert!(!json["message"].as_str().unwrap().is_empty());
        assert_eq!(self.header("content-type"), Some("application/json"));
        json["code"].as_str().unwrap().to_owned()
    }
}

/// Waits until something holds; the deadline is generous because the machine may be busy.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(15);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Counts living holders.
#[derive(Clone, Default)]
pub(crate) struct Living(Arc<AtomicUsize>);

pub(crate) struct Life(Arc<AtomicUsize>);

impl Living {
    pub(crate) fn enter(&self) -> Life {
        self.0.fetch_add(1, Ordering::SeqCst);
        Life(self.0.clone())
    }
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
