//! `/v1/filesystem/{uid}/{gid}/files…` and `/directories…`: the routes of [`super::router`] as somebody else.
//!
//! A request goes, unchanged but for its prefix, over a socket to a process of that identity ([`worker`]), which
//! serves it with the very handlers of the daemon. So every permission is the kernel's to check, and nothing that
//! the daemon holds can be reached: threads that only change their file system identity could open each descriptor
//! of the daemon by `/proc/self/fd`, and would keep its right to set capabilities and extended attributes.

mod worker;

pub(crate) use worker::{FLAG, run, serve};

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::any;
use http::uri::PathAndQuery;
use http::{StatusCode, Uri};

use super::workers::{Kind, Workers};
use crate::accounts::Accounts;
use crate::app::App;
use crate::http::ApiError;
use crate::process::spawn::{Program, Stdio, spawn};

/// Segments of a path before the part that the worker sees: an empty one, `v1`, `filesystem` and the two ids.
const PREFIX_SEGMENTS: usize = 5;

/// Whom a request wants to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Who {
    uid: u32,
    gid: u32,
}

impl Who {
    /// Decimal digits only. The largest number means "no change" to the kernel and is nobody's id.
    fn parse(uid: &str, gid: &str) -> Result<Self, ApiError> {
        let id = |name: &str, text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|id| digits && *id != u32::MAX).ok_or_else(|| {
                ApiError::invalid(format!("{name} {text:?}: give a decimal number from 0 to 4294967294"))
            })
        };
        Ok(Self { uid: id("uid", uid)?, gid: id("gid", gid)? })
    }
}

/// The module's routes.
pub(super) fn router() -> axum::Router<App> {
    let workers = Workers::<Identified>::default();
    let serve = move |State(app): State<App>, request: Request| {
        let workers = workers.clone();
        async move { forward(&workers, &app, request).await }
    };
    axum::Router::new()
        .route("/v1/filesystem/{uid}/{gid}/files", any(serve.clone()))
        .route("/v1/filesystem/{uid}/{gid}/files/{*rest}", any(serve.clone()))
        .route("/v1/filesystem/{uid}/{gid}/directories", any(serve.clone()))
        .route("/v1/filesystem/{uid}/{gid}/directories/{*rest}", any(serve))
}

async fn forward(workers: &Workers<Identified>, app: &App, request: Request) -> Result<Response, ApiError> {
    let (mut head, body) = request.into_parts();
    let who;
    (who, head.uri) = split(&head.uri)?;
    let accounts = {
        let app = app.clone();
        tokio::task::spawn_blocking(move || app.accounts.get())
            .await
            .map_err(|error| unavailable(who, error))?
    };
    workers.forward(&Identified { who, accounts }, Request::from_parts(head, body)).await
}

/// An identity, and the accounts that its groups are read from: with others it is not the same any more.
#[derive(Debug, Clone)]
struct Identified {
    who: Who,
    accounts: Arc<Accounts>,
}

impl PartialEq for Identified {
    fn eq(&self, other: &Self) -> bool {
        self.who == other.who && Arc::ptr_eq(&self.accounts, &other.accounts)
    }
}

impl Kind for Identified {
    /// Executes this very program again. It is still the daemon's user, and becomes the other one by itself: the
    /// program need not be anybody else's to execute.
    fn start(&self, connection: UnixStream) -> io::Result<OwnedFd> {
        if !std::path::Path::new("/proc/self/exe").exists() {
            return Err(io::Error::other(
                "the daemon executes itself for that, and /proc is not mounted here",
            ));
        }
        let null = crate::process::null::open()?;
        let ids = CString::new(format!("{}:{}", self.who.uid, self.who.gid))?;
        let program = Program {
            candidates: vec![c"/proc/self/exe".to_owned()],
            argv: vec![c"execd".to_owned(), CString::new(format!("--{FLAG}"))?, ids],
            env: Vec::new(),
            cwd: c"/".to_owned(),
            identity: None,
            tag: None,
        };
        let stdio = Stdio { stdin: connection.as_fd(), stdout: null.as_fd(), stderr: null.as_fd() };
        Ok(spawn(&program, stdio, &[]).map_err(io::Error::other)?.pidfd)
    }

    fn unavailable(&self, reason: &dyn std::fmt::Display) -> ApiError {
        unavailable(self.who, reason)
    }
}

/// Takes the identity off the path. Nothing is decoded: ids need no encoding, and the rest is the worker's.
fn split(uri: &Uri) -> Result<(Who, Uri), ApiError> {
    let text = uri.path_and_query().map_or("", PathAndQuery::as_str);
    let mut segments = text.splitn(PREFIX_SEGMENTS + 1, '/').skip(PREFIX_SEGMENTS - 2);
    let (uid, gid) = (segments.next().unwrap_or_default(), segments.next().unwrap_or_default());
    let who = Who::parse(uid, gid)?;
    let rest = format!("/{}", segments.next().unwrap_or_default()).parse::<PathAndQuery>();
    Ok((who, rest.map_err(|error| ApiError::invalid(format!("the path cannot be read: {error}")))?.into()))
}

/// The worker is gone, or never became who it should be.
fn unavailable(who: Who, reason: impl std::fmt::Display) -> ApiError {
    ApiError::new(
        StatusCode::SERVICE_UNAVAILABLE,
        osb_protocol::execd::code::FILESYSTEM_IDENTITY_UNAVAILABLE,
        format!("files cannot be served as {}:{}: {reason}", who.uid, who.gid),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_decimal_numbers() {
        assert_eq!(Who::parse("0", "4294967294").unwrap(), Who { uid: 0, gid: 4_294_967_294 });
        for bad in ["", "4294967295", "4294967296", "-1", "+1", " 1", "1 ", "0x1", "1e3", "root", "1.0", "١"]
        {
            for (uid, gid) in [(bad, "1"), ("1", bad)] {
                let error = Who::parse(uid, gid).unwrap_err();
                assert_eq!((error.status.as_u16(), error.code), (400, "INVALID_REQUEST_BODY"), "{bad:?}");
            }
        }
    }

    #[test]
    fn the_rest_of_the_path_stays_as_it_is() {
        for (uri, rest) in [
            (
                "/v1/filesystem/1/2/files/info?path=%2Fa+b%25&path=/v1/filesystem/3/4",
                "/files/info?path=%2Fa+b%25&path=/v1/filesystem/3/4",
            ),
            ("http://host/v1/filesystem/1/2/directories", "/directories"),
        ] {
            assert_eq!(
                split(&uri.parse().unwrap()).unwrap(),
                (Who { uid: 1, gid: 2 }, rest.parse().unwrap())
            );
        }
    }
}
