//! Downloads that are broken off and taken up again.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use osb_registry::{Puller, Settings};

use crate::fake::{Contents, stalling};
use crate::images::Compression::{Gzip, None as Plain};
use crate::images::Image;
use crate::support::{Bench, settings, until};

#[tokio::test]
async fn a_dropped_pull_is_taken_up_and_no_byte_comes_twice() {
    const FIRST: usize = 700_000;
    let image = Image::for_here(&[(2_000_000, Gzip)]);
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    let size = bytes.len();
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let first = seen.path.ends_with(&layer) && seen.earlier == 0;
            first.then(|| stalling(&bytes, seen.range(), FIRST))
        })
        .await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.patience.stall = Duration::from_secs(60));
    let name = fake.image();
    {
        let pull = bench.pull(&name);
        tokio::pin!(pull);
        let there = until("the first part", || bench.downloads().iter().any(|(_, len)| *len == FIRST as u64));
        tokio::select! {
            result = &mut pull => panic!("the pull ended: {result:?}"),
            () = there => {}
        }
    }
    assert!(!bench.target("target").exists());
    // As after a restart: another puller on the same directory.
    let restarted = Bench { puller: Puller::new(bench.settings.clone()).unwrap(), ..bench };
    restarted.pull(&name).await.unwrap();
    restarted.check("target", &image);
    let asked: Vec<_> = fake.seen_of(&image.layers[0]).iter().map(crate::fake::Seen::range).collect();
    assert_eq!(asked, [None, Some(FIRST)], "of {size}");
    assert!(restarted.downloads().is_empty(), "complete downloads stay: {:?}", restarted.downloads());
}

/// Pulls in a process of its own, which the test below kills.
#[tokio::test]
async fn pull_in_a_child() {
    let Ok(name) = std::env::var("OSB_TEST_PULL") else { return };
    let directory = std::path::PathBuf::from(std::env::var("OSB_TEST_DIRECTORY").unwrap());
    let host = name.split('/').next().unwrap();
    let mut settings = settings(&directory, &[host]);
    settings.patience.stall = Duration::from_secs(60);
    let puller = Puller::new(settings).unwrap();
    let (progress, _) = tokio::sync::watch::channel(osb_registry::Progress::default());
    puller.pull(&name, None, None, &directory.join("child"), &|_| false, &progress).await.unwrap();
}

fn child(name: &str, directory: &std::path::Path) -> std::process::Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "resume::pull_in_a_child"]).env("OSB_TEST_PULL", name);
    command.env("OSB_TEST_DIRECTORY", directory).stdout(Stdio::null()).process_group(0);
    command.spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_leaves_what_the_next_takes_up() {
    const FIRST: usize = 500_000;
    let image = Image::for_here(&[(1_000_000, Plain)]);
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let first = seen.path.ends_with(&layer) && seen.earlier == 0;
            first.then(|| stalling(&bytes, seen.range(), FIRST))
        })
        .await;
    let bench = Bench::new(&[&fake.host()]);
    let mut child = child(&fake.image(), bench.directory.path());
    until("the first part", || bench.downloads().iter().any(|(_, len)| *len == FIRST as u64)).await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!bench.target("child").exists());
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
    let asked: Vec<_> = fake.seen_of(&image.layers[0]).iter().map(crate::fake::Seen::range).collect();
    assert_eq!(asked, [None, Some(FIRST)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_waits_for_the_download_and_uses_it() {
    const FIRST: usize = 500_000;
    let image = Image::for_here(&[(1_000_000, Plain)]);
    let (layer, bytes) = (image.layers[0].clone(), image.layer(0).to_vec());
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let layer = seen.path.ends_with(&layer);
            layer.then(|| {
                let head = axum::body::Bytes::copy_from_slice(&bytes[..FIRST]);
                let tail = axum::body::Bytes::copy_from_slice(&bytes[FIRST..]);
                let slow = futures_util::stream::unfold(0, move |step| {
                    let (head, tail) = (head.clone(), tail.clone());
                    async move {
                        match step {
                            0 => Some((Ok::<_, std::io::Error>(head), 1)),
                            1 => {
                                tokio::time::sleep(Duration::from_millis(1500)).await;
                                Some((Ok(tail), 2))
                            }
                            _ => None,
                        }
                    }
                });
                axum::response::IntoResponse::into_response(axum::body::Body::from_stream(slow))
            })
        })
        .await;
    let bench = Bench::with(&[&fake.host()], |settings| settings.patience.stall = Duration::from_secs(60));
    let mut child = child(&fake.image(), bench.directory.path());
    until("the first part", || bench.downloads().iter().any(|(_, len)| *len == FIRST as u64)).await;
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
    assert!(child.wait().unwrap().success());
    bench.check("child", &image);
    assert_eq!(fake.seen_of(&image.layers[0]).len(), 1, "one download for both");
    assert!(bench.downloads().is_empty());
}

