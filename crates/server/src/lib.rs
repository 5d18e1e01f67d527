//! The lifecycle server: an HTTP API over a [`osb_runtime::Runtime`].
//!
//! [`config::load`] finds the settings, [`bind`] makes the listener, [`serve`] does the rest. [`app`] is the same
//! API as a service, for tests.

mod access;
mod api;
pub mod config;
pub mod error;
mod front;
pub mod proxy;
pub mod sandbox;
mod serve;
pub mod state;
pub mod store;
mod unread;

pub use access::TARGET as ACCESS_TARGET;
pub use api::document as openapi;
pub use front::app;
pub use sandbox::StartError;
pub use serve::{bind, serve};
