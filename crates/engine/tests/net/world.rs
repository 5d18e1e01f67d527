//! A host, an internet, and what is needed to look at them from everywhere.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use osb_engine::net::{NetConfig, NetSlot};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

const INSTANCE: &str = "abcdef";
/// Addresses of the namespace that plays the internet: a public one, and what must not be reached.
pub(crate) const PUBLIC: &str = "93.184.215.14";
pub(crate) const PRIVATE: [&str; 7] =
    ["169.254.169.254", "10.9.9.9", "172.20.0.1", "192.168.88.1", "100.64.1.1", "198.18.0.1", "192.0.2.9"];
pub(crate) const HOST: &str = "192.168.77.2";
pub(crate) const PORT: u16 = 8080;

pub(crate) fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        say("skipped: needs root");
    }
    root
}

/// Tells whoever runs the tests something.
pub(crate) fn say(text: &str) {
    let mut stderr = io::stderr();
    writeln!(stderr, "{text}").unwrap();
}

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace with a thread in it.
pub(crate) struct Space {
    jobs: mpsc::Sender<Job>,
    tid: i32,
    pub(crate) netns: OwnedFd,
}

impl Space {
    pub(crate) fn new() -> Self {
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
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = mpsc::channel();
        let job = move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            done.send(outcome).unwrap();
        };
        self.jobs.send(Box::new(job)).unwrap();
        result.recv().unwrap().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

pub(crate) fn run(command: &str) {
    let output = output(command);
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

pub(crate) fn read(command: &str) -> String {
    String::from_utf8(output(command).stdout).unwrap()
}

pub(crate) fn output(command: &str) -> std::process::Output {
    Command::new("sh").args(["-c", command]).output().unwrap()
}

/// Answers every datagram with the address it came from. A socket of one address answers from that one.
pub(crate) fn serve_datagrams(address: &str) {
    let udp = UdpSocket::bind((address, PORT)).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(peer.ip().to_string().as_bytes(), peer);
        }
    });
}

/// Answers every connection with the address it came from, and then what it is told.
pub(crate) fn serve(address: &str) {
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
pub(crate) fn world() -> (Space, Space) {
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

pub(crate) fn config() -> NetConfig {
    NetConfig { instance: INSTANCE.to_owned(), ..NetConfig::default() }
}

/// Runs `work` in a namespace on a thread of its own.
pub(crate) fn inside<T: Send>(netns: &OwnedFd, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            rustix::thread::move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
                .unwrap();
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What a service answers to a slot.
pub(crate) fn visit(slot: &NetSlot, address: &str) -> io::Result<String> {
    visit_in(&slot.netns, address)
}

pub(crate) fn visit_here(address: &str) -> io::Result<String> {
    let address = SocketAddr::new(address.parse().unwrap(), PORT);
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut buffer = [0; 64];
    let length = stream.read(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

pub(crate) fn datagram(slot: &NetSlot, address: &str) -> io::Result<String> {
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

/// What there is in a namespace: links, rules, forwarding.
pub(crate) fn remains() -> (String, String, String) {
    (read("ip -o link | cut -d' ' -f2"), read("nft list ruleset"), read("cat /proc/sys/net/ipv4/ip_forward"))
}

/// Waits for something that another thread does.
pub(crate) fn eventually(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(5), "it did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A DNS query.
pub(crate) fn question() -> Vec<u8> {
    let mut bytes = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    bytes.extend(b"\x07example\x03org\0\0\x01\0\x01");
    bytes
}

/// Asks the gateway from inside a slot, over both transports, and gives both answers.
pub(crate) fn resolve(slot: &NetSlot) -> io::Result<(Vec<u8>, Vec<u8>)> {
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
pub(crate) fn fake_dns() -> SocketAddr {
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
pub(crate) fn runtime() -> tokio::runtime::Handle {
    let (told, tell) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        told.send(runtime.handle().clone()).unwrap();
        runtime.block_on(std::future::pending::<()>());
    });
    tell.recv().unwrap()
}

/// The same in a namespace.
pub(crate) fn visit_in(netns: &OwnedFd, address: &str) -> io::Result<String> {
    inside(netns, || visit_here(address))
}

/// Binds without `SO_REUSEADDR`, which the standard library sets.
pub(crate) fn bind_strictly(port: u16) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
    listen(&socket, 1)?;
    Ok(socket)
}
