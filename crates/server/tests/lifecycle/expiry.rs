//! Renewal, expiry, deletion, ends.

use std::sync::atomic::Ordering;
use std::time::Duration;

use osb_protocol::time::WireTime;
use serde_json::json;

use crate::support::{Server, minimal, with};

fn from_now(micros: i64) -> String {
    WireTime::from_micros(WireTime::now().as_micros() + micros).unwrap().to_string()
}

#[tokio::test]
async fn renewal_sets_the_expiry_and_says_why_not() {
    let server = Server::new().await;
    let id = server.create(with(json!({"timeout": 600}))).await.expect(202).id();
    let path = format!("/v1/sandboxes/{id}/renew-expiration");
    let renew = |at: serde_json::Value| server.call("POST", &path, Some(json!({ "expiresAt": at })));
    for (input, output) in [
        (json!("2100-01-01T08:00:00.123456789+08:00"), "2100-01-01T00:00:00.123456Z"),
        (json!("2100-01-01T00:00:00"), "2100-01-01T00:00:00Z"),
        (json!(4102444800_u64), "2100-01-01T00:00:00Z"),
        (json!("2050-01-01T00:00:00Z"), "2050-01-01T00:00:00Z"),
    ] {
        assert_eq!(renew(input).await.expect(200).json(), json!({ "expiresAt": output }));
        let shown = server.get(&format!("/v1/sandboxes/{id}")).await.json();
        assert_eq!(shown["expiresAt"], output);
    }
    assert_eq!(renew(json!("2001-01-01T00:00:00Z")).await.expect(400).code(), "DOCKER::INVALID_EXPIRATION");
    renew(json!("soon")).await.expect(422);
    renew(json!(null)).await.expect(422);
    let snake = server.call("POST", &path, Some(json!({"expires_at": "2050-01-01T00:00:00Z"}))).await;
    snake.expect(200);
    let forever = server.create(minimal()).await.expect(202).id();
    let path = format!("/v1/sandboxes/{forever}/renew-expiration");
    let answer =
        server.call("POST", &path, Some(json!({"expiresAt": from_now(1_000_000)}))).await.expect(409);
    assert_eq!(answer.code(), "DOCKER::INVALID_EXPIRATION");
    let nobody = "/v1/sandboxes/3f0c8a52-6d4e-4d1b-9a53-0b7c1f2e9d10/renew-expiration";
    let answer =
        server.call("POST", nobody, Some(json!({"expiresAt": "2001-01-01T00:00:00Z"}))).await.expect(404);
    assert_eq!(answer.code(), "DOCKER::SANDBOX_NOT_FOUND");
}

#[tokio::test]
async fn an_expired_sandbox_is_gone() {
    let server = Server::new().await;
    let id = server.create(with(json!({"timeout": 600}))).await.expect(202).id();
    let path = format!("/v1/sandboxes/{id}/renew-expiration");
    server.call("POST", &path, Some(json!({"expiresAt": from_now(50_000)}))).await.expect(200);
    server.until_gone(&id).await;
    assert_eq!(server.fake.live(), 0);
}

