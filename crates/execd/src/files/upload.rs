//! Uploads: pairs of `metadata` and `file` in a multipart form.
//!
//! The n-th metadata belongs to the n-th file. Contents are staged first and get their names when the form has
//! been read to its end and the numbers agree, so a broken or wrong upload changes nothing; only beyond 16 MiB of
//! small files or 256 large ones the pairs so far are put in place early. Each file appears at once and whole.
//!
//! Metadata with a link's target make a symlink, which replaces a file or link of its name.
//!
//! A path that ends in a symlink is written through, as opening the file for writing would. Anything but a regular
//! file in the target's place is refused.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::Stream;
use http::{StatusCode, header};
use osb_protocol::execd::code;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use serde::Deserialize;

use super::attributes::{Attributes, Wanted};
use super::dir::{self, Place};
use super::error::{FileError, Result};
use super::multipart::{Multipart, MultipartError, boundary};
use super::path::Requested;
use super::spool::{Content, Spool};
use super::temp::{Temp, hidden_name};
use crate::accounts::Accounts;
use crate::app::App;
use crate::http::{ApiError, done};
use crate::remote::is_remote;

/// Bound of one metadata part.
const MAX_METADATA: usize = 64 << 10;
/// Metadata waiting for their files.
const MAX_WAITING: usize = 100_000;
/// Small files staged in memory.
const MAX_STAGED_BYTES: usize = 16 << 20;
/// Large files staged on disk; each holds a descriptor.
const MAX_STAGED_FILES: usize = 256;
/// Read from a client whose upload was refused, so that it sees the answer instead of a reset.
const MAX_DRAIN: usize = 32 << 20;
/// Uploads of more files than this are not flushed to disk one by one.
const MAX_FLUSHED: usize = 16;

/// `POST /files/upload`. The upload is not cancelled midway through putting files in place.
pub(crate) async fn upload(
    State(app): State<App>,
    request: Request,
) -> std::result::Result<Response, ApiError> {
    let content_type = request.headers().get(header::CONTENT_TYPE).map_or(&[][..], |value| value.as_bytes());
    let boundary = boundary(content_type).map_err(refused_body)?;
    let mut multipart = Multipart::new(request.into_body().into_data_stream(), &boundary);
    match receive(&app, &mut multipart).await {
        Ok(()) => Ok(done()),
        Err(error) => {
            multipart.drain(MAX_DRAIN).await;
            Err(error)
        }
    }
}

fn bad_request(code: &'static str, message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, code, message)
}

fn refused_body(error: MultipartError) -> ApiError {
    bad_request(code::INVALID_FILE, error.to_string())
}

/// Wrong metadata has a code of its own; failures of the system keep theirs.
fn refused_metadata(error: FileError) -> ApiError {
    match error {
        FileError::Invalid(message) => bad_request(code::INVALID_FILE_METADATA, message),
        error => error.into(),
    }
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    path: Option<String>,
    #[serde(default)]
    link_target: Option<String>,
    #[serde(flatten)]
    wanted: Wanted,
}

/// Where a file goes.
#[derive(Debug, Clone)]
struct Target {
    requested: Requested,
    attributes: Attributes,
    link_target: Option<String>,
}

/// Both halves of pairs, as far as they have come.
#[derive(Default)]
struct Staged {
    targets: VecDeque<Target>,
    contents: VecDeque<Content>,
    /// Pairs put in place already.
    placed: usize,
    bytes: usize,
    files: usize,
}

async fn receive<S, E>(app: &App, multipart: &mut Multipart<S>) -> std::result::Result<(), ApiError>
where
    S: Stream<Item = std::result::Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    let mut staged = Staged::default();
    while let Some(name) = multipart.next_part().await.map_err(refused_body)? {
        match name.as_slice() {
            b"metadata" => {
                let text = collect(multipart).await?;
                staged.targets.push_back(read_metadata(app, &text).await?);
                if staged.targets.len() > MAX_WAITING {
                    return Err(bad_request(
                        code::INVALID_FILE,
                        "too many metadata parts without their files",
                    ));
                }
            }
            b"file" => receive_file(multipart, &mut staged).await?,
            // Fields of other names are nobody's business; `next_part` reads over them.
            _ => {}
        }
        if staged.bytes > MAX_STAGED_BYTES || staged.files >= MAX_STAGED_FILES {
            place(&mut staged).await?;
            if staged.bytes > MAX_STAGED_BYTES {
                return Err(bad_request(code::INVALID_FILE, "send each metadata part before its file"));
            }
        }
    }
    multipart.finish().await.map_err(refused_body)?;
    if staged.targets.is_empty() && staged.placed == 0 {
        return Err(bad_request(code::INVALID_FILE_METADATA, "the form has no 'metadata' part"));
    }
    if staged.contents.is_empty() && staged.placed == 0 {
        return Err(bad_request(code::INVALID_FILE_CONTENT, "the form has no 'file' part"));
    }
    if staged.targets.len() != staged.contents.len() {
        let (metadata, files) = (staged.targets.len() + staged.placed, staged.contents.len() + staged.placed);
        return Err(bad_request(
            code::INVALID_FILE,
            format!("the form has {metadata} 'metadata' and {files} 'file' parts; they come in pairs"),
        ));
    }
    place(&mut staged).await
}

