//! One network slot: a namespace with its way out, ready for a sandbox.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;

/// The network of one sandbox. Dropping it closes the namespace's descriptor and leaves everything else in place, so
/// that a slot in use outlives the server; see [`Network::destroy`](super::Network::destroy).
#[derive(Debug)]
pub struct NetSlot {
    /// Number of the slot in its instance.
    pub index: u32,
    /// The namespace, to be entered with `setns`.
    pub netns: OwnedFd,
    /// The sandbox's address; loopback when the mode is `None`.
    pub address: Ipv4Addr,
    /// Where its default route and its DNS are; unspecified when the mode is `None`.
    pub gateway: Ipv4Addr,
    /// The host's end of the slot; empty when the mode is `None`.
    pub interface: String,
    /// Index of that interface.
    pub(super) link: u32,
    /// Packets that had gone through it when the slot was last clean.
    pub(super) clean_at: AtomicU64,
}

/// Settings of a new namespace that a sandbox could not make itself and that programs miss otherwise.
pub(super) fn prepare() -> io::Result<()> {
    // ping without a raw socket, for every group.
    set("ipv4/ping_group_range", "0 2147483647")?;
    // Ports below 1024 for everyone: there is nobody here to protect them from.
    set("ipv4/ip_unprivileged_port_start", "0")?;
    // Otherwise a port stays taken for a minute after its sandbox has ended, in a slot that is somebody else's now.
    set("ipv4/tcp_max_tw_buckets", "0")?;
    // Interfaces that come later have no IPv6; loopback is here already and keeps ::1.
    match set("ipv6/conf/default/disable_ipv6", "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Writes a setting below `/proc/sys/net` of the calling thread's namespace.
pub(super) fn set(name: &str, value: &str) -> io::Result<()> {
    let path = format!("/proc/sys/net/{name}");
    std::fs::write(&path, value)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot write {value} to {path}: {error}")))
}
