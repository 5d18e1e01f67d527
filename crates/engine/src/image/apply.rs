//! Writes the entries of one layer below a directory, in the form overlayfs wants.
//!
//! Every path is resolved by the kernel below the layer's root (`RESOLVE_IN_ROOT`), and the last name is never
//! followed, so that no order of symbolic links, hard links and replaced directories leads outside. A layer is
//! unpacked alone, without those below it: what it deletes becomes a whiteout (a character device 0:0), and a
//! directory that hides all of a lower one gets `trusted.overlay.opaque`.

mod links;

use super::error::{Error, Result};
use super::index::LowerLink;
use super::limits::{Charge, Limits, SpaceGuard};
use super::path::EntryPath;
use super::tarball::{Entry, Kind, Source, TarReader};
use super::tree::{self, Attributes, Maker};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// What a layer amounted to.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// Bytes of file content, without holes.
    pub(super) bytes: u64,
    /// Bytes of disk.
    pub(super) disk: u64,
    /// Whether anything in it hides something of lower layers.
    pub(super) hides: bool,
    /// Hard links to files that are not in this layer.
    pub(super) links: Vec<LowerLink>,
    /// Things left out, for people to read.
    pub(super) warnings: Vec<String>,
}

/// Unpacks `stream` into the empty directory `root`. `layer` names it in messages.
pub(super) fn apply(
    stream: impl Source,
    root: &Path,
    layer: &str,
    limits: &Limits,
    charge: Charge<'_>,
) -> Result<Applied> {
    let fd = tree::open_dir(CWD, root.as_os_str().as_encoded_bytes())
        .map_err(|errno| Error::io("open", root, errno))?;
    // Unless the layer says otherwise, and whatever the process's umask and the directories above.
    tree::make_plain(&fd).map_err(|errno| Error::io("write to", root, errno))?;
    let mut applier = Applier {
        root: Rc::new(fd),
        root_path: root.into(),
        layer,
        limits,
        parent: None,
        directories: Vec::new(),
        memory: 0,
        unpacked: 0,
        guard: SpaceGuard::new(limits, charge),
        maker: Maker::this(),
        applied: Applied::default(),
        buffer: vec![0; 256 << 10],
    };
    let mut reader = TarReader::new(stream, layer, limits);
    while let Some(entry) = reader.next_entry()? {
        applier.entry(&entry, &mut reader)?;
    }
    applier.finish()?;
    applier.applied.disk = applier.guard.settle()?;
    Ok(applier.applied)
}

struct Applier<'a> {
    root: Rc<OwnedFd>,
    root_path: PathBuf,
    layer: &'a str,
    limits: &'a Limits,
    /// The directory of the last entry: neighbours follow each other in archives.
    parent: Option<(EntryPath, Rc<OwnedFd>)>,
    /// Attributes of directories, set at the end: writing into one would change its time again.
    directories: Vec<(EntryPath, Attributes)>,
    memory: u64,
    unpacked: u64,
    guard: SpaceGuard<'a>,
    maker: Maker,
    applied: Applied,
    buffer: Vec<u8>,
}

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const INTERNAL: &[u8] = b".wh..wh.";

