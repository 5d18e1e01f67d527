//! Archives made to harm: they end with a clear error, and leave nothing in or outside the store.

use crate::support::*;
use osb_engine::image::{Error, ImageStore, Limits, LoadOptions, Options};
use proptest::prelude::*;
use rustix::mount::{MountFlags, UnmountFlags};
use std::path::Path;
use tar::EntryType;

fn unsafe_entry(layer: Layer, entry: &str) {
    match Fixture::new().refused(layer) {
        Error::UnsafeEntry { entry: found, reason, .. } => {
            assert!(found.contains(entry), "{found}: {reason}");
        }
        other => panic!("{entry}: {other}"),
    }
}

#[test]
fn escapes_are_refused() {
    need_root!();
    let block = |kind| Layer::new().dir("x").raw(kind, "x/node", "", 0o666, b"");
    unsafe_entry(Layer::new().file("../x", "x"), "../x");
    unsafe_entry(Layer::new().file("a/../../x", "x"), "a/../../x");
    unsafe_entry(Layer::new().file("/../x", "x"), "/../x");
    unsafe_entry(Layer::new().file("a/..", "x"), "a/..");
    unsafe_entry(Layer::new().dir(".."), "..");
    unsafe_entry(Layer::new().file(".wh...", ""), ".wh...");
    unsafe_entry(Layer::new().file(".wh.", ""), ".wh.");
    unsafe_entry(Layer::new().symlink("evil", "/etc").file("evil/passwd", "x"), "evil/passwd");
    unsafe_entry(Layer::new().symlink("evil", "../../../../../tmp").file("evil/x", "x"), "evil/x");
    unsafe_entry(Layer::new().symlink("a", "b").symlink("b", "a").file("a/x", "x"), "a/x");
    unsafe_entry(Layer::new().symlink("evil", "/proc/self/root").file("evil/x", "x"), "evil/x");
    unsafe_entry(Layer::new().hard_link("link", "/etc/passwd"), "link");
    unsafe_entry(Layer::new().hard_link("link", "../../../etc/passwd"), "../../../etc/passwd");
    unsafe_entry(Layer::new().symlink("evil", "/etc").hard_link("link", "evil/passwd"), "link");
    unsafe_entry(Layer::new().dir("d").hard_link("link", "d"), "link");
    unsafe_entry(Layer::new().file(".wh.w", "").hard_link("link", "w"), "link");
    unsafe_entry(block(EntryType::Block), "x/node");
    unsafe_entry(block(EntryType::Char), "x/node");
    unsafe_entry(Layer::new().file("f", "").file("f/x", ""), "f/x");
    unsafe_entry(Layer::new().raw(EntryType::Symlink, "", "x", 0, b""), "");
    unsafe_entry(Layer::new().symlink("s", ""), "s");
    unsafe_entry(Layer::new().raw(EntryType::new(b'V'), "volume", "", 0, b""), "volume");
    unsafe_entry(Layer::new().file(&"x/".repeat(10_000), ""), "x/x/x");
    unsafe_entry(Layer::new().file(&format!("{}f", "x/".repeat(300)), ""), "x/x/x");
    unsafe_entry(Layer::new().pax(&[("path", b"../../pax")]).file("x", ""), "../../pax");
    unsafe_entry(Layer::new().pax(&[("path", b"a\0b")]).file("x", ""), "a");
    unsafe_entry(Layer::new().pax(&[("uid", b"4294967295")]).file("owner", ""), "owner");
}

#[test]
fn a_symlink_is_replaced_never_written_through() {
    need_root!();
    let fixture = Fixture::new();
    let outside = fixture.write("outside", b"precious");
    let target = outside.to_str().unwrap();
    let layer = Layer::new()
        .symlink("f", target)
        .file("f", "new")
        .symlink("d", target)
        .dir("d")
        .symlink("w", target)
        .file(".wh.w", "")
        .symlink("o", fixture.dir.path().to_str().unwrap())
        .dir("o")
        .file("o/outside", "new");
    fixture.load(&[layer]).unwrap();
    assert_eq!(std::fs::read(outside).unwrap(), b"precious");
}

