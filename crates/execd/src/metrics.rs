//! CPU and memory of the sandbox's work: `/metrics` and `/metrics/watch`.
//!
//! The figures come from the cgroup whose statistics files the engine hands over, else from the cgroup file system
//! of a container (both versions), else from `/proc`. Page cache is not counted as used: the kernel gives it up when
//! the work needs the memory. Nothing is measured while nobody asks: CPU use is the difference of two
//! readings, the second one at the time of the answer.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderName, HeaderValue, header};
use osb_protocol::execd::Metrics;
use rustix::fs::{CWD, Mode, OFlags};

use crate::app::{App, Limits};
use crate::http::json;

/// A difference over less than this says little.
const SHORTEST: Duration = Duration::from_millis(50);
/// A difference over more than this is history.
const LONGEST: Duration = Duration::from_secs(5);
/// Between two lines of a watch.
const TICK: Duration = Duration::from_secs(1);

const MIB: f64 = (1 << 20) as f64;

/// The module's routes.
pub fn router() -> axum::Router<App> {
    let shared = Arc::new(Meter::default());
    axum::Router::new()
        .route(
            "/metrics",
            get(move |State(app): State<App>| async move { json(&shared.measure(&app).await) }),
        )
        .route("/metrics/watch", get(watch))
}

/// One line each second until the client leaves.
async fn watch(State(app): State<App>) -> Response {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // Of its own, so that other callers do not shorten its differences.
    let lines = stream::unfold((app, Meter::default(), ticks), |(app, meter, mut ticks)| async {
        ticks.tick().await;
        let metrics = meter.measure(&app).await;
        // Five numbers: writing them cannot fail.
        let mut line = serde_json::to_vec(&metrics).unwrap_or_default();
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), (app, meter, ticks)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(lines)).into_response()
}

/// CPU time used up to a moment.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    /// Nanoseconds of one core.
    used: u64,
}

impl Sample {
    fn now(limits: &Limits) -> Self {
        Self { at: Instant::now(), used: cpu_used(limits, CGROUP) }
    }
}

/// Remembers the last reading.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    last: Mutex<Option<Sample>>,
}

impl Meter {
    /// CPU use in percent since the last call (0 at the first), and bytes of memory in use.
    pub(crate) fn since_last(&self, limits: &Limits) -> (f64, u64) {
        let now = Sample::now(limits);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).replace(now);
        let used = last.map_or(0.0, |last| percent(last, now, cores(limits, CGROUP)));
        (used, memory_used(limits, CGROUP))
    }

    /// Measures now. Waits a moment when there is no recent reading to compare with.
    async fn measure(&self, app: &App) -> Metrics {
        let limits = &app.limits;
        let now = Sample::now(limits);
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let age = last.map(|last| now.at.duration_since(last.at));
        let (from, to) = match (last, age) {
            (Some(last), Some(age)) if (SHORTEST..=LONGEST).contains(&age) => (last, now),
            _ => {
                tokio::time::sleep(SHORTEST).await;
                (now, Sample::now(limits))
            }
        };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(to);
        let cores = cores(limits, CGROUP);
        let total = memory_total(limits, CGROUP);
        Metrics {
            cpu_count: whole(cores),
            cpu_used_pct: percent(from, to, cores),
            mem_total_mib: total as f64 / MIB,
            mem_used_mib: memory_used(limits, CGROUP).min(total) as f64 / MIB,
            timestamp: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX)),
        }
    }
}

/// Rounded up: half a core still is one to a client that counts in whole ones.
fn whole(cores: f64) -> u64 {
    // Positive and small.
    (cores.ceil() as u64).max(1)
}

fn percent(from: Sample, to: Sample, cores: f64) -> f64 {
    let elapsed = to.at.duration_since(from.at).as_nanos() as f64;
    if elapsed <= 0.0 || cores <= 0.0 {
        return 0.0;
    }
    let used = to.used.saturating_sub(from.used) as f64;
    // A quota is kept per period, so a short interval may hold more than its share.
    (used / elapsed / cores * 100.0).clamp(0.0, 100.0)
}

/// Where a container finds its own cgroup.
const CGROUP: &str = "/sys/fs/cgroup";

/// A file of the container's cgroup.
fn cgroup(root: &str, name: &str) -> Option<String> {
    read(&format!("{root}/{name}"))
}

/// Cores the work may use.
fn cores(limits: &Limits, root: &str) -> f64 {
    let online = std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    let first = || {
        let number = |name| cgroup(root, name)?.trim().parse::<f64>().ok();
        let (quota, period) = (number("cpu/cpu.cfs_quota_us")?, number("cpu/cpu.cfs_period_us")?);
        (quota > 0.0 && period > 0.0).then(|| quota / period)
    };
    let quota = match limits.cpu_millis {
        Some(millis) => Some(millis as f64 / 1000.0),
        None => cgroup(root, "cpu.max").as_deref().and_then(parse_quota).or_else(first),
    };
    quota.filter(|quota| *quota > 0.0).map_or(online, |quota| quota.min(online))
}

