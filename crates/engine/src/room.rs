//! Whether the machine has room for another sandbox.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long a look at the machine stays good. Short against the time in which a sandbox can fill its memory.
const FRESH: Duration = Duration::from_millis(50);
/// The same when there is much more than is kept free.
const FRESH_WHEN_PLENTY: Duration = Duration::from_millis(500);
/// Memory above what is kept free that counts as much: more than can be filled in that time.
const PLENTY: u64 = 4 << 30;
/// When a refused client should ask again.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(2);
/// Threads of the host that are left to it.
const THREAD_RESERVE: u64 = 512;
/// Inodes of the disk that are left.
const INODE_FLOOR: u64 = 10_000;

/// Watches memory, disk and threads.
#[derive(Debug)]
pub(crate) struct Room {
    data_dir: PathBuf,
    memory_floor: u64,
    disk_floor: u64,
    last: Mutex<Option<Look>>,
}

/// What was seen, and until when that is good.
#[derive(Debug)]
struct Look {
    good_until: Instant,
    lacking: Option<String>,
}

impl Room {
    pub(crate) fn new(data_dir: PathBuf, memory_floor: u64, disk_floor: u64) -> Self {
        Self { data_dir, memory_floor, disk_floor, last: Mutex::new(None) }
    }

    /// What is used up, if anything.
    pub(crate) fn lacking(&self) -> Option<String> {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        if let Some(look) = &*last
            && now < look.good_until
        {
            return look.lacking.clone();
        }
        let available = memory_available();
        let plenty = available.is_some_and(|available| available >= self.memory_floor.saturating_add(PLENTY));
        let lacking = self.look(available);
        let good_for = if plenty && lacking.is_none() { FRESH_WHEN_PLENTY } else { FRESH };
        *last = Some(Look { good_until: now + good_for, lacking: lacking.clone() });
        lacking
    }

    fn look(&self, available: Option<u64>) -> Option<String> {
        if let Some(available) = available
            && available < self.memory_floor
        {
            return Some(format!(
                "{} MiB of memory are available and {} MiB are kept free",
                available >> 20,
                self.memory_floor >> 20
            ));
        }
        if let Ok(disk) = rustix::fs::statvfs(&self.data_dir) {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            if free < self.disk_floor {
                return Some(format!(
                    "{} MiB of the data directory's disk are free and {} MiB are kept free",
                    free >> 20,
                    self.disk_floor >> 20
                ));
            }
            // File systems without a fixed number report none.
            if disk.f_files > 0 && disk.f_favail < INODE_FLOOR {
                return Some("the data directory's disk is out of inodes".to_owned());
            }
        }
        let (threads, most) = threads()?;
        (threads.saturating_add(THREAD_RESERVE) > most)
            .then(|| format!("{threads} of {most} threads of the machine are in use"))
    }
}

fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Threads in the machine, and the most there can be.
fn threads() -> Option<(u64, u64)> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    let total = load.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()?;
    let most = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    Some((total, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_are_floors() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Room::new(dir.path().into(), 1, 1).lacking(), None);
        let memory = Room::new(dir.path().into(), u64::MAX, 1).lacking().unwrap();
        assert!(memory.contains("of memory"), "{memory}");
        let disk = Room::new(dir.path().into(), 1, u64::MAX).lacking().unwrap();
        assert!(disk.contains("disk"), "{disk}");
        let (threads, most) = threads().unwrap();
        assert!(threads > 0 && most > threads);
    }
}
