//! Bodies of errors: always code and message, never what was sent.

use axum::body::Body;
use http::Request;
use osb_protocol::labels::LabelError;
use osb_server::error::{ApiError, Issue};

use crate::support::{Server, minimal};

#[test]
fn every_error_has_one_status_and_code() {
    let text = String::new;
    for (error, status, code) in [
        (ApiError::MissingApiKey, 401, "MISSING_API_KEY"),
        (ApiError::InvalidApiKey, 401, "INVALID_API_KEY"),
        (ApiError::MissingSecureAccess, 401, "MISSING_OR_INVALID_SECURE_ACCESS"),
        (ApiError::SandboxNotFound, 404, "DOCKER::SANDBOX_NOT_FOUND"),
        (ApiError::SnapshotNotFound, 404, "SNAPSHOT::NOT_FOUND"),
        (ApiError::InvalidMetadataFormat, 400, "INVALID_METADATA_FORMAT"),
        (ApiError::ReservedLabel(LabelError::Reserved(text())), 400, "INVALID_METADATA_LABEL"),
        (ApiError::InvalidLabel(LabelError::Key(text())), 400, "SANDBOX::INVALID_METADATA_LABEL"),
        (ApiError::InvalidParameter(text()), 400, "SANDBOX::INVALID_PARAMETER"),
        (ApiError::ApiNotSupported(text()), 400, "SANDBOX::API_NOT_SUPPORTED"),
        (ApiError::UnsupportedPoolRef, 400, "SANDBOX::UNSUPPORTED_POOL_REF"),
        (ApiError::InvalidEntrypoint, 400, "DOCKER::INVALID_ENTRYPOINT"),
        (ApiError::InvalidPort, 400, "DOCKER::INVALID_PORT"),
        (ApiError::ExpirationPast, 400, "DOCKER::INVALID_EXPIRATION"),
        (ApiError::NoExpiration, 409, "DOCKER::INVALID_EXPIRATION"),
        (ApiError::DiagnosticsScope(""), 400, "DIAGNOSTICS_SCOPE_UNSUPPORTED"),
        (ApiError::Volume("VOLUME::INVALID_NAME", text()), 400, "VOLUME::INVALID_NAME"),
        (ApiError::ImagePull(text()), 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
        (
            ApiError::ImagePullLater { message: text(), retry_after_seconds: 1 },
            429,
            "DOCKER::SANDBOX_IMAGE_PULL_FAILED",
        ),
        (ApiError::DeletedMeanwhile, 409, "DOCKER::SANDBOX_NOT_RUNNING"),
        (ApiError::Stopping, 503, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::StartFailed(text()), 500, "DOCKER::SANDBOX_START_FAILED"),
        (ApiError::DeleteFailed(text()), 500, "DOCKER::SANDBOX_DELETE_FAILED"),
        (ApiError::NotRunning, 409, "DOCKER::SANDBOX_NOT_RUNNING"),
        (ApiError::Exhausted { what: text(), retry_after_seconds: 1 }, 429, "SANDBOX::CAPACITY_EXHAUSTED"),
        (
            ApiError::NoRoomForImage { message: text(), retry_after_seconds: 1 },
            429,
            "SANDBOX::CAPACITY_EXHAUSTED",
        ),
        (ApiError::SnapshotsNotSupported, 501, "SNAPSHOT::NOT_IMPLEMENTED"),
        (ApiError::PoolsNotSupported, 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        (ApiError::TemplatesNotSupported, 501, "FSB::API_NOT_SUPPORTED"),
        (ApiError::NotSupported(""), 501, "SANDBOX::API_NOT_SUPPORTED"),
        (ApiError::BackendConnection { port: 1, reason: text() }, 502, "BACKEND_CONNECTION_FAILED"),
        (ApiError::BackendResponse(text()), 502, "BACKEND_RESPONSE_FAILED"),
        (ApiError::BackendTimeout, 504, "BACKEND_TIMEOUT"),
        (ApiError::BadRequest(text()), 400, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::Validation(vec![Issue::new("x", &["body"], "y")]), 422, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::RouteNotFound, 404, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::MethodNotAllowed, 405, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::BodyTooLarge(1), 413, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::Overloaded, 503, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::DiskFull, 500, "GENERAL::UNKNOWN_ERROR"),
        (ApiError::Internal(text()), 500, "GENERAL::UNKNOWN_ERROR"),
    ] {
        let (got, got_code) = error.wire();
        assert_eq!((got.as_u16(), got_code), (status, code), "{error:?}");
    }
}

/// Every route that takes a body, and every route that takes a query.
const BODIES: [(&str, &str); 13] = [
    ("POST", "/v1/sandboxes"),
    ("PATCH", "/v1/sandboxes/{id}/metadata"),
    ("POST", "/v1/sandboxes/{id}/renew-expiration"),
    ("POST", "/v1/sandboxes/{id}/snapshots"),
    ("PUT", "/v1/sandboxes/{id}/networkpolicy"),
    ("PATCH", "/v1/sandboxes/{id}/networkpolicy"),
    ("DELETE", "/v1/sandboxes/{id}/networkpolicy"),
    ("POST", "/v1/pools"),
    ("PUT", "/v1/pools/p"),
    ("POST", "/v1/templates"),
    ("POST", "/v1/metrics/events"),
    ("POST", "/sandboxes"),
    ("POST", "/pools"),
];

#[tokio::test]
async fn bad_bodies_are_refused_alike_on_all_routes_and_never_repeated() {
    let server = Server::new().await;
    let id = server.create(minimal()).await.expect(202).id();
    let secret = "hunter2-very-secret, expected hunter2";
    let texts = [
        format!("\"{secret}\""),
        format!("{{\"image\": \"{secret}\", \"expiresAt\": \"{secret}\", \"k\": [\"{secret}\"]"),
        format!(
            "{{\"image\": \"{secret}\", \"expiresAt\": \"{secret}\", \"a\": {{\"b\": \"{secret}\"}}, \"name\": [\"{secret}\"], \"egress\": \"{secret}\"}}"
        ),
        format!("[{{\"action\": \"{secret}\", \"target\": \"{secret}\"}}, 7]"),
        secret.to_owned(),
        "[".repeat(2000),
        "nul".to_owned(),
        "{\"a\":1}{\"b\":2}".to_owned(),
        "\u{0}".to_owned(),
        "17".to_owned(),
    ];
    for (method, path) in BODIES {
        let path = path.replace("{id}", &id);
        for text in &texts {
            let request = Request::builder()
                .method(method)
                .uri(&path)
                .header("content-type", "application/json; charset=utf-8")
                .body(Body::from(text.clone()))
                .unwrap();
            let answer = server.send(request).await;
            assert_eq!(answer.status, 422, "{method} {path} {text}: {}", answer.text);
            let body = answer.json();
            assert!(!answer.text.contains("hunter2"), "{method} {path}: {}", answer.text);
            assert_eq!(body["code"], "GENERAL::UNKNOWN_ERROR");
            assert!(!body["message"].as_str().unwrap().is_empty());
            let issue = &body["detail"][0];
            assert_eq!(issue["loc"][0], "body");
            assert!(issue["msg"].is_string() && issue["type"].is_string() && issue.get("input").is_none());
        }
        // Without the content type, and too large.
        let request = Request::builder().method(method).uri(&path).body(Body::from("{}")).unwrap();
        server.send(request).await.expect(422);
        let large = Request::builder()
            .method(method)
            .uri(&path)
            .header("content-type", "application/json")
            .body(Body::from(vec![b' '; (4 << 20) + 1]))
            .unwrap();
        let answer = server.send(large).await.expect(413);
        assert_eq!(answer.code(), "GENERAL::UNKNOWN_ERROR");
    }
    server.get(&format!("/v1/sandboxes/{id}")).await.expect(200);
}

#[tokio::test]
async fn issues_name_the_place() {
    let server = Server::new().await;
    for (body, place, kind) in [
        (r#"{"image":{}}"#, r#"["body","image","uri"]"#, "missing"),
        (r#"{"entrypoint":["a",7]}"#, r#"["body","entrypoint",1]"#, "value_error"),
        (r#"{"env":{"A":{}}}"#, r#"["body","env","A"]"#, "value_error"),
        (r#"{"timeout":1.5}"#, r#"["body","timeout"]"#, "value_error"),
        (r#"{"lifecycle":{"x":1},"image":{"uri":"a"}}"#, r#"["body","lifecycle","x"]"#, "extra_forbidden"),
    ] {
        let request = Request::post("/v1/sandboxes")
            .header("content-type", "application/json")
            .body(Body::from(body))
            .unwrap();
        let answer = server.send(request).await.expect(422).json();
        assert_eq!(answer["detail"][0]["loc"].to_string(), place, "{answer}");
        assert_eq!(answer["detail"][0]["type"], kind, "{answer}");
    }
}

#[tokio::test]
async fn bodies_of_another_shape_are_told_in_words_of_json() {
    let server = Server::new().await;
    let id = server.create(minimal()).await.expect(202).id();
    let metadata = format!("/v1/sandboxes/{id}/metadata");
    let renew = format!("/v1/sandboxes/{id}/renew-expiration");
    for (method, path, body, message) in [
        ("POST", "/v1/sandboxes", r#"["host"]"#, "body: an object is expected"),
        ("POST", "/v1/sandboxes", "5", "body: an object is expected"),
        ("POST", "/v1/sandboxes", r#"{"image": "host"}"#, "body.image: an object is expected"),
        ("POST", "/v1/sandboxes", r#"{"entrypoint": "x"}"#, "body.entrypoint: a list is expected"),
        ("POST", "/v1/sandboxes", r#"{"env": [1]}"#, "body.env: an object is expected"),
        ("POST", "/v1/sandboxes", r#"{"image": ["host", null]}"#, "body.image: an object is expected"),
        (
            "POST",
            "/v1/sandboxes",
            r#"{"image": {"uri": "a", "auth": ["u", "p"]}}"#,
            "body.image.auth: an object is expected",
        ),
        (
            "POST",
            "/v1/sandboxes",
            r#"{"volumes": [{"name": "v", "mountPath": "/m", "host": ["/data"]}]}"#,
            "body.volumes.0.host: an object is expected",
        ),
        (
            "POST",
            "/v1/sandboxes",
            r#"{"networkPolicy": {"egress": [["allow", "a"]]}}"#,
            "body.networkPolicy.egress.0: an object is expected",
        ),
        (
            "POST",
            "/v1/sandboxes",
            r#"{"entrypoint": ["\ud83d"]}"#,
            "body.entrypoint.0: a text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character",
        ),
        ("POST", &renew, r#"["2050-01-01T00:00:00Z"]"#, "body: an object is expected"),
        ("PATCH", &metadata, "[]", "body: an object is expected"),
        ("POST", &renew, r#"{"expiresAt": null}"#, "body.expiresAt: a value of another type is expected"),
    ] {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let answer = server.send(request.body(Body::from(body)).unwrap()).await.expect(422);
        assert_eq!(answer.json()["message"], message, "{body}");
    }
}

#[tokio::test]
async fn a_path_that_is_no_text_is_a_path_that_does_not_exist() {
    let server = Server::new().await;
    for path in ["/v1/sandboxes/%ff", "/v1/sandboxes/%c3%28/endpoints/80", "/%ff"] {
        let answer = server.get(path).await.expect(404);
        assert_eq!(answer.code(), "GENERAL::UNKNOWN_ERROR", "{path}: {}", answer.text);
    }
}
