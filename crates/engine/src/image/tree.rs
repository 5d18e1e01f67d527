//! Small operations on directory trees, all relative to descriptors and never following the last name.

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

type Result<T> = std::result::Result<T, Errno>;

const OPAQUE_XATTR: &str = "trusted.overlay.opaque";

/// Bytes of a name as the standard library wants them.
pub(super) fn os(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

pub(super) fn open_dir(directory: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

/// Opens a directory below `root`, following symbolic links inside it and none that leads out.
pub(super) fn open_below(root: impl AsFd, path: impl rustix::path::Arg + Copy) -> Result<OwnedFd> {
    resolve(root, path, OFlags::empty())
}

/// As [`open_below`], but the last name is not followed.
pub(super) fn open_own(root: impl AsFd, path: impl rustix::path::Arg + Copy) -> Result<OwnedFd> {
    resolve(root, path, OFlags::NOFOLLOW)
}

fn resolve(root: impl AsFd, path: impl rustix::path::Arg + Copy, more: OFlags) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    loop {
        match rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve) {
            // A rename elsewhere on the machine made the kernel unsure about `..`.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

pub(super) fn open_file(directory: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    // Not blocking: what was a file when it was listed may be a fifo now.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

/// Names in a directory, sorted, without `.` and `..`.
pub(super) fn names(directory: &OwnedFd) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    let mut dir = Dir::read_from(directory)?;
    while let Some(entry) = dir.read() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    names.sort();
    Ok(names)
}

/// Removes whatever lies at a name, with all below it. The depth of the tree is bounded by [`super::Limits::depth`].
pub(super) fn remove(directory: &OwnedFd, name: &[u8]) -> Result<()> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        other => return other,
    }
    let below = open_dir(directory, name)?;
    for name in names(&below)? {
        remove(&below, &name)?;
    }
    rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)
}

/// Makes an empty directory one that gives nothing of its own to what is made in it.
pub(super) fn make_plain(directory: &OwnedFd) -> Result<()> {
    match rustix::fs::fremovexattr(directory, "system.posix_acl_default") {
        Ok(()) | Err(Errno::NODATA | Errno::NOTSUP) => {}
        Err(errno) => return Err(errno),
    }
    rustix::fs::fchown(directory, Some(Uid::ROOT), Some(Gid::ROOT))?;
    rustix::fs::fchmod(directory, Mode::from_raw_mode(0o755))
}

/// Makes the name hide whatever lower layers have there.
pub(super) fn make_whiteout(directory: &OwnedFd, name: &[u8]) -> Result<()> {
    rustix::fs::mknodat(directory, name, FileType::CharacterDevice, Mode::empty(), 0)
}

/// Makes the directory hide all of a lower one.
pub(super) fn set_opaque(directory: &OwnedFd) -> Result<()> {
    rustix::fs::fsetxattr(directory, OPAQUE_XATTR, b"y", XattrFlags::empty())
}

pub(super) fn is_opaque(directory: &OwnedFd) -> Result<bool> {
    let mut value = [0; 4];
    match rustix::fs::fgetxattr(directory, OPAQUE_XATTR, &mut value[..]) {
        Ok(count) => Ok(&value[..count] == b"y"),
        Err(Errno::NODATA | Errno::NOTSUP | Errno::RANGE) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether an extended attribute may come from an image. Others steer the kernel or security modules of the host:
/// `trusted.overlay.redirect` alone could show one file in the place of another.
pub(super) fn is_kept(name: &[u8]) -> bool {
    name == b"security.capability"
        || (name.starts_with(b"user.") && !name.starts_with(b"user.overlay.") && name.len() <= 255)
}

/// The kept extended attributes of an open file or directory.
pub(super) fn xattrs(fd: impl AsFd) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut list = vec![0; 64 << 10];
    let length = match rustix::fs::flistxattr(&fd, &mut list[..]) {
        Err(Errno::NOTSUP) => 0,
        other => other?,
    };
    let mut found = Vec::new();
    for name in list[..length].split(|byte| *byte == 0).filter(|name| is_kept(name)) {
        let mut value = vec![0; 64 << 10];
        match rustix::fs::fgetxattr(&fd, name, &mut value[..]) {
            Ok(count) => {
                value.truncate(count);
                found.push((name.to_vec(), value));
            }
            Err(Errno::NODATA) => {}
            Err(errno) => return Err(errno),
        }
    }
    found.sort();
    Ok(found)
}

/// Who makes files here, so that what a new one has already need not be set: three calls of seven for most files.
/// Holds in directories without set-group-id bit and default access list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maker {
    uid: u32,
    gid: u32,
    umask: u32,
}

