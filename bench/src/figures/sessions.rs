//! Commands in an open shell session.

use std::time::Instant;

use anyhow::Result;

use super::count;
use crate::server::{Options, Server};
use crate::stats::Samples;

pub(crate) async fn one_by_one() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    let session = conn.session(&id).await?;
    let mut samples = Samples::default();
    let mut external = Samples::default();
    for round in 0..count(1000) + 20 {
        let began = Instant::now();
        let ran = conn.session_run(&id, &session, "true").await;
        let took = began.elapsed();
        let began = Instant::now();
        let ran_external = conn.session_run(&id, &session, "/bin/true").await;
        let took_external = began.elapsed();
        if round >= 20 {
            samples.push_or_fail(ran.map(|()| took));
            external.push_or_fail(ran_external.map(|()| took_external));
        }
    }
    conn.delete(&id).await?;
    samples.print("session_true", "ms", None);
    external.print("session_bin_true", "ms", None);
    Ok(())
}
