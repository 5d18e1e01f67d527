//! A directory tree out of a sandbox. What the sandbox says is not believed: names are checked before anything
//! is written, and links never followed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use futures_util::stream::{StreamExt, iter};
use osb_protocol::execd::{FileInfo, FileKind};
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc::unbounded_channel;

use super::local::{self, Part};
use super::tree::{Link, Skipped, Step, Steps, Tally, TreeOptions, TreeProgress, TreeSummary};
use super::{Files, mode_bits};
use crate::error::{Error, Result};

/// Levels asked for at a time.
const DEPTH: u32 = 8;
/// Most entries of one tree.
const MAX_ENTRIES: usize = 1 << 20;

#[derive(Debug, Default)]
struct Remote {
    /// Parents before children.
    directories: Vec<(String, u32)>,
    files: Vec<RemoteFile>,
    links: Vec<Link>,
    skipped: Vec<Skipped>,
}

#[derive(Debug, Clone)]
struct RemoteFile {
    number: usize,
    relative: String,
    mode: u32,
    size: u64,
}

impl Files<'_> {
    /// Copies what a directory of the sandbox holds into a local directory, with modes; missing directories are
    /// made. Symbolic links that stay inside the tree are copied as links; others, and special files, are left out
    /// and named in the summary, as are files that vanish meanwhile. Existing files are replaced, each when its new content is complete; others stay.
    ///
    /// Nothing outside of `local` is written, whatever the sandbox answers.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::TreeOptions;
    ///
    /// let mut limits = TreeOptions::default();
    /// limits.max_bytes = Some(1 << 30);
    /// let files = sandbox.files();
    /// let done = files.download_tree("/app/out", "out".as_ref(), &limits, &mut |_| {}).await?;
    /// println!("{} files, {} left out", done.files, done.skipped.len());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the directory cannot be read, a local file cannot be written (others may have been), the tree is
    /// larger than allowed, or the sandbox cannot be reached.
    pub async fn download_tree(
        &self,
        remote: &str,
        local: &Path,
        options: &TreeOptions,
        progress: &mut (dyn FnMut(TreeProgress<'_>) + Send),
    ) -> Result<TreeSummary> {
        let base = remote.trim_end_matches('/');
        let tree = self.listing(remote, base).await?;
        let total_bytes = tree.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.size));
        if options.max_bytes.is_some_and(|limit| total_bytes > limit) {
            return Err(Error::TooLarge { what: remote.to_owned() });
        }
        make_directories(local, tree.directories.iter().map(|(path, _)| path.as_str())).await?;
        // Of these no directory may have been told of.
        let names = tree.files.iter().map(|file| &file.relative);
        let all = names.chain(tree.links.iter().map(|link| &link.relative));
        let parents = all.filter_map(|relative| Some(relative.rsplit_once('/')?.0));
        make_directories(local, parents).await?;

        let names = tree.files.iter().map(|file| file.relative.clone()).collect();
        let mut tally = Tally::new(names, total_bytes, tree.directories.len(), tree.skipped, progress);
        let (steps, told) = unbounded_channel();
        let fetched = iter(tree.files)
            .map(|file| self.fetch_file(base, local, file, steps.clone()))
            .buffer_unordered(options.concurrency.max(1));
        tally.follow(fetched, told, options.max_bytes, remote).await?;
        // Last, so that nothing is ever written through one of them.
        for link in tree.links {
            match local::link(&link.target, &local.join(&link.relative)) {
                Ok(()) => tally.summary.links += 1,
                Err(error) => tally.summary.skipped.push(Skipped::new(link.relative, error.to_string())),
            }
        }
        set_modes(local, &tree.directories).await?;
        Ok(tally.summary)
    }

    /// All entries below `remote`.
    async fn listing(&self, remote: &str, base: &str) -> Result<Remote> {
        let mut tree = Remote::default();
        let mut seen = HashSet::new();
        let mut open = vec![if base.is_empty() { "/".to_owned() } else { remote.to_owned() }];
        while let Some(directory) = open.pop() {
            let bottom = relative(base, &directory).map_or(0, |path| depth(&path)) + DEPTH as usize;
            for entry in self.list(&directory, DEPTH).await? {
                let Some(path) = relative(base, &entry.path) else {
                    return Err(Error::Unexpected {
                        call: "GET /directories/list".into(),
                        reason: format!("the entry {:?} is not below it", entry.path),
                    });
                };
                if !seen.insert(path.clone()) {
                    continue;
                }
                if seen.len() > MAX_ENTRIES {
                    return Err(Error::TooLarge { what: remote.to_owned() });
                }
                if entry.kind == FileKind::Directory && depth(&path) == bottom {
                    open.push(entry.path.clone());
                }
                tree.add(path, &entry);
            }
        }
        Ok(tree)
    }

    async fn fetch_file(&self, base: &str, local: &Path, file: RemoteFile, steps: Steps) -> Result<()> {
        let RemoteFile { number, relative, mode, .. } = file;
        let mut download = match self.download(&format!("{base}/{relative}")).await {
            Ok(download) => download,
            // Gone, or not to be read: of a running machine that is no reason to give up all others.
            Err(Error::Api(error)) => {
                let _ = steps.send((number, Step::Skipped(Skipped::new(relative, error.message))));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let target = local.join(&relative);
        let (part, mut out) = Part::create(&target)?;
        while let Some(piece) = download.chunk().await? {
            out.write_all(&piece).await.map_err(|source| part.failed(source))?;
            let _ = steps.send((number, Step::Bytes(piece.len() as u64)));
        }
        out.flush().await.map_err(|source| part.failed(source))?;
        drop(out);
        set_mode(part.path(), mode).await?;
        part.keep().await?;
        let _ = steps.send((number, Step::Done));
        Ok(())
    }
}

impl Remote {
    fn add(&mut self, path: String, entry: &FileInfo) {
        match entry.kind {
            FileKind::Directory => self.directories.push((path, mode_bits(entry.mode))),
            FileKind::File => self.files.push(RemoteFile {
                number: self.files.len(),
                relative: path,
                mode: mode_bits(entry.mode),
                size: entry.size,
            }),
            FileKind::Symlink => {
                let link = match entry.link_target.clone() {
                    Some(target) => Link::within(path, target),
                    None => Err(Skipped::new(
                        path,
                        "a symbolic link of which the daemon does not tell the target",
                    )),
                };
                match link {
                    Ok(link) => self.links.push(link),
                    Err(skipped) => self.skipped.push(skipped),
                }
            }
            FileKind::Other => self.skipped.push(Skipped::new(path, "a special file")),
        }
    }
}

/// The part of `path` below `base`, when that is what it is: no step up, nothing empty, nothing absolute.
fn relative(base: &str, path: &str) -> Option<String> {
    let rest = path.strip_prefix(base)?.strip_prefix('/')?;
    // A backslash is a letter in names of Unix, which systemd's units have, and parts names on Windows.
    let separates = |letter| letter == '\0' || (cfg!(windows) && letter == '\\');
    let plain = |name: &str| !matches!(name, "" | "." | "..") && !name.contains(separates);
    rest.split('/').all(plain).then(|| rest.to_owned())
}

fn depth(relative: &str) -> usize {
    relative.split('/').count()
}

/// Makes the directory and those below it. Where a link or a file stands instead, that is an error: what it
/// leads to is not the sandbox's to write.
async fn make_directories(local: &Path, directories: impl Iterator<Item = &str>) -> Result<()> {
    let failed = |path: &Path, source| Error::Io { path: path.display().to_string(), source };
    tokio::fs::create_dir_all(local).await.map_err(|source| failed(local, source))?;
    let mut made = HashSet::new();
    for relative in directories {
        let mut path = PathBuf::from(local);
        for name in relative.split('/') {
            path.push(name);
            if !made.insert(path.clone()) {
                continue;
            }
            match tokio::fs::symlink_metadata(&path).await {
                Ok(found) if found.is_dir() => {}
                Ok(_) => return Err(failed(&path, std::io::ErrorKind::NotADirectory.into())),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    tokio::fs::create_dir(&path).await.map_err(|source| failed(&path, source))?;
                }
                Err(source) => return Err(failed(&path, source)),
            }
        }
    }
    Ok(())
}

