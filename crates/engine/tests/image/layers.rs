//! What layers do to each other, seen through real overlay mounts.

use crate::support::*;
use osb_engine::image::Image;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use tar::EntryType;

fn merged(layers: &[Layer]) -> BTreeMap<String, String> {
    let fixture = Fixture::new();
    Mounted::image(&fixture.load(layers).unwrap().images[0]).tree()
}

#[test]
fn whiteouts_and_replacements() {
    need_root!();
    let base = Layer::new()
        .dir("a")
        .file("a/1", "1")
        .file("a/2", "2")
        .dir("a/sub")
        .file("a/sub/x", "x")
        .dir("opaque")
        .file("opaque/old", "old")
        .dir("again")
        .file("again/old", "old")
        .file("was-file", "f")
        .dir("was-dir")
        .file("was-dir/x", "x")
        .dir("gone")
        .file("gone/x", "x")
        .dir("late")
        .file("late/old", "old")
        .dir("first")
        .file("first/old", "old");
    let upper = Layer::new()
        .dir("a")
        .file("a/.wh.1", "")
        .file("a/.wh.sub", "")
        .file("a/3", "3")
        .dir("opaque")
        .file("opaque/.wh..wh..opq", "")
        .file("opaque/new", "new")
        // Deleted, and made anew in the same layer, in both orders.
        .file(".wh.again", "")
        .dir("again")
        .file("again/new", "new")
        .dir("first")
        .file("first/new", "new")
        .file(".wh.first", "")
        .dir("was-file")
        .file("was-file/x", "x")
        .file("was-dir", "f")
        .file(".wh.gone", "")
        // The marker comes after what it must not hide.
        .dir("late")
        .file("late/new", "new")
        .file("late/.wh..wh..opq", "")
        .file(".wh..wh.aufs", "")
        .dir(".wh..wh.plnk")
        .file(".wh..wh.plnk/1.2", "");
    let tree = merged(&[base, upper]);
    let names: Vec<_> = tree.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "a",
            "a/2",
            "a/3",
            "again",
            "again/new",
            "first",
            "first/new",
            "late",
            "late/new",
            "opaque",
            "opaque/new",
            "was-dir",
            "was-file",
            "was-file/x",
        ]
    );
    assert_eq!(tree["was-dir"], "file f 0:0 644");
}

#[test]
fn attributes_are_kept() {
    need_root!();
    let capability = b"\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";
    let long = format!("{}/{}", "d".repeat(150), "f".repeat(200));
    let layer = Layer::new()
        .raw(EntryType::Directory, "./", "", 0o751, b"")
        .raw(EntryType::Directory, "tmp/", "", 0o1777, b"")
        .file("tmp/inside", "changes the time of tmp")
        .raw(EntryType::Directory, "closed", "", 0o000, b"")
        .file("closed/file", "under a closed directory")
        .raw(EntryType::Regular, "suid", "", 0o4755, b"s")
        .pax(&[
            ("uid", b"33"),
            ("gid", b"44"),
            ("mtime", b"1234567890.123456789"),
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.user.a", b"line\nline"),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.security.selinux", b"label"),
            ("SCHILY.xattr.user.overlay.redirect", b"/x"),
        ])
        .file("capable", "c")
        .hard_link("linked", "capable")
        .hard_link("linked", "capable")
        .symlink("dangling", "/nowhere/../..")
        .raw(EntryType::Fifo, "fifo", "", 0o622, b"")
        .file(&long, "long")
        .raw(EntryType::Char, "dev/null", "", 0o666, b"");
    let fixture = Fixture::new();
    let loaded = fixture.load(&[layer]).unwrap();
    assert!(loaded.warnings.iter().any(|warning| warning.contains("dev/null")), "{:?}", loaded.warnings);
    let root = &loaded.images[0].roots[0].lowers[0];
    let tree = tree(root);
    assert_eq!(std::fs::metadata(root).unwrap().mode() & 0o7777, 0o751);
    assert_eq!(tree["tmp"], "dir 0:0 1777");
    assert_eq!(tree["closed"], "dir 0:0 0");
    assert_eq!(tree["suid"], "file s 0:0 4755");
    assert_eq!(tree["capable"], "file c 33:44 644");
    assert_eq!(tree["fifo"], "other 0:0 622");
    assert_eq!(tree["dangling"], "-> /nowhere/../.. 0:0 777");
    assert_eq!(tree[&long], "file long 0:0 644");
    assert!(!root.join("dev/null").exists());
    let at = |name: &str| root.join(name).symlink_metadata().unwrap();
    assert_eq!((at("tmp").mtime(), at("dangling").mtime()), (1_000_000, 1_000_000));
    assert_eq!((at("capable").mtime(), at("capable").mtime_nsec()), (1_234_567_890, 123_456_789));
    assert_eq!(at("capable").ino(), at("linked").ino());
    let xattr = |name: &str| {
        let mut value = [0; 64];
        rustix::fs::getxattr(root.join("capable"), name, &mut value[..]).map(|count| value[..count].to_vec())
    };
    assert_eq!(xattr("user.a").unwrap(), b"line\nline");
    assert_eq!(xattr("security.capability").unwrap(), capability);
    for dropped in ["trusted.overlay.opaque", "security.selinux", "user.overlay.redirect"] {
        assert!(xattr(dropped).is_err(), "{dropped}");
    }
}

