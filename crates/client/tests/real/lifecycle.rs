//! Making, finding, changing and ending sandboxes.

use std::collections::BTreeMap;
use std::time::Duration;

use opensandbox::protocol::time::WireTime;
use opensandbox::{Client, Error, ListFilter, LogQuery, MetricsEvent, SandboxState};

use crate::need;
use crate::server::{Guarded, server};

#[tokio::test]
async fn health_and_version_need_no_key() {
    let server = need!(server());
    let mut config = server.config();
    config.api_key = None;
    let client = Client::new(config).unwrap();
    client.health().await.unwrap();
    let version = client.server_version().await.unwrap();
    assert_eq!(version.split('.').count(), 3, "{version}");
    let error = client.list(&ListFilter::new()).await.unwrap_err();
    assert!(error.is_unauthorized(), "{error}");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn all_of_a_create_arrives() {
    let server = need!(server());
    let client = server.client();
    let before = WireTime::now();
    let work = async |sandbox: &opensandbox::Sandbox| {
        let info = sandbox.info().await?;
        assert_eq!(info.id, sandbox.id());
        assert_eq!(info.status.state, SandboxState::Running);
        assert_eq!(info.image.unwrap().uri, "host");
        assert_eq!(info.entrypoint, ["sleep", "600"]);
        assert_eq!(info.metadata.unwrap()["team"], "search");
        assert_eq!(info.extensions.unwrap()["opensandbox.extensions.note"], "x");
        let life = info.expires_at.unwrap().as_micros() - before.as_micros();
        assert!((89_000_000..120_000_000).contains(&life), "{life}");
        let output = sandbox.shell("echo $A $B; nproc --all >/dev/null").output().await?.checked()?;
        assert_eq!(output.stdout, "1 2\n");
        let metrics = sandbox.metrics().await?;
        assert!((metrics.mem_total_mib - 256.0).abs() < 1.0, "{metrics:?}");
        Ok::<_, Error>(sandbox.id().to_owned())
    };
    let id = client
        .create("host")
        .entrypoint(["sleep", "600"])
        .env("A", "1")
        .envs([("B", "2")])
        .metadata("team", "search")
        .extension("opensandbox.extensions.note", "x")
        .resource("cpu", "500m")
        .resource("memory", "256Mi")
        .platform("linux", std::env::consts::ARCH.replace("x86_64", "amd64").replace("aarch64", "arm64"))
        .timeout(Duration::from_secs(90))
        .run(work)
        .await
        .unwrap();
    let gone = client.sandbox(&id).info().await;
    let ended =
        gone.map_or_else(|error| error.is_not_found(), |info| info.status.state.as_str() != "Running");
    assert!(ended, "the sandbox outlived its work");
}

#[tokio::test]
async fn a_secured_sandbox_is_used_through_its_token() {
    let server = need!(server());
    let client = server.client();
    let work = async |sandbox: &opensandbox::Sandbox| {
        let service = sandbox.service(8000).await?;
        assert_eq!(service.headers.len(), 1);
        assert!(service.url.as_str().ends_with("/proxy/8000/"), "{}", service.url);
        sandbox.shell("true").output().await?.checked().map(drop)
    };
    client.create("host").secure_access().run(work).await.unwrap();
}

#[tokio::test]
async fn work_that_fails_leaves_no_sandbox() {
    let server = need!(server());
    let client = server.client();
    let label = format!("fails-{}", std::process::id());
    let work = async |sandbox: &opensandbox::Sandbox| sandbox.shell("exit 3").output().await?.checked();
    let error = client.create("host").metadata("test", &label).run(work).await.unwrap_err();
    assert!(matches!(&error, Error::Failed(output) if output.exit.code == Some(3)), "{error}");
    let left = client.list(&ListFilter::new().state("Running").label("test", &label)).await.unwrap();
    assert!(left.items.is_empty());
}

#[tokio::test]
async fn a_refused_create_says_why() {
    let server = need!(server());
    let client = server.client();
    let error = client.create("host").timeout(Duration::from_secs(1)).send().await.unwrap_err();
    let api = error.api().unwrap();
    assert!(matches!(api.status, 400 | 422) && api.request_id.is_some(), "{error}");
    let error = client.create("host").pool("none").send().await.unwrap_err();
    assert_eq!(error.status(), Some(400), "{error}");
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let server = need!(server());
    let client = server.client();
    let label = format!("a&b=c d/{}", std::process::id()).replace([' ', '&', '=', '/'], "_");
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(client.create("host").metadata("group", &label).skip_ready_check().send().await.unwrap());
    }
    let mut filter = ListFilter::new().state("Running").state("Pending").label("group", &label);
    let page = client.list(&ListFilter { page_size: Some(2), ..filter.clone() }).await.unwrap();
    assert_eq!((page.items.len(), page.pagination.total_items, page.pagination.has_next_page), (2, 3, true));

    filter.page_size = Some(1);
    let all = client.list_all(filter.clone()).collect().await.unwrap();
    let newest_first: Vec<&str> = ids.iter().rev().map(opensandbox::Sandbox::id).collect();
    assert_eq!(all.iter().map(|sandbox| sandbox.id.as_str()).collect::<Vec<_>>(), newest_first);
    filter.page = Some(3);
    let mut last = client.list_all(filter);
    assert_eq!(last.next().await.unwrap().unwrap().id, ids[0].id());
    assert!(last.next().await.unwrap().is_none());
    for sandbox in ids {
        sandbox.kill().await.unwrap();
    }
    let none = client.list_all(ListFilter::new().state("Running").label("group", &label)).collect().await;
    assert!(none.unwrap().is_empty());
}

