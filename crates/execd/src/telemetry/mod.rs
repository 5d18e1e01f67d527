//! Metrics by OTLP/HTTP, off unless a collector is named.
//!
//! Counted here and not by the OpenTelemetry SDK: that would add a fifth to the daemon's size and a thread to each
//! sandbox, and would lose the differences of an export that fails. The messages are the official ones.
//! A collector that hangs, refuses or floods costs one connection at a time and a bounded memory.

mod encode;
mod gauges;
mod points;
mod send;
mod settings;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::binding::Binding;
use points::{Batch, Points};
pub use settings::{Settings, Temporality};

/// Batches of former bindings that wait to be sent; older ones are lost.
const MOST_WAITING: usize = 4;
/// The last export, when the daemon stops, takes no longer.
const FAREWELL: Duration = Duration::from_secs(2);

/// What is measured by its duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timed {
    /// A request, to the end of its answer.
    Request,
    /// A command or a run in a session.
    Execution,
    /// An operation on files.
    Files,
    /// A run in an isolated session.
    Isolation,
}

/// Numbers of isolated sessions; asked for at each export.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Isolation {
    /// Isolated sessions that exist.
    pub sessions: u64,
    /// Bytes in their upper layers.
    pub upper_bytes: u64,
}

/// What the variables ask for. A collector that cannot be used is told in the log and is no reason not to serve.
#[must_use]
pub fn of_variables(var: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<Box<Telemetry>> {
    match settings::read(var, host_info) {
        Ok(settings) => settings.map(|settings| Box::new(Telemetry::new(settings))),
        Err(error) => {
            tracing::error!(error, "metrics are off");
            None
        }
    }
}

/// Some platforms leave the host's address here.
fn host_info() -> Option<String> {
    use std::io::Read as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).ok()?;
    let file = std::fs::File::options().read(true).custom_flags(nonblock).open("/etc/hostinfo").ok()?;
    let mut text = String::new();
    file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    file.take(4096).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Counts what happens for the next export.
pub struct Telemetry {
    settings: Settings,
    started: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    current: Option<Batch>,
    /// Of former bindings, oldest first.
    waiting: Vec<Batch>,
}

impl fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Telemetry {
    /// Counts from now on.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { settings, started: now(), state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records how long something took.
    pub fn record(
        &self,
        binding: &Arc<Binding>,
        what: Timed,
        attributes: Vec<(&'static str, String)>,
        took: Duration,
    ) {
        self.lock().points(binding, self.started).record(what, attributes, took.as_secs_f64() * 1000.0);
    }

    /// Exports at intervals until `stop`, and once more then.
    pub async fn run(&self, app: &App, stop: CancellationToken) {
        let mut exporter = send::Exporter::new(&self.settings);
        let mut gauges = gauges::Gauges::new(app);
        loop {
            tokio::select! {
                () = stop.cancelled() => {
                    let _ = tokio::time::timeout(FAREWELL, self.export(app, &mut exporter, &mut gauges)).await;
                    return;
                }
                () = tokio::time::sleep(self.settings.interval) => {
                    self.export(app, &mut exporter, &mut gauges).await;
                }
            }
        }
    }

    async fn export(&self, app: &App, exporter: &mut send::Exporter, gauges: &mut gauges::Gauges) {
        let binding = app.binding.get();
        let temporality = self.settings.temporality;
        let (former, mut batch) = self.lock().take(&binding, self.started, temporality);
        for batch in former {
            // What cannot be sent now stays; its gauges are of the past.
            let message = encode::request(&self.settings, &batch, None, temporality);
            if exporter.send(message).await == send::Outcome::Later {
                self.lock().keep(batch);
            }
        }
        let shared = app.clone();
        let isolation = tokio::task::spawn_blocking(move || shared.isolated.numbers()).await.ok();
        let reading = gauges.read(app, isolation);
        batch.until = now();
        let message = encode::request(&self.settings, &batch, Some(&reading), temporality);
        match exporter.send(message).await {
            send::Outcome::Later => self.lock().put_back(batch, temporality),
            send::Outcome::Done => gauges.sent(&reading),
            send::Outcome::Refused => {}
        }
    }
}

impl State {
    /// The points of this binding; those of another are put aside.
    fn points(&mut self, binding: &Arc<Binding>, started: u64) -> &mut Points {
        if self.current.as_ref().is_some_and(|batch| !Arc::ptr_eq(&batch.binding, binding))
            && let Some(former) = self.current.take()
        {
            let until = now();
            self.keep(Batch { until, ..former });
        }
        let since = if self.waiting.is_empty() { started } else { now() };
        &mut self.current.get_or_insert_with(|| Batch::new(Arc::clone(binding), since)).points
    }

    fn keep(&mut self, batch: Batch) {
        if !batch.points.is_empty() {
            self.waiting.push(batch);
        }
        let surplus = self.waiting.len().saturating_sub(MOST_WAITING);
        self.waiting.drain(..surplus);
    }

    /// What is to be sent: all of former bindings, and of this one what its temporality asks for.
    fn take(
        &mut self,
        binding: &Arc<Binding>,
        started: u64,
        temporality: Temporality,
    ) -> (Vec<Batch>, Batch) {
        let _ = self.points(binding, started);
        let former = std::mem::take(&mut self.waiting);
        let batch = match (&mut self.current, temporality.histograms_are_delta()) {
            (Some(current), true) => {
                let next = Batch::new(Arc::clone(binding), now());
                std::mem::replace(current, next)
            }
            (Some(current), false) => current.clone(),
            (None, _) => Batch::new(Arc::clone(binding), started),
        };
        (former, batch)
    }

    /// An export has failed: its differences go with those that have come meanwhile.
    fn put_back(&mut self, batch: Batch, temporality: Temporality) {
        if !temporality.histograms_are_delta() {
            return;
        }
        match &mut self.current {
            Some(current) if Arc::ptr_eq(&current.binding, &batch.binding) => {
                current.since = batch.since;
                current.points.merge(batch.points);
            }
            _ => self.keep(batch),
        }
    }
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The words of an attribute `result`.
#[must_use]
pub fn result(success: bool) -> (&'static str, String) {
    ("result", if success { "success" } else { "failure" }.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn telemetry(temporality: Temporality) -> Telemetry {
        Telemetry::new(Settings { temporality, ..Settings::to("http://127.0.0.1:1") })
    }

    fn one(telemetry: &Telemetry, binding: &Arc<Binding>) {
        telemetry.record(binding, Timed::Files, vec![result(true)], Duration::from_millis(7));
    }

    fn counts(batch: &Batch) -> Vec<u64> {
        batch.points.histograms().map(|(_, _, histogram)| histogram.count).collect()
    }

    #[test]
    fn differences_that_could_not_be_sent_are_sent_later() {
        let telemetry = telemetry(Temporality::Delta);
        let binding = Arc::new(Binding::default());
        one(&telemetry, &binding);
        let (former, batch) = telemetry.lock().take(&binding, 1, Temporality::Delta);
        assert!(former.is_empty());
        assert_eq!((counts(&batch), batch.since), (vec![1], telemetry.started));
        one(&telemetry, &binding);
        telemetry.lock().put_back(batch, Temporality::Delta);
        let (_, batch) = telemetry.lock().take(&binding, 1, Temporality::Delta);
        assert_eq!((counts(&batch), batch.since), (vec![2], telemetry.started));
        let (_, batch) = telemetry.lock().take(&binding, 1, Temporality::Delta);
        assert!(counts(&batch).is_empty() && batch.since > telemetry.started);
    }

    #[test]
    fn sums_since_the_start_stay() {
        let telemetry = telemetry(Temporality::Cumulative);
        let binding = Arc::new(Binding::default());
        for count in 1..3 {
            one(&telemetry, &binding);
            let (_, batch) = telemetry.lock().take(&binding, 1, Temporality::Cumulative);
            assert_eq!((counts(&batch), batch.since), (vec![count], telemetry.started));
            telemetry.lock().put_back(batch, Temporality::Cumulative);
        }
    }

    #[test]
    fn what_happened_under_a_former_binding_carries_its_attributes() {
        let telemetry = telemetry(Temporality::Delta);
        let bindings: Vec<_> = (0..9)
            .map(|generation| Arc::new(Binding { generation: Some(generation), ..Binding::default() }))
            .collect();
        for binding in &bindings {
            one(&telemetry, binding);
        }
        let (former, batch) = telemetry.lock().take(&bindings[8], 1, Temporality::Delta);
        let generations: Vec<_> = former.iter().map(|batch| batch.binding.generation).collect();
        assert_eq!(generations, [Some(4), Some(5), Some(6), Some(7)], "a bounded number waits");
        assert_eq!((counts(&batch), batch.binding.generation), (vec![1], Some(8)));
    }
}
