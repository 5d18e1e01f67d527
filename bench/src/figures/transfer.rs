//! Big files through the server.

use std::time::Instant;

use anyhow::{Result, ensure};
use bytes::Bytes;

use crate::server::{Execd, Options, Server};
use crate::stats::{Samples, print_one, process_mib};

const CHUNK: usize = 1 << 20;

pub(crate) async fn one_gib() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    conn.upload(&id, "/tmp/warm", Bytes::from(vec![1; CHUNK]), 8).await?;
    conn.download(&id, "/tmp/warm").await?;
    let execd = Execd::of(&mut conn, &id).await?;
    let idle = process_mib(server.pid(), "VmRSS:");
    let idle_daemon = process_mib(execd.daemon, "VmRSS:");
    let (mut up, mut down) = (Samples::default(), Samples::default());
    for _ in 0..3 {
        let began = Instant::now();
        conn.upload(&id, "/tmp/big", Bytes::from(vec![7; CHUNK]), 1024).await?;
        up.push(1024.0 * 1.048_576 / began.elapsed().as_secs_f64());
        let began = Instant::now();
        let size = conn.download(&id, "/tmp/big").await?;
        down.push(1024.0 * 1.048_576 / began.elapsed().as_secs_f64());
        ensure!(size == 1 << 30, "download gave {size} bytes");
    }
    up.print("upload_1gib", "MB/s", None);
    down.print("download_1gib", "MB/s", None);
    print_one("transfer_server_peak_above_idle", "MiB", process_mib(server.pid(), "VmHWM:") - idle, None);
    let peak = process_mib(execd.daemon, "VmHWM:");
    print_one("transfer_execd_peak_above_idle", "MiB", peak - idle_daemon, None);
    conn.delete(&id).await?;
    Ok(())
}

/// One upload call with many files, as an SDK writes a project.
pub(crate) async fn small_files() -> Result<()> {
    const FILES: usize = 1000;
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    let contents = Bytes::from(vec![b'z'; 4096]);
    let mut samples = Samples::default();
    for round in 0..super::count(20) + 2 {
        let began = Instant::now();
        let done = conn.upload_many(&id, &format!("/tmp/small/{round}"), &contents, FILES).await;
        if round >= 2 {
            samples.push_or_fail(done.map(|()| began.elapsed()));
        }
    }
    conn.delete(&id).await?;
    samples.print("upload_1000_files_of_4kib", "ms", None);
    Ok(())
}
