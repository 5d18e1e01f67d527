//! Archives as other programs write them. Where a program is not installed, its test says so.

use crate::support::*;
use osb_engine::image::Image;
use std::path::Path;
use std::process::Command;

/// Whether the program is there; says so when it is not.
fn has(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&paths).any(|dir| dir.join(program).exists());
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn layers() -> [Layer; 2] {
    [
        Layer::new().dir("etc/").file("etc/a", "old").file("etc/gone", "x").hard_link("etc/linked", "etc/a"),
        Layer::new().file("etc/a", "new").file("etc/.wh.gone", ""),
    ]
}

fn check(image: &Image) {
    let tree = Mounted::image(image).tree();
    assert_eq!(tree["etc/a"], "file new 0:0 644");
    assert_eq!(tree["etc/linked"], "file old 0:0 644");
    assert!(!tree.contains_key("etc/gone"), "{tree:?}");
    assert_eq!(image.config.entrypoint, ["/entry"]);
    assert_eq!(image.config.stop_signal.as_deref(), Some("SIGINT"));
}

#[test]
fn all_that_skopeo_writes() {
    need_root!();
    if !has("skopeo") {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let at = |name: &str| work.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("in.tar"), archive(&oci(&layers(), Some("localhost/in:1"), gzip))).unwrap();
    let source = format!("oci-archive:{}", at("in.tar"));
    let mut ids = Vec::new();
    for (target, name) in [
        (format!("docker-archive:{}:team/app:v1", at("docker.tar")), "docker.tar"),
        (format!("oci-archive:{}:localhost/app:v1", at("oci.tar")), "oci.tar"),
        (format!("oci:{}:localhost/app:v1", at("layout")), "layout"),
        (format!("dir:{}", at("dir")), "dir"),
    ] {
        run("skopeo", &["--insecure-policy", "copy", "--quiet", &source, &target]);
        let fixture = Fixture::new();
        let loaded = fixture.store.load(Path::new(&at(name)), Some("app"), &|_| ());
        let image = loaded.unwrap_or_else(|error| panic!("{target}: {error}")).images.remove(0);
        check(&image);
        ids.push(image.id.clone());
    }
    // Whatever the form, the configuration is the same, and so is the image.
    ids.dedup();
    assert_eq!(ids.len(), 1, "{ids:?}");
    // zstd, as current builders write it.
    let target = format!("oci-archive:{}", at("zstd.tar"));
    let copy = ["--insecure-policy", "copy", "--quiet", "--dest-compress-format", "zstd", &source, &target];
    run("skopeo", &copy);
    check(&Fixture::new().store.load(Path::new(&at("zstd.tar")), Some("app"), &|_| ()).unwrap().images[0]);
}

#[test]
fn a_root_file_system_of_mmdebstrap() {
    need_root!();
    // The real program needs a mirror; what is tested is the form that it writes: GNU tar with numeric owners, device
    // nodes, and xattrs as PAX records.
    let fixture = Fixture::new();
    let root = fixture.dir.path().join("root");
    for (path, content) in [("usr/bin/tool", "t"), ("etc/debian_version", "12.0"), ("var/log/x", "")] {
        fixture.write(&format!("root/{path}"), content.as_bytes());
    }
    std::os::unix::fs::symlink("usr/bin", root.join("bin")).unwrap();
    std::fs::create_dir(root.join("dev")).unwrap();
    let device = rustix::fs::makedev(1, 3);
    let mode = rustix::fs::Mode::from_raw_mode(0o666);
    let character = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(rustix::fs::CWD, root.join("dev/null"), character, mode, device).unwrap();
    std::os::unix::fs::chown(root.join("var/log/x"), Some(0), Some(4)).unwrap();
    let tar = fixture.dir.path().join("root.tar");
    let (tar, from) = (tar.to_str().unwrap(), root.to_str().unwrap());
    let options = [
        "--sort=name",
        "--numeric-owner",
        "--xattrs",
        "--format=pax",
        "--pax-option=delete=atime,delete=ctime",
    ];
    run("tar", &[&options[..], &["-cf", tar, "-C", from, "."]].concat());
    let loaded = fixture.store.load(Path::new(tar), Some("debian:12"), &|_| ()).unwrap();
    assert!(loaded.warnings.iter().any(|warning| warning.contains("dev/null")), "{:?}", loaded.warnings);
    let tree = tree(&loaded.images[0].roots[0].lowers[0]);
    assert_eq!(tree["etc/debian_version"], "file 12.0 0:0 644");
    assert_eq!(tree["var/log/x"], "file  0:4 644");
    assert_eq!(tree["bin"], "-> usr/bin 0:0 777");
}

