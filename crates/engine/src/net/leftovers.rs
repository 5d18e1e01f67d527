//! What a sandbox leaves behind in its network namespace, and how the next one is spared it.
//!
//! A namespace that no sandbox ever administered keeps its links, addresses, routes, rules and settings. Left over
//! may be: connection tracking, learned neighbours, TCP metrics, and sockets that nobody owns any more (the kernel
//! still sends their last bytes) or that left the sandbox inside a message to another one.

use std::io;

use nlink::netlink::{AttrIter, MessageBuilder};

use super::links::Links;
use super::netlink::{ACK, DUMP, GENERIC, NETFILTER, REQUEST, SOCK_DIAG, Socket, absent};

const CONTROLLER: u16 = 0x10;
const CTRL_GETFAMILY: u8 = 3;
const CTRL_FAMILY_ID: u16 = 1;
const CTRL_FAMILY_NAME: u16 = 2;
const TCP_METRICS_DEL: u8 = 2;
const CONNTRACK_DELETE: u16 = (1 << 8) | 2;
const DIAG_BY_FAMILY: u16 = 20;
const DIAG_DESTROY: u16 = 21;

/// Number of the kernel's family for TCP metrics; it is the same in all namespaces.
pub(super) fn tcp_metrics_family() -> io::Result<u16> {
    let mut message = MessageBuilder::new(CONTROLLER, REQUEST);
    message.append_bytes(&[CTRL_GETFAMILY, 1, 0, 0]);
    message.append_attr_str(CTRL_FAMILY_NAME, "tcp_metrics");
    Socket::open(GENERIC)?.query(message, |payload| {
        let (_, id) = AttrIter::new(payload.get(4..)?).find(|(kind, _)| *kind == CTRL_FAMILY_ID)?;
        Some(u16::from_ne_bytes(id.try_into().ok()?))
    })
}

/// Clears the calling thread's namespace, in which no process is left. Gives a description of sockets that could not
/// be ended.
pub(super) fn clear(tcp_metrics: Option<u16>) -> io::Result<Option<String>> {
    let mut open = open_sockets()?;
    if open.is_some() {
        let listening = end_sockets()?;
        open = open_sockets()?.or_else(|| (listening > 0).then(|| format!("TCP: {listening} listening")));
    }
    if let Some(family) = tcp_metrics {
        let mut message = MessageBuilder::new(family, REQUEST | ACK);
        message.append_bytes(&[TCP_METRICS_DEL, 1, 0, 0]);
        Socket::open(GENERIC)?.request(message)?;
    }
    forget_connections()?;
    Links::open()?.flush_neighbours()?;
    Ok(open)
}

/// Empties connection tracking; a kernel without it has none to empty.
fn forget_connections() -> io::Result<()> {
    let mut message = MessageBuilder::new(CONNTRACK_DELETE, REQUEST | ACK);
    message.append_bytes(&[0, 0, 0, 0]);
    match Socket::open(NETFILTER)?.request(message) {
        Err(error) if absent(&error) || error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        other => other,
    }
}

/// Sockets of TCP, UDP and raw IP, and Unix sockets with a name, that exist in the calling thread's namespace.
fn open_sockets() -> io::Result<Option<String>> {
    let mut found = Vec::new();
    for path in ["/proc/thread-self/net/sockstat", "/proc/thread-self/net/sockstat6"] {
        let counts = match std::fs::read_to_string(path) {
            Ok(counts) => counts,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        found.extend(counts.lines().filter_map(in_use));
    }
    // One line is the heading. Unix sockets appear here while they are bound, connected or listening.
    let unix = std::fs::read_to_string("/proc/thread-self/net/unix")?.lines().count().saturating_sub(1);
    if unix > 0 {
        found.push(format!("Unix: {unix}"));
    }
    Ok((!found.is_empty()).then(|| found.join(", ")))
}

/// `TCP: inuse 2 orphan 0 …`, if the count is not 0.
fn in_use(line: &str) -> Option<String> {
    let mut words = line.split_ascii_whitespace();
    let (protocol, _) = (words.next()?, words.next().filter(|word| *word == "inuse")?);
    let count: u64 = words.next()?.parse().ok()?;
    (count > 0).then(|| format!("{protocol} {count}"))
}

/// Aborts every TCP and UDP socket of the calling thread's namespace, whoever holds it. A socket that was bound to a
/// port of its choice keeps that all the same as long as it is open: gives the number of those that listened, which
/// the counts in use no longer show.
fn end_sockets() -> io::Result<usize> {
    const LISTENING: u8 = 10;
    let mut listening = 0;
    let mut diag = Socket::open(SOCK_DIAG)?;
    for family in [libc::AF_INET, libc::AF_INET6] {
        for protocol in [libc::IPPROTO_TCP, libc::IPPROTO_UDP] {
            let mut header = [0_u8; 56];
            (header[0], header[1]) = (family as u8, protocol as u8);
            header[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
            let mut list = MessageBuilder::new(DIAG_BY_FAMILY, REQUEST | DUMP);
            list.append_bytes(&header);
            let mut sockets = Vec::new();
            let listed = diag.dump(list, |payload| {
                // struct inet_diag_msg: four bytes of state, then the socket's id, which names it in a request.
                listening += usize::from(payload.get(1) == Some(&LISTENING));
                sockets.extend(payload.get(4..52).and_then(|id| <[u8; 48]>::try_from(id).ok()));
            });
            match listed {
                // The kernel lacks the protocol or its list.
                Err(error) if absent(&error) => continue,
                other => other?,
            }
            for id in sockets {
                header[8..56].copy_from_slice(&id);
                let mut destroy = MessageBuilder::new(DIAG_DESTROY, REQUEST | ACK);
                destroy.append_bytes(&header);
                // It may have gone by itself, or be of a state or kernel that refuses; what is left is counted after.
                if let Err(error) = diag.request(destroy) {
                    tracing::debug!(%error, "a socket of an ended sandbox was not aborted");
                }
            }
        }
    }
    Ok(listening)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_in_use_are_found() {
        assert_eq!(in_use("TCP: inuse 2 orphan 0 tw 4 alloc 5 mem 1"), Some("TCP: 2".to_owned()));
        assert_eq!(in_use("UDP6: inuse 1"), Some("UDP6: 1".to_owned()));
        for line in ["sockets: used 155", "UDPLITE: inuse 0", "FRAG: inuse", "", "TCP: inuse x"] {
            assert_eq!(in_use(line), None, "{line}");
        }
    }
}
