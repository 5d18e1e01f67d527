//! The image store from outside: archives made here go in, mounted images come out.
//!
//! Everything that unpacks needs root: owners, whiteouts and overlay mounts. Without it these tests say so.

// The exceptions for tests do not reach functions that tests share.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, clippy::print_stdout)]

#[path = "image/formats.rs"]
mod formats;
#[path = "image/hostile.rs"]
mod hostile;
#[path = "image/layers.rs"]
mod layers;
#[path = "image/machine.rs"]
mod machine;
#[path = "image/store.rs"]
mod store;
#[path = "image/support.rs"]
mod support;
#[path = "image/tools.rs"]
mod tools;
