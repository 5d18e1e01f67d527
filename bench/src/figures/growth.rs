//! What the number of live sandboxes costs.

use std::time::Instant;

use anyhow::Result;

use super::count;
use crate::http::Conn;
use crate::server::{Options, Server};
use crate::stats::Samples;

const MANY: usize = 500;

pub(crate) async fn one_against_many() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let mut ids = vec![conn.create(&server.image).await?];
    conn.exec(&ids[0], "true").await?;
    let few = round(&mut conn, &server.image, &ids[0]).await?;
    while ids.len() < MANY {
        ids.push(conn.create(&server.image).await?);
    }
    server.settle().await;
    let many = round(&mut conn, &server.image, &ids[0]).await?;
    for ((name, few), (_, many)) in few.iter().zip(&many) {
        many.print(&format!("{name}_with_{MANY}"), "ms", Some(("with 1 live", few.p50())));
    }
    for id in ids {
        conn.delete(&id).await?;
    }
    Ok(())
}

async fn round(conn: &mut Conn, image: &str, id: &str) -> Result<Vec<(&'static str, Samples)>> {
    let calls = [
        ("get", format!("/v1/sandboxes/{id}")),
        ("list_20", "/v1/sandboxes?pageSize=20".to_owned()),
        ("proxy_ping", format!("/v1/sandboxes/{id}/proxy/44772/ping")),
    ];
    let mut all = Vec::new();
    for (name, path) in calls {
        let mut samples = Samples::default();
        for _ in 0..count(1000) {
            let began = Instant::now();
            let (status, _) = conn.call("GET", &path, "").await?;
            if status.is_success() { samples.push_ms(began.elapsed()) } else { samples.fail() }
        }
        all.push((name, samples));
    }
    let mut samples = Samples::default();
    for _ in 0..count(300) {
        let began = Instant::now();
        let id = conn.create(image).await?;
        samples.push_ms(began.elapsed());
        conn.delete(&id).await?;
    }
    all.push(("create", samples));
    Ok(all)
}
