//! Isolated sessions: shells in namespaces of their own, with their own view of the sandbox's files.
//!
//! [`isolator`] is the process that makes them, [`keeper`] the daemon's hold on it, [`registry`] what there is of
//! sessions, [`life`] the task that drives the shell of one.

mod background;
pub mod config;
pub(crate) mod isolator;
mod keeper;
mod life;
mod place;
pub mod registry;
mod script;
mod spec;
mod usage;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{any, get, post};
use http::uri::PathAndQuery;
use http::{HeaderValue, StatusCode, header};
use osb_protocol::execd::{
    Hardening, HardeningLayer, ISOLATED_TAIL_CURSOR_HEADER, IsolatedRunRequest, IsolatedRunStarted,
    IsolatedSessionCreated, IsolatedSessionSpec, IsolationCapabilities, ListIsolatedSessionsResponse,
    RuntimeInit, code,
};
use tokio::sync::oneshot;

use self::background::{BackgroundRun, LOG_LIMIT};
pub use self::keeper::Source;
use self::life::{Job, Work};
use self::registry::{Session, unknown};
use crate::app::App;
use crate::command::run::temp_dir;
use crate::command::{envfile, event_stream, log_body};
use crate::http::{ApiError, Json, Params, done, json};
use crate::stream::feed;

/// Longest code of a run. It is handed to the shell as a file.
const LONGEST_CODE: usize = 4 << 20;

/// The routes of isolated sessions.
pub fn router() -> axum::Router<App> {
    let not_supported = || async { not_supported() };
    axum::Router::new()
        .route("/v1/isolated/capabilities", get(capabilities))
        .route("/v1/isolated/sessions", get(list))
        .route("/v1/isolated/session", post(create))
        .route("/v1/isolated/session/{id}", get(inspect).delete(remove))
        .route("/v1/isolated/session/{id}/run", post(run))
        .route("/v1/isolated/session/{id}/runs/{run}", get(run_status))
        .route("/v1/isolated/session/{id}/runs/{run}/logs", get(run_logs))
        .route("/v1/isolated/session/{id}/diff", get(not_supported))
        .route("/v1/isolated/session/{id}/commit", post(not_supported))
        .route("/v1/isolated/session/{id}/files", any(files))
        .route("/v1/isolated/session/{id}/files/{*rest}", any(files))
        .route("/v1/isolated/session/{id}/directories", any(files))
        .route("/v1/isolated/session/{id}/directories/{*rest}", any(files))
}

/// 503: reserved.
fn not_supported() -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        code::NOT_SUPPORTED,
        "differences and commits of isolated sessions are not offered; read the files before deleting the session",
    )
}

async fn capabilities(State(app): State<App>) -> Response {
    let layer = |state: &str, message: Option<&str>| HardeningLayer {
        state: state.to_owned(),
        message: message.map(str::to_owned),
    };
    let config = app.isolated.config();
    // A layer for all programs; sessions have the usual ones without asking.
    let absent = |name: &str, asked: bool| {
        let message = if asked { config::not_here(name) } else { "not offered".to_owned() };
        layer("unsupported", Some(&message))
    };
    let own = |asked: bool| if asked { absent("hardening", true) } else { layer("active", None) };
    let mut all = IsolationCapabilities {
        isolator: "native".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        hardening: Some(Hardening {
            init_mode: if rustix::process::getppid().is_some_and(rustix::process::Pid::is_init) {
                "pid1"
            } else {
                "none"
            }
            .to_owned(),
            signal_shield: true,
            cap_drop: own(config.hardening),
            seccomp: own(config.hardening),
            landlock: absent("landlock", config.landlock),
            ebpf: absent("ebpf", config.ebpf),
        }),
        runtime_init: Some(RuntimeInit { version: 1 }),
        ..IsolationCapabilities::default()
    };
    let shared = app.clone();
    // In a task of its own: a client that leaves must not stop it half way.
    let link = tokio::spawn(async move { shared.isolated.link().await }).await;
    match link.map_err(|error| ApiError::runtime(error.to_string())).and_then(|link| link) {
        Ok(link) => {
            let hello = link.hello();
            all.available = hello.unavailable.is_none();
            all.setpriv_available = all.available;
            all.userns_available = all.available;
            all.message = hello.unavailable.clone().or_else(|| hello.no_other_users.clone()).or_else(|| {
                (!hello.disk).then(|| {
                    "changes of overlays lie in memory: there is no place for them on disk".to_owned()
                })
            });
        }
        Err(error) => all.message = Some(error.message),
    }
    json(&all)
}

