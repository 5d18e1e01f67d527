//! Network of sandboxes: namespaces with a way out ("slots"), what they may reach, and their DNS.
//!
//! Every slot is a namespace joined to the host by a pair of interfaces of its own and a route to its one address.
//! There is no bridge: slots have nothing in common but the host, which forwards by destination. The instance's
//! packet filter table decides (see `rules`), the host's address translation does the rest, and a forwarder in the
//! server answers DNS on the gateway address. Without the server sandboxes go on and have no DNS until it is back.
//!
//! | mode | a sandbox reaches |
//! |---|---|
//! | `Internet` | public addresses and `allow_private` |
//! | `Open` | everything the host can route to, private networks and metadata services included |
//! | `None` | its own loopback |
//!
//! In no mode does it reach another sandbox, nor a service of the host: neither by the gateway address nor by any
//! other. A host address named singly in `allow_private` (`192.168.1.5`, not `192.168.1.0/24`) opens that one.
//! IPv6 exists on a slot's loopback only.
//!
//! All calls may come from any thread that is in the network namespace in which [`Network::start`] was called, and
//! block for at most some milliseconds. Interfaces, tables and rules carry the instance's id: two instances on a host
//! do not meet. All that is owned lives in the kernel and is found there again after a restart.

mod address;
mod check;
mod dns;
mod error;
mod filter;
mod foreign;
mod leftovers;
mod links;
mod namespace;
mod netlink;
mod rules;
mod setup;
mod slot;
mod watch;

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use address::{Cidr, InvalidCidr};
pub use check::check;
pub use dns::DnsForwarder;
pub use error::NetError;
pub use slot::NetSlot;

use address::slot_index;
use links::{INSIDE, Links};
use setup::Host;
use watch::Watch;

/// What sandboxes may reach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// Public addresses.
    #[default]
    Internet,
    /// Whatever the host can route to.
    Open,
    /// Nothing.
    None,
}

/// Network of one instance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetConfig {
    /// 6 to 8 lower-case hexadecimal digits that no other server on this host has.
    pub instance: String,
    /// What sandboxes may reach.
    pub mode: Mode,
    /// Addresses for sandboxes; `None` takes a range that no route of the host overlaps.
    pub pool: Option<Cidr>,
    /// Ranges that stay open although they are not public.
    pub allow_private: Vec<Cidr>,
    /// Whom the DNS forwarder asks; `None` follows the host's `/etc/resolv.conf`.
    pub dns_servers: Option<Vec<SocketAddr>>,
}

/// The network of a running instance. Dropping it leaves the kernel's part in place.
#[derive(Debug)]
pub struct Network {
    shared: Arc<Shared>,
    /// Absent when there is nothing to watch over.
    watch: Option<Watch>,
    dns_servers: Option<Vec<SocketAddr>>,
}

#[derive(Debug)]
struct Shared {
    instance: String,
    mode: Mode,
    home: OwnedFd,
    links: Mutex<Links>,
    tcp_metrics: Option<u16>,
    /// Absent in mode `None`.
    host: Option<Host>,
}

/// Group into which interfaces go that are deleted together.
const DOOMED: u32 = 0x6f73_6264;

impl Network {
    /// Sets up the host's part: rules first, then the gateway, then forwarding. What an earlier life of this instance
    /// left is taken over, and its rules are replaced in one step, so that running sandboxes notice nothing.
    ///
    /// # Errors
    /// If anything cannot be set up; what was made for the first time is removed again.
    pub fn start(config: NetConfig) -> Result<Self, NetError> {
        address::check_instance(&config.instance)?;
        let home = namespace::current().map_err(NetError::system("find the host's network namespace"))?;
        let mut links = Links::open().map_err(NetError::system("open a netlink socket"))?;
        let host = match config.mode {
            Mode::None => None,
            Mode::Internet | Mode::Open => Some(Host::set_up(&config, &mut links)?),
        };
        // Absent where the kernel keeps no metrics, and then there are none to clear.
        let tcp_metrics = leftovers::tcp_metrics_family().ok();
        let shared = Arc::new(Shared {
            instance: config.instance,
            mode: config.mode,
            home,
            links: Mutex::new(links),
            tcp_metrics,
            host,
        });
        let watch = if shared.host.is_some() { Some(watch(&shared)?) } else { None };
        if let Some(host) = &shared.host {
            host.settle()?;
        }
        Ok(Self { shared, watch, dns_servers: config.dns_servers })
    }

