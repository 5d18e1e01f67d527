//! Files inside a sandbox.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use osb_protocol::execd::{FileInfo, Permission, Rename, Replaced, Replacement, UploadMetadata};
use reqwest::Method;
use reqwest::header::RANGE;
use reqwest::multipart::{Form, Part};
use tokio::io::AsyncReadExt;

use crate::error::{Error, Result};
use crate::sandbox::Sandbox;
use crate::transport::{Answer, causes};

/// Slowest upload that is waited for.
const MIN_BYTES_PER_SECOND: u64 = 1 << 20;
/// Bytes read from a local file at a time.
const READ_SIZE: usize = 256 << 10;
/// How long an upload of unknown size may take.
const UNKNOWN_SIZE_LIMIT: Duration = Duration::from_secs(6 * 3600);

/// File operations on a sandbox; see [`Sandbox::files`].
#[derive(Debug, Clone, Copy)]
pub struct Files<'a> {
    sandbox: &'a Sandbox,
}

impl Sandbox {
    /// Its files.
    #[must_use]
    pub fn files(&self) -> Files<'_> {
        Files { sandbox: self }
    }
}

/// A file to put into a sandbox.
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

    /// A file whose content is read as it is sent.
    pub fn stream(path: impl Into<String>, body: impl Into<reqwest::Body>, size: Option<u64>) -> Self {
        let metadata = UploadMetadata { path: path.into(), ..UploadMetadata::default() };
        Self { metadata, body: body.into(), size }
    }

    /// A local file, read as it is sent. Must be a regular file, for its size is announced.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub async fn file(path: impl Into<String>, local: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: local.display().to_string(), source };
        let file = tokio::fs::File::open(local).await.map_err(io)?;
        let metadata = file.metadata().await.map_err(io)?;
        if !metadata.is_file() {
            return Err(Error::InvalidArgument(format!("{} is not a regular file", local.display())));
        }
        let size = metadata.len();
        let chunks = futures_util::stream::try_unfold(file.take(size), |mut file| async move {
            let mut chunk = BytesMut::with_capacity(READ_SIZE);
            let read = file.read_buf(&mut chunk).await?;
            Ok::<_, std::io::Error>((read > 0).then(|| (chunk.freeze(), file)))
        });
        Ok(Self::stream(path, reqwest::Body::wrap_stream(chunks), Some(size)))
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

/// Permission bits as they are written on the wire: their octal digits, read as a decimal number.
#[must_use]
pub fn mode_digits(mode: u32) -> u32 {
    let bits = mode & 0o777;
    (bits >> 6) * 100 + (bits >> 3 & 7) * 10 + (bits & 7)
}

