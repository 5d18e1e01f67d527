//! Sandboxes whose image has to be fetched first.

use std::sync::atomic::Ordering;
use std::time::Duration;

use osb_runtime::{FetchError, FetchPhase, FetchProgress};
use serde_json::{Value, json};

use crate::support::{Answer, Fake, Server, arch, call, with};

fn remote(changes: Value) -> Value {
    let mut body = with(changes);
    body["image"]["uri"] = json!("remote/a:1");
    body
}

impl Server {
    /// The one sandbox there is.
    async fn only(&self) -> Value {
        for _ in 0..500 {
            let list = self.get("/v1/sandboxes").await.expect(200).json();
            if let Some(sandbox) = list["items"].get(0) {
                assert_eq!(list["pagination"]["totalItems"], 1);
                return sandbox.clone();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("no sandbox");
    }

    /// A create that waits for its image, and its sandbox.
    async fn begin(&self, body: Value) -> (tokio::task::JoinHandle<Answer>, String) {
        let call = self.spawn(body);
        let id = self.only().await["id"].as_str().unwrap().to_owned();
        (call, id)
    }

    fn spawn(&self, body: Value) -> tokio::task::JoinHandle<Answer> {
        let app = self.app.clone();
        tokio::spawn(async move { call(&app, "POST", "/v1/sandboxes", Some(body)).await })
    }

    async fn count(&self) -> u64 {
        self.get("/v1/sandboxes").await.expect(200).json()["pagination"]["totalItems"].as_u64().unwrap()
    }
}

async fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn a_pending_sandbox_shows_how_far_its_image_is() {
    let server = Server::new().await;
    let body = remote(json!({
        "timeout": 600, "metadata": {"a": "b"}, "extensions": {"opensandbox.extensions.x": "y"},
    }));
    let (call, id) = server.begin(body).await;
    server.fake.progress.send_replace(FetchProgress {
        phase: FetchPhase::Downloading,
        bytes: 12_340_000,
        total_bytes: 45_600_000,
        layers: 1,
        total_layers: 3,
    });
    let pending = server.only().await;
    assert_eq!(
        (&pending["status"]["state"], &pending["status"]["reason"]),
        (&json!("Pending"), &json!("IMAGE_PULLING"))
    );
    assert_eq!(
        pending["status"]["message"],
        "Pulling image remote/a:1: downloading, 12.3 of 45.6 MB, 1 of 3 layers."
    );
    assert_eq!(pending["metadata"], json!({"a": "b"}));
    let filtered = server.get("/v1/sandboxes?state=pending&metadata=a%3Db").await.json();
    assert_eq!(filtered["items"][0]["id"], json!(id));
    let endpoint = server.get(&format!("/v1/sandboxes/{id}/endpoints/80")).await.expect(200).json();
    assert!(endpoint["endpoint"].as_str().unwrap().ends_with(&format!("{id}/proxy/80")));
    let events = server.get(&format!("/v1/sandboxes/{id}/diagnostics/events")).await.expect(200);
    assert!(
        events.text.contains("IMAGE_PULLING") && events.text.contains("12.3 of 45.6 MB"),
        "{}",
        events.text
    );
    assert_eq!(
        server.get(&format!("/v1/sandboxes/{id}/diagnostics/logs")).await.expect(200).text,
        "(no logs)"
    );
    server.get(&format!("/v1/sandboxes/{id}/diagnostics/summary")).await.expect(200);

    server.fake.arrivals.add_permits(1);
    let created = call.await.unwrap().expect(202).json();
    assert_eq!(created["id"], json!(id));
    assert_eq!(created["status"]["state"], "Running");
    for member in ["metadata", "extensions", "expiresAt", "createdAt"] {
        assert_eq!(created[member], pending[member], "{member}");
    }
    assert_eq!(server.only().await["status"]["state"], "Running");
}

#[tokio::test]
async fn labels_and_expiry_of_a_pending_sandbox_change_and_stay() {
    let server = Server::new().await;
    let (call, id) = server.begin(remote(json!({"timeout": 600, "metadata": {"a": "b"}}))).await;
    let patched = format!("/v1/sandboxes/{id}/metadata");
    server.call("PATCH", &patched, Some(json!({"a": "c"}))).await.expect(200);
    let renewed = format!("/v1/sandboxes/{id}/renew-expiration");
    server.call("POST", &renewed, Some(json!({"expiresAt": "2050-01-01T00:00:00Z"}))).await.expect(200);
    server.fake.arrivals.add_permits(1);
    let created = call.await.unwrap().expect(202).json();
    assert_eq!(
        (&created["metadata"], &created["expiresAt"]),
        (&json!({"a": "c"}), &json!("2050-01-01T00:00:00Z"))
    );
    let before = server.only().await;
    let dir = server.stop().await;
    let server = Server::again(dir, "", Fake::new()).await;
    assert_eq!(server.only().await, before);
}

#[tokio::test]
async fn deleting_a_pending_sandbox_gives_its_image_up() {
    let server = Server::new().await;
    let (call, id) = server.begin(remote(json!({}))).await;
    server.call("DELETE", &format!("/v1/sandboxes/{id}"), None).await.expect(204);
    server.get(&format!("/v1/sandboxes/{id}")).await.expect(404);
    server.call("DELETE", &format!("/v1/sandboxes/{id}"), None).await.expect(404);
    let answer = call.await.unwrap().expect(409);
    assert_eq!(answer.code(), "DOCKER::SANDBOX_NOT_RUNNING");
    eventually("the fetch is given up", || server.fake.given_up.load(Ordering::SeqCst) == 1).await;
    assert_eq!(server.fake.live(), 0);
}

#[tokio::test]
async fn deleting_one_that_is_being_made_leaves_nothing() {
    let server = Server::new().await;
    let body = with(json!({"image": {"uri": "remote-slow"}}));
    let (call, id) = server.begin(body).await;
    server.fake.arrivals.add_permits(1);
    eventually("it is being made", || server.fake.at_gate.load(Ordering::SeqCst) == 1).await;
    server.call("DELETE", &format!("/v1/sandboxes/{id}"), None).await.expect(204);
    server.fake.gate.add_permits(1);
    call.await.unwrap().expect(409);
    assert_eq!((server.fake.live(), server.fake.deleted.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(server.count().await, 0);
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_sandbox_along_and_the_fetch_goes_on() {
    let server = Server::new().await;
    let (call, id) = server.begin(remote(json!({}))).await;
    call.abort();
    server.until_gone(&id).await;
    assert_eq!(server.fake.given_up.load(Ordering::SeqCst), 0);
    server.fake.arrivals.add_permits(1);
    eventually("the fetch ended", || server.fake.arrivals.available_permits() == 0).await;
    assert_eq!((server.fake.live(), server.fake.given_up.load(Ordering::SeqCst)), (0, 0));
}

#[tokio::test]
async fn a_fetch_that_fails_is_the_answer_and_leaves_nothing() {
    for (error, status, code) in [
        (FetchError::Failed("no such image".to_owned()), 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
        (FetchError::Platform("only windows".to_owned()), 400, "SANDBOX::INVALID_PARAMETER"),
        (
            FetchError::Busy { reason: "slow down".to_owned(), retry_after: Duration::from_millis(6500) },
            429,
            "DOCKER::SANDBOX_IMAGE_PULL_FAILED",
        ),
        (
            FetchError::NoRoom { reason: "disk full".to_owned(), retry_after: Duration::from_millis(6500) },
            429,
            "SANDBOX::CAPACITY_EXHAUSTED",
        ),
    ] {
        let server = Server::new().await;
        *server.fake.fetch_error.lock().unwrap() = Some(error.clone());
        server.fake.arrivals.add_permits(1);
        let answer = server.create(remote(json!({}))).await.expect(status);
        assert_eq!(answer.code(), code);
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("'remote/a:1'") && message.contains(&error.to_string()), "{message}");
        assert_eq!(answer.header("retry-after"), if status == 429 { "7" } else { "" });
        assert_eq!(server.count().await, 0);
        let dir = server.stop().await;
        let server = Server::again(dir, "", Fake::new()).await;
        assert_eq!(server.count().await, 0);
    }
}

#[tokio::test]
async fn a_full_server_fetches_nothing() {
    let server = Server::new().await;
    server.fake.full.store(true, Ordering::SeqCst);
    let answer = server.create(remote(json!({}))).await.expect(429);
    assert_eq!(answer.code(), "SANDBOX::CAPACITY_EXHAUSTED");
    assert_eq!(answer.header("retry-after"), "2");
    assert_eq!((server.fake.fetches.load(Ordering::SeqCst), server.count().await), (0, 0));
    server.fake.full.store(false, Ordering::SeqCst);
    server.fake.arrivals.add_permits(1);
    server.create(remote(json!({}))).await.expect(202);
}

#[tokio::test]
async fn the_account_reaches_the_runtime_and_nothing_else() {
    let server = Server::new().await;
    let auth = json!({"username": "puller", "password": "hunter2-secret"});
    let body = with(json!({
        "image": {"uri": "remote/a:1", "auth": auth},
        "platform": {"os": " Linux", "arch": arch()},
    }));
    let (call, id) = server.begin(body).await;
    let mut seen = server.get("/v1/sandboxes").await.text;
    seen += &server.get(&format!("/v1/sandboxes/{id}")).await.text;
    seen += &server.get(&format!("/v1/sandboxes/{id}/diagnostics/summary")).await.text;
    server.fake.arrivals.add_permits(1);
    seen += &call.await.unwrap().expect(202).text;
    seen += &server.get(&format!("/v1/sandboxes/{id}")).await.text;
    seen += &format!("{:?}{:?}", server.fake.sources.lock().unwrap(), server.fake.specs.lock().unwrap());
    assert!(!seen.contains("hunter2") && !seen.contains("puller"), "{seen}");
    {
        let sources = server.fake.sources.lock().unwrap();
        let account = sources[0].credentials.as_ref().unwrap();
        assert_eq!((account.username.as_str(), account.password.as_str()), ("puller", "hunter2-secret"));
        assert_eq!(sources[0].platform.as_ref().unwrap().os, "linux");
    }
    let dir = server.stop().await;
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = if path.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
        assert!(!bytes.windows(7).any(|window| window == b"hunter2"), "{}", path.display());
    }
}

#[tokio::test]
async fn one_that_ends_at_once_is_seen() {
    let server = Server::new().await;
    server.fake.arrivals.add_permits(1);
    let id = server.create(with(json!({"image": {"uri": "remote-brief"}}))).await.expect(202).id();
    let sandbox = server.until(&id, "Failed").await;
    assert!(sandbox["status"]["message"].as_str().unwrap().contains("code 3"));
}

#[tokio::test]
async fn a_server_that_stops_does_not_wait_for_images() {
    let server = Server::new().await;
    let (call, _) = server.begin(remote(json!({}))).await;
    let left = server.spawn(remote(json!({})));
    eventually("both wait", || server.fake.fetches.load(Ordering::SeqCst) == 2).await;
    left.abort();
    let began = std::time::Instant::now();
    server.state.begin_stop();
    assert_eq!(call.await.unwrap().expect(503).header("retry-after"), "1");
    server.stop().await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[tokio::test]
async fn expiry_ends_the_wait() {
    let server = Server::new().await;
    let (call, id) = server.begin(remote(json!({"timeout": 60}))).await;
    let soon =
        osb_protocol::time::WireTime::from_micros(osb_protocol::time::WireTime::now().as_micros() + 200_000);
    let path = format!("/v1/sandboxes/{id}/renew-expiration");
    server.call("POST", &path, Some(json!({ "expiresAt": soon }))).await.expect(200);
    call.await.unwrap().expect(409);
    server.get(&format!("/v1/sandboxes/{id}")).await.expect(404);
}
