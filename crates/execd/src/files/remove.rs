//! Removing files and trees.
//!
//! A tree is removed through directory descriptors that are opened without following symlinks, so whatever is
//! swapped in meanwhile, nothing outside the tree is touched. The number of descriptors is bounded: what lies
//! deeper is moved up first.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode};
use rustix::io::Errno;

use super::dir::{READ_NOFOLLOW, open};
use super::error::{FileError, Result};
use super::path::Requested;
use super::temp::hidden_name;

/// Open directories at a time.
const MAX_OPEN: usize = 200;

/// Unlinks a file. One that is not there is fine; a directory is not.
pub(crate) fn file(requested: &Requested) -> Result<()> {
    match rustix::fs::unlinkat(rustix::fs::CWD, &requested.path, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        Err(Errno::ISDIR) => Err(FileError::Refused(format!(
            "{}: is a directory; remove it with DELETE /directories",
            requested.shown
        ))),
        Err(errno) => Err(FileError::of(&requested.shown, "remove the file", errno)),
    }
}

/// Removes whatever is at the path with everything below. What is not there is fine.
pub(crate) fn tree(requested: &Requested) -> Result<()> {
    let (parent, name) = requested.split()?;
    let parent = match open(parent) {
        Ok(parent) => parent,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        Err(errno) => return Err(FileError::of(&requested.shown, "open the parent directory", errno)),
    };
    tree_at(parent.as_fd(), name)
        .map_err(|errno| FileError::of(&requested.shown, "remove the directory", errno))
}

struct Level {
    /// Name in the directory one level up.
    name: CString,
    dir: OwnedFd,
    entries: Dir,
    /// Whether this pass over the entries has removed something.
    progress: bool,
}

impl Level {
    fn open(parent: BorrowedFd<'_>, name: CString) -> rustix::io::Result<Self> {
        let dir = rustix::fs::openat(parent, &name, READ_NOFOLLOW, Mode::empty())?;
        Ok(Self { name, entries: Dir::read_from(&dir)?, dir, progress: false })
    }
}

/// As [`tree`], for a name in an open directory. Goes on after a failure and reports the first.
pub(crate) fn tree_at(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    let name = CString::new(name.as_encoded_bytes()).map_err(|_| Errno::INVAL)?;
    if unlink(parent, &name)? {
        return Ok(());
    }
    let mut levels = vec![Level::open(parent, name)?];
    let mut first_error = None;
    while let Some(depth) = levels.len().checked_sub(1) {
        let level = &mut levels[depth];
        match level.entries.next() {
            Some(Ok(entry)) => {
                let name = entry.file_name();
                if name == c"." || name == c".." {
                    continue;
                }
                match unlink(level.dir.as_fd(), name) {
                    Ok(true) => level.progress = true,
                    Ok(false) => {
                        if let Err(errno) = descend(&mut levels, name.to_owned()) {
                            first_error.get_or_insert(errno);
                        }
                    }
                    Err(errno) => {
                        first_error.get_or_insert(errno);
                    }
                }
            }
            Some(Err(errno)) => {
                first_error.get_or_insert(errno);
                levels.pop();
            }
            None => {
                let above = depth.checked_sub(1).map_or(parent, |above| levels[above].dir.as_fd());
                match rustix::fs::unlinkat(above, &levels[depth].name, AtFlags::REMOVEDIR) {
                    // New entries came meanwhile, or the file system lost count while names went away.
                    Err(Errno::NOTEMPTY | Errno::EXIST) if levels[depth].progress => {
                        levels[depth].entries.rewind();
                        levels[depth].progress = false;
                        continue;
                    }
                    Ok(()) | Err(Errno::NOENT) => {
                        if let Some(above) = depth.checked_sub(1) {
                            levels[above].progress = true;
                        }
                    }
                    Err(errno) => {
                        first_error.get_or_insert(errno);
                    }
                }
                levels.pop();
            }
        }
    }
    first_error.map_or(Ok(()), Err)
}

