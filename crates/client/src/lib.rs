//! Client for servers that speak the OpenSandbox protocol: isolated Linux machines over HTTP.
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
//! A sandbox is not deleted when its handle is dropped: call [`Sandbox::kill`], use [`CreateSandbox::run`], or
//! let its lifetime end it.
//!
//! | to | see |
//! |---|---|
//! | find the server | [`Config`], [`Client::from_env`] |
//! | make, find and list sandboxes | [`Client::create`], [`Client::connect`], [`Client::list_all`] |
//! | change and end them | [`Sandbox::renew`], [`Sandbox::patch_metadata`], [`Sandbox::pause`], [`Sandbox::kill`] |
//! | run commands | [`Sandbox::shell`], [`Sandbox::argv`], [`Sandbox::create_session`] |
//! | run code cells | [`Sandbox::code`] |
//! | use a terminal | [`Sandbox::create_terminal`] |
//! | move files | [`Sandbox::files`], [`Files::upload_tree`], [`Files::download_tree`] |
//! | isolate within a sandbox | [`Sandbox::isolation`], [`Sandbox::files_as`] |
//! | reach a port | [`Sandbox::service`], [`Sandbox::endpoint`] |
//! | watch | [`Sandbox::metrics`], [`Sandbox::watch_metrics`], [`Sandbox::diagnostics`] |
//! | keep copies | [`Sandbox::create_snapshot`], [`Client::snapshots`] |
//! | tell errors apart | [`Error`] |
//! | be patient | [`RetryPolicy`] |
//!
//! Everything is asynchronous and needs a Tokio runtime. What lasts is a stream: [`CommandStream`],
//! [`CodeStream`], [`Items`], [`Download`].
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
//! Whole programs are in the crate's `examples`.

mod client;
mod code;
mod command;
mod config;
mod connection;
mod create;
mod diagnostics;
mod error;
mod events;
mod files;
mod foreign;
pub mod http;
mod isolated;
mod items;
mod lines;
mod list;
mod metrics;
mod network;
mod output;
mod pools;
mod retry;
mod sandbox;
mod session;
mod snapshots;
mod templates;
mod terminal;
mod transport;
mod trust;

pub use client::Client;
pub use code::{Cell, Code, CodeEvent, CodeOutput, CodeResult, CodeStream};
pub use command::{Command, Logs};
pub use config::{
    Config, Credentials, DEFAULT_DOMAIN, DEFAULT_REQUEST_TIMEOUT, DEFAULT_USER_AGENT, Protocol, Settings,
    credentials_files, env,
};
pub use connection::{TerminalConnection, TerminalEvent, TerminalReceiver, TerminalSender, TerminalSignal};
pub use create::{CreateSandbox, DEFAULT_ENTRYPOINT, DEFAULT_TIMEOUT};
pub use diagnostics::{Diagnostics, LogQuery};
pub use error::{ApiError, Call, Error, Result};
pub use events::{EventParser, ParseError};
pub use files::{
    Download, Files, Skipped, TreeOptions, TreeProgress, TreeSummary, Upload, mode_bits, mode_digits,
};
pub use isolated::{IsolatedRun, IsolatedSession, Isolation};
pub use items::Items;
pub use list::ListFilter;
pub use network::{Endpoint, Service};
pub use osb_protocol as protocol;
pub use osb_protocol::execd::{
    CodeContext, CommandStatus, ExecutionError, FileInfo, FileKind, IsolatedRunStarted, IsolatedRunStatus,
    IsolatedSessionSpec, IsolatedSessionState, IsolatedSessionSummary, IsolatedWorkspace,
    IsolationCapabilities, Metrics, Permission, Rename, Replacement, TerminalStatus,
};
pub use osb_protocol::lifecycle::{
    CreateFsbTemplateRequest as CreateTemplateRequest, CreatePoolRequest, CreateSandboxRequest,
    DiagnosticContentResponse as DiagnosticContent, FsbTemplate as Template, HostVolume, LifecycleHook,
    ListSandboxesResponse, MetricsEvent, NetworkPolicy, NetworkRule, OssfsVolume, PaginationInfo,
    PeriodicLifecycleHook, PolicyAction, PolicyStatusResponse, PoolCapacitySpec, PoolResponse as Pool,
    PvcVolume, Sandbox as SandboxInfo, SandboxLifecycle, SandboxState, SandboxStatus, Snapshot,
    SnapshotStatus, Volume,
};
pub use output::{CommandEvent, CommandStream, Exit, Joiner, Output};
pub use pools::Pools;
pub use retry::{Jitter, Observer, RetryCause, RetryEvent, RetryPolicy};
pub use sandbox::Sandbox;
pub use session::{Session, SessionCommand};
pub use snapshots::{SnapshotFilter, Snapshots};
pub use templates::{TemplateFilter, Templates};
pub use terminal::{Attach, Terminal};
