//! Errors told apart, and repetition watched.
//!
//! `cargo run -p opensandbox --example errors`
#![allow(clippy::print_stdout, clippy::print_stderr)]

use opensandbox::{Client, Config, Error, Result, RetryPolicy};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let policy = RetryPolicy { max_retries: 5, ..RetryPolicy::default() }.on_retry(|event| {
        eprintln!(
            "attempt {} of {} failed ({:?}); next in {:?}",
            event.attempt, event.url, event.cause, event.backoff
        );
    });
    let client = Client::with_retry(Config::from_env()?, policy)?;
    match client.sandbox("no-such-sandbox").info().await {
        Ok(info) => println!("{}", info.status.state),
        Err(error) if error.is_not_found() => println!("it is not there"),
        Err(error) if error.is_unauthorized() => println!("set OPEN_SANDBOX_API_KEY"),
        Err(Error::Connect { url, .. }) => println!("nothing listens at {url}"),
        Err(error) => {
            println!("{error} (code {:?}, request {:?})", error.code(), error.request_id());
            return Err(error);
        }
    }
    Ok(())
}
