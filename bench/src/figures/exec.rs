//! Commands in an open sandbox.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::count;
use crate::server::{Options, Server};
use crate::stats::{Samples, print_rate};

pub(crate) async fn one_by_one() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    let mut samples = Samples::default();
    let mut bare = Samples::default();
    let (mut direct, mut bare_direct, mut by_text) =
        (Samples::default(), Samples::default(), Samples::default());
    for round in 0..count(1000) + 20 {
        let began = Instant::now();
        let ran = conn.exec(&id, "true").await;
        let took = began.elapsed();
        let began = Instant::now();
        Command::new("bash").args(["-c", "true"]).status()?;
        let alone = began.elapsed();
        let began = Instant::now();
        let ran_direct = conn.exec_true(&id).await;
        let took_direct = began.elapsed();
        let began = Instant::now();
        Command::new("/bin/true").status()?;
        let alone_direct = began.elapsed();
        let began = Instant::now();
        let ran_by_text = conn.exec(&id, "/bin/true").await;
        let took_by_text = began.elapsed();
        if round < 20 {
            continue;
        }
        samples.push_or_fail(ran.map(|()| took));
        bare.push_ms(alone);
        direct.push_or_fail(ran_direct.map(|()| took_direct));
        bare_direct.push_ms(alone_direct);
        by_text.push_or_fail(ran_by_text.map(|()| took_by_text));
    }
    conn.delete(&id).await?;
    samples.print("exec_true", "ms", Some(("bash -c true", bare.p50())));
    by_text.print("exec_bin_true", "ms", Some(("/bin/true", bare_direct.p50())));
    direct.print("exec_true_argv", "ms", Some(("/bin/true", bare_direct.p50())));
    Ok(())
}

/// The sandbox may use all processors: with one, its limit would be what is measured.
pub(crate) async fn sixteen() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let processors = std::thread::available_parallelism()?.get();
    let id = conn.create_with(&server.image, processors).await?;
    for (name, command) in [("exec_16_at_once", "true"), ("exec_16_at_once_bin_true", "/bin/true")] {
        let until = Instant::now() + Duration::from_secs(10);
        let began = Instant::now();
        let mut tasks = Vec::new();
        for _ in 0..16 {
            let mut conn = server.conn().await?;
            let id = id.clone();
            tasks.push(tokio::spawn(async move {
                let (mut done, mut failed) = (0_u32, 0_u32);
                while Instant::now() < until {
                    match conn.exec(&id, command).await {
                        Ok(()) => done += 1,
                        Err(_) => failed += 1,
                    }
                }
                (done, failed)
            }));
        }
        print_rate(name, began, tasks).await?;
    }
    conn.delete(&id).await?;
    Ok(())
}
