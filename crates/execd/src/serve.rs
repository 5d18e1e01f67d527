//! Serves the routes on inherited listeners, from the first connection on.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::event::{PollFd, PollFlags, poll};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service as _;

use crate::account_cache::AccountCache;
use crate::app::{App, Shared};
use crate::process::inherited::next_signal;
use crate::process::{tree, watch};
use crate::{command, files, http, isolated, lifecycle, metrics, observe, proxy, pty, runtime_init, session};

/// How long open requests may take to end after a stop was asked for.
const DRAIN: Duration = Duration::from_secs(5);
/// How long streams may take to send the ends of what was ended.
const LAST_EVENTS: Duration = Duration::from_secs(1);
/// Wait after a connection could not be accepted for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Threads for work that blocks: file operations and starts of programs.
const BLOCKING_THREADS: usize = 64;
/// Idle ones go after this time, with their memory.
const THREAD_KEEP_ALIVE: Duration = Duration::from_secs(2);

/// All routes behind the access check.
pub fn router(app: App) -> Router {
    let router = Router::new()
        .route("/ping", get(|| async { http::done() }))
        .merge(runtime_init::router())
        .merge(command::router())
        .merge(session::router())
        .merge(pty::router())
        .merge(files::router())
        .merge(isolated::router())
        .merge(metrics::router())
        .merge(proxy::router())
        .fallback(http::not_found)
        .method_not_allowed_fallback(http::not_found)
        .layer(from_fn_with_state(app.clone(), http::require_token));
    let router = match observe::is_wanted(&app) {
        true => router.layer(from_fn_with_state(app.clone(), observe::observe)),
        false => router,
    };
    router.with_state(app)
}

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// Of the server only.
    Unix(UnixListener),
    /// Of everybody who can connect.
    Tcp(TcpListener),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Waits for the first connection, then serves until `stop` becomes readable. The runtime is built only then: a
/// sandbox that nobody talks to should cost as little as it can.
///
/// # Errors
/// The runtime cannot be built or the listeners cannot be watched.
pub fn run(app: App, listeners: Vec<Listener>, stop: OwnedFd) -> io::Result<()> {
    // A collector hears of a sandbox that nobody talks to as well.
    let eager = app.telemetry.is_some() || app.lifecycle.is_eager();
    if !eager && stopped_before_contact(&listeners, &stop)? {
        return Ok(());
    }
    run_on(build()?, app, listeners, stop)
}

/// As [`run`], with a runtime from [`warm`].
///
/// # Errors
/// The listeners cannot be watched.
pub fn run_on(runtime: Runtime, app: App, listeners: Vec<Listener>, stop: OwnedFd) -> io::Result<()> {
    let result = runtime.block_on(serve(app, listeners, stop));
    // A blocking thread may hang on a dead file system; it must not keep the daemon.
    runtime.shutdown_background();
    result
}

/// A runtime that has served before: requests from nobody have gone the way that the first ones of a user will go.
/// A forked process meets a page fault wherever it goes for the first time, and a virtual machine makes those dear.
///
/// # Errors
/// The runtime cannot be built.
pub fn warm(accounts: &Arc<AccountCache>) -> io::Result<Runtime> {
    let runtime = build()?;
    // A failure shows again, and is told, when somebody asks.
    let _ = runtime.block_on(rehearse(accounts));
    Ok(runtime)
}

async fn rehearse(accounts: &Arc<AccountCache>) -> io::Result<()> {
    const PING: &str = "GET /ping HTTP/1.1\r\nhost: sandbox\r\n\r\n";
    // There is no such program: everything is done but the exec.
    const COMMAND: &str = "POST /command HTTP/1.1\r\nhost: sandbox\r\ncontent-type: application/json\r\n\
        content-length: 18\r\nconnection: close\r\n\r\n{\"argv\":[\"/proc\"]}";
    let (mut client, ours) = tokio::net::UnixStream::pair()?;
    let app = App::new(Shared { accounts: Arc::clone(accounts), ..Shared::default() });
    Server::new(app).connection(ours, None);
    client.write_all(PING.as_bytes()).await?;
    client.write_all(COMMAND.as_bytes()).await?;
    client.read_to_end(&mut Vec::with_capacity(4096)).await?;
    Ok(())
}

/// A runtime for [`run_on`].
///
/// # Errors
/// It cannot be built.
pub fn build() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(THREAD_KEEP_ALIVE)
        .build()
}

