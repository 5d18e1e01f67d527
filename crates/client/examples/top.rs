//! CPU and memory of all running sandboxes.
//!
//! `cargo run -p opensandbox --example top`
#![allow(clippy::print_stdout, clippy::print_stderr)]

use futures_util::{StreamExt, TryStreamExt};
use opensandbox::{Client, ListFilter, Result};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let client = Client::from_env()?;
    let running = client.list_all(ListFilter::new().state("Running"));
    let mut rows = running
        .map_ok(|info| {
            let sandbox = client.sandbox(&info.id);
            // One that ends meanwhile has no figures, which is no reason to stop.
            async move { Ok((info, sandbox.metrics().await.ok())) }
        })
        .try_buffered(8);
    while let Some((info, metrics)) = rows.next().await.transpose()? {
        match metrics {
            Some(now) => println!("{} {:5.1} % {:8.1} MiB", info.id, now.cpu_used_pct, now.mem_used_mib),
            None => println!("{} gone", info.id),
        }
    }
    Ok(())
}
