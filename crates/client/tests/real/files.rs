//! Files in a real sandbox.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use opensandbox::{Error, FileKind, Permission, Rename, Replacement, Upload, mode_digits};

use crate::need;
use crate::server::Guarded;

#[tokio::test]
async fn what_goes_up_comes_down() {
    let sandbox = need!(Guarded::start().await);
    let files = sandbox.files();
    let binary: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    files
        .upload([
            Upload::new("/tmp/a/ä b.txt", "text\n").mode(0o640),
            Upload::new("/tmp/a/bin", binary.clone()),
            Upload::new("/tmp/a/empty", ""),
        ])
        .await
        .unwrap();
    assert_eq!(files.read_text("/tmp/a/ä b.txt").await.unwrap(), "text\n");
    assert_eq!(files.read("/tmp/a/bin").await.unwrap(), binary);
    assert!(files.read("/tmp/a/empty").await.unwrap().is_empty());
    assert!(matches!(files.read_text("/tmp/a/bin").await, Err(Error::InvalidArgument(_))));

    let mut download = files.download("/tmp/a/bin").await.unwrap();
    assert_eq!(download.size(), Some(300_000));
    let first = download.chunk().await.unwrap().unwrap();
    let rest: Vec<Bytes> = download.into_stream().try_collect().await.unwrap();
    assert_eq!([vec![first], rest].concat().concat(), binary);

    let range = files.download_range("/tmp/a/bin", 1000, 3).await.unwrap().bytes().await.unwrap();
    assert_eq!(range, binary[1000..1003]);
    let tail = files.download_from("/tmp/a/bin", 299_990).await.unwrap().bytes().await.unwrap();
    assert_eq!(tail, binary[299_990..]);
    assert!(matches!(files.download_range("/x", 1, 0).await, Err(Error::InvalidArgument(_))));
    let beyond = files.download_range("/tmp/a/bin", 300_000, 1).await.unwrap_err();
    assert_eq!(beyond.status(), Some(416));

    files.write("/tmp/lines", "1\n2\n3\n4\n").await.unwrap();
    assert_eq!(files.read_lines("/tmp/lines", 2, Some(2)).await.unwrap(), "2\n3");
    assert_eq!(files.read_lines("/tmp/lines", 3, None).await.unwrap(), "3\n4");
    assert!(files.read("/tmp/none").await.unwrap_err().is_not_found());
    files.upload([]).await.unwrap();
}

#[tokio::test]
async fn local_files_and_streams_go_up_and_downloads_are_saved() {
    let sandbox = need!(Guarded::start().await);
    let files = sandbox.files();
    let dir = tempfile::tempdir().unwrap();
    let local = dir.path().join("local");
    let content = vec![b'z'; 700_000];
    std::fs::write(&local, &content).unwrap();
    files.upload([Upload::file("/tmp/l", &local).await.unwrap()]).await.unwrap();
    assert!(Upload::file("/tmp/l", dir.path()).await.is_err());
    let pieces = futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from("ab")), Ok("cd".into())]);
    files.upload([Upload::stream("/tmp/s", reqwest_body(pieces.boxed()), None)]).await.unwrap();
    assert_eq!(files.read("/tmp/s").await.unwrap(), "abcd");

    let saved = dir.path().join("saved");
    std::fs::write(&saved, "old").unwrap();
    assert_eq!(files.download("/tmp/l").await.unwrap().save(&saved).await.unwrap(), 700_000);
    assert_eq!(std::fs::read(&saved).unwrap(), content);
    assert!(files.download("/tmp/l").await.unwrap().save(&dir.path().join("no/where")).await.is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "no parts are left");

    let fails = futures_util::stream::iter([Ok(Bytes::from("ab")), Err(std::io::Error::other("gone"))]);
    assert!(files.upload([Upload::stream("/tmp/f", reqwest_body(fails.boxed()), None)]).await.is_err());
    assert!(files.stat("/tmp/f").await.unwrap().is_none(), "half a file is none");
}

fn reqwest_body(stream: futures_util::stream::BoxStream<'static, std::io::Result<Bytes>>) -> reqwest::Body {
    reqwest::Body::wrap_stream(stream)
}

#[tokio::test]
async fn entries_are_described_found_and_changed() {
    let sandbox = need!(Guarded::start().await);
    let files = sandbox.files();
    let private = Permission { mode: mode_digits(0o700), ..Permission::default() };
    files.make_directories(&BTreeMap::from([("/tmp/d/e".to_owned(), private)])).await.unwrap();
    files.make_directory("/tmp/d/f").await.unwrap();
    files.write("/tmp/d/one.txt", "aXbX").await.unwrap();
    files.write("/tmp/d/e/two.txt", "").await.unwrap();
    sandbox.shell("ln -s one.txt /tmp/d/link").output().await.unwrap().checked().unwrap();

    let info = files.info(&["/tmp/d/one.txt", "/tmp/d/e", "/tmp/d/link"]).await.unwrap();
    assert_eq!((info["/tmp/d/one.txt"].kind, info["/tmp/d/one.txt"].size), (FileKind::File, 4));
    assert_eq!((info["/tmp/d/e"].kind, info["/tmp/d/e"].mode), (FileKind::Directory, 700));
    assert_eq!(info["/tmp/d/link"].kind, FileKind::Symlink);
    assert_eq!(files.stat("/tmp/d/e").await.unwrap().unwrap().owner, "root");
    assert!(files.stat("/tmp/d/none").await.unwrap().is_none());
    assert!(files.info(&["/tmp/d/none"]).await.unwrap_err().is_not_found());

    let names =
        |found: Vec<opensandbox::FileInfo>| found.into_iter().map(|entry| entry.path).collect::<Vec<_>>();
    assert_eq!(names(files.search("/tmp/d", "*.txt").await.unwrap()), ["/tmp/d/e/two.txt", "/tmp/d/one.txt"]);
    assert_eq!(
        names(files.list("/tmp/d", 1).await.unwrap()),
        ["/tmp/d/e", "/tmp/d/f", "/tmp/d/link", "/tmp/d/one.txt"]
    );
    assert_eq!(files.list("/tmp/d", 2).await.unwrap().len(), 5);

    let change = Replacement { old: "X".to_owned(), new: "yy".to_owned() };
    let counts = files.replace(&BTreeMap::from([("/tmp/d/one.txt".to_owned(), change)])).await.unwrap();
    assert_eq!(counts["/tmp/d/one.txt"], 2);
    assert_eq!(files.read("/tmp/d/one.txt").await.unwrap(), "ayybyy");

    let rename = |src: &str, dest: &str| [Rename { src: src.to_owned(), dest: dest.to_owned() }];
    files.rename(&rename("/tmp/d/one.txt", "/tmp/d/f/moved")).await.unwrap();
    assert!(files.rename(&rename("/tmp/d/one.txt", "/tmp/d/x")).await.unwrap_err().is_not_found());
    let permission = Permission { mode: mode_digits(0o604), owner: Some("nobody".to_owned()), group: None };
    files.set_permissions(&BTreeMap::from([("/tmp/d/f/moved".to_owned(), permission)])).await.unwrap();
    let moved = files.stat("/tmp/d/f/moved").await.unwrap().unwrap();
    assert_eq!((moved.mode, moved.owner.as_str()), (604, "nobody"));

    files.remove(&["/tmp/d/f/moved", "/tmp/d/none"]).await.unwrap();
    files.remove_directories(&["/tmp/d"]).await.unwrap();
    assert!(files.stat("/tmp/d").await.unwrap().is_none());
}
