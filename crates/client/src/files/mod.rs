//! Files inside a sandbox.

mod download;
mod local;
mod tree;
mod tree_down;
mod tree_up;
mod upload;

use std::collections::BTreeMap;

use osb_protocol::execd::{FileInfo, Permission, Rename, Replaced, Replacement, code};
use reqwest::{Method, RequestBuilder};

pub use self::download::Download;
pub use self::tree::{Skipped, TreeOptions, TreeProgress, TreeSummary};
pub use self::upload::Upload;
use crate::error::Result;
use crate::sandbox::Sandbox;

/// File operations on a sandbox; see [`Sandbox::files`].
#[derive(Debug, Clone, Copy)]
pub struct Files<'a> {
    sandbox: &'a Sandbox,
    view: View<'a>,
}

/// Whose eyes the files are seen with.
#[derive(Debug, Clone, Copy)]
enum View<'a> {
    /// The daemon's own.
    Daemon,
    /// Those of a user of the sandbox.
    Identity { uid: u32, gid: u32 },
    /// Those of an isolated session.
    Isolated { session: &'a str },
}

impl Sandbox {
    /// Its files, with the rights of the daemon.
    #[must_use]
    pub fn files(&self) -> Files<'_> {
        Files { sandbox: self, view: View::Daemon }
    }

    /// Its files, with the rights of a user and group of the sandbox.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let error = sandbox.files_as(1000, 1000).write("/etc/passwd", "").await.unwrap_err();
    /// assert!(error.to_string().contains("permission"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn files_as(&self, uid: u32, gid: u32) -> Files<'_> {
        Files { sandbox: self, view: View::Identity { uid, gid } }
    }
}

/// Permission bits as they are written on the wire: their octal digits, read as a decimal number.
#[must_use]
pub fn mode_digits(mode: u32) -> u32 {
    let bits = mode & 0o777;
    (bits >> 6) * 100 + (bits >> 3 & 7) * 10 + (bits & 7)
}

/// The permission bits that such digits stand for; digits above 7 count modulo 8.
#[must_use]
pub fn mode_bits(digits: u32) -> u32 {
    let digit = |place: u32| digits / place % 10 % 8;
    (digit(100) << 6) | (digit(10) << 3) | digit(1)
}

impl<'a> Files<'a> {
    pub(crate) fn isolated(sandbox: &'a Sandbox, session: &'a str) -> Self {
        Self { sandbox, view: View::Isolated { session } }
    }

    /// A request to the daemon, below the view's own path.
    async fn request(&self, method: Method, path: &[&str]) -> Result<RequestBuilder> {
        match self.view {
            View::Daemon => self.sandbox.execd(method, path).await,
            View::Identity { uid, gid } => {
                let (uid, gid) = (uid.to_string(), gid.to_string());
                let prefix = ["v1", "filesystem", &uid, &gid];
                self.sandbox.execd(method, &[&prefix[..], path].concat()).await
            }
            View::Isolated { session } => {
                let prefix = ["v1", "isolated", "session", session];
                self.sandbox.execd(method, &[&prefix[..], path].concat()).await
            }
        }
    }

