//! The preparer: makes a sandbox's directory, user namespace and overlays ready, ahead of its start.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::net::RecvFlags;

use super::message::{Hello, Prepare, Prepared, Request, RootSpec};
use super::overlay::{self, Layers, Overlays};
use super::startup::{self, while_doing};
use super::userns;

/// Ids per sandbox.
pub(crate) const IDS: u32 = 65_536;

pub(super) fn run() -> io::Result<()> {
    let (mut link, hello, _) = startup::begin(c"osb-preparer")?;
    crate::sys::process_gives_way();
    let mut preparer = match Preparer::new(&hello) {
        Ok((preparer, finding)) => {
            startup::answer(&mut link, &Ok(finding))?;
            preparer
        }
        Err(error) => return startup::answer(&mut link, &Err(error)),
    };
    let mut fds = Vec::new();
    while let Some(request) = link.receive::<Request>(&mut fds, RecvFlags::CMSG_CLOEXEC)? {
        let given = fds.drain(..);
        let done = match request {
            Request::Prepare(request) => preparer.prepare(&request, given.into_iter().next()),
            Request::Clone => {
                let given: Vec<OwnedFd> = given.collect();
                overlay::clones(&given).map(|overlays| Made { overlays, ..Made::default() })
            }
        };
        let (error, made) = match done {
            Ok(made) => (None, made),
            Err(error) => (Some(error), Made::default()),
        };
        let full = error.as_ref().is_some_and(|error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        });
        let error = error.map(|error| error.to_string());
        let sent: Vec<BorrowedFd<'_>> =
            made.namespace.iter().chain(&made.overlays).chain(&made.templates).map(AsFd::as_fd).collect();
        let new_namespace = made.namespace.is_some();
        link.send(&Prepared { error, full, new_namespace }, &sent)?;
    }
    Ok(())
}

struct Preparer {
    id_base: u32,
    user_namespace: bool,
    overlays: Overlays,
}

#[derive(Default)]
struct Made {
    /// Set when it was made now.
    namespace: Option<OwnedFd>,
    overlays: Vec<OwnedFd>,
    /// Clones of them, or nothing where there can be none.
    templates: Vec<OwnedFd>,
}