async fn set_modes(local: &Path, directories: &[(String, u32)]) -> Result<()> {
    // Children first, while their parents may still be entered.
    for (relative, mode) in directories.iter().rev() {
        set_mode(&local.join(relative), *mode).await?;
    }
    Ok(())
}

#[cfg(unix)]
async fn set_mode(path: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    tokio::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .await
        .map_err(|source| Error::Io { path: path.display().to_string(), source })
}

#[cfg(not(unix))]
async fn set_mode(_: &Path, _: u32) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_below_the_directory_are_taken() {
        for (base, path, expected) in [
            ("/a", "/a/b", Some("b")),
            ("", "/etc/x", Some("etc/x")),
            ("/a", "/a", None),
            ("/a", "/ab", None),
            ("/a", "/b/c", None),
            ("/a", "/a/../b", None),
            ("/a", "/a/b/..", None),
            ("/a", "/a//etc", None),
            ("/a", "/a/b/", None),
            ("/a", "/a/./b", None),
            ("/a", "/a/b\0c", None),
            ("/a", "/a/..\\b", if cfg!(windows) { None } else { Some("..\\b") }),
        ] {
            assert_eq!(relative(base, path).as_deref(), expected, "{base} {path}");
        }
    }

    #[tokio::test]
    async fn links_in_the_way_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("a")).unwrap();
        assert!(make_directories(dir.path(), ["a/b"].into_iter()).await.is_err());
        assert!(std::fs::read_dir(outside.path()).unwrap().next().is_none());
    }
}
