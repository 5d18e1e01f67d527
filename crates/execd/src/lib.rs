//! `execd`: the daemon inside every sandbox. PID 1, commands, files and metrics over HTTP.

pub mod accounts;
pub mod app;
pub mod files;
pub mod http;
pub mod metrics;
pub mod process;
pub mod proxy;
pub mod serve;
pub mod stream;