impl Preparer {
    /// Tries everything once. The second value says why user namespaces cannot be had, when they were asked for.
    fn new(hello: &Hello) -> io::Result<(Self, Option<String>)> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        startup::standard_to(&null)?;
        let dir = Path::new(&hello.probe_dir);
        let mut finding = None;
        if hello.user_namespace {
            let mut preparer =
                Self { id_base: hello.id_base, user_namespace: true, overlays: Overlays::Descriptors };
            if preparer.probe(dir).is_ok() {
                return Ok((preparer, None));
            }
            preparer.overlays = Overlays::by_path()?;
            match preparer.probe(dir) {
                Ok(()) => return Ok((preparer, None)),
                Err(error) => finding = Some(error.to_string()),
            }
        }
        let mut preparer =
            Self { id_base: hello.id_base, user_namespace: false, overlays: Overlays::by_path()? };
        preparer.probe(dir).map_err(while_doing("mount an overlay in the data directory"))?;
        Ok((preparer, finding))
    }

    /// Makes an overlay as a sandbox would get it, and writes to it as its root would.
    fn probe(&mut self, dir: &Path) -> io::Result<()> {
        let lower = dir.join("lower");
        private_dir(&lower)?;
        let sandbox = dir.join("sandbox");
        let request = Prepare {
            slot: 0,
            dir: sandbox.to_string_lossy().into_owned(),
            roots: vec![RootSpec {
                mountpoint: "/".into(),
                lowers: vec![lower.to_string_lossy().into_owned()],
            }],
            files: Vec::new(),
        };
        let result = self.prepare(&request, None).and_then(|made| {
            let root = made.overlays.first().ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
            userns::as_user(self.root_id(0), || {
                let flags =
                    rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
                rustix::fs::openat(root, "probe", flags, rustix::fs::Mode::from_raw_mode(0o600))?;
                Ok(())
            })
        });
        // The upper layer's owner shows whether ids were mapped on the way to the disk.
        let owner = std::fs::metadata(sandbox.join("u0/probe")).map(|meta| meta.uid());
        std::fs::remove_dir_all(&sandbox).or_else(absent_is_fine)?;
        std::fs::remove_dir_all(&lower)?;
        result?;
        match owner? {
            0 => Ok(()),
            other => Err(io::Error::other(format!("a file of root inside belongs to {other} on disk"))),
        }
    }

    fn root_id(&self, slot: u32) -> u32 {
        if self.user_namespace { self.id_base + slot * IDS } else { 0 }
    }

    fn prepare(&mut self, request: &Prepare, given: Option<OwnedFd>) -> io::Result<Made> {
        let root_id = self.root_id(request.slot);
        let namespace = match &given {
            None if self.user_namespace => {
                Some(userns::make(root_id, IDS).map_err(while_doing("make a user namespace"))?)
            }
            _ => None,
        };
        let used = namespace.as_ref().or(given.as_ref()).map(AsFd::as_fd);
        let dir = PathBuf::from(&request.dir);
        private_dir(&dir)?;
        match self.fill(&dir, request, root_id, used) {
            Ok(overlays) => {
                let templates = overlay::clones(&overlays).unwrap_or_default();
                Ok(Made { namespace, overlays, templates })
            }
            Err(error) => {
                // The server looks for leftovers too; a failure here must not hide the reason.
                let _ = std::fs::remove_dir_all(&dir);
                Err(error)
            }
        }
    }

    fn fill(
        &mut self,
        dir: &Path,
        request: &Prepare,
        root_id: u32,
        namespace: Option<BorrowedFd<'_>>,
    ) -> io::Result<Vec<OwnedFd>> {
        let mut overlays = Vec::with_capacity(request.roots.len());
        for (number, root) in request.roots.iter().enumerate() {
            let (upper, work) = (format!("u{number}"), format!("w{number}"));
            DirBuilder::new().mode(0o755).create(dir.join(&upper))?;
            std::fs::create_dir(dir.join(&work))?;
            let lowers: Vec<&Path> = root.lowers.iter().map(Path::new).collect();
            if number == 0 {
                write_files(&dir.join(&upper), &lowers, &request.files)?;
                let sessions = dir.join(SESSIONS);
                DirBuilder::new().mode(0o700).create(&sessions)?;
                std::os::unix::fs::chown(&sessions, Some(root_id), Some(root_id))?;
            }
            let layers = Layers { parent: dir, upper: &upper, work: &work, lowers: &lowers };
            let overlay = self
                .overlays
                .make(&layers, namespace, root_id)
                .map_err(while_doing(&format!("mount the overlay of {}", root.mountpoint)))?;
            overlays.push(overlay);
        }
        Ok(overlays)
    }
}

/// Directory of a sandbox in which it keeps the changes of its isolated sessions.
pub(crate) const SESSIONS: &str = "s";

/// Writes small files into the upper layer. A directory on the way takes the form that the image gave it; where
/// the image has something else than a directory, the file is left out.
fn write_files(upper: &Path, lowers: &[&Path], files: &[(String, String)]) -> io::Result<()> {
    for (path, text) in files {
        let path = Path::new(path);
        let Some(dir) = path.parent() else { continue };
        if !dir.as_os_str().is_empty() && !upper.join(dir).exists() {
            let of_image = lowers.iter().find_map(|lower| lower.join(dir).symlink_metadata().ok());
            if of_image.as_ref().is_some_and(|meta| !meta.is_dir()) {
                continue;
            }
            DirBuilder::new().recursive(true).mode(0o755).create(upper.join(dir))?;
            if let Some(meta) = of_image {
                std::fs::set_permissions(
                    upper.join(dir),
                    std::fs::Permissions::from_mode(meta.mode() & 0o7777),
                )?;
                std::os::unix::fs::chown(upper.join(dir), Some(meta.uid()), Some(meta.gid()))?;
            }
        }
        std::fs::write(upper.join(path), text)?;
    }
    Ok(())
}

fn private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path).map_err(while_doing(&format!("make {}", path.display())))
}

fn absent_is_fine(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}