impl Files<'_> {
    /// Writes one file, making missing directories.
    ///
    /// # Errors
    /// When it cannot be written or the sandbox cannot be reached.
    pub async fn write(&self, path: impl Into<String>, content: impl Into<Bytes>) -> Result<()> {
        self.upload([Upload::new(path, content)]).await
    }

    /// Writes files in one request, making missing directories. Success means that all are fully written.
    ///
    /// # Errors
    /// When one cannot be written (others may have been) or the sandbox cannot be reached.
    pub async fn upload(&self, files: impl IntoIterator<Item = Upload>) -> Result<()> {
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
        let request = self.sandbox.execd(Method::POST, &["files", "upload"]).await?.multipart(form);
        self.sandbox.transport().done(request, limit).await
    }

    /// Reads a whole file into memory.
    ///
    /// # Errors
    /// When it cannot be read or the sandbox cannot be reached.
    pub async fn read(&self, path: &str) -> Result<Bytes> {
        self.download(path).await?.bytes().await
    }

    /// Reads a file piece by piece.
    ///
    /// # Errors
    /// When it cannot be read or the sandbox cannot be reached.
    pub async fn download(&self, path: &str) -> Result<Download> {
        self.fetch(path, None).await
    }

    /// Reads `length` bytes of a file from `offset`.
    ///
    /// # Errors
    /// When the file has no such bytes, cannot be read, or the sandbox cannot be reached.
    pub async fn download_range(&self, path: &str, offset: u64, length: u64) -> Result<Download> {
        let Some(last) = offset.checked_add(length).and_then(|end| end.checked_sub(1)).filter(|_| length > 0)
        else {
            return Err(Error::InvalidArgument("the range holds no byte".to_owned()));
        };
        self.fetch(path, Some(format!("bytes={offset}-{last}"))).await
    }

    async fn fetch(&self, path: &str, range: Option<String>) -> Result<Download> {
        let mut request =
            self.sandbox.execd(Method::GET, &["files", "download"]).await?.query(&[("path", path)]);
        if let Some(range) = range {
            request = request.header(RANGE, range);
        }
        let answer = self.sandbox.transport().open(request, self.sandbox.config().request_timeout).await?;
        Ok(Download { answer })
    }

    /// Kind, size, owner, mode and times, by path. Symbolic links are not followed.
    ///
    /// # Errors
    /// When one does not exist or the sandbox cannot be reached.
    pub async fn info<P: AsRef<str>>(&self, paths: &[P]) -> Result<BTreeMap<String, FileInfo>> {
        let request = self.sandbox.execd(Method::GET, &["files", "info"]).await?.query(&repeated(paths));
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Files below `path` whose name matches the glob `pattern`.
    ///
    /// # Errors
    /// When `path` does not exist, the pattern is none, or the sandbox cannot be reached.
    pub async fn search(&self, path: &str, pattern: &str) -> Result<Vec<FileInfo>> {
        let request = self
            .sandbox
            .execd(Method::GET, &["files", "search"])
            .await?
            .query(&[("path", path), ("pattern", pattern)]);
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Entries of a directory, `depth` levels down.
    ///
    /// # Errors
    /// When it is no directory or the sandbox cannot be reached.
    pub async fn list(&self, path: &str, depth: u32) -> Result<Vec<FileInfo>> {
        let request = self
            .sandbox
            .execd(Method::GET, &["directories", "list"])
            .await?
            .query(&[("path", path), ("depth", &depth.to_string())]);
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Makes directories and what is missing above them. Existing ones are left as they are.
    ///
    /// # Errors
    /// When one cannot be made or the sandbox cannot be reached.
    pub async fn make_directories(&self, directories: &BTreeMap<String, Permission>) -> Result<()> {
        let request = self.sandbox.execd(Method::POST, &["directories"]).await?.json(directories);
        self.done(request).await
    }

    /// Makes one directory and what is missing above it.
    ///
    /// # Errors
    /// As [`Files::make_directories`].
    pub async fn make_directory(&self, path: impl Into<String>) -> Result<()> {
        self.make_directories(&BTreeMap::from([(path.into(), Permission::default())])).await
    }

    /// Removes files. Missing ones are no error.
    ///
    /// # Errors
    /// When one is a directory or the sandbox cannot be reached.
    pub async fn remove<P: AsRef<str>>(&self, paths: &[P]) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["files"]).await?.query(&repeated(paths));
        self.done(request).await
    }

    /// Removes directories with all they hold. Missing ones are no error.
    ///
    /// # Errors
    /// When one cannot be removed or the sandbox cannot be reached.
    pub async fn remove_directories<P: AsRef<str>>(&self, paths: &[P]) -> Result<()> {
        let request = self.sandbox.execd(Method::DELETE, &["directories"]).await?.query(&repeated(paths));
        self.done(request).await
    }

    /// Renames or moves. The new path must not exist.
    ///
    /// # Errors
    /// When a file does not exist, a new path does, or the sandbox cannot be reached.
    pub async fn rename(&self, renames: &[Rename]) -> Result<()> {
        let request = self.sandbox.execd(Method::POST, &["files", "mv"]).await?.json(renames);
        self.done(request).await
    }

    /// Sets modes and owners; see [`mode_digits`].
    ///
    /// # Errors
    /// When a path does not exist or the sandbox cannot be reached.
    pub async fn set_permissions(&self, permissions: &BTreeMap<String, Permission>) -> Result<()> {
        let request = self.sandbox.execd(Method::POST, &["files", "permissions"]).await?.json(permissions);
        self.done(request).await
    }

    /// Replaces text in files, everywhere it stands. Returns the number of places by path.
    ///
    /// # Errors
    /// When a file cannot be read or written or the sandbox cannot be reached.
    pub async fn replace(
        &self,
        replacements: &BTreeMap<String, Replacement>,
    ) -> Result<BTreeMap<String, u64>> {
        let request = self
            .sandbox
            .execd(Method::POST, &["files", "replace"])
            .await?
            .query(&[("verbose", "true")])
            .json(replacements);
        let answer: BTreeMap<String, Replaced> =
            self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await?;
        Ok(answer.into_iter().map(|(path, replaced)| (path, replaced.replaced_count)).collect())
    }

    async fn done(&self, request: reqwest::RequestBuilder) -> Result<()> {
        self.sandbox.transport().done(request, self.sandbox.config().request_timeout).await
    }
}

fn typed(part: Part, kind: &str) -> Result<Part> {
    part.mime_str(kind).map_err(|error| Error::InvalidArgument(format!("content type: {error}")))
}

fn repeated<P: AsRef<str>>(paths: &[P]) -> Vec<(&'static str, &str)> {
    paths.iter().map(|path| ("path", path.as_ref())).collect()
}

/// A file on its way.
#[derive(Debug)]
pub struct Download {
    answer: Answer,
}

impl Download {
    /// Bytes to come, when the daemon says.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        self.answer.response.content_length()
    }

    /// The next piece; `None` at the end. Cancel safe.
    ///
    /// # Errors
    /// When the connection breaks before all has come.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        self.answer
            .response
            .chunk()
            .await
            .map_err(|error| Error::Broken { what: self.answer.what.clone(), reason: causes(&error) })
    }

    /// All that is left.
    ///
    /// # Errors
    /// When the connection breaks before all has come.
    pub async fn bytes(self) -> Result<Bytes> {
        let Answer { what, response } = self.answer;
        response.bytes().await.map_err(|error| Error::Broken { what, reason: causes(&error) })
    }
}

#[cfg(test)]
mod tests {
    use super::mode_digits;

    #[test]
    fn modes_are_written_as_digits() {
        for (mode, digits) in [(0o644, 644), (0o755, 755), (0, 0), (0o7, 7), (0o4755, 755), (0o777, 777)] {
            assert_eq!(mode_digits(mode), digits);
        }
    }
}
