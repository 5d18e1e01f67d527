//! Mirrors first, then the registry.

use osb_registry::{Error, Settings};

use crate::fake::{Contents, Fake, breaking, refusal};
use crate::images::Compression::Gzip;
use crate::images::{Image, noise};
use crate::support::{Bench, credentials};

fn image() -> Image {
    Image::for_here(&[(100_000, Gzip)])
}

/// A puller that asks `mirrors` before `registry`.
fn bench(registry: &Fake, mirrors: &[&Fake], prefix: &str) -> Bench {
    let hosts: Vec<String> = mirrors.iter().map(|mirror| mirror.host()).collect();
    let mut plain: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let host = registry.host();
    plain.push(&host);
    Bench::with(&plain, |settings: &mut Settings| {
        let entry = settings.registries.get_mut(&registry.host()).unwrap();
        entry.mirrors = hosts.iter().map(|host| format!("{host}{prefix}")).collect();
    })
}

#[tokio::test]
async fn the_mirror_serves_and_the_registry_is_not_asked() {
    let image = image();
    let registry = Contents::of(&image).serve(|_| None).await;
    let mirror = Contents::of(&image).serve(|_| None).await;
    let bench = bench(&registry, &[&mirror], "/proxy/hub");
    bench.pull(&registry.image()).await.unwrap();
    bench.check("target", &image);
    assert!(registry.seen().is_empty());
    assert_eq!(mirror.seen()[0].path, "/v2/proxy/hub/team/image/manifests/it");
}

#[tokio::test]
async fn mirrors_that_do_not_help_are_passed_over_in_order() {
    let image = image();
    let registry = Contents::of(&image).serve(|_| None).await;
    let empty = Contents::default().serve(|_| None).await;
    let broken = Contents::of(&image).serve(|_| Some(refusal(500, "UNKNOWN", "down"))).await;
    let layer = image.layers[0].clone();
    let wrong = noise(9, image.layer(0).len());
    let lying = Contents::of(&image)
        .serve(move |seen| seen.path.ends_with(&layer).then(|| crate::fake::blob(&wrong, seen.range())))
        .await;
    let bench = bench(&registry, &[&empty, &broken, &lying], "");
    bench.pull(&registry.image()).await.unwrap();
    bench.check("target", &image);
    assert_eq!(empty.seen().len(), 3);
    // Twice for the manifest; after that it is left alone for a while.
    assert_eq!(broken.seen().len(), 2);
    assert_eq!(lying.seen_of(&image.layers[0]).len(), 1);
    assert_eq!(registry.seen().len(), 1, "the registry gave the layer only");
}

#[tokio::test]
async fn a_layer_that_a_mirror_began_is_completed_by_the_registry() {
    let image = image();
    let registry = Contents::of(&image).serve(|_| None).await;
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    let mirror = Contents::of(&image)
        .serve(move |seen| {
            seen.path.ends_with(&layer).then(|| match seen.range() {
                None => breaking(&bytes, None, 30_000),
                Some(_) => refusal(503, "UNAVAILABLE", "gone"),
            })
        })
        .await;
    let bench = bench(&registry, &[&mirror], "");
    bench.pull(&registry.image()).await.unwrap();
    bench.check("target", &image);
    assert_eq!(registry.seen_of(&image.layers[0])[0].range(), Some(30_000));
}

#[tokio::test]
async fn when_nobody_has_it_the_registry_is_named() {
    let registry = Contents::default().serve(|_| None).await;
    let mirror = Contents::default().serve(|_| Some(refusal(403, "DENIED", "no"))).await;
    let error = bench(&registry, &[&mirror], "").fail(&registry.image()).await;
    let Error::NotFound { registry: named, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*named, registry.host());
}

#[tokio::test]
async fn the_credentials_of_a_request_are_for_the_registry_only() {
    let image = image();
    let ask = |seen: &crate::fake::Seen| {
        seen.header("authorization").is_none().then(|| crate::fake::challenge("Basic realm=\"r\""))
    };
    let registry = Contents::of(&image).serve(ask).await;
    let mirror = Contents::of(&image).serve(ask).await;
    let bench = bench(&registry, &[&mirror], "");
    let login = Some(credentials("me", "hunter2"));
    bench.pull_as(&registry.image(), "target", None, login).await.unwrap();
    assert!(mirror.seen().iter().all(|seen| seen.header("authorization").is_none()));
    assert!(registry.seen().iter().any(|seen| seen.header("authorization").is_some()));
}
