//! Percentiles and the line that is printed.

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinHandle;

/// One printed figure.
#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) figure: String,
    pub(crate) unit: &'static str,
    pub(crate) n: usize,
    pub(crate) p50: Option<f64>,
    pub(crate) p90: Option<f64>,
    pub(crate) p99: Option<f64>,
    pub(crate) failures: usize,
    pub(crate) peer: Option<String>,
    pub(crate) peer_p50: Option<f64>,
    pub(crate) ratio: Option<f64>,
    pub(crate) load1: f64,
}

/// Samples of one figure; a failure counts as infinitely slow.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    values: Vec<f64>,
    failures: usize,
}

impl Samples {
    pub(crate) fn push(&mut self, value: f64) {
        self.values.push(value);
    }

    pub(crate) fn push_ms(&mut self, took: Duration) {
        self.values.push(took.as_secs_f64() * 1e3);
    }

    pub(crate) fn push_or_fail<E>(&mut self, took: Result<Duration, E>) {
        match took {
            Ok(took) => self.push_ms(took),
            Err(_) => self.fail(),
        }
    }

    pub(crate) fn fail(&mut self) {
        self.failures += 1;
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len() + self.failures
    }

    pub(crate) fn percentile(&self, p: f64) -> Option<f64> {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let total = sorted.len() + self.failures;
        if total == 0 {
            return None;
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let index = ((total as f64 * p).ceil() as usize).clamp(1, total) - 1;
        sorted.get(index).copied()
    }

    pub(crate) fn p50(&self) -> Option<f64> {
        self.percentile(0.5)
    }

    /// Prints the figure, with the peer's median where one was measured.
    pub(crate) fn print(&self, figure: &str, unit: &'static str, peer: Option<(&str, Option<f64>)>) {
        let peer_p50 = peer.and_then(|(_, p50)| p50);
        let round = |value: Option<f64>| value.map(|value| (value * 1e4).round() / 1e4);
        let line = Figure {
            figure: figure.to_owned(),
            unit,
            n: self.len(),
            p50: round(self.p50()),
            p90: round(self.percentile(0.9)),
            p99: round(self.percentile(0.99)),
            failures: self.failures,
            peer: peer.map(|(name, _)| name.to_owned()),
            peer_p50: round(peer_p50),
            ratio: round(self.p50().zip(peer_p50).map(|(ours, theirs)| ours / theirs)),
            load1: load1(),
        };
        if let Ok(text) = serde_json::to_string(&line) {
            println!("{text}");
        }
    }
}

/// How many rounds a worker has done, and how many of them failed.
pub(crate) type Rounds = (u32, u32);

/// Waits for workers that began together, and prints what they have done per second.
pub(crate) async fn print_rate(
    figure: &str,
    began: Instant,
    workers: Vec<JoinHandle<Rounds>>,
) -> anyhow::Result<()> {
    let (mut done, mut failed) = (0, 0);
    for worker in workers {
        let (d, f) = worker.await?;
        done += d;
        failed += f;
    }
    let mut samples = Samples::default();
    samples.push(f64::from(done) / began.elapsed().as_secs_f64());
    for _ in 0..failed {
        samples.fail();
    }
    samples.print(figure, "1/s", None);
    Ok(())
}

/// Prints a figure of a single value.
pub(crate) fn print_one(figure: &str, unit: &'static str, value: f64, peer: Option<(&str, Option<f64>)>) {
    let mut samples = Samples::default();
    samples.push(value);
    samples.print(figure, unit, peer);
}

fn load1() -> f64 {
    std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split_whitespace().next().and_then(|word| word.parse().ok()))
        .unwrap_or(f64::NAN)
}

/// `MemAvailable` in KiB.
pub(crate) fn mem_available_kib() -> f64 {
    field_kib("/proc/meminfo", "MemAvailable:")
}

/// Resident memory of a process in MiB, now (`VmRSS`) or at its peak (`VmHWM`).
pub(crate) fn process_mib(pid: u32, field: &str) -> f64 {
    field_kib(&format!("/proc/{pid}/status"), field) / 1024.0
}

/// Memory of a process that it shares with nobody, in MiB.
pub(crate) fn private_mib(pid: u32) -> f64 {
    let path = format!("/proc/{pid}/smaps_rollup");
    (field_kib(&path, "Private_Clean:") + field_kib(&path, "Private_Dirty:")) / 1024.0
}

fn field_kib(path: &str, field: &str) -> f64 {
    std::fs::read_to_string(path)
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with(field))?;
            line.split_whitespace().nth(1)?.parse().ok()
        })
        .unwrap_or(f64::NAN)
}
