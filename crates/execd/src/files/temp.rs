//! Files that appear under their name only when they are complete.
//!
//! The content goes into a file without a name (`O_TMPFILE`), which the kernel forgets when the daemon or the
//! request dies, so nobody sees half a file and nothing is left behind. File systems without such files get a
//! hidden name instead, removed on every way out.
//!
//! Whoever may write to a file but not to its directory, or not give the new one to its owner, writes into the file
//! itself in the end. Whoever may not write to a file does not replace it either, though the directory allowed that.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::attributes::Attributes;

/// Mode of new files before the umask.
const NEW_FILE: Mode = Mode::from_raw_mode(0o666);

/// Where contents wait that are for a directory without permission to make files in it.
const ELSEWHERE: &str = "/tmp";

/// A file on its way to a name.
#[derive(Debug)]
pub(crate) struct Temp {
    file: File,
    /// The hidden name, where the file system needs one.
    name: Option<Hidden>,
    /// Made elsewhere for want of permission: it can be copied into a file, not become one.
    elsewhere: bool,
}

/// A name that is removed when dropped.
#[derive(Debug)]
struct Hidden {
    dir: Arc<OwnedFd>,
    name: OsString,
    armed: bool,
}

impl Drop for Hidden {
    fn drop(&mut self) {
        if self.armed {
            // Nothing can be done about a failure, and the name says whose it is.
            let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
        }
    }
}

/// A name nobody else uses.
pub(crate) fn hidden_name() -> OsString {
    format!(".execd-{}.tmp", crate::random::uuid().simple()).into()
}

impl Temp {
    /// Makes an empty file in the file system of `dir`, or elsewhere when `dir` takes no files.
    pub(crate) fn new(dir: Arc<OwnedFd>) -> rustix::io::Result<Self> {
        match Self::new_in(dir) {
            Err(Errno::ACCESS) => {
                let elsewhere = super::dir::open(ELSEWHERE.as_ref()).map_err(|_| Errno::ACCESS)?;
                let mut temp = Self::new_in(Arc::new(elsewhere)).map_err(|_| Errno::ACCESS)?;
                temp.elsewhere = true;
                Ok(temp)
            }
            result => result,
        }
    }

    fn new_in(dir: Arc<OwnedFd>) -> rustix::io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(&dir, c".", flags, NEW_FILE) {
            Ok(fd) => Ok(Self { file: fd.into(), name: None, elsewhere: false }),
            // Kernels and file systems without the flag answer in one of these ways.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => Self::new_hidden(dir),
            Err(errno) => Err(errno),
        }
    }

    fn new_hidden(dir: Arc<OwnedFd>) -> rustix::io::Result<Self> {
        let name = hidden_name();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&dir, &name, flags, NEW_FILE)?;
        Ok(Self { file: fd.into(), name: Some(Hidden { dir, name, armed: true }), elsewhere: false })
    }

    /// The file, to write into.
    pub(crate) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its name in `dir`. What is there is replaced, keeping its mode and owner where `attributes`
    /// name none; anything but a regular file is refused. A file that cannot be replaced, because something is
    /// mounted on it or for want of permission, is overwritten in place.
    pub(crate) fn replace(
        mut self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        attributes: &Attributes,
    ) -> rustix::io::Result<File> {
        match self.place(dir, name, attributes) {
            // Made before it was known where the name lies.
            Err(Errno::XDEV) => {
                let mut copy = self.copy_to(Arc::new(dir.try_clone_to_owned().map_err(errno_of)?))?;
                let overwritten = copy.place(dir, name, attributes)?;
                Ok(overwritten.unwrap_or(copy.file))
            }
            Err(errno) => Err(errno),
            Ok(overwritten) => Ok(overwritten.unwrap_or(self.file)),
        }
    }

    /// As [`Temp::replace`]; returns the other file if that was overwritten.
    fn place(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        attributes: &Attributes,
    ) -> rustix::io::Result<Option<File>> {
        let may_replace = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(old) => match FileType::from_raw_mode(old.st_mode) {
                FileType::RegularFile => {
                    // What is replaced by leave of its directory is written to in the eyes of the caller.
                    rustix::fs::accessat(dir, name, Access::WRITE_OK, AtFlags::empty())?;
                    !self.elsewhere && self.inherit(&old)?
                }
                FileType::Directory => return Err(Errno::ISDIR),
                _ => return Err(Errno::NODEV),
            },
            Err(Errno::NOENT) if self.elsewhere => return Err(Errno::ACCESS),
            Err(Errno::NOENT) => {
                attributes.apply(self.file.as_fd())?;
                match self.link(dir, name) {
                    Ok(()) => return Ok(None),
                    // Somebody has made the file meanwhile.
                    Err(Errno::EXIST) => true,
                    Err(errno) => return Err(errno),
                }
            }
            Err(errno) => return Err(errno),
        };
        if !may_replace {
            return self.overwrite(dir, name, attributes).map(Some);
        }
        attributes.apply(self.file.as_fd())?;
        match self.rename_over(dir, name) {
            Err(Errno::BUSY | Errno::ACCESS | Errno::PERM) => self.overwrite(dir, name, attributes).map(Some),
            Err(errno) => Err(errno),
            Ok(()) => Ok(None),
        }
    }

    /// Takes over mode and owner of the file that will be replaced; `false` when this may not have that owner.
    fn inherit(&self, old: &rustix::fs::Stat) -> rustix::io::Result<bool> {
        let new = rustix::fs::fstat(&self.file)?;
        if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid) {
            let owner = Attributes { mode: None, uid: Some(old.st_uid), gid: Some(old.st_gid) };
            match owner.apply(self.file.as_fd()) {
                Ok(()) => {}
                Err(Errno::PERM) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        // Set-user-id goes, as it does when such a file is written to.
        Attributes { mode: Some(old.st_mode & 0o777), uid: None, gid: None }.apply(self.file.as_fd())?;
        Ok(true)
    }

    /// Gives the file a name that is not taken.
    fn link(&mut self, dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
        let Some(hidden) = &mut self.name else { return link_unnamed(&self.file, dir, name) };
        match rustix::fs::renameat_with(&hidden.dir, &hidden.name, dir, name, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(&hidden.dir, &hidden.name, dir, name)?,
            result => result?,
        }
        hidden.armed = false;
        Ok(())
    }

    fn rename_over(&mut self, dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
        if self.name.is_none() {
            let hidden = Hidden {
                dir: Arc::new(dir.try_clone_to_owned().map_err(errno_of)?),
                name: hidden_name(),
                armed: true,
            };
            link_unnamed(&self.file, dir, &hidden.name)?;
            self.name = Some(hidden);
        }
        if let Some(hidden) = &mut self.name {
            rustix::fs::renameat(&hidden.dir, &hidden.name, dir, name)?;
            hidden.armed = false;
        }
        Ok(())
    }

    fn overwrite(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &OsStr,
        attributes: &Attributes,
    ) -> rustix::io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut target = File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?);
        let old = rustix::fs::fstat(&target)?;
        if FileType::from_raw_mode(old.st_mode) != FileType::RegularFile {
            return Err(Errno::NODEV);
        }
        // What is refused is refused before the content is gone; what is so already needs no leave.
        attributes.beyond(&old).apply(target.as_fd())?;
        target.set_len(0).map_err(errno_of)?;
        self.file.rewind().map_err(errno_of)?;
        std::io::copy(&mut self.file, &mut target).map_err(errno_of)?;
        Ok(target)
    }

    /// A copy in another file system, for when the name turns out to lie there.
    pub(crate) fn copy_to(&mut self, dir: Arc<OwnedFd>) -> rustix::io::Result<Self> {
        let mut copy = Self::new(dir)?;
        self.file.rewind().map_err(errno_of)?;
        let mut source = &self.file;
        std::io::copy(&mut source, &mut copy.file).map_err(errno_of)?;
        copy.file.flush().map_err(errno_of)?;
        Ok(copy)
    }
}

