//! Watching sandboxes, ending them, and what is left to ask of them.

use std::convert::Infallible;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use osb_protocol::ids::SandboxId;

use crate::engine::{Engine, Event, Inner};
use crate::error::EngineError;
use crate::retire::{Announced, Remains};
use crate::sandbox::{self, Ended, Sandbox};

/// How long a killed sandbox has to die before its group is killed, and the longest pause until that is repeated.
const PATIENCE: Duration = Duration::from_millis(50);
const PATIENCE_MAX: Duration = Duration::from_secs(1);

impl Engine {
    /// Ends a sandbox and frees all it had. From the return on it cannot be reached; the rest goes on behind, see
    /// [`Engine::settled`]. An unknown id is no error.
    pub fn delete(&self, id: SandboxId) {
        let inner = &self.inner;
        let mut table = inner.table();
        if let Some(sandbox) = table.live.remove(&id) {
            // The task that watches it finds the note and does the rest.
            *sandbox.deleted() = Some(inner.retire.announce());
            drop(table);
            sandbox.kill();
        } else if let Some(dir) = table.ended.remove(&id) {
            drop(table);
            let announced = inner.retire.announce();
            inner.retire.hand_in(Remains { slot: None, dir: Some(dir) }, announced);
        }
    }

    /// The entrypoint's newest output, at most `most` bytes. Blocks for as long as reading a file takes.
    pub fn log(&self, id: SandboxId, most: usize) -> Result<Vec<u8>, EngineError> {
        let dir = {
            let table = self.inner.table();
            let live = table.live.get(&id).map(|sandbox| sandbox.dir.clone());
            live.or_else(|| table.ended.get(&id).cloned()).ok_or(EngineError::NotFound)?
        };
        sandbox::log(&dir, most)
            .map_err(|error| EngineError::Failed(format!("read the entrypoint's log: {error}")))
    }

    /// Sandboxes that run.
    #[must_use]
    pub fn running(&self) -> Vec<SandboxId> {
        self.inner.table().live.keys().copied().collect()
    }
}

impl Inner {
    /// Follows a sandbox to its end. To be called within a tokio runtime.
    pub(crate) fn watch(self: &Arc<Self>, sandbox: Arc<Sandbox>) {
        let inner = Arc::clone(self);
        let mut stopped = self.stopped.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                () = sandbox.dead() => inner.buried(&sandbox),
                never = inner.insist(&sandbox) => match never {},
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
        });
    }

    /// Sees to it that a killed sandbox dies. Its first process ends all others, but has to be given the processor
    /// for that: among thousands of processes that fork all the time its turn comes once in many seconds, and the
    /// rest goes on meanwhile. The kernel kills a group at once.
    async fn insist(&self, sandbox: &Arc<Sandbox>) -> Infallible {
        sandbox.killed.notified().await;
        let mut patience = PATIENCE;
        loop {
            tokio::time::sleep(patience).await;
            patience = (patience * 2).min(PATIENCE_MAX);
            let (cgroups, sandbox) = (self.cgroups.clone(), Arc::clone(sandbox));
            // Beside the threads that answer: this may wait for the kernel.
            let kill = move || {
                // As long as this is held the slot cannot pass to another sandbox, whose group this is then.
                if let Some(slot) = sandbox.slot().as_mut() {
                    cgroups.kill(slot.index, &mut slot.cgroups);
                }
            };
            let _ = tokio::task::spawn_blocking(kill).await;
        }
    }

    /// A sandbox is dead, by its own doing or ours.
    fn buried(&self, sandbox: &Arc<Sandbox>) {
        let slot = sandbox.slot().take();
        let oom_kills = slot.as_ref().and_then(|slot| slot.cgroups.oom_kills());
        let announced: Option<Announced> = sandbox.deleted().take();
        if let Some(announced) = announced {
            self.retire.hand_in(Remains { slot, dir: Some(sandbox.dir.clone()) }, announced);
            return;
        }
        let ended = sandbox::ended(&sandbox.dir, oom_kills, false);
        let dir = sandbox.dir.clone();
        let announced = self.retire.announce();
        let deleted = {
            let mut table = self.table();
            // Deleted between the look above and this one: the note is there now.
            let deleted = sandbox.deleted().take();
            if deleted.is_none() {
                table.live.remove(&sandbox.id);
                table.ended.insert(sandbox.id, dir.clone());
            }
            deleted
        };
        // The slot is free for the next already; the files wait for the delete.
        let dir = deleted.is_some().then_some(dir);
        self.retire.hand_in(Remains { slot, dir }, announced);
        if deleted.is_none() {
            self.tell(sandbox.id, ended);
        }
    }

    fn tell(&self, id: SandboxId, ended: Ended) {
        // Nobody may have asked for events.
        let _ = self.events.send(Event::Ended { id, ended });
    }
}

impl Sandbox {
    /// Runs `action` with the network namespace, if the sandbox still has it.
    pub(crate) fn in_network<T>(&self, action: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> T) -> Option<T> {
        self.slot().as_ref().map(|slot| action(slot.net.netns.as_fd()))
    }
}