async fn collect<S, E>(multipart: &mut Multipart<S>) -> std::result::Result<Vec<u8>, ApiError>
where
    S: Stream<Item = std::result::Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    let mut text = Vec::new();
    while let Some(chunk) = multipart.chunk().await.map_err(refused_body)? {
        if text.len() + chunk.len() > MAX_METADATA {
            return Err(bad_request(
                code::INVALID_FILE_METADATA,
                format!("a metadata part is longer than {MAX_METADATA} bytes"),
            ));
        }
        text.extend_from_slice(&chunk);
    }
    Ok(text)
}

async fn read_metadata(app: &App, text: &[u8]) -> std::result::Result<Target, ApiError> {
    let invalid = |message: String| bad_request(code::INVALID_FILE_METADATA, message);
    let metadata: Metadata = serde_json::from_slice(text)
        .map_err(|error| invalid(format!("the metadata is not the expected JSON: {error}")))?;
    let path = metadata
        .path
        .filter(|path| !path.is_empty())
        .ok_or_else(|| invalid("the metadata has no 'path'".to_owned()))?;
    if path.ends_with('/') {
        return Err(invalid(format!("{path}: ends in a slash; name the file")));
    }
    let link_target = metadata.link_target;
    if link_target.as_ref().is_some_and(|target| target.is_empty() || target.contains('\0')) {
        return Err(invalid(format!("{path}: the target of a link is neither empty nor holds a zero byte")));
    }
    let resolve = move |app: &App, path: &str, wanted: &Wanted| -> Result<Target> {
        // Most uploads name no owner: the account files need not be read.
        let named = |name: &Option<String>| name.as_ref().is_some_and(|name| !name.is_empty());
        let accounts =
            if named(&wanted.owner) || named(&wanted.group) { Accounts::read() } else { Accounts::default() };
        let requested = Requested::new(path.as_bytes(), app)?;
        requested.split()?;
        Ok(Target { requested, attributes: wanted.resolve(&accounts)?, link_target: link_target.clone() })
    };
    // A look at the disk is needed for some paths only.
    let plain =
        !path.contains(['$', '~']) && metadata.wanted.owner.is_none() && metadata.wanted.group.is_none();
    let target = if plain {
        resolve(app, &path, &metadata.wanted)
    } else {
        let app = app.clone();
        super::blocking(move || resolve(&app, &path, &metadata.wanted)).await
    };
    target.map_err(refused_metadata)
}

async fn receive_file<S, E>(
    multipart: &mut Multipart<S>,
    staged: &mut Staged,
) -> std::result::Result<(), ApiError>
where
    S: Stream<Item = std::result::Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    // The queues hold whole pairs first, so the next file's target is as far in as there are contents.
    let target = staged.targets.get(staged.contents.len()).map(|target| target.requested.clone());
    let mut spool = Spool::default();
    while let Some(chunk) = multipart.chunk().await.map_err(refused_body)? {
        spool.push(chunk, target.as_ref()).await?;
        if target.is_none() && staged.bytes + spool.pending() > MAX_STAGED_BYTES {
            return Err(bad_request(code::INVALID_FILE, "send each metadata part before its file"));
        }
    }
    let content = spool.finish(target.as_ref()).await?;
    match &content {
        Content::Memory(content) => staged.bytes += content.len(),
        Content::File(_) => staged.files += 1,
    }
    staged.contents.push_back(content);
    Ok(())
}

/// Gives all complete pairs their names.
async fn place(staged: &mut Staged) -> std::result::Result<(), ApiError> {
    let count = staged.targets.len().min(staged.contents.len());
    let contents: Vec<_> = staged.contents.drain(..count).collect();
    let pairs: Vec<(Target, Content)> = staged.targets.drain(..count).zip(contents).collect();
    staged.placed += count;
    staged.files = 0;
    staged.bytes = staged
        .contents
        .iter()
        .map(|content| match content {
            Content::Memory(content) => content.len(),
            Content::File(_) => 0,
        })
        .sum();
    Ok(super::blocking(move || place_all(pairs)).await?)
}

