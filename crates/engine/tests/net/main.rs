//! The network of sandboxes, on a host of the test's own: every test runs in a network namespace that plays the host,
//! joined to another one that plays the internet and the private networks behind it. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod host;
mod life;
mod reach;
mod world;
