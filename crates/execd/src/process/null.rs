//! What is empty: `/dev/null`, or something like it in a root file system that has no devices.

use std::fs::File;
use std::io;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Opens `/dev/null`. Where there is none, or none that may be opened, gives a file that is empty for good: reading
/// it ends at once, and what is written to it is refused instead of swallowed.
///
/// # Errors
/// There is no descriptor or memory left.
pub fn open() -> io::Result<File> {
    match File::options().read(true).write(true).open("/dev/null") {
        Err(error) if is_absent(&error) => empty(),
        result => result,
    }
}

/// Whether another attempt would fail as well: there is no such device, or not for this process.
fn is_absent(error: &io::Error) -> bool {
    let absent =
        [libc::ENOENT, libc::ENOTDIR, libc::EACCES, libc::EPERM, libc::ENXIO, libc::ENODEV, libc::EROFS];
    error.raw_os_error().is_some_and(|errno| absent.contains(&errno))
}

fn empty() -> io::Result<File> {
    let file = memfd_create(c"null", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn both_are_empty() {
        for mut file in [open().unwrap(), empty().unwrap()] {
            assert_eq!(file.read(&mut [0; 8]).unwrap(), 0);
        }
        assert!(open().unwrap().write_all(b"swallowed").is_ok());
        assert!(empty().unwrap().write_all(b"refused").is_err());
    }
}