async fn list(State(app): State<App>) -> Response {
    json(&ListIsolatedSessionsResponse { sessions: app.isolated.list() })
}

async fn create(State(app): State<App>, Json(spec): Json<IsolatedSessionSpec>) -> Result<Response, ApiError> {
    // In a task of its own: a client that leaves must not stop it half way.
    let made = tokio::spawn(registry::make(app, spec)).await;
    let session =
        made.map_err(|error| ApiError::runtime(format!("the session could not be made: {error}")))??;
    let created = IsolatedSessionCreated {
        session_id: session.id.clone(),
        created_at: session.created_at().to_string(),
    };
    Ok((StatusCode::CREATED, json(&created)).into_response())
}

async fn inspect(State(app): State<App>, Path(id): Path<String>) -> Result<Response, ApiError> {
    Ok(json(&app.isolated.get(&id)?.status()))
}

async fn remove(State(app): State<App>, Path(id): Path<String>) -> Result<Response, ApiError> {
    let deleted = tokio::spawn(async move { registry::delete(app, &id).await }).await;
    deleted.map_err(|error| ApiError::runtime(format!("the session could not be deleted: {error}")))??;
    Ok(done())
}

async fn run(
    State(app): State<App>,
    Path(id): Path<String>,
    Json(request): Json<IsolatedRunRequest>,
) -> Result<Response, ApiError> {
    let session = app.isolated.get(&id)?;
    let IsolatedRunRequest { code, envs, timeout_seconds, background } = request;
    let envs: Vec<_> = envs.unwrap_or_default().into_iter().collect();
    check_run(&code, &envs)?;
    if session.is_on_disk() {
        let checked = Arc::clone(&session);
        let within = tokio::task::spawn_blocking(move || checked.check_quota()).await;
        within.map_err(|error| ApiError::runtime(error.to_string()))??;
    }
    if background.unwrap_or(false) {
        return start_in_background(&app, &session, code, envs).await;
    }
    let (writer, reader) = feed::feed();
    let (answer, answered) = oneshot::channel();
    let timeout = timeout_seconds.filter(|seconds| *seconds > 0).map(Duration::from_secs);
    let job = Job { code, envs, timeout, writer, answer: Some((answer, reader)) };
    match session.queue(Work::Foreground(job)) {
        Ok(()) => {}
        // The contract has a stream say that.
        Err(error) if error.message == background::TERMINATED => return Ok(event_stream(terminated()).await),
        Err(error) => return Err(error),
    }
    let events = answered.await.unwrap_or_else(|_| Ok(terminated()))?;
    Ok(event_stream(events).await)
}

/// The stream of a run in a session whose shell has ended.
fn terminated() -> feed::Reader {
    use osb_protocol::execd::{Event, EventKind, ExecutionError};
    let (writer, reader) = feed::feed();
    let error = ExecutionError {
        ename: "RuntimeError".to_owned(),
        evalue: background::TERMINATED.to_owned(),
        traceback: Vec::new(),
    };
    let event = Event {
        kind: EventKind::Error,
        text: Some(background::TERMINATED.to_owned()),
        error: Some(error),
        timestamp: crate::stream::event::unix_millis(),
        ..Event::default()
    };
    writer.push(|out| crate::stream::event::push(out, &event));
    reader
}

