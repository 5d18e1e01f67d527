//! Names, removal, several processes, crashes.

use crate::support::*;
use osb_engine::image::{DiskUsage, Error, ImageStore, Options, Removed};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

fn load(fixture: &Fixture, name: &str, layers: &[Layer]) -> String {
    let loaded = fixture.load_bytes(&archive(&oci(layers, None, gzip)), Some(name)).unwrap();
    loaded.images[0].id.clone()
}

fn layer(text: &str) -> Layer {
    Layer::new().dir("etc").file("etc/a", text)
}

fn names(store: &ImageStore) -> Vec<String> {
    store.list().unwrap().iter().map(|image| image.reference.clone()).collect()
}

#[test]
fn names_are_found_in_every_spelling() {
    need_root!();
    let fixture = Fixture::with(|options| {
        options.aliases = BTreeMap::from([
            ("opensandbox/code-interpreter:*".into(), "python:3.11".into()),
            ("mirror.example.com/team/app:v1".into(), "localhost/app".into()),
        ]);
    });
    let python = load(&fixture, "python:3.11", &[layer("python")]);
    let app = load(&fixture, "localhost/app", &[layer("app")]);
    let find = |name: &str| fixture.store.resolve(name).unwrap().map(|image| image.id.clone());
    for name in [
        "python:3.11",
        "library/python:3.11",
        "docker.io/library/python:3.11",
        "index.docker.io/library/python:3.11",
        "opensandbox/code-interpreter:latest",
        "opensandbox/code-interpreter",
        "opensandbox/code-interpreter:v1.0.2",
        python.as_str(),
        &python[7..],
        &python[7..19],
    ] {
        assert_eq!(find(name).as_ref(), Some(&python), "{name}");
    }
    for name in ["localhost/app", "localhost/app:latest", "mirror.example.com/team/app:v1"] {
        assert_eq!(find(name).as_ref(), Some(&app), "{name}");
    }
    for name in ["python", "app", "python:3.12", "host", "mirror.example.com/team/app:v2", "abcdef012345"] {
        assert_eq!(find(name), None, "{name}");
    }
    assert!(matches!(fixture.store.resolve("Not A Name"), Err(Error::InvalidName { .. })));
    assert!(matches!(fixture.store.inspect("python"), Err(Error::NotFound { .. })));

    // A stored name goes before an alias of the same name.
    fixture.store.set_alias("python", "localhost/app").unwrap();
    assert_eq!(find("python").as_ref(), Some(&app));
    let newer = load(&fixture, "python", &[layer("newer")]);
    assert_eq!(find("python").as_ref(), Some(&newer));
    assert_eq!(fixture.store.aliases().unwrap().len(), 3);
    fixture.store.remove_alias("python").unwrap();
    assert!(matches!(fixture.store.remove_alias("python"), Err(Error::NotFound { .. })));
    assert!(matches!(fixture.store.set_alias("host", "python"), Err(Error::Reserved { .. })));
    // Circles are refused, and told where the configuration has one.
    fixture.store.set_alias("one", "two").unwrap();
    assert!(matches!(fixture.store.set_alias("two", "one"), Err(Error::AliasLoop { .. })));
    assert_eq!(find("two"), None);
}

#[test]
fn lookups_are_cheap() {
    need_root!();
    let fixture = Fixture::new();
    load(&fixture, "python:3.11", &[layer("python")]);
    let started = Instant::now();
    let rounds = 20_000;
    for _ in 0..rounds {
        assert!(fixture.store.resolve("python:3.11").unwrap().is_some());
    }
    let each = started.elapsed() / rounds;
    println!("resolve: {each:?}");
    assert!(each.as_micros() < 50, "{each:?}");
}

