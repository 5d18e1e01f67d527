use super::error::{Error, Result};
use std::os::fd::AsFd;
use std::path::Path;

/// Bounds on what an image may cost, so that a hostile or broken one cannot fill disk or memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Entries in one layer.
    pub entries: u64,
    /// Path components of an entry.
    pub depth: usize,
    /// Length of an entry's path.
    pub path_bytes: usize,
    /// Unpacked bytes of one layer.
    pub layer_bytes: u64,
    /// Layers of one image.
    pub layers: usize,
    /// Images in one archive.
    pub images: usize,
    /// Bytes of one JSON document, and of the names and attributes of a single entry.
    pub metadata_bytes: u64,
    /// Bytes kept in memory about one layer's directories, or about the entries of an archive.
    pub memory_bytes: u64,
    /// Unpacked bytes per compressed byte. Counts only beyond [`Limits::ratio_from_bytes`].
    pub ratio: u64,
    /// Unpacked size from which the ratio is looked at: small layers of zeros are ordinary.
    pub ratio_from_bytes: u64,
    /// Bytes left free on the file system of the store, for the sandboxes that run there.
    pub min_free_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 4_000_000,
            depth: 256,
            path_bytes: 4_095,
            layer_bytes: 64 << 30,
            layers: 512,
            images: 256,
            metadata_bytes: 8 << 20,
            memory_bytes: 256 << 20,
            ratio: 250,
            ratio_from_bytes: 1 << 30,
            min_free_bytes: 256 << 20,
        }
    }
}

impl Limits {
    pub(super) fn check(what: &str, setting: &'static str, value: u64, limit: u64) -> Result<()> {
        if value > limit {
            return Err(Error::LimitExceeded { what: what.into(), setting, limit });
        }
        Ok(())
    }
}

/// Asked for room before disk is used; an error says that there is none.
pub(super) type Charge<'a> = &'a (dyn Fn(u64) -> Result<()> + Sync);

/// Watches the free space of a file system, and what the store may take of it, while something is written.
pub(super) struct SpaceGuard<'a> {
    min_free_bytes: u64,
    charge: Charge<'a>,
    bytes: u64,
    entries: u64,
    uncharged: u64,
    total: u64,
}

impl<'a> SpaceGuard<'a> {
    /// Bytes and entries between two looks at the file system.
    const STEP_BYTES: u64 = 32 << 20;
    const STEP_ENTRIES: u64 = 2_048;
    /// What file systems give away at least.
    const BLOCK: u64 = 4_096;

    pub(super) fn new(limits: &Limits, charge: Charge<'a>) -> Self {
        // The first write looks at once.
        let bytes = Self::STEP_BYTES;
        Self { min_free_bytes: limits.min_free_bytes, charge, bytes, entries: 0, uncharged: 0, total: 0 }
    }

    /// Counts one new entry of `bytes` bytes below `dir`.
    pub(super) fn spend(&mut self, dir: impl AsFd, path: &Path, bytes: u64) -> Result<()> {
        self.bytes = self.bytes.saturating_add(bytes);
        self.uncharged =
            self.uncharged.saturating_add(bytes.div_ceil(Self::BLOCK).saturating_mul(Self::BLOCK));
        self.entries += 1;
        if self.bytes < Self::STEP_BYTES && self.entries < Self::STEP_ENTRIES {
            return Ok(());
        }
        (self.bytes, self.entries) = (0, 0);
        self.settle()?;
        let stat = rustix::fs::fstatvfs(dir).map_err(|errno| Error::io("examine", path, errno))?;
        if stat.f_bavail.saturating_mul(stat.f_frsize) < self.min_free_bytes {
            return Err(Error::NoSpace { path: path.into() });
        }
        Ok(())
    }

    /// Charges what was not charged yet; answers all bytes of disk so far.
    pub(super) fn settle(&mut self) -> Result<u64> {
        let bytes = std::mem::take(&mut self.uncharged);
        if bytes > 0 {
            (self.charge)(bytes)?;
        }
        self.total = self.total.saturating_add(bytes);
        Ok(self.total)
    }
}
