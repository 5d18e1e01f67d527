//! Archives, stores and mounts for the tests.

use osb_engine::image::{Error, Image, ImageStore, Limits, Loaded, Options, Result};
use rustix::mount::{MountFlags, UnmountFlags};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use tar::{EntryType, Header};
use tempfile::TempDir;

/// Leaves the test when it has no root.
macro_rules! need_root {
    () => {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
    };
}
pub(crate) use need_root;

/// One layer under construction.
#[derive(Clone, Default)]
pub(crate) struct Layer(Vec<u8>);

impl Layer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds an entry with any name, also one that no honest writer would make.
    pub(crate) fn raw(mut self, kind: EntryType, name: &str, link: &str, mode: u32, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        for (long, kind) in [(name, EntryType::GNULongName), (link, EntryType::GNULongLink)] {
            if long.len() > 99 {
                self = self.long(kind, long);
            }
        }
        let fields = header.as_old_mut();
        for (field, text) in [(&mut fields.name, name), (&mut fields.linkname, link)] {
            let text = &text.as_bytes()[..text.len().min(99)];
            field[..text.len()].copy_from_slice(text);
        }
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_000_000);
        header.set_size(content.len() as u64);
        self.push(header, content)
    }

    pub(crate) fn push(mut self, mut header: Header, content: &[u8]) -> Self {
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn long(self, kind: EntryType, name: &str) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(name.len() as u64 + 1);
        self.push(header, format!("{name}\0").as_bytes())
    }

    /// Adds PAX records for the next entry.
    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            // The length counts its own digits.
            let rest = key.len() + value.len() + 3;
            let length =
                (1..20).map(|digits| rest + digits).find(|all| all.to_string().len() == all - rest).unwrap();
            data.extend_from_slice(format!("{length} {key}=").as_bytes());
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::XHeader);
        header.set_size(data.len() as u64);
        self.push(header, &data)
    }

    pub(crate) fn file(self, name: &str, content: &str) -> Self {
        self.raw(EntryType::Regular, name, "", 0o644, content.as_bytes())
    }

    pub(crate) fn dir(self, name: &str) -> Self {
        self.raw(EntryType::Directory, name, "", 0o755, b"")
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.raw(EntryType::Symlink, name, target, 0o777, b"")
    }

    pub(crate) fn hard_link(self, name: &str, target: &str) -> Self {
        self.raw(EntryType::Link, name, target, 0o644, b"")
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }
}

pub(crate) fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn zstd(data: &[u8]) -> Vec<u8> {
    zstd::encode_all(data, 1).unwrap()
}

pub(crate) fn hex(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Configuration of an image with these unpacked layers.
pub(crate) fn config(layers: &[Vec<u8>]) -> serde_json::Value {
    let diff_ids: Vec<_> = layers.iter().map(|layer| format!("sha256:{}", hex(layer))).collect();
    serde_json::json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "created": "2024-05-06T07:08:09.5Z",
        "config": {
            "Env": ["PATH=/usr/bin:/bin", "EMPTY=", "EQUALS=a=b"],
            "Entrypoint": ["/entry"], "Cmd": null, "WorkingDir": "/work", "User": "1000:1000",
            "ExposedPorts": {"8080/tcp": {}}, "Volumes": {"/data": {}}, "Labels": {"a": "b"}, "StopSignal": "SIGINT",
        },
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    })
}

/// Files of an OCI layout: path and content.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

fn put(files: &mut Files, data: Vec<u8>) -> String {
    let hex = hex(&data);
    files.insert(format!("blobs/sha256/{hex}"), data);
    format!("sha256:{hex}")
}

/// An image as an OCI layout; `pack` compresses the layers.
pub(crate) fn oci(layers: &[Layer], name: Option<&str>, pack: impl Fn(&[u8]) -> Vec<u8>) -> Files {
    let layers: Vec<_> = layers.iter().map(Layer::bytes).collect();
    let mut files = Files::new();
    let manifest = oci_manifest(&mut files, &layers, config(&layers), pack);
    let mut descriptor = described(&files, "application/vnd.oci.image.manifest.v1+json", &manifest);
    if let Some(name) = name {
        descriptor["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": name});
    }
    oci_index(&mut files, &[descriptor]);
    files
}

