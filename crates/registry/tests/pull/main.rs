//! Pulls from Debian's `docker-registry` with images pushed by `skopeo`, and from registries that mean harm.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests and their helpers fail by panicking, and say what they skip"
)]

mod authentication;
mod debian;
mod fake;
mod faults;
mod hostile;
mod images;
mod mirrors;
mod resume;
mod sharing;
mod support;
