//! Asking a server of the host. Every question goes out from a port and under a transaction id of its own, both
//! random, and only a response that repeats id and question is believed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout, timeout_at};

use super::message::{Query, is_refused_or_failed};

/// Patience with one server. Resolvers in sandboxes give up after five seconds.
const PER_SERVER: Duration = Duration::from_secs(2);
/// Patience with all of them.
const IN_ALL: Duration = Duration::from_millis(4_800);
/// A response over UDP can be as long as the datagram that the query offered room for.
const LONGEST_DATAGRAM: usize = u16::MAX as usize;

/// How the question came, and therefore goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Tcp,
    Udp,
}

/// Asks the servers in turn, twice around while time lasts. When none has a proper answer: the improper one, or a
/// failure of our own. There is always a server to ask.
pub(super) async fn resolve(query: &Query, servers: &[SocketAddr], transport: Transport) -> Vec<u8> {
    if query.is_transfer() {
        return query.refusal();
    }
    let deadline = Instant::now() + IN_ALL;
    let mut fallback = None;
    for server in servers.iter().chain(servers) {
        let until = deadline.min(Instant::now() + PER_SERVER);
        let asked = async {
            match transport {
                Transport::Udp => over_udp(query, *server).await,
                Transport::Tcp => over_tcp(query, *server).await,
            }
        };
        match timeout_at(until, asked).await {
            Ok(Ok(answer)) if is_refused_or_failed(&answer) => fallback = Some(answer),
            Ok(Ok(answer)) => return answer,
            Ok(Err(error)) => tracing::debug!(%server, %error, "DNS server cannot be asked"),
            Err(_) => tracing::debug!(%server, "DNS server does not answer"),
        }
        // A server that answers at once, if badly, is not asked a second time.
        if Instant::now() >= deadline || (fallback.is_some() && Some(server) == servers.last()) {
            break;
        }
    }
    fallback.unwrap_or_else(|| query.failure())
}

async fn over_udp(query: &Query, server: SocketAddr) -> io::Result<Vec<u8>> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    socket.connect(server).await?;
    let id = random_id()?;
    socket.send(&query.with_id(id)).await?;
    loop {
        // A server that is not there shows as an error, and not as something to read.
        let ready = socket.ready(Interest::READABLE | Interest::ERROR).await?;
        if ready.is_error() {
            if let Some(error) = socket.take_error()? {
                return Err(error);
            }
            // It was an old one: wait for the next.
            let _ = socket.try_io(Interest::ERROR, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
        }
        // Only now: thousands of questions may wait at the same time.
        let mut buffer = vec![0; LONGEST_DATAGRAM];
        let length = match socket.try_recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        if query.is_answered_by(&buffer[..length], id) {
            buffer.truncate(length);
            query.restore_id(&mut buffer);
            return Ok(buffer);
        }
    }
}

async fn over_tcp(query: &Query, server: SocketAddr) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let id = random_id()?;
    stream.write_all(&framed(&query.with_id(id))).await?;
    let mut answer = read_message(&mut stream, usize::from(u16::MAX)).await?;
    if !query.is_answered_by(&answer, id) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the response is to another question"));
    }
    query.restore_id(&mut answer);
    Ok(answer)
}

fn random_id() -> io::Result<[u8; 2]> {
    let mut id = [0; 2];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    Ok(id)
}

/// A message as it goes over TCP: behind its length.
pub(super) fn framed(message: &[u8]) -> Vec<u8> {
    // Messages come from datagrams or from such frames, and are no longer than those can be.
    let length = u16::try_from(message.len()).unwrap_or(u16::MAX);
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend_from_slice(&message[..usize::from(length)]);
    frame
}

/// Reads one message of at most `longest` bytes from TCP.
pub(super) async fn read_message(stream: &mut TcpStream, longest: usize) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).await?;
    let length = usize::from(u16::from_be_bytes(length));
    if length > longest {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// Gives up on a slow or silent peer.
pub(super) async fn within<T>(
    patience: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    timeout(patience, work).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}
