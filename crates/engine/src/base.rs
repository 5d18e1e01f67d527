//! What the engine itself puts into every sandbox: the daemon's executable, sealed, and a layer with mount
//! points and the files of `/opt/opensandbox`.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, SealFlags};
use sha2::{Digest, Sha256};

use crate::config::ExecdSource;
use crate::error::StartError;

/// Mount points and directories that every sandbox has, whatever its image. Being in the topmost layer they are
/// directories even if the image has links in their place.
const DIRECTORIES: [(&str, u32); 7] = [
    ("proc", 0o755),
    ("sys", 0o755),
    ("dev", 0o755),
    ("run", 0o755),
    ("tmp", 0o1777),
    ("opt", 0o755),
    ("opt/opensandbox", 0o755),
];

const BOOTSTRAP: &str = include_str!("bootstrap.sh");

/// Below the data directory.
const DIR: &str = "base";

/// The base layer and the daemon.
#[derive(Debug)]
pub(crate) struct Base {
    /// Topmost lower layer of every sandbox's root.
    pub(crate) layer: PathBuf,
    /// The daemon, in memory that nothing can change.
    pub(crate) execd: File,
}

impl Base {
    /// Makes the layer for this daemon, or finds it.
    pub(crate) fn set_up(data_dir: &Path, source: &ExecdSource) -> Result<Self, StartError> {
        let read;
        let bytes = match source {
            ExecdSource::Bytes(bytes) => *bytes,
            ExecdSource::Path(path) => {
                read = std::fs::read(path)
                    .map_err(StartError::io(format!("read the sandbox daemon '{}'", path.display())))?;
                &read
            }
        };
        if !bytes.starts_with(b"\x7fELF") {
            return Err(StartError::Setting("the sandbox daemon is not an executable".to_owned()));
        }
        let execd = sealed(bytes).map_err(StartError::io("keep the sandbox daemon in memory"))?;
        let layer = layer(&data_dir.join(DIR), bytes).map_err(StartError::io("make the base layer"))?;
        Ok(Self { layer, execd })
    }

    /// Removes the layers of other daemons. Not while sandboxes stand on them.
    pub(crate) fn remove_others(&self) {
        let Some(dir) = self.layer.parent() else { return };
        let Ok(entries) = std::fs::read_dir(dir) else { return };
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| *path != self.layer) {
            // Ours alone, so nothing hostile lies in it.
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

/// The bytes in a memory file whose content, size and seals are final.
fn sealed(bytes: &[u8]) -> io::Result<File> {
    // Kernels before 6.3 do not know the flag, and have executable memory files by default.
    const MFD_EXEC: u32 = 0x10;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("execd", flags | MemfdFlags::from_bits_retain(MFD_EXEC))
        .or_else(|_| rustix::fs::memfd_create("execd", flags))?;
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(0o555))?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )?;
    Ok(file)
}

fn layer(dir: &Path, execd: &[u8]) -> io::Result<PathBuf> {
    let mut hash = Sha256::new();
    hash.update(execd);
    hash.update(BOOTSTRAP);
    let name: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let done = dir.join(&name);
    if done.is_dir() {
        return Ok(done);
    }
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let part = dir.join(format!("{name}.part"));
    match std::fs::remove_dir_all(&part) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::create_dir(&part)?;
    std::fs::set_permissions(&part, Permissions::from_mode(0o755))?;
    for (name, mode) in DIRECTORIES {
        let path = part.join(name);
        std::fs::create_dir(&path)?;
        std::fs::set_permissions(&path, Permissions::from_mode(mode))?;
    }
    for (name, bytes) in [("execd", execd), ("bootstrap.sh", BOOTSTRAP.as_bytes())] {
        let path = part.join("opt/opensandbox").join(name);
        let mut file = File::create(&path)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(0o755))?;
        // The rename below must not be seen before the content after a crash.
        file.sync_all()?;
    }
    std::fs::rename(&part, &done)?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn layer_is_made_once_and_the_daemon_cannot_be_changed() {
        let dir = tempfile::tempdir().unwrap();
        let source = ExecdSource::Bytes(b"\x7fELF and so on");
        let base = Base::set_up(dir.path(), &source).unwrap();
        let again = Base::set_up(dir.path(), &source).unwrap();
        assert_eq!(base.layer, again.layer);
        let mode =
            |path: &str| std::fs::metadata(base.layer.join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("tmp"), mode("proc"), mode("opt/opensandbox/execd")), (0o1777, 0o755, 0o755));

        let mut execd = base.execd.try_clone().unwrap();
        assert!(execd.write_all(b"x").is_err());
        assert!(execd.set_len(0).is_err());
        let mut text = String::new();
        std::io::Seek::rewind(&mut execd).unwrap();
        execd.read_to_string(&mut text).unwrap();
        assert_eq!(text, "\u{7f}ELF and so on");

        let other = Base::set_up(dir.path(), &ExecdSource::Bytes(b"\x7fELF2")).unwrap();
        other.remove_others();
        assert!(!base.layer.exists() && other.layer.exists());
        assert!(Base::set_up(dir.path(), &ExecdSource::Bytes(b"#!/bin/sh")).is_err());
    }
}
