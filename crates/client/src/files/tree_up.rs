//! A local directory tree into a sandbox.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};

use futures_util::stream::{StreamExt, TryStreamExt, iter};
use osb_protocol::execd::{FileKind, Permission};
use tokio::sync::mpsc::unbounded_channel;

use super::tree::{Link, Skipped, Step, Steps, Tally, TreeOptions, TreeProgress, TreeSummary};
use super::upload::{Upload, chunks, open};
use super::{Files, mode_digits};
use crate::error::{Error, Result};

/// Files go up together until they have this many bytes …
const BATCH_BYTES: u64 = 8 << 20;
/// … or are this many.
const BATCH_FILES: usize = 64;
/// Directories made by one request.
const BATCH_DIRECTORIES: usize = 1000;
/// Without these the owner cannot put files in a directory.
const OWNER_RIGHTS: u32 = 0o700;

/// What a local directory holds.
#[derive(Debug, Default)]
struct Local {
    /// Parents before children.
    directories: Vec<(String, u32)>,
    files: Vec<LocalFile>,
    links: Vec<Link>,
    skipped: Vec<Skipped>,
}

#[derive(Debug, Clone)]
struct LocalFile {
    number: usize,
    relative: String,
    path: PathBuf,
    mode: u32,
    size: u64,
}

impl Files<'_> {
    /// Copies what a local directory holds into a directory of the sandbox, with modes; missing directories are
    /// made. Symbolic links that stay inside the tree are copied as links; others, and special files, are left out
    /// and named in the summary. Existing files are replaced, others stay. `progress` is called often.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::TreeOptions;
    ///
    /// let mut show = |now: opensandbox::TreeProgress<'_>| {
    ///     println!("{} of {} bytes, {}", now.bytes, now.total_bytes, now.path);
    /// };
    /// let files = sandbox.files();
    /// let done = files.upload_tree("src".as_ref(), "/app/src", &TreeOptions::default(), &mut show).await?;
    /// println!("{} files", done.files);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the local directory cannot be read, a file cannot be written (others may have been), the tree is
    /// larger than allowed, or the sandbox cannot be reached.
    pub async fn upload_tree(
        &self,
        local: &Path,
        remote: &str,
        options: &TreeOptions,
        progress: &mut (dyn FnMut(TreeProgress<'_>) + Send),
    ) -> Result<TreeSummary> {
        let root = local.to_path_buf();
        let tree = tokio::task::spawn_blocking(move || walk(&root))
            .await
            .map_err(|_| Error::InvalidArgument(format!("{} cannot be read", local.display())))??;
        let total_bytes = tree.files.iter().map(|file| file.size).sum();
        if options.max_bytes.is_some_and(|limit| total_bytes > limit) {
            return Err(Error::TooLarge { what: local.display().to_string() });
        }
        let base = remote.trim_end_matches('/');
        self.make_all(remote, base, &tree, options).await?;

        let names = tree.files.iter().map(|file| file.relative.clone()).collect();
        let mut tally = Tally::new(names, total_bytes, tree.directories.len(), tree.skipped, progress);
        let (steps, told) = unbounded_channel();
        let sent = iter(batches(tree.files))
            .map(|batch| self.send(base, batch, options, steps.clone()))
            .buffer_unordered(options.concurrency.max(1));
        tally.follow(sent, told, None, remote).await?;
        self.make_links(base, tree.links, options, &mut tally.summary).await?;
        self.close(base, &tree.directories).await?;
        Ok(tally.summary)
    }

    async fn make_all(&self, remote: &str, base: &str, tree: &Local, options: &TreeOptions) -> Result<()> {
        let permission = |mode: u32| Permission {
            mode: if mode == 0 { 0 } else { mode_digits(mode | OWNER_RIGHTS) },
            owner: options.owner.clone(),
            group: options.group.clone(),
        };
        let own = (if base.is_empty() { "/".to_owned() } else { remote.to_owned() }, permission(0));
        self.make_directories(&BTreeMap::from([own])).await?;
        for part in tree.directories.chunks(BATCH_DIRECTORIES) {
            let directories =
                part.iter().map(|(path, mode)| (format!("{base}/{path}"), permission(*mode))).collect();
            self.make_directories(&directories).await?;
        }
        Ok(())
    }

    /// Makes links, when all that they may lead to is there.
    async fn make_links(
        &self,
        base: &str,
        links: Vec<Link>,
        options: &TreeOptions,
        summary: &mut TreeSummary,
    ) -> Result<()> {
        let mut known = false;
        for part in links.chunks(BATCH_FILES) {
            // Older daemons write an empty file instead: the first link shows it.
            let (first, rest) = part.split_at(usize::from(!known));
            for links in [first, rest].into_iter().filter(|links| !links.is_empty()) {
                let upload = |link: &Link| options.apply(Upload::link(joined(base, link), &link.target));
                self.upload(links.iter().map(upload)).await?;
                if !known && !self.is_link(&joined(base, &links[0])).await? {
                    self.remove(&[joined(base, &links[0])]).await?;
                    let old = "a symbolic link, which the sandbox's daemon cannot make";
                    summary.skipped.extend(part.iter().map(|link| Skipped::new(&link.relative, old)));
                    return Ok(());
                }
                known = true;
                summary.links += links.len() as u64;
            }
        }
        Ok(())
    }

    async fn is_link(&self, path: &str) -> Result<bool> {
        Ok(self.stat(path).await?.is_some_and(|info| info.kind == FileKind::Symlink))
    }

    /// Takes the rights from directories that had to be open while their files were written.
    async fn close(&self, base: &str, directories: &[(String, u32)]) -> Result<()> {
        let closed: BTreeMap<String, Permission> = directories
            .iter()
            .filter(|(_, mode)| mode & OWNER_RIGHTS != OWNER_RIGHTS)
            .map(|(path, mode)| {
                (format!("{base}/{path}"), Permission { mode: mode_digits(*mode), ..Permission::default() })
            })
            .collect();
        if closed.is_empty() { Ok(()) } else { self.set_permissions(&closed).await }
    }

    async fn send(
        &self,
        base: &str,
        batch: Vec<LocalFile>,
        options: &TreeOptions,
        steps: Steps,
    ) -> Result<()> {
        let mut uploads = Vec::new();
        let mut numbers = Vec::new();
        for file in batch {
            let number = file.number;
            let (open, size) = match open(&file.path).await {
                Ok(found) => found,
                Err(error) => {
                    let _ =
                        steps.send((number, Step::Skipped(Skipped::new(file.relative, error.to_string()))));
                    continue;
                }
            };
            let told = steps.clone();
            let body = chunks(open, size).inspect_ok(move |chunk| {
                let _ = told.send((number, Step::Bytes(chunk.len() as u64)));
            });
            let path = format!("{base}/{}", file.relative);
            let upload = Upload::stream(path, reqwest::Body::wrap_stream(body), Some(size)).mode(file.mode);
            uploads.push(options.apply(upload));
            numbers.push(number);
        }
        self.upload(uploads).await?;
        for number in numbers {
            let _ = steps.send((number, Step::Done));
        }
        Ok(())
    }
}

fn joined(base: &str, link: &Link) -> String {
    format!("{base}/{}", link.relative)
}

fn batches(files: Vec<LocalFile>) -> Vec<Vec<LocalFile>> {
    let mut batches: Vec<Vec<LocalFile>> = Vec::new();
    let mut bytes = 0;
    for file in files {
        match batches.last_mut() {
            Some(batch) if batch.len() < BATCH_FILES && bytes + file.size <= BATCH_BYTES => {
                bytes += file.size;
                batch.push(file);
            }
            _ => {
                bytes = file.size;
                batches.push(vec![file]);
            }
        }
    }
    batches
}

fn walk(root: &Path) -> Result<Local> {
    let mut tree = Local::default();
    let mut open = vec![(root.to_path_buf(), String::new())];
    while let Some((directory, relative)) = open.pop() {
        let failed = |source| Error::Io { path: directory.display().to_string(), source };
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(&directory).map_err(failed)? {
            entries.push(entry.map_err(failed)?);
        }
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let name = entry.file_name();
            let prefix = if relative.is_empty() { String::new() } else { format!("{relative}/") };
            let Some(name) = name.to_str() else {
                let shown = format!("{prefix}{}", name.to_string_lossy());
                tree.skipped.push(Skipped::new(shown, "the name is not UTF-8"));
                continue;
            };
            let path = format!("{prefix}{name}");
            // Of the entry itself, not of what a link points to.
            let metadata = entry.metadata().map_err(failed)?;
            if metadata.is_dir() {
                tree.directories.push((path.clone(), mode_of(&metadata, 0o755)));
                open.push((entry.path(), path));
            } else if metadata.is_file() {
                tree.files.push(LocalFile {
                    number: tree.files.len(),
                    relative: path,
                    path: entry.path(),
                    mode: mode_of(&metadata, 0o644),
                    size: metadata.len(),
                });
            } else if metadata.is_symlink() {
                let target = std::fs::read_link(entry.path()).map_err(failed)?;
                let link = match target.to_str() {
                    Some(target) => Link::within(path, target.to_owned()),
                    None => Err(Skipped::new(path, "a symbolic link whose target is not UTF-8")),
                };
                match link {
                    Ok(link) => tree.links.push(link),
                    Err(skipped) => tree.skipped.push(skipped),
                }
            } else {
                tree.skipped.push(Skipped::new(path, "a special file"));
            }
        }
    }
    Ok(tree)
}

