//! Isolated sessions: their start, and a run in an open one.

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
    conn.output(&id, "mkdir -p /workspace").await?;
    for (mode, name) in [("overlay", "isolated_start"), ("rw", "isolated_start_rw")] {
        let mut samples = Samples::default();
        for round in 0..count(500) + 20 {
            let began = Instant::now();
            let session = conn.isolated(&id, mode).await;
            let took = began.elapsed();
            if let Ok(session) = &session {
                conn.isolated_delete(&id, session).await?;
            }
            if round >= 20 {
                samples.push_or_fail(session.map(|_| took));
            }
        }
        samples.print(name, "ms", None);
    }
    let session = conn.isolated(&id, "overlay").await?;
    let mut samples = Samples::default();
    for round in 0..count(1000) + 20 {
        let began = Instant::now();
        let ran = conn.isolated_run(&id, &session, "true").await;
        let took = began.elapsed();
        if round >= 20 {
            samples.push_or_fail(ran.map(|()| took));
        }
    }
    conn.delete(&id).await?;
    samples.print("isolated_true", "ms", None);
    Ok(())
}
