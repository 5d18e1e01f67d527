//! What is noted of each request: a line of the log, and its duration for telemetry.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::{Method, StatusCode};
use http_body::{Frame, SizeHint};

use crate::app::App;
use crate::log::redact;
use crate::telemetry::{self, Timed};

/// Whether anything is noted; where nothing is, requests need not pass through here.
#[must_use]
pub fn is_wanted(app: &App) -> bool {
    app.telemetry.is_some() || tracing::enabled!(tracing::Level::INFO)
}

/// Notes a request when its answer has been sent, or its client has left.
pub async fn observe(State(app): State<App>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let target = tracing::enabled!(tracing::Level::INFO)
        .then(|| redact::target(request.uri().path(), request.uri().query()));
    let route = request.extensions().get::<MatchedPath>().map(|path| template(path.as_str()));
    let operation = route.as_deref().and_then(|route| file_operation(&method, route, request.uri().path()));
    // A client that leaves before there is an answer drops this.
    let mut note = Note { app, began, method, target, route, operation, status: None };
    let answer = next.run(request).await;
    note.status = Some(answer.status());
    answer.map(|body| Body::new(Observed { body, _note: note }))
}

/// The route as upstream writes it: `:param` and `*rest`.
fn template(path: &str) -> String {
    path.replace("{*", "*").replace('{', ":").replace('}', "")
}

/// The name of an operation on files, also of one as another user.
fn file_operation(method: &Method, route: &str, path: &str) -> Option<&'static str> {
    let path = match route.strip_prefix("/v1/filesystem/:uid/:gid") {
        Some(_) => path
            .splitn(5, '/')
            .nth(4)
            .map(|rest| format!("/{}", rest.split_once('/').map_or("", |(_, rest)| rest)))?,
        None => path.to_owned(),
    };
    Some(match (method.as_str(), path.as_str()) {
        ("GET", "/files/info") => "info",
        ("DELETE", "/files") => "delete",
        ("POST", "/files/permissions") => "chmod",
        ("POST", "/files/mv") => "rename",
        ("POST", "/directories") => "mkdir",
        ("DELETE", "/directories") => "rmdir",
        ("GET", "/directories/list") => "listdir",
        ("GET", "/files/search") => "search",
        ("POST", "/files/replace") => "replace",
        ("POST", "/files/upload") => "upload",
        ("GET", "/files/download") => "download",
        _ => return None,
    })
}

/// What is known of a request; noted when it is dropped.
struct Note {
    app: App,
    began: Instant,
    method: Method,
    /// Path and query for the log, without secrets.
    target: Option<String>,
    route: Option<String>,
    operation: Option<&'static str>,
    status: Option<StatusCode>,
}

impl Drop for Note {
    fn drop(&mut self) {
        let took = self.began.elapsed();
        // As nginx writes what its client did not wait for.
        let status = self.status.map_or(499, |status| status.as_u16());
        if let Some(target) = &self.target {
            let millis = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            tracing::info!(
                method = self.method.as_str(),
                url = target,
                status = u64::from(status),
                millis,
                "request"
            );
        }
        if let Some(telemetry) = &self.app.telemetry {
            let binding = self.app.binding.get();
            let attributes = vec![
                ("http_method", known(&self.method).to_owned()),
                ("http_route", self.route.take().unwrap_or_else(|| "unknown".to_owned())),
                ("http_status_code", status.to_string()),
            ];
            telemetry.record(&binding, Timed::Request, attributes, took);
            if let Some(operation) = self.operation {
                let attributes = vec![("operation", operation.to_owned()), telemetry::result(status < 400)];
                telemetry.record(&binding, Timed::Files, attributes, took);
            }
        }
    }
}

/// Callers may invent methods; telemetry need not know each.
fn known(method: &Method) -> &str {
    let all = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::PATCH,
        Method::HEAD,
        Method::OPTIONS,
        Method::CONNECT,
        Method::TRACE,
    ];
    if all.contains(method) { method.as_str() } else { "_OTHER" }
}

/// An answer's body, with what is to be noted at its end.
struct Observed {
    body: Body,
    _note: Note,
}

impl http_body::Body for Observed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_and_operations_have_upstreams_names() {
        assert_eq!(template("/command/{id}/logs"), "/command/:id/logs");
        assert_eq!(template("/proxy/{*rest}"), "/proxy/*rest");
        let identity = "/v1/filesystem/:uid/:gid/files/*rest";
        for (method, route, path, operation) in [
            (Method::GET, "/files/info", "/files/info", Some("info")),
            (Method::POST, "/files/info", "/files/info", None),
            (Method::DELETE, "/directories", "/directories", Some("rmdir")),
            (Method::POST, identity, "/v1/filesystem/1/2/files/upload", Some("upload")),
            (Method::GET, identity, "/v1/filesystem/1/2/files/what", None),
            (Method::DELETE, "/v1/filesystem/:uid/:gid/files", "/v1/filesystem/1/2/files", Some("delete")),
            (Method::GET, "/ping", "/ping", None),
        ] {
            assert_eq!(file_operation(&method, route, path), operation, "{method} {path}");
        }
        assert_eq!(known(&Method::from_bytes(b"ODD").unwrap()), "_OTHER");
    }
}