#[test]
fn damaged_archives_are_told() {
    need_root!();
    let fixture = Fixture::new();
    let layers = [Layer::new().dir("etc").file("etc/a", &"some content ".repeat(1_000))];
    let whole = archive(&oci(&layers, Some("a:b"), gzip));
    for cut in [whole.len() / 2, whole.len() - 3_000, 700] {
        let error = fixture.load_bytes(&whole[..cut], None).unwrap_err();
        assert!(
            matches!(error, Error::Truncated { .. } | Error::BlobMissing { .. } | Error::UnknownKind { .. }),
            "{error}"
        );
    }
    let packed = gzip(&whole);
    let error = fixture.load_bytes(&packed[..packed.len() - 20], None).unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");

    // Any part changed, under its old name.
    let files = oci(&layers, Some("a:b"), gzip);
    for part in files.keys().filter(|name| name.starts_with("blobs/")) {
        let mut changed = files.clone();
        let data = changed.get_mut(part).unwrap();
        let text =
            String::from_utf8_lossy(data).replace("linux", "linus").replace("schemaVersion", "schemaVersioN");
        if *text == *String::from_utf8_lossy(data) {
            // The compressed layer: a byte of its header that the decoder ignores.
            data[4] ^= 1;
        } else {
            *data = text.into_bytes();
        }
        let error = fixture.load_bytes(&archive(&changed), None).unwrap_err();
        assert!(
            matches!(&error, Error::DigestMismatch { blob, .. } if blob.starts_with(part)),
            "{part}: {error}"
        );
        let mut missing = files.clone();
        missing.remove(part);
        let error = fixture.load_bytes(&archive(&missing), None).unwrap_err();
        assert!(matches!(&error, Error::BlobMissing { blob, .. } if blob == part), "{part}: {error}");
    }
    // A truncated layer inside a whole archive: its own digest fits, the content's does not.
    let tar = layers[0].bytes();
    for (cut, pack) in
        [(tar.len(), gzip as fn(&[u8]) -> Vec<u8>), (2_000, gzip), (2_000, zstd), (1_024, gzip)]
    {
        let files = oci(&layers, Some("a:b"), |data| {
            let packed = pack(&data[..cut.min(data.len())]);
            if cut == data.len() { packed[..packed.len() - 10].to_vec() } else { packed }
        });
        let error = fixture.load_bytes(&archive(&files), None).unwrap_err();
        assert!(matches!(error, Error::Truncated { .. } | Error::DigestMismatch { .. }), "{error}");
    }
    assert!(fixture.store.list().unwrap().is_empty());
    assert_eq!(fixture.store.disk_usage().unwrap().layers, 0);
}