    /// What sandboxes may reach.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.shared.mode
    }

    /// Addresses of sandboxes; absent when the mode is `None`.
    #[must_use]
    pub fn pool(&self) -> Option<Cidr> {
        self.shared.host.as_ref().map(|host| host.plan().pool())
    }

    /// How many slots there can be.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.shared.host.as_ref().map_or(u32::MAX, |host| host.plan().slots())
    }

    /// Content of `/etc/resolv.conf` in a sandbox.
    #[must_use]
    pub fn resolv_conf(&self) -> String {
        match &self.shared.host {
            Some(host) => format!("nameserver {}\n", host.plan().gateway()),
            None => "# This sandbox has no network.\n".to_owned(),
        }
    }

    /// Makes a slot. Whatever an earlier slot of that number left is removed.
    ///
    /// # Errors
    /// If there is no such slot or the kernel refuses; nothing is left then.
    pub fn make(&self, index: u32) -> Result<NetSlot, NetError> {
        let shared = &*self.shared;
        let address = shared.host.as_ref().map(|host| host.plan().address(index)).transpose()?;
        let (netns, mut inside) = namespace::create(shared.home.as_fd(), || {
            slot::prepare()?;
            let mut inside = Links::open_told()?;
            inside.open_loopback()?;
            Ok(inside)
        })
        .map_err(NetError::system("make a network namespace"))?;
        let (Some(host), Some(address)) = (&shared.host, address) else {
            return Ok(NetSlot {
                index,
                netns,
                address: Ipv4Addr::LOCALHOST,
                gateway: Ipv4Addr::UNSPECIFIED,
                interface: String::new(),
                link: 0,
                clean_at: AtomicU64::new(0),
            });
        };
        let interface = host.plan().slot_interface(index);
        let gateway = host.plan().gateway();
        let mut links = shared.links();
        let added = links.add_pair(&interface, netns.as_fd()).or_else(|error| {
            if error.raw_os_error() != Some(libc::EEXIST) {
                return Err(error);
            }
            let stale = links.index(&interface)?;
            links.delete(DOOMED, &[stale])?;
            links.add_pair(&interface, netns.as_fd())
        });
        let link = added.map_err(NetError::system(format!("make interface {interface}")))?;
        let opened = inside.open_slot_end(address, gateway).and_then(|()| {
            // Written before the interface is up, so that the host never speaks IPv6 on it.
            match slot::set(&format!("ipv6/conf/{interface}/disable_ipv6"), "1") {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                other => other?,
            }
            links.open_host_end(link, address, gateway)
        });
        drop(links);
        if let Err(error) = opened.and_then(|()| inside.wait_for_slot_end()) {
            if let Err(error) = shared.links().delete(DOOMED, &[link]) {
                tracing::warn!(%error, interface, "an interface that could not be set up stays behind");
            }
            return Err(NetError::system(format!("set up interface {interface}"))(error));
        }
        Ok(NetSlot { index, netns, address, gateway, interface, link, clean_at: AtomicU64::new(0) })
    }

    /// Readies a slot for its next sandbox, after every process of the last one has ended and the caller has closed
    /// its own sockets in the namespace. TCP connections that are still there are aborted. Takes some 0.1 ms, or
    /// 0.4 ms if the slot had traffic.
    ///
    /// # Errors
    /// [`NetError::StillUsed`] if somebody outside holds other sockets of the namespace; like after any other error
    /// the slot then has to be destroyed, not used again.
    pub fn recycle(&self, slot: &NetSlot) -> Result<(), NetError> {
        let shared = &*self.shared;
        let action = || format!("clear network slot {}", slot.index);
        let left = namespace::within(slot.netns.as_fd(), shared.home.as_fd(), || {
            leftovers::clear(shared.tcp_metrics)
        });
        let left = left.and_then(|left| left).map_err(NetError::system(action()))?;
        if let Some(sockets) = left {
            return Err(NetError::StillUsed { index: slot.index, sockets });
        }
        shared.forget(slot).map(drop)
    }

    /// Removes a slot. Waits for the kernel, some 20 ms.
    ///
    /// # Errors
    /// If the interface cannot be removed.
    pub fn destroy(&self, slot: NetSlot) -> Result<(), NetError> {
        self.destroy_all(vec![slot])
    }

    /// Removes slots together, in hardly more time than one.
    ///
    /// # Errors
    /// If interfaces cannot be removed.
    pub fn destroy_all(&self, slots: Vec<NetSlot>) -> Result<(), NetError> {
        let shared = &*self.shared;
        if shared.host.is_none() {
            return Ok(());
        }
        let doomed: Vec<u32> = slots.iter().map(|slot| slot.link).collect();
        let used: Vec<bool> = slots.iter().map(|slot| shared.has_traffic(slot)).collect();
        shared.links().delete(DOOMED, &doomed).map_err(NetError::system("remove network slots"))?;
        for (slot, _) in slots.iter().zip(used).filter(|(_, used)| *used) {
            shared.forget_address(slot.address)?;
        }
        Ok(())
    }

    /// Takes back the slot of a sandbox that outlived the server. `netns` is its namespace, for instance from
    /// `/proc/PID/ns/net` of its first process.
    ///
    /// # Errors
    /// If the namespace is not that slot's.
    pub fn adopt(&self, index: u32, netns: OwnedFd) -> Result<NetSlot, NetError> {
        let shared = &*self.shared;
        let refuse = |reason: String| NetError::Adopt { index, reason };
        if namespace::same(&netns, &shared.home).map_err(|error| refuse(error.to_string()))? {
            return Err(refuse("the namespace is the host's".to_owned()));
        }
        let inside = namespace::within(netns.as_fd(), shared.home.as_fd(), || {
            let mut links = Links::open()?;
            match links.index(INSIDE) {
                Ok(inside) => links.addresses(inside),
                Err(error) if netlink::absent(&error) => Ok(Vec::new()),
                Err(error) => Err(error),
            }
        });
        let inside = inside.and_then(|inside| inside).map_err(|error| refuse(error.to_string()))?;
        let Some(host) = &shared.host else {
            return Ok(NetSlot {
                index,
                netns,
                address: Ipv4Addr::LOCALHOST,
                gateway: Ipv4Addr::UNSPECIFIED,
                interface: String::new(),
                link: 0,
                clean_at: AtomicU64::new(u64::MAX),
            });
        };
        let (address, interface) = (host.plan().address(index)?, host.plan().slot_interface(index));
        if inside != [address] {
            return Err(refuse(format!("its address is {inside:?}, not {address}")));
        }
        let link =
            shared.links().index(&interface).map_err(|error| refuse(format!("{interface}: {error}")))?;
        let gateway = host.plan().gateway();
        // Nobody knows what went through it before: its connections are forgotten whatever the counter says.
        Ok(NetSlot { index, netns, address, gateway, interface, link, clean_at: AtomicU64::new(u64::MAX) })
    }

    /// Removes every slot of this instance but those in `keep`.
    ///
    /// # Errors
    /// If interfaces cannot be listed or removed.
    pub fn sweep(&self, keep: &[u32]) -> Result<(), NetError> {
        self.shared.sweep(keep)
    }

    /// Starts the DNS forwarder of the gateway address on the current tokio runtime. `None` when the mode is `None`.
    ///
    /// # Errors
    /// If no port can be had.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn serve_dns(&self) -> Result<Option<DnsForwarder>, NetError> {
        let Some(host) = &self.shared.host else { return Ok(None) };
        let forwarder = DnsForwarder::start(host.plan().gateway(), self.dns_servers.clone())?;
        host.redirect_dns(forwarder.port())?;
        Ok(Some(forwarder))
    }

    /// Stops watching. If no slot is left, the host's part goes too; otherwise it stays, for the sandboxes that use
    /// it and for the next start.
    ///
    /// # Errors
    /// If something cannot be removed.
    pub fn stop(mut self) -> Result<(), NetError> {
        self.watch = None;
        let instance = &self.shared.instance;
        let links = self.shared.links().list().map_err(NetError::system("list interfaces"))?;
        if links.iter().any(|link| slot_index(instance, &link.name).is_some()) {
            return Ok(());
        }
        setup::purge(instance)
    }

    /// Removes everything of this instance, slots in use included.
    ///
    /// # Errors
    /// If something cannot be removed.
    pub fn purge(mut self) -> Result<(), NetError> {
        self.watch = None;
        setup::purge(&self.shared.instance)
    }

    /// The same for an instance that does not run.
    ///
    /// # Errors
    /// If something cannot be removed.
    pub fn purge_instance(instance: &str) -> Result<(), NetError> {
        address::check_instance(instance)?;
        setup::purge(instance)
    }
}

