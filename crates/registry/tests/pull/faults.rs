//! Registries that fail: what is tried again, how long, and what is said.

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::response::IntoResponse;
use osb_registry::Error;

use crate::fake::{Contents, blob, breaking, challenge, refusal, stalling};
use crate::images::Compression::Gzip;
use crate::images::Image;
use crate::support::Bench;

fn image() -> Image {
    Image::for_here(&[(100_000, Gzip)])
}

#[tokio::test]
async fn errors_say_what_the_registry_said() {
    for (status, code, words) in [
        (403, "DENIED", "requested access to the resource is denied"),
        (404, "MANIFEST_UNKNOWN", "manifest unknown"),
        (401, "UNAUTHORIZED", "authentication required"),
        (429, "TOOMANYREQUESTS", "pull rate limit"),
        (500, "UNKNOWN", "disk on fire"),
        (418, "TEAPOT", "short and stout"),
    ] {
        let fake = Contents::of(&image()).serve(move |_| Some(refusal(status, code, words))).await;
        let bench = Bench::new(&[&fake.host()]);
        let error = bench.fail(&fake.image()).await;
        let right = match status {
            403 => matches!(error, Error::Denied { .. }),
            404 => matches!(error, Error::NotFound { .. }),
            401 => matches!(error, Error::Unauthorized { .. }),
            429 => matches!(error, Error::RateLimited { .. }),
            _ => matches!(error, Error::Unavailable { .. }),
        };
        assert!(right, "{status}: {error:?}");
        let text = error.to_string();
        assert!(text.contains(&fake.host()), "{text}");
        assert!(status == 401 || text.contains(words), "{text}");
        // Only what may pass is tried again.
        let attempts = if matches!(status, 429 | 500) { 5 } else { 1 };
        assert_eq!(fake.seen().len(), attempts, "{status}");
    }
}

#[tokio::test]
async fn what_the_registry_says_cannot_write_to_terminals() {
    let fake = Contents::of(&image()).serve(|_| Some(refusal(403, "A", "\x1b[31mred\r\nline"))).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await.to_string();
    assert!(error.contains("[31mred") && !error.contains(|c: char| c.is_control()), "{error:?}");
}

#[tokio::test]
async fn an_image_that_needs_a_login_says_so() {
    let fake = Contents::of(&image()).serve(|_| Some(challenge("Basic realm=\"x\""))).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await.to_string();
    assert!(error.contains("access without credentials"), "{error}");
}

#[tokio::test]
async fn passing_failures_are_passed() {
    let image = image();
    let fake = Contents::of(&image)
        .serve(|seen| match seen.earlier {
            0 => Some(refusal(500, "UNKNOWN", "once")),
            1 => Some(StatusCode::BAD_GATEWAY.into_response()),
            _ => None,
        })
        .await;
    let bench = Bench::new(&[&fake.host()]);
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
    // Manifest, configuration and layer, each at the third attempt.
    assert_eq!(fake.seen().len(), 9);
}

#[tokio::test]
async fn a_rate_limit_is_waited_for_as_asked() {
    let image = image();
    let fake = Contents::of(&image)
        .serve(|seen| {
            let limited = seen.path.ends_with("/manifests/it") && seen.earlier == 0;
            limited.then(|| (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "1")]).into_response())
        })
        .await;
    let bench = Bench::new(&[&fake.host()]);
    let begin = Instant::now();
    bench.pull(&fake.image()).await.unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(1));
    bench.check("target", &image);
}

#[tokio::test]
async fn a_rate_limit_of_an_hour_is_an_error_at_once() {
    let fake = Contents::of(&image())
        .serve(|_| Some((StatusCode::TOO_MANY_REQUESTS, [("retry-after", "3600")]).into_response()))
        .await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    let Error::RateLimited { retry_after, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*retry_after, Some(Duration::from_secs(3600)));
    assert_eq!(fake.seen().len(), 1);
    assert!(error.to_string().contains("in 3600 s"), "{error}");
}

#[tokio::test]
async fn a_registry_that_never_answers_is_given_up() {
    // Accepts connections and says nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let bench = Bench::with(&[&host], |settings| settings.patience.attempts = 2);
    let begin = Instant::now();
    let error = bench.fail(&format!("{host}/a")).await;
    assert!(matches!(error, Error::Stalled { .. }), "{error:?}");
    assert!((1000..5000).contains(&begin.elapsed().as_millis()));
}

#[tokio::test]
async fn a_registry_that_is_not_there_is_told() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    drop(listener);
    let error = Bench::new(&[&host]).fail(&format!("{host}/a")).await;
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_layer_that_stalls_is_taken_up_and_then_given_up() {
    let image = image();
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    // Ten thousand bytes more each time, of a hundred thousand.
    let fake = Contents::of(&image)
        .serve(move |seen| seen.path.ends_with(&layer).then(|| stalling(&bytes, seen.range(), 10_000)))
        .await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.patience.attempts = 3);
    let error = bench.fail(&fake.image()).await;
    assert!(matches!(error, Error::Stalled { .. }), "{error:?}");
    let ranges: Vec<_> = fake.seen_of(&image.layers[0]).iter().map(crate::fake::Seen::range).collect();
    assert_eq!(ranges, [None, Some(10_000), Some(20_000)]);
    assert_eq!(bench.downloads(), [(image.layers[0]["sha256:".len()..].to_owned(), 30_000)]);
}

#[tokio::test]
async fn a_trickle_is_a_stall() {
    let image = image();
    let layer = image.layers[0].clone();
    let bytes = image.layer(0).to_vec();
    let fake = Contents::of(&image)
        .serve(move |seen| {
            seen.path.ends_with(&layer).then(|| {
                let bytes = bytes.clone();
                let trickle = futures_util::stream::unfold(0, move |at| {
                    let byte = axum::body::Bytes::copy_from_slice(&bytes[at..=at]);
                    async move {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        Some((Ok::<_, std::io::Error>(byte), at + 1))
                    }
                });
                axum::body::Body::from_stream(trickle).into_response()
            })
        })
        .await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.patience.attempts = 1);
    let begin = Instant::now();
    let error = bench.fail(&fake.image()).await;
    assert!(matches!(error, Error::Stalled { .. }), "{error:?}");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn connections_that_break_are_passed() {
    let image = Image::for_here(&[(3_000_000, Gzip)]);
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let breaks = seen.path.ends_with(&layer) && seen.earlier < 7;
            breaks.then(|| breaking(&bytes, seen.range(), 300_000))
        })
        .await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.patience.attempts = 8);
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
}

#[tokio::test]
async fn a_registry_without_ranges_is_asked_from_the_beginning() {
    let image = image();
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    let fake = Contents::of(&image)
        .serve(move |seen| {
            seen.path.ends_with(&layer).then(|| match seen.earlier {
                0 => breaking(&bytes, None, 40_000),
                _ => blob(&bytes, None),
            })
        })
        .await;
    let bench = Bench::new(&[&fake.host()]);
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
}
