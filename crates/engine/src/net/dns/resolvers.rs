//! Whom to ask: as configured, or as the host's `/etc/resolv.conf` says right now.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::os::linux::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Port of DNS.
const PORT: u16 = 53;
/// Asked when the host names nobody: two public services that promise to answer everyone.
const PUBLIC: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(1, 1, 1, 1)), PORT),
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(8, 8, 8, 8)), PORT),
];
/// More servers than this only make a failure slower.
const MOST: usize = 4;

/// The servers to ask, in order.
#[derive(Debug)]
pub(super) struct Resolvers {
    source: Source,
}

#[derive(Debug)]
enum Source {
    Fixed(Arc<[SocketAddr]>),
    File { path: PathBuf, own: Ipv4Addr, last: Mutex<(Option<Stamp>, Arc<[SocketAddr]>)> },
}

/// What changes when a file is written or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Resolvers {
    pub(super) fn fixed(servers: Vec<SocketAddr>) -> Self {
        let servers = if servers.is_empty() { PUBLIC.to_vec() } else { servers };
        Self { source: Source::Fixed(servers.into()) }
    }

    /// Follows a file of the form of `resolv.conf`; `own` is never asked.
    pub(super) fn follow(path: PathBuf, own: Ipv4Addr) -> Self {
        Self { source: Source::File { path, own, last: Mutex::new((None, PUBLIC.into())) } }
    }

    /// The servers now. One `stat` per question is cheaper than to be told of replaced files behind symbolic links,
    /// and never late.
    pub(super) fn servers(&self) -> Arc<[SocketAddr]> {
        let (path, own, last) = match &self.source {
            Source::Fixed(servers) => return Arc::clone(servers),
            Source::File { path, own, last } => (path, *own, last),
        };
        let stamp = std::fs::metadata(path).ok().map(|found| Stamp {
            device: found.st_dev(),
            inode: found.st_ino(),
            size: found.st_size(),
            changed: (found.st_ctime(), found.st_ctime_nsec()),
        });
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.0 != stamp {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let servers = parse(&text, own);
            tracing::debug!(?servers, "DNS servers of the host");
            *last = (stamp, servers.into());
        }
        Arc::clone(&last.1)
    }
}

fn parse(text: &str, own: Ipv4Addr) -> Vec<SocketAddr> {
    let mut servers = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let server = if words.next() == Some("nameserver") { words.next().and_then(server) } else { None };
        // A forwarder that asks itself never answers.
        servers.extend(server.filter(|server| server.ip() != own && !servers.contains(server)));
        if servers.len() == MOST {
            break;
        }
    }
    if servers.is_empty() { PUBLIC.to_vec() } else { servers }
}

/// An address, of IPv6 also with a zone: `fe80::1%eth0`.
fn server(word: &str) -> Option<SocketAddr> {
    let Some((address, zone)) = word.split_once('%') else {
        return word.parse().ok().map(|address: IpAddr| SocketAddr::new(address, PORT));
    };
    let scope = match zone.parse() {
        Ok(index) => index,
        Err(_) => super::super::links::Links::open().ok()?.index(zone).ok()?,
    };
    Some(SocketAddrV6::new(address.parse().ok()?, PORT, 0, scope).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<String> {
        parse(text, Ipv4Addr::new(10, 231, 0, 1)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn name_servers_are_read_as_resolvers_read_them() {
        let text = "# comment\nsearch example.org\nnameserver 127.0.0.53\n nameserver\t2001:db8::1 # x\n\
                    nameserver bogus\nnameserver 127.0.0.53\nnameserver 10.231.0.1\noptions edns0\n";
        assert_eq!(parsed(text), ["127.0.0.53:53", "[2001:db8::1]:53"]);
        assert_eq!(parsed("nameserver fe80::1%7"), ["[fe80::1%7]:53"]);
        assert_eq!(parsed("nameserver fe80::1%lo"), ["[fe80::1%1]:53"]);
        for nobody in ["", "#nameserver 1.2.3.4", "nameserver 10.231.0.1", "nameserver"] {
            assert_eq!(parsed(nobody), ["1.1.1.1:53", "8.8.8.8:53"], "{nobody}");
        }
    }

    #[test]
    fn a_changed_file_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("resolv.conf");
        let resolvers = Resolvers::follow(path.clone(), Ipv4Addr::LOCALHOST);
        let first = |resolvers: &Resolvers| resolvers.servers()[0].to_string();
        assert_eq!(first(&resolvers), "1.1.1.1:53", "no file");
        std::fs::write(&path, "nameserver 192.0.2.1\n").unwrap();
        assert_eq!(first(&resolvers), "192.0.2.1:53");
        let other = directory.path().join("new");
        std::fs::write(&other, "nameserver 192.0.2.2\n").unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(first(&resolvers), "192.0.2.2:53");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(first(&resolvers), "1.1.1.1:53");
    }
}
