//! Every form an image may come in.

use crate::support::*;
use osb_engine::image::{Error, Image};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

fn two_layers() -> [Layer; 2] {
    [
        Layer::new().dir("etc/").file("etc/a", "old").file("etc/gone", "x"),
        Layer::new().file("etc/a", "new").file("etc/.wh.gone", ""),
    ]
}

fn check(image: &Image) {
    let mounted = Mounted::image(image);
    let tree = mounted.tree();
    assert_eq!(tree["etc/a"], "file new 0:0 644");
    assert!(!tree.contains_key("etc/gone"), "{tree:?}");
    assert!(!tree.keys().any(|name| name.contains(".wh.")));
}

#[test]
fn docker_archives() {
    need_root!();
    let fixture = Fixture::new();
    let save = docker_save(&[("team/app:v1", &two_layers()), ("other", &[Layer::new().dir("usr")])]);
    let loaded = fixture.load_bytes(&archive(&save), None).unwrap();
    let names: Vec<_> = loaded.images.iter().map(|image| image.reference.as_str()).collect();
    assert_eq!(names, ["docker.io/library/other:latest", "docker.io/team/app:v1"]);
    let image = fixture.store.inspect("team/app:v1").unwrap();
    check(&image);
    assert_eq!(image.config.env[2], ("EQUALS".into(), "a=b".into()));
    assert_eq!(image.config.entrypoint, ["/entry"]);
    assert!(image.config.cmd.is_empty());
    assert_eq!(image.config.workdir.as_deref(), Some("/work"));
    assert_eq!(image.config.user.as_deref(), Some("1000:1000"));
    assert_eq!(image.config.exposed_ports, ["8080/tcp"]);
    assert_eq!(image.config.volumes, ["/data"]);
    assert_eq!(image.config.labels["a"], "b");
    assert_eq!(image.config.stop_signal.as_deref(), Some("SIGINT"));
    assert_eq!(image.created.unwrap().to_string(), "2024-05-06T07:08:09.5Z");
    assert_eq!(image.size_bytes, 7);

    // One of several by name; a name that none has.
    let fixture = Fixture::new();
    assert_eq!(fixture.load_bytes(&archive(&save), Some("other")).unwrap().images.len(), 1);
    let error = fixture.load_bytes(&archive(&save), Some("third")).unwrap_err();
    assert!(error.to_string().contains("docker.io/team/app:v1"), "{error}");
}

#[test]
fn docker_archives_with_links_between_layers() {
    need_root!();
    let fixture = Fixture::new();
    let mut save = docker_save(&[("app", &two_layers())]);
    let layers: Vec<_> = save.keys().filter(|name| name.ends_with("/layer.tar")).cloned().collect();
    let target = save.remove(&layers[0]).unwrap();
    save.insert("shared/layer.tar".into(), target);
    let link = Layer::new().symlink(&layers[0], "../shared/layer.tar").bytes();
    let mut bytes = link[..link.len() - 1024].to_vec();
    bytes.extend(archive(&save));
    check(&fixture.load_bytes(&bytes, None).unwrap().images[0]);
}

#[test]
fn oci_archives_and_layouts_in_every_compression() {
    need_root!();
    let plain = |data: &[u8]| data.to_vec();
    type Pack = fn(&[u8]) -> Vec<u8>;
    let packs: [Pack; 3] = [plain, gzip, zstd];
    for pack in packs {
        for outer in packs {
            let fixture = Fixture::new();
            let files = oci(&two_layers(), Some("localhost:5000/app:v2"), pack);
            let loaded = fixture.load_bytes(&outer(&archive(&files)), None).unwrap();
            assert_eq!(loaded.images[0].reference, "localhost:5000/app:v2");
            check(&loaded.images[0]);
        }
    }
    let fixture = Fixture::new();
    for (name, data) in oci(&two_layers(), Some("v2"), gzip) {
        fixture.write(&format!("layout/{name}"), &data);
    }
    let layout = fixture.dir.path().join("layout");
    // A bare tag names nothing.
    let read = AtomicU64::new(0);
    let error = fixture.store.load(&layout, None, &|_| ()).unwrap_err();
    assert!(matches!(error, Error::NameNeeded { .. }), "{error}");
    let loaded = fixture.store.load(&layout, Some("app"), &|progress| {
        assert!(progress.bytes <= progress.total_bytes && progress.layers <= progress.total_layers);
        read.fetch_max(progress.bytes, Ordering::Relaxed);
    });
    check(&loaded.unwrap().images[0]);
    assert!(read.into_inner() > 100);
}