#[test]
fn messages_name_the_archive_and_the_layer() {
    need_root!();
    let fixture = Fixture::new();
    let layers = [Layer::new().dir("etc").file("etc/a", &"some content ".repeat(1_000))];
    let told = |data: &[u8], name| fixture.load_bytes(data, name).unwrap_err().to_string();
    let path = fixture.dir.path().join("archive");
    let path = path.to_str().unwrap();
    let trailing = |pack: fn(&[u8]) -> Vec<u8>, rest: &'static [u8]| {
        oci(&layers, Some("a:b"), move |data| [&pack(data), rest].concat())
    };
    for (pack, rest) in
        [(gzip as fn(&[u8]) -> Vec<u8>, &b"abc"[..]), (gzip, b"more than a header of gzip"), (zstd, b"more")]
    {
        let files = trailing(pack, rest);
        let layer = files.keys().find(|name| files[*name].ends_with(rest)).unwrap();
        let message = told(&archive(&files), None);
        assert!(message.starts_with(&format!("{layer} of {path} is damaged: behind its")), "{message}");
        // Around the whole.
        let message = told(&[&pack(&archive(&oci(&layers, Some("a:b"), gzip))), rest].concat(), None);
        assert!(message.starts_with(&format!("{path} is damaged: behind its")), "{message}");
        // Around a root file system.
        let message = told(&[&pack(&layers[0].bytes()), rest].concat(), Some("a:b"));
        assert!(message.starts_with(&format!("{path} is damaged: behind its")), "{message}");
    }
    for pack in [gzip as fn(&[u8]) -> Vec<u8>, zstd] {
        let cut = |data: &[u8]| {
            let packed = pack(data);
            packed[..packed.len() - 10].to_vec()
        };
        let files = oci(&layers, Some("a:b"), cut);
        let expected = format!(" of {path} ends too early; the copy is incomplete, fetch or save it again");
        let message = told(&archive(&files), None);
        assert!(message.starts_with("blobs/sha256/") && message.ends_with(&expected), "{message}");
        let message = told(&cut(&archive(&oci(&layers, Some("a:b"), gzip))), None);
        assert!(message.starts_with(&format!("{path} ends too early")), "{message}");
    }
    // A part that is not there, and none at all.
    let mut files = oci(&layers, Some("a:b"), gzip);
    let parts: Vec<_> = files.keys().filter(|name| name.starts_with("blobs/")).cloned().collect();
    for part in &parts {
        let mut missing = files.clone();
        missing.remove(part);
        let message = told(&archive(&missing), None);
        assert!(message.starts_with(&format!("{path} does not hold {part};")), "{message}");
    }
    files.retain(|name, _| !name.starts_with("blobs/"));
    let message = told(&archive(&files), None);
    assert!(message.starts_with(&format!("{path} does not hold blobs/sha256/")), "{message}");
    // An index of nothing, at the top and below.
    oci_index(&mut files, &[]);
    assert_eq!(
        told(&archive(&files), None),
        format!("the index of {path} is empty; save or push the image again")
    );
    let mut files = oci(&layers, Some("a:b"), gzip);
    let inner = br#"{"schemaVersion":2,"manifests":[]}"#;
    files.insert(format!("blobs/sha256/{}", hex(inner)), inner.to_vec());
    let kind = "application/vnd.oci.image.index.v1+json";
    let digest = format!("sha256:{}", hex(inner));
    oci_index(&mut files, &[serde_json::json!({"mediaType": kind, "digest": digest, "size": inner.len()})]);
    let message = told(&archive(&files), Some("a:b"));
    assert_eq!(message, format!("the index of {digest} of {path} is empty; save or push the image again"));
    let docker = [("manifest.json".to_owned(), b"[]".to_vec())].into();
    assert_eq!(
        told(&archive(&docker), None),
        format!("the index of {path} is empty; save or push the image again")
    );
    // Under another name, where the path is nobody's business.
    let path = fixture.write("archive", &archive(&files));
    let called = LoadOptions {
        reference: Some("a:b"),
        called: Some("registry.example/a:b"),
        ..LoadOptions::default()
    };
    let message = fixture.store.load_with(&path, called, &|_| ()).unwrap_err().to_string();
    assert_eq!(
        message,
        format!("the index of {digest} of registry.example/a:b is empty; save or push the image again")
    );
    assert!(fixture.store.list().unwrap().is_empty());
}

#[test]
fn limits_hold() {
    need_root!();
    let limited = |change: fn(&mut Limits)| Fixture::with(|options| change(&mut options.limits));
    let exceeded = |fixture: &Fixture, layer: Layer, wanted: &str| match fixture.refused(layer) {
        Error::LimitExceeded { setting, .. } => assert_eq!(setting, wanted),
        other => panic!("{wanted}: {other}"),
    };
    let zeros = || Layer::new().raw(EntryType::Regular, "zeros", "", 0o644, &vec![0; 8 << 20]);
    exceeded(&limited(|limits| limits.layer_bytes = 1 << 20), zeros(), "layer_bytes");
    exceeded(&limited(|limits| (limits.ratio, limits.ratio_from_bytes) = (100, 1 << 20)), zeros(), "ratio");
    let many = (0..100).fold(Layer::new(), |layer, number| layer.dir(&format!("d{number}")));
    exceeded(&limited(|limits| limits.entries = 50), many.clone(), "entries");
    exceeded(&limited(|limits| limits.memory_bytes = 5_000), many, "memory_bytes");
    exceeded(
        &limited(|limits| limits.metadata_bytes = 5_000),
        Layer::new().pax(&[("comment", &[b'x'; 9_000])]).file("a", ""),
        "metadata_bytes",
    );
    // The longest name and the deepest path that Linux and the limits allow go in.
    let long = "n".repeat(255);
    let deep = format!("{}f", "d/".repeat(255));
    let fixture = Fixture::new();
    let image = fixture.load(&[Layer::new().file(&long, "l").file(&deep, "d")]).unwrap().images.remove(0);
    assert!(image.roots[0].lowers[0].join(&deep).exists() && image.roots[0].lowers[0].join(&long).exists());
    assert_eq!(fixture.store.remove("test", false).unwrap().layers, 1);
    // A bomb that is packed by zstd, whose frames say how long they are.
    let fixture = limited(|limits| (limits.ratio, limits.ratio_from_bytes) = (100, 1 << 20));
    let files = oci(&[zeros()], Some("a:b"), zstd);
    let error = fixture.load_bytes(&archive(&files), None).unwrap_err();
    assert!(matches!(error, Error::LimitExceeded { setting: "ratio", .. }), "{error}");
    // One in the archive around the layers.
    let fixture = limited(|limits| (limits.ratio, limits.ratio_from_bytes) = (20, 1 << 20));
    let files = oci(&[zeros()], Some("a:b"), <[u8]>::to_vec);
    let error = fixture.load_bytes(&gzip(&archive(&files)), None).unwrap_err();
    assert!(matches!(error, Error::LimitExceeded { setting: "ratio", .. }), "{error}");
    assert!(fixture.store.list().unwrap().is_empty());
    // A size that promises more than there is.
    let mut header = tar::Header::new_gnu();
    header.set_path("huge").unwrap();
    header.set_size(1 << 50);
    exceeded(&Fixture::new(), Layer::new().push(header.clone(), b""), "layer_bytes");
    header.set_size(u64::MAX);
    assert!(matches!(
        Fixture::new().refused(Layer::new().push(header, b"")),
        Error::LimitExceeded { .. } | Error::Malformed { .. }
    ));
}

