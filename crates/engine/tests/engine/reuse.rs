//! Whether the files of one sandbox pass on to another: what tests of that share.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use osb_protocol::ids::SandboxId;

use crate::support::{Bed, params, until};

/// Number and birth of an upper layer. Numbers alone are given again.
pub(crate) type Upper = (u64, SystemTime);

fn upper(dir: &Path) -> Option<Upper> {
    let meta = dir.join("u0").metadata().ok()?;
    Some((meta.ino(), meta.created().ok()?))
}

pub(crate) fn upper_of(bed: &Bed, id: SandboxId) -> Upper {
    upper(&bed.dir.path().join("data/sandboxes").join(id.to_string())).unwrap()
}

/// Those that are there.
pub(crate) fn uppers(bed: &Bed) -> Vec<Upper> {
    let dirs = std::fs::read_dir(bed.dir.path().join("data/sandboxes")).unwrap().flatten();
    dirs.filter_map(|dir| upper(&dir.path())).collect()
}

/// A sandbox of the host's programs that has run this script and goes on.
pub(crate) async fn ran(bed: &Bed, script: &str) -> (SandboxId, Upper) {
    let image = bed.engine.images().resolve("host").unwrap().expect("the host's own image");
    let script = format!("exec 2>&1\n{script}\necho done; exec sleep 1000");
    let created = bed.engine.create(params(&image, &["bash", "-c", &script])).await.unwrap();
    until(&script, || bed.log(created.id).ends_with("done\n")).await;
    (created.id, upper_of(bed, created.id))
}

/// Whether the files of a sandbox that has run this stay; its output.
pub(crate) async fn stays(bed: &Bed, script: &str) -> (bool, String) {
    let (id, files) = ran(bed, script).await;
    let output = bed.log(id);
    bed.engine.delete(id);
    bed.engine.settled().await;
    (uppers(bed).contains(&files), output)
}
