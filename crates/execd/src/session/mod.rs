//! Sessions: shells that keep their variables, functions and directory from one run to the next.

pub(crate) mod control;
pub(crate) mod feeder;
mod life;
mod place;
pub mod registry;
pub(crate) mod script;
mod shell;

use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{delete, post};
use http::StatusCode;
use osb_protocol::execd::{CreateSessionRequest, RunInSessionRequest, SessionCreated, code};
use tokio::sync::oneshot;

use crate::app::App;
use crate::command::event_stream;
use crate::http::{ApiError, Json, OptionalJson, done, json};
use crate::stream::{event, feed};
use life::Job;

/// Longest command of a run. It is handed to the shell as a whole.
const LONGEST_COMMAND: usize = 4 << 20;

/// The routes of sessions.
pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/session", post(create))
        .route("/session/{id}", delete(remove))
        .route("/session/{id}/run", post(run))
}

async fn create(
    State(app): State<App>,
    OptionalJson(request): OptionalJson<CreateSessionRequest>,
) -> Result<Response, ApiError> {
    let cwd = request.unwrap_or_default().cwd;
    // In a task of its own: a client that leaves must not stop it half way.
    match tokio::spawn(registry::open(app, cwd)).await {
        Ok(id) => Ok(json(&SessionCreated { session_id: id? })),
        Err(error) => Err(ApiError::runtime(format!("the session could not be opened: {error}"))),
    }
}

async fn run(
    State(app): State<App>,
    Path(id): Path<String>,
    Json(request): Json<RunInSessionRequest>,
) -> Result<Response, ApiError> {
    let session = app.sessions.get(&id).ok_or_else(unknown)?;
    let timeout = check(&request)?;
    let (writer, reader) = feed::feed();
    writer.open(|out| {
        event::push_init(out, &id);
        event::push_ping(out);
    });
    let (answer, answered) = oneshot::channel();
    let job =
        Job { command: request.command, cwd: request.cwd, timeout, writer, answer: Some((answer, reader)) };
    session.queue(job)?;
    let events = answered.await.unwrap_or_else(|_| Err(unknown()))?;
    Ok(event_stream(events).await)
}

async fn remove(State(app): State<App>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let session = app.sessions.take(&id).ok_or_else(unknown)?;
    session.close().await;
    Ok(done())
}

/// What a run may ask for; gives its time limit.
fn check(request: &RunInSessionRequest) -> Result<Option<Duration>, ApiError> {
    let command = &request.command;
    if command.trim().is_empty() {
        return Err(ApiError::invalid("'command' is required and must not be blank"));
    }
    if command.len() > LONGEST_COMMAND {
        return Err(ApiError::invalid(format!(
            "'command' is longer than {LONGEST_COMMAND} bytes; upload it as a file and run that"
        )));
    }
    if command.contains('\0') || request.cwd.as_ref().is_some_and(|cwd| cwd.contains('\0')) {
        return Err(ApiError::invalid("neither 'command' nor 'cwd' can hold a NUL byte"));
    }
    let millis = u64::try_from(request.timeout.unwrap_or(0))
        .map_err(|_| ApiError::invalid("'timeout' must not be negative"))?;
    Ok(Some(Duration::from_millis(millis)).filter(|limit| !limit.is_zero()))
}

/// 404: no such session.
fn unknown() -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        code::CONTEXT_NOT_FOUND,
        "there is no such session; it was deleted, or the daemon has been restarted since: make a new one",
    )
}
