//! Deleting trees that a sandbox has filled: any depth, any number of entries, any names.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// Levels that are descended with a descriptor each. What lies deeper is moved up first, so that neither stack nor
/// descriptors depend on what a sandbox has built.
const LEVELS: u32 = 32;

/// Removes `path` and everything below. That nothing is there is no error.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let Some((parent, name)) = path.parent().zip(path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let name = CString::new(name.as_encoded_bytes())?;
    let parent = match openat(CWD, parent, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
    {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    match unlinkat(&parent, &*name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR) => return Ok(unlinkat(&parent, &*name, AtFlags::empty())?),
        Err(Errno::NOTEMPTY | Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let top = open(parent.as_fd(), &name)?;
    let mut work = Work { top: top.as_fd(), moved: 0, done: 0 };
    loop {
        let before = work.done;
        work.empty(top.as_fd(), LEVELS)?;
        match unlinkat(&parent, &*name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            // Directories were moved up, or the listing missed entries because others went meanwhile.
            Err(Errno::NOTEMPTY | Errno::EXIST) if work.done > before => {}
            Err(error) => return Err(error.into()),
        }
    }
}

struct Work<'a> {
    top: BorrowedFd<'a>,
    /// Number of the last name given to a directory moved up.
    moved: u64,
    /// Entries removed or moved.
    done: u64,
}

impl Work<'_> {
    /// Empties `dir` as far as `levels` go.
    fn empty(&mut self, dir: BorrowedFd<'_>, levels: u32) -> io::Result<()> {
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if entry.file_type() != FileType::Directory {
                match self.unlink(dir, name, AtFlags::empty()) {
                    // A file system that does not tell kinds of entries.
                    Err(Errno::ISDIR) => {}
                    other => {
                        other?;
                        continue;
                    }
                }
            }
            match self.unlink(dir, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY | Errno::EXIST) => {}
                other => {
                    other?;
                    continue;
                }
            }
            if levels == 0 {
                self.move_up(dir, name)?;
                continue;
            }
            let below = open(dir, name)?;
            self.empty(below.as_fd(), levels - 1)?;
            match self.unlink(dir, name, AtFlags::REMOVEDIR) {
                // Left for the next round.
                Err(Errno::NOTEMPTY | Errno::EXIST) => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn unlink(&mut self, dir: BorrowedFd<'_>, name: &CStr, flags: AtFlags) -> Result<(), Errno> {
        match unlinkat(dir, name, flags) {
            Ok(()) => {
                self.done += 1;
                Ok(())
            }
            Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn move_up(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        loop {
            self.moved += 1;
            match renameat(dir, name, self.top, format!("deeper-{}", self.moved)) {
                Ok(()) => {
                    self.done += 1;
                    return Ok(());
                }
                // The sandbox has used that name. (If it is an empty directory the rename replaces it.)
                Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn open(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(dir, name, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deep_wide_and_odd_trees_go_and_what_links_point_to_stays() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("kept"), "x").unwrap();
        let tree = dir.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
        std::fs::create_dir(tree.join("deeper-1")).unwrap();
        std::fs::write(tree.join("deeper-1/file"), "x").unwrap();
        std::fs::write(tree.join("deeper-2"), "x").unwrap();
        // Deeper than a path can name, and than descriptors or a thread's stack would last.
        let mut at = openat(CWD, &tree, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        for _ in 0..5000 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
            rustix::fs::mkdirat(&at, "side", Mode::RWXU).unwrap();
            at = openat(&at, "d", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        }
        for i in 0..2000 {
            std::fs::write(tree.join(format!("file {i}\n")), "x").unwrap();
        }
        drop(at);
        remove(&tree).unwrap();
        assert!(!tree.exists());
        assert!(outside.join("kept").exists());
        remove(&tree).unwrap();
    }
}
