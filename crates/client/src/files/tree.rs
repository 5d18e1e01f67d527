//! What copies of directory trees have in common.

use futures_util::stream::{Stream, TryStreamExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::upload::Upload;
use crate::error::{Error, Result};

/// How to copy a directory tree; see [`Files::upload_tree`](super::Files::upload_tree).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TreeOptions {
    /// Requests under way at the same time.
    pub concurrency: usize,
    /// Give up when the files are larger than this together. A sandbox may invent what it likes.
    pub max_bytes: Option<u64>,
    /// Owner of what is uploaded.
    pub owner: Option<String>,
    /// Group of what is uploaded.
    pub group: Option<String>,
}

impl TreeOptions {
    /// Gives an upload the owner of the tree.
    pub(super) fn apply(&self, mut upload: Upload) -> Upload {
        if let Some(owner) = &self.owner {
            upload = upload.owner(owner);
        }
        if let Some(group) = &self.group {
            upload = upload.group(group);
        }
        upload
    }
}

impl Default for TreeOptions {
    fn default() -> Self {
        Self { concurrency: 4, max_bytes: None, owner: None, group: None }
    }
}

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeProgress<'a> {
    /// The file that moved on, relative to the tree.
    pub path: &'a str,
    /// Files that are complete.
    pub files: u64,
    /// Files of the tree.
    pub total_files: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Bytes of the tree, as it was when the copy began.
    pub total_bytes: u64,
}

/// What was copied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeSummary {
    /// Directories, without the tree's own.
    pub directories: u64,
    /// Files.
    pub files: u64,
    /// Symbolic links.
    pub links: u64,
    /// The files' bytes.
    pub bytes: u64,
    /// What was left out.
    pub skipped: Vec<Skipped>,
}

/// Something that was not copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Relative to the tree.
    pub path: String,
    /// Why.
    pub reason: String,
}

impl Skipped {
    pub(super) fn new(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { path: path.into(), reason: reason.into() }
    }
}

/// What a transfer tells while it runs.
#[derive(Debug)]
pub(super) enum Step {
    Bytes(u64),
    Done,
    Skipped(Skipped),
}

/// Step of the file with this number.
pub(super) type Steps = UnboundedSender<(usize, Step)>;

/// A symbolic link of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) relative: String,
    pub(super) target: String,
}

impl Link {
    /// A link that stays in its tree wherever that lies: relative, and up only at its beginning, for `..` behind
    /// another link's name would lead up from where that leads.
    pub(super) fn within(relative: String, target: String) -> std::result::Result<Self, Skipped> {
        let skipped = |why: &str| Err(Skipped::new(&relative, format!("a symbolic link {why}")));
        if target.starts_with('/') {
            return skipped("to an absolute path");
        }
        let above = relative.matches('/').count();
        let ups = target.split('/').take_while(|part| *part == "..").count();
        if ups > above {
            return skipped("that leads out of the tree");
        }
        if target.is_empty() || target.contains('\0') || target.split('/').skip(ups).any(|part| part == "..")
        {
            return skipped("that may lead out of the tree");
        }
        Ok(Self { relative, target })
    }
}

/// Adds steps up.
pub(super) struct Tally<'a> {
    names: Vec<String>,
    total_bytes: u64,
    pub(super) summary: TreeSummary,
    report: &'a mut (dyn FnMut(TreeProgress<'_>) + Send),
}

impl<'a> Tally<'a> {
    /// Of a copy of the files with these names, in these numbers.
    pub(super) fn new(
        names: Vec<String>,
        total_bytes: u64,
        directories: usize,
        skipped: Vec<Skipped>,
        report: &'a mut (dyn FnMut(TreeProgress<'_>) + Send),
    ) -> Self {
        let summary = TreeSummary { directories: directories as u64, skipped, ..TreeSummary::default() };
        Self { names, total_bytes, summary, report }
    }

    /// Lets transfers run and adds up what they tell. Ends early when there are more than `max` bytes of `what`.
    pub(super) async fn follow(
        &mut self,
        mut transfers: impl Stream<Item = Result<()>> + Unpin,
        mut told: UnboundedReceiver<(usize, Step)>,
        max: Option<u64>,
        what: &str,
    ) -> Result<()> {
        loop {
            tokio::select! {
                biased;
                Some((number, step)) = told.recv() => {
                    self.add(number, step);
                    if max.is_some_and(|max| self.summary.bytes > max) {
                        return Err(Error::TooLarge { what: what.to_owned() });
                    }
                }
                result = transfers.try_next() => if result?.is_none() { break },
            }
        }
        while let Ok((number, step)) = told.try_recv() {
            self.add(number, step);
        }
        Ok(())
    }

    fn add(&mut self, number: usize, step: Step) {
        match step {
            Step::Bytes(bytes) => self.summary.bytes += bytes,
            Step::Done => self.summary.files += 1,
            Step::Skipped(skipped) => self.summary.skipped.push(skipped),
        }
        (self.report)(TreeProgress {
            path: self.names.get(number).map_or("", String::as_str),
            files: self.summary.files,
            total_files: self.names.len() as u64,
            bytes: self.summary.bytes,
            total_bytes: self.total_bytes,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_stay_in_their_tree() {
        let within =
            |relative: &str, target: &str| Link::within(relative.to_owned(), target.to_owned()).is_ok();
        for (relative, target) in [
            ("l", "f"),
            ("l", "."),
            ("a/l", ".."),
            ("a/b/l", "../../f"),
            ("l", "d/./x\n"),
            ("a/l", "../b/..c"),
            ("l", "l"),
        ] {
            assert!(within(relative, target), "{relative} -> {target}");
        }
        for (relative, target) in [
            ("l", "/etc"),
            ("l", "/"),
            ("l", ".."),
            ("a/l", "../../x"),
            // d may be a link up the tree.
            ("a/b/l", "d/../x"),
            ("a/l", ".././../x"),
            ("l", ""),
            ("l", "a\0b"),
        ] {
            assert!(!within(relative, target), "{relative} -> {target}");
        }
    }
}
