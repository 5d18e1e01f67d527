//! Big files through the server.

use std::time::Instant;

use anyhow::{Result, ensure};
use bytes::Bytes;

use crate::server::{Options, Server};
use crate::stats::{Samples, print_one, process_mib};

const CHUNK: usize = 1 << 20;

pub(crate) async fn one_gib() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    conn.upload(&id, "/tmp/warm", Bytes::from(vec![1; CHUNK]), 8).await?;
    conn.download(&id, "/tmp/warm").await?;
    let daemon = execd_pid();
    let idle = process_mib(server.pid(), "VmRSS:");
    let idle_daemon = daemon.map_or(f64::NAN, |pid| process_mib(pid, "VmRSS:"));
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
    if let Some(pid) = daemon {
        print_one("transfer_execd_peak_above_idle", "MiB", process_mib(pid, "VmHWM:") - idle_daemon, None);
    }
    conn.delete(&id).await?;
    Ok(())
}

/// Host pid of the one live sandbox's daemon: of its two `execd` processes the one that is not PID 1 inside.
fn execd_pid() -> Option<u32> {
    let mut found = None;
    for entry in std::fs::read_dir("/proc").ok()? {
        let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        let inside = status
            .lines()
            .find(|line| line.starts_with("NSpid:"))
            .map(|line| line.split_whitespace().skip(1).collect::<Vec<_>>())
            .unwrap_or_default();
        let named = std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.contains("--boot-fd"));
        if named && inside.len() > 1 && inside.last() != Some(&"1") {
            found = Some(pid);
        }
    }
    found
}
