//! Interfaces, addresses, routes and neighbours over rtnetlink.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use nlink::netlink::{AttrIter, MessageBuilder};

use super::address::Cidr;
use super::netlink::{ACK, CREATE, DUMP, EXCLUSIVE, REPLACE, REQUEST, ROUTE, Socket, absent, u32_at, u64_at};

const NEWLINK: u16 = 16;
const DELLINK: u16 = 17;
const GETLINK: u16 = 18;
const NEWADDR: u16 = 20;
const GETADDR: u16 = 22;
const NEWROUTE: u16 = 24;
const GETROUTE: u16 = 26;
const NEWNEIGH: u16 = 28;
const DELNEIGH: u16 = 29;
const GETNEIGH: u16 = 30;
const GETSTATS: u16 = 94;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_GROUP: u16 = 27;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_NUM_TX_QUEUES: u16 = 31;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const IFLA_STATS_LINK_64: u16 = 1;

const INET: u8 = libc::AF_INET as u8;
const UP: u32 = libc::IFF_UP as u32;
/// Nothing is ever asked for by ARP: both ends know each other by permanent entries, so a slot can neither fill the
/// host's neighbour table nor depend on `arp_ignore` and its kin.
const NO_ARP: u32 = libc::IFF_NOARP as u32;
const NUD_PERMANENT: u16 = 0x80;

/// Name of the interface inside a slot.
pub(super) const INSIDE: &str = "eth0";
/// Index of the loopback interface in every namespace.
const LOOPBACK: u32 = 1;
/// Link-layer address of the host's end of every slot, as good as any since the two ends are a wire of their own.
const HOST_MAC: [u8; 6] = [0x02, 0x6f, 0x73, 0x62, 0, 1];
/// The same of the slot's end.
const SLOT_MAC: [u8; 6] = [0x02, 0x6f, 0x73, 0x62, 0, 2];

/// An rtnetlink socket of one namespace.
#[derive(Debug)]
pub(super) struct Links(Socket);

/// One interface of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
}

impl Links {
    /// For the calling thread's namespace.
    pub(super) fn open() -> io::Result<Self> {
        Socket::open(ROUTE).map(Self)
    }

    /// The same, also told of changes of interfaces, for [`Links::wait_for_slot_end`].
    pub(super) fn open_told() -> io::Result<Self> {
        const LINK_GROUP: u32 = 1;
        Socket::subscribed(ROUTE, LINK_GROUP).map(Self)
    }

