//! Pulls images by name from container registries into OCI layouts.
//!
//! Transfers are made with `reqwest`, not with `oci-client`: that crate builds its own HTTP client, which follows
//! redirects by its own rules, puts no bound on documents, resumes nothing, and it brings in `chrono`.
//!
//! ```no_run
//! # async fn example() -> osb_registry::Result<()> {
//! use osb_registry::{Progress, Puller, Settings};
//!
//! let puller = Puller::new(Settings::new("/var/lib/opensandbox/downloads"))?;
//! let (progress, _) = tokio::sync::watch::channel(Progress::default());
//! let target = std::path::Path::new("/var/lib/opensandbox/pulls/1");
//! let pulled = puller.pull("python:3.13", None, None, target, &|_| false, &progress).await?;
//! println!("{} is {}", pulled.reference, pulled.config);
//! # Ok(())
//! # }
//! ```
//!
//! Everything that a registry says is hostile: documents are bounded, digests and sizes are held against the bytes
//! while they arrive, and credentials go nowhere but to the registry and to the token service that it names over
//! TLS.

mod auth;
mod backoff;
mod docker_config;
mod downloads;
mod endpoint;
mod error;
mod flight;
mod helper;
mod image;
mod layer;
mod layout;
mod manifest;
mod pace;
mod partial;
mod platform;
mod progress;
mod pull;
mod settings;
mod source;

pub use downloads::Collected;
pub use error::{Error, Result};
pub use platform::{InvalidPlatform, Platform};
pub use progress::{Phase, Progress};
pub use pull::{Pulled, Puller};
pub use settings::{Credentials, Patience, RegistrySettings, Settings, docker_config};
