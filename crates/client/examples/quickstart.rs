//! A sandbox is made, used and deleted.
//!
//! `cargo run -p opensandbox --example quickstart` with a server on this machine, or `OPEN_SANDBOX_DOMAIN` set.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use opensandbox::{Client, Result};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let client = Client::from_env()?;
    let text = client
        .create("host")
        .env("NAME", "world")
        .run(async |sandbox| {
            sandbox.files().write("/tmp/greet.sh", "echo hello $NAME from $(hostname)\n").await?;
            sandbox.shell("sh /tmp/greet.sh").output().await?.checked().map(|output| output.stdout)
        })
        .await?;
    print!("{text}");
    Ok(())
}
