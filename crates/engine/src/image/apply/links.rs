//! Hard links: within the layer, and to files of layers below.

use super::super::error::Result;
use super::super::index::LowerLink;
use super::super::limits::Limits;
use super::super::path::EntryPath;
use super::super::tarball::Entry;
use super::{Applier, kind_at};
use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

impl Applier<'_> {
    pub(super) fn hard_link(
        &mut self,
        path: &EntryPath,
        parent: &EntryPath,
        name: &[u8],
        entry: &Entry,
    ) -> Result<()> {
        let target = EntryPath::parse(&entry.link, self.layer, self.limits)?;
        let Some((target_parent, target_name)) = target.split() else {
            return Err(self.refuse(&entry.path, "it is a hard link to something else than a file"));
        };
        let from = match self.resolve(&target_parent) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                return self.lower_link(path, parent, &target, entry);
            }
            Err(errno) => return Err(self.failed("open", &target_parent, errno)),
        };
        let found = kind_at(&from, target_name).map_err(|errno| self.failed("examine", &target, errno))?;
        let Some(found) = found.filter(|found| !found.is_whiteout()) else {
            return self.lower_link(path, parent, &target, entry);
        };
        if found.kind == FileType::Directory {
            return Err(self.refuse(&entry.path, "it is a hard link to something else than a file"));
        }
        let directory = self.directory(parent, entry)?;
        let existing = kind_at(&directory, name).map_err(|errno| self.failed("examine", path, errno))?;
        if existing.as_ref().is_some_and(|existing| existing.inode == found.inode) {
            return Ok(());
        }
        if existing.is_some() {
            self.clear(path, parent, name, entry)?;
        }
        match rustix::fs::linkat(&from, target_name, &*directory, name, AtFlags::empty()) {
            Ok(()) => Ok(()),
            Err(Errno::NOENT) => {
                Err(self.refuse(&entry.path, "it is a hard link to what it replaces itself"))
            }
            Err(errno) => Err(self.failed("create", path, errno)),
        }
    }

    /// Notes a hard link to what this layer does not hold. Layers below may.
    fn lower_link(
        &mut self,
        path: &EntryPath,
        parent: &EntryPath,
        target: &EntryPath,
        entry: &Entry,
    ) -> Result<()> {
        self.directory(parent, entry)?;
        let text = |path: &EntryPath| String::from_utf8(path.as_bytes().to_vec());
        let (Ok(path), Ok(target)) = (text(path), text(target)) else {
            return Err(self.refuse(&entry.path, "it is a hard link to a file that is not in this layer"));
        };
        self.memory += (path.len() + target.len() + 96) as u64;
        Limits::check(self.layer, "memory_bytes", self.memory, self.limits.memory_bytes)?;
        self.applied.links.push(LowerLink { path, target });
        Ok(())
    }
}
