//! Routes, spellings of paths, functions that are not offered, diagnostics, endpoints.

use axum::body::Body;
use http::Request;
use serde_json::json;

use crate::support::{Server, minimal, with};

#[tokio::test]
async fn paths_exist_bare_and_versioned() {
    let server = Server::new().await;
    for path in ["/sandboxes", "/v1/sandboxes", "//v1/sandboxes", "///sandboxes", "/health", "/version"] {
        server.get(path).await.expect(200);
    }
    assert_eq!(server.get("/health").await.text, r#"{"status":"healthy"}"#);
    assert!(server.get("/version").await.json()["version"].is_string());
    for path in ["/metrics/events", "/v1/health", "/v1/version", "/v2/sandboxes", "/", "/v1", "/v1/"] {
        let answer = server.call("POST", path, Some(json!({}))).await.expect(404);
        assert_eq!(answer.json()["detail"], "Not Found", "{path}");
        assert_eq!(answer.code(), "GENERAL::UNKNOWN_ERROR");
    }
}

#[tokio::test]
async fn a_slash_too_many_is_redirected() {
    let server = Server::new().await;
    for (path, target) in [
        ("/v1/sandboxes/", "http://box.example:8080/v1/sandboxes"),
        ("/health/", "http://box.example:8080/health"),
        ("/v1/sandboxes/?page=2", "http://box.example:8080/v1/sandboxes?page=2"),
    ] {
        assert_eq!(server.get(path).await.expect(307).header("location"), target);
    }
    for (told, scheme) in [("https", "https"), ("HTTPS, http", "https"), ("http", "http"), ("ftp", "http")] {
        let request = Request::get("/v1/sandboxes/").header("x-forwarded-proto", told);
        let answer = server.send(request.body(Body::empty()).unwrap()).await.expect(307);
        assert_eq!(answer.header("location"), format!("{scheme}://box.example:8080/v1/sandboxes"), "{told}");
    }
    server.get("/nowhere/").await.expect(404);
}

#[tokio::test]
async fn other_methods_are_refused_with_the_right_ones() {
    let server = Server::new().await;
    for (method, path, allow) in [
        ("PUT", "/v1/sandboxes", "GET, POST"),
        ("HEAD", "/v1/sandboxes", "GET, POST"),
        ("OPTIONS", "/v1/sandboxes/x", "DELETE, GET"),
        ("POST", "/health", "GET"),
        ("GET", "/v1/metrics/events", "POST"),
    ] {
        let answer = server.call(method, path, None).await.expect(405);
        let mut methods: Vec<_> = answer.header("allow").split(", ").collect();
        methods.sort_unstable();
        assert_eq!(methods.join(", "), allow, "{method} {path}");
        if method == "HEAD" {
            assert!(answer.text.is_empty());
        } else {
            assert_eq!(answer.json()["detail"], "Method Not Allowed");
        }
    }
    server.call("HEAD", "/nowhere", None).await.expect(404);
}

#[tokio::test]
async fn what_is_not_offered_says_so() {
    let server = Server::new().await;
    let id = server.create(minimal()).await.expect(202).id();
    let sandbox = |rest: &str| format!("/v1/sandboxes/{id}/{rest}");
    let pool = json!({"name": "p", "template": {}, "capacitySpec":
        {"bufferMax": 1, "bufferMin": 0, "poolMax": 2, "poolMin": 0}});
    let policy = json!({"defaultAction": "Deny", "egress": [{"action": "Allow", "target": "a.example"}]});
    for (method, path, body, status, code) in [
        ("POST", sandbox("pause"), None, 501, "SANDBOX::API_NOT_SUPPORTED"),
        ("POST", sandbox("resume"), None, 501, "SANDBOX::API_NOT_SUPPORTED"),
        ("POST", sandbox("snapshots"), None, 501, "SNAPSHOT::NOT_IMPLEMENTED"),
        ("POST", sandbox("snapshots"), Some(json!({"name": "n"})), 501, "SNAPSHOT::NOT_IMPLEMENTED"),
        ("POST", sandbox("snapshots"), Some(json!({"name": ""})), 422, "GENERAL::UNKNOWN_ERROR"),
        ("GET", "/v1/snapshots/x".into(), None, 404, "SNAPSHOT::NOT_FOUND"),
        ("DELETE", "/v1/snapshots/x".into(), None, 404, "SNAPSHOT::NOT_FOUND"),
        ("GET", "/v1/pools".into(), None, 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        ("POST", "/v1/pools".into(), Some(pool.clone()), 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        ("PUT", "/v1/pools/p".into(), Some(pool), 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        ("DELETE", "/v1/pools/p".into(), None, 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        ("GET", "/v1/templates".into(), None, 501, "FSB::API_NOT_SUPPORTED"),
        ("GET", "/v1/templates/t".into(), None, 501, "FSB::API_NOT_SUPPORTED"),
        (
            "POST",
            "/v1/templates".into(),
            Some(json!({"image": "a", "publish": "b", "x": 1})),
            422,
            "GENERAL::UNKNOWN_ERROR",
        ),
        (
            "POST",
            "/v1/templates".into(),
            Some(json!({"image": "a", "publish": "b"})),
            501,
            "FSB::API_NOT_SUPPORTED",
        ),
        ("GET", sandbox("networkpolicy"), None, 502, "BACKEND_CONNECTION_FAILED"),
        ("PUT", sandbox("networkpolicy"), Some(policy), 502, "BACKEND_CONNECTION_FAILED"),
        ("DELETE", sandbox("networkpolicy"), Some(json!(["a.example"])), 502, "BACKEND_CONNECTION_FAILED"),
        (
            "POST",
            "/v1/metrics/events".into(),
            Some(json!({"eventType": "x", "createDurationMs": 1, "success": true})),
            422,
            "GENERAL::UNKNOWN_ERROR",
        ),
    ] {
        let answer = server.call(method, &path, body).await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{method} {path}");
    }
    let list = server.get("/v1/snapshots?pageSize=5").await.expect(200).json();
    assert_eq!(list["items"], json!([]));
    assert_eq!(list["pagination"]["totalPages"], 0);
    for rest in ["pause", "resume", "snapshots"] {
        server.call("POST", &format!("/v1/sandboxes/nope/{rest}"), None).await.expect(404);
    }
}

#[tokio::test]
async fn endpoints_lead_through_the_server() {
    let server = Server::new().await;
    let id = server.create(minimal()).await.expect(202).id();
    for (path, endpoint) in [
        (
            format!("/v1/sandboxes/{id}/endpoints/44772"),
            format!("box.example:8080/v1/sandboxes/{id}/proxy/44772"),
        ),
        (format!("/sandboxes/{id}/endpoints/18080"), format!("box.example:8080/sandboxes/{id}/proxy/18080")),
        (
            format!("/v1/sandboxes/{id}/endpoints/80?use_server_proxy=True"),
            format!("box.example:8080/v1/sandboxes/{id}/proxy/80"),
        ),
    ] {
        let answer = server.get(&path).await.expect(200);
        assert_eq!(answer.json(), json!({ "endpoint": endpoint }));
        assert!(answer.headers.get("open-sandbox-origin").is_none());
    }
    for (rest, status, code) in [
        ("0", 400, "DOCKER::INVALID_PORT"),
        ("65536", 400, "DOCKER::INVALID_PORT"),
        ("-1", 400, "DOCKER::INVALID_PORT"),
        ("http", 422, "GENERAL::UNKNOWN_ERROR"),
        ("80?use_server_proxy=maybe", 422, "GENERAL::UNKNOWN_ERROR"),
        ("80?expires=x", 422, "GENERAL::UNKNOWN_ERROR"),
        ("80?expires=99999999999", 400, "SANDBOX::API_NOT_SUPPORTED"),
        ("80?expires=99999999999&use_server_proxy=true", 400, "SANDBOX::INVALID_PARAMETER"),
    ] {
        let answer = server.get(&format!("/v1/sandboxes/{id}/endpoints/{rest}")).await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{rest}");
    }
    server.get("/v1/sandboxes/nope/endpoints/80").await.expect(404);
    let server = Server::with("server.eip = \"https://box.example/osb/\"\n").await;
    let id = server.create(minimal()).await.expect(202).id();
    let answer = server.get(&format!("/v1/sandboxes/{id}/endpoints/80")).await.json();
    assert_eq!(answer["endpoint"], format!("box.example/osb/sandboxes/{id}/proxy/80"));
}

#[tokio::test]
async fn diagnostics_show_what_is_known() {
    let server = Server::new().await;
    let body = with(
        json!({"env": {"API_TOKEN": "hunter2"}, "metadata": {"a": "b"}, "resourceLimits": {"cpu": "1"}}),
    );
    let id = server.create(body).await.expect(202).id();
    let at = |rest: &str| format!("/v1/sandboxes/{id}/diagnostics/{rest}");
    let logs = server.get(&at("logs?scope=%20Container")).await.expect(200).json();
    assert_eq!(
        (&logs["kind"], &logs["delivery"], &logs["scope"]),
        (&json!("logs"), &json!("inline"), &json!("container"))
    );
    assert_eq!(logs["truncated"], true);
    let content = logs["content"].as_str().unwrap();
    assert!(content.starts_with("line 51\n") && content.ends_with("line 150\n"));
    assert_eq!(logs["contentLength"], content.len());
    assert!(logs.get("warnings").is_none() && logs.get("contentUrl").is_none());
    assert_eq!(server.get(&at("events?scope=all")).await.json()["warnings"].as_array().unwrap().len(), 1);
    for rest in ["logs?scope=network", "logs?scope=", "events?scope=container"] {
        assert_eq!(server.get(&at(rest)).await.expect(400).code(), "DIAGNOSTICS_SCOPE_UNSUPPORTED");
    }
    let plain = server.get(&at("logs?tail=2")).await.expect(200);
    assert_eq!(plain.text, "line 149\nline 150\n");
    assert_eq!(plain.header("deprecation"), "true");
    assert!(plain.header("content-type").starts_with("text/plain"));
    for rest in ["logs?tail=0", "logs?tail=10001", "events?limit=501", "summary?event_limit=0"] {
        server.get(&at(rest)).await.expect(422);
    }
    let summary = server.get(&at("summary?tail=1")).await.expect(200).text;
    for part in ["SANDBOX DIAGNOSTICS SUMMARY", "INSPECT", "EVENTS", "LOGS (last 1 lines)", "line 150", "a=b"]
    {
        assert!(summary.contains(part), "{part}: {summary}");
    }
    assert!(!summary.contains("hunter2"));
    server.get("/v1/sandboxes/nope/diagnostics/summary").await.expect(404);
}

#[tokio::test]
async fn the_documentation_is_served() {
    let server = Server::new().await;
    let document = server.get("/openapi.json").await.expect(200).json();
    assert!(document["paths"]["/sandboxes"]["post"].is_object());
    let page = server.get("/docs").await.expect(200);
    assert!(page.header("content-type").starts_with("text/html"));
    for line in page.text.split('"').filter(|part| part.starts_with("docs/")) {
        server.get(&format!("/{line}")).await.expect(200);
    }
    assert!(page.text.contains("\"docs/swagger-ui"));
    server.get("/docs/nothing.js").await.expect(404);
    // Every documented operation has a route.
    for (path, operations) in document["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            let path = path.replace("{port}", "80").replace("{fullPath}", "x");
            let path = path.replace(['{', '}'], "");
            let prefix = if path == "/health" || path == "/version" { "" } else { "/v1" };
            let request = Request::builder()
                .method(method.to_uppercase().as_str())
                .uri(format!("{prefix}{path}"))
                .body(Body::empty())
                .unwrap();
            let answer = server.send(request).await;
            let unrouted = answer.status == 405 || answer.text.contains("\"detail\":\"Not Found\"");
            assert!(!unrouted, "{method} {path}: {}", answer.text);
        }
    }
}
