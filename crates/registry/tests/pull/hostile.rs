//! Registries that lie.

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use futures_util::stream;
use osb_registry::Error;
use serde_json::json;

use crate::fake::{Contents, Fake, blob, redirect, refusal};
use crate::images::Compression::Gzip;
use crate::images::{Image, OCI_INDEX, OCI_MANIFEST, digest, index, noise};
use crate::support::{Bench, credentials};

fn image() -> Image {
    Image::for_here(&[(100_000, Gzip)])
}

/// Serves `image` with something else in place of its layer.
async fn with_layer(image: &Image, bytes: Vec<u8>) -> Fake {
    let layer = image.layers[0].clone();
    Contents::of(image)
        .serve(move |seen| seen.path.ends_with(&layer).then(|| blob(&bytes, seen.range())))
        .await
}

#[tokio::test]
async fn a_layer_with_another_digest() {
    let image = image();
    let fake = with_layer(&image, noise(1, image.layer(0).len())).await;
    let bench = Bench::new(&[&fake.host()]);
    let error = bench.fail(&fake.image()).await;
    let Error::WrongDigest { expected, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*expected, image.layers[0]);
    // Nothing of it is kept for the next pull.
    assert!(bench.downloads().iter().all(|(_, len)| *len == 0));
}

#[tokio::test]
async fn a_layer_that_is_too_short() {
    let image = image();
    let fake = with_layer(&image, image.layer(0)[..50_000].to_vec()).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::Truncated { received: 50_000, .. }), "{error:?}");
}

#[tokio::test]
async fn a_layer_that_ends_early_without_saying_so() {
    let image = image();
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0)[..50_000].to_vec());
    let fake = Contents::of(&image)
        .serve(move |seen| {
            seen.path.ends_with(&layer).then(|| {
                let start = seen.range().unwrap_or(0);
                let rest = Bytes::copy_from_slice(&bytes[start..]);
                let body = Body::from_stream(stream::iter([Ok::<_, std::io::Error>(rest)]));
                let range = format!("bytes {start}-49999/*");
                match seen.range() {
                    None => body.into_response(),
                    Some(_) => {
                        (StatusCode::PARTIAL_CONTENT, [("content-range", range)], body).into_response()
                    }
                }
            })
        })
        .await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::Truncated { received: 50_000, .. }), "{error:?}");
}

#[tokio::test]
async fn a_layer_that_is_longer_than_declared() {
    let image = image();
    let mut longer = image.layer(0).to_vec();
    longer.extend(noise(2, 1000));
    let fake = with_layer(&image, longer).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::TooLarge { .. }), "{error:?}");
}

#[tokio::test]
async fn a_layer_without_an_end() {
    let image = image();
    let layer = image.layers[0].clone();
    let fake = Contents::of(&image)
        .serve(move |seen| {
            seen.path.ends_with(&layer).then(|| {
                let piece = Bytes::from(noise(3, 10_000));
                let endless = stream::repeat_with(move || Ok::<_, std::io::Error>(piece.clone()));
                Body::from_stream(endless).into_response()
            })
        })
        .await;
    let bench = Bench::new(&[&fake.host()]);
    let error = bench.fail(&fake.image()).await;
    assert!(matches!(error, Error::TooLarge { .. }), "{error:?}");
    assert!(bench.downloads().iter().all(|(_, len)| *len <= image.layer(0).len() as u64));
}

#[tokio::test]
async fn a_manifest_of_a_hundred_megabytes() {
    const PIECE: usize = 1 << 20;
    // Announced, and not.
    for announced in [true, false] {
        let fake = Contents::default()
            .serve(move |_| {
                let piece = Bytes::from(vec![b' '; PIECE]);
                let pieces = stream::iter((0..100).map(move |_| Ok::<_, std::io::Error>(piece.clone())));
                let mut response = Body::from_stream(pieces).into_response();
                if announced {
                    response.headers_mut().insert("content-length", (100 * PIECE).into());
                }
                Some(response)
            })
            .await;
        let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
        let Error::TooLarge { limit, .. } = error else { panic!("{error:?}") };
        assert_eq!(limit, 4 << 20);
    }
}