    /// Kind, size, owner, mode and times, by path. Symbolic links are not followed.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let info = sandbox.files().info(&["/bin/sh", "/etc"]).await?;
    /// println!("{:?} {}", info["/etc"].kind, info["/etc"].mode);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When one does not exist or the sandbox cannot be reached.
    pub async fn info<P: AsRef<str>>(&self, paths: &[P]) -> Result<BTreeMap<String, FileInfo>> {
        let request = self.request(Method::GET, &["files", "info"]).await?.query(&repeated(paths));
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// The same of one path; `None` when nothing is there.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// if sandbox.files().stat("/app/done").await?.is_some() {
    ///     println!("finished");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox cannot be reached.
    pub async fn stat(&self, path: &str) -> Result<Option<FileInfo>> {
        match self.info(&[path]).await {
            Ok(mut infos) => Ok(infos.remove(path)),
            Err(error) if error.code() == Some(code::FILE_NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Files below `path` whose name matches the glob `pattern`.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// for file in sandbox.files().search("/app", "*.py").await? {
    ///     println!("{} {}", file.size, file.path);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When `path` does not exist, the pattern is none, or the sandbox cannot be reached.
    pub async fn search(&self, path: &str, pattern: &str) -> Result<Vec<FileInfo>> {
        let request = self
            .request(Method::GET, &["files", "search"])
            .await?
            .query(&[("path", path), ("pattern", pattern)]);
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Entries of a directory, `depth` levels down.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let entries = sandbox.files().list("/app", 1).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it is no directory or the sandbox cannot be reached.
    pub async fn list(&self, path: &str, depth: u32) -> Result<Vec<FileInfo>> {
        let request = self
            .request(Method::GET, &["directories", "list"])
            .await?
            .query(&[("path", path), ("depth", &depth.to_string())]);
        self.sandbox.transport().json(request, self.sandbox.config().request_timeout).await
    }

    /// Makes directories and what is missing above them. Existing ones are left as they are.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::{Permission, mode_digits};
    ///
    /// let private = Permission { mode: mode_digits(0o700), ..Permission::default() };
    /// sandbox.files().make_directories(&[("/app/keys".to_owned(), private)].into()).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When one cannot be made or the sandbox cannot be reached.
    pub async fn make_directories(&self, directories: &BTreeMap<String, Permission>) -> Result<()> {
        let request = self.request(Method::POST, &["directories"]).await?.json(directories);
        self.done(request).await
    }

    /// Makes one directory and what is missing above it.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.files().make_directory("/app/data/in").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Files::make_directories`].
    pub async fn make_directory(&self, path: impl Into<String>) -> Result<()> {
        self.make_directories(&BTreeMap::from([(path.into(), Permission::default())])).await
    }

    /// Removes files. Missing ones are no error.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.files().remove(&["/tmp/a.txt", "/tmp/b.txt"]).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When one is a directory or the sandbox cannot be reached.
    pub async fn remove<P: AsRef<str>>(&self, paths: &[P]) -> Result<()> {
        let request = self.request(Method::DELETE, &["files"]).await?.query(&repeated(paths));
        self.done(request).await
    }

    /// Removes directories with all they hold. Missing ones are no error.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// sandbox.files().remove_directories(&["/app/cache"]).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When one cannot be removed or the sandbox cannot be reached.
    pub async fn remove_directories<P: AsRef<str>>(&self, paths: &[P]) -> Result<()> {
        let request = self.request(Method::DELETE, &["directories"]).await?.query(&repeated(paths));
        self.done(request).await
    }

    /// Renames or moves. The new path must not exist.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::Rename;
    ///
    /// let rename = Rename { src: "/app/a".to_owned(), dest: "/app/b".to_owned() };
    /// sandbox.files().rename(&[rename]).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a file does not exist, a new path does, or the sandbox cannot be reached.
    pub async fn rename(&self, renames: &[Rename]) -> Result<()> {
        let request = self.request(Method::POST, &["files", "mv"]).await?.json(renames);
        self.done(request).await
    }

    /// Sets modes and owners; see [`mode_digits`].
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::{Permission, mode_digits};
    ///
    /// let owner = Some("nobody".to_owned());
    /// let permission = Permission { mode: mode_digits(0o640), owner, group: None };
    /// sandbox.files().set_permissions(&[("/app/data".to_owned(), permission)].into()).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a path does not exist or the sandbox cannot be reached.
    pub async fn set_permissions(&self, permissions: &BTreeMap<String, Permission>) -> Result<()> {
        let request = self.request(Method::POST, &["files", "permissions"]).await?.json(permissions);
        self.done(request).await
    }

    /// Replaces text in files, everywhere it stands. Returns the number of places by path.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// use opensandbox::Replacement;
    ///
    /// let change = Replacement { old: "DEBUG = 1".to_owned(), new: "DEBUG = 0".to_owned() };
    /// let counts = sandbox.files().replace(&[("/app/settings.py".to_owned(), change)].into()).await?;
    /// println!("{} places", counts["/app/settings.py"]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a file cannot be read or written or the sandbox cannot be reached.
    pub async fn replace(
        &self,
        replacements: &BTreeMap<String, Replacement>,
    ) -> Result<BTreeMap<String, u64>> {
        let request = self
            .request(Method::POST, &["files", "replace"])
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

fn repeated<P: AsRef<str>>(paths: &[P]) -> Vec<(&'static str, &str)> {
    paths.iter().map(|path| ("path", path.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use super::{mode_bits, mode_digits};

    #[test]
    fn modes_are_written_as_digits() {
        for (mode, digits) in [(0o644, 644), (0o755, 755), (0, 0), (0o7, 7), (0o4755, 755), (0o777, 777)] {
            assert_eq!(mode_digits(mode), digits);
            assert_eq!(mode_bits(digits), mode & 0o777);
        }
    }
}
