//! The built-in image `host`, and layers below id-mapped mounts.

use crate::support::*;
use osb_engine::image::{Image, ImageStore, Options};
use std::ffi::CString;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

fn open(dir: &Path, machine: &Path) -> (ImageStore, Arc<Image>) {
    let options = Options { host_root: Some(machine.into()), ..options() };
    let store = ImageStore::open_with(dir.join("data"), options).unwrap();
    let image = store.inspect("host").unwrap();
    (store, image)
}

#[test]
fn programs_of_this_machine_run() {
    need_root!();
    let dir = tempfile::tempdir().unwrap();
    let (store, image) = open(dir.path(), Path::new("/"));
    assert_eq!(store.list().unwrap()[0].reference, "host");
    let mut mounted = Mounted::image(&image);
    mounted.add_devices();
    mounted.run(&["/bin/sh", "-c", "echo hello > /tmp/x && cat /tmp/x"]);
    assert_eq!(mounted.run(&["id", "-un"]), "root\n");
    for (program, command) in [
        ("bash", "bash -lc 'echo $BASH_VERSION'"),
        (
            "python3",
            "/usr/bin/python3 -c 'import ssl, json; print(len(ssl.create_default_context().get_ca_certs()))'",
        ),
        ("node", "node -v"),
        (
            "git",
            "git --version && cd /tmp && git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x",
        ),
        ("java", "java -version"),
        ("perl", "perl -MSocket -e 'print getprotobyname(\"tcp\")'"),
        ("gcc", "cd /tmp && echo 'int main(void) { return 0; }' > a.c && gcc a.c && ./a.out"),
        ("mvn", "mvn -v"),
        ("su", "su nobody -s /bin/sh -c 'id -un'"),
        ("useradd", "useradd -m bob && su bob -c 'touch ~/x'"),
    ] {
        let found = ["/usr/bin", "/usr/sbin"].iter().any(|place| Path::new(place).join(program).exists());
        if found {
            mounted.run(&["/bin/sh", "-ec", command]);
        } else {
            eprintln!("skipped: {program} is not installed");
        }
    }
    if Path::new("/usr/share/zoneinfo/Etc/UTC").exists() {
        assert_eq!(mounted.run(&["date", "+%Z"]), "UTC\n");
    }
}

#[test]
fn nothing_private_of_this_machine_shows() {
    need_root!();
    let dir = tempfile::tempdir().unwrap();
    let (_, image) = open(dir.path(), Path::new("/"));
    let mounted = Mounted::image(&image);
    let root = mounted.root();
    for path in [
        "shadow",
        "gshadow",
        "sudoers",
        "sudoers.d",
        "ssh",
        "hostname",
        "machine-id",
        "resolv.conf",
        "fstab",
        "crontab",
        "cron.d",
        "systemd",
        "docker",
        "ssl/private",
        "environment",
        "gitconfig",
        "npmrc",
        "pip.conf",
        "apt",
        "hosts",
        "maven/settings.xml",
        "postgresql",
        "wgetrc",
        "subuid",
    ] {
        assert!(root.join("etc").join(path).symlink_metadata().is_err(), "/etc/{path}");
    }
    for path in [
        "root", "home", "srv", "mnt", "opt", "media", "proc", "sys", "dev", "tmp", "var/lib", "var/log",
        "boot",
    ] {
        let count = std::fs::read_dir(root.join(path)).unwrap().count();
        assert_eq!(count, 0, "/{path}");
    }
    let mode = |path: &str| std::fs::metadata(root.join(path)).unwrap().mode() & 0o7777;
    assert_eq!(
        [mode("root"), mode("tmp"), mode("var/tmp"), mode("etc/passwd")],
        [0o700, 0o1777, 0o1777, 0o644]
    );
    let skeleton = &image.roots[0].lowers[0];
    for (path, described) in tree(&skeleton.join("etc")) {
        assert!(!described.contains("PRIVATE KEY-----"), "{path}");
        assert!(described.contains(" 0:0 "), "{path}");
    }
    let passwd = std::fs::read_to_string(root.join("etc/passwd")).unwrap();
    for line in passwd.lines() {
        let fields: Vec<_> = line.split(':').collect();
        assert_eq!((fields.len(), fields[1]), (7, "*"), "{line}");
    }
    assert!(!passwd.contains(":1000:") && passwd.starts_with("root:*:0:0:root:/root:/bin/"));
}

