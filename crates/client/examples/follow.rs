//! A command is followed while it runs, and interrupted when it takes too long.
//!
//! `cargo run -p opensandbox --example follow`
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::time::Duration;

use opensandbox::{Client, CommandEvent, Result, Sandbox};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    Client::from_env()?.create("host").run(async |sandbox| follow(sandbox).await).await
}

async fn follow(sandbox: &Sandbox) -> Result<()> {
    let mut stream = sandbox.shell("for i in $(seq 100); do echo line $i; sleep 0.2; done").stream().await?;
    let mut running = None;
    let patience = tokio::time::sleep(Duration::from_secs(2));
    tokio::pin!(patience);
    loop {
        tokio::select! {
            event = stream.next() => match event? {
                Some(CommandEvent::Started { id }) => running = Some(id),
                Some(CommandEvent::Stdout(text)) => print!("{text}"),
                Some(CommandEvent::Stderr(text)) => eprint!("{text}"),
                Some(CommandEvent::Finished(exit)) => println!("ended with {:?}", exit.code),
                None => return Ok(()),
            },
            () = &mut patience, if running.is_some() => {
                // Taking the id makes sure that this happens once; the stream then tells of the end.
                if let Some(id) = running.take() {
                    println!("that is enough");
                    sandbox.interrupt(&id).await?;
                }
            }
        }
    }
}
