//! The server and idle sandboxes.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::server::{Execd, Options, Server};
use crate::stats::{Samples, mem_available_kib, print_one, private_mib, process_mib};

pub(crate) async fn ready_and_idle() -> Result<()> {
    let mut ready = Samples::default();
    let mut resident = Samples::default();
    for _ in 0..5 {
        let server = Server::start(Options::default()).await?;
        ready.push_ms(server.ready);
        server.settle().await;
        resident.push(process_mib(server.pid(), "VmRSS:"));
    }
    ready.print("server_ready", "ms", None);
    resident.print("server_idle_resident", "MiB", None);
    Ok(())
}

pub(crate) async fn idle_sandboxes() -> Result<()> {
    const LIVE: usize = 500;
    let server = Server::start(Options::default()).await?;
    let mut conn = server.conn().await?;
    for _ in 0..5 {
        let id = conn.create(&server.image).await?;
        conn.exec(&id, "true").await?;
        conn.delete(&id).await?;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = mem_available_kib();
    let mut ids = Vec::new();
    for _ in 0..LIVE {
        ids.push(conn.create(&server.image).await?);
    }
    tokio::time::sleep(Duration::from_secs(8)).await;
    let after = mem_available_kib();
    let last = ids.last().context("no sandbox")?;
    let execd = Execd::of(&mut conn, last).await?;
    // The command that looked for them has made the daemon grow as any first command does.
    print_one("execd_private_memory", "MiB", private_mib(execd.init) + private_mib(execd.daemon), None);
    #[allow(clippy::cast_precision_loss)]
    print_one("idle_sandbox_memory", "MiB", (before - after) / 1024.0 / LIVE as f64, None);
    print_one("server_resident_500_live", "MiB", process_mib(server.pid(), "VmRSS:"), None);
    for id in ids {
        conn.delete(&id).await?;
    }
    Ok(())
}