/// A small machine of the test's own, not merged into `/usr`, with secrets lying about.
#[test]
fn secrets_stay_out_and_changes_come_through() {
    need_root!();
    let dir = tempfile::tempdir().unwrap();
    let machine = dir.path().join("machine");
    let write = |path: &str, content: &str, mode: u32| {
        let path = machine.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    write("usr/bin/tool", "", 0o755);
    write("bin/sh", "", 0o755);
    write("lib/libc.so", "", 0o755);
    std::os::unix::fs::symlink("lib", machine.join("lib64")).unwrap();
    write(
        "etc/passwd",
        "root:secrethash:0:0:The Admin:/root:/bin/zsh\nbin:x:1:1::/bin:/bin/no\nann:x:1000:1000::/home/ann:/bin/sh\nodd name:x:5:5::/:/\ndb:x:101:1::/:/\n",
        0o644,
    );
    write("etc/group", "root:x:0:ann\nadm:x:4:ann,bob\nusers:x:100:\ndb:x:999:\n", 0o644);
    write("etc/ssl/certs/good.pem", "-----BEGIN CERTIFICATE-----", 0o644);
    write("etc/ssl/certs/both.pem", "-----BEGIN RSA PRIVATE KEY-----", 0o644);
    write("etc/ssl/certs/site.key", "k", 0o644);
    write("etc/ssl/certs/closed.pem", "c", 0o640);
    write("etc/java-17/management/jmxremote.password", "p", 0o644);
    write("etc/python3/config", "c", 0o644);
    write("etc/ssl/private/key.pem", "p", 0o644);
    write("root/id", "secret", 0o644);
    std::os::unix::fs::symlink("/root/id", machine.join("etc/ssl/certs/elsewhere")).unwrap();
    std::os::unix::fs::symlink("/usr/share/x.pem", machine.join("etc/ssl/certs/linked.pem")).unwrap();

    let (store, image) = open(dir.path(), &machine);
    let points: Vec<_> = image.roots.iter().map(|root| root.mountpoint.as_str()).collect();
    assert_eq!(points, ["/", "/usr", "/bin", "/lib"]);
    assert_eq!(image.roots[2].lowers, [machine.join("bin")]);
    let skeleton = image.roots[0].lowers[0].clone();
    let tree = tree(&skeleton);
    assert_eq!(tree["lib64"], "-> lib 0:0 777");
    let certs: Vec<_> = tree.keys().filter(|path| path.starts_with("etc/ssl/")).map(String::as_str).collect();
    assert_eq!(certs, ["etc/ssl/certs", "etc/ssl/certs/good.pem", "etc/ssl/certs/linked.pem"]);
    assert!(tree.contains_key("etc/python3/config") && tree.contains_key("etc/java-17/management"));
    assert!(!tree.contains_key("etc/java-17/management/jmxremote.password"));
    let read = |path: &str| std::fs::read_to_string(skeleton.join(path)).unwrap();
    assert_eq!(read("etc/passwd"), "root:*:0:0:root:/root:/bin/sh\nbin:*:1:1:bin:/bin:/bin/no\n");
    assert_eq!(read("etc/group"), "root:x:0:\nadm:x:4:\nusers:x:100:\n");

    // Unchanged it is the same one; changed a new one beside the old, which stays while it is used.
    assert_eq!(open(dir.path(), &machine).1.id, image.id);
    write("etc/ssl/certs/new.pem", "n", 0o644);
    assert_eq!(store.inspect("host").unwrap().id, image.id);
    let (later, changed) = open(dir.path(), &machine);
    assert_ne!(changed.id, image.id);
    later.collect().unwrap();
    assert!(!skeleton.exists() && changed.roots[0].lowers[0].join("etc/ssl/certs/new.pem").exists());
}

/// A user namespace with a mapped range, kept alive by a process.
struct UserNamespace {
    child: std::process::Child,
}

impl UserNamespace {
    const BASE: u32 = 1_000_000;

    fn new() -> Self {
        let mut child = Command::new("unshare")
            .args(["--user", "sh", "-c", "echo ready; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut ready)
            .unwrap();
        assert_eq!(ready, "ready\n");
        for map in ["uid_map", "gid_map"] {
            let mut file =
                std::fs::File::options().write(true).open(format!("/proc/{}/{map}", child.id())).unwrap();
            file.write_all(format!("0 {} 65536", Self::BASE).as_bytes()).unwrap();
        }
        Self { child }
    }
}

impl Drop for UserNamespace {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A detached copy of a directory's mount whose owners are shifted into the namespace.
fn id_mapped(path: &Path, namespace: &UserNamespace) -> OwnedFd {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        userns: u64,
    }
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let userns = std::fs::File::open(format!("/proc/{}/ns/user", namespace.child.id())).unwrap();
    let attr = MountAttr { set: 0x0010_0000, clear: 0, propagation: 0, userns: userns.as_raw_fd() as u64 };
    // SAFETY: both calls get pointers to live values of the sizes they are told, and the first returns a descriptor
    // that nobody else owns.
    unsafe {
        let tree = libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), 1 | libc::O_CLOEXEC);
        assert!(tree >= 0, "open_tree: {}", std::io::Error::last_os_error());
        let tree = OwnedFd::from_raw_fd(tree as i32);
        let done = libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<MountAttr>(),
        );
        assert!(done == 0, "mount_setattr: {}", std::io::Error::last_os_error());
        tree
    }
}

