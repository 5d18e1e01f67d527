//! The proxy from socket to socket: a real server in front, scripted backends behind a runtime that only connects.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers fail by panicking")]

mod errors;
mod http;
mod pooling;
mod streams;
mod support;
mod upgrades;
