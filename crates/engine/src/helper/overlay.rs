//! Overlays whose layers have their ids mapped, made as detached mounts that a sandbox's child attaches.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use osb_confine::mount::map_ids;
use rustix::fs::{CWD, Mode, OFlags, StatVfsMountFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    move_mount, open_tree,
};
use rustix::thread::UnshareFlags;

use super::startup::while_doing;
use super::userns::as_user;

/// Layers of one overlay.
pub(super) struct Layers<'a> {
    /// Directory of the sandbox. Upper layer and work directory must be on one mount, so it is what is cloned.
    pub(super) parent: &'a Path,
    /// Names of the two in it.
    pub(super) upper: &'a str,
    pub(super) work: &'a str,
    /// Topmost first.
    pub(super) lowers: &'a [&'a Path],
}

/// How layers are named to the kernel.
pub(super) enum Overlays {
    /// By descriptors of detached mounts (Linux 6.15).
    Descriptors,
    /// By paths; id-mapped layers are attached for a moment below this directory of the preparer's own mount
    /// namespace.
    Paths(&'static str),
}

impl Overlays {
    /// Gives the process a mount namespace of its own with a place to attach layers.
    pub(super) fn by_path() -> io::Result<Self> {
        // SAFETY: this process has one thread, and nothing in it relies on the old mount namespace.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
        // What the host unmounts shall not live on here.
        rustix::mount::mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
        // The preparer has no use for `/sys`.
        rustix::mount::mount(
            "tmpfs",
            "/sys",
            "tmpfs",
            rustix::mount::MountFlags::NOSUID,
            c"size=64k,mode=700",
        )?;
        rustix::mount::mount_change("/sys", MountPropagationFlags::PRIVATE)?;
        Ok(Self::Paths("/sys"))
    }

    /// Makes an overlay. `root_id` is the host id of root inside.
    pub(super) fn make(
        &self,
        layers: &Layers<'_>,
        namespace: Option<BorrowedFd<'_>>,
        root_id: u32,
    ) -> io::Result<OwnedFd> {
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).map_err(|error| match error {
            rustix::io::Errno::NODEV => {
                io::Error::other("the kernel has no file system 'overlay'; 'modprobe overlay' says why")
            }
            error => doing("fsopen")(error),
        })?;
        fsconfig_set_string(&context, "source", "overlay")?;
        match self {
            Self::Descriptors => {
                let lowers = layers
                    .lowers
                    .iter()
                    .map(|lower| tree(lower, namespace))
                    .collect::<io::Result<Vec<_>>>()?;
                for lower in &lowers {
                    fsconfig_set_fd(&context, "lowerdir+", lower).map_err(doing("lowerdir"))?;
                }
                let parent = tree(layers.parent, namespace)?;
                for (key, name) in [("upperdir", layers.upper), ("workdir", layers.work)] {
                    let dir =
                        rustix::fs::openat(&parent, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
                    fsconfig_set_fd(&context, key, &dir).map_err(doing(key))?;
                }
                finish(&context, root_id)
            }
            Self::Paths(place) => {
                let mut attached = Attached::new(place);
                let mut lowers = Vec::with_capacity(layers.lowers.len());
                for lower in layers.lowers {
                    lowers.push(attached.attach(tree(lower, namespace)?)?);
                }
                fsconfig_set_string(&context, "lowerdir", lowers.join(":")).map_err(doing("lowerdir"))?;
                let parent = attached.attach(tree(layers.parent, namespace)?)?;
                for (key, name) in [("upperdir", layers.upper), ("workdir", layers.work)] {
                    fsconfig_set_string(&context, key, format!("{parent}/{name}")).map_err(doing(key))?;
                }
                finish(&context, root_id)
            }
        }
    }
}

/// Layers attached for the length of one call.
struct Attached {
    place: &'static str,
    dirs: Vec<String>,
}

impl Attached {
    fn new(place: &'static str) -> Self {
        Self { place, dirs: Vec::new() }
    }

    /// Short names: the kernel takes 255 bytes for all lower layers together.
    fn attach(&mut self, tree: OwnedFd) -> io::Result<String> {
        let dir = format!("{}/{}", self.place, self.dirs.len());
        std::fs::create_dir(&dir).or_else(|error| {
            if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) }
        })?;
        move_mount(&tree, "", CWD, dir.as_str(), MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(doing("attach a layer"))?;
        self.dirs.push(dir.clone());
        Ok(dir)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        for dir in &self.dirs {
            // The overlay keeps its own clones of its layers.
            let _ = rustix::mount::unmount(dir.as_str(), UnmountFlags::DETACH);
        }
    }
}