/// Waits for a moment, to the microsecond as far as the machine allows.
async fn until_micros(moment: i64) {
    // Timers are as coarse as a millisecond.
    let ahead = u64::try_from(moment - WireTime::now().as_micros() - 2000).unwrap_or_default();
    tokio::time::sleep(Duration::from_micros(ahead)).await;
    while WireTime::now().as_micros() < moment {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_succeeded_has_won() {
    let server = Server::new().await;
    let mut lead = 20_000;
    // From the expiry to the renewal, in microseconds. What just won comes later next time and what lost earlier, so
    // that renewals end up as close to the expiry as can be, however slow the machine is.
    let mut aim = -5000;
    let (mut won, mut lost) = (0, 0);
    while won + lost < 60 {
        let id = server.create(with(json!({"timeout": 600}))).await.expect(202).id();
        let path = format!("/v1/sandboxes/{id}/renew-expiration");
        let due = WireTime::now().as_micros() + lead;
        let expiry = json!({"expiresAt": WireTime::from_micros(due).unwrap().to_string()});
        let answer = server.call("POST", &path, Some(expiry)).await;
        if answer.status.as_u16() == 400 {
            // Too slow: it has passed before it could be set.
            server.call("DELETE", &format!("/v1/sandboxes/{id}"), None).await.expect(204);
            lead *= 2;
            assert!(lead < 10_000_000, "{}", answer.text);
            continue;
        }
        answer.expect(200);
        until_micros(due + aim).await;
        let answer = server.call("POST", &path, Some(json!({"expiresAt": from_now(60_000_000)}))).await;
        match answer.status.as_u16() {
            200 => {
                until_micros(due + 8000).await;
                server.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
                server.call("DELETE", &format!("/v1/sandboxes/{id}"), None).await.expect(204);
                won += 1;
                aim += 500;
            }
            404 => {
                server.until_gone(&id).await;
                lost += 1;
                aim -= 300;
            }
            other => panic!("{other}: {}", answer.text),
        }
    }
    assert!(won > 0 && lost > 0, "{won} won, {lost} lost");
    assert_eq!(server.fake.live(), 0);
}

#[tokio::test]
async fn deletion_is_final() {
    let server = Server::new().await;
    let id = server.create(minimal()).await.expect(202).id();
    let path = format!("/v1/sandboxes/{id}");
    let answer = server.call("DELETE", &path, None).await.expect(204);
    assert!(answer.text.is_empty());
    server.get(&path).await.expect(404);
    assert_eq!(server.call("DELETE", &path, None).await.expect(404).code(), "DOCKER::SANDBOX_NOT_FOUND");
    assert_eq!(server.get("/v1/sandboxes").await.json()["pagination"]["totalItems"], 0);
    // Of two at once one succeeds.
    let id = server.create(minimal()).await.expect(202).id();
    let path = format!("/v1/sandboxes/{id}");
    let (a, b) = tokio::join!(server.call("DELETE", &path, None), server.call("DELETE", &path, None));
    let mut statuses = [a.status.as_u16(), b.status.as_u16()];
    statuses.sort_unstable();
    assert_eq!(statuses, [204, 404]);
}

#[tokio::test]
async fn a_failed_deletion_is_shown_and_can_be_repeated() {
    let server = Server::new().await;
    let id = server.create(minimal()).await.expect(202).id();
    let path = format!("/v1/sandboxes/{id}");
    server.fake.fail_delete.store(true, Ordering::SeqCst);
    assert_eq!(server.call("DELETE", &path, None).await.expect(500).code(), "DOCKER::SANDBOX_DELETE_FAILED");
    assert_eq!(server.get(&path).await.expect(200).json()["status"]["state"], "Stopping");
    server.fake.fail_delete.store(false, Ordering::SeqCst);
    server.call("DELETE", &path, None).await.expect(204);
    server.get(&path).await.expect(404);
}

#[tokio::test]
async fn ended_sandboxes_stay_for_a_while() {
    let server = Server::with("embedded.tombstone_seconds = 1\n").await;
    let mut ids = Vec::new();
    for code in [0, 7] {
        let id = server.create(minimal()).await.expect(202).id();
        server.fake.end(id.parse().unwrap(), code);
        ids.push(id);
    }
    let sandbox = server.until(&ids[0], "Terminated").await;
    assert_eq!(sandbox["status"]["reason"], "CONTAINER_EXITED");
    assert_ne!(sandbox["status"]["lastTransitionAt"], sandbox["createdAt"]);
    let sandbox = server.until(&ids[1], "Failed").await;
    assert!(sandbox["status"]["message"].as_str().unwrap().contains("code 7"));
    // An end is told once.
    server.fake.end(ids[1].parse().unwrap(), 0);
    assert_eq!(server.get(&format!("/v1/sandboxes/{}", ids[1])).await.json()["status"]["state"], "Failed");
    for id in &ids {
        server.until_gone(id).await;
    }
    assert_eq!(server.fake.live(), 0);
}

#[tokio::test]
async fn access_renews_those_that_asked_for_it_and_not_too_often() {
    let server = Server::with("renew_intent.enabled = true\n").await;
    let extended = json!({"timeout": 60, "extensions": {"access.renew.extend.seconds": "300"}});
    let asked = server.create(with(extended.clone())).await.expect(202);
    let silent = server.create(with(json!({"timeout": 60}))).await.expect(202);
    let skipped = server.create(with(extended)).await.expect(202);
    for answer in [&asked, &silent] {
        server.get(&format!("/v1/sandboxes/{}/proxy/80/", answer.id())).await.expect(502);
    }
    let request = http::Request::get(format!("/v1/sandboxes/{}/proxy/80/", skipped.id()))
        .header("opensandbox-access-renew", "skip")
        .body(axum::body::Body::empty())
        .unwrap();
    server.send(request).await.expect(502);
    let mut renewed = json!(null);
    for _ in 0..500 {
        renewed = server.get(&format!("/v1/sandboxes/{}", asked.id())).await.json()["expiresAt"].clone();
        if renewed != asked.json()["expiresAt"] {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(renewed.as_str().unwrap() > from_now(290_000_000).as_str());
    // A second access within the quiet time changes nothing, nor does one that never asked.
    server.get(&format!("/v1/sandboxes/{}/proxy/80/", asked.id())).await.expect(502);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(server.get(&format!("/v1/sandboxes/{}", asked.id())).await.json()["expiresAt"], renewed);
    for answer in [&silent, &skipped] {
        let shown = server.get(&format!("/v1/sandboxes/{}", answer.id())).await.json();
        assert_eq!(shown["expiresAt"], answer.json()["expiresAt"]);
    }
}
