//! The network of sandboxes, on a host of the test's own: every test runs in a network namespace that plays the host,
//! joined to another one that plays the internet and the private networks behind it. Needs root.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use osb_engine::net::{Cidr, Mode, NetConfig, NetError, NetSlot, Network};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

const INSTANCE: &str = "abcdef";
/// Addresses of the namespace that plays the internet: two public ones, and what must not be reached.
const PUBLIC: &str = "93.184.215.14";
const PRIVATE: [&str; 7] =
    ["169.254.169.254", "10.9.9.9", "172.20.0.1", "192.168.88.1", "100.64.1.1", "198.18.0.1", "192.0.2.9"];
const HOST: &str = "192.168.77.2";
const PORT: u16 = 8080;

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        writeln!(io::stderr(), "skipped: needs root").unwrap();
    }
    root
}

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace with a thread in it.
struct Space {
    jobs: mpsc::Sender<Job>,
    tid: i32,
    netns: OwnedFd,
}

impl Space {
    fn new() -> Self {
        let (jobs, inbox) = mpsc::channel::<Job>();
        let (told, tell) = mpsc::channel();
        std::thread::spawn(move || {
            // SAFETY: the table of descriptors stays shared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
            run("ip link set lo up");
            let netns = std::fs::File::open("/proc/thread-self/ns/net").unwrap().into();
            told.send((rustix::thread::gettid().as_raw_nonzero().get(), netns)).unwrap();
            for job in inbox {
                job();
            }
        });
        let (tid, netns) = tell.recv().unwrap();
        Self { jobs, tid, netns }
    }

    /// Runs `work` on the namespace's thread; threads and processes it starts are in the namespace too.
    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = mpsc::channel();
        let job = move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            done.send(outcome).unwrap();
        };
        self.jobs.send(Box::new(job)).unwrap();
        result.recv().unwrap().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn run(command: &str) {
    let output = output(command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

fn read(command: &str) -> String {
    String::from_utf8(output(command).stdout).unwrap()
}

fn output(command: &str) -> std::process::Output {
    Command::new("sh").args(["-c", command]).output().unwrap()
}

/// Answers every datagram with the address it came from. A socket of one address answers from that one.
fn serve_datagrams(address: &str) {
    let udp = UdpSocket::bind((address, PORT)).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(peer.ip().to_string().as_bytes(), peer);
        }
    });
}

/// Answers every connection with the address it came from, and then what it is told.
fn serve(address: &str) {
    let tcp = TcpListener::bind(address).unwrap();
    std::thread::spawn(move || {
        for stream in tcp.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let peer = stream.peer_addr().unwrap().ip().to_string();
                let _ = stream.write_all(peer.as_bytes());
                let mut rest = [0; 64];
                while let Ok(length @ 1..) = stream.read(&mut rest) {
                    let _ = stream.write_all(&rest[..length]);
                }
            });
        }
    });
}

/// Host and internet, both with services on every address.
fn world() -> (Space, Space) {
    let (host, internet) = (Space::new(), Space::new());
    let tid = internet.tid;
    host.run(move || {
        run(&format!("ip link add up0 type veth peer name net0 netns {tid}"));
        run(&format!("ip addr add {HOST}/24 dev up0; ip link set up0 up"));
        run("sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.disable_ipv6=0");
        run("ip addr add fd77::2/64 dev up0 nodad");
        serve(&format!("0.0.0.0:{PORT}"));
        serve_datagrams(HOST);
    });
    internet.run(|| {
        run("ip addr add 192.168.77.1/24 dev net0; ip link set net0 up; ip addr add fd77::1/64 dev net0 nodad");
        for address in PRIVATE.iter().chain([&PUBLIC]) {
            run(&format!("ip addr add {address}/32 dev lo"));
            serve_datagrams(address);
        }
        serve(&format!("0.0.0.0:{PORT}"));
    });
    host.run(|| run("ip route add default via 192.168.77.1"));
    (host, internet)
}

fn config() -> NetConfig {
    NetConfig { instance: INSTANCE.to_owned(), ..NetConfig::default() }
}

