//! What the API tells about one directory entry.

use std::os::fd::AsFd;
use std::path::Path;

use jiff::Timestamp;
use osb_protocol::execd::{FileInfo, FileKind};
use osb_protocol::time::WireTime;
use rustix::fs::{AtFlags, FileType, StatxFlags};
use rustix::io::Errno;

use super::attributes::mode_to_digits;
use crate::accounts::Accounts;

/// The system's answer about an entry, symlinks not followed.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) kind: FileType,
    mode: u32,
    size: u64,
    uid: u32,
    gid: u32,
    modified: (i64, i64),
    created: (i64, i64),
    link_target: Option<String>,
}

impl Entry {
    /// Reads the entry `name` of `dir`.
    pub(crate) fn read(dir: impl AsFd, name: impl AsRef<Path>) -> rustix::io::Result<Self> {
        let name = name.as_ref();
        let mut entry = Self::stat(&dir, name)?;
        if entry.kind == FileType::Symlink {
            // One that was replaced meanwhile has none.
            let target = rustix::fs::readlinkat(&dir, name, Vec::new()).ok();
            entry.link_target = target.and_then(|target| target.into_string().ok());
        }
        Ok(entry)
    }

    fn stat(dir: impl AsFd, name: &Path) -> rustix::io::Result<Self> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        match rustix::fs::statx(&dir, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME) {
            Ok(stat) => {
                let has_birth = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
                let created = if has_birth { stat.stx_btime } else { stat.stx_ctime };
                Ok(Self {
                    kind: FileType::from_raw_mode(stat.stx_mode.into()),
                    mode: stat.stx_mode.into(),
                    size: stat.stx_size,
                    uid: stat.stx_uid,
                    gid: stat.stx_gid,
                    modified: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec.into()),
                    created: (created.tv_sec, created.tv_nsec.into()),
                    link_target: None,
                })
            }
            // Old kernels and old seccomp profiles do not have the call.
            Err(Errno::NOSYS | Errno::PERM) => {
                let stat = rustix::fs::statat(&dir, name, flags)?;
                Ok(Self {
                    kind: FileType::from_raw_mode(stat.st_mode),
                    mode: stat.st_mode,
                    size: u64::try_from(stat.st_size).unwrap_or(0),
                    uid: stat.st_uid,
                    gid: stat.st_gid,
                    modified: (stat.st_mtime, i64::try_from(stat.st_mtime_nsec).unwrap_or(0)),
                    created: (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or(0)),
                    link_target: None,
                })
            }
            Err(errno) => Err(errno),
        }
    }

    /// The wire form, under the given path.
    pub(crate) fn describe(&self, path: String, accounts: &Accounts) -> FileInfo {
        FileInfo {
            path,
            kind: match self.kind {
                FileType::RegularFile => FileKind::File,
                FileType::Directory => FileKind::Directory,
                FileType::Symlink => FileKind::Symlink,
                _ => FileKind::Other,
            },
            size: self.size,
            modified_at: moment(self.modified),
            created_at: moment(self.created),
            owner: accounts.user_label(self.uid),
            group: accounts.group_label(self.gid),
            mode: mode_to_digits(self.mode),
            link_target: self.link_target.clone(),
        }
    }
}

fn moment((seconds, nanoseconds): (i64, i64)) -> String {
    // Anyone may set a file's time to a year that the wire cannot carry.
    let at =
        i32::try_from(nanoseconds).ok().and_then(|nanoseconds| Timestamp::new(seconds, nanoseconds).ok());
    let at = at.unwrap_or(if seconds < 0 { Timestamp::UNIX_EPOCH } else { Timestamp::MAX });
    WireTime::from(at).to_string()
}

#[cfg(test)]
mod tests {
    use rustix::fs::CWD;

    use super::*;

    #[test]
    fn all_members_are_there_even_when_zero() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
        let info = Entry::read(CWD, &path).unwrap().describe("empty".to_owned(), &Accounts::default());
        let json = serde_json::to_value(&info).unwrap();
        for key in ["path", "type", "size", "modified_at", "created_at", "owner", "group", "mode"] {
            assert!(!json[key].is_null(), "{key}");
        }
        assert_eq!((info.size, info.mode, info.kind), (0, 0, FileKind::File));
        assert!(json.get("link_target").is_none());
    }

    #[test]
    fn a_link_tells_what_it_says() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("../no\nwhere", dir.path().join("l")).unwrap();
        let info = Entry::read(CWD, dir.path().join("l")).unwrap().describe("l".into(), &Accounts::default());
        assert_eq!((info.kind, info.link_target.as_deref()), (FileKind::Symlink, Some("../no\nwhere")));
    }

    #[test]
    fn odd_times_are_still_times() {
        assert_eq!(moment((0, 0)), "1970-01-01T00:00:00Z");
        assert_eq!(moment((i64::MIN, 0)), "1970-01-01T00:00:00Z");
        assert!(moment((i64::MAX, 5)).starts_with("9999-12-3"));
    }
}