impl Shared {
    fn links(&self) -> MutexGuard<'_, Links> {
        // The socket numbers its requests and skips answers to others: a panic elsewhere does it no harm.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the host forget a slot's connections, unless there cannot have been any.
    fn forget(&self, slot: &NetSlot) -> Result<(), NetError> {
        if self.host.is_none() {
            return Ok(());
        }
        let packets = self.links().packets(slot.link);
        let packets = packets.map_err(NetError::system(format!("read counters of {}", slot.interface)))?;
        if packets != slot.clean_at.load(Ordering::Relaxed) {
            self.forget_address(slot.address)?;
            slot.clean_at.store(packets, Ordering::Relaxed);
        }
        Ok(())
    }

    fn has_traffic(&self, slot: &NetSlot) -> bool {
        let packets = self.links().packets(slot.link);
        packets.map_or(true, |packets| packets != slot.clean_at.load(Ordering::Relaxed))
    }

    fn forget_address(&self, address: Ipv4Addr) -> Result<(), NetError> {
        self.host.as_ref().map_or(Ok(()), |host| host.filter().forget(address))
    }

    fn sweep(&self, keep: &[u32]) -> Result<(), NetError> {
        let mut links = self.links();
        let found = links.list().map_err(NetError::system("list interfaces"))?;
        let doomed: Vec<u32> = found
            .iter()
            .filter(|link| slot_index(&self.instance, &link.name).is_some_and(|slot| !keep.contains(&slot)))
            .map(|link| link.index)
            .collect();
        links.delete(DOOMED, &doomed).map_err(NetError::system("remove network slots nobody owns"))
    }
}

fn watch(shared: &Arc<Shared>) -> Result<Watch, NetError> {
    let shared = Arc::clone(shared);
    Watch::start(move || {
        if let Some(host) = &shared.host {
            host.mend();
        }
    })
    .map_err(NetError::system("watch the packet filter"))
}