    /// Makes the interface that holds the gateway address, and the route that keeps the rest of the pool here.
    pub(super) fn add_gateway(&mut self, name: &str, gateway: Ipv4Addr, pool: Cidr) -> io::Result<()> {
        // Either kind holds an address and carries nothing. Some kernels for virtual machines lack the first.
        self.add_idle("dummy", name).or_else(|error| match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => self.add_idle("bridge", name),
            _ => Err(error),
        })?;
        let index = self.index(name)?;
        self.0.batch([address(index, gateway, pool.prefix()), link(NEWLINK, REQUEST | ACK, index, UP, UP)])
    }

    fn add_idle(&mut self, kind: &str, name: &str) -> io::Result<()> {
        let mut message = link(NEWLINK, REQUEST | ACK | CREATE | EXCLUSIVE, 0, NO_ARP, NO_ARP);
        message.append_attr_str(IFLA_IFNAME, name);
        let info = message.nest_start(IFLA_LINKINFO);
        message.append_attr_str(IFLA_INFO_KIND, kind);
        message.nest_end(info);
        self.0.request(message)
    }

    /// Makes a pair of interfaces: `name` here, [`INSIDE`] in `namespace`. Gives the index of the one here.
    pub(super) fn add_pair(&mut self, name: &str, namespace: BorrowedFd<'_>) -> io::Result<u32> {
        let mut message = link(NEWLINK, REQUEST | ACK | CREATE | EXCLUSIVE, 0, NO_ARP, NO_ARP);
        message.append_attr_str(IFLA_IFNAME, name);
        message.append_attr(IFLA_ADDRESS, &HOST_MAC);
        single_queue(&mut message);
        let info = message.nest_start(IFLA_LINKINFO);
        message.append_attr_str(IFLA_INFO_KIND, "veth");
        let data = message.nest_start(IFLA_INFO_DATA);
        let peer = message.nest_start(VETH_INFO_PEER);
        message.append_bytes(&link_header(0, NO_ARP, NO_ARP));
        message.append_attr_str(IFLA_IFNAME, INSIDE);
        message.append_attr(IFLA_ADDRESS, &SLOT_MAC);
        message.append_attr_u32(IFLA_NET_NS_FD, namespace.as_raw_fd().cast_unsigned());
        single_queue(&mut message);
        message.nest_end(peer);
        message.nest_end(data);
        message.nest_end(info);
        self.0.request(message)?;
        self.index(name)
    }

    /// Host's end of a slot: up, and the one way to the slot's address.
    pub(super) fn open_host_end(&mut self, index: u32, slot: Ipv4Addr, gateway: Ipv4Addr) -> io::Result<()> {
        self.0.batch([
            link(NEWLINK, REQUEST | ACK, index, UP, UP),
            route(index, Some((slot, gateway)), None),
            neighbour(index, slot, SLOT_MAC),
        ])
    }

    /// Loopback up.
    pub(super) fn open_loopback(&mut self) -> io::Result<()> {
        self.0.request(link(NEWLINK, REQUEST | ACK, LOOPBACK, UP, UP))
    }

    /// Slot's end: address, up, and everything goes to the gateway.
    pub(super) fn open_slot_end(&mut self, slot: Ipv4Addr, gateway: Ipv4Addr) -> io::Result<()> {
        let index = self.index(INSIDE)?;
        self.0.batch([
            address(index, slot, 32),
            link(NEWLINK, REQUEST | ACK, index, UP, UP),
            neighbour(index, gateway, HOST_MAC),
            route(index, None, Some(gateway)),
        ])
    }

    /// Waits until the slot's end can send, when the host's end is up. The kernel sees to that behind the scenes
    /// (newer ones at the latest when asked), and what a sandbox sent before would be lost and cost it a second.
    pub(super) fn wait_for_slot_end(&mut self) -> io::Result<()> {
        const OPERATIONAL: u8 = 6;
        self.0.limit_waiting(Duration::from_secs(1))?;
        let mut buffer = Vec::new();
        loop {
            let mut message = link(GETLINK, REQUEST, 0, 0, 0);
            message.append_attr_str(IFLA_IFNAME, INSIDE);
            let state = self
                .0
                .query(message, |payload| attribute(payload.get(16..)?, IFLA_OPERSTATE)?.first().copied())?;
            if state == OPERATIONAL {
                return Ok(());
            }
            match self.0.receive(&mut buffer) {
                // So many changes that some were not told.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                other => drop(other?),
            }
        }
    }

    /// Index of an interface.
    pub(super) fn index(&mut self, name: &str) -> io::Result<u32> {
        let mut message = link(GETLINK, REQUEST, 0, 0, 0);
        message.append_attr_str(IFLA_IFNAME, name);
        self.0.query(message, |payload| u32_at(payload, 4))
    }

    /// Packets that went through an interface, both ways.
    pub(super) fn packets(&mut self, index: u32) -> io::Result<u64> {
        let mut message = MessageBuilder::new(GETSTATS, REQUEST);
        let mut header = [0_u8; 12];
        header[4..8].copy_from_slice(&index.to_ne_bytes());
        header[8..12].copy_from_slice(&1_u32.to_ne_bytes());
        message.append_bytes(&header);
        self.0.query(message, |payload| {
            let stats = attribute(payload.get(12..)?, IFLA_STATS_LINK_64)?;
            Some(u64_at(stats, 0)?.wrapping_add(u64_at(stats, 8)?))
        })
    }

    /// All interfaces.
    pub(super) fn list(&mut self) -> io::Result<Vec<Link>> {
        let mut links = Vec::new();
        self.0.dump(link(GETLINK, REQUEST | DUMP, 0, 0, 0), |payload| {
            let name = payload.get(16..).and_then(|attributes| attribute(attributes, IFLA_IFNAME));
            if let (Some(index), Some(name)) = (u32_at(payload, 4), name) {
                let name = name.strip_suffix(b"\0").unwrap_or(name);
                links.push(Link { index, name: String::from_utf8_lossy(name).into_owned() });
            }
        })?;
        Ok(links)
    }

    /// Deletes interfaces. Each deletion waits for a grace period of some 20 ms, but a group shares one, so all are
    /// put into a group of their own first. Interfaces that are gone already are no error.
    pub(super) fn delete(&mut self, group: u32, links: &[u32]) -> io::Result<()> {
        if let [index] = links {
            let result = self.0.request(link(DELLINK, REQUEST | ACK, *index, 0, 0));
            return result.or_else(|error| if absent(&error) { Ok(()) } else { Err(error) });
        }
        for chunk in links.chunks(64) {
            let grouped = chunk.iter().map(|index| {
                let mut message = link(NEWLINK, REQUEST | ACK, *index, 0, 0);
                message.append_attr_u32(IFLA_GROUP, group);
                message
            });
            let result = self.0.batch(grouped);
            result.or_else(|error| if absent(&error) { Ok(()) } else { Err(error) })?;
        }
        if links.is_empty() {
            return Ok(());
        }
        let mut message = link(DELLINK, REQUEST | ACK, 0, 0, 0);
        message.append_attr_u32(IFLA_GROUP, group);
        self.0.request(message).or_else(|error| if absent(&error) { Ok(()) } else { Err(error) })
    }

    /// IPv4 addresses of an interface.
    pub(super) fn addresses(&mut self, index: u32) -> io::Result<Vec<Ipv4Addr>> {
        let mut message = MessageBuilder::new(GETADDR, REQUEST | DUMP);
        message.append_bytes(&[INET, 0, 0, 0, 0, 0, 0, 0]);
        let mut found = Vec::new();
        self.0.dump(message, |payload| {
            if u32_at(payload, 4) == Some(index) {
                found.extend(payload.get(8..).and_then(|rest| ipv4(attribute(rest, IFA_LOCAL)?)));
            }
        })?;
        Ok(found)
    }

    /// Every IPv4 route of every table, with the index of its interface (0 if it has none).
    pub(super) fn routes(&mut self) -> io::Result<Vec<(Cidr, u32)>> {
        let mut message = MessageBuilder::new(GETROUTE, REQUEST | DUMP);
        message.append_bytes(&[INET, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut found = Vec::new();
        self.0.dump(message, |payload| {
            let (Some(prefix), Some(attributes)) = (payload.get(1), payload.get(12..)) else { return };
            let target = attribute(attributes, RTA_DST).and_then(ipv4).unwrap_or(Ipv4Addr::UNSPECIFIED);
            let device = attribute(attributes, RTA_OIF).and_then(|bytes| u32_at(bytes, 0)).unwrap_or(0);
            found.push((Cidr::new(target, *prefix), device));
        })?;
        Ok(found)
    }

    /// Forgets every neighbour that was not set up with the slot.
    pub(super) fn flush_neighbours(&mut self) -> io::Result<()> {
        let mut learned = Vec::new();
        let mut message = MessageBuilder::new(GETNEIGH, REQUEST | DUMP);
        message.append_bytes(&[0; 12]);
        self.0.dump(message, |payload| {
            // struct ndmsg: family, padding, index, state, flags, type.
            let Some(header) = payload.first_chunk::<12>() else { return };
            let state = u16::from_ne_bytes([header[8], header[9]]);
            let target = attribute(&payload[12..], NDA_DST);
            if let (0, Some(target)) = (state & NUD_PERMANENT, target) {
                let mut message = MessageBuilder::new(DELNEIGH, REQUEST | ACK);
                message.append_bytes(header);
                message.append_attr(NDA_DST, target);
                learned.push(message);
            }
        })?;
        if learned.is_empty() {
            return Ok(());
        }
        // Entries may time out between the two calls.
        self.0.batch(learned).or_else(|error| if absent(&error) { Ok(()) } else { Err(error) })
    }
}

/// struct ifinfomsg: family, padding, type, index, flags, mask of flags to change.
fn link_header(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&change.to_ne_bytes());
    header
}