/// Runs `work` in a namespace on a thread of its own.
fn inside<T: Send>(netns: &OwnedFd, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            rustix::thread::move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What a service answers to a slot.
fn visit(slot: &NetSlot, address: &str) -> io::Result<String> {
    inside(&slot.netns, || visit_here(address))
}

fn visit_here(address: &str) -> io::Result<String> {
    let address = SocketAddr::new(address.parse().unwrap(), PORT);
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut buffer = [0; 64];
    let length = stream.read(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

fn datagram(slot: &NetSlot, address: &str) -> io::Result<String> {
    inside(&slot.netns, || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(Duration::from_millis(400)))?;
        socket.connect((address, PORT))?;
        socket.send(b"?")?;
        let mut buffer = [0; 64];
        let length = socket.recv(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    })
}

/// A namespace's own view of the table, links and forwarding.
fn remains() -> (String, String, String) {
    (read("ip -o link | cut -d' ' -f2"), read("nft list ruleset"), read("cat /proc/sys/net/ipv4/ip_forward"))
}

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
        for address in PRIVATE.iter().copied().chain([HOST, &gateway, &neighbour, "192.168.77.1", "10.231.77.7"]) {
            let began = Instant::now();
            let answer = visit(&slot, address);
            assert!(answer.is_err(), "{address} answered {answer:?}");
            if address != neighbour && address != "10.231.77.7" {
                assert!(began.elapsed() < Duration::from_millis(500), "{address}: refused, not ignored");
            }
            assert!(datagram(&slot, address).is_err(), "{address} answered a datagram");
        }
        let ping = |address: &str| inside(&slot.netns, || output(&format!("ping -c1 -W1 {address}")).status.success());
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
        let allow_private = ["172.20.0.0/16", "172.20.0.0/24", HOST].map(|range| range.parse::<Cidr>().unwrap());
        let network = Network::start(NetConfig { allow_private: allow_private.to_vec(), ..config() }).unwrap();
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

fn question() -> Vec<u8> {
    let mut bytes = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    bytes.extend(b"\x07example\x03org\0\0\x01\0\x01");
    bytes
}

/// Asks the gateway from inside a slot, over both transports, and gives both answers.
fn resolve(slot: &NetSlot) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let gateway = SocketAddr::new(slot.gateway.into(), 53);
    inside(&slot.netns, || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        socket.connect(gateway)?;
        socket.send(&question())?;
        let mut buffer = [0; 512];
        let length = socket.recv(&mut buffer)?;
        let mut stream = TcpStream::connect_timeout(&gateway, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        let message = question();
        stream.write_all(&[&[0, u8::try_from(message.len()).unwrap()][..], &message].concat())?;
        let mut head = [0; 2];
        stream.read_exact(&mut head)?;
        let mut answer = vec![0; usize::from(u16::from_be_bytes(head))];
        stream.read_exact(&mut answer)?;
        Ok((buffer[..length].to_vec(), answer))
    })
}

/// A DNS server on the host's loopback whose answers are the questions, as responses.
fn fake_dns() -> SocketAddr {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let udp = UdpSocket::bind(address).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, peer)) = udp.recv_from(&mut buffer) {
            buffer[2] |= 0x80;
            udp.send_to(&buffer[..length], peer).unwrap();
        }
    });
    std::thread::spawn(move || {
        for stream in tcp.incoming() {
            let mut stream = stream.unwrap();
            let mut frame = [0; 512];
            let length = stream.read(&mut frame).unwrap();
            frame[4] |= 0x80;
            stream.write_all(&frame[..length]).unwrap();
        }
    });
    address
}

/// A runtime on a thread in the caller's namespace.
fn runtime() -> tokio::runtime::Handle {
    let (told, tell) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        told.send(runtime.handle().clone()).unwrap();
        runtime.block_on(std::future::pending::<()>());
    });
    tell.recv().unwrap()
}

#[test]
fn dns_is_answered_at_the_gateway() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let runtime = runtime();
        let network =
            Network::start(NetConfig { dns_servers: Some(vec![fake_dns()]), ..config() }).unwrap();
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
fn chains_of_others_that_drop_let_sandboxes_through() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let filters = [
            // As Docker and ufw leave them behind.
            "table ip filter { chain DOCKER-USER { return; }; \
               chain FORWARD { type filter hook forward priority filter; policy drop; jump DOCKER-USER; \
                 oifname \"docker0\" accept; }; \
               chain INPUT { type filter hook input priority filter; policy drop; iif lo accept; \
                 ct state established accept; }; }",
            // As firewalld does.
            "table inet firewalld { \
               chain filter_FORWARD { type filter hook forward priority filter + 10; policy accept; \
                 ct state established,related accept; reject with icmpx admin-prohibited; }; \
               chain filter_INPUT { type filter hook input priority filter + 10; policy accept; \
                 ct state established,related accept; iif lo accept; reject with icmpx admin-prohibited; }; }",
        ];
        let install = |filter: &str| {
            std::fs::write(format!("/tmp/osb-net-test-{}", rustix::thread::gettid()), filter).unwrap();
            run(&format!("nft -f /tmp/osb-net-test-{0}; rm /tmp/osb-net-test-{0}", rustix::thread::gettid()));
        };
        let runtime = runtime();
        let _guard = runtime.enter();
        let config = NetConfig { dns_servers: Some(vec![fake_dns()]), ..config() };
        for filter in filters {
            for late in [false, true] {
                let network = if late {
                    let network = Network::start(config.clone()).unwrap();
                    install(filter);
                    eventually(|| read("nft list ruleset").matches("comment \"osb-abcdef\"").count() == 3);
                    network
                } else {
                    install(filter);
                    Network::start(config.clone()).unwrap()
                };
                let forwarder = network.serve_dns().unwrap();
                let slot = network.make(0).unwrap();
                assert_eq!(visit(&slot, PUBLIC).unwrap(), HOST);
                resolve(&slot).unwrap();
                assert!(visit(&slot, "10.9.9.9").is_err() && visit(&slot, HOST).is_err());
                if filter.contains("DOCKER") {
                    let chain = read("nft list chain ip filter FORWARD");
                    let place = |text: &str| chain.find(text).unwrap();
                    assert!(place("jump DOCKER-USER") < place("osb-abcdef"), "{chain}");
                    assert!(place("osb-abcdef") < place("docker0"), "{chain}");
                    run("nft insert rule ip filter DOCKER-USER drop");
                    assert!(visit(&slot, PUBLIC).is_err(), "the administrator's chain comes first");
                }
                network.purge().unwrap();
                assert!(!read("nft list ruleset").contains("osb"), "all is taken back");
                drop(forwarder);
                run("nft flush ruleset");
            }
        }
    });
}

