//! Files on the mounts a sandbox has: overlays, bound files, volumes. Each test has a mount namespace of its own,
//! which takes the mounts with it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // Helpers of tests are tests.

mod web;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::Path;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::json;
use web::files::{Files, Part, metadata, start_in};

/// Runs the test on a thread that may mount. Says so when it cannot.
fn with_mounts(test: impl AsyncFnOnce(Files) + Send + 'static) {
    let thread = std::thread::spawn(|| {
        // SAFETY: only this thread and those it starts later see the new namespace, and none shares memory or
        // descriptors less than before.
        let unshared = unsafe { unshare_unsafe(UnshareFlags::NEWNS) };
        if let Err(error) = unshared {
            eprintln!("skipped: mounting needs root ({error})");
            return;
        }
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { test(start_in("/dev/shm").await).await });
    });
    thread.join().unwrap();
}

/// An overlay at `merged` with what the test put into `lower`.
fn overlay(files: &Files) {
    for name in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir_all(files.path(name)).unwrap();
    }
    let options = ["lower", "upper", "work"].map(|name| format!("{name}dir={}", files.text(name))).join(",");
    let options = std::ffi::CString::new(format!("{options},volatile")).unwrap();
    mount("overlay", files.path("merged"), "overlay", MountFlags::empty(), options.as_c_str()).unwrap();
}

#[test]
fn an_overlay_takes_uploads_moves_and_removals() {
    with_mounts(async |files: Files| {
        files.write("lower/old", "image");
        std::fs::set_permissions(files.path("lower/old"), PermissionsExt::from_mode(0o751)).unwrap();
        files.write("lower/dir/sub/f", "below");
        files.write("lower/gone/f", "x");
        overlay(&files);
        for content in [&b"small"[..], &[7; 300_000]] {
            let bare = |name: &str| Part::Metadata(json!({ "path": files.text(name) }));
            files
                .upload(&[bare("merged/old"), Part::File(content), bare("merged/n/e/w"), Part::File(content)])
                .await
                .ok();
            for name in ["merged/old", "merged/n/e/w"] {
                assert!(std::fs::read(files.path(name)).unwrap() == content);
            }
            assert_eq!(files.mode("merged/old"), 0o751, "the image's mode is kept");
        }
        assert_eq!(std::fs::read(files.path("lower/old")).unwrap(), b"image");
        // A directory of the image cannot be renamed by the kernel: it is copied.
        let moves = json!([{ "src": files.text("merged/dir"), "dest": files.text("merged/moved") }]);
        files.daemon.post("/files/mv", moves).await.ok();
        assert_eq!(std::fs::read(files.path("merged/moved/sub/f")).unwrap(), b"below");
        assert!(!files.path("merged/dir").exists());
        let replaced = json!({ files.text("merged/moved/sub/f"): { "old": "b", "new": "B" } });
        files.daemon.post("/files/replace", replaced).await.ok();
        assert_eq!(std::fs::read(files.path("merged/moved/sub/f")).unwrap(), b"Below");
        files.daemon.delete(&format!("/directories?path={}", files.query("merged/gone"))).await.ok();
        assert_eq!(
            files.names(&format!("/files/search?path={}", files.query("merged"))).await,
            ["merged/moved/sub/f", "merged/n/e/w", "merged/old"]
        );
    });
}

#[test]
fn a_file_with_a_mount_on_it_is_written_in_place() {
    with_mounts(async |files: Files| {
        let source = files.write("source", "from outside");
        let target = files.write("etc/hosts", "");
        mount_bind(&source, &target).unwrap();
        for content in [&b"uploaded"[..], &[b'y'; 200_000]] {
            files.upload(&[metadata(&target), Part::File(content)]).await.ok();
            assert!(std::fs::read(&source).unwrap() == content, "both names show the new content");
        }
        let replaced = json!({ target.to_str().unwrap(): { "old": "y", "new": "z" } });
        files.daemon.post("/files/replace", replaced).await.ok();
        assert!(std::fs::read(&source).unwrap() == [b'z'; 200_000]);
        assert_eq!(std::fs::read_dir(files.path("etc")).unwrap().count(), 1);
    });
}

#[test]
fn a_volume_is_another_file_system() {
    with_mounts(async |files: Files| {
        let volume = files.path("volume");
        std::fs::create_dir(&volume).unwrap();
        mount("tmpfs", &volume, "tmpfs", MountFlags::empty(), None::<&std::ffi::CStr>).unwrap();
        files.write("tree/a/b", "content");
        let moves = json!([{ "src": files.text("tree"), "dest": files.text("volume/x/tree") }]);
        files.daemon.post("/files/mv", moves).await.ok();
        assert_eq!(std::fs::read(files.path("volume/x/tree/a/b")).unwrap(), b"content");
        assert!(!files.path("tree").exists());
        // Through a link, to a directory that is not there yet when the upload begins.
        std::os::unix::fs::symlink(Path::new("volume/late"), files.path("link")).unwrap();
        let content = vec![3; 400_000];
        files.upload(&[metadata(files.path("link")), Part::File(&content)]).await.ok();
        assert!(std::fs::read(files.path("volume/late")).unwrap() == content);
        assert_eq!(files.path("volume/late").metadata().unwrap().dev(), volume.metadata().unwrap().dev());
        let refused = files.daemon.delete(&format!("/directories?path={}", files.query("volume"))).await;
        assert!(refused.refused(500, "RUNTIME_ERROR").contains("mount point"));
        assert!(volume.is_dir());
    });
}
