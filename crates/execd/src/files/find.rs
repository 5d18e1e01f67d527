//! Listing and searching.
//!
//! Answers are written while the tree is walked and sent while they are written, so they have no bound and need
//! no memory beyond the names of the directories that are open. A failure after the first piece was sent breaks
//! the answer off, so half a list never looks like a whole one.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, header};
use rustix::fs::{CWD, FileType, Mode};
use rustix::io::Errno;
use tokio::sync::{Semaphore, mpsc};

use super::dir::{Name, READ_NOFOLLOW, read_sorted};
use super::error::{FileError, Result};
use super::info::Entry;
use super::path::Requested;
use super::pattern::Pattern;
use crate::accounts::Accounts;
use crate::http::ApiError;

/// Names held at a time, over all open directories of one walk.
const MAX_NAMES: usize = 1_000_000;
/// Where paths grow longer than the kernel takes, the walk does not go on: nobody could ask for what is there.
const MAX_PATH: usize = 4096;
/// Size of the pieces of an answer.
const PIECE: usize = 128 << 10;
/// Pieces waiting for the client. Most answers fit, so that their walk never waits.
const PIECES: usize = 16;
/// Walks at a time. Each may hold a thread for as long as its client takes.
static WALKS: Semaphore = Semaphore::const_new(16);

/// What a walk shall answer with.
#[derive(Debug)]
pub(crate) enum Wanted {
    /// Everything down to this many levels.
    Listing {
        /// Levels below the root; zero is nothing.
        depth: u64,
    },
    /// All that is no directory and matches.
    Matches(Pattern),
}

/// Walks below `root` in another thread and answers with a JSON array. Of all paths `prefix` bytes are left out.
pub(crate) async fn answer(
    root: Requested,
    wanted: Wanted,
    prefix: Option<usize>,
) -> std::result::Result<Response, ApiError> {
    // The semaphore is never closed, so the error cannot be; without a permit the walk still is right.
    let permit = WALKS.acquire().await.ok();
    let (sender, mut receiver) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let mut answer = Answer { text: vec![b'['], sender, accounts: Accounts::read(), prefix };
        let result = walk(&root, &wanted, &mut answer);
        answer.finish(result);
    });
    let content_type = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"))];
    match receiver.recv().await {
        Some(Ok(Piece { text, last: true })) => Ok((content_type, text).into_response()),
        Some(Ok(first)) => {
            let rest = stream::unfold(Some((Some(first), receiver)), |state| async {
                let (first, mut receiver) = state?;
                let piece = match first {
                    Some(piece) => Ok(piece),
                    None => receiver.recv().await.unwrap_or_else(|| Err(broken_off())),
                };
                match piece {
                    Ok(Piece { text, last }) => Some((Ok(text), (!last).then_some((None, receiver)))),
                    Err(error) => {
                        tracing::warn!(error = %error, "an answer was broken off");
                        Some((Err(std::io::Error::other(error.to_string())), None))
                    }
                }
            });
            Ok((content_type, Body::from_stream(rest)).into_response())
        }
        Some(Err(error)) => Err(error.into()),
        None => Err(broken_off().into()),
    }
}

/// The walk's thread ended without a last word.
fn broken_off() -> FileError {
    FileError::Refused("the walk ended unexpectedly".to_owned())
}

struct Piece {
    text: Bytes,
    last: bool,
}

struct Answer {
    text: Vec<u8>,
    sender: mpsc::Sender<Result<Piece>>,
    accounts: Accounts,
    prefix: Option<usize>,
}

impl Answer {
    fn add(&mut self, entry: &Entry, path: &[u8]) -> Result<()> {
        let path = self.prefix.map_or(path, |prefix| super::session::shortened(path, prefix));
        let info = entry.describe(String::from_utf8_lossy(path).into_owned(), &self.accounts);
        // Empty after a piece was sent, which ended in an entry.
        if self.text != b"[" {
            self.text.push(b',');
        }
        serde_json::to_writer(&mut self.text, &info)
            .map_err(|error| FileError::Refused(format!("cannot write the answer: {error}")))?;
        if self.text.len() >= PIECE {
            let text = std::mem::take(&mut self.text);
            self.send(Ok(Piece { text: text.into(), last: false }))?;
        }
        Ok(())
    }

    fn send(&self, piece: Result<Piece>) -> Result<()> {
        self.sender.blocking_send(piece).map_err(|_| client_gone())
    }

    fn is_wanted(&self) -> bool {
        !self.sender.is_closed()
    }

    fn finish(mut self, result: Result<()>) {
        let last = match result {
            Ok(()) => {
                self.text.push(b']');
                Ok(Piece { text: std::mem::take(&mut self.text).into(), last: true })
            }
            Err(error) => Err(error),
        };
        // Nobody is left to tell when the client has gone.
        let _ = self.send(last);
    }
}

fn client_gone() -> FileError {
    FileError::Refused("the client has gone".to_owned())
}

struct Level {
    dir: OwnedFd,
    names: std::vec::IntoIter<Name>,
    /// Length of this directory's path, with its slash.
    prefix: usize,
}

