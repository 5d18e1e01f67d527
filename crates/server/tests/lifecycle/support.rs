//! A server without a network and a runtime without sandboxes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use http::{HeaderMap, Method, Request, StatusCode, header};
use osb_protocol::ids::SandboxId;
use osb_runtime::{
    Adopted, ConnectError, CreateError, Created, Ended, Fetch, FetchError, FetchProgress, Handle, Image,
    ImageSource, Runtime, RuntimeError, RuntimeEvent, SandboxSpec, Stream, Target,
};
use osb_server::config::{Config, Env};
use osb_server::state::AppState;
use osb_server::store::Store;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc, watch};
use tower::ServiceExt;

/// Pretends to run sandboxes. The image's name says what happens.
pub(crate) struct Fake {
    pub(crate) live: Mutex<BTreeSet<SandboxId>>,
    pub(crate) specs: Mutex<Vec<SandboxSpec>>,
    /// What was looked for.
    pub(crate) sources: Mutex<Vec<ImageSource>>,
    /// Images whose names begin with `remote` are fetched; each fetch waits for a permit.
    pub(crate) arrivals: Arc<Semaphore>,
    pub(crate) progress: watch::Sender<FetchProgress>,
    /// How fetches end that are not given up.
    pub(crate) fetch_error: Mutex<Option<FetchError>>,
    pub(crate) fetches: AtomicUsize,
    /// There is no room for another sandbox.
    pub(crate) full: AtomicBool,
    /// Fetches that were dropped before they ended.
    pub(crate) given_up: Arc<AtomicUsize>,
    pub(crate) adopted: Mutex<Vec<(SandboxId, Handle)>>,
    /// Sandboxes that `adopt` finds ended.
    pub(crate) lost: Mutex<BTreeSet<SandboxId>>,
    pub(crate) deleted: AtomicUsize,
    pub(crate) fail_delete: AtomicBool,
    /// Creates of the image `slow` wait for a permit.
    pub(crate) gate: Semaphore,
    /// How many came to the gate.
    pub(crate) at_gate: AtomicUsize,
    events: mpsc::UnboundedSender<RuntimeEvent>,
    receiver: Mutex<Option<mpsc::UnboundedReceiver<RuntimeEvent>>>,
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        let (events, receiver) = mpsc::unbounded_channel();
        Arc::new(Self {
            live: Mutex::default(),
            specs: Mutex::default(),
            sources: Mutex::default(),
            arrivals: Arc::new(Semaphore::new(0)),
            progress: watch::channel(FetchProgress::default()).0,
            fetch_error: Mutex::default(),
            fetches: AtomicUsize::new(0),
            full: AtomicBool::new(false),
            given_up: Arc::default(),
            adopted: Mutex::default(),
            lost: Mutex::default(),
            deleted: AtomicUsize::new(0),
            fail_delete: AtomicBool::new(false),
            gate: Semaphore::new(0),
            at_gate: AtomicUsize::new(0),
            events,
            receiver: Mutex::new(Some(receiver)),
        })
    }

    pub(crate) fn end(&self, id: SandboxId, code: i32) {
        self.events.send(RuntimeEvent::Ended { id, ended: ended(code) }).unwrap();
    }

    pub(crate) fn live(&self) -> usize {
        self.live.lock().unwrap().len()
    }
}

pub(crate) fn ended(code: i32) -> Ended {
    Ended {
        failed: code != 0,
        reason: if code == 0 { "CONTAINER_EXITED" } else { "CONTAINER_EXITED_ERROR" }.to_owned(),
        message: format!("The entrypoint ended with exit code {code}."),
        exit_code: Some(code),
    }
}

#[async_trait]
impl Runtime for Fake {
    async fn find_image(&self, source: &ImageSource) -> Result<Option<Image>, CreateError> {
        self.sources.lock().unwrap().push(source.clone());
        match source.name.as_str() {
            "absent" => {
                Err(CreateError::ImageNotFound { reference: source.name.clone(), hint: String::new() })
            }
            name if name.starts_with("remote") => Ok(None),
            name => Ok(Some(Image::new(Arc::new(name.to_owned())))),
        }
    }

