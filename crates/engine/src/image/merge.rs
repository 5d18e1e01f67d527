//! Merges several layers into one. Files are hard links to those of the layers, so a merge costs names, not space.

use super::error::{Error, Result};
use super::tree::{self, Attributes};
use rustix::fs::{AtFlags, CWD, FileType, Mode, Stat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Merges `layers`, the lowest first, into the empty directory `target` of the same file system. What the merged
/// layers delete stays a whiteout: more layers may lie below.
pub(super) fn merge(layers: &[&Path], target: &Path) -> Result<()> {
    let open = |path: &Path| {
        tree::open_dir(CWD, path.as_os_str().as_encoded_bytes())
            .map_err(|errno| Error::io("open", path, errno))
    };
    let root = open(target)?;
    for layer in layers {
        let from = open(layer)?;
        directory(&from, &root).map_err(|errno| Error::io("merge", *layer, errno))?;
    }
    Ok(())
}

/// Lays the directory `from` over the directory `to`.
fn directory(from: &OwnedFd, to: &OwnedFd) -> Result<(), Errno> {
    if tree::is_opaque(from)? {
        for name in tree::names(to)? {
            tree::remove(to, &name)?;
        }
        tree::set_opaque(to)?;
    }
    for name in tree::names(from)? {
        let above = rustix::fs::statat(from, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
        let below = match rustix::fs::statat(to, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(errno),
        };
        let is_directory = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if is_directory(&above) {
            let covers = below.as_ref().is_some_and(|below| !is_directory(below));
            if covers {
                rustix::fs::unlinkat(to, name.as_slice(), AtFlags::empty())?;
            }
            if covers || below.is_none() {
                rustix::fs::mkdirat(to, name.as_slice(), Mode::RWXU)?;
            }
            let (above, below) = (tree::open_dir(from, &name)?, tree::open_dir(to, &name)?);
            // A file or whiteout in between ends what shows through from further below.
            if covers {
                tree::set_opaque(&below)?;
            }
            directory(&above, &below)?;
        } else {
            if below.is_some() {
                tree::remove(to, &name)?;
            }
            link(from, to, &name, &above)?;
        }
    }
    // Last, since writing into a directory changes its time.
    let mut attributes = Attributes::of(&rustix::fs::fstat(from)?);
    attributes.xattrs = tree::xattrs(from)?;
    attributes.set_on(to)?;
    Ok(())
}

fn link(from: &OwnedFd, to: &OwnedFd, name: &[u8], stat: &Stat) -> Result<(), Errno> {
    match rustix::fs::linkat(from, name, to, name, AtFlags::empty()) {
        // A file has as many names as its file system allows.
        Err(Errno::MLINK) => {}
        other => return other,
    }
    let kind = FileType::from_raw_mode(stat.st_mode);
    let mut attributes = Attributes::of(stat);
    match kind {
        FileType::RegularFile => {
            use rustix::fs::OFlags;
            let mut source = std::fs::File::from(tree::open_file(from, name)?);
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut copy = std::fs::File::from(rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
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
        FileType::CharacterDevice if stat.st_rdev == 0 => tree::make_whiteout(to, name),
        _ => {
            rustix::fs::mknodat(to, name, kind, Mode::RUSR, 0)?;
            attributes.set_at(to, name, false)
        }
    }
}
