//! Replacing text in files.
//!
//! The text is literal and so is the file: bytes that are not UTF-8 stay as they are. Files of any size pass
//! through a bounded buffer, and the result appears at once under the old name.

use std::fs::File;
use std::io::{BufWriter, Read, Seek as _, Write};
use std::sync::Arc;

use memchr::memmem::Finder;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::attributes::Attributes;
use super::dir;
use super::error::{FileError, Result};
use super::path::Requested;
use super::temp::Temp;

/// Read at a time.
const CHUNK: usize = 1 << 20;

/// Replaces every `old` in the file by `new` and returns how many there were. Without any, the file is not
/// touched.
pub(crate) fn replace(requested: &Requested, old: &[u8], new: &[u8]) -> Result<u64> {
    let failed = |action| move |errno| FileError::of(&requested.shown, action, errno);
    let io_failed = |action| move |error: std::io::Error| FileError::of_io(&requested.shown, action, &error);
    if old.is_empty() {
        return Err(FileError::Invalid(format!("{}: 'old' must not be empty", requested.shown)));
    }
    let (parent, name) = requested.split()?;
    let parent = dir::open(parent).map_err(failed("open the directory"))?;
    let place = dir::resolve(parent, name).map_err(failed("follow the link"))?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut source: File = rustix::fs::openat(&place.dir, &place.name, flags, Mode::empty())
        .map_err(|errno| match errno {
            Errno::NXIO => not_regular(requested),
            errno => failed("open the file")(errno),
        })?
        .into();
    let stat = rustix::fs::fstat(&source).map_err(failed("read the file"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(not_regular(requested));
    }
    let finder = Finder::new(old);
    if !contains(&mut source, &finder).map_err(io_failed("read the file"))? {
        return Ok(0);
    }
    source.rewind().map_err(io_failed("read the file"))?;
    let place_dir = Arc::new(place.dir);
    let mut temp = Temp::new(place_dir.clone()).map_err(failed("make a file beside it"))?;
    let count = {
        let mut output = BufWriter::with_capacity(CHUNK, temp.file());
        let count =
            substitute(&mut source, &mut output, &finder, new).map_err(io_failed("rewrite the file"))?;
        output.flush().map_err(io_failed("write the file"))?;
        count
    };
    use std::os::fd::AsFd as _;
    temp.replace(place_dir.as_fd(), &place.name, &Attributes::default())
        .map_err(failed("replace the file"))?;
    Ok(count)
}

fn not_regular(requested: &Requested) -> FileError {
    FileError::Invalid(format!("{}: is not a regular file", requested.shown))
}

fn contains(source: &mut impl Read, finder: &Finder<'_>) -> std::io::Result<bool> {
    let mut count = 0;
    scan(source, finder, |piece| {
        count += u64::from(matches!(piece, Piece::Match));
        Ok(count == 0)
    })?;
    Ok(count > 0)
}

fn substitute(
    source: &mut impl Read,
    output: &mut impl Write,
    finder: &Finder<'_>,
    new: &[u8],
) -> std::io::Result<u64> {
    let mut count = 0;
    scan(source, finder, |piece| {
        match piece {
            Piece::Text(text) => output.write_all(text)?,
            Piece::Match => {
                count += 1;
                output.write_all(new)?;
            }
        }
        Ok(true)
    })?;
    Ok(count)
}

enum Piece<'a> {
    Text(&'a [u8]),
    Match,
}

/// Cuts the source at every match, left to right, until `sink` returns `false`. Keeps back only what may be the
/// start of a match.
fn scan(
    source: &mut impl Read,
    finder: &Finder<'_>,
    mut sink: impl FnMut(Piece<'_>) -> std::io::Result<bool>,
) -> std::io::Result<()> {
    let length = finder.needle().len();
    let mut buffer = vec![0; CHUNK.max(length * 2)];
    let mut filled = 0;
    loop {
        let read = match source.read(&mut buffer[filled..]) {
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        filled += read;
        let mut start = 0;
        while let Some(at) = finder.find(&buffer[start..filled]) {
            if !sink(Piece::Text(&buffer[start..start + at]))? || !sink(Piece::Match)? {
                return Ok(());
            }
            start += at + length;
        }
        let keep = if read == 0 { 0 } else { (length - 1).min(filled - start) };
        if !sink(Piece::Text(&buffer[start..filled - keep]))? || read == 0 {
            return Ok(());
        }
        buffer.copy_within(filled - keep..filled, 0);
        filled = keep;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn run(path: &Path, old: &[u8], new: &[u8]) -> Result<u64> {
        replace(&Requested { shown: path.display().to_string(), path: path.to_owned() }, old, new)
    }

    #[test]
    fn keeps_mode_and_bytes_and_follows_the_link() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("f");
        std::fs::write(&file, b"a \xff b a").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
        symlink("f", root.path().join("l")).unwrap();
        assert_eq!(run(&root.path().join("l"), b"a", b"cc").unwrap(), 2);
        assert_eq!(std::fs::read(&file).unwrap(), b"cc \xff b cc");
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o640);
        assert!(root.path().join("l").is_symlink());
        let inode = file.metadata().unwrap().ino();
        assert_eq!(run(&file, b"zzz", b"q").unwrap(), 0);
        assert_eq!(file.metadata().unwrap().ino(), inode, "untouched without a match");
        assert!(matches!(run(&root.path().join("none"), b"a", b"b"), Err(FileError::Missing(_))));
        assert!(matches!(run(root.path(), b"a", b"b"), Err(FileError::Invalid(_))));
        assert!(matches!(run(&file, b"", b"b"), Err(FileError::Invalid(_))));
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 2);
    }

    /// Gives one byte at a time.
    struct Drip<'a>(&'a [u8], usize);

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let length = self.1.min(self.0.len()).min(buffer.len());
            buffer[..length].copy_from_slice(&self.0[..length]);
            self.0 = &self.0[length..];
            Ok(length)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn equals_the_replacement_of_strings(text in "[ab]{0,60}", old in "[ab]{1,4}", new in "[abc]{0,3}", step in 1_usize..9) {
            let mut output = Vec::new();
            let finder = Finder::new(old.as_bytes());
            let count = substitute(&mut Drip(text.as_bytes(), step), &mut output, &finder, new.as_bytes()).unwrap();
            prop_assert_eq!(String::from_utf8(output).unwrap(), text.replace(&old, &new));
            prop_assert_eq!(count as usize, text.matches(&old).count());
        }
    }
}
