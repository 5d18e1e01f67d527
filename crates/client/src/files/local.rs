//! Files on this machine that are being written.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A file that takes its place when it is complete, and is removed when it is dropped before.
#[derive(Debug)]
pub(super) struct Part {
    path: PathBuf,
    target: PathBuf,
    kept: bool,
}

impl Part {
    /// Makes an empty file beside `target`, so that the last step is a rename. Does not yield: whoever is given up
    /// while another thread makes the file would not know of it.
    pub(super) fn create(target: &Path) -> Result<(Self, tokio::fs::File)> {
        let failed = |source| Error::Io { path: target.display().to_string(), source };
        if target.file_name().is_none() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        let path = hidden(target);
        let file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path).map_err(failed)?;
        Ok((Self { path, target: target.to_path_buf(), kept: false }, tokio::fs::File::from_std(file)))
    }

    pub(super) fn failed(&self, source: std::io::Error) -> Error {
        Error::Io { path: self.target.display().to_string(), source }
    }

    /// Where the bytes are until [`Part::keep`].
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in its place.
    pub(super) async fn keep(mut self) -> Result<()> {
        tokio::fs::rename(&self.path, &self.target).await.map_err(|source| self.failed(source))?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.kept {
            // Nothing can be done about a leftover that cannot be removed.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Makes a symbolic link, which replaces a file or a link of its name.
///
/// # Errors
/// When a directory stands there, or the link cannot be made.
#[cfg(unix)]
pub(super) fn link(target: &str, path: &Path) -> std::io::Result<()> {
    let hidden = hidden(path);
    std::os::unix::fs::symlink(target, &hidden)?;
    std::fs::rename(&hidden, path).inspect_err(|_| {
        // The first failure is the one to tell.
        let _ = std::fs::remove_file(&hidden);
    })
}

#[cfg(not(unix))]
pub(super) fn link(_: &str, _: &Path) -> std::io::Result<()> {
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "a symbolic link"))
}

/// A name beside `path` that nobody else uses.
fn hidden(path: &Path) -> PathBuf {
    path.with_file_name(format!(".opensandbox-{}", uuid::Uuid::new_v4().simple()))
}
