//! What copies of directory trees have in common.

use tokio::sync::mpsc::UnboundedSender;

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
    /// Their bytes.
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

    pub(super) fn add(&mut self, number: usize, step: Step) {
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
