//! What confines processes, for the engine that makes sandboxes and for the daemon that makes isolated sessions in
//! them: system call filters and calls about mounts. Nothing here starts a process or knows what it confines.

pub mod mount;
pub mod seccomp;
