//! Files and directories: `/files` and `/directories`.
//!
//! Everything that touches a disk runs on blocking threads and goes to its end even when the client leaves. Paths
//! are expanded by [`path`]; [`error`] chooses status and code. [`identity`] has all of it done as another user.

pub(crate) mod attributes;
mod copy;
pub(crate) mod dir;
mod download;
mod error;
mod find;
pub(crate) mod identity;
mod info;
mod lines;
pub(crate) mod multipart;
pub(crate) mod path;
pub(crate) mod pattern;
pub(crate) mod range;
pub(crate) mod remove;
mod rename;
mod replace;
pub(crate) mod session;
mod spool;
mod temp;
mod upload;
pub(crate) mod workers;

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;

use axum::extract::State;
use axum::response::Response;
use axum::routing::{delete, get, post};
use osb_protocol::execd::{FileInfo, Rename, Replaced, Replacement};
use rustix::fs::{CWD, Mode, OFlags};

use self::attributes::{Attributes, Wanted};
use self::error::{FileError, Result};
use self::info::Entry;
use self::path::{Query, Requested};
use self::pattern::Pattern;
use crate::accounts::Accounts;
use crate::app::App;
use crate::http::{ApiError, Json, done, json};

type Answer = std::result::Result<Response, ApiError>;

/// The module's routes.
pub fn router() -> axum::Router<App> {
    operations().merge(identity::router())
}

/// What is done as whoever this process is.
fn operations() -> axum::Router<App> {
    axum::Router::new()
        .route("/files", delete(remove_files))
        .route("/files/info", get(info))
        .route("/files/permissions", post(permissions))
        .route("/files/mv", post(rename_all))
        .route("/files/search", get(search))
        .route("/files/replace", post(replace_all))
        .route("/files/upload", post(upload::upload))
        .route("/files/download", get(download::download))
        .route("/directories", post(make_directories).delete(remove_directories))
        .route("/directories/list", get(list))
}

/// Runs file work on a thread that may wait for disks.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(FileError::Refused(format!("the operation ended unexpectedly: {error}"))))
}

fn requested_all(query: &Query, app: &App) -> Result<Vec<Requested>> {
    query.all("path").map(|raw| Requested::new(raw, app)).collect()
}

async fn info(State(app): State<App>, query: Query) -> Answer {
    let infos = blocking(move || {
        let accounts = Accounts::read();
        let mut infos = BTreeMap::new();
        for requested in requested_all(&query, &app)? {
            let entry = Entry::read(CWD, &requested.path)
                .map_err(|errno| FileError::of(&requested.shown, "read", errno))?;
            let info: FileInfo = entry.describe(requested.shown.clone(), &accounts);
            infos.insert(requested.shown, info);
        }
        Ok(infos)
    });
    Ok(json(&infos.await?))
}

async fn remove_files(State(app): State<App>, query: Query) -> Answer {
    blocking(move || requested_all(&query, &app)?.iter().try_for_each(remove::file)).await?;
    Ok(done())
}

async fn remove_directories(State(app): State<App>, query: Query) -> Answer {
    blocking(move || requested_all(&query, &app)?.iter().try_for_each(remove::tree)).await?;
    Ok(done())
}

/// A map from paths to what shall be set; a null value sets nothing.
type WantedByPath = BTreeMap<String, Option<Wanted>>;

/// Resolves all entries before anything is changed.
fn resolve_all(wanted: WantedByPath, app: &App) -> Result<Vec<(Requested, Attributes)>> {
    let accounts = Accounts::read();
    wanted
        .into_iter()
        .map(|(path, wanted)| {
            let requested = Requested::new(path.as_bytes(), app)?;
            Ok((requested, wanted.unwrap_or_default().resolve(&accounts)?))
        })
        .collect()
}

async fn permissions(State(app): State<App>, Json(wanted): Json<WantedByPath>) -> Answer {
    blocking(move || {
        for (requested, attributes) in resolve_all(wanted, &app)? {
            if attributes.is_empty() {
                continue;
            }
            let failed = |errno| FileError::of(&requested.shown, "change mode or owner", errno);
            // One descriptor for both changes: they reach the same file whatever is renamed meanwhile.
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let file = rustix::fs::openat(CWD, &requested.path, flags, Mode::empty()).map_err(failed)?;
            attributes.apply(file.as_fd()).map_err(failed)?;
        }
        Ok(())
    })
    .await?;
    Ok(done())
}

async fn make_directories(State(app): State<App>, Json(wanted): Json<WantedByPath>) -> Answer {
    blocking(move || {
        for (requested, attributes) in resolve_all(wanted, &app)? {
            dir::make_all(&requested.path, &attributes, &requested.shown)?;
        }
        Ok(())
    })
    .await?;
    Ok(done())
}

async fn rename_all(State(app): State<App>, Json(renames): Json<Vec<Rename>>) -> Answer {
    blocking(move || {
        renames.iter().try_for_each(|Rename { src, dest }| {
            rename::rename(&Requested::new(src.as_bytes(), &app)?, &Requested::new(dest.as_bytes(), &app)?)
        })
    })
    .await?;
    Ok(done())
}

async fn replace_all(
    State(app): State<App>,
    query: Query,
    Json(replacements): Json<BTreeMap<String, Replacement>>,
) -> Answer {
    let verbose = matches!(query.get("verbose"), Some(b"true" | b"True" | b"TRUE" | b"1" | b"t"));
    let replaced = blocking(move || {
        let mut checked = Vec::with_capacity(replacements.len());
        for (path, replacement) in replacements {
            if replacement.old.is_empty() {
                return Err(FileError::Invalid(format!("{path}: 'old' must not be empty")));
            }
            checked.push((Requested::new(path.as_bytes(), &app)?, replacement));
        }
        let mut replaced = BTreeMap::new();
        for (requested, Replacement { old, new }) in checked {
            let replaced_count = replace::replace(&requested, old.as_bytes(), new.as_bytes())?;
            replaced.insert(requested.shown, Replaced { replaced_count });
        }
        Ok(replaced)
    })
    .await?;
    Ok(if verbose { json(&replaced) } else { done() })
}

/// The path in the query; expanding it may look at the disk.
async fn root_of(query: &Query, app: App) -> std::result::Result<Requested, ApiError> {
    let raw = query.get("path").ok_or_else(|| ApiError::missing_query("path"))?.to_vec();
    Ok(blocking(move || Requested::new(&raw, &app)).await?)
}

async fn search(State(app): State<App>, query: Query) -> Answer {
    let root = root_of(&query, app).await?;
    let pattern = String::from_utf8_lossy(query.get("pattern").unwrap_or_default()).into_owned();
    let pattern = Pattern::new(&pattern).map_err(|error| ApiError::invalid(error.to_string()))?;
    let prefix = session::view().map(|view| view.prefix(&root.path));
    find::answer(root, find::Wanted::Matches(pattern), prefix).await
}

async fn list(State(app): State<App>, query: Query) -> Answer {
    let root = root_of(&query, app).await?;
    let depth = query.number("depth", 0)?.unwrap_or(1);
    find::answer(root, find::Wanted::Listing { depth }, None).await
}