/// `QUOTA PERIOD` or `max PERIOD`.
fn parse_quota(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then(|| quota / period)
}

/// CPU time of the work in nanoseconds.
fn cpu_used(limits: &Limits, root: &str) -> u64 {
    let usage = &limits.usage;
    let number = |text: String| text.trim().parse().ok();
    let cpu_stat = |text: String| keyed(&text, "usage_usec").map(|micros| micros.saturating_mul(1000));
    usage
        .cpuacct_usage
        .and_then(read_fd)
        .and_then(number)
        .or_else(|| cpu_stat(read_fd(usage.cpu_stat?)?))
        // The root of a host's cgroups has this file too and it counts the whole host: as right as /proc.
        .or_else(|| cpu_stat(cgroup(root, "cpu.stat")?))
        .or_else(|| number(cgroup(root, "cpuacct/cpuacct.usage")?))
        .or_else(|| read("/proc/stat").as_deref().and_then(parse_proc_stat))
        .unwrap_or(0)
}

/// Busy time of all cores, from the first line of `/proc/stat`.
fn parse_proc_stat(text: &str) -> Option<u64> {
    let fields: Vec<u64> = text
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_ascii_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; guest time is part of user time.
    let busy: u64 = fields
        .iter()
        .take(8)
        .enumerate()
        .filter(|(at, _)| !matches!(at, 3 | 4 | 7))
        .map(|(_, ticks)| ticks)
        .sum();
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Some(busy.saturating_mul(1_000_000_000 / per_second))
}

fn memory_total(limits: &Limits, root: &str) -> u64 {
    let machine = read("/proc/meminfo").as_deref().and_then(|text| meminfo(text, "MemTotal:"));
    let machine = machine.or_else(|| Some(without_proc().0));
    let number = |name| cgroup(root, name)?.trim().parse().ok();
    let limit = limits
        .memory_bytes
        .or_else(|| number("memory.max"))
        // No limit is a number beyond all machines here.
        .or_else(|| number("memory/memory.limit_in_bytes"));
    match (limit, machine) {
        (Some(limit), Some(machine)) => limit.min(machine),
        (limit, machine) => limit.or(machine).unwrap_or(0),
    }
}

fn memory_used(limits: &Limits, root: &str) -> u64 {
    let usage = &limits.usage;
    let used = |current: String, stat: Option<String>| {
        let current: u64 = current.trim().parse().ok()?;
        Some(current.saturating_sub(droppable(&stat.unwrap_or_default())))
    };
    let handed_over = || used(read_fd(usage.memory_current?)?, usage.memory_stat.and_then(read_fd));
    let second = || used(cgroup(root, "memory.current")?, cgroup(root, "memory.stat"));
    let first = || used(cgroup(root, "memory/memory.usage_in_bytes")?, cgroup(root, "memory/memory.stat"));
    let machine = || {
        let text = read("/proc/meminfo")?;
        Some(meminfo(&text, "MemTotal:")?.saturating_sub(meminfo(&text, "MemAvailable:")?))
    };
    handed_over().or_else(second).or_else(first).or_else(machine).unwrap_or_else(|| without_proc().1)
}

/// Total and used memory of the machine, less exactly, where /proc is not mounted.
fn without_proc() -> (u64, u64) {
    let told = rustix::system::sysinfo();
    let bytes = |units: u64| units.saturating_mul(told.mem_unit.into());
    let total = bytes(told.totalram);
    (total, total.saturating_sub(bytes(told.freeram) + bytes(told.bufferram)))
}

/// Page cache of files, which can be read again. What has been read twice is `active`, and no less droppable.
fn droppable(stat: &str) -> u64 {
    let either = |first, second| keyed(stat, first).or_else(|| keyed(stat, second)).unwrap_or(0);
    either("total_inactive_file", "inactive_file") + either("total_active_file", "active_file")
}

/// The number after `key` on its line.
fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Bytes from a line such as `MemTotal:  1234 kB`.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The start of a file of the kernel; these answer from memory, without waiting for a disk.
fn read(path: &str) -> Option<String> {
    let fd = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = vec![0; 16 << 10];
    let length = rustix::io::pread(&fd, &mut text, 0).ok()?;
    text.truncate(length);
    String::from_utf8(text).ok()
}

