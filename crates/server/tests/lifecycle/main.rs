//! The lifecycle API over a runtime that only pretends.

// The lints know test functions, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::panic)]

mod auth;
mod config;
mod connection;
mod create;
mod errors;
mod expiry;
mod list;
mod pending;
mod restart;
mod routes;
mod support;