#[test]
fn links_stay_inside_the_image() {
    need_root!();
    let layer = Layer::new()
        .dir("usr")
        .dir("usr/lib")
        .symlink("lib", "usr/lib")
        .symlink("up", "../../usr")
        .symlink("abs", "/usr/lib")
        .file("lib/a", "a")
        .file("up/b", "b")
        .file("abs/c", "c")
        .file("/rooted", "r");
    let tree = merged(&[layer]);
    for name in ["usr/lib/a", "usr/b", "usr/lib/c", "rooted"] {
        assert!(tree.contains_key(name), "{name}: {tree:?}");
    }
}

#[test]
fn hard_links_reach_into_lower_layers() {
    need_root!();
    let base = Layer::new()
        .dir("usr")
        .dir("usr/lib")
        .symlink("lib", "usr/lib")
        .file("usr/lib/a", "a")
        .file("b", "b")
        .file("c", "c")
        .file("taken", "old");
    // Renamed in effect; through a link of the lower layer; to a file that the layer replaces; and in the way of
    // another.
    let upper = Layer::new()
        .dir("new")
        .hard_link("new/b", "b")
        .file(".wh.b", "")
        .hard_link("a2", "lib/a")
        .hard_link("c-before", "c")
        .file("c", "changed")
        .hard_link("taken", "lib/a")
        .hard_link("own", "lib/a")
        .file("own", "the layer's own");
    let fixture = Fixture::new();
    let image = fixture.load(&[base.clone(), upper]).unwrap().images.remove(0);
    let mounted = Mounted::image(&image);
    let tree = mounted.tree();
    for (name, content) in [
        ("new/b", "b"),
        ("a2", "a"),
        ("c-before", "c"),
        ("c", "changed"),
        ("taken", "a"),
        ("own", "the layer's own"),
    ] {
        assert_eq!(tree[name], format!("file {content} 0:0 644"), "{name}");
    }
    assert!(!tree.contains_key("b"), "{tree:?}");
    let inode = |name: &str| mounted.root().join(name).metadata().unwrap().ino();
    assert_eq!(inode("a2"), inode("usr/lib/a"));
    assert_eq!(mounted.root().join("new").metadata().unwrap().mtime(), 1_000_000);
    // The same over many layers, and over a restart's index.
    let layers = [base, Layer::new().dir("x"), Layer::new().dir("y"), Layer::new().hard_link("y/b", "b")];
    let image = fixture.load(&layers).unwrap().images.remove(0);
    assert_eq!(Mounted::image(&image).tree()["y/b"], "file b 0:0 644");
    // To nothing at all, to a directory, out of the image.
    for (target, _) in [("nowhere", 0), ("usr", 0), ("lib", 0)] {
        let layers = [Layer::new().dir("usr").symlink("lib", "/etc"), Layer::new().hard_link("l", target)];
        let result = fixture.load(&layers);
        match target {
            // A link to a symbolic link is one.
            "lib" => assert_eq!(Mounted::image(&result.unwrap().images[0]).tree()["l"], "-> /etc 0:0 777"),
            _ => assert!(matches!(result, Err(osb_engine::image::Error::UnsafeEntry { .. })), "{target}"),
        }
    }
    let layers = [Layer::new().symlink("out", "/etc"), Layer::new().hard_link("l", "out/passwd")];
    assert!(fixture.load(&layers).is_err());
}

#[test]
fn many_layers_become_at_most_three() {
    need_root!();
    let layer = |number: usize| {
        let layer =
            Layer::new().dir("etc").file("etc/last", &number.to_string()).file(&format!("etc/{number}"), "");
        if number > 0 { layer.file(&format!("etc/.wh.{}", number - 1), "") } else { layer }
    };
    for count in 1..=6 {
        let layers: Vec<_> = (0..count).map(layer).collect();
        let fixture = Fixture::new();
        let image = fixture.load(&layers).unwrap().images.remove(0);
        assert!(image.roots[0].lowers.len() <= 3);
        let tree = Mounted::image(&image).tree();
        let last = (count - 1).to_string();
        assert_eq!(tree["etc/last"], format!("file {last} 0:0 644"));
        assert_eq!(tree.len(), 3, "{tree:?}");
        // The names of a merge cost no space.
        assert_eq!(fixture.store.disk_usage().unwrap().bytes, count as u64);
    }
    // The same layer twice is stacked once.
    let fixture = Fixture::new();
    let twice = [layer(0), layer(1), layer(0)];
    let image = fixture.load(&twice).unwrap().images.remove(0);
    let tree = Mounted::image(&image).tree();
    assert!(tree.contains_key("etc/0") && tree.contains_key("etc/1"), "{tree:?}");
    assert_eq!(tree["etc/last"], "file 0 0:0 644");
}

