//! DNS for sandboxes: a forwarder on the gateway address that asks the host's servers, which are often private or on
//! the host's loopback, where sandboxes do not reach. Messages pass as they are, with all their extensions.
//!
//! What comes from a sandbox is hostile: each has a bounded number of questions and connections open, and all
//! together have one. What is too much over UDP gets no answer, as if it were lost on the way.

mod message;
mod resolvers;
mod upstream;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::error::NetError;
use super::rules::DNS;
use message::{LONGEST_QUERY, Query};
use resolvers::Resolvers;
use upstream::{Transport, framed, read_message, resolve, within};

/// Questions under way: of one sandbox, and of all. Each takes a descriptor of the server.
const QUESTIONS: Bounds = Bounds { each: 64, all: 1024 };
/// Open TCP connections.
const CONNECTIONS: Bounds = Bounds { each: 8, all: 256 };
/// How long a TCP connection may be idle.
const IDLE: Duration = Duration::from_secs(10);
/// Questions over one TCP connection.
const PER_CONNECTION: usize = 256;
/// Rest after the system had no descriptor for a connection.
const RECOVERY: Duration = Duration::from_millis(100);

/// The running forwarder. It ends when this is dropped.
#[derive(Debug)]
pub struct DnsForwarder {
    port: u16,
    /// Aborts the tasks when dropped.
    _tasks: JoinSet<()>,
}

impl DnsForwarder {
    /// Listens on port 53 of `gateway`, or on another one where something on this host has taken port 53 of every
    /// address.
    pub(super) fn start(gateway: Ipv4Addr, servers: Option<Vec<SocketAddr>>) -> Result<Self, NetError> {
        let address = SocketAddr::new(gateway.into(), DNS);
        let (udp, tcp) = match listen(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                listen(SocketAddr::new(gateway.into(), 0))
            }
            other => other,
        }
        .map_err(|source| NetError::Dns { address, source })?;
        let port = tcp.local_addr().map_err(|source| NetError::Dns { address, source })?.port();
        let resolvers = match servers {
            Some(servers) => Resolvers::fixed(servers),
            None => Resolvers::follow(PathBuf::from("/etc/resolv.conf"), gateway),
        };
        let shared = Arc::new(Shared {
            resolvers,
            questions: Limiter::new(QUESTIONS),
            connections: Limiter::new(CONNECTIONS),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_udp(Arc::new(udp), Arc::clone(&shared)));
        tasks.spawn(serve_tcp(tcp, shared));
        Ok(Self { port, _tasks: tasks })
    }

    /// Where it listens, for both transports.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

/// Both sockets, on the same port.
fn listen(address: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
    let tcp = std::net::TcpListener::bind(address)?;
    let udp = std::net::UdpSocket::bind(tcp.local_addr()?)?;
    tcp.set_nonblocking(true)?;
    udp.set_nonblocking(true)?;
    Ok((UdpSocket::from_std(udp)?, TcpListener::from_std(tcp)?))
}

#[derive(Debug)]
struct Shared {
    resolvers: Resolvers,
    questions: Arc<Limiter>,
    connections: Arc<Limiter>,
}

async fn serve_udp(socket: Arc<UdpSocket>, shared: Arc<Shared>) {
    // Tasks of questions end with the forwarder.
    let mut questions = JoinSet::new();
    let mut buffer = vec![0; LONGEST_QUERY + 1];
    loop {
        let (length, client) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            // An answer could not be delivered; it concerns the next call only by chance.
            Err(error) => {
                tracing::debug!(%error, "DNS socket");
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
        };
        while questions.try_join_next().is_some() {}
        let Some(query) = Query::parse(&buffer[..length]) else { continue };
        let Some(permit) = shared.questions.enter(client.ip()) else { continue };
        let (socket, shared) = (Arc::clone(&socket), Arc::clone(&shared));
        questions.spawn(async move {
            let answer = resolve(&query, &shared.resolvers.servers(), Transport::Udp).await;
            // A sandbox that has ended meanwhile gets no answer.
            if let Err(error) = socket.send_to(&answer, client).await {
                tracing::debug!(%client, %error, "DNS answer not sent");
            }
            drop(permit);
        });
    }
}

async fn serve_tcp(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, client) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "DNS connection not accepted");
                tokio::time::sleep(RECOVERY).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        let Some(permit) = shared.connections.enter(client.ip()) else { continue };
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            if let Err(error) = converse(stream, client.ip(), &shared).await {
                tracing::debug!(%client, %error, "DNS connection ended");
            }
            drop(permit);
        });
    }
}

/// Answers the questions of one connection, one after the other.
async fn converse(mut stream: TcpStream, client: IpAddr, shared: &Shared) -> io::Result<()> {
    for _ in 0..PER_CONNECTION {
        let message = within(IDLE, read_message(&mut stream, LONGEST_QUERY)).await?;
        let Some(query) = Query::parse(&message) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a DNS query"));
        };
        let Some(permit) = shared.questions.enter(client) else {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "too many questions under way"));
        };
        let answer = resolve(&query, &shared.resolvers.servers(), Transport::Tcp).await;
        drop(permit);
        within(IDLE, stream.write_all(&framed(&answer))).await?;
    }
    Ok(())
}

/// Most at the same time.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    each: usize,
    all: usize,
}

/// Counts what is under way, by client and in all.
#[derive(Debug)]
struct Limiter {
    each: usize,
    all: Arc<Semaphore>,
    clients: Mutex<HashMap<IpAddr, usize>>,
}

impl Limiter {
    fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            each: bounds.each,
            all: Arc::new(Semaphore::new(bounds.all)),
            clients: Mutex::default(),
        })
    }

    /// One more for `client`, until the permit is dropped; `None` if that would be too many.
    fn enter(self: &Arc<Self>, client: IpAddr) -> Option<Permit> {
        let all = Arc::clone(&self.all).try_acquire_owned().ok()?;
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let count = clients.entry(client).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(Permit { limiter: Arc::clone(self), client, _all: all })
    }
}

#[derive(Debug)]
struct Permit {
    limiter: Arc<Limiter>,
    client: IpAddr,
    _all: OwnedSemaphorePermit,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut clients = self.limiter.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = clients.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests;
