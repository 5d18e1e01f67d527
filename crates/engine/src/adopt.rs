//! Taking back the sandboxes of an earlier life, and removing what belongs to none.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use osb_protocol::ids::SandboxId;
use tokio::io::Interest;

use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::retire::Remains;
use crate::sandbox::{self, Ended, Record, Sandbox};
use crate::slot::{SANDBOXES, Slot};

/// What became of a known sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adopted {
    /// It runs.
    Running,
    /// It ended while nobody looked.
    Ended(Ended),
}

impl Engine {
    /// Takes back the sandboxes of an earlier life, answers in the order given, removes everything of this instance
    /// that none of them owns, and begins to prepare. To be called once, before anything else.
    pub async fn adopt(
        &self,
        known: Vec<(SandboxId, Record)>,
    ) -> Result<Vec<(SandboxId, Adopted)>, EngineError> {
        let inner = Arc::clone(&self.inner);
        let runtime = tokio::runtime::Handle::current();
        let done = tokio::task::spawn_blocking(move || {
            let _in_runtime = runtime.enter();
            inner.adopt(known)
        });
        done.await.map_err(|error| EngineError::Failed(format!("the adoption was broken off: {error}")))
    }
}

impl Inner {
    fn adopt(self: &Arc<Self>, known: Vec<(SandboxId, Record)>) -> Vec<(SandboxId, Adopted)> {
        let mut answers = Vec::with_capacity(known.len());
        let mut slots = HashSet::new();
        let mut named = HashSet::new();
        for (id, record) in known {
            named.insert(id.to_string());
            let host_restarted = !record.init.is_of_boot(&self.booter.boot_id);
            let slot = record.slot;
            let running = if slots.contains(&slot) {
                Err(io::Error::other("two records name the same slot"))
            } else {
                self.take_back(id, record)
            };
            match running {
                Ok(sandbox) => {
                    slots.insert(slot);
                    self.table().live.insert(id, Arc::clone(&sandbox));
                    self.watch(sandbox);
                    answers.push((id, Adopted::Running));
                }
                Err(error) => {
                    tracing::info!(%id, %error, "a sandbox is not running any more");
                    let dir = self.maker.dir(id);
                    let ended = sandbox::ended(&dir, None, host_restarted);
                    self.table().ended.insert(id, dir);
                    answers.push((id, Adopted::Ended(ended)));
                }
            }
        }
        self.sweep(&slots, &named);
        if slots.is_empty() {
            self.base.remove_others();
        }
        self.pool.open(slots);
        answers
    }

    fn take_back(&self, id: SandboxId, record: Record) -> io::Result<Arc<Sandbox>> {
        let pidfd = record
            .init
            .find(&self.booter.boot_id)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "its first process is gone"))?;
        let namespace = |name: &str| -> io::Result<OwnedFd> {
            Ok(File::open(format!("/proc/{}/ns/{name}", record.pid()))?.into())
        };
        let net = namespace("net")?;
        let user_namespace = if self.user_namespace { Some(namespace("user")?) } else { None };
        let pidfd = crate::sys::watched(pidfd, Interest::READABLE)?;
        // Whatever was opened by number is the sandbox's only if it was alive all the while.
        if crate::standby::wait(pidfd.get_ref(), Duration::ZERO)? {
            return Err(io::Error::new(io::ErrorKind::NotFound, "its first process has just ended"));
        }
        let net = self.maker.network(|network| network.adopt(record.slot, net))?;
        let cgroups = self.cgroups.make(record.slot)?;
        let slot = Slot { index: record.slot, net, user_namespace, cgroups, reusable: false, kept: None };
        let (socket, dir) = (self.maker.socket(record.slot), self.maker.dir(id));
        Ok(Arc::new(Sandbox::new(id, pidfd, slot, socket, dir)))
    }

    /// Removes what carries this instance's name and belongs to no sandbox that runs.
    fn sweep(&self, slots: &HashSet<u32>, named: &HashSet<String>) {
        // Groups first: their removal kills what is in them, and the rest is then in nobody's use.
        for slot in self.cgroups.slots().into_iter().filter(|slot| !slots.contains(slot)) {
            if let Err(error) = self.cgroups.remove(slot) {
                tracing::warn!(slot, %error, "a cgroup of an earlier life cannot be removed");
            }
        }
        let keep: Vec<u32> = slots.iter().copied().collect();
        if let Err(error) = self.maker.network(|network| network.sweep(&keep)) {
            tracing::warn!(%error, "networks of an earlier life cannot be removed");
        }
        let sockets: HashSet<PathBuf> = slots.iter().map(|slot| self.maker.socket(*slot)).collect();
        for path in entries(&self.maker.run_dir).filter(|path| !sockets.contains(path)) {
            let _ = std::fs::remove_file(path);
        }
        let strangers = entries(&self.maker.data_dir.join(SANDBOXES)).filter(|path| {
            path.file_name().and_then(|name| name.to_str()).is_none_or(|name| !named.contains(name))
        });
        for dir in strangers {
            let announced = self.retire.announce();
            self.retire.hand_in(Remains { slot: None, dir: Some(dir) }, announced);
        }
    }
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path())
}
