//! Copies a directory tree as one layer.

use super::content::Content;
use super::error::{Error, Result};
use super::limits::{Charge, Limits, SpaceGuard};
use super::path::EntryPath;
use super::tree::{self, Attributes};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// What was copied.
#[derive(Debug)]
pub(super) struct Copied {
    /// Digest over names, attributes and contents: equal trees have equal digests.
    pub(super) digest: String,
    pub(super) bytes: u64,
    pub(super) disk: u64,
    pub(super) warnings: Vec<String>,
}

/// Copies the tree at `source` into the empty directory `target`. Symbolic links are copied, never followed; other
/// file systems mounted below `source`, sockets and device nodes are left out, and so is `exclude` if it lies there.
pub(super) fn copy(
    source: &Path,
    target: &Path,
    exclude: &Path,
    limits: &Limits,
    charge: Charge<'_>,
    progress: &dyn Fn(u64),
) -> Result<Copied> {
    let open = |path: &Path| {
        tree::open_dir(CWD, path.as_os_str().as_encoded_bytes())
            .map_err(|errno| Error::io("open", path, errno))
    };
    let (from, to) = (open(&std::path::absolute(source).unwrap_or_else(|_| source.into()))?, open(target)?);
    let stat = rustix::fs::fstat(&from).map_err(|errno| Error::io("examine", source, errno))?;
    let exclude = rustix::fs::stat(exclude).ok().map(|stat| (stat.st_dev, stat.st_ino));
    let mut copier = Copier {
        source,
        target: target.into(),
        device: stat.st_dev,
        exclude,
        limits,
        progress,
        guard: SpaceGuard::new(limits, charge),
        linked: HashMap::new(),
        root: to.try_clone().map_err(|error| Error::io("open", target, error))?,
        digest: Sha256::new_with_prefix(b"tree 2\0"),
        bytes: 0,
        entries: 0,
        warnings: Vec::new(),
        buffer: vec![0; 256 << 10],
    };
    copier.directory(&EntryPath::default(), &from, &to, &stat)?;
    Ok(Copied {
        digest: super::decompress::hex_digest(copier.digest),
        bytes: copier.bytes,
        disk: copier.guard.settle()?,
        warnings: copier.warnings,
    })
}

struct Copier<'a> {
    source: &'a Path,
    target: PathBuf,
    device: u64,
    exclude: Option<(u64, u64)>,
    limits: &'a Limits,
    progress: &'a dyn Fn(u64),
    guard: SpaceGuard<'a>,
    /// First copy of each file that has several names.
    linked: HashMap<u64, EntryPath>,
    root: OwnedFd,
    digest: Sha256,
    bytes: u64,
    entries: u64,
    warnings: Vec<String>,
    buffer: Vec<u8>,
}