#[test]
fn streams_of_several_pieces() {
    need_root!();
    let pieces =
        |pack: fn(&[u8]) -> Vec<u8>| move |data: &[u8]| data.chunks(700).flat_map(pack).collect::<Vec<u8>>();
    // A skippable frame, as parallel compressors and seekable formats put between frames.
    let skippable = |data: &[u8]| {
        let mut packed = vec![0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        packed.extend(data.chunks(700).flat_map(zstd));
        packed.extend([0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0]);
        packed
    };
    let fixture = Fixture::new();
    for files in [
        oci(&two_layers(), Some("a:gzip"), pieces(gzip)),
        oci(&two_layers(), Some("a:zstd"), pieces(zstd)),
        oci(&two_layers(), Some("a:skip"), skippable),
    ] {
        check(&fixture.load_bytes(&archive(&files), None).unwrap().images[0]);
        fixture.store.prune(osb_engine::image::Prune::Unused, false).unwrap();
    }
    // Bytes that belong to no piece are no padding.
    let garbage = |data: &[u8]| [gzip(data), b"garbage that is no gzip member".to_vec()].concat();
    let error = fixture.load_bytes(&archive(&oci(&two_layers(), Some("a:b"), garbage)), None).unwrap_err();
    assert!(matches!(error, Error::Malformed { .. }), "{error}");
    // What follows the end of the archive inside a layer is read for the digest and otherwise ignored.
    let mut layer = two_layers()[0].bytes();
    layer.extend(Layer::new().file("etc/after", "x").bytes());
    let mut files = Files::new();
    let layers = [layer];
    let manifest = oci_manifest(&mut files, &layers, config(&layers), gzip);
    oci_index(&mut files, &[serde_json::json!({"digest": manifest})]);
    let loaded = fixture.load_bytes(&archive(&files), Some("after")).unwrap();
    assert!(!Mounted::image(&loaded.images[0]).tree().contains_key("etc/after"));
}

#[test]
fn a_changed_configuration_is_another_image() {
    need_root!();
    let fixture = Fixture::new();
    let path = fixture.write("archive", &archive(&oci(&two_layers(), Some("app:1"), gzip)));
    let plain = fixture.store.load(&path, None, &|_| ()).unwrap().images.remove(0);
    let change = osb_engine::image::ConfigChange {
        env: vec![("EMPTY".into(), "no more".into()), ("NEW".into(), "1".into())],
        user: Some("0".into()),
        cmd: Some(vec!["serve".into()]),
        ..Default::default()
    };
    let options = osb_engine::image::LoadOptions {
        reference: Some("app:2"),
        change: Some(&change),
        ..Default::default()
    };
    let changed = fixture.store.load_with(&path, options, &|_| ()).unwrap().images.remove(0);
    check(&changed);
    assert_ne!(changed.id, plain.id);
    assert_eq!(changed.roots, plain.roots);
    assert_eq!(
        changed.config.env[1..],
        [("EMPTY", "no more"), ("EQUALS", "a=b"), ("NEW", "1")].map(|(a, b)| (a.into(), b.into()))
    );
    assert_eq!(
        (changed.config.entrypoint.clone(), changed.config.cmd.clone()),
        (plain.config.entrypoint.clone(), vec!["serve".to_owned()])
    );
    assert_eq!(changed.config.user.as_deref(), Some("0"));
    // The same change again is the same image; the plain one stays what it was.
    assert_eq!(fixture.store.load_with(&path, options, &|_| ()).unwrap().images[0].id, changed.id);
    assert_eq!(fixture.store.inspect("app:1").unwrap(), plain);
    assert_eq!(fixture.store.disk_usage().unwrap().images, 2);

    let root = fixture.dir.path().join("root");
    fixture.write("root/etc/a", b"new");
    let options = osb_engine::image::LoadOptions { reference: Some("tree"), ..options };
    let tree = fixture.store.load_with(&root, options, &|_| ()).unwrap().images.remove(0);
    assert_eq!((tree.config.cmd.clone(), tree.config.user.as_deref()), (vec!["serve".to_owned()], Some("0")));
    let bare = fixture.store.load(&root, Some("bare"), &|_| ()).unwrap().images.remove(0);
    assert_ne!(bare.id, tree.id);
}

#[test]
fn the_platform_of_this_machine_is_taken() {
    need_root!();
    let fixture = Fixture::new();
    let ours = two_layers().map(|layer| layer.bytes());
    let foreign = [Layer::new().file("etc/a", "foreign").bytes()];
    let mut files = Files::new();
    let mut foreign_config = config(&foreign);
    foreign_config["architecture"] = "s390x".into();
    let digests = [
        oci_manifest(&mut files, &foreign, foreign_config, gzip),
        oci_manifest(&mut files, &ours, config(&ours), gzip),
    ];
    let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let descriptor = |digest: &str, architecture: &str| serde_json::json!({"digest": digest, "platform": {"os": "linux", "architecture": architecture}});
    let attestation = serde_json::json!({
        "digest": digests[0], "platform": {"os": "unknown", "architecture": "unknown"},
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    });
    let index = serde_json::json!({
        "manifests": [attestation, descriptor(&digests[0], "s390x"), descriptor(&digests[1], here)],
    });
    let nested = format!("sha256:{}", hex(index.to_string().as_bytes()));
    files.insert(nested.replace("sha256:", "blobs/sha256/"), index.to_string().into_bytes());
    oci_index(
        &mut files,
        &[
            serde_json::json!({"digest": nested, "annotations": {"io.containerd.image.name": "docker.io/a/b:c"}}),
        ],
    );
    let loaded = fixture.load_bytes(&archive(&files), None).unwrap();
    check(&loaded.images[0]);
    assert_eq!(loaded.images[0].reference, "docker.io/a/b:c");
    assert_eq!(fixture.store.inspect(&format!("a/b@{}", digests[1])).unwrap().id, loaded.images[0].id);

    oci_index(&mut files, &[descriptor(&digests[0], "s390x")]);
    let error = fixture.load_bytes(&archive(&files), Some("x")).unwrap_err();
    assert!(matches!(&error, Error::Platform { found, .. } if found == "linux/s390x"), "{error}");
    // Unless another one is asked for.
    let path = fixture.write("foreign", &archive(&files));
    let options = osb_engine::image::LoadOptions {
        reference: Some("foreign"),
        architecture: Some("s390x"),
        ..Default::default()
    };
    let image = fixture.store.load_with(&path, options, &|_| ()).unwrap().images.remove(0);
    assert_eq!((image.config.architecture.as_str(), image.roots[0].lowers.len()), ("s390x", 1));
    // The configuration decides where no descriptor tells.
    oci_index(&mut files, &[serde_json::json!({"digest": digests[0]})]);
    let error = fixture.load_bytes(&archive(&files), Some("x")).unwrap_err();
    assert!(matches!(error, Error::Platform { .. }), "{error}");
}

#[test]
fn root_archives_and_directories() {
    need_root!();
    let fixture = Fixture::new();
    let layer = Layer::new().dir("./").dir("./etc").file("./etc/a", "new").dir("bin").symlink("bin/sh", "x");
    let image = &fixture.load_bytes(&gzip(&layer.bytes()), Some("fromtar")).unwrap().images[0];
    check(image);
    assert_eq!(image.config.cmd, ["/bin/sh"]);
    let error = fixture.load_bytes(&layer.bytes(), None).unwrap_err();
    assert!(matches!(error, Error::NameNeeded { .. }), "{error}");

    let mut files = Vec::new();
    let root = fixture.dir.path().join("root");
    for (name, content) in [("etc/a", "new"), ("etc/b", "two\0bytes"), ("bin/bash", "")] {
        files.push(fixture.write(&format!("root/{name}"), content.as_bytes()));
    }
    std::fs::hard_link(&files[0], root.join("etc/hard")).unwrap();
    std::os::unix::fs::symlink("/../../etc/passwd", root.join("etc/link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("etc/socket")).unwrap();
    let character = rustix::fs::FileType::CharacterDevice;
    for (name, device) in [("null", rustix::fs::makedev(1, 3)), ("whiteout", 0)] {
        rustix::fs::mknodat(
            rustix::fs::CWD,
            root.join("etc").join(name),
            character,
            rustix::fs::Mode::RUSR,
            device,
        )
        .unwrap();
    }
    std::os::unix::fs::chown(&files[1], Some(12), Some(34)).unwrap();
    rustix::fs::setxattr(&files[1], "user.note", b"kept", rustix::fs::XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(&files[1], "trusted.secret", b"dropped", rustix::fs::XattrFlags::empty()).unwrap();
    let loaded = fixture.store.load(&root, Some("fromdir"), &|_| ()).unwrap();
    assert_eq!(loaded.warnings.len(), 3, "{:?}", loaded.warnings);
    let image = &loaded.images[0];
    check(image);
    assert_eq!(image.config.cmd, ["/bin/bash"]);
    let copy = &image.roots[0].lowers[0];
    assert_eq!(std::fs::read_link(copy.join("etc/link")).unwrap(), Path::new("/../../etc/passwd"));
    assert_eq!(tree(copy)["etc/b"], "file two\0bytes 12:34 644");
    let mut value = [0; 16];
    assert_eq!(rustix::fs::getxattr(copy.join("etc/b"), "user.note", &mut value[..]).unwrap(), 4);
    assert!(rustix::fs::getxattr(copy.join("etc/b"), "trusted.secret", &mut value[..]).is_err());
    let [a, hard] = ["etc/a", "etc/hard"].map(|name| std::fs::metadata(copy.join(name)).unwrap());
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&a), std::os::unix::fs::MetadataExt::ino(&hard));
    assert!(!copy.join("etc/null").exists() && !copy.join("etc/socket").exists());
    assert!(!a.file_type().is_socket());
    // The same tree again is the same layer; a changed one is not.
    assert_eq!(fixture.store.load(&root, Some("again"), &|_| ()).unwrap().images[0].id, image.id);
    fixture.write("root/etc/a", b"newer");
    assert_ne!(fixture.store.load(&root, Some("third"), &|_| ()).unwrap().images[0].id, image.id);
}

#[test]
fn holes_of_a_directory_stay_holes() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    need_root!();
    let fixture = Fixture::new();
    let root = fixture.dir.path().join("root");
    std::fs::create_dir_all(root.join("etc")).unwrap();
    let open = |name: &str| std::fs::File::create(root.join("etc").join(name)).unwrap();
    let (lastlog, hole, end) = (open("lastlog"), open("hole"), open("end"));
    // Larger than the limit of a layer, were its holes counted.
    lastlog.write_at(b"root", 0).unwrap();
    lastlog.write_at(b"nobody", (1 << 40) - 6).unwrap();
    hole.set_len(3 << 20).unwrap();
    end.write_at(b"text", 5_000).unwrap();
    end.set_len(1 << 20).unwrap();
    let build = || fixture.store.load(&root, Some("sparse"), &|_| ()).unwrap().images.remove(0);
    let image = build();
    let file = |name: &str| image.roots[0].lowers[0].join("etc").join(name);
    let (size, disk) = {
        let of = file("lastlog").metadata().unwrap();
        (of.size(), of.blocks() * 512)
    };
    assert!(size == 1 << 40 && disk <= 64 << 10, "{size} {disk}");
    let mut text = [0; 6];
    std::fs::File::open(file("lastlog")).unwrap().read_exact_at(&mut text, (1 << 40) - 6).unwrap();
    assert_eq!(&text, b"nobody");
    assert_eq!(std::fs::read(file("hole")).unwrap(), vec![0; 3 << 20]);
    assert_eq!(file("hole").metadata().unwrap().blocks(), 0);
    assert_eq!(std::fs::read(file("end")).unwrap(), std::fs::read(root.join("etc/end")).unwrap());
    assert!(image.size_bytes < 64 << 10, "{}", image.size_bytes);
    // The same tree without holes is the same image.
    let time = hole.metadata().unwrap().modified().unwrap();
    hole.write_at(&vec![0; 3 << 20], 0).unwrap();
    hole.set_modified(time).unwrap();
    assert_eq!(build().id, image.id);
    // And the same through an archive.
    let tar = fixture.dir.path().join("sparse.tar");
    let status = std::process::Command::new("tar")
        .args(["--sparse", "--hole-detection=seek", "-C"])
        .args([root.as_os_str(), "-cf".as_ref(), tar.as_os_str(), ".".as_ref()])
        .status()
        .unwrap();
    assert!(status.success());
    let image = fixture.store.load(&tar, Some("sparse"), &|_| ()).unwrap().images.remove(0);
    let of = image.roots[0].lowers[0].join("etc/lastlog").metadata().unwrap();
    assert!(of.size() == 1 << 40 && of.blocks() * 512 <= 64 << 10, "{of:?}");
}

#[test]
fn archives_from_pipes() {
    need_root!();
    let fixture = Fixture::new();
    for data in [
        archive(&oci(&two_layers(), Some("a:b"), gzip)),
        gzip(&archive(&oci(&two_layers(), Some("a:b"), gzip))),
    ] {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let path = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        let written = std::thread::spawn(move || std::io::Write::write_all(&mut writer, &data).unwrap());
        check(&fixture.store.load(Path::new(&path), None, &|_| ()).unwrap().images[0]);
        written.join().unwrap();
        fixture.store.remove("a:b", false).unwrap();
    }
}

#[test]
fn busybox_runs_from_a_directory() {
    need_root!();
    let fixture = Fixture::new();
    let Some(busybox) = ["/usr/bin/busybox", "/bin/busybox"].iter().find(|path| Path::new(path).exists())
    else {
        eprintln!("skipped: needs a static busybox");
        return;
    };
    fixture.write("root/bin/busybox", b"");
    let root = fixture.dir.path().join("root");
    std::fs::copy(busybox, root.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", root.join("bin/sh")).unwrap();
    let image = &fixture.store.load(&root, Some("busybox"), &|_| ()).unwrap().images[0];
    let mounted = Mounted::image(image);
    let script = "busybox echo $((6 * 7)) > /made; busybox cat /made";
    assert_eq!(mounted.run(&["/bin/sh", "-c", script]), "42\n");
    assert!(!image.roots[0].lowers[0].join("made").exists(), "layers are never written to");
}

#[test]
fn what_is_no_image_is_told() {
    need_root!();
    let fixture = Fixture::new();
    let unknown = |data: &[u8]| {
        let error = fixture.load_bytes(data, Some("x")).unwrap_err();
        assert!(matches!(error, Error::UnknownKind { .. }), "{error}");
    };
    unknown(b"");
    unknown(b"hello");
    unknown(&[7; 5_000]);
    unknown(&[0; 5_000]);
    unknown(&gzip(b"hello"));
    unknown(&archive(&Files::from([("readme".into(), vec![1])])));
    let error = fixture.load_bytes(b"\xfd7zXZ\0aaaaaa", Some("x")).unwrap_err();
    assert!(error.to_string().contains("xz"), "{error}");
    let empty = fixture.dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    assert!(matches!(fixture.store.load(&empty, Some("x"), &|_| ()), Err(Error::UnknownKind { .. })));
    let missing = fixture.store.load(&empty.join("no"), Some("x"), &|_| ()).unwrap_err();
    assert!(matches!(missing, Error::Io { .. }) && missing.to_string().contains("/no"), "{missing}");
    for name in ["host", "host:latest"] {
        assert!(matches!(fixture.store.load(&empty, Some(name), &|_| ()), Err(Error::Reserved { .. })));
    }
    let host = archive(&docker_save(&[("host", &two_layers())]));
    assert!(matches!(fixture.load_bytes(&host, None), Err(Error::Reserved { .. })));
}

#[test]
fn images_without_layers_are_empty() {
    need_root!();
    let fixture = Fixture::new();
    let image = &fixture.load(&[]).unwrap().images[0];
    assert!(Mounted::image(image).tree().is_empty());
}
