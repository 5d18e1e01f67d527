//! Names, removal, several processes, crashes.

use crate::support::*;
use osb_engine::image::{Error, ImageStore, Options, Prune, Removed};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

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
    let base = layer("base");
    load(&fixture, "one", &[base.clone(), layer("1")]);
    load(&fixture, "two", &[base.clone(), layer("22")]);
    load(&fixture, "also-two", &[base, layer("22")]);
    let usage = store.disk_usage().unwrap();
    assert_eq!((usage.images, usage.layers, usage.bytes, usage.reclaimable_bytes), (2, 3, 7, 0));
    let removed = store.remove("one", false).unwrap();
    assert_eq!((removed.images.len(), removed.layers, removed.bytes, removed.kept), (1, 1, 1, 0));
    assert_eq!(removed.names, ["docker.io/library/one:latest"]);
    let image = store.inspect("also-two").unwrap();
    let used = image.roots[0].lowers[0].clone();
    let sandbox = FakeSandbox::of(&fixture, "sandbox-1", &image, true);
    // One of two names can go; the last one cannot, nor the id.
    assert!(store.remove("two", false).unwrap().images.is_empty());
    for name in ["also-two", image.id.as_str()] {
        match store.remove(name, false).unwrap_err() {
            Error::InUse { sandboxes, .. } => assert_eq!(sandboxes, ["sandbox-1"]),
            other => panic!("{other}"),
        }
    }
    let text = store.remove("also-two", false).unwrap_err().to_string();
    assert!(text.contains("also-two") && text.contains("sandbox-1") && text.contains("--force"), "{text}");
    assert_eq!(store.sandboxes(&image).unwrap(), ["sandbox-1"]);
    let removed = store.remove("also-two", true).unwrap();
    assert_eq!((removed.images.len(), removed.layers, removed.kept, removed.kept_bytes), (1, 0, 2, 6));
    assert!(used.join("etc/a").exists());
    assert_eq!(store.disk_usage().unwrap().reclaimable_bytes, 6);
    // They stay known over a restart, until nobody uses them.
    let again = ImageStore::open_with(fixture.dir.path().join("data"), options()).unwrap();
    assert!(used.exists() && again.has_garbage().unwrap());
    drop(sandbox);
    // What is only prepared holds layers as long as a server may start it, no name.
    let prepared = FakeSandbox::of(&fixture, "prepared", &image, false);
    let server = fake_server(&fixture);
    assert!(store.sandboxes(&image).unwrap().is_empty());
    assert_eq!(again.collect().unwrap().kept, 2);
    drop(server);
    assert_eq!(again.collect().unwrap(), Removed { layers: 2, bytes: 6, ..Removed::default() });
    drop(prepared);
    assert!(!used.exists() && !again.has_garbage().unwrap());
    assert!(matches!(store.remove("one", false), Err(Error::NotFound { .. })));
    assert!(matches!(store.remove("host", true), Err(Error::Reserved { .. })));
    assert_eq!(std::fs::read_dir(fixture.dir.path().join("data/images/tmp")).unwrap().count(), 0);

    // By id all names go; a name that is given to another image leaves the old one nameless.
    let id = load(&fixture, "one", &[layer("x")]);
    load(&fixture, "two", &[layer("x")]);
    assert_eq!(store.remove(&id, false).unwrap().names.len(), 2);
    assert!(names(store).is_empty());
    load(&fixture, "one", &[layer("x")]);
    load(&fixture, "one", &[layer("y")]);
    assert_eq!(store.disk_usage().unwrap().images, 1);
    assert_eq!(store.collect().unwrap().layers, 1);
    assert_eq!(std::fs::read_dir(fixture.dir.path().join("data/images/used")).unwrap().count(), 1);
    store.set_alias("other", "one").unwrap();
    assert!(matches!(store.remove("other", false), Err(Error::IsAlias { .. })));
}