/// One step of a random layer.
#[derive(Clone, Debug)]
enum Step {
    Dir(String, u32),
    File(String, u32),
    Link(String),
    Whiteout(String),
    Opaque(String),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = "[abc](/[abc]){0,2}";
    let step = prop_oneof![
        2 => (path, 0_u32..8).prop_map(|(path, number)| Step::Dir(path, number)),
        3 => (path, 0_u32..8).prop_map(|(path, number)| Step::File(path, number)),
        1 => path.prop_map(Step::Link),
        2 => path.prop_map(Step::Whiteout),
        1 => path.prop_map(Step::Opaque),
    ];
    proptest::collection::vec(step, 1..8)
}

type Model = BTreeMap<String, String>;

fn parents(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

fn remove_below(model: &mut Model, path: &str) {
    model.retain(|name, _| !name.starts_with(&format!("{path}/")));
}

/// Makes a tar layer of the steps, and does to the model what the image format says they do.
fn build(steps: &[Step], model: &mut Model) -> Layer {
    let (mut layer, mut own) = (Layer::new(), Model::new());
    let mut hidden = Vec::new();
    for step in steps {
        let (Step::Dir(path, _)
        | Step::File(path, _)
        | Step::Link(path)
        | Step::Whiteout(path)
        | Step::Opaque(path)) = step;
        // Entries below what is no directory in this layer would be an error.
        if parents(path).any(|parent| own.get(parent).is_some_and(|kind| !kind.starts_with("dir"))) {
            continue;
        }
        for parent in parents(path) {
            if !own.contains_key(parent) {
                layer = layer.dir(parent);
                own.insert(parent.into(), "dir 0:0 755".into());
            }
        }
        let is_dir = own.get(path).is_some_and(|kind| kind.starts_with("dir"));
        match step {
            Step::Dir(_, number) => {
                let mode = 0o700 + number;
                layer = layer.raw(EntryType::Directory, path, "", mode, b"");
                if own.contains_key(path) && !is_dir {
                    hidden.push(path.clone());
                }
                own.insert(path.clone(), format!("dir 0:0 {mode:o}"));
            }
            Step::File(_, number) => {
                layer = layer.file(path, &number.to_string());
                remove_below(&mut own, path);
                own.insert(path.clone(), format!("file {number} 0:0 644"));
            }
            Step::Link(_) => {
                layer = layer.symlink(path, "/nowhere");
                remove_below(&mut own, path);
                own.insert(path.clone(), "-> /nowhere 0:0 777".into());
            }
            Step::Whiteout(_) => {
                let (parent, name) = path.rsplit_once('/').map_or(("", path.as_str()), |parts| parts);
                layer = layer.file(format!("{parent}/.wh.{name}").trim_start_matches('/'), "");
                hidden.push(path.clone());
            }
            Step::Opaque(_) => {
                if own.contains_key(path) && !is_dir {
                    continue;
                }
                if !is_dir {
                    layer = layer.dir(path);
                    own.insert(path.clone(), "dir 0:0 755".into());
                }
                layer = layer.file(&format!("{path}/.wh..wh..opq"), "");
                hidden.push(path.clone());
            }
        }
    }
    for path in hidden {
        model.remove(&path);
        remove_below(model, &path);
    }
    for (path, kind) in own {
        let covers =
            model.get(&path).is_some_and(|below| !below.starts_with("dir")) || !kind.starts_with("dir");
        if covers {
            remove_below(model, &path);
        }
        model.insert(path, kind);
    }
    layer
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random stacks look as the format says, and so do their unmerged layers when overlayfs stacks them: whiteouts
    /// that it lists where nothing lies below are the reason for merging.
    #[test]
    fn random_stacks(stack in proptest::collection::vec(steps(), 1..7)) {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let mut model = Model::new();
        let layers: Vec<_> = stack.iter().map(|steps| build(steps, &mut model)).collect();
        let fixture = Fixture::new();
        let image: Image = fixture.load(&layers).unwrap().images[0].as_ref().clone();
        prop_assert_eq!(&Mounted::image(&image).tree(), &model);
        let mut lowers = Vec::new();
        for layer in layers.iter().rev() {
            let path = fixture.dir.path().join("data/images/layers").join(hex(&layer.bytes()));
            if !lowers.contains(&path) {
                lowers.push(path);
            }
        }
        prop_assert_eq!(tree_of_found(&Mounted::lowers(&lowers).root()), model);
    }
}