fn link_unnamed(file: &File, dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    match rustix::fs::linkat(file, c"", dir, name, AtFlags::EMPTY_PATH) {
        // Older kernels ask for CAP_DAC_READ_SEARCH and hide that behind ENOENT; the magic link needs /proc.
        Err(Errno::NOENT | Errno::PERM) => {
            let (link, links) = super::session::link(file)?;
            rustix::fs::linkat(links, &*link, dir, name, AtFlags::SYMLINK_FOLLOW)
        }
        result => result,
    }
}

/// The number in an error of the standard library.
pub(crate) fn errno_of(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
    use std::path::Path;

    use super::*;
    use crate::files::dir;

    fn temp(path: &Path, hidden: bool, content: &[u8]) -> Temp {
        let dir = Arc::new(dir::open(path).unwrap());
        let mut temp = if hidden { Temp::new_hidden(dir) } else { Temp::new(dir) }.unwrap();
        temp.file().write_all(content).unwrap();
        temp
    }

    fn names(path: &Path) -> Vec<String> {
        std::fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        for hidden in [false, true] {
            drop(temp(root.path(), hidden, b"half"));
            assert!(names(root.path()).is_empty());
        }
    }

    #[test]
    fn new_and_replaced_files() {
        for hidden in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let dir = dir::open(root.path()).unwrap();
            let file = root.path().join("f");
            temp(root.path(), hidden, b"one")
                .replace(dir.as_fd(), OsStr::new("f"), &Attributes::default())
                .unwrap();
            assert_eq!(std::fs::read(&file).unwrap(), b"one");
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o4751)).unwrap();
            temp(root.path(), hidden, b"two")
                .replace(dir.as_fd(), OsStr::new("f"), &Attributes::default())
                .unwrap();
            assert_eq!(std::fs::read(&file).unwrap(), b"two");
            assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o751);
            let mode = Attributes { mode: Some(0o600), ..Attributes::default() };
            temp(root.path(), hidden, b"three").replace(dir.as_fd(), OsStr::new("f"), &mode).unwrap();
            assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o600);
            assert_eq!(names(root.path()), ["f"]);
        }
    }

    #[test]
    fn only_regular_files_are_replaced() {
        let root = tempfile::tempdir().unwrap();
        let dir = dir::open(root.path()).unwrap();
        std::fs::create_dir(root.path().join("d")).unwrap();
        symlink("/etc/passwd", root.path().join("l")).unwrap();
        for (name, errno) in [("d", Errno::ISDIR), ("l", Errno::NODEV)] {
            let error = temp(root.path(), false, b"x")
                .replace(dir.as_fd(), OsStr::new(name), &Attributes::default())
                .unwrap_err();
            assert_eq!(error, errno);
        }
        assert_eq!(names(root.path()).len(), 2);
    }
}
