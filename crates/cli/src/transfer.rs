//! Files and trees on their way into a sandbox and out of it, with bars for people.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use bytes::BytesMut;
use futures_util::stream::try_unfold;
use indicatif::{HumanBytes, ProgressBar};
use osb_client::{Download, FileKind, Sandbox, TreeOptions, TreeProgress, TreeSummary, Upload};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::output::printable;
use crate::progress;
use crate::streams::Streams;

/// Bytes read from a local file at a time.
const READ_SIZE: usize = 256 << 10;
/// Things left out that are named; of more only the number is told.
const SKIPPED_SHOWN: usize = 5;

/// Mode and owner of what is uploaded.
#[derive(Debug, Clone, Default)]
pub(crate) struct Access {
    pub(crate) mode: Option<u32>,
    pub(crate) owner: Option<String>,
    pub(crate) group: Option<String>,
}

impl Access {
    pub(crate) fn apply(&self, mut upload: Upload) -> Upload {
        if let Some(mode) = self.mode {
            upload = upload.mode(mode);
        }
        if let Some(owner) = &self.owner {
            upload = upload.owner(owner);
        }
        if let Some(group) = &self.group {
            upload = upload.group(group);
        }
        upload
    }
}

/// What was moved.
#[derive(Debug)]
pub(crate) enum Moved {
    File(u64),
    Tree(TreeSummary),
}

impl Moved {
    /// In words.
    pub(crate) fn told(&self) -> String {
        match self {
            Self::File(bytes) => HumanBytes(*bytes).to_string(),
            Self::Tree(summary) => {
                let files = if summary.files == 1 { "file" } else { "files" };
                let links = match summary.links {
                    0 => String::new(),
                    1 => ", 1 link".to_owned(),
                    more => format!(", {more} links"),
                };
                format!("{} {files}{links}, {}", summary.files, HumanBytes(summary.bytes))
            }
        }
    }

    /// Says what stayed behind.
    pub(crate) async fn note_skipped(&self, streams: &mut Streams) {
        let Self::Tree(summary) = self else { return };
        for skipped in summary.skipped.iter().take(SKIPPED_SHOWN) {
            let text = format!("left out: {}: {}", skipped.path, skipped.reason);
            streams.note(&printable(&text)).await;
        }
        if let Some(more) = summary.skipped.len().checked_sub(SKIPPED_SHOWN).filter(|more| *more > 0) {
            streams.note(&format!("left out: {more} more")).await;
        }
    }
}

/// Copies a file to `remote`, or with `trees` a directory with all it holds.
pub(crate) async fn upload(
    sandbox: &Sandbox,
    local: &Path,
    remote: &str,
    trees: bool,
    access: &Access,
    streams: &Streams,
) -> anyhow::Result<Moved> {
    let named = || local.display().to_string();
    let metadata = tokio::fs::metadata(local).await.with_context(named)?;
    if metadata.is_dir() {
        if !trees {
            bail!("{} is a directory; -r copies it with all it holds", local.display());
        }
        if access.mode.is_some() {
            bail!("--mode is for a file; the files of a directory keep theirs");
        }
        let mut options = TreeOptions::default();
        options.owner.clone_from(&access.owner);
        options.group.clone_from(&access.group);
        let bar = progress::bytes(Some(0), &named(), streams);
        let mut report = |now: TreeProgress<'_>| show(&bar, now);
        let summary = sandbox.files().upload_tree(local, remote, &options, &mut report).await?;
        bar.finish_and_clear();
        return Ok(Moved::Tree(summary));
    }
    if !metadata.is_file() {
        bail!("{} is neither a file nor a directory", local.display());
    }
    let size = metadata.len();
    let file = tokio::fs::File::open(local).await.with_context(named)?.take(size);
    let bar = progress::bytes(Some(size), &named(), streams);
    let moving = bar.clone();
    let chunks = try_unfold(file, move |mut file| {
        let bar = moving.clone();
        async move {
            let mut chunk = BytesMut::with_capacity(READ_SIZE);
            let read = file.read_buf(&mut chunk).await?;
            bar.inc(read as u64);
            Ok::<_, std::io::Error>((read > 0).then(|| (chunk.freeze(), file)))
        }
    });
    let upload = Upload::stream(remote, reqwest::Body::wrap_stream(chunks), Some(size));
    sandbox.files().upload([access.apply(upload)]).await?;
    bar.finish_and_clear();
    Ok(Moved::File(size))
}

/// Copies a file to `local`, or with `trees` a directory with all it holds.
pub(crate) async fn download(
    sandbox: &Sandbox,
    remote: &str,
    local: &Path,
    trees: bool,
    streams: &Streams,
) -> anyhow::Result<Moved> {
    let mut mode = None;
    if trees {
        let infos = sandbox.files().info(&[remote]).await?;
        let info = infos.into_values().next().with_context(|| format!("nothing is told of {remote}"))?;
        if info.kind == FileKind::Directory {
            let bar = progress::bytes(Some(0), remote, streams);
            let mut report = |now: TreeProgress<'_>| show(&bar, now);
            let options = TreeOptions::default();
            let summary = sandbox.files().download_tree(remote, local, &options, &mut report).await?;
            bar.finish_and_clear();
            return Ok(Moved::Tree(summary));
        }
        // On the wire the octal digits are read as a decimal number.
        mode = u32::from_str_radix(&info.mode.to_string(), 8).ok();
    }
    let download = sandbox.files().download(remote).await?;
    let bar = progress::bytes(download.size(), remote, streams);
    let bytes = to_file(download, local, mode, &bar).await.with_context(|| local.display().to_string())?;
    bar.finish_and_clear();
    Ok(Moved::File(bytes))
}