impl Applier<'_> {
    fn refuse(&self, entry: &[u8], reason: impl Into<String>) -> Error {
        Error::entry(self.layer, entry, reason)
    }

    fn failed(&self, action: &'static str, path: &EntryPath, errno: Errno) -> Error {
        Error::io(action, self.root_path.join(tree::os(path.as_bytes())), errno)
    }

    fn entry(&mut self, entry: &Entry, content: &mut dyn Read) -> Result<()> {
        let path = EntryPath::parse(&entry.path, self.layer, self.limits)?;
        // Each entry costs an inode, even an empty one.
        self.unpacked = self.unpacked.saturating_add(entry.stored()).saturating_add(256);
        Limits::check(self.layer, "layer_bytes", self.unpacked, self.limits.layer_bytes)?;
        self.guard.spend(self.root.as_fd(), &self.root_path, entry.stored())?;
        let Some((parent, name)) = path.split() else {
            return match entry.kind {
                Kind::Directory => self.remember(path, entry),
                _ => Err(self.refuse(&entry.path, "only a directory can be the root")),
            };
        };
        if name == OPAQUE {
            let directory = self.directory(&parent, entry)?;
            return self.make_opaque(&directory, &parent);
        }
        if path.names().any(|name| name.starts_with(INTERNAL)) {
            return Ok(());
        }
        if parent.names().any(|name| name.starts_with(WHITEOUT)) {
            return Err(self.refuse(&entry.path, "a whiteout has nothing below it"));
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            if matches!(hidden, b"" | b"." | b"..") {
                return Err(self.refuse(&entry.path, "it is a whiteout of nothing"));
            }
            return self.whiteout(&parent, hidden, entry);
        }
        match entry.kind {
            Kind::BlockDevice | Kind::CharDevice => self.device(&path, entry),
            Kind::Directory => self.make_directory(&path, &parent, name, entry),
            Kind::Fifo => {
                let (directory, ()) = self.place(&path, &parent, name, entry, |directory| {
                    rustix::fs::mknodat(directory, name, FileType::Fifo, Mode::RUSR, 0)
                })?;
                self.set_attributes(&directory, name, &path, entry)
            }
            Kind::File => self.file(&path, &parent, name, entry, content),
            Kind::HardLink => self.hard_link(&path, &parent, name, entry),
            Kind::Symlink => {
                if entry.link.is_empty() || entry.link.contains(&0) || entry.link.len() > 4_095 {
                    return Err(self.refuse(&entry.path, "the target of the symbolic link is none"));
                }
                let (directory, ()) = self.place(&path, &parent, name, entry, |directory| {
                    rustix::fs::symlinkat(entry.link.as_slice(), directory, name)
                })?;
                self.set_attributes(&directory, name, &path, entry)
            }
        }
    }

    fn resolve(&self, path: &EntryPath) -> Result<OwnedFd, Errno> {
        tree::open_below(&*self.root, path.relative())
    }

    /// The directory an entry lies in, made where the archive left it out.
    fn directory(&mut self, path: &EntryPath, entry: &Entry) -> Result<Rc<OwnedFd>> {
        if path.as_bytes().is_empty() {
            return Ok(Rc::clone(&self.root));
        }
        if let Some((known, fd)) = &self.parent
            && known == path
        {
            return Ok(Rc::clone(fd));
        }
        let fd = match self.resolve(path) {
            Ok(fd) => Rc::new(fd),
            Err(Errno::NOENT | Errno::NOTDIR) => self.make_missing(path, entry)?,
            Err(Errno::LOOP) => {
                return Err(self.refuse(&entry.path, "symbolic links on its path form a circle"));
            }
            Err(errno) => return Err(self.failed("open", path, errno)),
        };
        self.parent = Some((path.clone(), Rc::clone(&fd)));
        Ok(fd)
    }

    fn make_missing(&mut self, path: &EntryPath, entry: &Entry) -> Result<Rc<OwnedFd>> {
        let mut directory = Rc::clone(&self.root);
        let mut done = EntryPath::default();
        for name in path.names() {
            done = done.join(name);
            directory = match self.resolve(&done) {
                Ok(fd) => Rc::new(fd),
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    // A whiteout gives way: the layer deletes the lower thing and puts a directory there.
                    let hides = match kind_at(&directory, name)
                        .map_err(|errno| self.failed("examine", &done, errno))?
                    {
                        Some(found) if found.is_whiteout() => {
                            rustix::fs::unlinkat(&*directory, name, AtFlags::empty())
                                .map_err(|errno| self.failed("remove", &done, errno))?;
                            true
                        }
                        Some(found) if found.kind == FileType::Symlink => {
                            return Err(self.refuse(
                                &entry.path,
                                format!(
                                    "`{}` on its path is a symbolic link to nothing in this layer",
                                    lossy(done.as_bytes())
                                ),
                            ));
                        }
                        Some(_) => {
                            return Err(self.refuse(
                                &entry.path,
                                format!("`{}` is not a directory", lossy(done.as_bytes())),
                            ));
                        }
                        None => false,
                    };
                    let fd = Rc::new(self.create_directory(&directory, name, &done)?);
                    if hides {
                        self.make_opaque(&fd, &done)?;
                    }
                    fd
                }
                Err(Errno::LOOP) => {
                    return Err(self.refuse(&entry.path, "symbolic links on its path form a circle"));
                }
                Err(errno) => return Err(self.failed("open", &done, errno)),
            };
        }
        Ok(directory)
    }

    fn create_directory(&mut self, parent: &OwnedFd, name: &[u8], path: &EntryPath) -> Result<OwnedFd> {
        self.guard.spend(self.root.as_fd(), &self.root_path, 4_096)?;
        let failed = |errno| self.failed("create", path, errno);
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)).map_err(failed)?;
        let fd = tree::open_dir(parent, name).map_err(failed)?;
        rustix::fs::fchmod(&fd, Mode::from_raw_mode(0o755)).map_err(failed)?;
        Ok(fd)
    }

    fn make_opaque(&mut self, directory: &OwnedFd, path: &EntryPath) -> Result<()> {
        self.applied.hides = true;
        tree::set_opaque(directory).map_err(|errno| self.failed("set trusted.overlay.opaque on", path, errno))
    }

    /// The directory of an entry, with nothing left under the entry's name.
    fn clear(
        &mut self,
        path: &EntryPath,
        parent: &EntryPath,
        name: &[u8],
        entry: &Entry,
    ) -> Result<Rc<OwnedFd>> {
        let directory = self.directory(parent, entry)?;
        match rustix::fs::unlinkat(&*directory, name, AtFlags::empty()) {
            Ok(()) => self.forget(),
            Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => {
                self.forget();
                tree::remove(&directory, name).map_err(|errno| self.failed("remove", path, errno))?;
            }
            Err(errno) => return Err(self.failed("remove", path, errno)),
        }
        Ok(directory)
    }

    /// Makes something new at a name, which hardly ever holds anything. What does is removed. `make` must not take
    /// what is there.
    fn place<T>(
        &mut self,
        path: &EntryPath,
        parent: &EntryPath,
        name: &[u8],
        entry: &Entry,
        make: impl Fn(&OwnedFd) -> Result<T, Errno>,
    ) -> Result<(Rc<OwnedFd>, T)> {
        let mut directory = self.directory(parent, entry)?;
        let mut made = make(&directory);
        if matches!(made, Err(Errno::EXIST)) {
            directory = self.clear(path, parent, name, entry)?;
            made = make(&directory);
        }
        made.map(|made| (directory, made)).map_err(|errno| self.failed("create", path, errno))
    }

    /// Forgets the remembered directory when something on its path may have changed.
    fn forget(&mut self) {
        self.parent = None;
    }

    fn make_directory(
        &mut self,
        path: &EntryPath,
        parent: &EntryPath,
        name: &[u8],
        entry: &Entry,
    ) -> Result<()> {
        let directory = self.directory(parent, entry)?;
        // Its mode comes with the other attributes, at the end.
        match rustix::fs::mkdirat(&*directory, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => self.guard.spend(self.root.as_fd(), &self.root_path, 4_096)?,
            Err(Errno::EXIST) => self.take_over(&directory, name, path)?,
            Err(errno) => return Err(self.failed("create", path, errno)),
        }
        self.remember(path.clone(), entry)
    }

    /// Sees to it that a name which holds something holds a directory.
    fn take_over(&mut self, directory: &OwnedFd, name: &[u8], path: &EntryPath) -> Result<()> {
        let found = kind_at(directory, name).map_err(|errno| self.failed("examine", path, errno))?;
        if found.is_some_and(|found| found.kind == FileType::Directory) {
            return Ok(());
        }
        rustix::fs::unlinkat(directory, name, AtFlags::empty())
            .map_err(|errno| self.failed("remove", path, errno))?;
        self.forget();
        let fd = self.create_directory(directory, name, path)?;
        // It replaces something, so nothing of a lower directory may show through.
        self.make_opaque(&fd, path)
    }

    fn remember(&mut self, path: EntryPath, entry: &Entry) -> Result<()> {
        let attributes = self.attributes(entry);
        let xattrs: usize = attributes.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.memory += (path.as_bytes().len() + xattrs + 96) as u64;
        Limits::check(self.layer, "memory_bytes", self.memory, self.limits.memory_bytes)?;
        self.directories.push((path, attributes));
        Ok(())
    }

    fn file(
        &mut self,
        path: &EntryPath,
        parent: &EntryPath,
        name: &[u8],
        entry: &Entry,
        content: &mut dyn Read,
    ) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(self.maker.mode(entry.mode));
        let (_, fd) = self
            .place(path, parent, name, entry, |directory| rustix::fs::openat(directory, name, flags, mode))?;
        let mut file = File::from(fd);
        let whole = [(0, entry.size)];
        for (offset, length) in entry.sparse.as_deref().unwrap_or(&whole) {
            if entry.sparse.is_some() {
                file.seek(SeekFrom::Start(*offset)).map_err(|error| self.not_written(path, error))?;
            }
            self.copy_content(path, content, &mut file, *length)?;
        }
        if entry.sparse.is_some() {
            file.set_len(entry.size).map_err(|error| self.not_written(path, error))?;
        }
        self.applied.bytes += entry.stored();
        let attributes = self.attributes(entry);
        let skipped = attributes
            .set_on_new(&file, self.maker)
            .map_err(|errno| self.failed("set attributes of", path, errno))?;
        self.note_skipped(skipped);
        Ok(())
    }

    fn not_written(&self, path: &EntryPath, error: std::io::Error) -> Error {
        Error::io("write", self.root_path.join(tree::os(path.as_bytes())), error)
    }

    fn copy_content(
        &mut self,
        path: &EntryPath,
        content: &mut dyn Read,
        file: &mut File,
        mut left: u64,
    ) -> Result<()> {
        while left > 0 {
            let wanted = self.buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let count =
                content.read(&mut self.buffer[..wanted]).map_err(|error| Error::stream(self.layer, error))?;
            if count == 0 {
                return Err(Error::Truncated { what: self.layer.into() });
            }
            file.write_all(&self.buffer[..count]).map_err(|error| self.not_written(path, error))?;
            left -= count as u64;
        }
        Ok(())
    }

    /// Device nodes are never made. Base images made by a package manager bring some in `dev`, where a sandbox sees
    /// its own: these are left out. Anywhere else they have no honest use.
    fn device(&mut self, path: &EntryPath, entry: &Entry) -> Result<()> {
        if path.names().next() != Some(b"dev") {
            return Err(self.refuse(&entry.path, "images may not bring device nodes"));
        }
        self.warn(format!(
            "device node {} left out: sandboxes have a /dev of their own",
            lossy(path.as_bytes())
        ));
        Ok(())
    }

    /// Hides a lower file. What the layer itself brings under that name stays, but nothing of a lower directory.
    fn whiteout(&mut self, parent: &EntryPath, hidden: &[u8], entry: &Entry) -> Result<()> {
        let directory = self.directory(parent, entry)?;
        let path = parent.join(hidden);
        match kind_at(&directory, hidden).map_err(|errno| self.failed("examine", &path, errno))? {
            None => {
                self.applied.hides = true;
                tree::make_whiteout(&directory, hidden).map_err(|errno| self.failed("create", &path, errno))
            }
            Some(found) if found.kind == FileType::Directory => {
                let fd =
                    tree::open_dir(&directory, hidden).map_err(|errno| self.failed("open", &path, errno))?;
                self.make_opaque(&fd, &path)
            }
            Some(_) => Ok(()),
        }
    }

    fn attributes(&mut self, entry: &Entry) -> Attributes {
        if entry.uid > 65_535 || entry.gid > 65_535 {
            self.warn("some files belong to ids above 65535; in sandboxes they belong to nobody".into());
        }
        Attributes {
            uid: entry.uid,
            gid: entry.gid,
            mode: entry.mode,
            mtime: entry.mtime,
            xattrs: entry.xattrs.iter().filter(|(name, _)| tree::is_kept(name)).cloned().collect(),
        }
    }

    /// Attributes of what cannot be opened: symbolic links and fifos.
    fn set_attributes(
        &mut self,
        directory: &OwnedFd,
        name: &[u8],
        path: &EntryPath,
        entry: &Entry,
    ) -> Result<()> {
        let attributes = self.attributes(entry);
        attributes
            .set_at(directory, name, entry.kind == Kind::Symlink, Some(self.maker))
            .map_err(|errno| self.failed("set attributes of", path, errno))
    }

    fn warn(&mut self, warning: String) {
        const MOST: usize = 50;
        if self.applied.warnings.len() < MOST && !self.applied.warnings.contains(&warning) {
            self.applied.warnings.push(warning);
        }
    }

    fn note_skipped(&mut self, skipped: bool) {
        if skipped {
            self.warn("some extended attributes left out: the file system of the store has none".into());
        }
    }

    fn finish(&mut self) -> Result<()> {
        for (path, attributes) in std::mem::take(&mut self.directories) {
            // The last name is the entry's own: a link that took its place is not meant.
            let fd = match tree::open_own(&*self.root, path.relative()) {
                Ok(fd) => fd,
                // Replaced by a later entry of the layer.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(errno) => return Err(self.failed("open", &path, errno)),
            };
            let skipped =
                attributes.set_on(&fd).map_err(|errno| self.failed("set attributes of", &path, errno))?;
            self.note_skipped(skipped);
        }
        Ok(())
    }
}

/// What lies at a name, not followed.
struct Found {
    kind: FileType,
    inode: u64,
    device: u64,
}

impl Found {
    fn is_whiteout(&self) -> bool {
        self.kind == FileType::CharacterDevice && self.device == 0
    }
}

fn kind_at(directory: &OwnedFd, name: &[u8]) -> Result<Option<Found>, Errno> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(Found {
            kind: FileType::from_raw_mode(stat.st_mode),
            inode: stat.st_ino,
            device: stat.st_rdev,
        })),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned()
}