#[tokio::test]
async fn labels_and_lifetime_change() {
    let sandbox = need!(Guarded::start().await);
    let patch = |key: &str, value: Option<&str>| BTreeMap::from([(key.to_owned(), value.map(str::to_owned))]);
    let info = sandbox.patch_metadata(patch("a", Some("1"))).await.unwrap();
    assert_eq!(info.metadata.unwrap()["a"], "1");
    let info = sandbox.patch_metadata(patch("a", None)).await.unwrap();
    assert!(info.metadata.is_none_or(|metadata| !metadata.contains_key("a")));
    let end = sandbox.renew(Duration::from_secs(7200)).await.unwrap();
    assert_eq!(sandbox.info().await.unwrap().expires_at, Some(end));
}

#[tokio::test]
async fn connect_finds_what_runs_and_nothing_else() {
    let sandbox = need!(Guarded::start().await);
    let again = sandbox.client().connect(sandbox.id()).await.unwrap();
    again.ping().await.unwrap();
    let error = sandbox.client().connect("0123456789abcdef").await.unwrap_err();
    assert!(error.is_not_found() && error.request_id().is_some(), "{error}");
    sandbox.kill().await.unwrap();
    assert!(again.shell("true").output().await.is_err());
}

#[tokio::test]
async fn an_end_is_seen() {
    let server = need!(server());
    let limit = Duration::from_secs(20);
    let ends = server.client().create("host").entrypoint(["sh", "-c", "echo bye; sleep 0.3; exit 3"]);
    let sandbox = ends.skip_ready_check().send().await.unwrap();
    let ended = sandbox.wait_state(&SandboxState::Failed, limit).await.unwrap();
    assert!(ended.status.reason.is_some());
    let error = sandbox.wait_state(&SandboxState::Paused, limit).await.unwrap_err();
    assert!(matches!(error, Error::Ended { .. }), "{error}");
    let _ = sandbox.kill().await;
}

#[tokio::test]
async fn diagnostics_tell_of_output_and_events() {
    let server = need!(server());
    let entrypoint = ["sh", "-c", "echo one; echo two; exec sleep 600"];
    let work = async |sandbox: &opensandbox::Sandbox| {
        let diagnostics = sandbox.diagnostics();
        let mut logs = diagnostics.logs("container").await?;
        for _ in 0..100 {
            if logs.content.as_deref().is_some_and(|text| text.contains("two")) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            logs = diagnostics.logs("container").await?;
        }
        assert_eq!((logs.content.as_deref(), logs.truncated), (Some("one\ntwo\n"), false));
        let last = diagnostics.logs_text(&LogQuery { tail: Some(1), ..LogQuery::default() }).await?;
        assert_eq!(last, "two\n");
        assert!(diagnostics.events("runtime").await?.content.is_some());
        assert!(diagnostics.events_text(10).await?.contains(sandbox.id()));
        assert!(diagnostics.inspect().await?.contains("Running"));
        assert!(diagnostics.summary(10, 10).await?.contains("one"));
        let error = diagnostics.logs("nonsense").await.unwrap_err();
        assert_eq!(error.status(), Some(400), "{error}");
        Ok::<_, Error>(())
    };
    server.client().create("host").entrypoint(entrypoint).run(work).await.unwrap();
}

#[tokio::test]
async fn measurements_are_taken_in() {
    let server = need!(server());
    let event = MetricsEvent {
        event_type: "sandbox.create".to_owned(),
        sandbox_id: None,
        image: None,
        create_duration_ms: 3,
        success: false,
    };
    server.client().report(&event).await.unwrap();
}

#[tokio::test]
async fn an_entrypoint_that_ends_is_told_at_once() {
    let server = need!(server());
    let began = std::time::Instant::now();
    let made = server.client().create("host").entrypoint(["sh", "-c", "exit 3"]).send().await;
    let error = match made {
        Err(error) => error,
        Ok(sandbox) => loop {
            // The daemon may answer once before the shell has got that far.
            match sandbox.wait_ready(Duration::from_secs(30)).await {
                Err(error) => break error,
                Ok(()) => assert!(began.elapsed() < Duration::from_secs(10), "it goes on"),
            }
        },
    };
    assert!(matches!(&error, Error::Ended { reason, .. } if reason.contains('3')), "{error}");
    assert!(began.elapsed() < Duration::from_secs(10));
}