fn walk(root: &Requested, wanted: &Wanted, answer: &mut Answer) -> Result<()> {
    let shown = &root.shown;
    let root_path = root.path.as_os_str().as_bytes();
    let root_entry = Entry::read(CWD, &root.path).map_err(|errno| FileError::of(shown, "read", errno))?;
    match (root_entry.kind, wanted) {
        (FileType::Directory, _) => {}
        (FileType::Symlink, _) => return Err(symlink_root(root)),
        (_, Wanted::Matches(pattern)) => {
            let name = root.path.file_name().unwrap_or_default().as_bytes();
            let parent = root.path.parent().unwrap_or_else(|| Path::new("/")).as_os_str().as_bytes();
            return if pattern.matches(parent, name) { answer.add(&root_entry, root_path) } else { Ok(()) };
        }
        (_, Wanted::Listing { .. }) => {
            return Err(FileError::Invalid(format!("{shown}: is not a directory")));
        }
    }
    let max_depth = match wanted {
        Wanted::Listing { depth: 0 } => return Ok(()),
        Wanted::Listing { depth } => usize::try_from(*depth).unwrap_or(usize::MAX),
        Wanted::Matches(_) => usize::MAX,
    };
    let dir =
        rustix::fs::openat(CWD, &root.path, READ_NOFOLLOW, Mode::empty()).map_err(|errno| match errno {
            // Swapped since it was looked at.
            Errno::LOOP => symlink_root(root),
            errno => FileError::of(shown, "open the directory", errno),
        })?;
    let mut path = root_path.to_vec();
    if !path.ends_with(b"/") {
        path.push(b'/');
    }
    let root_length = path.len();
    let mut held = 0;
    let names = read_names(&dir, &mut held, shown)?
        .map_err(|errno| FileError::of(shown, "read the directory", errno))?;
    let mut levels = vec![Level { dir, names, prefix: path.len() }];
    while let Some(level) = levels.last_mut() {
        path.truncate(level.prefix);
        let Some((name, kind)) = level.names.next() else {
            levels.pop();
            continue;
        };
        held -= 1;
        path.extend_from_slice(&name);
        let name = std::ffi::OsStr::from_bytes(&name);
        let mut entry = None;
        let kind = if kind == FileType::Unknown || matches!(wanted, Wanted::Listing { .. }) {
            match Entry::read(&level.dir, name) {
                Ok(read) => entry.insert(read).kind,
                // Gone meanwhile.
                Err(_) => continue,
            }
        } else {
            kind
        };
        let listed = match wanted {
            Wanted::Listing { .. } => true,
            Wanted::Matches(pattern) => {
                kind != FileType::Directory && pattern.matches(root_path, &path[root_length..])
            }
        };
        if listed {
            match entry.map_or_else(|| Entry::read(&level.dir, name), Ok) {
                Ok(entry) => answer.add(&entry, &path)?,
                Err(_) => continue,
            }
        }
        if kind == FileType::Directory && levels.len() < max_depth {
            if !answer.is_wanted() {
                return Err(client_gone());
            }
            if let Some(level) = enter(&levels, name, &mut path, &mut held, shown)? {
                levels.push(level);
            }
        }
    }
    Ok(())
}

fn symlink_root(root: &Requested) -> FileError {
    FileError::Invalid(format!(
        "{}: is a symlink, and symlinks are not followed; name its target",
        root.shown
    ))
}

/// Opens the directory `name`. One that cannot be read is left out, so that it does not hide all others.
fn enter(
    levels: &[Level],
    name: &std::ffi::OsStr,
    path: &mut Vec<u8>,
    held: &mut usize,
    shown: &str,
) -> Result<Option<Level>> {
    let Some(level) = levels.last() else { return Ok(None) };
    path.push(b'/');
    if path.len() >= MAX_PATH {
        tracing::warn!(root = shown, "directories too deep to be named were left out");
        return Ok(None);
    }
    let opened = rustix::fs::openat(&level.dir, name, READ_NOFOLLOW, Mode::empty());
    let read = match opened {
        Ok(dir) => read_names(&dir, held, shown)?.map(|names| Level { dir, names, prefix: path.len() }),
        Err(errno) => Err(errno),
    };
    match read {
        Ok(level) => Ok(Some(level)),
        Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => {
            Err(FileError::of(shown, "read the tree", errno))
        }
        // Gone, or swapped for something that is no directory.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(errno) => {
            tracing::warn!(root = shown, error = %errno, "a directory that cannot be read was left out");
            Ok(None)
        }
    }
}

/// The names of a directory. The outer error is the bound on names, which ends the whole walk.
fn read_names(
    dir: &OwnedFd,
    held: &mut usize,
    shown: &str,
) -> Result<rustix::io::Result<std::vec::IntoIter<Name>>> {
    match read_sorted(dir, MAX_NAMES - *held) {
        Ok(names) => {
            *held += names.len();
            Ok(Ok(names.into_iter()))
        }
        Err(Errno::TOOBIG) => Err(FileError::Refused(format!(
            "{shown}: more than {MAX_NAMES} names are in its directories; list parts of it, or use a command"
        ))),
        Err(errno) => Ok(Err(errno)),
    }
}
