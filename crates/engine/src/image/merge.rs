//! Merges all layers of an image into one directory that hides nothing and needs nothing below it.
//!
//! Files are hard links to those of the layers, so a merge costs names, not space. It spares every sandbox the search
//! through many layers, and overlayfs the whiteouts: those that end up in a directory of one layer only would show in
//! listings.

use super::error::{Error, Result};
use super::tree::{self, Attributes};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Merges `layers`, the lowest first, into the empty directory `target` of the same file system.
pub(super) fn merge(layers: &[impl AsRef<Path>], target: &Path) -> Result<()> {
    let open = |path: &Path| {
        tree::open_dir(CWD, path.as_os_str().as_encoded_bytes())
            .map_err(|errno| Error::io("open", path, errno))
    };
    let root = open(target)?;
    for layer in layers {
        let layer = layer.as_ref();
        let from = open(layer)?;
        directory(&from, &root).map_err(|errno| Error::io("merge", layer, errno))?;
    }
    Ok(())
}

/// Lays the directory `from` over the directory `to`.
fn directory(from: &OwnedFd, to: &OwnedFd) -> Result<(), Errno> {
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
        }
        directory(&tree::open_dir(from, &name)?, &tree::open_dir(to, &name)?)?;
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
            attributes.set_at(to, name, true)
        }
        _ => {
            rustix::fs::mknodat(to, name, kind, Mode::RUSR, 0)?;
            attributes.set_at(to, name, false)
        }
    }
}
