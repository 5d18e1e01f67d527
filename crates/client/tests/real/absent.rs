//! Functions that this server or its daemon does not offer: the real answer becomes an error that says so.

use opensandbox::protocol::time::WireTime;
use opensandbox::{CreatePoolRequest, Error, PoolCapacitySpec, Result};

use crate::need;
use crate::server::Guarded;

fn unsupported<T: std::fmt::Debug>(what: &str, result: Result<T>) {
    let error = result.unwrap_err();
    assert!(error.is_unsupported() && !error.is_not_found() && !error.is_retryable(), "{what}: {error:?}");
    assert!(matches!(&error, Error::Api(api) if api.request_id.is_some()), "{what}: {error:?}");
}

#[tokio::test]
async fn the_server_says_what_its_runtime_lacks() {
    let sandbox = need!(Guarded::start().await);
    let client = sandbox.client();
    unsupported("pause", sandbox.pause().await);
    unsupported("resume", sandbox.resume().await);
    unsupported("snapshot", sandbox.create_snapshot(Some("s")).await);
    let error = client.snapshots().get("none").await.unwrap_err();
    assert!(error.is_not_found(), "{error}");
    assert!(client.snapshots().list_all(Default::default()).collect().await.unwrap().is_empty());
    let expires = WireTime::now().plus_seconds(600).unwrap();
    unsupported("signed endpoint", sandbox.signed_endpoint(8000, expires).await);

    let capacity = PoolCapacitySpec { buffer_max: 1, buffer_min: 0, pool_max: 1, pool_min: 0 };
    let pool = CreatePoolRequest {
        name: "p".to_owned(),
        template: Default::default(),
        capacity_spec: capacity.clone(),
    };
    unsupported("pool", client.pools().create(&pool).await);
    unsupported("pools", client.pools().list().await);
    unsupported("pool", client.pools().get("p").await);
    unsupported("pool", client.pools().resize("p", capacity).await);
    unsupported("pool", client.pools().delete("p").await);
    unsupported("templates", client.templates().list(&Default::default()).await);
    unsupported("template", client.templates().get("t").await);
    unsupported("template", client.templates().delete("t").await);
}

#[tokio::test]
async fn the_daemon_says_what_it_lacks() {
    let sandbox = need!(Guarded::start().await);
    unsupported("context", sandbox.code().create_context("python", None).await);
    unsupported("cell", sandbox.code().run("python", "1").output().await);
}
