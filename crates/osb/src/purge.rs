//! `osb server --purge`: leaves the host as if the server had never run.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use osb_engine::net::Network;
use osb_runtime::Runtime as _;
use osb_runtime_embedded::{EmbeddedRuntime, Images};
use osb_server::config::Config;

use crate::{execd, server};

/// Ends all sandboxes and removes directories, cgroups, interfaces and packet filter rules. Files are removed last,
/// for the instance's name in them is what the rest is found by. Can be repeated.
pub(crate) async fn run(config: &Config) -> anyhow::Result<()> {
    let data_dir = &config.embedded.data_dir;
    // Every server writes this file at its first start: a directory without it is not ours to delete.
    match std::fs::metadata(data_dir.join("instance")) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            tracing::info!(data_dir = %data_dir.display(), "nothing to remove: no server has run with it");
            return Ok(());
        }
        Err(error) => return Err(error).with_context(|| data_dir.display().to_string()),
    }
    let mut engine = server::engine_config(&config.embedded, execd::find()?);
    engine.ready_slots = 0;
    let runtime = EmbeddedRuntime::start(engine, Images::stored_only(data_dir))?;
    let instance = runtime.engine().instance().to_owned();
    // No sandbox is known: whatever carries this instance's name is removed.
    runtime.adopt(Vec::new()).await?;
    runtime.settled().await;
    runtime.shutdown().await;
    Network::purge_instance(&instance).context("network")?;
    remove_dir(Path::new(&format!("/run/opensandbox-{instance}")))?;
    let store = config.store_path();
    for suffix in ["", "-wal", "-shm", "-journal"] {
        let mut path = store.clone().into_os_string();
        path.push(suffix);
        remove_file(Path::new(&path))?;
    }
    let data_dir = data_dir.canonicalize().with_context(|| data_dir.display().to_string())?;
    remove_dir(&data_dir)?;
    tracing::info!(data_dir = %data_dir.display(), "everything removed");
    Ok(())
}

fn remove_file(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes a directory with all it holds; never what is mounted in it, which is somebody else's.
fn remove_dir(path: &Path) -> anyhow::Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    if let Some(mount) = mounts_below(&mounts, path).into_iter().find(|mount| mount != path) {
        bail!("{} is mounted; unmount it, then purge again", mount.display());
    }
    match std::fs::remove_dir_all(path) {
        // A mount point itself stays, empty.
        Err(error) if error.kind() == ErrorKind::ResourceBusy => Ok(()),
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Mount points at or below a directory.
fn mounts_below(mountinfo: &str, path: &Path) -> Vec<PathBuf> {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|field| PathBuf::from(unescape(field)))
        .filter(|mount| mount.starts_with(path))
        .collect()
}

/// The kernel writes blanks and backslashes as three octal digits.
fn unescape(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |text, (code, character)| text.replace(code, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_below_a_directory_are_found() {
        let mountinfo = "1 0 8:1 / / rw - ext4 /dev/sda rw\n\
                         2 1 0:5 / /data/a\\040b rw - tmpfs x rw\n\
                         3 1 0:6 / /database rw - tmpfs x rw\n";
        assert_eq!(mounts_below(mountinfo, Path::new("/data")), [PathBuf::from("/data/a b")]);
        assert!(mounts_below(mountinfo, Path::new("/other")).is_empty());
    }

    #[test]
    fn removal_can_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("f"), "").unwrap();
        remove_dir(&path).unwrap();
        remove_dir(&path).unwrap();
        remove_file(&path).unwrap();
    }
}