#[test]
fn removal_spares_what_is_shared_or_in_use() {
    need_root!();
    let fixture = Fixture::new();
    let store = &fixture.store;
    let never = |_: &Path| false;
    let base = layer("base");
    load(&fixture, "one", &[base.clone(), layer("1")]);
    load(&fixture, "two", &[base.clone(), layer("22")]);
    load(&fixture, "also-two", &[base, layer("22")]);
    assert_eq!(
        store.disk_usage().unwrap(),
        DiskUsage { images: 2, layers: 3, bytes: 7, reclaimable_bytes: 0 }
    );
    let removed = store.remove("one", &never).unwrap();
    assert_eq!(removed, Removed { image: true, layers: 1, bytes: 1, kept: 0 });
    // One of two names.
    assert!(!store.remove("two", &never).unwrap().image);
    let image = store.inspect("also-two").unwrap();
    let used = image.roots[0].lowers[0].clone();
    let removed = store.remove("also-two", &|path| path == used).unwrap();
    assert_eq!(removed, Removed { image: true, layers: 1, bytes: 4, kept: 1 });
    assert!(used.join("etc/a").exists());
    assert_eq!(
        store.disk_usage().unwrap(),
        DiskUsage { images: 0, layers: 1, bytes: 2, reclaimable_bytes: 2 }
    );
    // It stays known over a restart, until nobody uses it.
    let again = ImageStore::open_with(fixture.dir.path().join("data"), options()).unwrap();
    assert!(used.exists());
    // Nothing is deleted while somebody works.
    let workspace = again.workspace().unwrap();
    assert_eq!(store.collect(&never).unwrap(), Removed { kept: 1, ..Removed::default() });
    drop(workspace);
    assert_eq!(again.collect(&never).unwrap(), Removed { layers: 1, bytes: 2, ..Removed::default() });
    assert!(!used.exists());
    assert!(matches!(store.remove("one", &never), Err(Error::NotFound { .. })));
    assert!(matches!(store.remove("host", &never), Err(Error::Reserved { .. })));
    assert_eq!(std::fs::read_dir(fixture.dir.path().join("data/images/tmp")).unwrap().count(), 0);

    // By id all names go; a name that is given to another image leaves the old one nameless.
    let id = load(&fixture, "one", &[layer("x")]);
    load(&fixture, "two", &[layer("x")]);
    assert!(store.remove(&id, &never).unwrap().image);
    assert!(names(store).is_empty());
    load(&fixture, "one", &[layer("x")]);
    load(&fixture, "one", &[layer("y")]);
    assert_eq!(store.disk_usage().unwrap().images, 1);
    assert_eq!(store.collect(&never).unwrap().layers, 1);
}

#[test]
fn merged_images_can_be_removed_and_loaded_again() {
    need_root!();
    let fixture = Fixture::new();
    let layers: Vec<_> = (0..5).map(|number| layer(&number.to_string())).collect();
    for _ in 0..2 {
        load(&fixture, "many", &layers);
        assert_eq!(fixture.store.disk_usage().unwrap().layers, 6);
        assert_eq!(fixture.store.remove("many", &|_| false).unwrap().layers, 6);
    }
}

#[test]
fn other_openers_see_changes() {
    need_root!();
    let fixture = Fixture::new();
    let server = ImageStore::open_with(fixture.dir.path().join("data"), options()).unwrap();
    assert!(server.resolve("app").unwrap().is_none());
    let id = load(&fixture, "app", &[layer("1")]);
    assert_eq!(server.inspect("app").unwrap().id, id);
    fixture.store.set_alias("other", "app").unwrap();
    assert_eq!(server.inspect("other").unwrap().id, id);
    // A process that knows no sandboxes removes the name only.
    fixture.store.remove("app", &|_| true).unwrap();
    assert!(server.resolve("app").unwrap().is_none());
    assert_eq!(server.collect(&|_| false).unwrap().layers, 1);
    assert_eq!(fixture.store.disk_usage().unwrap().layers, 0);
}

#[test]
fn loads_at_once() {
    need_root!();
    let fixture = Fixture::new();
    let paths: Vec<_> = (0..6)
        .map(|number| {
            let layers = [layer("shared"), layer(&number.to_string())];
            fixture
                .write(&format!("a{number}"), &archive(&oci(&layers, Some(&format!("a/b:{number}")), gzip)))
        })
        .collect();
    std::thread::scope(|scope| {
        for path in &paths {
            scope.spawn(|| fixture.store.load(path, None, &|_| ()).unwrap());
        }
        scope.spawn(|| fixture.store.collect(&|_| false).unwrap());
    });
    assert_eq!(fixture.store.list().unwrap().len(), 6);
    for image in fixture.store.list().unwrap() {
        assert!(image.roots[0].lowers.iter().all(|lower| lower.join("etc/a").exists()));
    }
    assert_eq!(fixture.store.disk_usage().unwrap().layers, 7);
}

