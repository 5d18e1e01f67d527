//! File systems with somebody else at their other end: who may change files behind our back, or never answer.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Whether an open file lies on such a file system.
pub(crate) fn is_remote(file: impl AsFd) -> bool {
    const PLAN9: i64 = 0x0102_1997;
    const FUSE: i64 = 0x6573_5546;
    const NFS: i64 = 0x6969;
    const CIFS: i64 = 0xff53_4d42;
    const SMB2: i64 = 0xfe53_4d42;
    const CEPH: i64 = 0x00c3_6400;
    rustix::fs::fstatfs(file).is_ok_and(|stat| {
        #[allow(clippy::useless_conversion)] // The type differs between C libraries.
        let kind = i64::from(stat.f_type);
        [PLAN9, FUSE, NFS, CIFS, SMB2, CEPH].contains(&kind)
    })
}

/// Whether a name leads to this machine only, as far as it leads anywhere.
pub(crate) fn is_local(path: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let nearest = path.ancestors().find_map(|path| rustix::fs::open(path, flags, Mode::empty()).ok());
    nearest.is_some_and(|file| !is_remote(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_lies_where_it_would_be_made() {
        assert!(is_local(Path::new("/proc/self")) && is_local(Path::new("/no/such/file")));
        assert!(!is_local(Path::new("")));
    }
}
