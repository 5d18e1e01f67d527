//! What a sandbox reaches, and who reaches it.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use osb_engine::net::{Cidr, Mode, NetConfig, Network};

use crate::world::{
    HOST, PORT, PRIVATE, PUBLIC, config, datagram, eventually, fake_dns, inside, output, question, read,
    remains, resolve, root, run, runtime, serve, serve_datagrams, visit, visit_here, world,
};

#[test]
fn a_slot_reaches_the_internet_and_nothing_else() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let before = remains();
        let network = Network::start(config()).unwrap();
        let slot = network.make(0).unwrap();
        let other = network.make(1).unwrap();
        assert_eq!(slot.address, Ipv4Addr::new(10, 231, 0, 2));
        assert_eq!(slot.gateway, Ipv4Addr::new(10, 231, 0, 1));
        assert_eq!(network.resolv_conf(), "nameserver 10.231.0.1\n");
        assert_eq!(visit(&slot, PUBLIC).unwrap(), HOST, "the source address is the host's");
        assert_eq!(datagram(&slot, PUBLIC).unwrap(), HOST);
        // A service in the other slot, and the host's on every address it has.
        inside(&other.netns, || {
            serve(&format!("0.0.0.0:{PORT}"));
            serve_datagrams(&other.address.to_string());
        });
        serve_datagrams("10.231.0.1");
        assert_eq!(inside(&other.netns, || visit_here("127.0.0.1")).unwrap(), "127.0.0.1");
        let gateway = slot.gateway.to_string();
        let neighbour = other.address.to_string();
        for address in
            PRIVATE.iter().copied().chain([HOST, &gateway, &neighbour, "192.168.77.1", "10.231.77.7"])
        {
            let began = Instant::now();
            let answer = visit(&slot, address);
            assert!(answer.is_err(), "{address} answered {answer:?}");
            if address != neighbour && address != "10.231.77.7" {
                assert!(began.elapsed() < Duration::from_millis(500), "{address}: refused, not ignored");
            }
            assert!(datagram(&slot, address).is_err(), "{address} answered a datagram");
        }
        let ping = |address: &str| {
            inside(&slot.netns, || output(&format!("ping -c1 -W1 {address}")).status.success())
        };
        if !read("command -v ping").is_empty() {
            assert!(ping(&gateway) && ping(PUBLIC));
            assert!(!ping(HOST) && !ping(&neighbour));
        }
        network.destroy(other).unwrap();
        network.destroy(slot).unwrap();
        network.stop().unwrap();
        assert_eq!(remains(), before, "nothing stays, forwarding is as it was");
    });
}

#[test]
fn nobody_outside_reaches_a_slot() {
    if !root() {
        return;
    }
    let (host, internet) = world();
    let (address, network) = host.run(|| {
        let network = Network::start(config()).unwrap();
        let slot = network.make(3).unwrap();
        inside(&slot.netns, || serve(&format!("0.0.0.0:{PORT}")));
        let address = slot.address.to_string();
        assert_eq!(visit_here(&address).unwrap(), "10.231.0.1", "the host itself may");
        (address, (network, slot))
    });
    internet.run(move || {
        run(&format!("ip route add 10.231.0.0/16 via {HOST}"));
        assert!(visit_here(&address).is_err());
    });
    host.run(move || network.0.purge().unwrap());
}

#[test]
fn opened_ranges_are_open() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let allow_private =
            ["172.20.0.0/16", "172.20.0.0/24", HOST].map(|range| range.parse::<Cidr>().unwrap());
        let network =
            Network::start(NetConfig { allow_private: allow_private.to_vec(), ..config() }).unwrap();
        let (slot, other) = (network.make(0).unwrap(), network.make(1).unwrap());
        assert_eq!(visit(&slot, "172.20.0.1").unwrap(), HOST);
        assert_eq!(visit(&slot, HOST).unwrap(), slot.address.to_string(), "a host address named singly");
        for closed in ["10.9.9.9", "169.254.169.254", "10.231.0.1"] {
            assert!(visit(&slot, closed).is_err(), "{closed}");
        }
        network.purge().unwrap();
        // The host's address inside a range, and the pool itself, stay closed.
        let allow_private = ["192.168.0.0/16", "10.0.0.0/8"].map(|range| range.parse::<Cidr>().unwrap());
        let config = NetConfig { allow_private: allow_private.to_vec(), ..config() };
        drop((slot, other));
        let network = Network::start(config).unwrap();
        let (slot, other) = (network.make(0).unwrap(), network.make(1).unwrap());
        inside(&other.netns, || serve(&format!("0.0.0.0:{PORT}")));
        assert_eq!(visit(&slot, "192.168.88.1").unwrap(), HOST);
        assert_eq!(visit(&slot, "10.9.9.9").unwrap(), HOST);
        assert!(visit(&slot, HOST).is_err());
        assert!(visit(&slot, &other.address.to_string()).is_err());
        network.purge().unwrap();
    });
}

