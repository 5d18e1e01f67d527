//! What a new server finds.

use std::sync::atomic::Ordering;

use osb_protocol::time::WireTime;
use osb_server::store::{Store, StoreError};
use serde_json::json;

use crate::support::{Fake, Server, config, minimal, with};

#[tokio::test]
async fn sandboxes_survive_with_everything_about_them() {
    let server = Server::with("server.require_endpoint_token = true\n").await;
    let body = with(json!({"timeout": 600, "metadata": {"a": "b"}, "extensions": {"x": "y"}}));
    let kept = server.create(body).await.expect(202).id();
    let renewed = format!("/v1/sandboxes/{kept}/renew-expiration");
    server.call("POST", &renewed, Some(json!({"expiresAt": "2050-01-01T00:00:00Z"}))).await.expect(200);
    let patched = format!("/v1/sandboxes/{kept}/metadata");
    server.call("PATCH", &patched, Some(json!({"a": "c", "d": "e"}))).await.expect(200);
    let lost = server.create(minimal()).await.expect(202).id();
    let dead = server.create(minimal()).await.expect(202).id();
    server.fake.end(dead.parse().unwrap(), 9);
    server.until(&dead, "Failed").await;
    let deleted = server.create(minimal()).await.expect(202).id();
    server.call("DELETE", &format!("/v1/sandboxes/{deleted}"), None).await.expect(204);
    let overdue = server.create(with(json!({"timeout": 600}))).await.expect(202).id();
    let soon = WireTime::from_micros(WireTime::now().as_micros() + 400_000).unwrap();
    let path = format!("/v1/sandboxes/{overdue}/renew-expiration");
    server.call("POST", &path, Some(json!({ "expiresAt": soon }))).await.expect(200);
    let before = server.get("/v1/sandboxes?pageSize=200").await.json();
    let endpoint = server.get(&format!("/v1/sandboxes/{kept}/endpoints/80")).await.json();
    let dir = server.stop().await;
    while WireTime::now() <= soon {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }

    let fake = Fake::new();
    fake.lost.lock().unwrap().insert(lost.parse().unwrap());
    let server = Server::again(dir, "server.require_endpoint_token = true\n", fake).await;
    let shown = |list: &serde_json::Value, id: &str| {
        list["items"].as_array().unwrap().iter().find(|s| s["id"] == id).cloned().unwrap_or_default()
    };
    let after = server.get("/v1/sandboxes?pageSize=200").await.json();
    assert_eq!(shown(&after, &kept), shown(&before, &kept));
    assert_eq!(shown(&after, &kept)["metadata"], json!({"a": "c", "d": "e"}));
    assert_eq!(shown(&after, &dead), shown(&before, &dead));
    assert_eq!(shown(&after, &lost)["status"]["state"], "Failed");
    assert_eq!(server.get(&format!("/v1/sandboxes/{kept}/endpoints/80")).await.json(), endpoint);
    for gone in [&deleted, &overdue] {
        server.get(&format!("/v1/sandboxes/{gone}")).await.expect(404);
    }
    let adopted = server.fake.adopted.lock().unwrap().clone();
    assert_eq!(adopted.len(), 4, "all but the deleted one are handed back");
    assert!(adopted.iter().all(|(_, handle)| handle.0 == json!({"pid": 7})));
    assert_eq!(server.fake.deleted.load(Ordering::SeqCst), 1, "the overdue one");
    assert_eq!(after["pagination"]["totalItems"], 3);
}

#[tokio::test]
async fn a_removal_that_failed_goes_on_after_a_restart() {
    let server = Server::new().await;
    let id = server.create(minimal()).await.expect(202).id();
    server.fake.fail_delete.store(true, Ordering::SeqCst);
    server.call("DELETE", &format!("/v1/sandboxes/{id}"), None).await.expect(500);
    let server = Server::again(server.stop().await, "", Fake::new()).await;
    server.get(&format!("/v1/sandboxes/{id}")).await.expect(404);
    assert_eq!(server.fake.deleted.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_second_server_on_the_same_directory_is_refused() {
    let server = Server::new().await;
    let path = config(server.dir.path(), "").store_path();
    assert!(matches!(Store::open(&path).await, Err(StoreError::Locked(_))));
    use std::os::unix::fs::PermissionsExt;
    for file in std::fs::read_dir(server.dir.path()).unwrap() {
        let file = file.unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o077, 0, "{:?}", file.file_name());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_creates_at_once_are_all_stored() {
    let server = Server::new().await;
    let answers = futures_util::future::join_all((0..300).map(|_| server.create(minimal()))).await;
    let ids: Vec<_> = answers.into_iter().map(|answer| answer.expect(202).id()).collect();
    let server = Server::again(server.stop().await, "", Fake::new()).await;
    assert_eq!(server.get("/v1/sandboxes").await.json()["pagination"]["totalItems"], ids.len());
}

#[tokio::test]
async fn a_damaged_row_costs_its_own_sandbox_only() {
    use sqlx::Connection as _;

    let server = Server::new().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(server.create(minimal()).await.expect(202).id());
    }
    let dir = server.stop().await;
    let path = config(dir.path(), "").store_path();
    let mut connection =
        sqlx::SqliteConnection::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    for (column, value, id) in [
        ("handle", "{garbage", &ids[0]),
        ("metadata", "5", &ids[1]),
        ("created_at", "-9000000000000000000", &ids[2]),
    ] {
        let sql = format!("UPDATE sandboxes SET {column} = '{value}' WHERE id = '{id}'");
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    }
    connection.close().await.unwrap();

    let fake = Fake::new();
    let server = Server::again(dir, "", fake).await;
    let adopted = server.fake.adopted.lock().unwrap().clone();
    assert_eq!(adopted.iter().filter(|(_, handle)| handle.0.is_null()).count(), 1, "the runtime decides");
    server.get(&format!("/v1/sandboxes/{}", ids[0])).await.expect(200);
    server.get(&format!("/v1/sandboxes/{}", ids[1])).await.expect(404);
    server.get(&format!("/v1/sandboxes/{}", ids[2])).await.expect(404);
    server.get(&format!("/v1/sandboxes/{}", ids[3])).await.expect(200);
    let again = Server::again(server.stop().await, "", Fake::new()).await;
    assert_eq!(again.get("/v1/sandboxes").await.json()["pagination"]["totalItems"], 2);
}

#[tokio::test]
async fn a_path_that_sqlite_cannot_open_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(["x".repeat(200), "y".repeat(200), "z".repeat(200)].join("/")).join("a.db");
    let error = Store::open(&path).await.unwrap_err();
    assert!(error.to_string().contains("shorten it by"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is made");
}