/// Clones of detached overlays of this process's mount namespace. Before Linux 6.15 there are none.
pub(super) fn clones(overlays: &[OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    overlays.iter().map(|overlay| open_tree(overlay, "", flags).map_err(doing("clone the overlay"))).collect()
}

/// A detached clone of the mount at `path`, with ids mapped by `namespace`.
fn tree(path: &Path, namespace: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, path, flags).map_err(|error| with_path(error.into(), path))?;
    if let Some(namespace) = namespace {
        map_ids(tree.as_fd(), namespace).map_err(|error| with_path(error, path))?;
    }
    Ok(tree)
}

fn finish(context: &OwnedFd, root_id: u32) -> io::Result<OwnedFd> {
    // Nothing in a sandbox outlives a crash of the host, and without this the death of a sandbox writes out
    // every dirty page of the disk.
    fsconfig_set_flag(context, "volatile")?;
    // What an image or a sandbox may have put into the layers' attributes must not steer the overlay.
    for (key, value) in [("redirect_dir", "nofollow"), ("metacopy", "off"), ("index", "off")] {
        fsconfig_set_string(context, key, value).map_err(doing(key))?;
    }
    // The host's root has no id on the mapped upper layer: as itself it could not make the work directory, and
    // the kernel would quietly mount read-only.
    as_user(root_id, || fsconfig_create(context).map_err(|error| explain(context, error.into())))?;
    let mount = fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)?;
    if rustix::fs::fstatvfs(&mount)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(io::Error::other("the kernel made it read-only: it cannot write to the upper layer"));
    }
    Ok(mount)
}

/// Adds what the kernel wrote into the context's log.
fn explain(context: &OwnedFd, error: io::Error) -> io::Error {
    let mut log = String::new();
    let mut line = [0; 256];
    while let Ok(len @ 1..) = rustix::io::read(context, &mut line) {
        log.push_str(": ");
        log.push_str(String::from_utf8_lossy(&line[..len]).trim());
    }
    io::Error::new(error.kind(), format!("{error}{log}"))
}

fn doing(action: &str) -> impl FnOnce(rustix::io::Errno) -> io::Error {
    let add = while_doing(action);
    move |error| add(error.into())
}

fn with_path(error: io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("'{}': {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::helper::userns;

    /// Both ways to name layers, also where the kernel at hand would take the first. Each test has a thread of its
    /// own, so a mount namespace is the test's alone.
    #[test]
    fn files_of_root_inside_keep_their_owner_on_disk() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        const ROOT_ID: u32 = 0x2000_0000;
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["top", "bottom", "sandbox"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        std::fs::write(path("top/which"), "top").unwrap();
        std::fs::write(path("bottom/which"), "bottom").unwrap();
        std::fs::write(path("bottom/only"), "bottom").unwrap();
        let namespace = userns::make(ROOT_ID, 65_536).unwrap();
        let lowers = [path("top"), path("bottom")];
        let lowers: Vec<&Path> = lowers.iter().map(std::path::PathBuf::as_path).collect();
        for (number, overlays) in
            [Overlays::Descriptors, Overlays::by_path().unwrap()].into_iter().enumerate()
        {
            let (upper, work) = (format!("u{number}"), format!("w{number}"));
            std::fs::create_dir(path("sandbox").join(&upper)).unwrap();
            std::fs::create_dir(path("sandbox").join(&work)).unwrap();
            let parent = path("sandbox");
            let layers = Layers { parent: &parent, upper: &upper, work: &work, lowers: &lowers };
            let overlay = match overlays.make(&layers, Some(namespace.as_fd()), ROOT_ID) {
                Ok(overlay) => overlay,
                Err(error) if number == 0 => {
                    println!("skipped: this kernel takes no descriptors: {error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let read = |name: &str| {
                let file = rustix::fs::openat(&overlay, name, OFlags::RDONLY, Mode::empty()).unwrap();
                std::io::read_to_string(std::fs::File::from(file)).unwrap()
            };
            assert_eq!((read("which").as_str(), read("only").as_str()), ("top", "bottom"));
            userns::as_user(ROOT_ID, || {
                let flags = OFlags::CREATE | OFlags::WRONLY;
                rustix::fs::openat(&overlay, "new", flags, Mode::from_raw_mode(0o600))?;
                Ok(())
            })
            .unwrap();
            assert_eq!(std::fs::metadata(parent.join(&upper).join("new")).unwrap().uid(), 0);
            let inside = rustix::fs::statat(&overlay, "new", rustix::fs::AtFlags::empty()).unwrap();
            assert_eq!(inside.st_uid, ROOT_ID);
        }
    }
}