/// Unlinks what is no directory; `false` when it is one.
fn unlink(dir: BorrowedFd<'_>, name: &std::ffi::CStr) -> rustix::io::Result<bool> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn descend(levels: &mut Vec<Level>, name: CString) -> rustix::io::Result<()> {
    let (Some(top), Some(bottom)) = (levels.first(), levels.last()) else { return Ok(()) };
    if levels.len() >= MAX_OPEN {
        // Moved up to the top, it is met again in the next pass there.
        rustix::fs::renameat(&bottom.dir, &name, &top.dir, hidden_name())?;
        levels[0].progress = true;
        if let Some(bottom) = levels.last_mut() {
            bottom.progress = true;
        }
        return Ok(());
    }
    match Level::open(bottom.dir.as_fd(), name) {
        Ok(level) => levels.push(level),
        // Gone, or swapped for something else: the next pass sees.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
        Err(errno) => return Err(errno),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn remove(path: &Path) -> Result<()> {
        tree(&Requested { shown: path.display().to_string(), path: path.to_owned() })
    }

    #[test]
    fn symlinks_are_removed_and_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let keep = root.path().join("keep");
        std::fs::create_dir(&keep).unwrap();
        std::fs::write(keep.join("f"), "x").unwrap();
        let gone = root.path().join("gone/a/b");
        std::fs::create_dir_all(&gone).unwrap();
        symlink(&keep, gone.join("link")).unwrap();
        symlink(&keep, root.path().join("top")).unwrap();
        remove(&root.path().join("gone")).unwrap();
        remove(&root.path().join("top")).unwrap();
        remove(&root.path().join("absent/x")).unwrap();
        assert!(keep.join("f").exists());
        assert!(!root.path().join("gone").exists() && !root.path().join("top").is_symlink());
        assert!(remove(Path::new("/")).is_err());
    }

    #[test]
    fn a_tree_deeper_than_any_path_is_removed() {
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut dir = open(root.path()).unwrap();
        for _ in 0..5_000 {
            rustix::fs::mkdirat(&dir, c"deep", Mode::RWXU).unwrap();
            rustix::fs::mknodat(&dir, c"file", rustix::fs::FileType::RegularFile, Mode::RUSR, 0).unwrap();
            dir = rustix::fs::openat(&dir, c"deep", super::super::dir::NAMED, Mode::empty()).unwrap();
        }
        drop(dir);
        remove(&root.path().join("deep")).unwrap();
        assert!(!root.path().join("deep").exists());
    }

    #[test]
    fn many_entries() {
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        let wide = root.path().join("wide");
        std::fs::create_dir(&wide).unwrap();
        for n in 0..5_000 {
            std::fs::write(wide.join(n.to_string()), "").unwrap();
        }
        remove(&wide).unwrap();
        assert!(!wide.exists());
    }

    #[test]
    fn nothing_outside_is_touched_while_names_are_swapped() {
        let root = tempfile::tempdir().unwrap();
        let keep = root.path().join("keep");
        std::fs::create_dir(&keep).unwrap();
        for n in 0..50 {
            std::fs::write(keep.join(n.to_string()), "x").unwrap();
        }
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Swaps a directory of the tree for a link out of it, again and again.
                let (inner, link) = (root.path().join("gone/inner"), root.path().join("link"));
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = symlink(&keep, &link);
                    let _ = std::fs::create_dir_all(&inner);
                    let _ = std::fs::write(inner.join("f"), "x");
                    let _ = rustix::fs::renameat_with(
                        rustix::fs::CWD,
                        &link,
                        rustix::fs::CWD,
                        &inner,
                        rustix::fs::RenameFlags::EXCHANGE,
                    );
                    let _ = std::fs::remove_dir_all(&link);
                    let _ = std::fs::remove_file(&link);
                }
            });
            for _ in 0..300 {
                // The tree may be refilled meanwhile, so a refusal is fine.
                let _ = remove(&root.path().join("gone"));
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert!((0..50).all(|n| keep.join(n.to_string()).exists()));
    }
}