#[test]
fn sparse_files_in_every_form_of_gnu_tar() {
    need_root!();
    let fixture = Fixture::new();
    let root = fixture.dir.path().join("root");
    std::fs::create_dir_all(root.join("etc")).unwrap();
    let mut content = vec![0_u8; 9 << 20];
    // More parts than fit into a header, an end that is a hole, a file that is one.
    for part in 0..60 {
        content[part * 128 * 1024..][..4_096].fill(part as u8 + 1);
    }
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(root.join("etc/sparse")).unwrap();
    for part in 0..60 {
        let at = part * 128 * 1024;
        file.write_at(&content[at..at + 4_096], at as u64).unwrap();
    }
    file.set_len(9 << 20).unwrap();
    std::fs::File::create(root.join("etc/hole")).unwrap().set_len(3 << 20).unwrap();
    fixture.write("root/etc/after", b"after");
    let from = root.to_str().unwrap();
    for form in [
        &["--format=gnu"][..],
        &["--format=pax", "--sparse-version=0.1"],
        &["--format=pax", "--sparse-version=1.0"],
    ] {
        let tar = fixture.dir.path().join("sparse.tar");
        let tar = tar.to_str().unwrap();
        run(
            "tar",
            &[&["--sparse", "--hole-detection=raw"][..], form, &["-cf", tar, "-C", from, "."]].concat(),
        );
        assert!(std::fs::metadata(tar).unwrap().len() < 2 << 20, "tar wrote no holes");
        let image = fixture.store.load(Path::new(tar), Some("sparse"), &|_| ()).unwrap().images.remove(0);
        let lower = image.roots[0].lowers[0].clone();
        assert!(std::fs::read(lower.join("etc/sparse")).unwrap() == content, "{form:?}");
        assert_eq!(std::fs::read(lower.join("etc/hole")).unwrap(), vec![0; 3 << 20]);
        assert_eq!(std::fs::read(lower.join("etc/after")).unwrap(), b"after");
        use std::os::unix::fs::MetadataExt;
        assert!(lower.join("etc/sparse").metadata().unwrap().blocks() * 512 < 2 << 20, "holes were filled");
        fixture.store.remove("sparse", false).unwrap();
    }
    // The oldest form is told.
    let tar = fixture.dir.path().join("sparse.tar");
    let tar = tar.to_str().unwrap();
    run("tar", &["--sparse", "--format=pax", "--sparse-version=0.0", "-cf", tar, "-C", from, "."]);
    let error = fixture.store.load(Path::new(tar), Some("sparse"), &|_| ()).unwrap_err();
    assert!(error.to_string().contains("--sparse"), "{error}");
}

/// What `docker save` of a current engine writes: an OCI layout and Docker's list beside it, the layers as they are.
#[test]
fn docker_save_of_a_current_engine() {
    need_root!();
    let fixture = Fixture::new();
    let mut files = oci(&layers(), None, <[u8]>::to_vec);
    let index: serde_json::Value = serde_json::from_slice(&files["index.json"]).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    let part = |digest: &str| digest.replace("sha256:", "blobs/sha256/");
    let manifest: serde_json::Value = serde_json::from_slice(&files[&part(&digest)]).unwrap();
    let layer_parts: Vec<_> = manifest["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| part(layer["digest"].as_str().unwrap()))
        .collect();
    let sources: serde_json::Map<_, _> =
        layer_parts.iter().map(|layer| (layer.clone(), serde_json::json!({"size": 1}))).collect();
    let list = serde_json::json!([{
        "Config": part(manifest["config"]["digest"].as_str().unwrap()),
        "RepoTags": ["team/app:v1", "team/app:latest"],
        "Layers": layer_parts,
        "LayerSources": sources,
    }]);
    files.insert("manifest.json".into(), list.to_string().into_bytes());
    files.insert("repositories".into(), br#"{"team/app":{"v1":"abc"}}"#.to_vec());
    oci_index(
        &mut files,
        &[serde_json::json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 1,
            "annotations": {"io.containerd.image.name": "docker.io/team/app:v1", "org.opencontainers.image.ref.name": "v1"},
        })],
    );
    let loaded = fixture.load_bytes(&archive(&files), None).unwrap();
    let names: Vec<_> = loaded.images.iter().map(|image| image.reference.as_str()).collect();
    assert_eq!(names, ["docker.io/team/app:latest", "docker.io/team/app:v1"]);
    check(&loaded.images[0]);
    assert_eq!(fixture.store.disk_usage().unwrap().images, 1);
}
