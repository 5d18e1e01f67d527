//! The directory of a session: named pipes, files in which the shell leaves its state, and a file while a long text is
//! handed over.
//!
//! A named pipe is the only pipe that a running shell can be given afresh for each run, so that what earlier runs
//! have left in the background does not write into later ones. The directory belongs to the daemon: nobody else can
//! put something of his in the place of a pipe that the daemon is about to open.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Gid, Mode, OFlags, Uid};

use super::script::Names;
use crate::accounts::Identity;
use crate::app::App;
use crate::command::run::temp_dir;

/// Memory that every container has; a named pipe takes no space in it.
const SHARED_MEMORY: &str = "/dev/shm";
/// Longest state that is kept.
const LONGEST_STATE: u64 = 512 << 10;
/// Named pipe of the shell's words.
const CONTROL: &str = "c";
/// Named pipe of a run's output.
const OUTPUT: &str = "o";
/// Files of the shell's state: two of runs, and that of a shell that ends.
const STATES: [&str; 3] = ["s0", "s1", "s"];

/// The directory, removed on drop.
#[derive(Debug)]
pub(super) struct Place {
    dir: PathBuf,
    owner: Option<(u32, u32)>,
}

/// What a run needs of it.
#[derive(Debug)]
pub(super) struct Opened {
    /// The control pipe, when it had to be made anew.
    pub(super) control: Option<OwnedFd>,
    /// Reading end of the run's output.
    pub(super) output: OwnedFd,
}

impl Place {
    /// Makes the directory and its control pipe, of which the reading end comes back.
    ///
    /// # Errors
    /// Neither place for temporary things takes it.
    pub(super) fn new(app: &App, identity: Option<&Identity>) -> io::Result<(Self, OwnedFd)> {
        // Short: bash reads each byte of these names by itself, several times a run.
        let name = format!(".execd-sh-{:012x}", crate::random::uuid().as_u64_pair().1 >> 16);
        let owner = identity.map(|identity| (identity.uid, identity.gid));
        let mut parents = vec![PathBuf::from(SHARED_MEMORY), temp_dir(app)];
        // A place that was asked for comes first, unless the shell's user may have no way to it.
        if app.binding().var("TMPDIR").is_some_and(|dir| !dir.is_empty())
            && owner.is_none_or(|(uid, _)| uid == 0)
        {
            parents.swap(0, 1);
        }
        let mut result = Err(io::ErrorKind::NotFound.into());
        for parent in parents {
            let place = Self { dir: parent.join(&name), owner };
            match place.make() {
                Ok(control) => return Ok((place, control)),
                Err(error) => {
                    result = Err(io::Error::new(error.kind(), format!("{}: {error}", parent.display())));
                }
            }
        }
        result
    }

    fn make(&self) -> io::Result<OwnedFd> {
        fs::DirBuilder::new().mode(0o711).create(&self.dir)?;
        for name in STATES {
            self.file(name)?;
        }
        self.pipe(CONTROL, OFlags::RDWR)
    }

    /// Names for the shell.
    pub(super) fn names(&self) -> Names {
        let name = |name: &str| self.dir.join(name).as_os_str().as_bytes().to_vec();
        let [first, second, last] = STATES;
        Names {
            control: name(CONTROL),
            output: name(OUTPUT),
            saved: [name(first), name(second)],
            last: name(last),
        }
    }

    /// Makes a new output pipe. What somebody has removed is made again.
    pub(super) fn open_output(&self) -> io::Result<Opened> {
        let mut control = None;
        if rustix::fs::lstat(self.dir.join(CONTROL)).is_err() {
            let _ = fs::remove_dir_all(&self.dir);
            control = Some(self.make()?);
        }
        self.close_output();
        Ok(Opened { control, output: self.pipe(OUTPUT, OFlags::RDONLY)? })
    }

    /// Takes the names of the output pipe and of the texts away; who has them open keeps them.
    pub(super) fn close_output(&self) {
        for name in [OUTPUT, "text", "state"] {
            let _ = fs::remove_file(self.dir.join(name));
        }
    }

