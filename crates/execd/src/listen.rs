//! Listening sockets.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

/// Connections that may wait.
const BACKLOG: i32 = 1024;

/// Listens on all addresses of both families, or of the one that this machine has.
///
/// # Errors
/// The port is taken, or there is no family at all.
pub fn tcp(port: u16) -> io::Result<TcpListener> {
    match tcp_on((Ipv6Addr::UNSPECIFIED, port).into()) {
        Ok(listener) => Ok(listener),
        Err(Errno::ADDRINUSE) => Err(Errno::ADDRINUSE.into()),
        // IPv6 may be compiled out, switched off, or filtered; each has an error of its own.
        Err(_) => Ok(tcp_on((Ipv4Addr::UNSPECIFIED, port).into())?),
    }
}

fn tcp_on(address: SocketAddr) -> rustix::io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Listens on a path that only this user reaches. A socket left over by a dead process is replaced.
///
/// # Errors
/// The path is too long, taken by something else, or somebody listens there.
pub fn unix(path: &Path) -> io::Result<UnixListener> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        if UnixStream::connect(path).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn both_families_reach_the_port() {
        let listener = tcp(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if listener.local_addr().unwrap().is_ipv6() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
        assert_eq!(tcp(port).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = unix(&path).unwrap();
        assert_eq!(unix(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        unix(&path).unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "x").unwrap();
        assert!(unix(&file).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"x");
    }
}