/// The text behind an inherited descriptor.
fn read_fd(fd: i32) -> Option<String> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the engine opened the descriptor for this process and nobody closes it while the daemon runs
    // (`Limits::usage`); should the number be wrong, the call fails with EBADF and nothing else happens.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut text = vec![0; 16 << 10];
    let length = rustix::io::pread(fd, &mut text, 0).ok()?;
    text.truncate(length);
    String::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};
    use std::os::fd::AsRawFd as _;

    use osb_protocol::boot::UsageFds;

    use super::*;

    #[test]
    fn reads_both_cgroup_versions() {
        let file = |text: &str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file
        };
        let current = file("104857600\n");
        let v1_stat =
            file("inactive_file 1\nactive_file 2\ntotal_inactive_file 4194304\ntotal_active_file 1048576\n");
        let v2_stat = file("anon 5\ninactive_file 1048576\nactive_file 2097152\n");
        let mut cpuacct = file("5000000\n");
        let cpu_stat = file("usage_usec 1234\nuser_usec 1000\n");
        let mut limits = Limits {
            memory_bytes: Some(512 << 20),
            cpu_millis: Some(1500),
            usage: UsageFds {
                cpuacct_usage: Some(cpuacct.as_raw_fd()),
                memory_current: Some(current.as_raw_fd()),
                memory_stat: Some(v1_stat.as_raw_fd()),
                ..UsageFds::default()
            },
            ..Limits::default()
        };
        assert_eq!(cpu_used(&limits, CGROUP), 5_000_000);
        assert_eq!(memory_used(&limits, CGROUP), 95 << 20);
        assert_eq!(memory_total(&limits, CGROUP), 512 << 20);
        cpuacct.rewind().unwrap();
        cpuacct.write_all(b"6000000\n").unwrap();
        assert_eq!(cpu_used(&limits, CGROUP), 6_000_000, "read again from the start");
        limits.usage.cpuacct_usage = None;
        limits.usage.cpu_stat = Some(cpu_stat.as_raw_fd());
        limits.usage.memory_stat = Some(v2_stat.as_raw_fd());
        assert_eq!(cpu_used(&limits, CGROUP), 1_234_000);
        assert_eq!(memory_used(&limits, CGROUP), 97 << 20);
    }

    /// A container's view of its cgroup, with these files.
    fn container(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn a_container_of_either_version_is_measured_with_and_without_limits() {
        let machine = memory_total(&Limits::default(), "/no/such");
        let online = cores(&Limits::default(), "/no/such");
        let second = |cpu: &str, memory: &str| {
            container(&[
                ("cpu.max", cpu),
                ("cpu.stat", "usage_usec 7\n"),
                ("memory.max", memory),
                ("memory.current", "5000000\n"),
                ("memory.stat", "inactive_file 1000000\nactive_file 500000\n"),
            ])
        };
        let first = |quota: &str, memory: &str| {
            container(&[
                ("cpu/cpu.cfs_quota_us", quota),
                ("cpu/cpu.cfs_period_us", "100000\n"),
                ("cpuacct/cpuacct.usage", "7000\n"),
                ("memory/memory.limit_in_bytes", memory),
                ("memory/memory.usage_in_bytes", "5000000\n"),
                ("memory/memory.stat", "total_inactive_file 1000000\ntotal_active_file 500000\n"),
            ])
        };
        for (root, cpus, total) in [
            (second("50000 100000\n", "9000000\n"), 0.5, 9_000_000),
            (second("max 100000\n", "max\n"), online, machine),
            (first("50000\n", "9000000\n"), 0.5, 9_000_000),
            (first("-1\n", "9223372036854771712\n"), online, machine),
        ] {
            let (root, none) = (root.path().to_str().unwrap(), Limits::default());
            assert!((cores(&none, root) - cpus).abs() < 1e-9);
            assert_eq!(memory_total(&none, root), total);
            assert_eq!(memory_used(&none, root), 3_500_000);
            assert_eq!(cpu_used(&none, root), 7000);
        }
    }

    #[test]
    fn counts_and_percentages() {
        assert_eq!([whole(0.5), whole(1.0), whole(1.5), whole(0.0)], [1, 1, 2, 1]);
        let from = Sample { at: Instant::now(), used: 1000 };
        let to = |used| Sample { at: from.at + Duration::from_secs(1), used };
        assert!((percent(from, to(1000 + 500_000_000), 1.0) - 50.0).abs() < 1e-9);
        assert!((percent(from, to(1000 + 500_000_000), 2.0) - 25.0).abs() < 1e-9);
        assert_eq!(percent(from, to(u64::MAX), 1.0), 100.0);
        assert_eq!(percent(from, to(0), 1.0), 0.0);
        assert_eq!(percent(from, from, 1.0), 0.0);
    }

    #[test]
    fn texts_of_the_kernel() {
        assert_eq!(parse_quota("150000 100000\n"), Some(1.5));
        assert_eq!(parse_quota("max 100000\n"), None);
        assert_eq!(meminfo("MemTotal:  2 kB\nMemAvailable: 1 kB\n", "MemAvailable:"), Some(1024));
        let ticks = rustix::param::clock_ticks_per_second();
        assert_eq!(
            parse_proc_stat("cpu  10 1 4 1000 50 2 3 9 0 0\ncpu0 1\n"),
            Some(20 * 1_000_000_000 / ticks)
        );
        assert!(cpu_used(&Limits::default(), CGROUP) > 0);
        assert!(memory_used(&Limits::default(), CGROUP) > 0);
        assert!(memory_total(&Limits::default(), CGROUP) > memory_used(&Limits::default(), CGROUP));
    }
}