    fn room(&self) -> Result<(), CreateError> {
        match self.full.load(Ordering::SeqCst) {
            true => Err(CreateError::Exhausted {
                what: "2 sandboxes are the most".to_owned(),
                retry_after: Duration::from_millis(1500),
            }),
            false => Ok(()),
        }
    }

    fn fetch_image(&self, source: ImageSource) -> Fetch {
        self.fetches.fetch_add(1, Ordering::SeqCst);
        let (arrivals, guard) = (self.arrivals.clone(), GivenUp(Some(self.given_up.clone())));
        let error = self.fetch_error.lock().unwrap().clone();
        let done = Box::pin(async move {
            let mut guard = guard;
            arrivals.acquire().await.unwrap().forget();
            guard.0 = None;
            match error {
                Some(error) => Err(CreateError::Fetch { reference: source.name, error }),
                None => Ok(Image::new(Arc::new(source.name))),
            }
        });
        Fetch { progress: self.progress.subscribe(), done }
    }

    async fn create(&self, spec: SandboxSpec, image: Image) -> Result<Created, CreateError> {
        let image = image.get::<String>().unwrap();
        match image.as_str() {
            "full" => {
                return Err(CreateError::Exhausted {
                    what: "memory".to_owned(),
                    retry_after: Duration::from_millis(1500),
                });
            }
            "broken" => return Err(CreateError::Failed("clone failed".to_owned())),
            "picky" => return Err(CreateError::InvalidParameter("disk limits need quota".to_owned())),
            "slow" | "remote-slow" => {
                self.at_gate.fetch_add(1, Ordering::SeqCst);
                self.gate.acquire().await.unwrap().forget();
            }
            _ => {}
        }
        if spec.entrypoint[0] == "/no/such" {
            return Err(CreateError::Entrypoint {
                program: spec.entrypoint[0].clone(),
                reason: "no such file or directory".to_owned(),
            });
        }
        let id = spec.id.unwrap_or_else(SandboxId::random);
        self.live.lock().unwrap().insert(id);
        if image.ends_with("brief") {
            self.end(id, 3);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.specs.lock().unwrap().push(spec);
        let stages = vec![("clone", 700), ("mount", 80)];
        let started = Box::pin(std::future::ready(Ok(stages)));
        Ok(Created { id, handle: Handle(json!({ "pid": 7 })), started })
    }

    async fn adopt(
        &self,
        known: Vec<(SandboxId, Handle)>,
    ) -> Result<Vec<(SandboxId, Adopted)>, RuntimeError> {
        let lost = self.lost.lock().unwrap().clone();
        self.adopted.lock().unwrap().clone_from(&known);
        self.live.lock().unwrap().extend(known.iter().map(|(id, _)| *id));
        Ok(known
            .into_iter()
            .map(|(id, _)| {
                (id, if lost.contains(&id) { Adopted::Ended(ended(137)) } else { Adopted::Running })
            })
            .collect())
    }

    async fn delete(&self, id: SandboxId) -> Result<(), RuntimeError> {
        if self.fail_delete.load(Ordering::SeqCst) {
            return Err(RuntimeError::Failed("device busy".to_owned()));
        }
        if self.live.lock().unwrap().remove(&id) {
            self.deleted.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    }

    async fn settled(&self) {}

    fn events(&self) -> Option<mpsc::UnboundedReceiver<RuntimeEvent>> {
        self.receiver.lock().unwrap().take()
    }

    async fn connect(&self, _: SandboxId, _: Target) -> Result<Stream, ConnectError> {
        Err(ConnectError::Io(std::io::ErrorKind::ConnectionRefused.into()))
    }

    async fn entrypoint_log(&self, _: SandboxId, max_bytes: usize) -> Result<Vec<u8>, RuntimeError> {
        let text: String = (1..=150).map(|n| format!("line {n}\n")).collect();
        Ok(text.into_bytes().into_iter().take(max_bytes).collect())
    }

    async fn shutdown(&self) {}
}

/// Counts a fetch that is dropped while this is set.
struct GivenUp(Option<Arc<AtomicUsize>>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        if let Some(count) = &self.0 {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// A server for requests without a network.
pub(crate) struct Server {
    pub(crate) app: Router,
    pub(crate) state: AppState,
    pub(crate) fake: Arc<Fake>,
    pub(crate) dir: tempfile::TempDir,
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    pub(crate) fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|v| v.to_str().unwrap()).unwrap_or_default()
    }

    pub(crate) fn id(&self) -> String {
        self.json()["id"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        self
    }
}

impl Server {
    pub(crate) async fn new() -> Self {
        Self::with("").await
    }

    pub(crate) async fn with(settings: &str) -> Self {
        Self::again(tempfile::tempdir().unwrap(), settings, Fake::new()).await
    }

    pub(crate) async fn again(dir: tempfile::TempDir, settings: &str, fake: Arc<Fake>) -> Self {
        let config = config(dir.path(), settings);
        let (store, rows) = Store::open(&config.store_path()).await.unwrap();
        let state = AppState::new(config, fake.clone(), store);
        state.start(rows).await.unwrap();
        Self { app: osb_server::app(state.clone()), state, fake, dir }
    }

    /// Ends this server and gives back what the next one needs.
    pub(crate) async fn stop(self) -> tempfile::TempDir {
        self.state.stop(Duration::from_secs(5)).await;
        let Self { app, state, dir, .. } = self;
        let path = state.config().store_path();
        drop((app, state));
        let mut lock = path.into_os_string();
        lock.push(".lock");
        let lock = std::fs::File::open(lock).unwrap();
        // The store lets its lock go when the last task that held the state has ended.
        for _ in 0..500 {
            if lock.try_lock().is_ok() {
                return dir;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the store is still in use");
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        send(&self.app, request).await
    }

    pub(crate) async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        call(&self.app, method, path, body).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None).await
    }

    pub(crate) async fn create(&self, body: Value) -> Answer {
        self.call("POST", "/v1/sandboxes", Some(body)).await
    }

    /// Waits until a sandbox is in a state.
    pub(crate) async fn until(&self, id: &str, state: &str) -> Value {
        for _ in 0..4000 {
            let sandbox = self.get(&format!("/v1/sandboxes/{id}")).await.expect(200).json();
            if sandbox["status"]["state"] == state {
                return sandbox;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{id} never became {state}");
    }

    /// Waits until a sandbox is gone.
    pub(crate) async fn until_gone(&self, id: &str) {
        for _ in 0..4000 {
            if self.get(&format!("/v1/sandboxes/{id}")).await.status == 404 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{id} never went");
    }
}

async fn send(app: &Router, mut request: Request<Body>) -> Answer {
    let host = http::HeaderValue::from_static("box.example:8080");
    request.headers_mut().entry(header::HOST).or_insert(host);
    let response = app.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    Answer {
        status: parts.status,
        headers: parts.headers,
        text: String::from_utf8_lossy(&bytes).into_owned(),
    }
}

pub(crate) async fn call(app: &Router, method: &str, path: &str, body: Option<Value>) -> Answer {
    let mut request = Request::builder().method(Method::from_bytes(method.as_bytes()).unwrap()).uri(path);
    request = request.header(header::HOST, "box.example:8080");
    let body = match body {
        Some(body) => {
            request = request.header(header::CONTENT_TYPE, "application/json");
            Body::from(body.to_string())
        }
        None => Body::empty(),
    };
    send(app, request.body(body).unwrap()).await
}

/// This machine's processor as requests name it.
pub(crate) fn arch() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

pub(crate) fn config(dir: &std::path::Path, settings: &str) -> Config {
    let own = format!("embedded.data_dir = \"{}\"\n", dir.display());
    Config::parse(&format!("{own}{settings}"), &Env::default()).unwrap().0
}

/// The least body that makes a sandbox.
pub(crate) fn minimal() -> Value {
    json!({ "image": { "uri": "python:3.12" }, "entrypoint": ["sleep", "inf"], "resourceLimits": {} })
}

/// [`minimal`] with members set, or removed by null.
pub(crate) fn with(changes: Value) -> Value {
    let mut body = minimal();
    for (key, value) in changes.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}