pub(crate) fn oci_manifest(
    files: &mut Files,
    layers: &[Vec<u8>],
    config: serde_json::Value,
    pack: impl Fn(&[u8]) -> Vec<u8>,
) -> String {
    let config = put(files, config.to_string().into_bytes());
    let config = described(files, "application/vnd.oci.image.config.v1+json", &config);
    let mut descriptors = Vec::new();
    for layer in layers {
        let packed = pack(layer);
        let kind = match packed.as_slice() {
            [0x1f, 0x8b, ..] => "tar+gzip",
            [0x28, 0xb5, 0x2f, 0xfd, ..] => "tar+zstd",
            _ => "tar",
        };
        let digest = put(files, packed);
        descriptors.push(described(files, &format!("application/vnd.oci.image.layer.v1.{kind}"), &digest));
    }
    let manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": descriptors,
    });
    put(files, manifest.to_string().into_bytes())
}

fn described(files: &Files, kind: &str, digest: &str) -> serde_json::Value {
    let size = files[&digest.replace("sha256:", "blobs/sha256/")].len();
    serde_json::json!({"mediaType": kind, "digest": digest, "size": size})
}

pub(crate) fn oci_index(files: &mut Files, descriptors: &[serde_json::Value]) {
    let index = serde_json::json!({"schemaVersion": 2, "manifests": descriptors});
    files.insert("index.json".into(), index.to_string().into_bytes());
    files.insert("oci-layout".into(), br#"{"imageLayoutVersion": "1.0.0"}"#.to_vec());
}

/// An archive in the older form of `docker save`.
pub(crate) fn docker_save(images: &[(&str, &[Layer])]) -> Files {
    let mut files = Files::new();
    let mut manifest = Vec::new();
    for (name, layers) in images {
        let layers: Vec<_> = layers.iter().map(Layer::bytes).collect();
        let config = config(&layers).to_string().into_bytes();
        let config_name = format!("{}.json", hex(&config));
        files.insert(config_name.clone(), config);
        let mut names = Vec::new();
        for layer in layers {
            names.push(format!("{}/layer.tar", hex(&layer)));
            files.insert(names[names.len() - 1].clone(), layer);
        }
        manifest.push(serde_json::json!({"Config": config_name, "RepoTags": [name], "Layers": names}));
    }
    files.insert("manifest.json".into(), serde_json::json!(manifest).to_string().into_bytes());
    files
}

/// The files as a tar archive.
pub(crate) fn archive(files: &Files) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, content.as_slice()).unwrap();
    }
    builder.into_inner().unwrap()
}

/// A store in a directory of its own.
pub(crate) struct Fixture {
    pub(crate) dir: TempDir,
    pub(crate) store: ImageStore,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::with(|_| ())
    }

    pub(crate) fn with(change: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options();
        change(&mut options);
        let store = ImageStore::open_with(dir.path().join("data"), options).unwrap();
        Self { dir, store }
    }

    pub(crate) fn write(&self, name: &str, data: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, data).unwrap();
        path
    }

    pub(crate) fn load_bytes(&self, data: &[u8], name: Option<&str>) -> Result<Loaded> {
        let path = self.write("archive", data);
        self.store.load(&path, name, &|_| ())
    }

    /// Loads an image of these layers, as an OCI archive.
    pub(crate) fn load(&self, layers: &[Layer]) -> Result<Loaded> {
        self.load_bytes(&archive(&oci(layers, None, gzip)), Some("test"))
    }

    /// The error of loading one layer; nothing may be left of it.
    pub(crate) fn refused(&self, layer: Layer) -> Error {
        let before = self.files();
        let error = self.load(&[layer]).unwrap_err();
        assert_eq!(self.files(), before, "something was left after: {error}");
        error
    }

    /// Paths of everything in the store.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut all = walk(&self.dir.path().join("data"));
        all.retain(|path| !path.ends_with("gc.lock") && !path.ends_with("index.lock"));
        all
    }
}

/// What a sandbox leaves on the disk for as long as it lives, as the engine makes it, and the lock of its init.
pub(crate) struct FakeSandbox {
    dir: PathBuf,
    _log: std::fs::File,
}

impl FakeSandbox {
    pub(crate) fn of(fixture: &Fixture, id: &str, image: &Image, runs: bool) -> Self {
        let dir = fixture.dir.path().join("data/sandboxes").join(id);
        std::fs::create_dir_all(&dir).unwrap();
        let layers: Vec<_> = image.roots.iter().flat_map(|root| &root.lowers).collect();
        let text = serde_json::json!({"image": image.id, "layers": layers}).to_string();
        std::fs::write(dir.join("image"), text).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        if runs {
            rustix::fs::flock(&log, rustix::fs::FlockOperation::LockShared).unwrap();
        }
        Self { dir, _log: log }
    }
}

impl Drop for FakeSandbox {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.dir).unwrap();
    }
}

