//! Commands: run one, ask about it, read its output, stop it.

pub mod envfile;
pub mod pipe;
pub mod prepare;
pub mod registry;
pub mod run;
pub mod spool;
pub mod stop;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::{HeaderName, HeaderValue, StatusCode, header};
use osb_protocol::execd::{CommandRequest, TAIL_CURSOR_HEADER, code};

use crate::app::App;
use crate::http::{ApiError, Json, Params, done, json};
use crate::stream::feed::{self, Reader};
use prepare::Checked;
use registry::Command;

/// Header of log answers whose first bytes are no longer kept: how many were asked for and are lost.
pub const DROPPED_HEADER: HeaderName = HeaderName::from_static("execd-commands-dropped-bytes");

/// Bytes of a log read at once.
const LOG_PIECE: u64 = 256 << 10;

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
    Ok(event_stream(run::start(app, request).await?))
}

/// The head of an event stream. It goes out together with the first event.
pub(crate) fn event_stream(events: Reader) -> Response {
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
    let command = app.commands.get(id).ok_or_else(|| {
        ApiError::new(StatusCode::NOT_FOUND, code::CONTEXT_NOT_FOUND, format!("there is no command {id:?}"))
    })?;
    // In a task of its own: a client that leaves must not stop it half way.
    match tokio::spawn(stop::interrupt(command)).await {
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
    let command = app
        .commands
        .get(&id)
        .filter(|command| command.spool.is_some())
        .ok_or_else(|| ApiError::invalid(format!("there is no background command {id:?}")))?;
    // Text that is no number is the beginning, as it always was.
    let cursor = params.get("cursor").and_then(|text| text.parse::<i128>().ok()).unwrap_or(0);
    let cursor = u64::try_from(cursor.min(i128::from(i64::MAX)))
        .map_err(|_| ApiError::invalid("'cursor' must not be negative"))?;
    let (start, end) = command.spool.as_ref().map_or((0, 0), spool::Spool::range);
    let from = cursor.max(start);
    let length = end.saturating_sub(from);

    let mut response = Response::new(log_body(command, from, length).await?);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::CONTENT_LENGTH, length.into());
    headers.insert(TAIL_CURSOR_HEADER, end.max(cursor).into());
    if from > cursor {
        headers.insert(DROPPED_HEADER, (from - cursor).into());
    }
    Ok(response)
}

/// Body of the `length` bytes from offset `from` on. A long one is read while it is sent; should the store drop
/// bytes meanwhile, the body ends short of its announced length, which the client sees as a broken answer.
async fn log_body(command: Arc<Command>, from: u64, length: u64) -> Result<Body, ApiError> {
    if length <= LOG_PIECE {
        let bytes = read_log(&command, from, length)
            .await
            .ok_or_else(|| ApiError::runtime("the output can no longer be read; ask again"))?;
        return Ok(Body::from(bytes));
    }
    let (writer, reader) = feed::feed();
    tokio::spawn(async move {
        let end = from + length;
        let mut at = from;
        while at < end && !writer.is_abandoned() {
            let Some(bytes) = read_log(&command, at, LOG_PIECE.min(end - at)).await else { return };
            at += bytes.len() as u64;
            writer.push(|out| out.extend_from_slice(&bytes));
            writer.room().await;
        }
    });
    Ok(Body::new(reader))
}

async fn read_log(command: &Arc<Command>, from: u64, most: u64) -> Option<Vec<u8>> {
    let read = move |command: &Command| command.spool.as_ref()?.read(from, most).ok().flatten();
    let bytes = if command.spool.as_ref().is_some_and(|spool| spool.may_block(0)) {
        let command = Arc::clone(command);
        tokio::task::spawn_blocking(move || read(&command)).await.ok().flatten()?
    } else {
        read(command)?
    };
    (bytes.len() as u64 == most).then_some(bytes)
}