#[test]
fn a_full_disk_is_told_and_cleaned_up() {
    need_root!();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    rustix::mount::mount("tmpfs", &data, "tmpfs", MountFlags::empty(), c"size=8m").unwrap();
    struct Mount<'a>(&'a Path);
    impl Drop for Mount<'_> {
        fn drop(&mut self) {
            rustix::mount::unmount(self.0, UnmountFlags::DETACH).unwrap();
        }
    }
    let _mount = Mount(&data);
    let layers = [Layer::new().raw(EntryType::Regular, "big", "", 0o644, &vec![7; 20 << 20])];
    let path = dir.path().join("archive");
    std::fs::write(&path, archive(&oci(&layers, Some("a:b"), gzip))).unwrap();
    let mut limits = Limits { min_free_bytes: 0, ..Limits::default() };
    for min_free in [0, 4 << 20] {
        limits.min_free_bytes = min_free;
        let options = Options { limits: limits.clone(), host_root: None, ..Options::default() };
        let store = ImageStore::open_with(&data, options).unwrap();
        let error = store.load(&path, None, &|_| ()).unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert_eq!(std::fs::read_dir(data.join("images/tmp")).unwrap().count(), 0);
    }
    let free = rustix::fs::statvfs(&data).unwrap();
    assert!(free.f_bavail * free.f_frsize > 7 << 20);
}

fn hostile_path() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => "[ab]", 1 => Just("..".to_owned()), 1 => Just(".".to_owned()), 1 => Just(String::new()),
        1 => "\\.wh\\.[ab]", 1 => Just(".wh..wh..opq".to_owned()), 1 => Just("outside".to_owned()),
    ];
    proptest::collection::vec(part, 1..5).prop_map(|parts| parts.join("/"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a layer holds, nothing outside its directory changes.
    #[test]
    fn nothing_outside_changes(entries in proptest::collection::vec((0_u8..6, hostile_path(), hostile_path()), 1..12)) {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let fixture = Fixture::new();
        fixture.write("outside/a/b", b"precious");
        let outside = fixture.dir.path().join("outside");
        let before = tree(&outside);
        let mut layer = Layer::new();
        for (kind, name, link) in &entries {
            let link = match kind {
                4 => format!("{}/{link}", outside.display()),
                5 => format!("../../../../../{link}"),
                _ => link.clone(),
            };
            layer = match kind {
                0 => layer.file(name, "new"),
                1 => layer.dir(name),
                2 => layer.hard_link(name, &link),
                _ => layer.symlink(name, &link),
            };
        }
        let result = fixture.load(&[layer]);
        prop_assert_eq!(tree(&outside), before);
        if let Err(error) = result {
            prop_assert!(matches!(error, Error::UnsafeEntry { .. }), "{}", error);
        }
        prop_assert_eq!(std::fs::read_dir(fixture.dir.path().join("data/images/tmp")).unwrap().count(), 0);
    }
}
