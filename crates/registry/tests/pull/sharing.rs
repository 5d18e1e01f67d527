//! One download for many who want it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use osb_registry::{Error, Phase, Progress};
use tokio::sync::watch;

use crate::fake::{Contents, refusal, stalling};
use crate::images::Compression::{Gzip, None as Plain, Zstd};
use crate::images::{Image, OCI_MANIFEST};
use crate::support::{Bench, blob, until};

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_pulls_share_everything() {
    let image = Image::for_here(&[(400_000, Gzip), (300_000, Zstd), (200_000, Plain)]);
    let fake = Contents::of(&image).serve(|_| None).await;
    let bench = Bench::new(&[&fake.host()]);
    let name = fake.image();
    let targets: Vec<_> = (0..8).map(|number| format!("target-{number}")).collect();
    let pulls = targets.iter().map(|target| bench.pull_to(&name, target));
    for result in futures_util::future::join_all(pulls).await {
        result.unwrap();
    }
    for target in &targets {
        bench.check(target, &image);
    }
    // Manifest, configuration, three layers.
    assert_eq!(fake.seen().len(), 5, "{:?}", fake.seen());
    assert!(bench.downloads().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_images_share_their_layers() {
    let image = Image::for_here(&[(2_000_000, Gzip)]);
    let fake = Contents::of(&image).manifest("too", OCI_MANIFEST, &image.manifest_bytes());
    let fake = fake.serve(|_| None).await;
    let bench = Bench::new(&[&fake.host()]);
    let other = format!("{}/team/image:too", fake.host());
    let name = fake.image();
    let (one, two) = tokio::join!(bench.pull_to(&name, "one"), bench.pull_to(&other, "two"));
    one.unwrap();
    two.unwrap();
    bench.check("one", &image);
    bench.check("two", &image);
    assert_eq!(fake.seen_of(&image.layers[0]).len(), 1);
}

#[tokio::test]
async fn those_who_wait_share_the_failure() {
    let image = Image::for_here(&[(1000, Gzip)]);
    let fake = Contents::of(&image).serve(|_| Some(refusal(500, "UNKNOWN", "down"))).await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.patience.attempts = 3);
    let name = fake.image();
    let targets: Vec<_> = (0..8).map(|number| format!("target-{number}")).collect();
    let pulls = targets.iter().map(|target| bench.pull_to(&name, target));
    for result in futures_util::future::join_all(pulls).await {
        assert!(matches!(result, Err(Error::Unavailable { .. })));
    }
    assert_eq!(fake.seen().len(), 3);
}

#[tokio::test]
async fn when_the_first_leaves_the_next_goes_on() {
    const FIRST: usize = 50_000;
    let image = Image::for_here(&[(100_000, Gzip)]);
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let first = seen.path.ends_with(&layer) && seen.earlier == 0;
            first.then(|| stalling(&bytes, seen.range(), FIRST))
        })
        .await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.patience.stall = Duration::from_secs(60));
    let name = fake.image();
    let mut first = Box::pin(bench.pull_to(&name, "first"));
    let there = until("the first part", || bench.downloads().iter().any(|(_, len)| *len == FIRST as u64));
    tokio::select! {
        result = &mut first => panic!("the pull ended: {result:?}"),
        () = there => {}
    }
    let second = bench.pull_to(&name, "second");
    tokio::pin!(second);
    // The second joins, then the first leaves.
    tokio::select! {
        result = &mut second => panic!("the pull ended: {result:?}"),
        () = tokio::time::sleep(Duration::from_millis(200)) => {}
    }
    drop(first);
    second.await.unwrap();
    bench.check("second", &image);
    assert!(!bench.target("first").exists());
    let asked: Vec<_> = fake.seen_of(&image.layers[0]).iter().map(crate::fake::Seen::range).collect();
    assert_eq!(asked, [None, Some(FIRST)]);
}

#[tokio::test]
async fn known_layers_are_left_out() {
    let image = Image::for_here(&[(1000, Gzip), (2000, Gzip), (3000, Gzip)]);
    let fake = Contents::of(&image).serve(|_| None).await;
    let bench = Bench::new(&[&fake.host()]);
    let (progress, told) = watch::channel(Progress::default());
    // One by its blob, one by its content.
    let (by_blob, by_content) = (image.layers[0].clone(), image.diff_ids[2].clone());
    let known = move |digest: &str| digest == by_blob || digest == by_content;
    let target = bench.target("target");
    let pulled = bench.puller.pull(&fake.image(), None, None, &target, &known, &progress).await.unwrap();
    assert_eq!((pulled.layers, pulled.known_layers), (3, 2));
    assert_eq!(pulled.config, image.config);
    let there: Vec<_> = image.layers.iter().map(|layer| blob(&target, layer).exists()).collect();
    assert_eq!(there, [false, true, false]);
    assert!(fake.seen_of(&image.layers[0]).is_empty());
    let size = image.layer(1).len() as u64;
    let last = *told.borrow();
    assert_eq!(
        last,
        Progress { phase: Phase::Downloading, bytes: size, total_bytes: size, layers: 1, total_layers: 1 }
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn downloads_are_parallel_and_bounded() {
    static NOW: AtomicUsize = AtomicUsize::new(0);
    static MOST: AtomicUsize = AtomicUsize::new(0);
    struct Counted;
    impl Drop for Counted {
        fn drop(&mut self) {
            NOW.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let sizes: Vec<_> = (1..=8).map(|number| (number * 1000, Plain)).collect();
    let image = Image::for_here(&sizes);
    let layers: Vec<_> =
        image.layers.iter().map(|layer| (layer.clone(), image.blobs[layer].clone())).collect();
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let (_, bytes) = layers.iter().find(|(layer, _)| seen.path.ends_with(layer))?;
            let bytes = axum::body::Bytes::copy_from_slice(bytes);
            MOST.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let slow = futures_util::stream::once(async move {
                let counted = Counted;
                tokio::time::sleep(Duration::from_millis(100)).await;
                drop(counted);
                Ok::<_, std::io::Error>(bytes)
            });
            Some(axum::response::IntoResponse::into_response(axum::body::Body::from_stream(slow)))
        })
        .await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.concurrent_downloads = 3);
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
    assert_eq!(MOST.load(Ordering::SeqCst), 3);
}
