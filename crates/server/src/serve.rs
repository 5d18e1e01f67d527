//! The listener: accepts connections, bounds their number, and ends them in order.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::response::IntoResponse;
use http::{HeaderValue, Request, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use osb_runtime::Runtime;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::config::Config;
use crate::error::ApiError;
use crate::front::app;
use crate::sandbox::StartError;
use crate::state::AppState;
use crate::store::Store;
use crate::unread::{self, ReadToEnd};

/// Connections above the limit that are told so at a time; further ones are closed at once.
const REFUSALS: usize = 64;

/// Serves the lifecycle API until `shutdown` resolves, then lets requests end for
/// `timeout_graceful_shutdown`. Sandboxes go on.
///
/// # Errors
/// The store is in use or broken, or the runtime cannot take its sandboxes back.
pub async fn serve(
    config: Config,
    runtime: Arc<dyn Runtime>,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Result<(), StartError> {
    let (store, rows) = Store::open(&config.store_path()).await?;
    let state = AppState::new(config, runtime, store);
    state.start(rows).await?;
    tracing::info!(
        address = %listener.local_addr().map_err(StartError::Listener)?,
        sandboxes = state.index().len(),
        "serving"
    );
    accept(&state, &listener, shutdown).await;
    drop(listener);
    state.stop(state.config().server.graceful_shutdown).await;
    state.runtime().shutdown().await;
    Ok(())
}

/// Binds the configured address with the configured queue.
///
/// # Errors
/// The address cannot be had.
pub async fn bind(config: &Config) -> std::io::Result<TcpListener> {
    let host = config.server.host.trim_matches(['[', ']']);
    let mut last = std::io::Error::other("the host has no address");
    for address in tokio::net::lookup_host((host, config.server.port)).await? {
        let bound = (|| {
            let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            socket.listen(config.server.backlog)
        })();
        match bound {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn accept(state: &AppState, listener: &TcpListener, shutdown: impl Future<Output = ()>) {
    let server = &state.config().server;
    let limit = match server.limit_concurrency {
        0 => Semaphore::MAX_PERMITS,
        limit => limit.min(Semaphore::MAX_PERMITS),
    };
    let permits = Arc::new(Semaphore::new(limit));
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    let (stop, stopping) = watch::channel(());
    let connections = TaskTracker::new();
    let app = app(state.clone());
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                back_off(&error).await;
                continue;
            }
        };
        // An answer that waits for an acknowledgement waits 40 ms.
        let _ = stream.set_nodelay(true);
        match Arc::clone(&permits).try_acquire_owned() {
            Ok(permit) => {
                let connection = connection(app.clone(), stream, peer, server.keep_alive, stopping.clone());
                connections.spawn(async move {
                    connection.await;
                    drop(permit);
                });
            }
            Err(_) => {
                if let Ok(permit) = Arc::clone(&refusals).try_acquire_owned() {
                    connections.spawn(async move {
                        refuse(stream).await;
                        drop(permit);
                    });
                }
            }
        }
    }
    state.begin_stop();
    drop(stop);
    connections.close();
    if tokio::time::timeout(server.graceful_shutdown, connections.wait()).await.is_err() {
        tracing::info!(left = connections.len(), "connections did not end in time and are closed");
    }
}

/// Serves one connection to its end. When the server stops, the request under way is the last.
async fn connection(
    app: axum::Router,
    stream: TcpStream,
    peer: SocketAddr,
    keep_alive: Duration,
    mut stopping: watch::Receiver<()>,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let app = app.clone();
        async move {
            let unasked = unread::is_held_back(request.headers()).then(Arc::<AtomicBool>::default);
            let mut request = request.map(|body| match &unasked {
                Some(unasked) => Body::new(ReadToEnd::held_back(body, Arc::clone(unasked))),
                None => Body::new(ReadToEnd::new(body)),
            });
            request.extensions_mut().insert(ConnectInfo(peer));
            let mut response = app.oneshot(request).await.unwrap_or_else(|never: Infallible| match never {});
            if unasked.is_some_and(|unasked| unasked.load(Ordering::Relaxed)) {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response)
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    // Between requests this is what ends an idle connection; within one it bounds the head.
    builder.timer(TokioTimer::new()).header_read_timeout(keep_alive);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service).with_upgrades());
    let result = tokio::select! {
        result = connection.as_mut() => result,
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%peer, %error, "connection ended early");
    }
}

/// Tells a client that there are too many connections.
async fn refuse(mut stream: TcpStream) {
    let body = axum::body::to_bytes(ApiError::Overloaded.into_response().into_body(), 4096).await;
    let body = body.unwrap_or_default();
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         retry-after: 1\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let told = async {
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(&body).await?;
        stream.shutdown().await?;
        // What the client sent is taken in, so that closing does not cut the answer off.
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
}

/// After a failed accept: a connection that broke off is nothing; want of descriptors needs a pause, since no event
/// tells when there are some again.
async fn back_off(error: &std::io::Error) {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        return;
    }
    tracing::error!(%error, "accept failed");
    tokio::time::sleep(Duration::from_millis(100)).await;
}