    fn pipe(&self, name: &str, how: OFlags) -> io::Result<OwnedFd> {
        let path = self.dir.join(name);
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let flags = how | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let pipe = rustix::fs::open(&path, flags, Mode::empty())?;
        if let Some((uid, gid)) = self.owner {
            rustix::fs::fchown(&pipe, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        Ok(pipe)
    }

    /// Leaves a text for the shell. `None` when there is no room for it.
    pub(super) fn leave(&self, name: &str, text: &[u8]) -> Option<PathBuf> {
        let path = self.dir.join(name);
        if self.file(name).and_then(|mut file| file.write_all(text)).is_err() {
            let _ = fs::remove_file(&path);
            return None;
        }
        Some(path)
    }

    /// Makes a file of the shell's user.
    fn file(&self, name: &str) -> io::Result<fs::File> {
        let file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.dir.join(name))?;
        if let Some((uid, gid)) = self.owner {
            rustix::fs::fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        Ok(file)
    }

    /// Whether a shell that has ended has left what it had become in the end.
    pub(super) fn has_last_words(&self) -> bool {
        self.left(STATES[2]).is_some()
    }

    /// What the last shell has become, as text that restores it. It is there for one that takes it.
    pub(super) fn take_state(&self) -> Option<Vec<u8>> {
        let states = STATES.map(|name| self.left(name));
        for name in STATES {
            // The next shell must not be taken for this one.
            let _ = self.open(name).and_then(|file| file.set_len(0));
        }
        states.into_iter().flatten().max_by_key(|(number, _)| *number).map(|(_, text)| text)
    }

    /// A state that was written to its end, with the number of its run.
    fn left(&self, name: &str) -> Option<(u64, Vec<u8>)> {
        let mut text = Vec::new();
        self.open(name).ok()?.take(LONGEST_STATE + 1).read_to_end(&mut text).ok()?;
        if text.len() as u64 > LONGEST_STATE || text.pop()? != 0 {
            return None;
        }
        let line = memchr::memchr(b'\n', &text)?;
        let number = std::str::from_utf8(&text[..line]).ok()?.parse().ok()?;
        text.drain(..=line);
        Some((number, text))
    }

    /// Opens a file for which the shell's user may have put something else.
    fn open(&self, name: &str) -> io::Result<fs::File> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = fs::File::from(rustix::fs::open(self.dir.join(name), flags, Mode::empty())?);
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Where it is.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_whole_state_is_taken_once() {
        let parent = tempfile::tempdir().unwrap();
        let place = Place { dir: parent.path().join("place"), owner: None };
        place.make().unwrap();
        let write = |name: &str, text: &[u8]| fs::write(place.dir.join(name), text).unwrap();
        assert_eq!(place.take_state(), None);
        write("s0", b"4\nA\0");
        write("s1", b"5\nB");
        assert_eq!(place.take_state(), Some(b"A".to_vec()), "one that was broken off counts for nothing");
        assert_eq!(place.take_state(), None);
        write("s0", b"8\nC\nc\0");
        write("s1", b"7\nB\0");
        assert!(!place.has_last_words());
        assert_eq!(place.take_state(), Some(b"C\nc".to_vec()));
        write("s", b"18446744073709551615\nE\0");
        write("s1", b"9\nD\0");
        assert!(place.has_last_words());
        assert_eq!(place.take_state(), Some(b"E".to_vec()), "the last words are the newest");
        for junk in [&b"\0"[..], b"x\ny\0", b"-1\ny\0", b"1", b"\xff\n\0", &[b'1'; 600 << 10]] {
            write("s0", junk);
            assert_eq!(place.take_state(), None);
        }
        // What the session's user may put there.
        fs::write(parent.path().join("other"), b"1\nX\0").unwrap();
        fs::remove_file(place.dir.join("s0")).unwrap();
        std::os::unix::fs::symlink("../other", place.dir.join("s0")).unwrap();
        fs::remove_file(place.dir.join("s1")).unwrap();
        place.pipe("s1", OFlags::RDWR).unwrap();
        fs::remove_file(place.dir.join("s")).unwrap();
        fs::create_dir(place.dir.join("s")).unwrap();
        assert_eq!(place.take_state(), None);
        assert_eq!(fs::read(parent.path().join("other")).unwrap(), b"1\nX\0");
    }
}
