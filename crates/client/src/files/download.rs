//! Files on their way out of a sandbox.

use std::path::Path;

use bytes::Bytes;
use futures_util::stream::{Stream, try_unfold};
use reqwest::Method;
use reqwest::header::RANGE;
use tokio::io::AsyncWriteExt;

use super::Files;
use super::local::Part;
use crate::error::{Error, Result};
use crate::transport::Answer;

impl Files<'_> {
    /// Reads a whole file into memory.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let bytes = sandbox.files().read("/tmp/picture.png").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it cannot be read or the sandbox cannot be reached.
    pub async fn read(&self, path: &str) -> Result<Bytes> {
        self.download(path).await?.bytes().await
    }

    /// Reads a whole file as UTF-8 text.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// println!("{}", sandbox.files().read_text("/etc/os-release").await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Files::read`], and when it is no UTF-8.
    pub async fn read_text(&self, path: &str) -> Result<String> {
        String::from_utf8(self.read(path).await?.into())
            .map_err(|error| Error::InvalidArgument(format!("{path} is no text: {error}")))
    }

    /// Reads lines of a text file: `count` of them (`None`: all) from line `first`, counted from 1. They come
    /// without a line end after the last.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let head = sandbox.files().read_lines("/var/log/app.log", 1, Some(10)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Files::read`].
    pub async fn read_lines(&self, path: &str, first: u64, count: Option<u64>) -> Result<String> {
        let mut request = self
            .request(Method::GET, &["files", "download"])
            .await?
            .query(&[("path", path), ("offset", &first.to_string())]);
        if let Some(count) = count {
            request = request.query(&[("limit", count)]);
        }
        self.sandbox.transport().text(request, self.sandbox.config().request_timeout).await
    }

    /// Reads a file piece by piece.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let mut download = sandbox.files().download("/tmp/big.bin").await?;
    /// let mut size = 0;
    /// while let Some(piece) = download.chunk().await? {
    ///     size += piece.len();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it cannot be read or the sandbox cannot be reached.
    pub async fn download(&self, path: &str) -> Result<Download> {
        self.fetch(path, None).await
    }

    /// Reads `length` bytes of a file from `offset`.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let magic = sandbox.files().download_range("/bin/true", 0, 4).await?.bytes().await?;
    /// assert_eq!(&magic[..], b"\x7fELF");
    /// # Ok(())
    /// # }
    /// ```
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

    /// Reads a file from `offset` to its end, for going on with a download that broke off.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let have = 1_000_000;
    /// let rest = sandbox.files().download_from("/tmp/big.bin", have).await?.bytes().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Files::download_range`].
    pub async fn download_from(&self, path: &str, offset: u64) -> Result<Download> {
        self.fetch(path, (offset > 0).then(|| format!("bytes={offset}-"))).await
    }

    async fn fetch(&self, path: &str, range: Option<String>) -> Result<Download> {
        let mut request = self.request(Method::GET, &["files", "download"]).await?.query(&[("path", path)]);
        if let Some(range) = range {
            request = request.header(RANGE, range);
        }
        let answer = self.sandbox.transport().open(request, self.sandbox.config().request_timeout).await?;
        Ok(Download { answer })
    }
}

/// A file on its way; made by [`Files::download`].
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
        self.answer.chunk().await
    }

    /// All that is left.
    ///
    /// # Errors
    /// When the connection breaks before all has come.
    pub async fn bytes(self) -> Result<Bytes> {
        self.answer.bytes().await
    }

    /// The pieces as a stream.
    pub fn into_stream(self) -> impl Stream<Item = Result<Bytes>> + Send + 'static {
        try_unfold(
            self,
            |mut download| async move { Ok(download.chunk().await?.map(|piece| (piece, download))) },
        )
    }

    /// Writes it to a local file, which is made or replaced only when all has come. Returns its size.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.files().download("/app/report.pdf").await?.save("report.pdf".as_ref()).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the connection breaks or the file cannot be written; the file is then as it was.
    pub async fn save(mut self, local: &Path) -> Result<u64> {
        let (part, mut file) = Part::create(local)?;
        let mut size = 0;
        while let Some(piece) = self.chunk().await? {
            file.write_all(&piece).await.map_err(|source| part.failed(source))?;
            size += piece.len() as u64;
        }
        file.flush().await.map_err(|source| part.failed(source))?;
        drop(file);
        part.keep().await?;
        Ok(size)
    }
}
