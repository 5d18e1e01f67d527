//! Slots: what a sandbox needs beside its files, kept from one sandbox to the next, and a slot made ready for one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use osb_protocol::ids::SandboxId;

use crate::base::Base;
use crate::cgroup::{CgroupSet, Cgroups};
use crate::config::Limits;
use crate::helper::handle::{Helper, Recipe};
use crate::helper::message::{Hello, Prepare, Prepared, Request, RootSpec};
use crate::helper::preparer::IDS;
use crate::image::Image;
use crate::kept::{self, Kept};
use crate::net::{NetError, NetSlot, Network};
use crate::standby::Standby;

/// Files of a sandbox beside its layers.
pub(crate) const ENDED_FILE: &str = "ended";
pub(crate) const LOG_FILE: &str = "log";
/// Directory of all sandboxes, below the data directory.
pub(crate) const SANDBOXES: &str = "sandboxes";

/// Network, groups and ids of one sandbox at a time.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) index: u32,
    pub(crate) net: NetSlot,
    pub(crate) user_namespace: Option<OwnedFd>,
    pub(crate) cgroups: CgroupSet,
    /// False for slots of an earlier life of the engine, which may have been made with other settings.
    pub(crate) reusable: bool,
    /// Files for the next sandbox, if the one that has them now leaves them as they are.
    pub(crate) kept: Option<Kept>,
}

impl Slot {
    /// Id of the image that it has files of.
    pub(crate) fn image_id(&self) -> Option<&String> {
        self.kept.as_ref().map(|kept| &kept.image.id)
    }
}

/// A slot with everything but the request.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) slot: Slot,
    pub(crate) id: SandboxId,
    pub(crate) image: Arc<Image>,
    /// Detached overlays, as many as the image has roots.
    pub(crate) overlays: Vec<OwnedFd>,
    pub(crate) listener: UnixListener,
    pub(crate) ended: File,
    pub(crate) log: File,
    /// Its init, once that has been started.
    pub(crate) standby: Option<Standby>,
}

/// Makes slots and makes them ready. All calls block.
#[derive(Debug)]
pub(crate) struct Maker {
    /// Taken out when the engine stops.
    pub(crate) network: RwLock<Option<Network>>,
    pub(crate) cgroups: Cgroups,
    pub(crate) base: Arc<Base>,
    pub(crate) data_dir: PathBuf,
    pub(crate) run_dir: PathBuf,
    pub(crate) default_limits: Limits,
    pub(crate) id_base: u32,
    pub(crate) recipe: Recipe,
    pub(crate) hello: Hello,
    /// Whether files that a sandbox has left as they were are used again.
    pub(crate) keeps: bool,
    /// Taken out when it is gone, and when the engine stops.
    pub(crate) preparer: Mutex<Option<Helper>>,
}

impl Maker {
    /// Does something with the network.
    pub(crate) fn network<T>(&self, action: impl FnOnce(&Network) -> Result<T, NetError>) -> io::Result<T> {
        let network = self.network.read().unwrap_or_else(PoisonError::into_inner);
        let network = network.as_ref().ok_or_else(|| io::Error::other("the engine has been shut down"))?;
        action(network).map_err(io::Error::other)
    }

    /// Stops the network; what running sandboxes need of it stays.
    pub(crate) fn stop_network(&self) {
        let network = self.network.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = network.map(Network::stop) {
            tracing::warn!(%error, "the network cannot be taken down completely");
        }
    }

    /// A new slot. On error nothing of it is left.
    pub(crate) fn make(&self, index: u32) -> io::Result<Slot> {
        let net = self.network(|network| network.make(index))?;
        match self.cgroups.make(index) {
            Ok(cgroups) => Ok(Slot { index, net, user_namespace: None, cgroups, reusable: true, kept: None }),
            Err(error) => {
                self.remove_cgroups(index);
                self.remove_net(net);
                Err(error)
            }
        }
    }

