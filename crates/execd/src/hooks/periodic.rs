//! Hooks that run by the clock.

use std::io;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::plan::{Periodic, Plan};
use super::{run, zone};
use crate::app::App;

/// The clock may be set while we sleep, so no sleep is longer.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);

/// The periodic hooks that are being followed.
#[derive(Debug)]
pub(crate) struct Running {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Running {
    /// Begins to follow the hooks of a plan.
    ///
    /// # Errors
    /// A time zone is not known here; none is followed.
    pub(crate) fn start(app: &App, plan: &Plan) -> io::Result<Self> {
        let binding = app.binding();
        let tz = binding.var("TZ").and_then(std::ffi::OsStr::to_str);
        let mut zoned = Vec::new();
        for periodic in &plan.periodic {
            let zone = if periodic.schedule.is_local() {
                zone::find(periodic.schedule.zone(), tz)
                    .map_err(|error| io::Error::other(format!("{}: {error}", periodic.hook.title)))?
            } else {
                TimeZone::UTC
            };
            zoned.push((periodic.clone(), zone));
        }
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        for (periodic, zone) in zoned {
            tasks.spawn(follow(app.clone(), periodic, zone, stop.clone()));
        }
        tasks.close();
        Ok(Self { stop, tasks })
    }

    /// Ends what runs and waits for it.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        self.tasks.wait().await;
    }
}

async fn follow(app: App, periodic: Periodic, zone: TimeZone, stop: CancellationToken) {
    let mut last = Timestamp::now();
    loop {
        let Some(next) = periodic.schedule.next(last, &zone) else { return };
        if stop.run_until_cancelled(sleep_until(next)).await.is_none() {
            return;
        }
        if let Err(error) = run(&app, &periodic.hook, &stop).await
            && !stop.is_cancelled()
        {
            tracing::error!(%error, "a periodic hook has failed");
        }
        // Times that have passed meanwhile are left out: a hook never runs beside itself.
        last = following(&periodic, next, Timestamp::now(), &zone);
    }
}

/// The last time of the schedule that has passed; `ran` at least. Whatever is behind `ran` in the grid of `@every`
/// stays in it.
fn following(periodic: &Periodic, ran: Timestamp, now: Timestamp, zone: &TimeZone) -> Timestamp {
    if periodic.schedule.is_local() {
        return now.max(ran);
    }
    let mut last = ran;
    while let Some(next) = periodic.schedule.next(last, zone).filter(|next| *next <= now) {
        // A clock that was put forward by years would keep us here.
        if now.duration_since(next).as_secs() > 86_400 {
            return now;
        }
        last = next;
    }
    last
}

async fn sleep_until(moment: Timestamp) {
    loop {
        let left = moment.duration_since(Timestamp::now());
        let Ok(left) = Duration::try_from(left) else { return };
        if left.is_zero() {
            return;
        }
        // A millisecond more, so that the wall clock is surely there.
        tokio::time::sleep((left + Duration::from_millis(1)).min(LONGEST_SLEEP)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_have_passed_are_left_out() {
        let plan = super::super::parse(
            r#"{"periodic":[{"name":"a","schedule":"@every 10s","command":["x"]},
                            {"name":"b","schedule":"* * * * *","command":["x"]}]}"#,
        );
        let plan = Plan::new(&plan.unwrap()).unwrap();
        let at = |second| Timestamp::from_second(second).unwrap();
        let last = |hook: usize, ran, now| {
            following(&plan.periodic[hook], at(ran), at(now), &TimeZone::UTC).as_second()
        };
        assert_eq!((last(0, 100, 105), last(0, 100, 110), last(0, 100, 139)), (100, 110, 130));
        assert_eq!((last(1, 120, 121), last(1, 120, 200)), (121, 200));
        assert_eq!(last(0, 100, 10_000_000), 10_000_000);
    }
}