fn check_run(code: &str, envs: &[(String, String)]) -> Result<(), ApiError> {
    if code.trim().is_empty() {
        return Err(ApiError::invalid("'code' is required and must not be blank"));
    }
    if code.len() > LONGEST_CODE {
        return Err(ApiError::invalid(format!(
            "'code' is longer than {LONGEST_CODE} bytes; upload it as a file and run that"
        )));
    }
    if code.contains('\0') || envs.iter().any(|(_, value)| value.contains('\0')) {
        return Err(ApiError::invalid("neither 'code' nor a variable can hold a NUL byte"));
    }
    match envs.iter().find(|(name, _)| !envfile::is_name(name.as_bytes())) {
        Some((name, _)) => Err(ApiError::invalid(format!("'envs': {name:?} is not the name of a variable"))),
        None => Ok(()),
    }
}

async fn start_in_background(
    app: &App,
    session: &Arc<Session>,
    code: String,
    envs: Vec<(String, String)>,
) -> Result<Response, ApiError> {
    if !session.background {
        return Err(ApiError::invalid(
            "runs in the background need a workspace that can be written: mode 'rw', or 'overlay' with changes on disk",
        ));
    }
    let run =
        Arc::new(BackgroundRun::new(session.id.clone(), temp_dir(app), Arc::clone(&app.isolated.stock)));
    session.add_run(Arc::clone(&run));
    let (begun, wait) = oneshot::channel();
    let work = Work::Background { run: Arc::clone(&run), code, envs, begun };
    let result = match session.queue(work) {
        Ok(()) => wait.await.unwrap_or_else(|_| Err(ApiError::runtime(background::TERMINATED))),
        Err(error) => Err(error),
    };
    if let Err(error) = result {
        session.drop_run(&run.id);
        return Err(error);
    }
    let started = IsolatedRunStarted {
        session_id: session.id.clone(),
        run_id: run.id.clone(),
        started_at: run.started_at.to_string(),
    };
    Ok((StatusCode::ACCEPTED, json(&started)).into_response())
}

async fn run_status(
    State(app): State<App>,
    Path((id, run)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    Ok(json(&app.isolated.get(&id)?.run(&run)?.status()))
}

async fn run_logs(
    State(app): State<App>,
    Path((id, run)): Path<(String, String)>,
    params: Params,
) -> Result<Response, ApiError> {
    let run = app.isolated.get(&id)?.run(&run)?;
    let cursor = match params.get("cursor").filter(|text| !text.is_empty()) {
        None => 0,
        Some(text) => text
            .parse::<i64>()
            .ok()
            .and_then(|cursor| u64::try_from(cursor).ok())
            .ok_or_else(|| ApiError::invalid(format!("'cursor' is a number of bytes, not {text:?}")))?,
    };
    let snapshot = run.spool.snapshot(cursor);
    let (start, length) = (snapshot.start, snapshot.length.min(LOG_LIMIT));
    let mut response = Response::new(log_body(snapshot).await?);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::CONTENT_LENGTH, length.into());
    // One who asks for what is not there yet waits for it where he is.
    let next = if length == 0 { cursor.min(start) } else { start + length };
    headers.insert(ISOLATED_TAIL_CURSOR_HEADER, next.into());
    Ok(response)
}

async fn files(
    State(app): State<App>,
    Path(params): Path<std::collections::HashMap<String, String>>,
    request: Request,
) -> Result<Response, ApiError> {
    let session = app.isolated.get(params.get("id").map_or("", String::as_str)).map_err(|_| unknown())?;
    let (mut head, body) = request.into_parts();
    // An empty segment, `v1`, `isolated`, `session` and the id come before what the worker sees.
    let text = head.uri.path_and_query().map_or("", PathAndQuery::as_str);
    let rest = text.splitn(6, '/').nth(5).unwrap_or_default();
    head.uri = format!("/{rest}")
        .parse::<PathAndQuery>()
        .map_err(|error| ApiError::invalid(format!("the path cannot be read: {error}")))?
        .into();
    session.files(&app.isolated.workers, Request::from_parts(head, body)).await
}
