//! Slots from their making to their end, and over restarts.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use osb_engine::net::{NetConfig, NetError, Network};

use crate::world::{
    HOST, PORT, PUBLIC, bind_strictly, config, inside, read, remains, root, say, visit, visit_in, world,
};

#[test]
fn a_new_slot_has_what_programs_need_and_no_ipv6_but_loopback() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let network = Network::start(config()).unwrap();
        let slot = network.make(0).unwrap();
        inside(&slot.netns, || {
            let setting = |name: &str| read(&format!("cat /proc/sys/net/{name}")).trim().replace('\t', " ");
            assert_eq!(setting("ipv4/ping_group_range"), "0 2147483647");
            assert_eq!(setting("ipv4/ip_unprivileged_port_start"), "0");
            assert_eq!(setting("ipv4/tcp_max_tw_buckets"), "0");
            assert_eq!(setting("ipv6/conf/eth0/disable_ipv6"), "1");
            assert_eq!(read("ip -6 -o addr | grep -v ' lo '"), "");
            assert!(TcpListener::bind("[::1]:0").is_ok() && TcpListener::bind("[::]:0").is_ok());
        });
        assert_eq!(read("ip -6 -o addr show dev osbabcdefv000"), "");
        network.purge().unwrap();
    });
}

#[test]
fn a_recycled_slot_is_as_new() {
    if !root() {
        return;
    }
    let (host, internet) = world();
    let listener = inside(&internet.netns, || UdpSocket::bind((PUBLIC, 7777))).unwrap();
    listener.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    host.run(move || {
        let network = Network::start(config()).unwrap();
        let slot = network.make(0).unwrap();
        // A sandbox talks to somebody over UDP; later the same port of the same address is somebody else's.
        let first = inside(&slot.netns, || UdpSocket::bind("0.0.0.0:5555").unwrap());
        first.send_to(b"hello", format!("{PUBLIC}:7777")).unwrap();
        let mut buffer = [0; 16];
        let (_, peer) = listener.recv_from(&mut buffer).unwrap();
        drop(first);
        assert_eq!(visit(&slot, PUBLIC).unwrap(), HOST);
        // A server that was talked to and closed first: its port would be taken for a minute.
        let loopback = inside(&slot.netns, || {
            let listener = TcpListener::bind("127.0.0.1:6666").unwrap();
            let client = TcpStream::connect("127.0.0.1:6666").unwrap();
            drop(listener.accept().unwrap());
            (listener, client)
        });
        drop(loopback);
        // A connection that the server still holds, to a port whose owner has ended.
        let mut pooled = inside(&slot.netns, || {
            let listener = TcpListener::bind("0.0.0.0:80").unwrap();
            let client = TcpStream::connect("127.0.0.1:80").unwrap();
            (listener.accept().unwrap(), client)
        });
        network.recycle(&slot).unwrap();
        assert!(pooled.1.read(&mut buffer).is_err(), "aborted");
        inside(&slot.netns, || {
            let next = (bind_strictly(80), bind_strictly(6666));
            assert!(next.0.is_ok() && next.1.is_ok(), "{next:?}");
        });
        let second = inside(&slot.netns, || UdpSocket::bind("0.0.0.0:5555").unwrap());
        second.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        listener.send_to(b"late", peer).unwrap();
        assert!(second.recv_from(&mut buffer).is_err(), "a late answer to the first sandbox");
        drop(second);
        // What cannot be ended from outside is reported.
        let address = std::os::unix::net::SocketAddr::from_abstract_name("left").unwrap();
        let abstract_socket = inside(&slot.netns, || UnixListener::bind_addr(&address).unwrap());
        assert!(matches!(network.recycle(&slot), Err(NetError::StillUsed { index: 0, .. })));
        drop(abstract_socket);
        network.recycle(&slot).unwrap();
        let bound = inside(&slot.netns, || UdpSocket::bind("0.0.0.0:81").unwrap());
        assert!(matches!(network.recycle(&slot), Err(NetError::StillUsed { index: 0, .. })));
        drop(bound);
        let listening = inside(&slot.netns, || TcpListener::bind("[::]:81").unwrap());
        assert!(matches!(network.recycle(&slot), Err(NetError::StillUsed { index: 0, .. })));
        drop(listening);
        network.recycle(&slot).unwrap();
        network.destroy(slot).unwrap();
        network.stop().unwrap();
    });
}

