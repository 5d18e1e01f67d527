//! Commands: run one, ask about it, read its output, stop it.

mod direct;
pub mod envfile;
pub(crate) mod output;
pub mod pipe;
pub mod prepare;
pub mod registry;
pub mod retention;
pub mod run;
pub mod spool;
pub mod stop;

use std::io;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::{HeaderName, HeaderValue, StatusCode, header};
use osb_protocol::execd::{CommandRequest, DROPPED_HEADER, TAIL_CURSOR_HEADER, code};

use crate::app::App;
use crate::http::{ApiError, Json, Params, done, json};
use crate::stream::feed::{self, Reader};
use prepare::Checked;
use spool::Snapshot;

/// Bytes of a log read at once.
const LOG_PIECE: u64 = 256 << 10;

/// How long the first event may wait for the next ones.
const OPENING: Duration = Duration::from_millis(1);

/// The routes of commands.
pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/command", post(run_command).delete(interrupt))
        .route("/command/status/{id}", get(status))
        .route("/command/{id}/logs", get(logs))
}

async fn run_command(
    State(app): State<App>,
    Json(request): Json<CommandRequest>,
) -> Result<Response, ApiError> {
    let request = Checked::new(request)?;
    Ok(event_stream(run::start(app, request).await?).await)
}

/// The head of an event stream. It goes out together with the first events.
pub(crate) async fn event_stream(events: Reader) -> Response {
    events.gather(OPENING).await;
    let mut response = Response::new(Body::new(events));
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONNECTION, "keep-alive"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn interrupt(State(app): State<App>, params: Params) -> Result<Response, ApiError> {
    let id = params.required("id")?;
    // In a task of its own: a client that leaves must not stop it half way.
    let stopped = if let Some(command) = app.commands.get(id) {
        tokio::spawn(stop::interrupt(command))
    } else if let Some(session) = app.sessions.get(id) {
        tokio::spawn(async move { session.interrupt().await })
    } else {
        let message = format!("there is no command or session {id:?}");
        return Err(ApiError::new(StatusCode::NOT_FOUND, code::CONTEXT_NOT_FOUND, message));
    };
    match stopped.await {
        Ok(result) => result.map(|()| done()),
        Err(error) => Err(ApiError::runtime(format!("the command could not be stopped: {error}"))),
    }
}

async fn status(State(app): State<App>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let command = app.commands.get(&id).ok_or_else(|| {
        ApiError::new(
            StatusCode::NOT_FOUND,
            code::INVALID_REQUEST_BODY,
            format!("there is no command {id:?}"),
        )
    })?;
    Ok(json(&command.status()))
}

async fn logs(State(app): State<App>, Path(id): Path<String>, params: Params) -> Result<Response, ApiError> {
    let unknown = || ApiError::invalid(format!("there is no background command {id:?}"));
    let command = app.commands.get(&id).ok_or_else(unknown)?;
    // Text that is no number is the beginning, as it always was.
    let cursor = params.get("cursor").and_then(|text| text.parse::<i128>().ok()).unwrap_or(0);
    let cursor = u64::try_from(cursor.min(i128::from(i64::MAX)))
        .map_err(|_| ApiError::invalid("'cursor' must not be negative"))?;
    let Some(spool) = &command.spool else { return Err(unknown()) };
    let snapshot = spool.snapshot(cursor);
    let (from, length) = (snapshot.start, snapshot.length);

    let mut response = Response::new(log_body(snapshot).await?);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::CONTENT_LENGTH, length.into());
    headers.insert(TAIL_CURSOR_HEADER, (from + length).into());
    if from > cursor {
        headers.insert(DROPPED_HEADER, (from - cursor).into());
    }
    Ok(response)
}

/// Body of a piece of output. A long one is read while it is sent.
pub(crate) async fn log_body(snapshot: Snapshot) -> Result<Body, ApiError> {
    let failed = |error: io::Error| ApiError::runtime(format!("the output cannot be read: {error}"));
    let (mut snapshot, mut bytes) = read_log(snapshot).await.map_err(failed)?;
    if bytes.len() as u64 == snapshot.length {
        return Ok(Body::from(bytes));
    }
    let (writer, reader) = feed::feed();
    tokio::spawn(async move {
        while !bytes.is_empty() && !writer.is_abandoned() {
            writer.push(|out| out.extend_from_slice(&bytes));
            writer.room().await;
            // A disk that fails ends the body short of its announced length, which the client sees as broken.
            let Ok(next) = read_log(snapshot).await else { return };
            (snapshot, bytes) = next;
        }
    });
    Ok(Body::new(reader))
}

/// The next bytes of a snapshot; none at its end.
async fn read_log(mut snapshot: Snapshot) -> io::Result<(Snapshot, Vec<u8>)> {
    let read = |snapshot: &mut Snapshot| Ok(snapshot.next(LOG_PIECE)?.unwrap_or_default());
    if snapshot.may_block() {
        let work = move || read(&mut snapshot).map(|bytes| (snapshot, bytes));
        return tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?;
    }
    let bytes = read(&mut snapshot)?;
    Ok((snapshot, bytes))
}
