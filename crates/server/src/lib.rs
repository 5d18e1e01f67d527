//! The lifecycle server: an HTTP API over a runtime.

pub mod config;
pub mod error;
mod proxy;
pub mod sandbox;
pub mod state;
