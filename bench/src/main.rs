//! Measures the figures that the README and `docs/numbers.md` state.
//!
//! `bench` lists them, `bench NAME…` prints one JSON object per line and figure. Every figure carries its failures
//! (counted as infinitely slow), the load average, and where there is one the same figure of a peer measured in the
//! same run; a peer that cannot be made on this machine is `null`.

#![allow(clippy::print_stdout, reason = "printing figures is what this program does")]

mod figures;
mod http;
mod server;
mod stats;

use anyhow::{Result, bail};

// One thread: waking another one would be part of every figure.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if let [serve, port] = wanted.as_slice()
        && serve == "serve"
    {
        return figures::backend(port.parse()?).await;
    }
    if wanted.is_empty() {
        for figure in figures::ALL {
            println!("{:<14} {}", figure.name, figure.about);
        }
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        bail!("the embedded engine needs root: run `sudo bench/run …`");
    }
    for name in &wanted {
        let chosen: Vec<_> =
            figures::ALL.iter().filter(|figure| name == "all" || figure.name == name).collect();
        if chosen.is_empty() {
            bail!("no figure is called '{name}': run bench/run without arguments for the list");
        }
        for figure in chosen {
            figures::run(figure).await?;
        }
    }
    Ok(())
}
