//! The client against a real server with real sandboxes. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, unreachable_pub, missing_docs)]

mod absent;
mod commands;
mod files;
mod isolated;
mod lifecycle;
mod server;
mod shells;
mod trees;

/// The fixture, or the end of a test that cannot run here.
macro_rules! need {
    ($fixture:expr) => {
        match $fixture {
            Some(fixture) => fixture,
            None => return,
        }
    };
}
pub(crate) use need;
