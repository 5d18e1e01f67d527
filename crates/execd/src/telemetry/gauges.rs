//! What the kernel counts, read at each export.

use crate::app::App;
use crate::metrics::Meter;
use crate::telemetry::Isolation;

/// Values of one moment.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Reading {
    pub(super) cpu_percent: f64,
    pub(super) memory_bytes: u64,
    pub(super) processes: Option<u64>,
    pub(super) tcp: Option<u64>,
    pub(super) udp: Option<u64>,
    /// Since the interfaces exist: received, sent.
    pub(super) network: Option<Traffic>,
    /// What of that the collector knows of.
    pub(super) known: Traffic,
    pub(super) isolation: Option<Isolation>,
}

/// Bytes through all interfaces but the loopback.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) received: u64,
    pub(super) sent: u64,
}

/// Remembers what differences are counted from.
#[derive(Debug)]
pub(super) struct Gauges {
    meter: Meter,
    known: Option<Traffic>,
}

impl Gauges {
    pub(super) fn new(app: &App) -> Self {
        let meter = Meter::default();
        // The first difference begins here.
        let _ = meter.since_last(&app.limits);
        Self { meter, known: None }
    }

    pub(super) fn read(&mut self, app: &App, isolation: Option<Isolation>) -> Reading {
        let (cpu_percent, memory_bytes) = self.meter.since_last(&app.limits);
        let sockets = [read("/proc/net/sockstat"), read("/proc/net/sockstat6")];
        let in_use = |name: &str| {
            let counts = sockets.iter().flatten().filter_map(|text| in_use(text, name));
            counts.reduce(|all, more| all + more)
        };
        let network = read("/proc/net/dev").map(|text| traffic(&text));
        Reading {
            cpu_percent,
            memory_bytes,
            processes: processes(),
            tcp: in_use("TCP"),
            udp: in_use("UDP"),
            network,
            known: self.known.unwrap_or_default(),
            isolation,
        }
    }

    /// The collector has this reading.
    pub(super) fn sent(&mut self, reading: &Reading) {
        self.known = reading.network;
    }
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Processes of the sandbox: all that can be seen from inside.
fn processes() -> Option<u64> {
    let entries = std::fs::read_dir("/proc").ok()?.flatten();
    let is_number = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    Some(entries.filter(|entry| is_number(&entry.file_name())).count() as u64)
}

/// `TCP: inuse 3 …` and `TCP6: inuse 1`.
fn in_use(text: &str, protocol: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(protocol)?;
        rest.strip_prefix("6: inuse ")
            .or_else(|| rest.strip_prefix(": inuse "))?
            .split(' ')
            .next()?
            .parse()
            .ok()
    })
}

/// Sums over the interfaces of `/proc/net/dev`.
fn traffic(text: &str) -> Traffic {
    let mut all = Traffic::default();
    for line in text.lines() {
        let Some((name, counts)) = line.split_once(':') else { continue };
        if name.trim() == "lo" {
            continue;
        }
        let count = |at: usize| counts.split_ascii_whitespace().nth(at)?.parse::<u64>().ok();
        all.received = all.received.saturating_add(count(0).unwrap_or(0));
        all.sent = all.sent.saturating_add(count(8).unwrap_or(0));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_kernel() {
        let text = "sockets: used 9\nTCP: inuse 3 orphan 0 tw 1\nUDP: inuse 2 mem 0\nUDPLITE: inuse 7\n";
        assert_eq!((in_use(text, "TCP"), in_use(text, "UDP"), in_use(text, "RAW")), (Some(3), Some(2), None));
        assert_eq!(in_use("TCP6: inuse 4\n", "TCP"), Some(4));
        let text = "Inter-| Receive | Transmit\n face |bytes packets\n    lo: 5 1 0 0 0 0 0 0 5 1\n\
                    eth0: 100 1 0 0 0 0 0 0 7 1 0\n  x:1 1 0 0 0 0 0 0 2 1\n broken: a\n";
        assert_eq!(traffic(text), Traffic { received: 101, sent: 9 });
        assert!(processes().unwrap() > 1);
    }
}