#[cfg(unix)]
fn mode_of(metadata: &Metadata, _usual: u32) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    metadata.permissions().mode() & 0o777
}

#[cfg(not(unix))]
fn mode_of(_: &Metadata, usual: u32) -> u32 {
    usual
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_go_together() {
        let file =
            |number, size| LocalFile { number, relative: String::new(), path: PathBuf::new(), mode: 0, size };
        let sizes = [1, BATCH_BYTES - 1, 1, BATCH_BYTES + 5, 0];
        let files = sizes.iter().enumerate().map(|(number, size)| file(number, *size)).collect();
        let counts: Vec<usize> = batches(files).iter().map(Vec::len).collect();
        assert_eq!(counts, [2, 1, 1, 1]);
        let many = (0..BATCH_FILES + 1).map(|number| file(number, 0)).collect();
        assert_eq!(batches(many).len(), 2);
        assert!(batches(Vec::new()).is_empty());
    }

    #[test]
    fn a_walk_names_parents_first_and_what_it_leaves_out() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/b/f"), "xy").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("../f", dir.path().join("a/b/inside")).unwrap();
        let tree = walk(dir.path()).unwrap();
        let names: Vec<&str> = tree.directories.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(names, ["a", "a/b"]);
        assert_eq!((tree.files[0].relative.as_str(), tree.files[0].size), ("a/b/f", 2));
        assert_eq!(tree.skipped, [Skipped::new("link", "a symbolic link to an absolute path")]);
        assert_eq!(tree.links, [Link { relative: "a/b/inside".to_owned(), target: "../f".to_owned() }]);
        assert!(walk(&dir.path().join("absent")).is_err());
    }
}
