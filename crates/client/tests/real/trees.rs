//! Directory trees into a real sandbox and back.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use opensandbox::{Error, TreeOptions};

use crate::need;
use crate::server::Guarded;

/// Path, mode and content of all files and directories below `root`.
fn contents(root: &Path) -> BTreeMap<String, (u32, Option<Vec<u8>>)> {
    let mut found = BTreeMap::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            let content = match metadata.is_symlink() {
                true => Some(std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()),
                false => metadata.is_file().then(|| std::fs::read(&path).unwrap()),
            };
            if content.as_ref().is_some_and(|content| content.starts_with(b"/etc")) {
                continue;
            }
            found.insert(name, (metadata.permissions().mode() & 0o777, content));
            if metadata.is_dir() {
                open.push(path);
            }
        }
    }
    found
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn a_tree_goes_in_and_comes_back_the_same() {
    let sandbox = need!(Guarded::start().await);
    let files = sandbox.files();
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let deep = from.path().join("1/2/3/4/5/6/7/8/9/10/11/12/13/14/15/16/17/18");
    std::fs::create_dir_all(&deep).unwrap();
    std::fs::write(deep.join("bottom ü"), "deep").unwrap();
    std::fs::create_dir(from.path().join("empty")).unwrap();
    std::fs::create_dir(from.path().join("closed")).unwrap();
    std::fs::write(from.path().join("closed/f"), "in a closed directory").unwrap();
    for number in 0..200 {
        std::fs::write(from.path().join(format!("small{number}")), number.to_string()).unwrap();
    }
    let large: Vec<u8> = (0..=255).cycle().take(9 << 20).collect();
    std::fs::write(from.path().join("large"), &large).unwrap();
    mode(&from.path().join("large"), 0o751);
    mode(&from.path().join("closed"), 0o511);
    symlink("/etc/passwd", from.path().join("link")).unwrap();
    symlink("../large", from.path().join("closed/inside")).unwrap();
    symlink("1/2", from.path().join("to-directory")).unwrap();

    let options = TreeOptions::default();
    let mut last = (0, 0);
    let mut calls = 0;
    let mut progress = |now: opensandbox::TreeProgress<'_>| {
        assert!(now.bytes >= last.0 && now.files >= last.1 && now.bytes <= now.total_bytes);
        last = (now.bytes, now.files);
        calls += 1;
    };
    let up = files.upload_tree(from.path(), "/tmp/tree", &options, &mut progress).await.unwrap();
    assert_eq!((up.files, up.directories, up.links, up.skipped.len()), (203, 20, 2, 1));
    assert_eq!((last, calls > 200), ((up.bytes, 203), true));
    assert_eq!(up.skipped[0].path, "link");

    sandbox.shell("ln -s /etc /tmp/tree/etc; mkfifo /tmp/tree/pipe").output().await.unwrap();
    let down = files.download_tree("/tmp/tree/", to.path(), &options, &mut |_| {}).await.unwrap();
    assert_eq!((down.files, down.directories, down.links, down.bytes), (203, 20, 2, up.bytes));
    let again = files.upload_tree(from.path(), "/tmp/tree", &options, &mut |_| {}).await.unwrap();
    assert_eq!((again.files, again.links), (203, 2), "over what is there");
    let mut skipped: Vec<&str> = down.skipped.iter().map(|skipped| skipped.path.as_str()).collect();
    skipped.sort_unstable();
    assert_eq!(skipped, ["etc", "pipe"]);
    assert_eq!(contents(from.path()), contents(to.path()));
}

#[tokio::test]
async fn what_is_there_is_replaced_or_left() {
    let sandbox = need!(Guarded::start().await);
    let files = sandbox.files();
    sandbox.shell("mkdir -p /tmp/t/d; echo new >/tmp/t/d/f").output().await.unwrap().checked().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let to = tempfile::tempdir().unwrap();
    let options = TreeOptions::default();

    std::fs::create_dir(to.path().join("d")).unwrap();
    std::fs::write(outside.path().join("victim"), "safe").unwrap();
    symlink(outside.path().join("victim"), to.path().join("d/f")).unwrap();
    std::fs::write(to.path().join("other"), "stays").unwrap();
    files.download_tree("/tmp/t", to.path(), &options, &mut |_| {}).await.unwrap();
    assert_eq!(std::fs::read(to.path().join("d/f")).unwrap(), b"new\n");
    assert_eq!(std::fs::read(outside.path().join("victim")).unwrap(), b"safe");
    assert_eq!(std::fs::read(to.path().join("other")).unwrap(), b"stays");

    std::fs::remove_dir_all(to.path().join("d")).unwrap();
    symlink(outside.path(), to.path().join("d")).unwrap();
    assert!(files.download_tree("/tmp/t", to.path(), &options, &mut |_| {}).await.is_err());
    assert!(!outside.path().join("f").exists());
}

#[tokio::test]
async fn limits_and_faults_are_told() {
    let sandbox = need!(Guarded::start().await);
    let files = sandbox.files();
    let local = tempfile::tempdir().unwrap();
    std::fs::write(local.path().join("f"), vec![0; 5000]).unwrap();
    let mut small = TreeOptions::default();
    small.max_bytes = Some(4999);
    let error = files.upload_tree(local.path(), "/tmp/t", &small, &mut |_| {}).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert!(files.stat("/tmp/t").await.unwrap().is_none());
    files.upload_tree(local.path(), "/tmp/t", &TreeOptions::default(), &mut |_| {}).await.unwrap();
    let to = tempfile::tempdir().unwrap();
    let error = files.download_tree("/tmp/t", to.path(), &small, &mut |_| {}).await.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    let options = TreeOptions::default();
    let error = files.download_tree("/tmp/none", to.path(), &options, &mut |_| {}).await.unwrap_err();
    assert!(error.is_not_found(), "{error}");
    let absent = local.path().join("absent");
    assert!(files.upload_tree(&absent, "/tmp/t", &options, &mut |_| {}).await.is_err());
    let mut owned = TreeOptions::default();
    owned.owner = Some("nobody".to_owned());
    files.upload_tree(local.path(), "/tmp/owned", &owned, &mut |_| {}).await.unwrap();
    assert_eq!(files.stat("/tmp/owned/f").await.unwrap().unwrap().owner, "nobody");
}