#[tokio::test]
async fn a_manifest_under_another_digest() {
    let image = image();
    let other = digest(b"other");
    let bytes = image.manifest_bytes();
    let fake = Contents::of(&image).manifest(&other, OCI_MANIFEST, &bytes).serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&format!("{}/team/image@{other}", fake.host())).await;
    assert!(matches!(error, Error::WrongDigest { .. }), "{error:?}");
}

#[tokio::test]
async fn a_configuration_with_another_digest() {
    let image = image();
    let fake = Contents::of(&image).blob(&image.config, b"{}").serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::WrongDigest { .. }), "{error:?}");
}

#[tokio::test]
async fn declared_sizes_without_measure() {
    let mut image = image();
    image.manifest["layers"][0]["size"] = json!(u64::MAX);
    let fake = Contents::of(&image).serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::TooLarge { .. }), "{error:?}");
    // What would be allowed but does not fit is refused before the first byte.
    let fits_nowhere = Bench::with(&[&fake.host()], |settings| settings.max_image_bytes = u64::MAX);
    let error = fits_nowhere.fail(&fake.image()).await;
    assert!(matches!(error, Error::NoSpace { .. }), "{error:?}");
    assert!(fake.seen_of(&image.layers[0]).is_empty());
}

#[tokio::test]
async fn a_declared_size_below_the_true_one_spoils_nothing() {
    let honest = image();
    let mut liar = honest.clone();
    let true_size = honest.layer(0).len();
    liar.manifest["layers"][0]["size"] = json!(true_size + 1000);
    let fake = Contents::of(&honest).blobs(&liar).manifest("liar", OCI_MANIFEST, &liar.manifest_bytes());
    let fake = fake.serve(|_| None).await;
    let bench = Bench::new(&[&fake.host()]);
    let (honest_name, liar_name) = (fake.image(), format!("{}/team/image:liar", fake.host()));
    let (good, bad) = tokio::join!(bench.pull_to(&honest_name, "good"), bench.pull_to(&liar_name, "bad"));
    good.unwrap();
    bad.unwrap_err();
    bench.check("good", &honest);
    assert!(!bench.target("bad").exists());
}

#[tokio::test]
async fn an_index_without_our_platform() {
    let image = Image::new("linux/s390x", &[(10, Gzip)]);
    let top = index(&[("linux/s390x", &image), ("windows/amd64", &image)]).to_string();
    let fake =
        Contents::default().blobs(&image).manifest("it", OCI_INDEX, top.as_bytes()).serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    let Error::NoPlatform { offered, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*offered, ["linux/s390x", "windows/amd64"]);
    // The same with one manifest, whose configuration tells.
    let fake = Contents::of(&image).serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::NoPlatform { .. }), "{error:?}");
}

#[tokio::test]
async fn an_index_of_nothing() {
    let empty = json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}).to_string();
    let fake = Contents::default().manifest("it", OCI_INDEX, empty.as_bytes()).serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await.to_string();
    assert_eq!(error, format!("the index of {} is empty: it offers no image; push it again", fake.image()));
}

#[tokio::test]
async fn a_part_that_is_missing_is_named() {
    let image = image();
    let host = osb_registry::Platform::host().to_string();
    let top = index(&[(&host, &image)]).to_string();
    let manifest = digest(&image.manifest_bytes());
    let config = image.manifest["config"]["digest"].as_str().unwrap().to_owned();
    for part in [manifest, config, image.layers[0].clone()] {
        let gone = part.clone();
        let contents = Contents::of(&image).manifest("it", OCI_INDEX, top.as_bytes());
        let fake = contents
            .serve(move |seen| seen.path.ends_with(&gone).then(|| refusal(404, "UNKNOWN", "gone")))
            .await;
        let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await.to_string();
        let (registry, name) = (fake.host(), fake.image());
        assert_eq!(
            error,
            format!("{registry} has {name}, but not its part {part} (UNKNOWN: gone); push the image again")
        );
    }
}

