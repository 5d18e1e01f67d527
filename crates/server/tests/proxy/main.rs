//! The proxy from socket to socket: a real server in front, scripted backends behind a runtime that only connects.

mod errors;
mod http;
mod pooling;
mod streams;
mod support;
mod upgrades;
