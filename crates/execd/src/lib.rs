//! `execd`: the daemon inside every sandbox. PID 1, commands, files and metrics over HTTP.

pub mod account_cache;
pub mod accounts;
pub mod app;
pub mod args;
pub mod binding;
pub mod bootstrap;
pub mod clone3;
pub mod command;
mod file_key;
pub mod files;
#[cfg(fuzzing)]
pub mod fuzz;
pub mod hooks;
pub mod http;
pub mod init;
pub mod isolated;
pub mod lifecycle;
pub mod listen;
pub mod log;
pub mod metrics;
pub mod observe;
pub mod process;
pub mod proxy;
pub mod pty;
mod random;
mod remote;
pub mod runtime_init;
pub mod serve;
pub mod session;
pub mod start;
pub mod stream;
pub mod telemetry;
pub mod usage;
