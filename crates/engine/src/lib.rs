//! The embedded Linux engine: images, network slots, and the path from a prepared slot to a running sandbox.

pub mod image;
pub mod net;