    /// Removes a slot whose processes are gone, or kills what is left of them.
    pub(crate) fn destroy(&self, slot: Slot) {
        let Slot { index, net, cgroups, kept, .. } = slot;
        self.discard(kept);
        drop(cgroups);
        self.remove_cgroups(index);
        self.remove_net(net);
    }

    /// Removes many slots in hardly more time than one.
    pub(crate) fn destroy_all(&self, slots: Vec<Slot>) {
        let mut nets = Vec::with_capacity(slots.len());
        for Slot { index, net, cgroups, kept, .. } in slots {
            self.discard(kept);
            drop(cgroups);
            self.remove_cgroups(index);
            nets.push(net);
        }
        if let Err(error) = self.network(|network| network.destroy_all(nets)) {
            tracing::warn!(%error, "network slots cannot be removed and are left for the next start");
        }
    }

    fn remove_cgroups(&self, index: u32) {
        if let Err(error) = self.cgroups.remove(index) {
            tracing::warn!(slot = index, %error, "a cgroup cannot be removed and is left for the next start");
        }
    }

    fn remove_net(&self, net: NetSlot) {
        let index = net.index;
        if let Err(error) = self.network(|network| network.destroy(net)) {
            tracing::warn!(slot = index, %error, "a network slot cannot be removed and is left for the next start");
        }
    }

    /// Makes the slot of a dead sandbox fit for another; `None` when it had to be destroyed.
    pub(crate) fn recycle(&self, mut slot: Slot) -> Option<Slot> {
        if !slot.reusable {
            self.destroy(slot);
            return None;
        }
        if let Err(error) = self.network(|network| network.recycle(&slot.net)) {
            tracing::info!(slot = slot.index, %error, "a network slot is not used again");
            self.destroy(slot);
            return None;
        }
        if !self.cgroups.recycle(slot.index, &mut slot.cgroups) {
            let made = self.cgroups.remove(slot.index).and_then(|()| self.cgroups.make(slot.index));
            match made {
                Ok(cgroups) => slot.cgroups = cgroups,
                Err(error) => {
                    tracing::warn!(slot = slot.index, %error, "cgroups cannot be made anew");
                    self.destroy(slot);
                    return None;
                }
            }
        }
        Some(slot)
    }

    /// Makes a slot ready for a sandbox of `image`. On error the slot is given back.
    pub(crate) fn ready(&self, mut slot: Slot, image: &Arc<Image>) -> Result<Ready, Box<(Slot, io::Error)>> {
        let id = SandboxId::random();
        match self.fit(&mut slot, id, image) {
            Ok((overlays, listener, ended, log)) => Ok(Ready {
                slot,
                id,
                image: Arc::clone(image),
                overlays,
                listener,
                ended,
                log,
                standby: None,
            }),
            Err(error) => {
                slot.kept = None;
                let _ = crate::tree::remove(&self.dir(id));
                let _ = std::fs::remove_file(self.socket(slot.index));
                Err(Box::new((slot, error)))
            }
        }
    }

    fn fit(
        &self,
        slot: &mut Slot,
        id: SandboxId,
        image: &Arc<Image>,
    ) -> io::Result<(Vec<OwnedFd>, UnixListener, File, File)> {
        self.cgroups.limit(slot.index, &mut slot.cgroups, self.default_limits)?;
        let overlays = match self.again(slot, id, image) {
            Some(overlays) => overlays,
            None => {
                crate::image::stand(&self.data_dir, image, &self.dir(id), || self.overlays(slot, id, image))?
            }
        };
        let listener = self.listen(slot.index)?;
        let (ended, log) = kept::log_and_end(&self.dir(id))?;
        Ok((overlays, listener, ended, log))
    }

