//! Files of a sandbox that has changed none, kept for the next one of the same image in the same slot.
//!
//! To make and to delete a dozen files and to mount an overlay costs more than all the rest of a sandbox that only ran
//! something. Whether nothing was changed is not a matter of trust: the kernel sets the change time of an inode with
//! every change to it, and from Linux 6.13 on two changes never get the same time once somebody has looked at the
//! first; [`change_times_are_exact`] asks the file system whether that holds. Everything in the upper and work layers
//! is compared with how it was when the sandbox was handed out. The overlay may then be used again, too: it has seen
//! no change but through itself, and what it remembers are entries of the image.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use osb_protocol::ids::SandboxId;

use crate::helper::preparer::SESSIONS;
use crate::image::{HOST, Image};
use crate::slot::{ENDED_FILE, LOG_FILE};

/// More entries than this are not the few that the engine itself puts there.
const ENTRIES: usize = 64;

/// What lies below the image `host` changes under an overlay that is mounted, and a name that was looked for in vain
/// stays unknown to it. After this time there is a new one.
const OF_HOST: Duration = Duration::from_secs(60);

/// Files in a sandbox's directory that belong to its slot.
#[derive(Debug)]
pub(crate) struct Kept {
    /// Names the directory.
    pub(crate) id: SandboxId,
    pub(crate) image: Arc<Image>,
    /// Clones of the overlays, attached nowhere.
    pub(crate) templates: Vec<OwnedFd>,
    /// The host files in the first upper layer: path and text.
    files: Vec<(String, String)>,
    marks: Vec<(PathBuf, Mark)>,
    made: Instant,
}

/// State of an inode.
#[derive(Debug, PartialEq, Eq)]
struct Mark {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Mark {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&path.symlink_metadata()?))
    }
}

impl From<&Metadata> for Mark {
    fn from(meta: &Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()) }
    }
}

impl Kept {
    /// Remembers the state of the files in `dir` before anybody has had them.
    pub(crate) fn new(
        dir: &Path,
        id: SandboxId,
        image: Arc<Image>,
        templates: Vec<OwnedFd>,
        files: Vec<(String, String)>,
    ) -> io::Result<Self> {
        let mut kept = Self { id, image, templates, files, marks: Vec::new(), made: Instant::now() };
        kept.mark(dir)?;
        Ok(kept)
    }

    /// Whether everything is as it was. The directory has passed through a sandbox, so only what is certain counts.
    pub(crate) fn is_untouched(&self, dir: &Path) -> bool {
        // Parents come first, and one that is unchanged has the same entries.
        self.marks.iter().all(|(path, mark)| Mark::of(&dir.join(path)).is_ok_and(|now| now == *mark))
    }

    /// Whether a sandbox of that image may have them.
    pub(crate) fn fits(&self, image: &Image) -> bool {
        let in_time = image.reference != HOST || self.made.elapsed() < OF_HOST;
        self.image.id == image.id && in_time && self.is_well()
    }

    /// Whether the overlays still take what is written to them. One that is mounted `volatile` refuses every `fsync` once
    /// its disk has failed to write, a new one does not.
    fn is_well(&self) -> bool {
        use rustix::fs::{Mode, OFlags};
        self.templates.iter().all(|template| {
            rustix::fs::openat(
                template,
                ".",
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .and_then(rustix::fs::fsync)
            .is_ok()
        })
    }

    /// Gives the host files other texts, after the directory has got another name. Nobody may be using the sandbox.
    pub(crate) fn rename(
        &mut self,
        dir: &Path,
        id: SandboxId,
        files: Vec<(String, String)>,
    ) -> io::Result<()> {
        self.id = id;
        let changed: Vec<_> = files.iter().filter(|file| !self.files.contains(file)).cloned().collect();
        write_over(dir, &changed)?;
        self.files = files;
        self.renew_times(dir)?;
        self.mark(dir)
    }

    /// When the last sandbox read its files is nothing that the next one shall see.
    fn renew_times(&self, dir: &Path) -> io::Result<()> {
        use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        for (path, _) in &self.marks {
            utimensat(CWD, dir.join(path), &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    fn mark(&mut self, dir: &Path) -> io::Result<()> {
        self.marks.clear();
        for number in 0..self.image.roots.len() {
            for layer in ["u", "w"] {
                mark_tree(dir, &PathBuf::from(format!("{layer}{number}")), &mut self.marks)?;
            }
        }
        mark_tree(dir, Path::new(SESSIONS), &mut self.marks)?;
        Ok(())
    }
}

fn mark_tree(dir: &Path, path: &Path, marks: &mut Vec<(PathBuf, Mark)>) -> io::Result<()> {
    if marks.len() >= ENTRIES {
        return Err(io::Error::other("more files than were put there"));
    }
    let whole = dir.join(path);
    let meta = whole.symlink_metadata()?;
    marks.push((path.to_owned(), Mark::from(&meta)));
    // The overlay's own, which no entry can be made in.
    let closed = meta.permissions().mode() & 0o7777 == 0;
    if meta.is_dir() && !closed {
        for entry in std::fs::read_dir(whole)? {
            mark_tree(dir, &path.join(entry?.file_name()), marks)?;
        }
    }
    Ok(())
}

/// Gives files of the first upper layer other texts, where they are.
pub(crate) fn write_over(dir: &Path, files: &[(String, String)]) -> io::Result<()> {
    for (path, text) in files {
        let path = dir.join("u0").join(path);
        match OpenOptions::new().write(true).truncate(true).custom_flags(libc::O_NOFOLLOW).open(path) {
            Ok(mut file) => file.write_all(text.as_bytes())?,
            // The image has something else there.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The files that init keeps beside the layers, empty.
pub(crate) fn log_and_end(dir: &Path) -> io::Result<(File, File)> {
    Ok((empty_file(&dir.join(ENDED_FILE))?, empty_file(&dir.join(LOG_FILE))?))
}

fn empty_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.open(path) {
        Ok(file) => {
            let meta = file.metadata()?;
            if meta.len() == 0 && meta.blocks() == 0 {
                return Ok(file);
            }
            std::fs::remove_file(path)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    options.create_new(true).open(path)
}

/// Whether the file system of `dir` gives every change a time of its own.
pub(crate) fn change_times_are_exact(dir: &Path) -> bool {
    const ROUNDS: u32 = 16;
    let path = dir.join("times");
    let changes = || -> io::Result<bool> {
        let file = File::create(&path)?;
        let mut last = Mark::of(&path)?;
        for round in 0..ROUNDS {
            file.set_permissions(std::fs::Permissions::from_mode(0o600 | (round & 1)))?;
            let now = Mark::of(&path)?;
            if now == last {
                return Ok(false);
            }
            last = now;
        }
        Ok(true)
    };
    let exact = changes().unwrap_or(false);
    let _ = std::fs::remove_file(&path);
    exact
}
