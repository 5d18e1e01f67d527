//! What can go wrong with the network of sandboxes.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use super::address::Cidr;

/// Why a call on the network failed.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The instance id cannot be part of interface names.
    #[error("instance id '{0}' must be 6 to 8 characters of 0-9 and a-f")]
    Instance(String),
    /// The configured pool is in use by something else.
    #[error(
        "the address pool {pool} overlaps {route}, which this host reaches through {device}: configure another pool, \
         or none to have one chosen"
    )]
    PoolInUse {
        /// As configured.
        pool: Cidr,
        /// What it overlaps.
        route: Cidr,
        /// Interface of the route.
        device: String,
    },
    /// The pool has no room for a gateway and a sandbox.
    #[error("the address pool {0} is too small: it needs a prefix of 8 to 28 bits")]
    PoolSize(Cidr),
    /// Sandboxes of an earlier life have addresses of another pool.
    #[error(
        "sandboxes of this instance still use the pool with gateway {current}, but {wanted} is configured: \
         end them or keep the pool"
    )]
    PoolChanged {
        /// Gateway address in use.
        current: Ipv4Addr,
        /// As configured.
        wanted: Cidr,
    },
    /// Every private range overlaps one of the host's routes.
    #[error("no private address range is free on this host: configure a pool that no route covers")]
    NoFreePool,
    /// More slots than addresses or names.
    #[error("network slot {index} does not exist: the pool {pool} has {slots}")]
    NoSuchSlot {
        /// Asked for.
        index: u32,
        /// The pool.
        pool: Cidr,
        /// Number of slots.
        slots: u32,
    },
    /// A namespace handed to `adopt` is not the one of that slot.
    #[error("network slot {index} cannot be taken back: {reason}")]
    Adopt {
        /// Which.
        index: u32,
        /// Why.
        reason: String,
    },
    /// Sockets in a slot outlived its sandbox. The slot has to be destroyed.
    #[error("network slot {index} is still in use ({sockets}): destroy it")]
    StillUsed {
        /// Which.
        index: u32,
        /// What was found.
        sockets: String,
    },
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: String,
        /// Why not.
        source: io::Error,
    },
    /// The kernel refused packet filter rules.
    #[error("cannot {action}: {reason}")]
    Filter {
        /// What was tried.
        action: &'static str,
        /// As nftables says it.
        reason: String,
    },
    /// The DNS forwarder found no free port.
    #[error("cannot listen for DNS on {address}: {source}")]
    Dns {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
}

impl NetError {
    /// For `map_err`: names the action that failed.
    pub(super) fn system<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::System { action, source: source.into() }
    }

    /// For `map_err`: names the change of the packet filter that failed.
    pub(super) fn filter(action: &'static str) -> impl FnOnce(nlink::Error) -> Self {
        move |error| Self::Filter { action, reason: format!("{error}{}", lacking(&error)) }
    }
}

/// What to do about a kernel without nftables: its answer to every request is that it is invalid.
fn lacking(error: &nlink::Error) -> &'static str {
    if error.errno() == Some(rustix::io::Errno::INVAL.raw_os_error())
        && !std::path::Path::new("/sys/module/nf_tables").exists()
    {
        ": the kernel has no nftables; 'modprobe nf_tables' says why. Sandboxes do without only in network mode 'none'"
    } else {
        ""
    }
}