/// The lock of a server on the data directory.
pub(crate) fn fake_server(fixture: &Fixture) -> std::fs::File {
    let lock = std::fs::File::create(fixture.dir.path().join("data/lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    lock
}

pub(crate) fn options() -> Options {
    let limits = Limits { min_free_bytes: 1 << 20, ..Limits::default() };
    Options { limits, host_root: None, ..Options::default() }
}

fn walk(path: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            all.extend(walk(&entry.path()));
        }
        all.push(entry.path());
    }
    all.sort();
    all
}

/// A mounted image, taken down when dropped.
pub(crate) struct Mounted {
    pub(crate) dir: TempDir,
    mounts: Vec<PathBuf>,
}

impl Mounted {
    pub(crate) fn image(image: &Image) -> Self {
        let mut mounted = Self { dir: tempfile::tempdir().unwrap(), mounts: Vec::new() };
        for root in &image.roots {
            let target = mounted.root().join(root.mountpoint.trim_start_matches('/'));
            mounted.overlay(&root.lowers, &target);
        }
        mounted
    }

    pub(crate) fn lowers(lowers: &[PathBuf]) -> Self {
        let mut mounted = Self { dir: tempfile::tempdir().unwrap(), mounts: Vec::new() };
        mounted.overlay(lowers, &mounted.root());
        mounted
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn overlay(&mut self, lowers: &[PathBuf], target: &Path) {
        let number = self.mounts.len();
        let [upper, work] = ["upper", "work"].map(|name| self.dir.path().join(format!("{name}{number}")));
        for path in [&upper, &work] {
            std::fs::create_dir(path).unwrap();
        }
        std::fs::create_dir_all(target).unwrap();
        let lowers: Vec<_> = lowers.iter().map(|path| path.to_str().unwrap()).collect();
        let data =
            format!("lowerdir={},upperdir={},workdir={}", lowers.join(":"), upper.display(), work.display());
        let data = CString::new(data).unwrap();
        rustix::mount::mount("overlay", target, "overlay", MountFlags::empty(), data.as_c_str()).unwrap();
        self.mounts.push(target.into());
    }

    /// Runs a program with the image as its root; returns what it wrote.
    pub(crate) fn run(&self, command: &[&str]) -> String {
        let output = Command::new("chroot")
            .arg(self.root())
            .args(command)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", "/root")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// Gives it the few devices and the process list that programs count on.
    pub(crate) fn add_devices(&mut self) {
        let character = rustix::fs::FileType::CharacterDevice;
        for (name, minor) in [("null", 3), ("zero", 5), ("urandom", 9)] {
            let path = self.root().join("dev").join(name);
            let mode = rustix::fs::Mode::from_raw_mode(0o666);
            rustix::fs::mknodat(rustix::fs::CWD, &path, character, mode, rustix::fs::makedev(1, minor))
                .unwrap();
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        }
        let proc = self.root().join("proc");
        rustix::mount::mount("proc", &proc, "proc", MountFlags::empty(), None).unwrap();
        self.mounts.push(proc);
    }

    /// Everything in it, described.
    pub(crate) fn tree(&self) -> BTreeMap<String, String> {
        tree(&self.root())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        for mount in self.mounts.iter().rev() {
            rustix::mount::unmount(mount, UnmountFlags::DETACH).unwrap();
        }
    }
}

/// What lies below a directory: path, and kind with owner, mode and content.
pub(crate) fn tree(root: &Path) -> BTreeMap<String, String> {
    describe(root, walk(root))
}

/// As [`tree`], without names that overlayfs lists but does not find.
pub(crate) fn tree_of_found(root: &Path) -> BTreeMap<String, String> {
    let mut all = walk(root);
    all.retain(|path| path.symlink_metadata().is_ok());
    describe(root, all)
}

fn describe(root: &Path, all: Vec<PathBuf>) -> BTreeMap<String, String> {
    let mut tree = BTreeMap::new();
    for path in all {
        let metadata = path.symlink_metadata().unwrap();
        let kind = metadata.file_type();
        let content = if kind.is_dir() {
            "dir".into()
        } else if kind.is_symlink() {
            format!("-> {}", std::fs::read_link(&path).unwrap().display())
        } else if kind.is_file() {
            let content = std::fs::read(&path).unwrap();
            let content = String::from_utf8_lossy(&content);
            format!("file {content}")
        } else if kind.is_char_device() {
            "device".into()
        } else {
            "other".into()
        };
        let name = path.strip_prefix(root).unwrap().as_os_str().as_bytes();
        let mode = if kind.is_symlink() { 0o777 } else { metadata.mode() & 0o7777 };
        let described = format!("{content} {}:{} {mode:o}", metadata.uid(), metadata.gid());
        tree.insert(String::from_utf8_lossy(name).into_owned(), described);
    }
    tree
}