fn link(kind: u16, request: u16, index: u32, flags: u32, change: u32) -> MessageBuilder {
    let mut message = MessageBuilder::new(kind, request);
    message.append_bytes(&link_header(index, flags, change));
    message
}

/// One queue each way: the default is one per processor, each with objects in sysfs.
fn single_queue(message: &mut MessageBuilder) {
    message.append_attr_u32(IFLA_NUM_TX_QUEUES, 1);
    message.append_attr_u32(IFLA_NUM_RX_QUEUES, 1);
}

fn address(index: u32, address: Ipv4Addr, prefix: u8) -> MessageBuilder {
    let mut message = MessageBuilder::new(NEWADDR, REQUEST | ACK | CREATE | REPLACE);
    message.append_bytes(&[INET, prefix, 0, 0]);
    message.append_bytes(&index.to_ne_bytes());
    message.append_attr(IFA_LOCAL, &address.octets());
    message.append_attr(IFA_ADDRESS, &address.octets());
    message
}

/// To a target, from a source address that the host prefers for it; or to everywhere, by a gateway.
fn route(index: u32, target: Option<(Ipv4Addr, Ipv4Addr)>, gateway: Option<Ipv4Addr>) -> MessageBuilder {
    const MAIN: u8 = libc::RT_TABLE_MAIN;
    const STATIC: u8 = libc::RTPROT_STATIC;
    const UNICAST: u8 = libc::RTN_UNICAST;
    let scope = if gateway.is_some() { libc::RT_SCOPE_UNIVERSE } else { libc::RT_SCOPE_LINK };
    let prefix = if target.is_some() { 32 } else { 0 };
    // A gateway is reached over this interface although no prefix of it says so.
    let flags: u32 = if gateway.is_some() { 4 } else { 0 };
    let mut message = MessageBuilder::new(NEWROUTE, REQUEST | ACK | CREATE | REPLACE);
    message.append_bytes(&[INET, prefix, 0, 0, MAIN, STATIC, scope, UNICAST]);
    message.append_bytes(&flags.to_ne_bytes());
    message.append_attr_u32(RTA_OIF, index);
    if let Some((target, source)) = target {
        message.append_attr(RTA_DST, &target.octets());
        message.append_attr(RTA_PREFSRC, &source.octets());
    }
    if let Some(gateway) = gateway {
        message.append_attr(RTA_GATEWAY, &gateway.octets());
    }
    message
}

fn neighbour(index: u32, address: Ipv4Addr, mac: [u8; 6]) -> MessageBuilder {
    let mut message = MessageBuilder::new(NEWNEIGH, REQUEST | ACK | CREATE | REPLACE);
    message.append_bytes(&[INET, 0, 0, 0]);
    message.append_bytes(&index.to_ne_bytes());
    let [low, high] = NUD_PERMANENT.to_ne_bytes();
    message.append_bytes(&[low, high, 0, 0]);
    message.append_attr(NDA_DST, &address.octets());
    message.append_attr(NDA_LLADDR, &mac);
    message
}

fn attribute(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    AttrIter::new(attributes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

fn ipv4(bytes: &[u8]) -> Option<Ipv4Addr> {
    bytes.try_into().ok().map(|octets: [u8; 4]| octets.into())
}
