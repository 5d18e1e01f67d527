//! System calls that no crate of ours wraps, and messages with descriptors between our own processes.

pub(crate) mod clone;
pub(crate) mod scm;