#[tokio::test]
async fn a_spoiled_beginning_is_fetched_again() {
    let image = Image::for_here(&[(300_000, Gzip)]);
    let fake = Contents::of(&image).serve(|_| None).await;
    let bench = Bench::new(&[&fake.host()]);
    let size = image.layer(0).len();
    // A wrong beginning, a wrong whole, and more than a whole.
    for len in [100_000, size, size + 7] {
        let directory = bench.settings.downloads_dir.join(fake.host());
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(&image.layers[0]["sha256:".len()..]), vec![0; len]).unwrap();
        let target = format!("target-{len}");
        bench.pull_to(&fake.image(), &target).await.unwrap();
        bench.check(&target, &image);
    }
}

#[tokio::test]
async fn complete_layers_of_a_failed_pull_are_not_fetched_again() {
    let image = Image::for_here(&[(100_000, Gzip), (200_000, Gzip)]);
    let second = image.layers[1].clone();
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let wrong = seen.path.ends_with(&second) && seen.earlier == 0;
            wrong.then(|| crate::fake::refusal(404, "BLOB_UNKNOWN", "blob unknown"))
        })
        .await;
    // One after the other, so that the first is complete when the second fails.
    let bench = Bench::with(&[&fake.host()], |settings| settings.concurrent_downloads = 1);
    bench.fail(&fake.image()).await;
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
    assert_eq!(fake.seen_of(&image.layers[0]).len(), 1);
}

#[tokio::test]
async fn leftovers_are_collected_by_age_and_what_is_in_work_is_not() {
    let bench = Bench::new(&[]);
    let directory = bench.settings.downloads_dir.join("old.example");
    std::fs::create_dir_all(&directory).unwrap();
    let old = SystemTime::now() - bench.settings.keep_downloads - Duration::from_secs(60);
    let file = |name: char, time: SystemTime| {
        let path = directory.join(name.to_string().repeat(64));
        std::fs::write(&path, "12345").unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(time).unwrap();
        file
    };
    file('a', old);
    file('b', SystemTime::now());
    let held = file('c', old);
    held.lock().unwrap();
    let collected = bench.puller.collect_downloads().unwrap();
    assert_eq!((collected.files, collected.bytes), (1, 5));
    assert_eq!(bench.downloads().len(), 2);
    drop(held);
    std::fs::remove_file(directory.join("b".repeat(64))).unwrap();
    bench.puller.collect_downloads().unwrap();
    assert!(!directory.exists(), "empty directories go too");
}

#[tokio::test]
async fn a_full_disk_is_told() {
    let image = Image::for_here(&[(100_000, Gzip)]);
    let fake = Contents::of(&image).serve(|_| None).await;
    let reserve = |settings: &mut Settings| settings.reserve_bytes = u64::MAX;
    let bench = Bench::with(&[&fake.host()], reserve);
    let error = bench.fail(&fake.image()).await;
    let osb_registry::Error::NoSpace { path, needed, .. } = &error else { panic!("{error:?}") };
    assert_eq!(
        error.to_string(),
        format!(
            "no space left in {}: the download needs {:.1} kB, and 0 B may be used; free some there",
            path.display(),
            *needed as f64 / 1e3
        )
    );
    assert!(fake.seen_of(&image.layers[0]).is_empty());
}