impl Maker {
    /// This process.
    pub(super) fn this() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let umask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
        let umask = umask.and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
        Self {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            // Unknown, it counts as taking every bit: then each mode is set.
            umask: umask.unwrap_or(0o777),
        }
    }

    /// The mode to create a file with that shall have `wanted` in the end. Bits that run a program as somebody else
    /// come last, after content and owner.
    pub(super) fn mode(self, wanted: u32) -> u32 {
        if wanted & 0o7000 == 0 { wanted } else { 0o600 }
    }
}

/// Owner, mode, time and extended attributes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u32,
    pub(super) mtime: (i64, u32),
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Attributes {
    /// Attributes of a `stat`, without the extended ones.
    pub(super) fn of(stat: &rustix::fs::Stat) -> Self {
        Self {
            uid: stat.st_uid,
            gid: stat.st_gid,
            mode: stat.st_mode & 0o7777,
            mtime: (stat.st_mtime, u32::try_from(stat.st_mtime_nsec).unwrap_or(0)),
            xattrs: Vec::new(),
        }
    }

    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.mtime.0, tv_nsec: self.mtime.1.into() };
        Timestamps { last_access: time, last_modification: time }
    }

    fn is_owned(&self, maker: Option<Maker>) -> bool {
        maker.is_some_and(|maker| (maker.uid, maker.gid) == (self.uid, self.gid))
    }

    /// Sets the time of an open file or directory.
    pub(super) fn set_times(&self, fd: impl AsFd) -> Result<()> {
        rustix::fs::futimens(fd, &self.times())
    }

    fn owner(&self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }

    /// Sets all of them on an open file or directory. Returns whether the file system refused an extended one.
    pub(super) fn set_on(&self, fd: impl AsFd) -> Result<bool> {
        self.set(fd, None)
    }

    /// As [`Attributes::set_on`], for a file that `maker` has just made with [`Maker::mode`].
    pub(super) fn set_on_new(&self, fd: impl AsFd, maker: Maker) -> Result<bool> {
        self.set(fd, Some(maker))
    }

    fn set(&self, fd: impl AsFd, maker: Option<Maker>) -> Result<bool> {
        // A change of owner clears the set-id bits and file capabilities, so it comes first.
        if !self.is_owned(maker) {
            let (uid, gid) = self.owner();
            rustix::fs::fchown(&fd, uid, gid)?;
        }
        let mut skipped = false;
        for (name, value) in &self.xattrs {
            match rustix::fs::fsetxattr(&fd, name.as_slice(), value, XattrFlags::empty()) {
                Ok(()) => {}
                // A value that is no valid capability set is dropped as well: EINVAL.
                Err(Errno::NOTSUP | Errno::INVAL) => skipped = true,
                Err(errno) => return Err(errno),
            }
        }
        if maker.is_none_or(|maker| maker.mode(self.mode) & !maker.umask != self.mode) {
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(self.mode))?;
        }
        rustix::fs::futimens(&fd, &self.times())?;
        Ok(skipped)
    }

    /// Sets owner, mode and time of a name that was just made, by `maker` if that is known, and that cannot be opened.
    /// Symbolic links have no mode.
    pub(super) fn set_at(
        &self,
        directory: &OwnedFd,
        name: &[u8],
        symlink: bool,
        maker: Option<Maker>,
    ) -> Result<()> {
        if !self.is_owned(maker) {
            let (uid, gid) = self.owner();
            rustix::fs::chownat(directory, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        if !symlink {
            rustix::fs::chmodat(directory, name, Mode::from_raw_mode(self.mode), AtFlags::empty())?;
        }
        rustix::fs::utimensat(directory, name, &self.times(), AtFlags::SYMLINK_NOFOLLOW)
    }
}
