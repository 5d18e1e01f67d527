//! One place to which the log goes.
//!
//! Logging must not harm the work: a reader of a pipe that has stopped holds nobody up, a file is bounded, and lines
//! that cannot be written (a full disk) are counted and told once there is room again.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A log file of this size becomes `NAME.1`, in place of an older one.
const MOST_BYTES: u64 = 32 << 20;
/// A pipe that says it is writable takes this much without waiting.
const PIPE_PIECE: usize = 4096;

/// A file or stream that takes lines.
#[derive(Debug)]
pub struct Output {
    out: File,
    /// Path and size of a file that is bounded.
    bounded: Option<(PathBuf, u64)>,
    lost: u64,
    /// The last line broke off.
    broken: bool,
}

impl Output {
    /// A stream that somebody reads.
    #[must_use]
    pub fn stream(out: File) -> Self {
        Self { out, bounded: None, lost: 0, broken: false }
    }

    /// Appends to a file, which only its owner may read when it is new.
    ///
    /// # Errors
    /// It cannot be opened; the message names it.
    pub fn file(path: &Path) -> io::Result<Self> {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot open the log file {}: {error}", path.display()))
        };
        let out = File::options().append(true).create(true).mode(0o600).open(path).map_err(named)?;
        let found = out.metadata().map_err(named)?;
        let bounded = found.is_file().then(|| (path.to_owned(), found.size()));
        Ok(Self { out, bounded, lost: 0, broken: false })
    }

    pub(super) fn write(&mut self, line: &str) {
        if self.lost > 0 {
            let now = jiff::Timestamp::now();
            let told = format!(
                "{{\"level\":\"warn\",\"ts\":\"{now}\",\"logger\":\"osb_execd.log\",\"msg\":\"lines could not be \
                 written\",\"lost\":{}}}\n",
                self.lost
            );
            if !self.put(&told) {
                self.lost += 1;
                return;
            }
            self.lost = 0;
        }
        if !self.put(line) {
            self.lost += 1;
        }
    }

    fn put(&mut self, line: &str) -> bool {
        self.rotate(line.len() as u64);
        if self.bounded.is_none() && (line.len() > PIPE_PIECE || !self.is_ready()) {
            return false;
        }
        let start = if self.broken { "\n" } else { "" };
        let bytes = [start, line].concat();
        let mut rest = bytes.as_bytes();
        while !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => break,
                Ok(length) => rest = &rest[length..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let written = bytes.len() - rest.len();
        if let Some((_, size)) = &mut self.bounded {
            *size += written as u64;
        }
        if written > 0 {
            self.broken = !rest.is_empty();
        }
        rest.is_empty()
    }

    fn is_ready(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.out, PollFlags::OUT)];
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
            && !fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
    }

    /// Puts a file that is full aside and begins a new one. Where that cannot be, the file itself begins anew.
    fn rotate(&mut self, more: u64) {
        let Some((path, size)) = &mut self.bounded else { return };
        if *size + more <= MOST_BYTES {
            return;
        }
        let mut old = path.clone().into_os_string();
        old.push(".1");
        // A link to elsewhere stays what it is.
        let is_file = std::fs::symlink_metadata(&*path).is_ok_and(|found| found.is_file());
        let fresh = if is_file && std::fs::rename(&*path, old).is_ok() {
            File::options().append(true).create(true).mode(0o600).open(&*path).ok()
        } else {
            None
        };
        match fresh {
            Some(fresh) => self.out = fresh,
            None => drop(self.out.set_len(0)),
        }
        *size = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_file_is_private_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut output = Output::file(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let line = "x".repeat(1 << 20) + "\n";
        for _ in 0..70 {
            output.write(&line);
        }
        let sizes = [path.clone(), dir.path().join("log.1")].map(|path| path.metadata().unwrap().len());
        assert!(sizes.iter().all(|size| *size > 0 && *size <= MOST_BYTES), "{sizes:?}");
        // One that is opened again goes on where it is.
        let mut again = Output::file(&path).unwrap();
        again.write("end\n");
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("x\nend\n"));
    }

    #[test]
    fn a_file_that_cannot_be_put_aside_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("log"), dir.path().join("link"));
        std::os::unix::fs::symlink("log", &link).unwrap();
        let mut output = Output::file(&link).unwrap();
        let line = "x".repeat(1 << 20) + "\n";
        for _ in 0..40 {
            output.write(&line);
        }
        assert!(path.metadata().unwrap().len() <= MOST_BYTES);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn nobody_waits_for_a_reader_that_has_stopped() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut output = Output::stream(write.into());
        let line = "y".repeat(999) + "\n";
        for _ in 0..200 {
            output.write(&line);
        }
        assert!(output.lost > 100);
        let lost = output.lost;
        let mut read: File = OwnedFd::into(read);
        let mut bytes = vec![0; 200_000];
        let length = read.read(&mut bytes).unwrap();
        assert!(
            bytes[..length].split(|byte| *byte == b'\n').all(|line| line.is_empty() || line.len() == 999)
        );
        output.write("on\n");
        let length = read.read(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes[..length]);
        assert!(text.contains(&format!("\"lost\":{lost}}}\n")) && text.ends_with("on\n"), "{text}");
        drop(read);
        output.write("nobody\n");
        assert_eq!(output.lost, 1);
    }

    #[test]
    fn a_full_disk_costs_lines_and_is_told_later() {
        let Ok(full) = File::options().write(true).open("/dev/full") else { return };
        let mut output = Output { bounded: Some(("/dev/full".into(), 0)), ..Output::stream(full) };
        output.write("a\n");
        output.write("b\n");
        assert_eq!(output.lost, 3 - 1);
        let dir = tempfile::tempdir().unwrap();
        output.out = File::create(dir.path().join("log")).unwrap();
        output.write("c\n");
        let text = std::fs::read_to_string(dir.path().join("log")).unwrap();
        assert!(text.contains("\"lost\":2}\n") && text.ends_with("c\n"), "{text}");
    }
}
