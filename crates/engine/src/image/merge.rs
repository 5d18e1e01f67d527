//! Merges all layers of an image into one directory that hides nothing and needs nothing below it.
//!
//! Files are hard links to those of the layers, so a merge costs names, not space. It spares every sandbox the search
//! through many layers, and overlayfs the whiteouts: those that end up in a directory of one layer only would show in
//! listings.

use super::error::{Error, Result};
use super::index::LowerLink;
use super::tree::{self, Attributes};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A layer to merge.
pub(super) struct Source<'a> {
    pub(super) name: &'a str,
    pub(super) place: PathBuf,
    /// Its hard links to files of those below.
    pub(super) links: &'a [LowerLink],
}

/// Merges `layers`, the lowest first, into the empty directory `target` of the same file system. Answers the bytes of
/// disk that it took, about: those of directories, since files are only linked to.
pub(super) fn merge(layers: &[Source<'_>], target: &Path) -> Result<u64> {
    let mut made = 1;
    let open = |path: &Path| {
        tree::open_dir(CWD, path.as_os_str().as_encoded_bytes())
            .map_err(|errno| Error::io("open", path, errno))
    };
    let root = open(target)?;
    for layer in layers {
        let failed = |errno| Error::io("merge", &layer.place, errno);
        let from = open(&layer.place)?;
        let held = if layer.links.is_empty() { None } else { Some(Held::new(layer, &root, target)?) };
        directory(&from, &root, &mut made).map_err(failed)?;
        if let Some(held) = held {
            held.place(layer, &from, &root).map_err(failed)?;
        }
    }
    Ok(made * 4_096)
}

/// Files that a layer links to, as they were before the layer, which may delete or replace them.
struct Held {
    path: PathBuf,
    directory: OwnedFd,
}

impl Drop for Held {
    fn drop(&mut self) {
        // It lies in the workspace, which goes as a whole.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl Held {
    fn new(layer: &Source<'_>, root: &OwnedFd, target: &Path) -> Result<Self> {
        let path = target.with_extension("links");
        std::fs::create_dir(&path).map_err(|error| Error::io("create", &path, error))?;
        let directory = tree::open_dir(CWD, path.as_os_str().as_encoded_bytes())
            .map_err(|errno| Error::io("open", &path, errno))?;
        let held = Self { path, directory };
        for (number, link) in layer.links.iter().enumerate() {
            let (parent, name) = split(&link.target);
            let linked = tree::open_below(root, parent).and_then(|parent| {
                let stat = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                    return Err(Errno::NOENT);
                }
                rustix::fs::linkat(&parent, name, &held.directory, number.to_string(), AtFlags::empty())
            });
            match linked {
                Ok(()) => {}
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                    let reason =
                        format!("it is a hard link to `{}`, which no layer up to this one has", link.target);
                    return Err(Error::entry(layer.name, link.path.as_bytes(), reason));
                }
                Err(errno) => return Err(Error::io("merge", &layer.place, errno)),
            }
        }
        Ok(held)
    }

    /// Gives the files the names that the layer has for them, unless it went on to put something else there.
    fn place(&self, layer: &Source<'_>, from: &OwnedFd, root: &OwnedFd) -> Result<(), Errno> {
        for (number, link) in layer.links.iter().enumerate() {
            let (parent, name) = split(&link.path);
            let own = match tree::open_below(from, parent) {
                Ok(own) => own,
                // The directory itself was replaced.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(errno) => return Err(errno),
            };
            match rustix::fs::statat(&own, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice => continue,
                Ok(_) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
            let parent = tree::open_below(root, parent)?;
            let time = Attributes::of(&rustix::fs::fstat(&parent)?);
            match tree::remove(&parent, name.as_bytes()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
            rustix::fs::linkat(&self.directory, number.to_string(), &parent, name, AtFlags::empty())?;
            time.set_times(&parent)?;
        }
        Ok(())
    }
}

/// Directory and last name of a path without a slash at either end.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or((".", path))
}

/// Lays the directory `from` over the directory `to`.
fn directory(from: &OwnedFd, to: &OwnedFd, made: &mut u64) -> Result<(), Errno> {
    if tree::is_opaque(from)? {
        for name in tree::names(to)? {
            tree::remove(to, &name)?;
        }
    }
    for name in tree::names(from)? {
        let above = rustix::fs::statat(from, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
        let below = match rustix::fs::statat(to, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(errno),
        };
        let is_directory = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let merges = is_directory(&above) && below.as_ref().is_some_and(is_directory);
        if below.is_some() && !merges {
            tree::remove(to, &name)?;
        }
        if !is_directory(&above) {
            link(from, to, &name, &above)?;
            continue;
        }
        if !merges {
            rustix::fs::mkdirat(to, name.as_slice(), Mode::RWXU)?;
            *made += 1;
        }
        directory(&tree::open_dir(from, &name)?, &tree::open_dir(to, &name)?, made)?;
    }
    // Last, since writing into a directory changes its time.
    for (name, _) in tree::xattrs(to)? {
        rustix::fs::fremovexattr(to, name.as_slice())?;
    }
    let mut attributes = Attributes::of(&rustix::fs::fstat(from)?);
    attributes.xattrs = tree::xattrs(from)?;
    attributes.set_on(to)?;
    Ok(())
}

fn link(from: &OwnedFd, to: &OwnedFd, name: &[u8], stat: &Stat) -> Result<(), Errno> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    // The only devices in a layer are its whiteouts, and they have done their work.
    if kind == FileType::CharacterDevice {
        return Ok(());
    }
    match rustix::fs::linkat(from, name, to, name, AtFlags::empty()) {
        // A file has as many names as its file system allows.
        Err(Errno::MLINK) => {}
        other => return other,
    }
    let mut attributes = Attributes::of(stat);
    match kind {
        FileType::RegularFile => {
            let mut source = File::from(tree::open_file(from, name)?);
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut copy = File::from(rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
            std::io::copy(&mut source, &mut copy)
                .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
            attributes.xattrs = tree::xattrs(&source)?;
            attributes.set_on(&copy).map(drop)
        }
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(from, name, Vec::new())?;
            rustix::fs::symlinkat(target, to, name)?;
            attributes.set_at(to, name, true, None)
        }
        _ => {
            rustix::fs::mknodat(to, name, kind, Mode::RUSR, 0)?;
            attributes.set_at(to, name, false, None)
        }
    }
}