    /// The files that the slot's last sandbox has left as they were, for a new one.
    fn again(&self, slot: &mut Slot, id: SandboxId, image: &Image) -> Option<Vec<OwnedFd>> {
        let mut kept = slot.kept.take()?;
        let renewed =
            if kept.fits(image) { self.renew(&mut kept, id) } else { Err(io::ErrorKind::NotFound.into()) };
        match renewed {
            Ok(overlays) => {
                slot.kept = Some(kept);
                Some(overlays)
            }
            Err(error) => {
                tracing::debug!(slot = slot.index, %error, "files are not used again");
                self.discard(Some(kept));
                None
            }
        }
    }

    fn renew(&self, kept: &mut Kept, id: SandboxId) -> io::Result<Vec<OwnedFd>> {
        self.rename_dir(kept.id, id)?;
        kept.rename(&self.dir(id), id, self.host_files(id)?)?;
        let templates: Vec<_> = kept.templates.iter().map(AsFd::as_fd).collect();
        let (answer, overlays) = self.ask(&Request::Clone, &templates)?;
        match answer.error {
            Some(error) => Err(io::Error::other(error)),
            None => Ok(overlays),
        }
    }

    /// Removes files that were kept.
    fn discard(&self, kept: Option<Kept>) {
        if let Some(Kept { id, .. }) = kept {
            // The overlays in it are released by now: they know their files, not their names.
            self.remove_dir(id);
        }
    }

    /// Gives up the files of an image that no sandbox uses.
    pub(crate) fn forget(&self, slot: &mut Slot, image_id: &str) {
        if slot.kept.as_ref().is_some_and(|kept| kept.image.id == image_id) {
            self.discard(slot.kept.take());
        }
    }

    /// Whether the files in `dir`, of a sandbox that is dead, stay with its slot. If not they are the caller's.
    pub(crate) fn keep(&self, slot: &mut Slot, dir: Option<&Path>) -> bool {
        slot.kept.take_if(|kept| !dir.is_some_and(|dir| self.dir(kept.id) == dir && kept.is_untouched(dir)));
        slot.kept.is_some()
    }

    fn host_files(&self, id: SandboxId) -> io::Result<Vec<(String, String)>> {
        Ok(vec![
            ("etc/hostname".to_owned(), format!("{}\n", id.short())),
            ("etc/hosts".to_owned(), hosts_file(id)),
            ("etc/resolv.conf".to_owned(), self.network(|network| Ok(network.resolv_conf()))?),
        ])
    }

