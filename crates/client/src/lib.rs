//! Client for servers that speak the OpenSandbox protocol.
//!
//! ```no_run
//! # async fn example() -> opensandbox::Result<()> {
//! use opensandbox::Client;
//!
//! let client = Client::from_env()?;
//! let sandbox = client.create("host").env("NAME", "world").send().await?;
//! let output = sandbox.shell("echo hello $NAME").output().await?;
//! assert_eq!(output.stdout, "hello world\n");
//! sandbox.files().write("/tmp/note.txt", "some text").await?;
//! sandbox.kill().await?;
//! # Ok(())
//! # }
//! ```
//!
//! Commands can be followed while they run:
//!
//! ```no_run
//! # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
//! use std::time::Duration;
//! use opensandbox::CommandEvent;
//!
//! let mut stream = sandbox.argv(["make", "test"]).timeout(Duration::from_secs(60)).stream().await?;
//! while let Some(event) = stream.next().await? {
//!     match event {
//!         CommandEvent::Stdout(text) | CommandEvent::Stderr(text) => print!("{text}"),
//!         CommandEvent::Finished(exit) => println!("exit code {:?}", exit.code),
//!         CommandEvent::Started { .. } => {}
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A sandbox is not deleted when its handle is dropped: call [`Sandbox::kill`], or let its lifetime end it.

mod client;
mod command;
mod config;
mod create;
mod diagnostics;
mod error;
mod events;
mod files;
pub mod http;
mod items;
mod lines;
mod list;
mod metrics;
mod retry;
mod sandbox;
mod transport;

pub use client::Client;
pub use command::{Command, CommandEvent, CommandStream, Exit, Joiner, Logs, Output};
pub use config::{
    Config, Credentials, DEFAULT_DOMAIN, DEFAULT_REQUEST_TIMEOUT, DEFAULT_USER_AGENT, Protocol, Settings,
    credentials_files, env,
};
pub use create::{CreateSandbox, DEFAULT_ENTRYPOINT, DEFAULT_TIMEOUT};
pub use diagnostics::{Diagnostics, LogQuery};
pub use error::{ApiError, Call, Error, Result};
pub use events::{EventParser, ParseError};
pub use files::{
    Download, Files, Skipped, TreeOptions, TreeProgress, TreeSummary, Upload, mode_bits, mode_digits,
};
pub use items::Items;
pub use list::ListFilter;
pub use osb_protocol as protocol;
pub use osb_protocol::execd::{CommandStatus, FileInfo, FileKind, Metrics, Permission, Rename, Replacement};
pub use osb_protocol::lifecycle::{
    DiagnosticContentResponse as DiagnosticContent, Endpoint, ListSandboxesResponse, Sandbox as SandboxInfo,
    SandboxState, SandboxStatus,
};
pub use retry::{Jitter, Observer, RetryCause, RetryEvent, RetryPolicy};
pub use sandbox::Sandbox;
