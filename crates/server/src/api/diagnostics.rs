//! `/sandboxes/{id}/diagnostics`: what is known of a sandbox, for people and as JSON.

use std::fmt::Write;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue};
use osb_protocol::lifecycle::{DiagnosticContentResponse, DiagnosticDelivery, DiagnosticKind, SandboxState};

use super::extract::Query;
use crate::error::ApiError;
use crate::sandbox::Record;
use crate::state::AppState;

/// Most bytes of a log that are read.
const LOG_BYTES: usize = 1 << 20;
/// Lines of a log when nothing else is asked for.
const LOG_LINES: usize = 100;
/// On answers of the routes that the ones with `scope` replace.
static DEPRECATION: HeaderName = HeaderName::from_static("deprecation");

/// `GET …/logs`.
pub(super) async fn logs(
    State(state): State<AppState>,
    Path(id): Path<String>,
    query: Query,
) -> Result<Response, ApiError> {
    let tail = lines(query.int("tail", 1, 10_000)?, LOG_LINES);
    let scope = scope(&query, "container")?;
    let record = state.sandbox(&id)?;
    match scope {
        None => Ok(deprecated(or_none(log(&state, &record, tail).await?.0, "(no logs)"))),
        Some(scope) => {
            let (text, truncated) = log(&state, &record, LOG_LINES).await?;
            Ok(inline(&record, DiagnosticKind::Logs, scope, text, truncated))
        }
    }
}

/// `GET …/events`.
pub(super) async fn events(
    State(state): State<AppState>,
    Path(id): Path<String>,
    query: Query,
) -> Result<Response, ApiError> {
    query.int("limit", 1, 500)?;
    let scope = scope(&query, "runtime")?;
    let record = state.sandbox(&id)?;
    let text = event_text(&record);
    Ok(match scope {
        None => deprecated(text),
        Some(scope) => inline(&record, DiagnosticKind::Events, scope, text, false),
    })
}

