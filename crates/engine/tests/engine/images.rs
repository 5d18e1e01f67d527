//! Images that are removed and collected while sandboxes stand on them.

use std::path::Path;
use std::sync::Arc;

use osb_engine::image::{Error, Image, ImageStore, Options, Prune};

use crate::Test;
use crate::support::{inside, until, with_engine};

pub(crate) const TESTS: &[Test] = &[
    ("images_in_use_are_not_taken_away", images_in_use_are_not_taken_away),
    (
        "images_are_evicted_though_sandboxes_are_prepared_of_them",
        images_are_evicted_though_sandboxes_are_prepared_of_them,
    ),
    ("images_removed_at_the_last_moment_are_an_error", images_removed_at_the_last_moment_are_an_error),
];

/// The store as another process sees it.
fn other(dir: &Path) -> ImageStore {
    ImageStore::open_with(dir.join("data"), Options { host_root: None, ..Options::default() }).unwrap()
}

fn load(store: &ImageStore, dir: &Path, name: &str) -> Arc<Image> {
    let root = dir.join(name);
    std::fs::create_dir_all(root.join("etc")).unwrap();
    std::fs::write(root.join("etc/name"), name.repeat(300_000)).unwrap();
    store.load(&root, Some(name), &|_| ()).unwrap().images.remove(0)
}

fn images_in_use_are_not_taken_away() {
    with_engine(
        |_| {},
        async |bed| {
            let commands = other(bed.dir.path());
            let image = load(&commands, bed.dir.path(), "app");
            let layer = image.roots[0].lowers[0].clone();
            let image = bed.engine.images().inspect("app").unwrap();
            let created = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
            assert_eq!(commands.sandboxes(&image).unwrap(), [created.id.to_string()]);
            assert!(commands.last_used(&image).is_some());
            match commands.remove("app", false).unwrap_err() {
                Error::InUse { sandboxes, .. } => assert_eq!(sandboxes, [created.id.to_string()]),
                other => panic!("{other}"),
            }
            assert!(commands.prune(Prune::Unused, false).unwrap().images.is_empty());
            until("sandboxes are prepared", || bed.engine.ready_slots(&image.id) > 0).await;
            // By force the name goes, never what the sandbox stands on.
            let removed = commands.remove("app", true).unwrap();
            assert_eq!((removed.images.len(), removed.layers, removed.kept), (1, 0, 1));
            let shown = format!("/proc/{}/root/etc/name", created.record.pid());
            assert!(std::fs::read_to_string(&shown).unwrap().starts_with("appapp"));
            // The engine gives up what it has prepared, and keeps the layer.
            until("nothing is prepared any more", || bed.engine.ready_slots(&image.id) == 0).await;
            commands.collect().unwrap();
            assert!(std::fs::read_to_string(&shown).unwrap().starts_with("appapp") && layer.exists());
            bed.engine.delete(created.id);
            bed.engine.settled().await;
            // The engine may still be taking apart what was prepared.
            until("the layer is gone", || {
                commands.collect().unwrap();
                !layer.exists()
            })
            .await;

            // Without a sandbox the engine itself deletes what a command could not, soon.
            let image = load(&commands, bed.dir.path(), "second");
            let created = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
            bed.engine.delete(created.id);
            bed.engine.settled().await;
            until("sandboxes are prepared", || bed.engine.ready_slots(&image.id) > 0).await;
            assert_eq!(commands.remove("second", false).unwrap().kept, 1);
            until("the layer is gone", || !image.roots[0].lowers[0].exists()).await;
            bed
        },
    );
}

fn images_are_evicted_though_sandboxes_are_prepared_of_them() {
    with_engine(
        |config| config.image_max_disk = Some(3 << 20),
        async |bed| {
            let store = bed.engine.images();
            let first = load(store, bed.dir.path(), "first");
            let created = bed.engine.create(inside(&first, &["sleep"])).await.unwrap();
            bed.engine.delete(created.id);
            bed.engine.settled().await;
            until("sandboxes are prepared", || bed.engine.ready_slots(&first.id) > 0).await;
            // 1.5 MB and 1.8 MB: one at a time.
            let second = load(store, bed.dir.path(), "second");
            assert!(store.resolve("first").unwrap().is_none() && store.resolve("second").unwrap().is_some());
            assert!(!first.roots[0].lowers[0].exists());
            let created = bed.engine.create(inside(&second, &["sleep"])).await.unwrap();
            let root = bed.dir.path().join("third-root");
            std::fs::create_dir_all(root.join("etc")).unwrap();
            std::fs::write(root.join("etc/x"), vec![7; 2 << 20]).unwrap();
            let error = store.load(&root, Some("third"), &|_| ()).unwrap_err();
            assert!(matches!(error, Error::StoreFull { .. }), "{error}");
            assert!(error.to_string().contains("docker.io/library/second:latest"), "{error}");
            bed.engine.delete(created.id);
            bed
        },
    );
}

fn images_removed_at_the_last_moment_are_an_error() {
    with_engine(
        |_| {},
        async |bed| {
            let image = load(bed.engine.images(), bed.dir.path(), "app");
            // Resolved, then removed by somebody else before the create.
            other(bed.dir.path()).remove("app", false).unwrap();
            let error = bed.engine.create(inside(&image, &["sleep"])).await.unwrap_err().to_string();
            assert!(error.contains("removed"), "{error}");
            assert_eq!(bed.engine.running(), []);
            bed
        },
    );
}
