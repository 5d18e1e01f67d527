//! Processes: starting them, how they end, and whole trees of them.

pub mod exit;
pub mod inherited;
pub mod null;
mod signals;
pub mod spawn;
pub mod tree;
pub mod watch;
