//! Event streams: how output becomes events, and how events reach the client.

pub mod escape;
pub mod event;
pub mod feed;
pub mod lines;