#[test]
fn wrong_names_are_answered_with_what_may_be_meant() {
    need_root!();
    let fixture = Fixture::new();
    load(&fixture, "python:3.11", &[layer("1")]);
    load(&fixture, "registry.example.com/team/app:v1", &[layer("2")]);
    fixture.store.set_alias("code", "python:3.11").unwrap();
    for (name, wanted) in [
        ("pyhton:3.11", Some("python:3.11")),
        ("python", Some("python:3.11")),
        ("python:3.12", Some("python:3.11")),
        ("registry.example.com/team/ap:v1", Some("registry.example.com/team/app:v1")),
        ("cod", Some("code")),
        ("hots", Some("host")),
        ("something-else", None),
        ("abcdef0123456789", None),
    ] {
        let error = fixture.store.inspect(name).unwrap_err();
        let Error::NotFound { similar, .. } = &error else { panic!("{name}: {error}") };
        assert_eq!(similar.first().map(String::as_str), wanted, "{name}: {error}");
        assert_eq!(error.to_string().contains("did you mean"), wanted.is_some(), "{error}");
    }
    let error = fixture.store.remove("pyhton:3.11", false).unwrap_err();
    assert!(error.to_string().contains("did you mean python:3.11?"), "{error}");
}

#[test]
fn an_alias_of_what_is_not_stored_says_what_it_leads_to() {
    need_root!();
    let fixture = Fixture::new();
    fixture.store.set_alias("team/code:*", "code").unwrap();
    fixture.store.set_alias("code", "registry.example.com/code:3").unwrap();
    for name in ["team/code:7", "code"] {
        let message = fixture.store.inspect(name).unwrap_err().to_string();
        let expected = format!(
            "{name} is an alias of registry.example.com/code:3, which is not stored here; `osb image pull {name}` fetches it"
        );
        assert_eq!(message, expected);
    }
    load(&fixture, "registry.example.com/code:3", &[layer("1")]);
    fixture.store.inspect("team/code:7").unwrap();
}