/// `GET …/inspect`.
pub(super) async fn inspect(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<String, ApiError> {
    Ok(inspect_text(&*state.sandbox(&id)?))
}

/// `GET …/summary`.
pub(super) async fn summary(
    State(state): State<AppState>,
    Path(id): Path<String>,
    query: Query,
) -> Result<String, ApiError> {
    let tail = lines(query.int("tail", 1, 10_000)?, 50);
    query.int("event_limit", 1, 500)?;
    let record = state.sandbox(&id)?;
    let logs = match log(&state, &record, tail).await {
        Ok((text, _)) => or_none(text, "(no logs)"),
        Err(ApiError::SandboxNotFound) => return Err(ApiError::SandboxNotFound),
        Err(error) => format!("[error] {error}"),
    };
    let (bar, line) = ("=".repeat(72), "-".repeat(40));
    let mut text = format!("{bar}\nSANDBOX DIAGNOSTICS SUMMARY\nSandbox ID: {}\n{bar}\n", record.id());
    let parts = [
        ("INSPECT".to_owned(), inspect_text(&record)),
        ("EVENTS".to_owned(), event_text(&record)),
        (format!("LOGS (last {tail} lines)"), logs),
    ];
    for (heading, part) in parts {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{line}\n{heading}\n{line}\n{}\n", part.trim_end());
    }
    Ok(text)
}

fn lines(asked: Option<u64>, default: usize) -> usize {
    asked.and_then(|n| usize::try_from(n).ok()).unwrap_or(default)
}

/// The scope: `None` asks for the plain text of old.
fn scope(query: &Query, own: &'static str) -> Result<Option<&'static str>, ApiError> {
    let Some(text) = query.get("scope") else { return Ok(None) };
    match text.trim().to_ascii_lowercase().as_str() {
        "all" => Ok(Some("all")),
        word if word == own => Ok(Some(own)),
        _ => Err(ApiError::DiagnosticsScope(if own == "container" {
            "container, all"
        } else {
            "runtime, all"
        })),
    }
}

/// The last `tail` lines of the entrypoint's output, and whether there are more.
async fn log(state: &AppState, record: &Record, tail: usize) -> Result<(String, bool), ApiError> {
    if record.now().status.state == SandboxState::Pending {
        return Ok((String::new(), false));
    }
    let bytes = state.runtime().entrypoint_log(record.id(), LOG_BYTES).await?;
    let text = String::from_utf8_lossy(&bytes);
    let body = text.strip_suffix('\n').unwrap_or(&text);
    let cut = body.rmatch_indices('\n').nth(tail.saturating_sub(1)).map(|(at, _)| at + 1);
    Ok((text[cut.unwrap_or(0)..].to_owned(), cut.is_some() || bytes.len() >= LOG_BYTES))
}

fn or_none(text: String, none: &str) -> String {
    if text.is_empty() { none.to_owned() } else { text }
}

fn deprecated(text: String) -> Response {
    let mut response = text.into_response();
    response.headers_mut().insert(DEPRECATION.clone(), HeaderValue::from_static("true"));
    response
}

fn inline(record: &Record, kind: DiagnosticKind, scope: &str, text: String, truncated: bool) -> Response {
    let warnings =
        (scope == "all").then(|| vec!["only one source contributes to the scope 'all'".to_owned()]);
    axum::Json(DiagnosticContentResponse {
        sandbox_id: record.id().to_string(),
        kind,
        scope: scope.to_owned(),
        delivery: DiagnosticDelivery::Inline,
        content_type: "text/plain; charset=utf-8".to_owned(),
        content_length: Some(text.len() as u64),
        content: Some(text),
        content_url: None,
        expires_at: None,
        truncated,
        warnings,
    })
    .into_response()
}

fn event_text(record: &Record) -> String {
    let status = record.status();
    let mut text = format!("Container:  {0} (sandbox-{0})\n", record.id());
    let _ = writeln!(text, "Status:     {}", word(&status.state));
    let _ = writeln!(text, "Created:    {}", record.origin.created_at);
    if status.has_ended() {
        let _ = writeln!(text, "Finished:   {}", status.since);
        let _ = writeln!(text, "Event:      {} - {}", status.reason, status.message);
        if let Some(code) = status.exit_code {
            let _ = writeln!(text, "Event:      Exited with code {code}");
        }
    } else if status.state == SandboxState::Pending {
        let _ = writeln!(text, "Event:      {} - {}", status.reason, status.message);
    } else {
        text.push_str("(no notable events)\n");
    }
    text
}

fn word(state: &SandboxState) -> &str {
    match state {
        SandboxState::Running => "running",
        SandboxState::Terminated | SandboxState::Failed => "exited",
        SandboxState::Stopping => "removing",
        other => other.as_str(),
    }
}

/// Everything but what may be secret: variables and tokens stay out.
fn inspect_text(record: &Record) -> String {
    let now = record.now();
    let status = &now.status;
    let mut text = String::new();
    let mut row = |label: &str, value: &str| {
        let _ = writeln!(text, "{label:<16}{value}");
    };
    row("Container ID:", &record.id().to_string());
    row("Name:", &format!("sandbox-{}", record.id()));
    row("Image:", &record.origin.image);
    row("Status:", word(&status.state));
    row("Running:", yes_no(status.state == SandboxState::Running));
    row("Paused:", yes_no(status.state == SandboxState::Paused));
    row("OOMKilled:", yes_no(status.reason == "OOM_KILLED"));
    if let Some(code) = status.exit_code {
        row("Exit Code:", &code.to_string());
    }
    row("Started At:", &record.origin.created_at.to_string());
    if status.has_ended() {
        row("Finished At:", &status.since.to_string());
    }
    if let Some(at) = now.expires_at {
        row("Expires At:", &at.to_string());
    }
    if status.state == SandboxState::Failed {
        row("Error:", &status.message);
    }
    text.push_str("\nResources:\n");
    for (name, value) in &record.origin.limits {
        let _ = writeln!(text, "  {:<14}{value}", format!("{name}:"));
    }
    text.push_str("Labels:\n");
    for (key, value) in &now.metadata {
        let _ = writeln!(text, "  {key}={value}");
    }
    text
}

fn yes_no(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}