#[test]
fn whiteouts_work_through_id_mapped_layers() {
    need_root!();
    let fixture = Fixture::new();
    let base = Layer::new()
        .dir("d")
        .file("d/gone", "x")
        .file("d/kept", "k")
        .dir("o")
        .file("o/old", "x")
        .file("gone", "");
    let upper = Layer::new()
        .dir("d")
        .file("d/.wh.gone", "")
        .dir("o")
        .file("o/.wh..wh..opq", "")
        .file("o/new", "n")
        .file(".wh.gone", "");
    let layers = [upper.bytes(), base.bytes()];
    fixture.load(&[base, upper]).unwrap();
    let namespace = UserNamespace::new();
    let place = fixture.dir.path().join("data/images/layers");
    let lowers: Vec<_> = layers.iter().map(|layer| id_mapped(&place.join(hex(layer)), &namespace)).collect();
    let target = tempfile::tempdir().unwrap();
    std::fs::set_permissions(target.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let overlay = rustix::mount::fsopen("overlay", rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    for lower in &lowers {
        let set = |lower: &OwnedFd| rustix::mount::fsconfig_set_fd(&overlay, "lowerdir+", lower);
        set(lower).unwrap();
    }
    rustix::mount::fsconfig_create(&overlay).unwrap();
    let mount = rustix::mount::fsmount(
        &overlay,
        rustix::mount::FsMountFlags::FSMOUNT_CLOEXEC,
        rustix::mount::MountAttrFlags::empty(),
    )
    .unwrap();
    rustix::mount::move_mount(
        &mount,
        "",
        rustix::fs::CWD,
        target.path(),
        rustix::mount::MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .unwrap();
    let listed = Command::new("nsenter")
        .args(["--user", "-S", "0", "-G", "0", "--target", &namespace.child.id().to_string(), "sh", "-c"])
        .arg("cd \"$1\" && find . | sort && stat -c '%u:%g' d/kept")
        .args(["sh".as_ref(), target.path()])
        .output();
    rustix::mount::unmount(target.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    let listed = listed.unwrap();
    assert_eq!(
        String::from_utf8_lossy(&listed.stdout),
        ".\n./d\n./d/kept\n./o\n./o/new\n0:0\n",
        "{}",
        String::from_utf8_lossy(&listed.stderr)
    );
}
