//! A local directory tree into a sandbox.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};

use futures_util::stream::{StreamExt, TryStreamExt, iter};
use osb_protocol::execd::Permission;
use tokio::sync::mpsc::unbounded_channel;

use super::tree::{Skipped, Step, Steps, Tally, TreeOptions, TreeProgress, TreeSummary};
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
    /// made. Symbolic links and special files are left out and named in the summary. Existing files are
    /// replaced, others stay. `progress` is called often.
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
        let (steps, mut told) = unbounded_channel();
        let mut sent = iter(batches(tree.files))
            .map(|batch| self.send(base, batch, options, steps.clone()))
            .buffer_unordered(options.concurrency.max(1));
        loop {
            tokio::select! {
                biased;
                Some((number, step)) = told.recv() => tally.add(number, step),
                result = sent.try_next() => if result?.is_none() { break },
            }
        }
        while let Ok((number, step)) = told.try_recv() {
            tally.add(number, step);
        }
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
            let mut upload =
                Upload::stream(path, reqwest::Body::wrap_stream(body), Some(size)).mode(file.mode);
            if let Some(owner) = &options.owner {
                upload = upload.owner(owner);
            }
            if let Some(group) = &options.group {
                upload = upload.group(group);
            }
            uploads.push(upload);
            numbers.push(number);
        }
        self.upload(uploads).await?;
        for number in numbers {
            let _ = steps.send((number, Step::Done));
        }
        Ok(())
    }
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
            } else {
                let kind = if metadata.is_symlink() { "a symbolic link" } else { "a special file" };
                tree.skipped.push(Skipped::new(path, kind));
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
        let tree = walk(dir.path()).unwrap();
        let names: Vec<&str> = tree.directories.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(names, ["a", "a/b"]);
        assert_eq!((tree.files[0].relative.as_str(), tree.files[0].size), ("a/b/f", 2));
        assert_eq!(tree.skipped, [Skipped::new("link", "a symbolic link")]);
        assert!(walk(&dir.path().join("absent")).is_err());
    }
}
