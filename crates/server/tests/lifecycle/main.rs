//! The lifecycle API over a runtime that only pretends.

mod auth;
mod config;
mod connection;
mod create;
mod errors;
mod expiry;
mod list;
mod restart;
mod routes;
mod support;