#[test]
fn slots_outlive_the_server_and_are_taken_back() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let network = Network::start(config()).unwrap();
        let (kept, lost) = (network.make(4).unwrap(), network.make(5).unwrap());
        let address: SocketAddr = format!("{PUBLIC}:{PORT}").parse().unwrap();
        let mut stream =
            inside(&kept.netns, || TcpStream::connect_timeout(&address, Duration::from_secs(1))).unwrap();
        let mut buffer = [0; 64];
        let length = stream.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], HOST.as_bytes());

        let (netns, other) = (kept.netns.try_clone().unwrap(), lost.netns.try_clone().unwrap());
        let home = OwnedFd::from(std::fs::File::open("/proc/thread-self/ns/net").unwrap());
        drop((kept, lost));
        network.stop().unwrap();
        assert!(visit_in(&netns, "10.9.9.9").is_err(), "rules stay with the sandboxes");

        // The next life, with other rules: the pool stays, connections go on.
        let wide = NetConfig { allow_private: vec!["10.9.0.0/16".parse().unwrap()], ..config() };
        let other_pool = NetConfig { pool: Some("10.50.0.0/16".parse().unwrap()), ..config() };
        assert!(matches!(Network::start(other_pool), Err(NetError::PoolChanged { .. })));
        let network = Network::start(wide).unwrap();
        assert!(matches!(network.adopt(4, other), Err(NetError::Adopt { .. })), "another slot's namespace");
        assert!(matches!(network.adopt(4, home), Err(NetError::Adopt { .. })), "the host's namespace");
        let slot = network.adopt(4, netns).unwrap();
        assert_eq!(slot.address, Ipv4Addr::new(10, 231, 0, 6));
        network.sweep(&[4]).unwrap();
        let links = read("ip -o link");
        assert!(links.contains("osbabcdefv004") && !links.contains("osbabcdefv005"), "{links}");
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        stream.write_all(b"still here").unwrap();
        let length = stream.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"still here");
        assert_eq!(visit(&slot, "10.9.9.9").unwrap(), HOST);
        drop(stream);
        network.recycle(&slot).unwrap();
        network.destroy(slot).unwrap();
        network.stop().unwrap();
        assert!(!read("ip -o link; nft list ruleset").contains("osb"));
        assert_eq!(read("cat /proc/sys/net/ipv4/ip_forward").trim(), "0");
    });
}

/// Network namespaces that are alive on this machine, as far as interfaces of slots show them.
fn slot_links() -> usize {
    read("ip -o link").lines().filter(|line| line.contains("osbabcdefv")).count()
}

#[test]
fn making_and_removing_two_hundred_leaves_nothing() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let began = Instant::now();
        let network = Network::start(config()).unwrap();
        let started = began.elapsed();
        let before = (remains(), std::fs::read_dir("/proc/self/fd").unwrap().count());
        let mut times = Vec::new();
        let mut recycled = Vec::new();
        for round in 0..2 {
            let mut slots = Vec::new();
            for index in 0..100 {
                let began = Instant::now();
                slots.push(network.make(index).unwrap());
                times.push(began.elapsed());
            }
            assert_eq!(slot_links(), 100);
            for slot in &slots {
                let began = Instant::now();
                network.recycle(slot).unwrap();
                recycled.push(began.elapsed());
            }
            if round == 0 {
                network.destroy_all(slots).unwrap();
            } else {
                drop(slots);
                network.sweep(&[]).unwrap();
            }
            assert_eq!(slot_links(), 0);
        }
        let slot = network.make(0).unwrap();
        let mut busy = Vec::new();
        for _ in 0..20 {
            visit(&slot, PUBLIC).unwrap();
            let began = Instant::now();
            network.recycle(&slot).unwrap();
            busy.push(began.elapsed());
        }
        // A slot in the way, as a crash leaves it, is replaced.
        let again = network.make(0).unwrap();
        drop(slot);
        network.destroy(again).unwrap();
        for list in [&mut times, &mut recycled, &mut busy] {
            list.sort_unstable();
        }
        say(&format!(
            "start {started:?}, make p50 {:?} p90 {:?}, recycle unused p50 {:?}, used p50 {:?}",
            times[100], times[180], recycled[100], busy[10]
        ));
        assert_eq!(remains(), before.0);
        // Other tests of this process open and close descriptors meanwhile.
        let now = std::fs::read_dir("/proc/self/fd").unwrap().count();
        assert!(now < before.1 + 100, "{} descriptors became {now}", before.1);
        network.stop().unwrap();
    });
}