#[tokio::test]
async fn an_index_that_leads_to_itself_or_deeper_and_deeper() {
    let mut contents = Contents::default();
    let mut below = noise(4, 10);
    for level in 0..8 {
        let descriptor = json!({"mediaType": OCI_INDEX, "digest": digest(&below), "size": below.len(),
            "platform": {"os": "linux", "architecture": osb_registry::Platform::host().architecture}});
        let bytes = json!({"schemaVersion": 2, "manifests": [descriptor], "level": level}).to_string();
        contents = contents.manifest(&digest(bytes.as_bytes()), OCI_INDEX, bytes.as_bytes());
        below = bytes.into_bytes();
    }
    let fake = contents.manifest("it", OCI_INDEX, &below).serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::Malformed { .. }), "{error:?}");
    assert!(fake.seen().len() <= 6);
}

#[tokio::test]
async fn layers_elsewhere_are_not_fetched() {
    let mut image = image();
    image.manifest["layers"][0]["urls"] = json!(["http://127.0.0.1:1/secret"]);
    let fake = Contents::of(&image).serve(|_| None).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert!(fake.seen_of(&image.layers[0]).is_empty());
}

#[tokio::test]
async fn other_parts_than_asked_for() {
    let image = image();
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    for range in ["bytes 5-99/*", "bytes 0-9/10", "nonsense", "bytes 40000-5/1"] {
        let (layer, bytes) = (layer.clone(), bytes.clone());
        let fake = Contents::of(&image)
            .serve(move |seen| {
                seen.path.ends_with(&layer).then(|| match seen.range() {
                    None => crate::fake::breaking(&bytes, None, 40_000),
                    Some(_) => {
                        let part = bytes[40_000..].to_vec();
                        (StatusCode::PARTIAL_CONTENT, [("content-range", range)], part).into_response()
                    }
                })
            })
            .await;
        let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
        assert!(matches!(error, Error::Malformed { .. } | Error::Truncated { .. }), "{range}: {error:?}");
    }
}

#[tokio::test]
async fn redirects_to_another_host_carry_no_credentials() {
    let image = image();
    let layer = image.layers[0].clone();
    let elsewhere = Contents::of(&image).serve(|_| None).await;
    let target = format!("http://user:pass@{}/v2/x/blobs/{layer}?signature=s3cret", elsewhere.host());
    let fake = Contents::of(&image)
        .serve(move |seen| match seen.header("authorization") {
            None => Some(crate::fake::challenge("Basic realm=\"r\"")),
            Some(_) => seen.path.ends_with(&layer).then(|| redirect(&target)),
        })
        .await;
    let bench = Bench::new(&[&fake.host()]);
    let login = Some(credentials("me", "hunter2"));
    bench.pull_as(&fake.image(), "target", None, login).await.unwrap();
    bench.check("target", &image);
    let there = elsewhere.seen();
    assert_eq!(there.len(), 1);
    assert_eq!(there[0].header("authorization"), None, "{there:?}");
    assert!(there[0].query.contains("s3cret"));
}

#[tokio::test]
async fn a_signature_in_a_redirect_is_in_no_message() {
    let image = image();
    let layer = image.layers[0].clone();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let target = format!("http://{closed}/x?signature=s3cret");
            seen.path.ends_with(&layer).then(|| redirect(&target))
        })
        .await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(!format!("{error} {error:?}").contains("s3cret"), "{error:?}");
}

#[tokio::test]
async fn redirects_in_circles_and_to_nowhere() {
    for target in ["/v2/again", "ftp://127.0.0.1/x", "file:///etc/passwd", "http://[::1", ""] {
        let fake = Contents::default().serve(move |_| Some(redirect(target))).await;
        let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
        assert!(matches!(error, Error::Malformed { .. }), "{target}: {error:?}");
        assert!(fake.seen().len() <= 9, "{target}");
    }
}

#[tokio::test]
async fn a_target_with_something_in_it_is_left_alone() {
    let image = image();
    let fake = Contents::of(&image).serve(|_| None).await;
    let bench = Bench::new(&[&fake.host()]);
    std::fs::create_dir(bench.target("target")).unwrap();
    std::fs::write(bench.target("target").join("mine"), "mine").unwrap();
    let error = bench.pull(&fake.image()).await.unwrap_err();
    assert!(matches!(error, Error::TargetInUse { .. }), "{error:?}");
    let names: Vec<_> = std::fs::read_dir(bench.target("target")).unwrap().collect();
    assert_eq!(names.len(), 1);
}