fn stopped_before_contact(listeners: &[Listener], stop: &OwnedFd) -> io::Result<bool> {
    let mut fds: Vec<PollFd<'_>> =
        listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).collect();
    fds.push(PollFd::new(stop, PollFlags::IN));
    loop {
        match poll(&mut fds, None) {
            Ok(_) if fds.last().is_some_and(|stop| !stop.revents().is_empty()) => {
                // Others than these are for commands, and there are none.
                if next_signal(stop).is_some_and(|signal| STOPPING.contains(&signal)) {
                    return Ok(true);
                }
            }
            Ok(_) => return Ok(false),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

async fn serve(app: App, listeners: Vec<Listener>, stop: OwnedFd) -> io::Result<()> {
    let stop = watch::readable(stop).map_err(|(_, error)| error)?;
    let all = Server::new(app.clone());
    for listener in listeners {
        let server = all.clone();
        match listener {
            Listener::Unix(listener) => {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener)?;
                tokio::spawn(server.accept(async move || Ok((listener.accept().await?.0, None))));
            }
            Listener::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::TcpListener::from_std(listener)?;
                tokio::spawn(server.accept(async move || {
                    let (stream, peer) = listener.accept().await?;
                    // Events are small and must not wait for one another.
                    stream.set_nodelay(true)?;
                    Ok((stream, Some(peer)))
                }));
            }
        }
    }
    let (exports, farewell) = (TaskTracker::new(), CancellationToken::new());
    if app.telemetry.is_some() {
        let (app, farewell) = (app.clone(), farewell.clone());
        exports.spawn(async move {
            if let Some(telemetry) = &app.telemetry {
                telemetry.run(&app, farewell).await;
            }
        });
    }
    let start = TaskTracker::new();
    let mut begin = start.spawn({
        let app = app.clone();
        async move { lifecycle::begin(&app).await }
    });
    start.close();
    let begun = tokio::select! {
        stopped = stopped(&app, &stop) => stopped,
        begun = &mut begin => match begun {
            Ok(Ok(())) => stopped(&app, &stop).await,
            Ok(Err(why)) => Err(io::Error::other(why)),
            Err(error) => Err(io::Error::other(error)),
        },
    };
    all.ending.cancel();
    all.connections.close();
    app.lifecycle.close().await;
    let _ = tokio::time::timeout(DRAIN, start.wait()).await;
    let _ = tokio::time::timeout(DRAIN, all.connections.wait()).await;
    // What has not ended by then is ended, and its streams tell so.
    let _ = tokio::time::timeout(DRAIN, app.commands.close_all()).await;
    let _ = tokio::time::timeout(DRAIN, app.sessions.close_all()).await;
    let _ = tokio::time::timeout(DRAIN, app.terminals.close_all()).await;
    let _ = tokio::time::timeout(DRAIN, app.isolated.close_all()).await;
    let _ = tokio::time::timeout(LAST_EVENTS, all.connections.wait()).await;
    farewell.cancel();
    exports.close();
    exports.wait().await;
    begun
}

/// Signals that end a daemon.
const STOPPING: [i32; 2] = [libc::SIGTERM, libc::SIGINT];

/// Waits until the daemon is to end. Signals go on to the commands that somebody waits for, where that is meant.
async fn stopped(app: &App, stop: &AsyncFd<OwnedFd>) -> io::Result<()> {
    loop {
        let mut ready = stop.readable().await?;
        let Some(signal) = next_signal(stop.get_ref()) else {
            ready.clear_ready();
            continue;
        };
        if app.lifecycle.forwards {
            let running = app.commands.running();
            let tags: Vec<u64> =
                running.iter().filter(|command| command.spool.is_none()).map(|command| command.tag).collect();
            // A look through all processes may take a while.
            tokio::task::spawn_blocking(move || {
                for tag in tags {
                    if let Some(signal) = rustix::process::Signal::from_named_raw(signal) {
                        let _ = tree::signal(tag, signal);
                    }
                }
            });
        }
        if STOPPING.contains(&signal) {
            return Ok(());
        }
    }
}

/// What all connections share.
#[derive(Clone)]
struct Server {
    router: Router,
    ending: CancellationToken,
    connections: TaskTracker,
}

impl Server {
    fn new(app: App) -> Self {
        Self { router: router(app), ending: CancellationToken::new(), connections: TaskTracker::new() }
    }

    async fn accept<S>(self, accept: impl AsyncFn() -> io::Result<(S, Option<SocketAddr>)>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        loop {
            let accepted = tokio::select! {
                accepted = accept() => accepted,
                () = self.ending.cancelled() => return,
            };
            match accepted {
                Ok((stream, peer)) => self.connection(stream, peer),
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn connection<S>(&self, stream: S, peer: Option<SocketAddr>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let router = self.router.clone();
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            if let Some(peer) = peer {
                request.extensions_mut().insert(ConnectInfo(peer));
            }
            router.clone().call(request)
        });
        let connection =
            http1::Builder::new().serve_connection(TokioIo::new(stream), service).with_upgrades();
        let ending = self.ending.clone();
        self.connections.spawn(async move {
            tokio::pin!(connection);
            tokio::select! {
                // A connection that breaks is the client's matter.
                _ = connection.as_mut() => return,
                () = ending.cancelled() => connection.as_mut().graceful_shutdown(),
            }
            let _ = connection.await;
        });
    }
}