impl Copier<'_> {
    fn failed(&self, action: &'static str, path: &EntryPath, errno: Errno) -> Error {
        // Writing fails for lack of space, reading never.
        let base = if errno == Errno::NOSPC || errno == Errno::DQUOT { &self.target } else { self.source };
        Error::io(action, base.join(tree::os(path.as_bytes())), errno)
    }

    fn warn(&mut self, path: &EntryPath, reason: &str) {
        const MOST: usize = 50;
        if self.warnings.len() < MOST {
            self.warnings.push(format!("{} left out: {reason}", String::from_utf8_lossy(path.as_bytes())));
        }
    }

    /// Adds a field to the digest, its length first so that no two sequences of fields look alike.
    fn hash(&mut self, field: &[u8]) {
        self.digest.update((field.len() as u64).to_le_bytes());
        self.digest.update(field);
    }

    fn hash_attributes(&mut self, kind: u8, path: &EntryPath, attributes: &Attributes) {
        self.hash(&[kind]);
        self.hash(path.as_bytes());
        for number in [attributes.uid, attributes.gid, attributes.mode, attributes.mtime.1] {
            self.digest.update(number.to_le_bytes());
        }
        self.digest.update(attributes.mtime.0.to_le_bytes());
        for (name, value) in &attributes.xattrs {
            self.hash(name);
            self.hash(value);
        }
    }

    fn directory(&mut self, path: &EntryPath, from: &OwnedFd, to: &OwnedFd, stat: &Stat) -> Result<()> {
        let mut attributes = Attributes::of(stat);
        attributes.xattrs =
            tree::xattrs(from).map_err(|errno| self.failed("read attributes of", path, errno))?;
        self.hash_attributes(b'd', path, &attributes);
        let names = tree::names(from).map_err(|errno| self.failed("read", path, errno))?;
        for name in names {
            let path = path.join(&name);
            if path.names().count() > self.limits.depth || path.as_bytes().len() > self.limits.path_bytes {
                return Err(Error::entry(
                    &self.source.to_string_lossy(),
                    path.as_bytes(),
                    "it lies too deep",
                ));
            }
            match rustix::fs::statat(from, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => self.entry(&path, &name, from, to, &stat)?,
                // Removed since it was listed.
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(self.failed("examine", &path, errno)),
            }
        }
        attributes.set_on(to).map_err(|errno| self.failed("set attributes of", path, errno))?;
        Ok(())
    }

    fn entry(
        &mut self,
        path: &EntryPath,
        name: &[u8],
        from: &OwnedFd,
        to: &OwnedFd,
        stat: &Stat,
    ) -> Result<()> {
        self.entries += 1;
        let what = self.source.to_string_lossy();
        Limits::check(&what, "entries", self.entries, self.limits.entries)?;
        if stat.st_dev != self.device {
            self.warn(path, "another file system is mounted there");
            return Ok(());
        }
        if self.exclude == Some((stat.st_dev, stat.st_ino)) {
            self.warn(path, "it is the image store itself");
            return Ok(());
        }
        self.guard.spend(self.root.as_fd(), &self.target, 0)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let attributes = Attributes::of(stat);
        match kind {
            FileType::Directory => {
                let below = tree::open_dir(from, name).map_err(|errno| self.failed("open", path, errno))?;
                rustix::fs::mkdirat(to, name, Mode::RWXU)
                    .map_err(|errno| self.failed("create", path, errno))?;
                let copy = tree::open_dir(to, name).map_err(|errno| self.failed("open", path, errno))?;
                let stat = rustix::fs::fstat(&below).map_err(|errno| self.failed("examine", path, errno))?;
                self.directory(path, &below, &copy, &stat)
            }
            FileType::RegularFile => self.file(path, name, from, to, stat),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())
                    .map_err(|errno| self.failed("read", path, errno))?;
                rustix::fs::symlinkat(target.as_c_str(), to, name)
                    .and_then(|()| attributes.set_at(to, name, true, None))
                    .map_err(|errno| self.failed("create", path, errno))?;
                self.hash_attributes(b'l', path, &attributes);
                self.hash(target.to_bytes());
                Ok(())
            }
            FileType::Fifo => {
                rustix::fs::mknodat(to, name, FileType::Fifo, Mode::RUSR, 0)
                    .and_then(|()| attributes.set_at(to, name, false, None))
                    .map_err(|errno| self.failed("create", path, errno))?;
                self.hash_attributes(b'p', path, &attributes);
                Ok(())
            }
            FileType::Socket => {
                self.warn(path, "it is a socket");
                Ok(())
            }
            _ => {
                self.warn(path, "it is a device node, and sandboxes have a /dev of their own");
                Ok(())
            }
        }
    }

    fn file(
        &mut self,
        path: &EntryPath,
        name: &[u8],
        from: &OwnedFd,
        to: &OwnedFd,
        stat: &Stat,
    ) -> Result<()> {
        if stat.st_nlink > 1 {
            if let Some(first) = self.linked.get(&stat.st_ino).cloned() {
                rustix::fs::linkat(&self.root, first.as_bytes(), to, name, AtFlags::empty())
                    .map_err(|errno| self.failed("create", path, errno))?;
                self.hash(b"h");
                self.hash(path.as_bytes());
                self.hash(first.as_bytes());
                return Ok(());
            }
            self.linked.insert(stat.st_ino, path.clone());
        }
        let source = tree::open_file(from, name).map_err(|errno| self.failed("open", path, errno))?;
        let stat = rustix::fs::fstat(&source).map_err(|errno| self.failed("examine", path, errno))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            self.warn(path, "it changed while it was copied");
            return Ok(());
        }
        let mut attributes = Attributes::of(&stat);
        attributes.xattrs =
            tree::xattrs(&source).map_err(|errno| self.failed("read attributes of", path, errno))?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let copy = rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| self.failed("create", path, errno))?;
        let (source, copy) = (File::from(source), File::from(copy));
        self.hash_attributes(b'f', path, &attributes);
        let content = Content {
            file: &source,
            path: &self.source.join(tree::os(path.as_bytes())),
            size: u64::try_from(stat.st_size).unwrap_or(0),
            stored: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
        };
        let Self { guard, bytes, limits, root, target, progress, buffer, .. } = self;
        let what = self.source.to_string_lossy();
        let digest = content.copy(&copy, target, buffer, |count| {
            *bytes += count;
            Limits::check(&what, "layer_bytes", *bytes, limits.layer_bytes)?;
            guard.spend(root.as_fd(), target, count)?;
            progress(count);
            Ok(())
        })?;
        self.hash(&digest);
        attributes.set_on(&copy).map_err(|errno| self.failed("set attributes of", path, errno))?;
        Ok(())
    }
}
