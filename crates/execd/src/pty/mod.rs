//! Terminals: shells, or other programs, that people type into over a WebSocket.

mod connection;
mod device;
pub(crate) mod frame;
pub mod registry;
mod ring;
mod run;
pub(crate) mod socket;
mod terminal;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::StatusCode;
use osb_protocol::execd::{CreateSessionRequest, SessionCreated, code};

use crate::app::App;
use crate::command::prepare::{Env, usual_identity};
use crate::http::{ApiError, OptionalJson, Params, done, json};
use connection::Role;
use device::Size;
use run::Wanted;
use terminal::{Mode, Terminal};

/// Longest command of a terminal.
const LONGEST_COMMAND: usize = 1 << 20;
/// How long a connection may take to become a WebSocket after it was allowed to.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The routes of terminals.
pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/pty", post(create))
        .route("/pty/{id}", get(status).delete(remove))
        .route("/pty/{id}/ws", get(attach))
}

async fn create(
    State(app): State<App>,
    OptionalJson(request): OptionalJson<CreateSessionRequest>,
) -> Result<Response, ApiError> {
    let CreateSessionRequest { cwd, command } = request.unwrap_or_default();
    let command = command.filter(|command| !command.trim().is_empty());
    if command.as_ref().is_some_and(|command| command.len() > LONGEST_COMMAND) {
        return Err(ApiError::invalid(format!(
            "'command' is longer than {LONGEST_COMMAND} bytes; upload it as a file and run that"
        )));
    }
    if [&command, &cwd].into_iter().flatten().any(|text| text.contains('\0')) {
        return Err(ApiError::invalid("neither 'command' nor 'cwd' can hold a NUL byte"));
    }
    let shared = app.clone();
    let cwd = tokio::task::spawn_blocking(move || directory(&shared, cwd.as_deref()))
        .await
        .map_err(|error| ApiError::runtime(format!("the working directory: {error}")))??;
    let terminal = Arc::new(Terminal::new(command, cwd));
    let session_id = terminal.id.clone();
    app.terminals.insert(terminal)?;
    let mut answer = json(&SessionCreated { session_id });
    *answer.status_mut() = StatusCode::CREATED;
    Ok(answer)
}

/// Where the program is to begin. Touches the file system.
fn directory(app: &App, cwd: Option<&str>) -> Result<PathBuf, ApiError> {
    if !std::path::Path::new(device::MULTIPLEXER).exists() {
        let message = format!("there are no terminals here: {} is missing", device::MULTIPLEXER);
        return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, code::NOT_SUPPORTED, message));
    }
    let Some(cwd) = cwd.filter(|cwd| !cwd.is_empty()) else { return Ok(app.cwd.clone()) };
    let accounts = app.accounts.get();
    let identity = usual_identity(app, &accounts)?;
    let env = Env::new(app, &std::collections::BTreeMap::new(), &accounts, identity.as_ref());
    let path = env.expand(app, cwd)?;
    match std::fs::metadata(&path) {
        Ok(found) if found.is_dir() => Ok(path),
        Ok(_) => Err(ApiError::invalid(format!("'cwd': {} is not a directory", path.display()))),
        Err(error) => Err(ApiError::invalid(format!("'cwd': {}: {error}", path.display()))),
    }
}

async fn status(State(app): State<App>, Path(id): Path<String>) -> Result<Response, ApiError> {
    Ok(json(&app.terminals.get(&id).ok_or_else(unknown)?.status()))
}

async fn remove(State(app): State<App>, Path(id): Path<String>) -> Result<Response, ApiError> {
    // In a task of its own: a client that leaves must not stop it half way.
    match tokio::spawn(async move { app.terminals.delete(&id).await }).await {
        Ok(Ok(true)) => Ok(done()),
        Ok(Ok(false)) => Err(unknown()),
        Ok(Err(error)) => Err(error),
        Err(error) => Err(ApiError::runtime(format!("the terminal could not be ended: {error}"))),
    }
}

async fn attach(
    State(app): State<App>,
    Path(id): Path<String>,
    params: Params,
    mut request: Request,
) -> Result<Response, ApiError> {
    let terminal = app.terminals.get(&id).ok_or_else(unknown)?;
    let handshake = socket::Handshake::new(request.headers())?;
    let wanted = wanted(&params)?;
    let place = terminal.enter().ok_or_else(|| {
        let message = "too many clients are connected to this terminal; close one that is not needed";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code::SERVICE_UNAVAILABLE, message)
    })?;
    let role = if params.get("mode") == Some("viewer") {
        if !terminal.is_running() {
            let message =
                "there is nothing to watch: the program does not run; connect as holder to start it";
            return Err(ApiError::new(StatusCode::CONFLICT, code::VIEWER_REQUIRES_RUNNING_SESSION, message));
        }
        Role::Viewer
    } else {
        let seat = terminal.sit();
        if seat.is_none() && params.get("takeover") != Some("1") {
            let message = "another client is connected; take over with takeover=1, or watch with mode=viewer";
            return Err(ApiError::new(StatusCode::CONFLICT, code::ALREADY_CONNECTED, message));
        }
        Role::Holder(seat)
    };
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        // A client that leaves before gives its seat back by that.
        let Ok(Ok(upgraded)) = tokio::time::timeout(HANDSHAKE, upgrade).await else { return };
        let socket = socket::open(upgraded).await;
        connection::serve(app, terminal, wanted, role, place, socket).await;
    });
    Ok(handshake.response())
}

/// What the query asks for. `cols` and `rows` are the size at the start, so that nothing is drawn twice.
fn wanted(params: &Params) -> Result<Wanted, ApiError> {
    let since = params
        .get("since")
        .map(str::parse)
        .transpose()
        .map_err(|_| ApiError::invalid("'since' must be a number of bytes"))?;
    let number = |name, usual| match params.get(name).map(str::parse) {
        None => Ok(usual),
        Some(Ok(number @ 1..)) => Ok(number),
        Some(_) => Err(ApiError::invalid(format!("'{name}' must be a number from 1 to 65535"))),
    };
    let size = Size { cols: number("cols", Size::USUAL.cols)?, rows: number("rows", Size::USUAL.rows)? };
    let mode = if params.get("pty") == Some("0") { Mode::Pipes } else { Mode::Terminal };
    Ok(Wanted { mode, size, since })
}

/// 404: no such terminal.
fn unknown() -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        code::CONTEXT_NOT_FOUND,
        "there is no such terminal; it was deleted, or the daemon has been restarted since: make a new one",
    )
}