/// Sets when an image was last used.
fn used_hours_ago(fixture: &Fixture, id: &str, hours: u64) {
    let path = fixture.dir.path().join("data/images/used").join(&id[7..]);
    let time = SystemTime::now() - Duration::from_secs(hours * 3600);
    std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

#[test]
fn prune_takes_what_it_says() {
    need_root!();
    let fixture = Fixture::new();
    let store = &fixture.store;
    let [old, recent, running] = ["old", "recent", "running"].map(|name| {
        let id = load(&fixture, name, &[layer(name)]);
        used_hours_ago(&fixture, &id, 100);
        id
    });
    load(&fixture, "again", &[layer("a")]);
    load(&fixture, "again", &[layer("b")]);
    let _sandbox = FakeSandbox::of(&fixture, "s", &store.inspect("running").unwrap(), true);
    assert_eq!(store.prune(Prune::Dangling, true).unwrap().layers, 1);
    assert_eq!(store.disk_usage().unwrap().layers, 5);
    let removed = store.prune(Prune::Dangling, false).unwrap();
    assert_eq!((removed.layers, removed.bytes, removed.images.len()), (1, 1, 0));
    // A use makes it recent again.
    store.touch(&store.inspect("recent").unwrap());
    let age =
        jiff::Timestamp::now().duration_since(store.last_used(&store.inspect("recent").unwrap()).unwrap());
    assert!(age.as_secs() < 60);
    let day = Prune::UnusedFor(Duration::from_secs(24 * 3600));
    let pretended = store.prune(day, true).unwrap();
    assert_eq!(pretended.images, [old]);
    assert!(store.resolve("old").unwrap().is_some());
    assert_eq!(store.prune(day, false).unwrap(), pretended);
    assert!(store.resolve("old").unwrap().is_none());
    let removed = store.prune(Prune::Unused, false).unwrap();
    assert!(removed.images.contains(&recent) && !removed.images.contains(&running));
    assert_eq!(names(store), ["docker.io/library/running:latest"]);
}

#[test]
fn older_images_make_room_for_new_ones() {
    need_root!();
    let big = |number: u8| {
        let content: Vec<u8> =
            (0..1_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ number).collect();
        Layer::new().dir("etc").raw(tar::EntryType::Regular, "etc/big", "", 0o644, &content)
    };
    let fixture = Fixture::with(|options| options.max_disk = Some(7 << 19));
    let store = &fixture.store;
    for (number, name) in ["a", "b", "c"].into_iter().enumerate() {
        let id = load(&fixture, name, &[big(number as u8)]);
        used_hours_ago(&fixture, &id, 10 - number as u64);
    }
    assert!(store.disk_usage().unwrap().disk_bytes <= 7 << 19);
    // `a` was used last of all, `b` is in use: `c` goes.
    store.touch(&store.inspect("a").unwrap());
    let sandbox = FakeSandbox::of(&fixture, "s1", &store.inspect("b").unwrap(), true);
    load(&fixture, "d", &[big(7)]);
    let short = |name: &str| format!("docker.io/library/{name}:latest");
    assert_eq!(names(store), ["a", "b", "d"].map(short));
    assert!(store.disk_usage().unwrap().disk_bytes <= 7 << 19);
    // What cannot fit removes nothing, and says who is in the way.
    let layers = [big(1), big(2), big(3), big(4)];
    let path = fixture.write("huge", &archive(&oci(&layers, Some("huge:1"), gzip)));
    let error = store.load(&path, None, &|_| ()).unwrap_err();
    let Error::StoreFull { limit, kept, holders, .. } = &error else { panic!("{error}") };
    assert_eq!((*limit, holders[0].name.as_str(), holders[0].sandboxes), (7 << 19, short("b").as_str(), 1));
    assert!(*kept >= 1 << 20);
    let text = error.to_string();
    assert!(
        text.contains("docker.io/library/b:latest (1.0 MiB, 1 sandbox)") && text.contains("max_disk"),
        "{text}"
    );
    assert_eq!(std::fs::read_dir(fixture.dir.path().join("data/images/tmp")).unwrap().count(), 0);
    assert!(store.resolve("b").unwrap().is_some());
    // An image loaded anew does not make room for itself.
    drop(sandbox);
    load(&fixture, "d", &[big(7)]);
    assert!(store.resolve("d").unwrap().is_some());
    // A lowered limit holds at the next load.
    let options = Options { max_disk: Some(3 << 19), ..options() };
    let lowered = ImageStore::open_with(fixture.dir.path().join("data"), options).unwrap();
    let path = fixture.write("e", &archive(&oci(&[big(9)], Some("e:1"), gzip)));
    lowered.load(&path, None, &|_| ()).unwrap();
    assert_eq!(names(store), ["docker.io/library/e:1"]);
}

#[test]
fn an_image_in_use_is_not_collected_under_a_load_that_counts_on_it() {
    need_root!();
    let fixture = Fixture::new();
    let base = layer("base");
    load(&fixture, "one", &[base.clone(), layer("1")]);
    let layers = [base, layer("22")];
    let path = fixture.write("two", &archive(&oci(&layers, Some("two:1"), gzip)));
    // While the second load is at its layer, the first image goes with all that only it needs.
    let done = std::sync::Once::new();
    fixture
        .store
        .load(&path, None, &|_| done.call_once(|| drop(fixture.store.remove("one", false).unwrap())))
        .unwrap();
    assert!(done.is_completed());
    let image = fixture.store.inspect("two:1").unwrap();
    assert!(image.roots[0].lowers.iter().all(|lower| lower.join("etc/a").exists()), "{image:?}");
    assert_eq!(fixture.store.disk_usage().unwrap().layers, 2);
}

#[test]
fn merged_images_can_be_removed_and_loaded_again() {
    need_root!();
    let fixture = Fixture::new();
    let layers: Vec<_> = (0..5).map(|number| layer(&number.to_string())).collect();
    for _ in 0..2 {
        load(&fixture, "many", &layers);
        assert_eq!(fixture.store.disk_usage().unwrap().layers, 6);
        assert_eq!(fixture.store.remove("many", false).unwrap().layers, 6);
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
    fixture.store.remove("app", false).unwrap();
    assert!(server.resolve("app").unwrap().is_none());
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
        for _ in 0..20 {
            scope.spawn(|| fixture.store.collect().unwrap());
        }
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
