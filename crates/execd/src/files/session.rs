//! Files of an isolated session, as a process of this program serves them that sees nothing but the session's trees.
//!
//! The isolator has put it into a root of its own in which each tree is where the session has it. So whatever a path
//! or a symlink in there says, the kernel looks for it among the trees; what is here is only how paths are spelled.

use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use super::error::{FileError, Result};
use super::workers::READY;
use crate::accounts::{self, Accounts};
use crate::app::Shared;

/// Set in a process that serves a session, before it serves.
static VIEW: OnceLock<View> = OnceLock::new();
static LINKS: OnceLock<OwnedFd> = OnceLock::new();

/// The trees of the session that this process serves.
#[derive(Debug)]
pub(crate) struct View {
    /// The workspace first.
    trees: Vec<Tree>,
}

/// One of them.
#[derive(Debug)]
struct Tree {
    /// As the request for the session spelled it.
    named: PathBuf,
    /// Where it is.
    real: PathBuf,
}

/// The session that this process serves, if it serves one.
pub(crate) fn view() -> Option<&'static View> {
    VIEW.get()
}

/// Opens `/proc/self/fd`, for a process that is about to lose sight of it.
pub(crate) fn own_links() -> io::Result<()> {
    // Read before the sandbox's files are out of sight.
    accounts::stand_in(Accounts::read().without_labels());
    let links = rustix::fs::open(
        "/proc/self/fd",
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let _ = LINKS.set(links);
    // Where random numbers come from a device, it is opened by the first one.
    let _ = crate::random::uuid();
    Ok(())
}

/// The directory of this process's descriptors, and the name in it that leads to what `fd` refers to.
pub(crate) fn link(
    fd: impl std::os::fd::AsFd,
) -> rustix::io::Result<(std::borrow::Cow<'static, [u8]>, OwnedFd)> {
    use std::os::fd::AsRawFd as _;
    let number = fd.as_fd().as_raw_fd().to_string().into_bytes();
    let dir = match LINKS.get() {
        Some(dir) => rustix::io::fcntl_dupfd_cloexec(dir, 3)?,
        None => rustix::fs::open(
            "/proc/self/fd",
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?,
    };
    Ok((number.into(), dir))
}

/// Serves the connection to its end. `view` is what became of entering the trees.
///
/// # Errors
/// The socket or the runtime fails; nobody is left to be told more.
pub(crate) fn run(
    connection: OwnedFd,
    view: std::result::Result<(), String>,
    trees: &[(String, String)],
) -> io::Result<()> {
    let mut socket = UnixStream::from(connection);
    if let Err(reason) = view {
        return socket.write_all(format!("{}\n", reason.replace('\n', " ")).as_bytes());
    }
    let trees: Vec<Tree> =
        trees.iter().map(|(named, real)| Tree { named: named.into(), real: real.into() }).collect();
    let cwd = trees.first().map_or_else(|| "/".into(), |tree| tree.real.clone());
    let _ = VIEW.set(View { trees });
    socket.write_all(format!("{READY}\n").as_bytes())?;
    super::identity::serve(socket, Shared { cwd, ..Shared::default() })
}

impl View {
    /// Where a path of a request leads. Absolute ones that are in no tree are taken inside the workspace, if that is all
    /// there is.
    pub(crate) fn place(&self, path: &Path, shown: &str) -> Result<PathBuf> {
        let spellings = self.trees.iter().flat_map(|tree| [(&tree.named, tree), (&tree.real, tree)]);
        let found = spellings
            .filter_map(|(spelling, tree)| Some((&tree.real, path.strip_prefix(spelling).ok()?)))
            .min_by_key(|(_, rest)| rest.components().count());
        let (tree, rest) = match (found, &self.trees[..]) {
            (Some(found), _) => found,
            (None, [only]) => (&only.real, path.strip_prefix("/").unwrap_or(path)),
            (None, _) => {
                return Err(FileError::Refused(format!("{shown}: is in none of the session's trees")));
            }
        };
        let mut depth = 0usize;
        for component in rest.components() {
            match component {
                Component::ParentDir => {
                    depth = depth.checked_sub(1).ok_or_else(|| {
                        FileError::Refused(format!("{shown}: leads out of the session's workspace"))
                    })?;
                }
                Component::Normal(_) => depth += 1,
                Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
            }
        }
        // To join nothing would add a slash, which follows a symlink.
        Ok(if rest.as_os_str().is_empty() { tree.clone() } else { tree.join(rest) })
    }

    /// The tree that a placed path is in.
    fn tree_of(&self, path: &Path) -> Option<&Path> {
        let real = self.trees.iter().map(|tree| tree.real.as_path());
        real.filter(|tree| path.starts_with(tree)).max_by_key(|tree| tree.components().count())
    }

    /// Whether two placed paths are in one tree.
    pub(crate) fn together(&self, one: &Path, other: &Path) -> bool {
        self.tree_of(one) == self.tree_of(other)
    }

    /// How much of the paths below `root` searches leave out.
    pub(crate) fn prefix(&self, root: &Path) -> usize {
        match self.tree_of(root).map(|tree| tree.as_os_str().as_bytes()) {
            None | Some(b"/") => 1,
            Some(tree) => tree.len() + 1,
        }
    }
}

/// What a path looks like in the answer to a search.
pub(crate) fn shortened(path: &[u8], prefix: usize) -> &[u8] {
    let short = path.get(prefix..).unwrap_or_default();
    if short.is_empty() { OsStr::new(".").as_bytes() } else { short }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view_of(trees: &[&str]) -> View {
        View { trees: trees.iter().map(|path| Tree { named: path.into(), real: path.into() }).collect() }
    }

    fn placed(trees: &[&str], path: &str) -> std::result::Result<String, String> {
        view_of(trees)
            .place(Path::new(path), path)
            .map(|path| path.display().to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn one_workspace_takes_everything() {
        for (path, place) in [
            ("/w", "/w"),
            ("/w/a/b", "/w/a/b"),
            ("/etc/passwd", "/w/etc/passwd"),
            ("/wide/x", "/w/wide/x"),
            ("/", "/w"),
            ("/w/a/../b", "/w/a/../b"),
        ] {
            assert_eq!(placed(&["/w"], path).as_deref(), Ok(place), "{path}");
        }
        for path in ["/w/../etc", "/../x", "/w/a/../../x", "/etc/../../x"] {
            assert!(placed(&["/w"], path).unwrap_err().contains("leads out"), "{path}");
        }
    }

    #[test]
    fn of_several_trees_the_longest_counts_and_outside_is_nothing() {
        let trees = ["/w", "/w/deep", "/data"];
        assert_eq!(placed(&trees, "/w/deep/x").as_deref(), Ok("/w/deep/x"));
        assert!(placed(&trees, "/w/deep/../x").is_err());
        assert!(placed(&trees, "/etc/passwd").unwrap_err().contains("none of"));
        let view = view_of(&trees);
        assert!(!view.together(Path::new("/w/a"), Path::new("/w/deep/a")));
        assert!(view.together(Path::new("/w/a"), Path::new("/w/b/c")));
        assert_eq!(shortened(b"/w/deep/x/y", view.prefix(Path::new("/w/deep/x"))), b"x/y");
    }
}
