//! Access to the parts of an image archive by name, without unpacking the archive.

use super::decompress::{self, Compression};
use super::error::{Error, Result};
use super::limits::{Limits, SpaceGuard};
use super::path::EntryPath;
use super::tarball::{Kind, Source, TarReader};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A range of a file, read by position so that several threads can share the file.
#[derive(Clone, Debug)]
pub(super) struct Section {
    file: Arc<File>,
    offset: u64,
    end: u64,
}

impl Section {
    pub(super) fn whole(file: File) -> io::Result<Self> {
        let end = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), offset: 0, end })
    }

    pub(super) fn len(&self) -> u64 {
        self.end - self.offset
    }

    /// Copies the first bytes without consuming them; fewer when the section is shorter.
    pub(super) fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut copy = self.clone();
        let mut filled = 0;
        while filled < buffer.len() {
            match copy.read(&mut buffer[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        Ok(filled)
    }
}

impl Read for Section {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = buffer.len().min(usize::try_from(self.len()).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        let count = loop {
            match self.file.read_at(&mut buffer[..wanted], self.offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset += count as u64;
        Ok(count)
    }
}

impl Source for Section {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > self.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset += bytes;
        Ok(())
    }
}

/// The parts of an image: members of a tar archive or files of a directory.
#[derive(Debug)]
pub(super) struct Blobs {
    /// Of the archive or directory, or what messages call it instead.
    path: PathBuf,
    parts: Parts,
}

#[derive(Debug)]
enum Parts {
    Archive { all: Section, members: HashMap<EntryPath, Member> },
    Directory(OwnedFd),
}

#[derive(Debug)]
enum Member {
    File { offset: u64, size: u64 },
    Link(EntryPath),
}

impl Blobs {
    /// A directory with the parts as files.
    pub(super) fn directory(path: &Path, called: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root =
            rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| Error::io("open", path, errno))?;
        Ok(Self { path: called.into(), parts: Parts::Directory(root) })
    }

    /// An archive, compressed or not. What cannot be read by position is first written out below `temporary`.
    pub(super) fn archive(
        path: &Path,
        called: &Path,
        temporary: &Path,
        limits: &Limits,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Self> {
        let mut file = File::open(path).map_err(|error| Error::io("open", path, error))?;
        let path = called;
        let failed = |error| Error::io("read", path, error);
        let kind = file.metadata().map_err(failed)?.file_type();
        if !kind.is_file() {
            if !kind.is_fifo() && !kind.is_socket() && !kind.is_char_device() {
                return Err(Error::UnknownKind { path: path.into() });
            }
            file = spool(&mut file, path, temporary, limits)?;
        }
        let what = path.to_string_lossy();
        let mut all = Section::whole(file).map_err(failed)?;
        let mut start = [0; 8];
        let count = all.peek(&mut start).map_err(failed)?;
        if Compression::detect(&start[..count], &what)? != Compression::None {
            let progress = |count| {
                progress(count);
                Ok(())
            };
            let (unpacked, _) = decompress::unpack(all, &what, limits, &progress, |chunks| {
                spool(chunks, path, temporary, limits)
            })?;
            all = Section::whole(unpacked).map_err(failed)?;
        }
        let members = members(all.clone(), path, limits)?;
        Ok(Self { path: path.into(), parts: Parts::Archive { all, members } })
    }

    /// What it is called in messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is a part, file or directory of that name.
    pub(super) fn holds(&self, name: &str) -> bool {
        match &self.parts {
            Parts::Archive { members, .. } => members.keys().any(|member| {
                member
                    .as_bytes()
                    .strip_prefix(name.as_bytes())
                    .is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
            }),
            Parts::Directory(root) => {
                rustix::fs::statat(root, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).is_ok()
            }
        }
    }

    /// Everything, when the parts are those of a tar archive.
    pub(super) fn whole_archive(&self) -> Option<Section> {
        match &self.parts {
            Parts::Archive { all, .. } => Some(all.clone()),
            Parts::Directory(_) => None,
        }
    }

    /// Opens a part by name.
    pub(super) fn open(&self, name: &str, limits: &Limits) -> Result<Option<Section>> {
        let what = self.path.to_string_lossy();
        let name = EntryPath::parse(name.as_bytes(), &what, limits)?;
        match &self.parts {
            Parts::Archive { all, members } => {
                let mut name = &name;
                // Links are followed a few steps at most: they may form a circle.
                for _ in 0..8 {
                    match members.get(name) {
                        Some(Member::File { offset, size }) => {
                            let section =
                                Section { file: Arc::clone(&all.file), offset: *offset, end: offset + size };
                            return Ok(Some(section));
                        }
                        Some(Member::Link(target)) => name = target,
                        None => return Ok(None),
                    }
                }
                Ok(None)
            }
            Parts::Directory(root) => {
                let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let path = || self.path.join(String::from_utf8_lossy(name.as_bytes()).as_ref());
                match rustix::fs::openat2(root, name.relative(), flags, Mode::empty(), resolve) {
                    Ok(fd) => {
                        let file = File::from(fd);
                        let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
                        let section =
                            Section::whole(file).map_err(|error| Error::io("read", path(), error))?;
                        Ok(is_file.then_some(section))
                    }
                    Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Ok(None),
                    Err(errno) => Err(Error::io("open", path(), errno)),
                }
            }
        }
    }

    /// Reads a small part whole.
    pub(super) fn read(&self, name: &str, limits: &Limits) -> Result<Option<Vec<u8>>> {
        let Some(mut section) = self.open(name, limits)? else {
            return Ok(None);
        };
        let what = format!("{name} of {}", self.path.display());
        Limits::check(&what, "metadata_bytes", section.len(), limits.metadata_bytes)?;
        let mut data = Vec::with_capacity(usize::try_from(section.len()).unwrap_or(0));
        section.read_to_end(&mut data).map_err(|error| Error::stream(&what, error))?;
        Ok(Some(data))
    }

    /// Reads a small part that must be there.
    pub(super) fn require(&self, name: &str, limits: &Limits) -> Result<Vec<u8>> {
        self.read(name, limits)?
            .ok_or_else(|| Error::BlobMissing { path: self.path.clone(), blob: name.into() })
    }
}

/// Where each member of a tar archive lies.
fn members(all: Section, path: &Path, limits: &Limits) -> Result<HashMap<EntryPath, Member>> {
    let what = path.to_string_lossy();
    let mut reader = TarReader::new(all, &what, limits);
    let mut members = HashMap::new();
    let mut memory = 0;
    loop {
        let entry = match reader.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) if members.is_empty() => return Err(Error::UnknownKind { path: path.into() }),
            Ok(None) => return Ok(members),
            Err(Error::Malformed { .. } | Error::Truncated { .. }) if reader.position() <= 512 => {
                return Err(Error::UnknownKind { path: path.into() });
            }
            Err(error) => return Err(error),
        };
        memory += (entry.path.len() + entry.link.len() + 64) as u64;
        Limits::check(&what, "memory_bytes", memory, limits.memory_bytes)?;
        let name = EntryPath::parse(&entry.path, &what, limits)?;
        let member = match entry.kind {
            // No part of an image has holes; one that had would be read in pieces.
            Kind::File if entry.sparse.is_some() => None,
            Kind::File => Some(Member::File { offset: reader.position(), size: entry.size }),
            // A link that leads out of the archive leads to no part; in a root file system that is ordinary.
            Kind::Symlink => link_target(&name, &entry.link).map(Member::Link),
            Kind::HardLink => EntryPath::parse(&entry.link, &what, limits).ok().map(Member::Link),
            _ => None,
        };
        if let Some(member) = member {
            members.insert(name, member);
        }
    }
}

/// Target of a relative symbolic link between members, by its text alone.
fn link_target(name: &EntryPath, target: &[u8]) -> Option<EntryPath> {
    if target.starts_with(b"/") {
        return None;
    }
    let mut path = name.split()?.0;
    for part in target.split(|byte| *byte == b'/') {
        path = match part {
            b"" | b"." => path,
            b".." => path.split()?.0,
            _ => path.join(part),
        };
    }
    Some(path)
}

/// Writes a stream to an unnamed file below `temporary`.
fn spool(stream: &mut impl Read, path: &Path, temporary: &Path, limits: &Limits) -> Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = rustix::fs::open(temporary, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|errno| Error::io("create a file in", temporary, errno))?;
    let mut file = File::from(fd);
    // Gone again before the end: it counts against the free space only.
    let mut guard = SpaceGuard::new(limits, &|_| Ok(()));
    let what = path.to_string_lossy();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = match stream.read(&mut buffer) {
            Ok(0) => return Ok(file),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::stream(&what, error)),
        };
        guard.spend(&file, temporary, count as u64)?;
        file.write_all(&buffer[..count]).map_err(|error| Error::io("write to", temporary, error))?;
    }
}