#[test]
fn an_incomplete_store_is_repaired() {
    need_root!();
    let fixture = Fixture::new();
    load(&fixture, "one", &[layer("1")]);
    load(&fixture, "two", &[layer("2")]);
    let images = fixture.dir.path().join("data/images");
    for name in ["tmp/left", "layers/orphan"] {
        std::fs::create_dir(images.join(name)).unwrap();
        std::fs::write(images.join(name).join("file"), "x").unwrap();
    }
    std::fs::write(images.join("index.new"), "half an ind").unwrap();
    std::fs::remove_dir_all(&fixture.store.inspect("one").unwrap().roots[0].lowers[0]).unwrap();
    let again = ImageStore::open_with(fixture.dir.path().join("data"), options()).unwrap();
    assert_eq!(names(&again), ["docker.io/library/two:latest"]);
    assert_eq!(std::fs::read_dir(images.join("layers")).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(images.join("tmp")).unwrap().count(), 0);

    std::fs::write(images.join("index.json"), r#"{"version": 99, "future": []}"#).unwrap();
    let error = ImageStore::open_with(fixture.dir.path().join("data"), options()).unwrap_err();
    assert!(matches!(error, Error::IndexVersion { version: 99, .. }), "{error}");
}

/// Not a test of its own: the process that `a_killed_load_leaves_nothing` kills in the middle of its work.
#[test]
fn killed_load() {
    let Ok(dir) = std::env::var("OSB_TEST_KILLED_LOAD") else {
        return;
    };
    let dir = Path::new(&dir);
    let store = ImageStore::open_with(dir.join("data"), options()).unwrap();
    store
        .load(&dir.join("archive"), None, &|progress| {
            if progress.bytes > progress.total_bytes / 2 {
                println!("halfway");
                std::io::stdout().flush().unwrap();
                // Until the kill.
                loop {
                    std::thread::park();
                }
            }
        })
        .unwrap();
}

#[test]
fn a_killed_load_leaves_nothing() {
    need_root!();
    let fixture = Fixture::new();
    load(&fixture, "kept", &[layer("kept")]);
    let content: Vec<u8> =
        (0..4_u32 << 20).map(|number| (number.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let big = layer("big").raw(tar::EntryType::Regular, "etc/big", "", 0o644, &content);
    fixture.write("archive", &archive(&oci(&[layer("base"), big], Some("a/killed:1"), gzip)));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::killed_load", "--nocapture"])
        .env("OSB_TEST_KILLED_LOAD", fixture.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("halfway")));
    let temporary = fixture.dir.path().join("data/images/tmp");
    assert!(std::fs::read_dir(&temporary).unwrap().count() > 0);
    // While it lives, nobody takes its work away.
    let other = ImageStore::open_with(fixture.dir.path().join("data"), options()).unwrap();
    assert!(std::fs::read_dir(&temporary).unwrap().count() > 0);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(&other), ["docker.io/library/kept:latest"]);
    let again = ImageStore::open_with(fixture.dir.path().join("data"), options()).unwrap();
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
    assert_eq!(again.disk_usage().unwrap().layers, 1);
    assert_eq!(std::fs::read_dir(fixture.dir.path().join("data/images/layers")).unwrap().count(), 1);
    again.load(&fixture.dir.path().join("archive"), None, &|_| ()).unwrap();
    assert_eq!(again.list().unwrap().len(), 2);
}

#[test]
fn options_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let aliases = BTreeMap::from([("Bad Name".to_owned(), "host".to_owned())]);
    let options = Options { aliases, host_root: None, ..Options::default() };
    assert!(matches!(ImageStore::open_with(dir.path(), options), Err(Error::InvalidName { .. })));
}