    fn overlays(&self, slot: &mut Slot, id: SandboxId, image: &Arc<Image>) -> io::Result<Vec<OwnedFd>> {
        let roots = image
            .roots
            .iter()
            .map(|root| {
                let base = (root.mountpoint == "/").then_some(&self.base.layer);
                RootSpec {
                    mountpoint: root.mountpoint.clone(),
                    lowers: base.into_iter().chain(&root.lowers).map(|path| text(path)).collect(),
                }
            })
            .collect();
        let dir = self.dir(id);
        let files = self.host_files(id)?;
        let request =
            Request::Prepare(Prepare { slot: slot.index, dir: text(&dir), roots, files: files.clone() });
        let namespace: Vec<_> = slot.user_namespace.iter().map(AsFd::as_fd).collect();
        let (answer, mut fds) = self.ask(&request, &namespace)?;
        if let Some(error) = answer.error {
            let kind = if answer.full { io::ErrorKind::StorageFull } else { io::ErrorKind::Other };
            return Err(io::Error::new(kind, error));
        }
        if answer.new_namespace && !fds.is_empty() {
            slot.user_namespace = Some(fds.remove(0));
        }
        let roots = image.roots.len();
        if fds.len() != roots && fds.len() != 2 * roots {
            return Err(io::Error::other("the preparer sent another number of overlays than the image has"));
        }
        let templates = fds.split_off(roots);
        if self.keeps && !templates.is_empty() {
            // An overlay notes on directories of the upper layer where they come from, when it first meets them.
            for (path, _) in &files {
                let _ = rustix::fs::statat(&fds[0], path.as_str(), rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
            }
            slot.kept = Kept::new(&dir, id, Arc::clone(image), templates, files).ok();
        }
        Ok(fds)
    }

    /// Asks the preparer; starts a new one when it is gone, and asks that one once.
    fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> io::Result<(Prepared, Vec<OwnedFd>)> {
        let mut preparer = self.preparer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let helper = match preparer.as_mut() {
                Some(helper) => helper,
                None => preparer.insert(self.recipe.start(&self.hello, None)?.0),
            };
            let answer = helper.send(request, fds).and_then(|()| helper.receive());
            match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    *preparer = None;
                    if attempts == 2 {
                        return Err(error);
                    }
                    tracing::warn!(%error, "the preparer is gone and is replaced");
                    if let Request::Prepare(Prepare { dir, .. }) = request {
                        crate::tree::remove(Path::new(dir))?;
                    }
                }
            }
        }
    }

    /// Process id of the preparer, for tests and diagnostics.
    pub(crate) fn preparer_pid(&self) -> Option<u32> {
        self.preparer.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Helper::pid)
    }

    /// Ends the preparer.
    pub(crate) fn close(&self) {
        *self.preparer.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn listen(&self, index: u32) -> io::Result<UnixListener> {
        let path = self.socket(index);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        UnixListener::bind(path)
    }

    /// Undoes [`Maker::ready`] for a sandbox that had no order, keeping the slot.
    pub(crate) fn unready(&self, ready: Ready) -> Slot {
        let Ready { mut slot, id, standby, .. } = ready;
        slot.kept = None;
        if standby.as_ref().is_some_and(|standby| !standby.end()) {
            tracing::error!(%id, "a prepared sandbox does not die; killing its group");
            self.cgroups.kill(slot.index, &mut slot.cgroups);
        }
        self.remove_files(slot.index, id);
        slot
    }

    /// Destroys a slot in which processes may be that we know nothing of. Gives its number.
    pub(crate) fn destroy_ready(&self, ready: Ready) -> u32 {
        let Ready { mut slot, id, .. } = ready;
        slot.kept = None;
        let index = slot.index;
        // Groups first: their removal kills.
        self.destroy(slot);
        self.remove_files(index, id);
        index
    }

    fn remove_files(&self, index: u32, id: SandboxId) {
        let _ = std::fs::remove_file(self.socket(index));
        self.remove_dir(id);
    }

    fn remove_dir(&self, id: SandboxId) {
        if let Err(error) = crate::tree::remove(&self.dir(id)) {
            tracing::warn!(%id, %error, "a sandbox's directory cannot be removed");
        }
    }

    fn rename_dir(&self, from: SandboxId, to: SandboxId) -> io::Result<()> {
        let dir = self.dir(to);
        if dir.exists() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        std::fs::rename(self.dir(from), dir)
    }

    /// Gives a prepared sandbox another id than the one it was prepared with.
    pub(crate) fn rename(&self, ready: &mut Ready, id: SandboxId) -> io::Result<()> {
        if ready.id == id {
            return Ok(());
        }
        self.rename_dir(ready.id, id)?;
        ready.id = id;
        // Nobody has looked at the overlay yet, so what is changed below it is what it will show.
        let files = self.host_files(id)?;
        match &mut ready.slot.kept {
            Some(kept) => kept.rename(&self.dir(id), id, files),
            None => kept::write_over(&self.dir(id), &files),
        }
    }

    /// Directory of a sandbox.
    pub(crate) fn dir(&self, id: SandboxId) -> PathBuf {
        self.data_dir.join(SANDBOXES).join(id.to_string())
    }

    /// Socket of the daemon of a slot. Short whatever the data directory is called: the kernel takes 107 bytes.
    pub(crate) fn socket(&self, index: u32) -> PathBuf {
        self.run_dir.join(format!("{index}.sock"))
    }

    /// Host id of root inside.
    pub(crate) fn root_id(&self, slot: &Slot) -> u32 {
        if slot.user_namespace.is_some() { self.id_base + slot.index * IDS } else { 0 }
    }
}

fn hosts_file(id: SandboxId) -> String {
    format!("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{}\n", id.short())
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