/// Waits for something that another thread does.
fn eventually(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(5), "it did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_table_that_is_taken_away_comes_back() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let network = Network::start(config()).unwrap();
        let slot = network.make(0).unwrap();
        let table = || read("nft list table inet osb-abcdef");
        let whole = table();
        for tampering in [
            "nft flush ruleset",
            "nft delete table inet osb-abcdef",
            "nft flush chain inet osb-abcdef from_slot",
            "nft insert rule inet osb-abcdef forward accept",
        ] {
            run(tampering);
            eventually(|| table() == whole);
            assert!(visit(&slot, HOST).is_err() && visit(&slot, "10.9.9.9").is_err(), "{tampering}");
            assert_eq!(visit(&slot, PUBLIC).unwrap(), HOST, "{tampering}");
        }
        network.purge().unwrap();
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
        let mut stream = inside(&kept.netns, || TcpStream::connect_timeout(&address, Duration::from_secs(1))).unwrap();
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

fn visit_in(netns: &OwnedFd, address: &str) -> io::Result<String> {
    inside(netns, || visit_here(address))
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

use std::os::linux::net::SocketAddrExt as _;

/// Binds without `SO_REUSEADDR`, which the standard library sets.
fn bind_strictly(port: u16) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
    listen(&socket, 1)?;
    Ok(socket)
}

#[test]
fn pools_are_chosen_and_refused() {
    if !root() {
        return;
    }
    let (host, _internet) = world();
    host.run(|| {
        let config = |instance: &str, pool: Option<&str>| NetConfig {
            instance: instance.to_owned(),
            pool: pool.map(|pool| pool.parse().unwrap()),
            ..NetConfig::default()
        };
        run("ip route add 10.231.8.0/24 via 192.168.77.1");
        let network = Network::start(config("abcdef", None)).unwrap();
        assert_eq!(network.pool().unwrap().to_string(), "10.232.0.0/16");
        let second = Network::start(config("abcdef12", None)).unwrap();
        assert_eq!(second.pool().unwrap().to_string(), "10.233.0.0/16");
        let slots = (network.make(0).unwrap(), second.make(0).unwrap());
        assert_eq!((visit(&slots.0, PUBLIC).unwrap(), visit(&slots.1, PUBLIC).unwrap()), (HOST.into(), HOST.into()));
        inside(&slots.1.netns, || serve(&format!("0.0.0.0:{PORT}")));
        assert!(visit(&slots.0, &slots.1.address.to_string()).is_err(), "nor sandboxes of another instance");

        let before = remains();
        let error = Network::start(config("fedcba", Some("10.231.0.0/16"))).unwrap_err();
        assert!(error.to_string().contains("10.231.8.0/24") && error.to_string().contains("up0"), "{error}");
        assert!(matches!(Network::start(config("fedcba", Some("10.1.0.0/30"))), Err(NetError::PoolSize(_))));
        assert!(matches!(Network::start(config("x", None)), Err(NetError::Instance(_))));
        assert_eq!(remains(), before, "a start that fails leaves nothing");
        let third = Network::start(config("fedcba", Some("10.1.0.0/28"))).unwrap();
        assert_eq!(third.slots(), 13);
        assert!(matches!(third.make(13), Err(NetError::NoSuchSlot { .. })));
        third.stop().unwrap();
        network.purge().unwrap();
        assert_eq!(visit(&slots.1, PUBLIC).unwrap(), HOST, "forwarding stays while another instance needs it");
        second.purge().unwrap();
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
        writeln!(
            io::stderr(),
            "start {started:?}, make p50 {:?} p90 {:?}, recycle unused p50 {:?}, used p50 {:?}",
            times[100], times[180], recycled[100], busy[10]
        )
        .unwrap();
        assert_eq!(remains(), before.0);
        // Other tests of this process open and close descriptors meanwhile.
        let now = std::fs::read_dir("/proc/self/fd").unwrap().count();
        assert!(now < before.1 + 100, "{} descriptors became {now}", before.1);
        network.stop().unwrap();
    });
}

#[test]
fn the_check_passes_here() {
    if !root() {
        return;
    }
    let host = Space::new();
    host.run(|| {
        let before = remains();
        for (name, result) in osb_engine::net::check() {
            assert!(result.is_ok(), "{name}: {result:?}");
        }
        assert_eq!(remains(), before);
    });
}
