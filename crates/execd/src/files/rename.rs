//! Moving files and directories.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::fs::RenameFlags;
use rustix::io::Errno;

use super::attributes::Attributes;
use super::error::{FileError, Result};
use super::path::Requested;
use super::temp::hidden_name;
use super::{copy, dir, remove};

/// Moves `src` to `dest`, which must not exist; its missing parents are made. Across file systems the tree is
/// copied under a hidden name, put in place, and only then removed at its old place.
pub(crate) fn rename(src: &Requested, dest: &Requested) -> Result<()> {
    if super::session::view().is_some_and(|view| !view.together(&src.path, &dest.path)) {
        return Err(FileError::Refused(format!(
            "{}: cannot be moved to {}, which is in another tree of the session",
            src.shown, dest.shown
        )));
    }
    let (src_parent, src_name) = src.split()?;
    let (dest_parent, dest_name) = dest.split()?;
    let src_failed = |errno| FileError::of(&src.shown, "move", errno);
    let src_dir = dir::open(src_parent).map_err(src_failed)?;
    if !dir::exists(&src_dir, src_name).map_err(src_failed)? {
        return Err(FileError::Missing(src.shown.clone()));
    }
    let dest_dir = dir::make_all(dest_parent, &Attributes::default(), &dest.shown)?;
    let (from, to) = (src_dir.as_fd(), dest_dir.as_fd());
    match without_replacing(from, src_name, to, dest_name) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST | Errno::NOTEMPTY) => Err(FileError::Refused(format!(
            "{}: already exists; remove it first or choose another name",
            dest.shown
        ))),
        Err(Errno::INVAL) => {
            Err(FileError::Invalid(format!("{}: a directory cannot be moved into itself", src.shown)))
        }
        Err(Errno::XDEV) => across(from, src_name, to, dest_name).map_err(|errno| match errno {
            Errno::EXIST => FileError::Refused(format!("{}: already exists", dest.shown)),
            errno => {
                FileError::System { path: src.shown.clone(), action: "copy to another file system", errno }
            }
        }),
        Err(errno) => Err(src_failed(errno)),
    }
}

fn without_replacing(
    from: BorrowedFd<'_>,
    name: &OsStr,
    to: BorrowedFd<'_>,
    new_name: &OsStr,
) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(from, name, to, new_name, RenameFlags::NOREPLACE) {
        // Some file systems do not know the flag; EINVAL also means a move into itself, which the plain call repeats.
        Err(Errno::INVAL | Errno::NOSYS) => {
            if dir::exists(to, new_name)? {
                return Err(Errno::EXIST);
            }
            rustix::fs::renameat(from, name, to, new_name)
        }
        result => result,
    }
}

fn across(
    from: BorrowedFd<'_>,
    name: &OsStr,
    to: BorrowedFd<'_>,
    new_name: &OsStr,
) -> rustix::io::Result<()> {
    if dir::exists(to, new_name)? {
        return Err(Errno::EXIST);
    }
    let hidden = hidden_name();
    let copied =
        copy::tree(from, name, to, &hidden).and_then(|()| without_replacing(to, &hidden, to, new_name));
    if let Err(errno) = copied {
        // What was copied goes; the source is whole.
        if let Err(left) = remove::tree_at(to, &hidden) {
            tracing::warn!(name = ?hidden, error = %left, "an unfinished copy could not be removed");
        }
        return Err(errno);
    }
    remove::tree_at(from, name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
    use std::path::Path;

    use super::*;

    fn requested(path: &Path) -> Requested {
        Requested { shown: path.display().to_string(), path: path.to_owned() }
    }

    #[test]
    fn moves_and_refuses() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| requested(&root.path().join(name));
        std::fs::write(root.path().join("a"), "x").unwrap();
        rename(&at("a"), &at("new/dir/b")).unwrap();
        assert_eq!(std::fs::read(root.path().join("new/dir/b")).unwrap(), b"x");
        assert!(matches!(rename(&at("a"), &at("c")), Err(FileError::Missing(_))));
        std::fs::write(root.path().join("d"), "y").unwrap();
        assert!(matches!(rename(&at("d"), &at("new/dir/b")), Err(FileError::Refused(_))));
        assert!(matches!(rename(&at("d"), &at("d")), Err(FileError::Refused(_))));
        assert!(matches!(rename(&at("new"), &at("new/dir/in")), Err(FileError::Invalid(_))));
        symlink("/nowhere", root.path().join("link")).unwrap();
        rename(&at("link"), &at("link2")).unwrap();
        assert!(root.path().join("link2").is_symlink());
    }

    #[test]
    fn a_tree_crosses_file_systems() {
        let (here, there) =
            (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/tmp").unwrap());
        if here.path().metadata().unwrap().dev() == there.path().metadata().unwrap().dev() {
            eprintln!("skipped: /dev/shm and /tmp are one file system");
            return;
        }
        let tree = here.path().join("tree");
        std::fs::create_dir_all(tree.join("sub")).unwrap();
        std::fs::write(tree.join("sub/f"), "content").unwrap();
        std::fs::set_permissions(tree.join("sub/f"), PermissionsExt::from_mode(0o640)).unwrap();
        symlink("../sub/f", tree.join("sub/link")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            tree.join("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let before = tree.join("sub/f").metadata().unwrap();
        rename(&requested(&tree), &requested(&there.path().join("moved"))).unwrap();
        assert!(!tree.exists());
        let moved = there.path().join("moved");
        assert_eq!(std::fs::read(moved.join("sub/f")).unwrap(), b"content");
        let after = moved.join("sub/f").metadata().unwrap();
        assert_eq!(
            (after.mode(), after.mtime(), after.mtime_nsec()),
            (before.mode(), before.mtime(), before.mtime_nsec())
        );
        assert_eq!(std::fs::read_link(moved.join("sub/link")).unwrap(), Path::new("../sub/f"));
        assert!(moved.join("pipe").symlink_metadata().is_ok());
        assert_eq!(std::fs::read_dir(there.path()).unwrap().count(), 1);
    }
}