fn place_all(pairs: Vec<(Target, Content)>) -> Result<()> {
    let mut parent: Option<(PathBuf, Arc<OwnedFd>)> = None;
    let flush_each = pairs.len() <= MAX_FLUSHED;
    let mut remote = Vec::new();
    for (target, content) in pairs {
        let shown = &target.requested.shown;
        let (path, name) = target.requested.split()?;
        // Files of one call tend to lie in one directory.
        let known = parent.take().filter(|(known, _)| known == path);
        let (_, parent_dir) = parent.insert(match known {
            Some(known) => known,
            None => {
                let owner = Attributes { mode: None, ..target.attributes };
                (path.to_owned(), Arc::new(dir::make_all(path, &owner, shown)?))
            }
        });
        if let Some(link) = &target.link_target {
            if !matches!(&content, Content::Memory(content) if content.is_empty()) {
                return Err(FileError::Invalid(format!("{shown}: a link has no content")));
            }
            put_link(link, parent_dir, name, &target.attributes)
                .map_err(|errno| wrong_target(shown, errno))?;
            continue;
        }
        let place = follow(parent_dir, name).map_err(|errno| wrong_target(shown, errno))?;
        let file = put(content, &place, &target.attributes).map_err(|errno| wrong_target(shown, errno))?;
        if flush_each || is_remote(&file) {
            flush(&file).map_err(|errno| FileError::of(shown, "flush the file", errno))?;
            remote.push(parent_dir.clone());
        }
    }
    // A directory's names are flushed once, after all of them are there.
    remote.dedup_by(|one, other| Arc::ptr_eq(one, other));
    for dir in remote {
        // Opened for reading: a descriptor that only names the directory cannot be flushed.
        let opened = rustix::fs::openat(
            &dir,
            c".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        if let Err(errno) = opened.and_then(|dir| flush(&dir)) {
            tracing::debug!(error = %errno, "a directory was not flushed");
        }
    }
    Ok(())
}

/// The directory and name that a write to `parent/name` reaches.
fn follow(parent: &Arc<OwnedFd>, name: &std::ffi::OsStr) -> rustix::io::Result<(Arc<OwnedFd>, OsString)> {
    match rustix::fs::readlinkat(parent, name, Vec::new()) {
        Err(Errno::INVAL | Errno::NOENT) => Ok((parent.clone(), name.to_owned())),
        Err(errno) => Err(errno),
        Ok(_) => {
            let parent = parent.try_clone().map_err(super::temp::errno_of)?;
            let Place { dir, name } = dir::resolve(parent, name)?;
            Ok((Arc::new(dir), name))
        }
    }
}

fn put(
    content: Content,
    (dir, name): &(Arc<OwnedFd>, OsString),
    attributes: &Attributes,
) -> rustix::io::Result<std::fs::File> {
    let temp = match content {
        Content::File(temp) => temp,
        Content::Memory(content) => {
            let mut temp = Temp::new(dir.clone())?;
            temp.file().write_all(&content).map_err(super::temp::errno_of)?;
            temp
        }
    };
    temp.replace(dir.as_fd(), name, attributes)
}

/// Makes a symlink and lets it take its name at once. Its permission bits have no meaning.
fn put_link(
    link: &str,
    parent: &Arc<OwnedFd>,
    name: &std::ffi::OsStr,
    attributes: &Attributes,
) -> rustix::io::Result<()> {
    let hidden = hidden_name();
    rustix::fs::symlinkat(link, parent, &hidden)?;
    let (uid, gid) = (attributes.uid.map(Uid::from_raw), attributes.gid.map(Gid::from_raw));
    let own = || rustix::fs::chownat(parent, &hidden, uid, gid, AtFlags::SYMLINK_NOFOLLOW);
    let owned = if uid.is_some() || gid.is_some() { own() } else { Ok(()) };
    let placed = owned.and_then(|()| rustix::fs::renameat(parent, &hidden, parent, name));
    if placed.is_err() {
        // The first failure is the one to tell.
        let _ = rustix::fs::unlinkat(parent, &hidden, AtFlags::empty());
    }
    placed
}

fn wrong_target(shown: &str, errno: Errno) -> FileError {
    match errno {
        Errno::ISDIR => FileError::Invalid(format!("{shown}: is a directory; name a file in it")),
        Errno::NODEV | Errno::NXIO => {
            FileError::Invalid(format!("{shown}: exists and is not a regular file"))
        }
        errno => FileError::of(shown, "write the file", errno),
    }
}

/// Flushes to the disk or the server behind the file system; some cannot.
fn flush(file: impl std::os::fd::AsFd) -> rustix::io::Result<()> {
    match rustix::fs::fsync(file) {
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::ROFS | Errno::NOSYS) => Ok(()),
        result => result,
    }
}
