//! Connections into sandboxes.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use osb_protocol::ids::SandboxId;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::net::{TcpSocket, TcpStream, UnixStream};

use crate::engine::Engine;
use crate::error::ConnectError;
use crate::sandbox::Sandbox;

impl Engine {
    /// Connects to the daemon. It need not be ready: the connection waits in its queue.
    pub async fn connect_execd(&self, id: SandboxId) -> Result<UnixStream, ConnectError> {
        let sandbox = self.sandbox(id)?;
        let stream = UnixStream::connect(&sandbox.socket).await?;
        // The socket's name is the slot's. While the sandbox still had that, it was this sandbox's.
        if sandbox.slot().is_none() {
            return Err(ConnectError::NotRunning);
        }
        Ok(stream)
    }

    /// Connects to a TCP port on the sandbox's loopback, 127.0.0.1 first, then ::1.
    pub async fn connect_port(&self, id: SandboxId, port: u16) -> Result<TcpStream, ConnectError> {
        let sandbox = self.sandbox(id)?;
        let first = self.socket_inside(&sandbox, AddressFamily::INET)?;
        match first.connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await {
            Ok(stream) => Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // A host without IPv6 keeps the first answer.
                let Ok(second) = self.socket_inside(&sandbox, AddressFamily::INET6) else {
                    return Err(error.into());
                };
                second.connect(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await.map_err(|_| error.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn sandbox(&self, id: SandboxId) -> Result<Arc<Sandbox>, ConnectError> {
        self.inner.table().live.get(&id).cloned().ok_or(ConnectError::NotRunning)
    }

    fn socket_inside(&self, sandbox: &Sandbox, family: AddressFamily) -> Result<TcpSocket, ConnectError> {
        let home = self.inner.home.as_fd();
        let socket = sandbox
            .in_network(|namespace| socket_in(namespace, home, family))
            .ok_or(ConnectError::NotRunning)??;
        Ok(TcpSocket::from_std_stream(socket.into()))
    }
}

/// A TCP socket that belongs to another network namespace. A socket stays in the namespace it was made in, so the
/// thread is back home before anything else runs on it.
fn socket_in(namespace: BorrowedFd<'_>, home: BorrowedFd<'_>, family: AddressFamily) -> io::Result<OwnedFd> {
    let network = Some(LinkNameSpaceType::Network);
    move_into_link_name_space(namespace, network)?;
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None);
    if move_into_link_name_space(home, network).is_err() {
        // The thread would go on serving the host from inside a sandbox's network: nothing may run there.
        std::process::abort();
    }
    Ok(socket?)
}
