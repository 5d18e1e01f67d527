//! Lists, metadata and its patches.

use serde_json::{Value, json};

use crate::support::{Server, with};

async fn three() -> (Server, Vec<String>) {
    let server = Server::new().await;
    let mut ids = Vec::new();
    for metadata in [
        json!({"project": "Apollo", "n": "1"}),
        json!({"project": "Apollo", "n": "2", "empty": ""}),
        json!({"project": "Gemini", "x.y/z": "a_b"}),
    ] {
        ids.push(server.create(with(json!({ "metadata": metadata }))).await.expect(202).id());
    }
    (server, ids)
}

fn found(list: &Value) -> Vec<String> {
    list["items"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn filters_hold_together() {
    let (server, ids) = three().await;
    server.fake.end(ids[1].parse().unwrap(), 0);
    server.until(&ids[1], "Terminated").await;
    let (a, b, c) = (&ids[0], &ids[1], &ids[2]);
    for (query, expected) in [
        ("", vec![c, b, a]),
        ("?metadata=", vec![c, b, a]),
        ("?state=running", vec![c, a]),
        ("?state=Running&state=TERMINATED", vec![c, b, a]),
        ("?state=dreaming", vec![]),
        ("?metadata=project%3DApollo", vec![b, a]),
        ("?metadata=project=Apollo", vec![b, a]),
        // Encoded once more inside, as one client does.
        ("?metadata=project%3DApollo%26n%3D%2532", vec![b]),
        ("?metadata=x.y%252Fz%3Da_b", vec![c]),
        ("?metadata=empty%3D", vec![b]),
        ("?metadata=n%3D1%26n%3D2", vec![b]),
        ("?state=running&metadata=project%3DApollo", vec![a]),
        ("?pageSize=2", vec![c, b]),
        ("?pageSize=2&page=2", vec![a]),
        ("?pageSize=2&page=3", vec![]),
        ("?metadata=project%3DApollo&pageSize=1&page=2", vec![a]),
    ] {
        let answer = server.get(&format!("/v1/sandboxes{query}")).await.expect(200);
        assert_eq!(found(&answer.json()).iter().collect::<Vec<_>>(), expected, "{query}");
    }
    let pagination = server.get("/sandboxes?pageSize=2").await.json()["pagination"].clone();
    assert_eq!(
        pagination,
        json!({"page": 1, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": true})
    );
    for query in ["?metadata=team%3Dinfra%26broken", "?metadata=x", "?metadata=a%3Db%26"] {
        let answer = server.get(&format!("/v1/sandboxes{query}")).await.expect(400);
        assert_eq!(answer.code(), "INVALID_METADATA_FORMAT", "{query}");
    }
    for query in ["?page=0", "?page=x", "?pageSize=0", "?pageSize=201", "?page=-1"] {
        server.get(&format!("/v1/sandboxes{query}")).await.expect(422);
    }
}

#[tokio::test]
async fn patches_merge() {
    let (server, ids) = three().await;
    let path = format!("/v1/sandboxes/{}/metadata", ids[0]);
    let patch = |body: Value| server.call("PATCH", &path, Some(body));
    let answer = patch(json!({"n": null, "absent": null, "new": "x"})).await.expect(200);
    assert_eq!(answer.json()["metadata"], json!({"project": "Apollo", "new": "x"}));
    let answer = patch(json!({})).await.expect(200);
    assert_eq!(answer.json()["metadata"], json!({"project": "Apollo", "new": "x"}));
    for (body, status, code) in [
        (json!({"opensandbox.io/x": null}), 400, "INVALID_METADATA_LABEL"),
        (json!({"opensandbox.io/x": "y"}), 400, "INVALID_METADATA_LABEL"),
        (json!({"a b": "y"}), 400, "SANDBOX::INVALID_METADATA_LABEL"),
        (json!({"a": "y z"}), 400, "SANDBOX::INVALID_METADATA_LABEL"),
        (json!({"a": 1}), 422, "GENERAL::UNKNOWN_ERROR"),
        (json!([]), 422, "GENERAL::UNKNOWN_ERROR"),
    ] {
        let answer = patch(body.clone()).await;
        assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{body}");
    }
    server.call("PATCH", "/v1/sandboxes/nope/metadata", Some(json!({}))).await.expect(404);
    let answer = patch(json!({"project": null, "new": null})).await.expect(200);
    assert!(answer.json().get("metadata").is_none());
}

#[tokio::test]
async fn parallel_patches_lose_nothing() {
    let (server, ids) = three().await;
    let path = format!("/v1/sandboxes/{}/metadata", ids[2]);
    let calls = (0..64).map(|n| server.call("PATCH", &path, Some(json!({ format!("k{n}"): n.to_string() }))));
    for answer in futures_util::future::join_all(calls).await {
        answer.expect(200);
    }
    let metadata = server.get(&format!("/v1/sandboxes/{}", ids[2])).await.json()["metadata"].clone();
    assert_eq!(metadata.as_object().unwrap().len(), 66);
}