fn show(bar: &ProgressBar, now: TreeProgress<'_>) {
    bar.set_length(now.total_bytes);
    bar.set_position(now.bytes);
    bar.set_message(printable(now.path));
}

/// Writes to standard output.
pub(crate) async fn to_stdout(mut download: Download, streams: &mut Streams) -> anyhow::Result<()> {
    while let Some(chunk) = download.chunk().await? {
        streams.stdout.write_all(&chunk).await?;
    }
    Ok(streams.stdout.flush().await?)
}

/// Writes text to a terminal. A terminal obeys control characters, and the file is the sandbox's: what is not text
/// is refused before it is shown.
pub(crate) async fn to_terminal(
    mut download: Download,
    path: &str,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let mut text = Text::default();
    while let Some(chunk) = download.chunk().await? {
        let shown = text.next(&chunk).with_context(|| no_text(path))?;
        streams.out(shown.as_bytes()).await?;
    }
    text.cut.is_empty().then_some(()).with_context(|| no_text(path))
}

fn no_text(path: &str) -> String {
    format!(
        "{path} is not plain text, and a terminal obeys what it is sent: pass it on, as with `| less` or `> FILE`"
    )
}

/// Text that comes in pieces, cut anywhere.
#[derive(Debug, Default)]
struct Text {
    /// Bytes of a letter whose others are to come.
    cut: Vec<u8>,
}

impl Text {
    /// The whole letters there are; `None` when these are no text.
    fn next(&mut self, piece: &[u8]) -> Option<String> {
        let mut bytes = std::mem::take(&mut self.cut);
        bytes.extend_from_slice(piece);
        let whole = match std::str::from_utf8(&bytes) {
            Ok(_) => bytes.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => return None,
        };
        self.cut = bytes.split_off(whole);
        let text = String::from_utf8(bytes).ok()?;
        let obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t' | '\r');
        (!text.chars().any(obeyed)).then_some(text)
    }
}

/// Writes beside the target and renames, so that the target is either as before or complete. An existing file's
/// mode stays; a new one gets `mode`. What is not a regular file (a pipe, a device) is written to directly.
async fn to_file(
    mut download: Download,
    target: &Path,
    mode: Option<u32>,
    bar: &ProgressBar,
) -> anyhow::Result<u64> {
    let existing = match tokio::fs::metadata(target).await {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    if existing.as_ref().is_some_and(std::fs::Metadata::is_dir) {
        bail!("is a directory; name the file");
    }
    if existing.as_ref().is_some_and(|metadata| !metadata.is_file()) {
        let mut file = tokio::fs::OpenOptions::new().write(true).open(target).await?;
        return copy(&mut download, &mut file, bar).await;
    }
    target.file_name().context("is no file name")?;
    let beside =
        target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    // Removed when it is dropped, by a failure or a signal; the usual mode of new files.
    let partial = tempfile::Builder::new()
        .prefix(".osb-")
        .suffix(".part")
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(beside)?;
    let mut file = tokio::fs::File::from_std(partial.reopen()?);
    let mode = mode.map(|mode| std::fs::Permissions::from_mode(mode & 0o777));
    if let Some(permissions) = existing.map(|metadata| metadata.permissions()).or(mode) {
        file.set_permissions(permissions).await?;
    }
    let bytes = copy(&mut download, &mut file, bar).await?;
    partial.persist(target).map_err(|error| error.error)?;
    Ok(bytes)
}

async fn copy(download: &mut Download, file: &mut tokio::fs::File, bar: &ProgressBar) -> anyhow::Result<u64> {
    let mut bytes = 0;
    while let Some(chunk) = download.chunk().await? {
        file.write_all(&chunk).await?;
        bar.inc(chunk.len() as u64);
        bytes += chunk.len() as u64;
    }
    file.flush().await?;
    Ok(bytes)
}

/// Whether the path, as a person writes it, means what is inside a directory and not the directory.
pub(crate) fn means_content(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes == b"." || bytes.ends_with(b"/.")
}

/// A path in a sandbox below another.
pub(crate) fn joined(directory: &str, name: &str) -> String {
    format!("{}/{name}", directory.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        assert_eq!(joined("/a/", "b"), "/a/b");
        assert_eq!(joined("/", "b"), "/b");
        assert!(means_content(Path::new("a/.")) && means_content(Path::new(".")));
        assert!(!means_content(Path::new("a/")) && !means_content(Path::new("a.")));
    }

    #[test]
    fn words() {
        let summary = TreeSummary { files: 1, bytes: 2048, ..TreeSummary::default() };
        assert_eq!(Moved::Tree(summary).told(), "1 file, 2.00 KiB");
        let summary = TreeSummary { files: 2, links: 2, ..TreeSummary::default() };
        assert_eq!(Moved::Tree(summary).told(), "2 files, 2 links, 0 B");
    }

    #[test]
    fn text_may_be_cut_anywhere_and_has_no_control_characters() {
        let mut text = Text::default();
        let pieces: Vec<Option<String>> =
            "a\té\r\n日".as_bytes().iter().map(|byte| text.next(&[*byte])).collect();
        let whole: Option<Vec<String>> = pieces.into_iter().collect();
        assert_eq!(whole.unwrap().concat(), "a\té\r\n日");
        for bad in [&b"\x1b[31m"[..], b"\0", b"\xff", b"\xc2\x9b", b"a\x7f", b"\xe6A"] {
            assert_eq!(Text::default().next(bad), None, "{bad:?}");
        }
    }
}
