//! Files on their way into a sandbox.

use std::path::Path;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::Stream;
use osb_protocol::execd::UploadMetadata;
use reqwest::Method;
use reqwest::multipart::{Form, Part};
use tokio::io::AsyncReadExt;

use super::{Files, mode_digits};
use crate::error::{Error, Result};

/// Slowest upload that is waited for.
const MIN_BYTES_PER_SECOND: u64 = 1 << 20;
/// Bytes read from a local file at a time.
const READ_SIZE: usize = 256 << 10;
/// How long an upload of unknown size may take.
const UNKNOWN_SIZE_LIMIT: Duration = Duration::from_secs(6 * 3600);

/// A file to put into a sandbox.
///
/// ```no_run
/// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
/// use opensandbox::Upload;
///
/// let script = Upload::new("/app/run.sh", "echo hello\n").mode(0o755);
/// let data = Upload::file("/app/data.csv", "data.csv".as_ref()).await?;
/// sandbox.files().upload([script, data]).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "pass it to `Files::upload`"]
pub struct Upload {
    metadata: UploadMetadata,
    body: reqwest::Body,
    size: Option<u64>,
}

impl Upload {
    /// A file with this content.
    pub fn new(path: impl Into<String>, content: impl Into<Bytes>) -> Self {
        let content = content.into();
        let size = content.len() as u64;
        Self::stream(path, reqwest::Body::from(content), Some(size))
    }

    /// A file whose content is read as it is sent; see [`reqwest::Body::wrap_stream`]. Should there be fewer or
    /// more bytes than `size`, the upload fails.
    pub fn stream(path: impl Into<String>, body: impl Into<reqwest::Body>, size: Option<u64>) -> Self {
        let metadata = UploadMetadata { path: path.into(), ..UploadMetadata::default() };
        Self { metadata, body: body.into(), size }
    }

    /// A local file, read as it is sent. Must be a regular file, for its size is announced.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub async fn file(path: impl Into<String>, local: &Path) -> Result<Self> {
        let (file, size) = open(local).await?;
        Ok(Self::stream(path, reqwest::Body::wrap_stream(chunks(file, size)), Some(size)))
    }

    /// A symbolic link. Daemons of OpenSandbox 1.1.1 write an empty file instead.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::Upload;
    ///
    /// sandbox.files().upload([Upload::link("/app/current", "releases/7")]).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn link(path: impl Into<String>, target: impl Into<String>) -> Self {
        let mut upload = Self::new(path, Bytes::new());
        upload.metadata.link_target = Some(target.into());
        upload
    }

    /// Permission bits, as `0o644`.
    pub fn mode(mut self, mode: u32) -> Self {
        self.metadata.mode = Some(mode_digits(mode));
        self
    }

    /// Owner, by name or number.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.metadata.owner = Some(owner.into());
        self
    }

    /// Group, by name or number.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.metadata.group = Some(group.into());
        self
    }
}

/// Opens a regular file and tells its size.
pub(super) async fn open(local: &Path) -> Result<(tokio::fs::File, u64)> {
    let io = |source| Error::Io { path: local.display().to_string(), source };
    let file = tokio::fs::File::open(local).await.map_err(io)?;
    let metadata = file.metadata().await.map_err(io)?;
    if !metadata.is_file() {
        return Err(Error::InvalidArgument(format!("{} is not a regular file", local.display())));
    }
    Ok((file, metadata.len()))
}

/// The first `size` bytes of a file, piece by piece.
pub(super) fn chunks(
    file: tokio::fs::File,
    size: u64,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    futures_util::stream::try_unfold(file.take(size), |mut file| async move {
        let mut chunk = BytesMut::with_capacity(READ_SIZE);
        let read = file.read_buf(&mut chunk).await?;
        Ok((read > 0).then(|| (chunk.freeze(), file)))
    })
}

impl Files<'_> {
    /// Writes one file, making missing directories.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.files().write("/tmp/note.txt", "some text").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it cannot be written or the sandbox cannot be reached.
    pub async fn write(&self, path: impl Into<String>, content: impl Into<Bytes>) -> Result<()> {
        self.upload([Upload::new(path, content)]).await
    }

    /// Writes files in one request, making missing directories. Success means that all are fully written. No
    /// files are no request.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::Upload;
    ///
    /// let files = [("/app/a.py", "print(1)"), ("/app/b.py", "print(2)")];
    /// sandbox.files().upload(files.map(|(path, text)| Upload::new(path, text))).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When one cannot be written (others may have been) or the sandbox cannot be reached.
    pub async fn upload(&self, files: impl IntoIterator<Item = Upload>) -> Result<()> {
        let mut files = files.into_iter().peekable();
        if files.peek().is_none() {
            return Ok(());
        }
        let mut form = Form::new();
        let mut total = Some(0_u64);
        for Upload { metadata, body, size } in files {
            let json = serde_json::to_vec(&metadata)
                .map_err(|error| Error::InvalidArgument(format!("metadata: {error}")))?;
            let name = metadata.path.rsplit('/').next().unwrap_or_default().to_owned();
            let file = match size {
                Some(size) => Part::stream_with_length(body, size),
                None => Part::stream(body),
            };
            form = form
                .part("metadata", typed(Part::bytes(json).file_name("metadata"), "application/json")?)
                .part("file", typed(file.file_name(name), "application/octet-stream")?);
            total = total.zip(size).map(|(total, size)| total.saturating_add(size));
        }
        let limit = match total {
            Some(total) => {
                self.sandbox.config().request_timeout + Duration::from_secs(total / MIN_BYTES_PER_SECOND)
            }
            None => UNKNOWN_SIZE_LIMIT,
        };
        let request = self.request(Method::POST, &["files", "upload"]).await?.multipart(form);
        self.sandbox.transport().done(request, limit).await
    }
}

fn typed(part: Part, kind: &str) -> Result<Part> {
    part.mime_str(kind).map_err(|error| Error::InvalidArgument(format!("content type: {error}")))
}
