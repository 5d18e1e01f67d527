//! A directory is copied into a sandbox, worked on there, and copied back.
//!
//! `cargo run -p opensandbox --example copy_tree -- FROM TO`
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::path::PathBuf;

use opensandbox::{Client, Error, Result, TreeOptions, TreeProgress};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(from), Some(to)) = (arguments.next(), arguments.next()) else {
        return Err(Error::InvalidArgument("usage: copy_tree FROM TO".to_owned()));
    };
    Client::from_env()?
        .create("host")
        .run(async |sandbox| {
            let files = sandbox.files();
            let mut show = |now: TreeProgress<'_>| {
                eprint!("\r{} of {} files, {} bytes ", now.files, now.total_files, now.bytes);
            };
            let options = TreeOptions::default();
            let up = files.upload_tree(&from, "/tmp/work", &options, &mut show).await?;
            for skipped in &up.skipped {
                eprintln!("left out {}: {}", skipped.path, skipped.reason);
            }
            sandbox.shell("find . -type f | sort | xargs sha256sum > SUMS").cwd("/tmp/work").output().await?;
            let down = files.download_tree("/tmp/work", &to, &options, &mut show).await?;
            println!("{} files with their SUMS in {}", down.files, to.display());
            Ok(())
        })
        .await
}
