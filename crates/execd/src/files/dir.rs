//! Directories by descriptor: opening, making and reading them.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::attributes::Attributes;
use super::error::{FileError, Result};

/// A descriptor that only names a directory. Works for everything but reading it.
pub(crate) const NAMED: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// A directory to read, itself and not what a symlink in its place points to.
pub(crate) const READ_NOFOLLOW: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);
/// Mode of new directories before the umask.
const NEW_DIRECTORY: Mode = Mode::from_raw_mode(0o777);
/// Symlinks followed in one path, as the kernel counts.
const MAX_LINKS: usize = 40;

/// Opens an existing directory by name only, following symlinks.
pub(crate) fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(CWD, path, NAMED, Mode::empty())
}

/// The deepest directory on the way to `path` that exists, `path` itself included.
pub(crate) fn open_deepest(path: &Path) -> rustix::io::Result<OwnedFd> {
    for ancestor in path.ancestors() {
        match open(ancestor) {
            Err(Errno::NOENT) => {}
            result => return result,
        }
    }
    Err(Errno::NOENT)
}

/// A file stands where the path needs a directory.
pub(crate) fn in_the_way(shown: &str) -> FileError {
    FileError::Refused(format!("{shown}: cannot make the directory: a file is in the way"))
}

/// Makes the directory and its missing parents, and opens it. `attributes` go to the new ones only.
pub(crate) fn make_all(path: &Path, attributes: &Attributes, shown: &str) -> Result<OwnedFd> {
    let failed = |errno| match errno {
        Errno::NOTDIR | Errno::EXIST => in_the_way(shown),
        Errno::NOENT => FileError::Refused(format!(
            "{shown}: cannot make the directory: a symlink that leads nowhere is in the way"
        )),
        errno => FileError::of(shown, "make the directory", errno),
    };
    match open(path) {
        Err(Errno::NOENT) => {}
        result => return result.map_err(failed),
    }
    let mut dir = open(Path::new("/")).map_err(failed)?;
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::ParentDir => OsStr::new(".."),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => continue,
        };
        dir = open_or_make(&dir, name, attributes).map_err(failed)?;
    }
    Ok(dir)
}

fn open_or_make(dir: &OwnedFd, name: &OsStr, attributes: &Attributes) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::openat(dir, name, NAMED, Mode::empty()) {
        Err(Errno::NOENT) => {}
        result => return result,
    }
    match rustix::fs::mkdirat(dir, name, NEW_DIRECTORY) {
        Ok(()) => {
            // What was made just now, not a symlink somebody has put there since.
            let made = rustix::fs::openat(dir, name, NAMED | OFlags::NOFOLLOW, Mode::empty())?;
            attributes.apply(made.as_fd())?;
            Ok(made)
        }
        // Somebody else was faster.
        Err(Errno::EXIST) => rustix::fs::openat(dir, name, NAMED, Mode::empty()),
        Err(errno) => Err(errno),
    }
}

/// A name in a directory, with symlinks at the end of the path resolved: where a write through the path goes.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) dir: OwnedFd,
    pub(crate) name: OsString,
}

/// Follows `dir/name` while it is a symlink. The result may not exist; if it does, it was no symlink.
pub(crate) fn resolve(dir: OwnedFd, name: &OsStr) -> rustix::io::Result<Place> {
    let mut place = Place { dir, name: name.to_owned() };
    // The kernel refuses to follow some links (`fs.protected_symlinks`), and so does this.
    if let Err(Errno::ACCESS) =
        rustix::fs::openat(&place.dir, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
    {
        return Err(Errno::ACCESS);
    }
    for _ in 0..MAX_LINKS {
        let target = match rustix::fs::readlinkat(&place.dir, &place.name, Vec::new()) {
            Ok(target) => PathBuf::from(OsString::from_vec(target.into_bytes())),
            Err(Errno::INVAL | Errno::NOENT) => return Ok(place),
            Err(errno) => return Err(errno),
        };
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(Errno::ISDIR);
        };
        if target.as_os_str().as_bytes().ends_with(b"/") {
            return Err(Errno::ISDIR);
        }
        if !parent.as_os_str().is_empty() {
            place.dir = rustix::fs::openat(&place.dir, parent, NAMED, Mode::empty())?;
        }
        place.name = name.to_owned();
    }
    Err(Errno::LOOP)
}

/// A name in a directory and the kind of its entry, when the directory tells.
pub(crate) type Name = (Box<[u8]>, FileType);

/// Reads all names, sorted by bytes. More than `limit` is [`Errno::TOOBIG`].
pub(crate) fn read_sorted(dir: &OwnedFd, limit: usize) -> rustix::io::Result<Vec<Name>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if names.len() == limit {
            return Err(Errno::TOOBIG);
        }
        names.push((name.into(), entry.file_type()));
    }
    names.sort_unstable_by(|one: &Name, other: &Name| one.0.cmp(&other.0));
    Ok(names)
}

/// Whether the name exists, symlinks not followed.
pub(crate) fn exists(dir: impl AsFd, name: &OsStr) -> rustix::io::Result<bool> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}
