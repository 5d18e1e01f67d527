//! Create: what is refused and how, and what a good one answers.

use std::sync::atomic::Ordering;
use std::time::Duration;

use osb_protocol::boot::LineEndings;
use serde_json::{Value, json};

use crate::support::{Server, minimal, with};

#[tokio::test]
async fn every_refusal_has_its_status_and_code() {
    let server =
        Server::with("server.max_sandbox_timeout_seconds = 3600\nstorage.allowed_host_paths = [\"/data\"]\n")
            .await;
    let unknown = "GENERAL::UNKNOWN_ERROR";
    let parameter = "SANDBOX::INVALID_PARAMETER";
    let host = |path: &str| json!({"volumes": [{"name": "v", "mountPath": "/m", "host": {"path": path}}]});
    let table: Vec<(Value, u16, &str)> = vec![
        // Members.
        (json!({"timeout": 59}), 422, unknown),
        (json!({"timeout": 60.5}), 422, unknown),
        (json!({"timeout": "soon"}), 422, unknown),
        (json!({"entrypoint": []}), 422, unknown),
        (json!({"entrypoint": "sleep inf"}), 422, unknown),
        (json!({"metadata": {"a": 1}}), 422, unknown),
        (json!({"env": {"A": 1}}), 422, unknown),
        (json!({"secureAccess": "maybe"}), 422, unknown),
        (json!({"image": {"auth": {"username": "u", "password": "p"}}}), 422, unknown),
        (json!({"image": {"uri": "x", "auth": {"username": "u"}}}), 422, unknown),
        (json!({"networkPolicy": {"defaultAction": "maybe"}}), 422, unknown),
        (json!({"networkPolicy": {"egress": [{"action": "allow", "target": ""}]}}), 422, unknown),
        (json!({"lifecycle": {"surprise": 1}}), 422, unknown),
        (json!({"lifecycle": {"preStart": {"command": []}}}), 422, unknown),
        (json!({"lifecycle": {"preStart": {"command": ["a"], "timeoutSeconds": 0}}}), 422, unknown),
        (json!({"volumes": [{"name": "v", "mountPath": "/m"}]}), 422, unknown),
        (json!({"volumes": [{"name": "V", "mountPath": "/m", "host": {"path": "/data"}}]}), 422, unknown),
        (json!({"volumes": [{"name": "v", "mountPath": "m", "host": {"path": "/data"}}]}), 422, unknown),
        (json!({"volumes": [{"name": "v", "mountPath": "/m", "host": {"path": "data"}}]}), 422, unknown),
        // Rules between members.
        (json!({"env": {"OPENSANDBOX_LIFECYCLE": "{}"}}), 422, unknown),
        (json!({"templateId": "t"}), 422, unknown),
        (json!({"extensions": {"poolRef": "p"}, "lifecycle": {}}), 422, unknown),
        (json!({"credentialProxy": {"enabled": true}}), 422, unknown),
        (json!({"image": null}), 422, unknown),
        (json!({"image": {"uri": "  "}}), 422, unknown),
        (json!({"snapshotId": "s"}), 422, unknown),
        (json!({"entrypoint": null}), 422, unknown),
        (json!({"resourceLimits": null}), 422, unknown),
        // Values.
        (json!({"extensions": {"access.renew.extend.seconds": ""}}), 400, parameter),
        (json!({"extensions": {"access.renew.extend.seconds": "299"}}), 400, parameter),
        (json!({"image": null, "snapshotId": "s"}), 404, "SNAPSHOT::NOT_FOUND"),
        (json!({"lifecycle": {"preStart": {"command": ["a", "\u{0}"]}}}), 400, parameter),
        (
            json!({"lifecycle": {"periodic": [{"name": "a", "schedule": "61 * * * *", "command": ["a"]}]}}),
            400,
            parameter,
        ),
        (
            json!({"lifecycle": {"periodic": [{"name": "a", "schedule": "@reboot", "command": ["a"]}]}}),
            400,
            parameter,
        ),
        (
            json!({"lifecycle": {"periodic": vec![json!({"name": "a", "schedule": "@daily", "command": ["a"]}); 2]}}),
            422,
            unknown,
        ),
        (
            json!({"lifecycle": {"periodic": [{"name": " ", "schedule": "@daily", "command": ["a"]}]}}),
            422,
            unknown,
        ),
        (
            json!({"lifecycle": {"periodic": [{"name": "a", "schedule": "@daily", "command": ["a"], "timeoutSeconds": 301}]}}),
            422,
            unknown,
        ),
        (json!({"lifecycle": {"preStart": {"command": ["a"], "timeout": 3}}}), 422, unknown),
        (json!({"extensions": {"poolRef": "p"}}), 400, "SANDBOX::UNSUPPORTED_POOL_REF"),
        (json!({"entrypoint": [""]}), 400, "DOCKER::INVALID_ENTRYPOINT"),
        (json!({"entrypoint": ["sh -c 'open"]}), 400, parameter),
        (json!({"entrypoint": ["echo", "x".repeat(128 << 10)]}), 400, parameter),
        (json!({"entrypoint": vec!["echo"; 200_000]}), 400, parameter),
        (json!({"env": {"A": "x".repeat(128 << 10)}}), 400, parameter),
        (json!({"metadata": {"a b": "x"}}), 400, "SANDBOX::INVALID_METADATA_LABEL"),
        (json!({"metadata": {"a": "x y"}}), 400, "SANDBOX::INVALID_METADATA_LABEL"),
        (json!({"metadata": {"opensandbox.io/id": "x"}}), 400, "SANDBOX::INVALID_METADATA_LABEL"),
        (json!({"platform": {"os": "plan9", "arch": "amd64"}}), 400, parameter),
        (json!({"platform": {"os": "linux", "arch": "sparc"}}), 400, parameter),
        (json!({"platform": {"os": "windows", "arch": "amd64"}}), 400, parameter),
        (json!({"timeout": 3601}), 400, parameter),
        (json!({"networkPolicy": {}}), 400, parameter),
        (json!({"resourceLimits": {"cpu": "0"}}), 400, parameter),
        (json!({"resourceLimits": {"memory": "1.5Gi"}}), 400, parameter),
        (json!({"resourceLimits": {"gpu": "1"}}), 400, parameter),
        (json!({"resourceLimits": {"pids": "many"}}), 400, parameter),
        (json!({"env": {"OPENSANDBOX_EGRESS_MITMPROXY_SCRIPT": "x"}}), 400, parameter),
        (json!({"env": {"A=B": "x"}}), 400, parameter),
        (host("/etc"), 400, "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (host("/data-evil"), 400, "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (host("/data/../etc"), 400, "VOLUME::INVALID_HOST_PATH"),
        (host("/data/"), 400, "VOLUME::INVALID_HOST_PATH"),
        (host("/data/x"), 400, parameter),
        (
            json!({"volumes": [{"name": "v", "mountPath": "/m", "subPath": "../x", "pvc": {"claimName": "c"}}]}),
            400,
            "VOLUME::INVALID_SUB_PATH",
        ),
        (
            json!({"volumes": [{"name": "v", "mountPath": "/m", "pvc": {"claimName": "c"}},
                               {"name": "v", "mountPath": "/n", "pvc": {"claimName": "c"}}]}),
            400,
            "VOLUME::DUPLICATE_NAME",
        ),
        // The runtime's word.
        (json!({"image": {"uri": "absent"}}), 500, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
        (json!({"image": {"uri": "broken"}}), 500, "DOCKER::SANDBOX_START_FAILED"),
        (json!({"image": {"uri": "picky"}}), 400, parameter),
        (json!({"image": {"uri": "full"}}), 429, "SANDBOX::CAPACITY_EXHAUSTED"),
        (json!({"entrypoint": ["/no/such"]}), 400, parameter),
    ];
    for (changes, status, code) in table {
        let answer = server.create(with(changes.clone())).await;
        assert_eq!(
            (answer.status.as_u16(), answer.code().as_str()),
            (status, code),
            "{changes}: {}",
            answer.text
        );
        assert!(!answer.json()["message"].as_str().unwrap().is_empty());
    }
    // A template names no entrypoint, which is what it ends in.
    let body = json!({"templateId": "t", "timeout": 60});
    assert_eq!(server.create(body).await.expect(400).code(), "DOCKER::INVALID_ENTRYPOINT");
    assert_eq!(server.create(with(json!({"image": {"uri": "full"}}))).await.header("retry-after"), "2");
    assert_eq!(server.fake.live(), 0);
    assert_eq!(server.get("/v1/sandboxes").await.json()["pagination"]["totalItems"], 0);
}

#[tokio::test]
async fn the_answer_has_all_members_and_no_nulls() {
    let server = Server::with("execd.line_endings = \"strip\"\n").await;
    let body = with(json!({
        "timeout": "600", "metadata": {"team": "x"}, "env": {"A": "b", "N": null, "OPENSANDBOX_EGRESS_LOG_LEVEL": "x"},
        "platform": {"os": " Linux ", "arch": if cfg!(target_arch = "x86_64") { "AMD64" } else { "arm64" }},
        "extensions": {"some.unknown": "1", "opensandbox.extensions.a": "b"}, "surprise": {"ignored": true},
        "resource_limits": null, "resourceLimits": {"cpu": "500m", "memory": "1Gi", "other": "x"},
        "secureAccess": false, "volumes": null, "networkPolicy": null,
    }));
    let mut body = body;
    body.as_object_mut().unwrap().remove("resource_limits");
    let answer = server.create(body).await.expect(202);
    let created = answer.json();
    assert!(!answer.text.contains("null"), "{}", answer.text);
    assert_eq!(created["status"]["state"], "Running");
    assert_eq!(created["status"]["reason"], "CONTAINER_RUNNING");
    assert_eq!(created["metadata"], json!({"team": "x"}));
    assert_eq!(created["extensions"], json!({"opensandbox.extensions.a": "b"}), "others are not told");
    assert_eq!(created["platform"]["os"], "linux");
    assert_eq!(created["entrypoint"], json!(["sleep", "inf"]));
    let timing = answer.header("server-timing");
    for stage in ["parse;dur=", "clone;dur=0.700", "mount;dur=0.080", "store;dur="] {
        assert!(timing.contains(stage), "{timing}");
    }
    let shown = server.get(&format!("/sandboxes/{}", answer.id())).await.expect(200);
    assert!(!shown.text.contains("null"));
    let shown = shown.json();
    for member in
        ["id", "status", "metadata", "extensions", "platform", "expiresAt", "createdAt", "entrypoint"]
    {
        assert_eq!(created[member], shown[member], "{member}");
    }
    assert_eq!(shown["image"], json!({"uri": "python:3.12"}));
    let specs = server.fake.specs.lock().unwrap();
    let spec = &specs[0];
    assert_eq!(spec.env, [("A".to_owned(), "b".to_owned())]);
    assert_eq!(spec.limits.cpu.unwrap().millis(), 500);
    assert_eq!(spec.limits.memory.unwrap().0, 1 << 30);
    assert_eq!(spec.line_endings, LineEndings::Strip);
}

#[tokio::test]
async fn no_timeout_means_no_expiry() {
    let server = Server::new().await;
    for body in [minimal(), with(json!({"timeout": null}))] {
        let answer = server.create(body).await.expect(202);
        assert!(answer.json().get("expiresAt").is_none());
    }
}

#[tokio::test]
async fn one_text_is_split_as_a_shell_would() {
    let server = Server::new().await;
    let answer = server.create(with(json!({"entrypoint": ["sh -c 'sleep 1; true'"]}))).await.expect(202);
    assert_eq!(answer.json()["entrypoint"], json!(["sh -c 'sleep 1; true'"]), "shown as asked for");
    let argv = ["bash", "-c", "echo a && echo 'b c' > /tmp/o"];
    server.create(with(json!({"entrypoint": argv}))).await.expect(202);
    let specs = server.fake.specs.lock().unwrap();
    assert_eq!(specs[0].entrypoint, ["sh", "-c", "sleep 1; true"]);
    assert_eq!(specs[1].entrypoint, argv);
}

#[tokio::test]
async fn strict_servers_refuse_unknown_members_everywhere_but_in_maps() {
    let server = Server::with("server.strict_requests = true\n").await;
    for changes in [
        json!({"surprise": 1}),
        json!({"image": {"uri": "x", "tag": "y"}}),
        json!({"credentialProxy": {"enabled": false, "x": 1}}),
    ] {
        let answer = server.create(with(changes)).await.expect(422);
        assert_eq!(answer.json()["detail"][0]["type"], "extra_forbidden");
    }
    server
        .create(with(json!({"extensions": {"x": "y"}, "env": {"a": "b"}, "metadata": {"m": "n"}})))
        .await
        .expect(202);
}

#[tokio::test]
async fn snake_case_members_are_read() {
    let server = Server::new().await;
    let mut body = minimal();
    let limits = body.as_object_mut().unwrap().remove("resourceLimits").unwrap();
    body["resource_limits"] = limits;
    body["secure_access"] = json!(true);
    let id = server.create(body).await.expect(202).id();
    let endpoint = server.get(&format!("/v1/sandboxes/{id}/endpoints/80")).await.expect(200).json();
    assert_eq!(endpoint["headers"]["OpenSandbox-Secure-Access"].as_str().unwrap().len(), 32);
    let proxied = server.get(&format!("/v1/sandboxes/{id}/proxy/80/")).await.expect(401);
    assert_eq!(proxied.code(), "MISSING_OR_INVALID_SECURE_ACCESS");
}

#[tokio::test]
async fn an_entrypoint_that_ends_at_once_is_seen() {
    let server = Server::new().await;
    let id = server.create(with(json!({"image": {"uri": "brief"}}))).await.expect(202).id();
    let sandbox = server.until(&id, "Failed").await;
    assert_eq!(sandbox["status"]["reason"], "CONTAINER_EXITED_ERROR");
    assert!(sandbox["status"]["message"].as_str().unwrap().contains("code 3"));
}

#[tokio::test]
async fn a_client_that_leaves_gets_its_sandbox_deleted() {
    let server = Server::new().await;
    let body = with(json!({"image": {"uri": "slow"}}));
    {
        let mut call = Box::pin(server.create(body.clone()));
        while server.fake.at_gate.load(Ordering::SeqCst) == 0 {
            let left = tokio::time::timeout(Duration::from_millis(5), &mut call).await;
            assert!(left.is_err(), "the runtime still works on it");
        }
    }
    server.fake.gate.add_permits(1);
    // Deleted first, forgotten then.
    let mut listed = json!(1);
    for _ in 0..4000 {
        listed = server.get("/v1/sandboxes").await.json()["pagination"]["totalItems"].clone();
        if server.fake.deleted.load(Ordering::SeqCst) == 1 && listed == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!((server.fake.deleted.load(Ordering::SeqCst), listed), (1, json!(0)));
    // Who stays gets it.
    server.fake.gate.add_permits(1);
    server.create(body).await.expect(202);
    assert_eq!(server.fake.live(), 1);
}

#[tokio::test]
async fn a_created_sandbox_is_in_lists_before_its_answer() {
    let server = Server::new().await;
    for n in 1..=20 {
        server.create(minimal()).await.expect(202);
        assert_eq!(server.get("/v1/sandboxes").await.json()["pagination"]["totalItems"], n);
    }
}
