//! A sandbox that runs, its record, and how it ended.

use std::io::{self, Read, Seek};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use osb_protocol::boot;
use osb_protocol::ids::SandboxId;
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::config::Limits;
use crate::identity::Identity;
use crate::retire::Announced;
use crate::slot::{ENDED_FILE, LOG_FILE, Slot};

/// What must be known to find a sandbox again after the server has been restarted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Number of the slot.
    pub(crate) slot: u32,
    /// Its first process.
    pub(crate) init: Identity,
    /// The image's id.
    pub image: String,
    /// Layers that it stands on.
    pub layers: Vec<PathBuf>,
    /// Limits of its work.
    pub limits: Limits,
}

impl Record {
    /// Host process id of the sandbox's first process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.init.pid()
    }
}

/// How a sandbox ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Exit code of the entrypoint, 128 + signal; absent when init did not live to tell.
    pub exit_code: Option<i32>,
    /// The signal that ended the entrypoint.
    pub signal: Option<i32>,
    /// Kills by the out-of-memory killer.
    pub oom_kills: u64,
    /// The host has been started anew since.
    pub host_restarted: bool,
}

/// A running sandbox.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: SandboxId,
    pub(crate) pidfd: AsyncFd<OwnedFd>,
    /// Taken out when it has ended.
    slot: Mutex<Option<Slot>>,
    /// Set by the delete.
    deleted: Mutex<Option<Announced>>,
    /// Told by the kill.
    pub(crate) killed: Notify,
    pub(crate) socket: PathBuf,
    pub(crate) dir: PathBuf,
}

impl Sandbox {
    pub(crate) fn new(
        id: SandboxId,
        pidfd: AsyncFd<OwnedFd>,
        slot: Slot,
        socket: PathBuf,
        dir: PathBuf,
    ) -> Self {
        Self {
            id,
            pidfd,
            slot: Mutex::new(Some(slot)),
            deleted: Mutex::default(),
            killed: Notify::new(),
            socket,
            dir,
        }
    }

    pub(crate) fn slot(&self) -> MutexGuard<'_, Option<Slot>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The note that it was deleted on purpose.
    pub(crate) fn deleted(&self) -> MutexGuard<'_, Option<Announced>> {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it. Everything in it is dead when its pidfd becomes readable.
    pub(crate) fn kill(&self) {
        // The only failure for a descriptor of ours is that it is dead already.
        let _ = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), rustix::process::Signal::KILL);
        self.killed.notify_one();
    }

    pub(crate) async fn dead(&self) {
        // The runtime can only fail this while it shuts down, and then nobody waits.
        let _ = self.pidfd.readable().await;
    }
}

/// Reads how the sandbox in `dir` ended.
pub(crate) fn ended(dir: &Path, oom_kills: Option<u64>, host_restarted: bool) -> Ended {
    let word = word(&dir.join(ENDED_FILE));
    let told = word.as_ref().and_then(|word| word.oom_kills);
    Ended {
        exit_code: word.as_ref().map(|word| word.exit_code),
        signal: word.as_ref().and_then(|word| word.signal),
        // Our own look is the last; what init wrote is for when there is none.
        oom_kills: oom_kills.or(told).unwrap_or(0),
        host_restarted: host_restarted && word.is_none(),
    }
}

fn word(path: &Path) -> Option<boot::Ended> {
    let mut text = Vec::new();
    std::fs::File::open(path).ok()?.take(64 << 10).read_to_end(&mut text).ok()?;
    serde_json::from_slice(text.split(|byte| *byte == b'\n').next()?).ok()
}

/// The newest bytes of the entrypoint's output.
pub(crate) fn log(dir: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut file = std::fs::File::open(dir.join(LOG_FILE))?;
    let len = file.metadata()?.len();
    file.seek(io::SeekFrom::Start(len.saturating_sub(most as u64)))?;
    let mut bytes = Vec::new();
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_told_by_init_or_left_open() {
        let dir = tempfile::tempdir().unwrap();
        let unknown = Ended { exit_code: None, signal: None, oom_kills: 2, host_restarted: false };
        assert_eq!(ended(dir.path(), Some(2), false), unknown);
        let text = r#"{"exit_code":137,"signal":9,"oom_kills":1}"#;
        std::fs::write(dir.path().join(ENDED_FILE), format!("{text}\n")).unwrap();
        let told = Ended { exit_code: Some(137), signal: Some(9), oom_kills: 1, host_restarted: false };
        assert_eq!(ended(dir.path(), None, true), told);
        assert_eq!(ended(dir.path(), Some(3), false).oom_kills, 3);
        std::fs::write(dir.path().join(ENDED_FILE), "rubbish").unwrap();
        assert_eq!(ended(dir.path(), Some(2), false), unknown);
    }

    #[test]
    fn the_log_gives_its_newest_bytes() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(LOG_FILE), "0123456789").unwrap();
        assert_eq!(log(dir.path(), 4).unwrap(), b"6789");
        assert_eq!(log(dir.path(), 100).unwrap(), b"0123456789");
    }
}
