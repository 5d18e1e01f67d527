//! The lifecycle server: an HTTP API over a runtime.

pub mod config;
pub mod error;
pub mod proxy;
pub mod sandbox;
pub mod state;
