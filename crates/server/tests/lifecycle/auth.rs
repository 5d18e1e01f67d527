//! Keys, request ids, CORS.

use axum::body::Body;
use http::Request;
use serde_json::json;

use crate::support::{Server, minimal};

const KEYED: &str = "server.api_key = \"s3cret key\"\n";

#[tokio::test]
async fn keys_are_asked_for_where_they_must_be() {
    let server = Server::with(KEYED).await;
    let id = "3f0c8a52-6d4e-4d1b-9a53-0b7c1f2e9d10";
    let with_key = |path: String, key: &'static str| {
        server.send(Request::get(path).header("open-sandbox-api-key", key).body(Body::empty()).unwrap())
    };
    for path in ["/health", "/version", "/docs", "/openapi.json", "/redoc"] {
        server.get(path).await.expect(200);
    }
    server.get("/healthxyz").await.expect(404);
    for path in [
        "/v1/sandboxes".to_owned(),
        "//v1/sandboxes".to_owned(),
        "/nowhere".to_owned(),
        "/v1/health".to_owned(),
        format!("/v1/sandboxes/{id}/networkpolicy"),
        format!("/v1/sandboxes/{id}/proxy/abc/"),
        format!("/v1/sandboxes/{id}/proxy/80/../x"),
        format!("/v1/sandboxes/{id}/proxy/80/%2e%2e/x"),
    ] {
        assert_eq!(server.get(&path).await.expect(401).code(), "MISSING_API_KEY", "{path}");
        let answer = with_key(path.clone(), "wrong").await.expect(401);
        assert_eq!(answer.code(), "INVALID_API_KEY", "{path}");
        assert_eq!(with_key(path.clone(), "").await.expect(401).code(), "MISSING_API_KEY");
        assert_ne!(with_key(path.clone(), "s3cret key").await.status, 401, "{path}");
    }
    // The id is the gate of proxy paths.
    for path in [format!("/v1/sandboxes/{id}/proxy/80"), format!("/sandboxes/{id}/proxy/80/a/b?c")] {
        assert_eq!(server.get(&path).await.expect(404).code(), "DOCKER::SANDBOX_NOT_FOUND");
    }
}

#[tokio::test]
async fn request_ids_come_back() {
    let server = Server::with(KEYED).await;
    for path in ["/health", "/v1/sandboxes", "/nowhere"] {
        let made = server.get(path).await;
        let id = made.header("x-request-id");
        assert!(id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()), "{id}");
        let request = Request::get(path).header("x-request-id", "  mine 7 ").body(Body::empty()).unwrap();
        assert_eq!(server.send(request).await.header("x-request-id"), "mine 7");
        let request = Request::get(path).header("x-request-id", "   ").body(Body::empty()).unwrap();
        assert_eq!(server.send(request).await.header("x-request-id").len(), 32);
    }
}

#[tokio::test]
async fn any_origin_may_ask() {
    let server = Server::with(KEYED).await;
    let preflight = Request::options("/v1/sandboxes")
        .header("origin", "https://a.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "open-sandbox-api-key")
        .body(Body::empty())
        .unwrap();
    let answer = server.send(preflight).await.expect(200);
    assert_eq!(answer.header("access-control-allow-origin"), "https://a.example");
    assert_eq!(answer.header("access-control-allow-credentials"), "true");
    assert_eq!(answer.header("access-control-allow-headers"), "open-sandbox-api-key");
    assert!(answer.header("access-control-allow-methods").contains("PATCH"));
    assert_eq!(answer.header("access-control-max-age"), "600");
    let request = Request::get("/v1/sandboxes").header("origin", "null").body(Body::empty()).unwrap();
    let answer = server.send(request).await.expect(401);
    assert_eq!(answer.header("access-control-allow-origin"), "null");
    assert_eq!(answer.header("access-control-expose-headers"), "OPEN-SANDBOX-ORIGIN");
    assert!(server.get("/health").await.headers.get("access-control-allow-origin").is_none());
}

#[tokio::test]
async fn without_a_key_everybody_may() {
    let server = Server::new().await;
    server.create(minimal()).await.expect(202);
    let metrics = json!({"eventType": "sandbox.create", "createDurationMs": 5, "success": true});
    server.call("POST", "/v1/metrics/events", Some(metrics)).await.expect(204);
}
