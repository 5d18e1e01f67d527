//! How much lies below a directory.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};

/// Deeper trees are not looked into: each level is an open directory.
const DEEPEST: usize = 256;

/// Whether the files below `dir` take more than `limit` bytes of disk. Looks no further than it must; what vanishes or
/// cannot be read meanwhile counts nothing.
pub(super) fn exceeds(dir: &OwnedFd, limit: u64) -> bool {
    let mut left = limit;
    let Ok(dir) = rustix::fs::openat(dir, c".", FLAGS, Mode::empty()) else { return false };
    take(&dir, &mut left, 0).is_none()
}

/// How many bytes of disk the files below `dir` take.
pub(super) fn of(dir: &OwnedFd) -> u64 {
    let mut left = u64::MAX;
    if let Ok(dir) = rustix::fs::openat(dir, c".", FLAGS, Mode::empty()) {
        take(&dir, &mut left, 0);
    }
    u64::MAX - left
}

const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn take(dir: &OwnedFd, left: &mut u64, depth: usize) -> Option<()> {
    let Ok(entries) = Dir::read_from(dir) else { return Some(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Ok(stat) = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        // Blocks of 512 bytes, whatever the file system's own are.
        *left = left.checked_sub(u64::try_from(stat.st_blocks).unwrap_or(0) * 512)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            && depth < DEEPEST
            && let Ok(inner) = rustix::fs::openat(dir, name, FLAGS, Mode::empty())
        {
            take(&inner, left, depth + 1)?;
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_and_links_take_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/b/f"), vec![1; 300_000]).unwrap();
        std::fs::File::create(dir.path().join("hole")).unwrap().set_len(1 << 40).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("root")).unwrap();
        let fd = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
        assert!((300_000..2_000_000).contains(&of(&fd)), "{}", of(&fd));
        assert!(exceeds(&fd, 200_000));
        assert!(!exceeds(&fd, 2_000_000));
    }
}