#[test]
fn modes_open_and_none() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let network = Network::start(NetConfig { mode: Mode::Open, ..config() }).unwrap();
        let (slot, other) = (network.make(0).unwrap(), network.make(1).unwrap());
        inside(&other.netns, || serve(&format!("0.0.0.0:{PORT}")));
        for address in PRIVATE.iter().chain([&PUBLIC]) {
            assert_eq!(visit(&slot, address).unwrap(), HOST, "{address}");
        }
        assert!(visit(&slot, HOST).is_err(), "services of the host stay closed");
        assert!(visit(&slot, &other.address.to_string()).is_err(), "other sandboxes too");
        network.purge().unwrap();
    });
    host.run(|| {
        let before = remains();
        let network = Network::start(NetConfig { mode: Mode::None, ..config() }).unwrap();
        let slot = network.make(0).unwrap();
        assert_eq!(remains(), before, "no part on the host");
        assert_eq!((slot.address, network.pool()), (Ipv4Addr::LOCALHOST, None));
        assert!(network.resolv_conf().starts_with('#'));
        inside(&slot.netns, || serve(&format!("0.0.0.0:{PORT}")));
        assert_eq!(visit(&slot, "127.0.0.1").unwrap(), "127.0.0.1");
        assert!(visit(&slot, PUBLIC).is_err());
        let netns = slot.netns.try_clone().unwrap();
        assert_eq!(network.adopt(0, netns).unwrap().index, 0);
        network.destroy(slot).unwrap();
        network.stop().unwrap();
    });
}

#[test]
fn dns_is_answered_at_the_gateway() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let runtime = runtime();
        let network = Network::start(NetConfig { dns_servers: Some(vec![fake_dns()]), ..config() }).unwrap();
        let slot = network.make(0).unwrap();
        let mut expected = question();
        expected[2] |= 0x80;

        let guard = runtime.enter();
        let forwarder = network.serve_dns().unwrap().unwrap();
        assert_eq!(forwarder.port(), 53);
        assert_eq!(resolve(&slot).unwrap(), (expected.clone(), expected.clone()));
        drop(forwarder);

        // Somebody who listens on port 53 of every address does not stop it.
        eventually(|| UdpSocket::bind("0.0.0.0:53").is_ok() && TcpListener::bind("0.0.0.0:53").is_ok());
        let taken = (UdpSocket::bind("0.0.0.0:53").unwrap(), TcpListener::bind("0.0.0.0:53").unwrap());
        let forwarder = network.serve_dns().unwrap().unwrap();
        assert_ne!(forwarder.port(), 53);
        assert_eq!(resolve(&slot).unwrap(), (expected.clone(), expected));
        drop((taken, forwarder, guard));
        network.purge().unwrap();
    });
}

#[test]
fn a_foreign_source_address_and_ipv6_go_nowhere() {
    if !root() {
        return;
    }
    let (host, internet) = world();
    let (seen, mut log) = (internet.netns.try_clone().unwrap(), String::new());
    let listener = inside(&seen, || UdpSocket::bind("0.0.0.0:9999")).unwrap();
    let listener6 = inside(&seen, || UdpSocket::bind("[fd77::1]:9999")).unwrap();
    let host_listener = host.run(|| UdpSocket::bind("0.0.0.0:9998").unwrap());
    for socket in [&listener, &listener6, &host_listener] {
        socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    }
    let network = host.run(|| {
        // All that could help IPv6 along.
        run("sysctl -qw net.ipv6.conf.all.forwarding=1");
        let network = Network::start(NetConfig { mode: Mode::Open, ..config() }).unwrap();
        let slot = network.make(0).unwrap();
        let send = |from: &str, to: &str| {
            inside(&slot.netns, || UdpSocket::bind((from, 0)).unwrap().send_to(b"x", to))
        };
        assert!(send("10.231.0.2", &format!("{PUBLIC}:9999")).is_ok());
        // The test is root and may do in the slot what no sandbox can.
        inside(&slot.netns, || {
            run("ip addr add 10.231.0.77/32 dev eth0; ip addr add 1.2.3.4/32 dev eth0");
            run("sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0; ip addr add fd99::2/64 dev eth0 nodad");
            run("ip -6 route add fd77::/64 dev eth0; ip -6 neigh add fd77::1 lladdr 02:6f:73:62:00:01 dev eth0");
            run("ip -6 neigh add fd77::2 lladdr 02:6f:73:62:00:01 dev eth0");
        });
        run("sysctl -qw net.ipv6.conf.osbabcdefv000.disable_ipv6=0 net.ipv6.conf.osbabcdefv000.forwarding=1");
        run("ip addr add fd99::1/64 dev osbabcdefv000 nodad");
        for (from, to) in [
            ("10.231.0.77", format!("{PUBLIC}:9999")),
            ("1.2.3.4", format!("{PUBLIC}:9999")),
            ("1.2.3.4", "10.231.0.1:9998".to_owned()),
            ("fd99::2", "[fd77::1]:9999".to_owned()),
        ] {
            let _ = send(from, &to);
        }
        (network, slot)
    });
    let mut buffer = [0; 16];
    while let Ok((_, peer)) = listener.recv_from(&mut buffer) {
        log += &format!("{} ", peer.ip());
    }
    assert_eq!(log, format!("{HOST} "), "only the honest datagram arrived");
    assert!(listener6.recv_from(&mut buffer).is_err(), "no IPv6");
    assert!(host_listener.recv_from(&mut buffer).is_err());
    host.run(move || {
        let (network, slot) = network;
        drop(slot);
        network.purge().unwrap();
    });
}
