//! Copying a tree with its modes, owners, times and extended attributes, for moves between file systems.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use super::dir::{READ_NOFOLLOW, read_sorted};
use super::temp::errno_of;

/// Deeper trees are not copied; each level holds two descriptors and a stack frame.
const MAX_DEPTH: usize = 200;
/// Entries of one directory.
const MAX_NAMES: usize = 1_000_000;
/// Modes while a copy is not finished.
const PRIVATE_FILE: Mode = Mode::from_raw_mode(0o600);
const PRIVATE_DIRECTORY: Mode = Mode::from_raw_mode(0o700);

/// Copies the entry `name` of `from` to the new name `new_name` in `to`. Symlinks are copied, not followed.
pub(crate) fn tree(
    from: BorrowedFd<'_>,
    name: &OsStr,
    to: BorrowedFd<'_>,
    new_name: &OsStr,
) -> rustix::io::Result<()> {
    entry(from, name, to, new_name, 0)
}

fn entry(
    from: BorrowedFd<'_>,
    name: &OsStr,
    to: BorrowedFd<'_>,
    new_name: &OsStr,
    depth: usize,
) -> rustix::io::Result<()> {
    let stat = rustix::fs::statat(from, name, AtFlags::SYMLINK_NOFOLLOW)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let mut source = File::from(rustix::fs::openat(from, name, flags, Mode::empty())?);
            // The entry may have been swapped since.
            let stat = rustix::fs::fstat(&source)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err(Errno::AGAIN);
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let mut copy = File::from(rustix::fs::openat(to, new_name, flags, PRIVATE_FILE)?);
            std::io::copy(&mut source, &mut copy).map_err(errno_of)?;
            finish(&source, &copy, &stat)
        }
        FileType::Directory => {
            if depth == MAX_DEPTH {
                return Err(Errno::NAMETOOLONG);
            }
            let source = rustix::fs::openat(from, name, READ_NOFOLLOW, Mode::empty())?;
            rustix::fs::mkdirat(to, new_name, PRIVATE_DIRECTORY)?;
            let copy = rustix::fs::openat(to, new_name, READ_NOFOLLOW, Mode::empty())?;
            for (child, _) in read_sorted(&source, MAX_NAMES)? {
                let child = OsStr::from_bytes(&child);
                entry(source.as_fd(), child, copy.as_fd(), child, depth + 1)?;
            }
            finish(&source, &copy, &stat)
        }
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(from, name, Vec::new())?;
            rustix::fs::symlinkat(&target, to, new_name)?;
            owner(rustix::fs::chownat(
                to,
                new_name,
                Some(Uid::from_raw(stat.st_uid)),
                Some(Gid::from_raw(stat.st_gid)),
                AtFlags::SYMLINK_NOFOLLOW,
            ))
        }
        kind => {
            let mode = Mode::from_raw_mode(stat.st_mode);
            rustix::fs::mknodat(to, new_name, kind, mode, stat.st_rdev)?;
            owner(rustix::fs::chownat(
                to,
                new_name,
                Some(Uid::from_raw(stat.st_uid)),
                Some(Gid::from_raw(stat.st_gid)),
                AtFlags::SYMLINK_NOFOLLOW,
            ))
        }
    }
}

/// An unprivileged daemon cannot give files away; `mv` does not mind either.
fn owner(result: rustix::io::Result<()>) -> rustix::io::Result<()> {
    match result {
        Err(Errno::PERM) => Ok(()),
        result => result,
    }
}

fn finish(source: impl AsFd, copy: impl AsFd, stat: &Stat) -> rustix::io::Result<()> {
    let (source, copy) = (source.as_fd(), copy.as_fd());
    let owned = rustix::fs::fchown(copy, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
    owner(owned)?;
    // A copy that could not be given to the owner must not act for whoever has made it.
    let kept = if owned.is_ok() { 0o7777 } else { 0o1777 };
    // After the owner: changing that takes set-user-id away.
    rustix::fs::fchmod(copy, Mode::from_raw_mode(stat.st_mode & kept))?;
    if let Err(errno) = extended_attributes(source, copy) {
        tracing::debug!(error = %errno, source = source.as_raw_fd(), "extended attributes were not copied");
    }
    let time =
        |tv_sec, nanoseconds: u64| Timespec { tv_sec, tv_nsec: i64::try_from(nanoseconds).unwrap_or(0) };
    rustix::fs::futimens(
        copy,
        &Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
        },
    )
}

fn extended_attributes(source: BorrowedFd<'_>, copy: BorrowedFd<'_>) -> rustix::io::Result<()> {
    // The kernel's bound on the list and on one value.
    let mut names = vec![0_u8; 64 << 10];
    let length = rustix::fs::flistxattr(source, &mut names)?;
    if length == 0 {
        return Ok(());
    }
    let mut value = vec![0_u8; 64 << 10];
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let length = rustix::fs::fgetxattr(source, name, &mut value)?;
        rustix::fs::fsetxattr(copy, name, &value[..length], XattrFlags::empty())?;
    }
    Ok(())
}
