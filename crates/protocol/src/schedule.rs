//! When periodic hooks run: five-field cron, words such as `@hourly`, `@every 90s`, each with an optional time zone.
//!
//! The grammar is that of the cron library which the protocol was written around, since schedules are written for it:
//! `?` is `*`; both day fields count when one of them begins with a star, either one otherwise; a local time that the
//! clock passes twice counts twice, one that it jumps over does not count.

use std::time::Duration;

use jiff::civil::Weekday;
use jiff::tz::TimeZone;
use jiff::{Span, Timestamp, Zoned};

/// A schedule that can be followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    zone: Option<String>,
    when: When,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum When {
    Every(Duration),
    Cron(Cron),
}

/// Why a schedule cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// Not five fields, not a known word.
    #[error(
        "five fields (minute hour day month weekday), a word such as @hourly, or @every 30s are expected, not {0:?}"
    )]
    Form(String),
    /// A field that cannot be read.
    #[error("{field}: {text:?} is not a {field} from {least} to {most}, a range, a step or a list of these")]
    Field {
        /// Which one.
        field: &'static str,
        /// Least number.
        least: u8,
        /// Largest number.
        most: u8,
        /// The part in question.
        text: String,
    },
    /// `@every` with something else than whole seconds.
    #[error("@every needs a duration of whole seconds, one at least, such as 90s or 1h30m, not {0:?}")]
    Every(String),
    /// The name of a time zone that could name a file elsewhere.
    #[error("{0:?} cannot be the name of a time zone")]
    Zone(String),
    /// No moment of the next years fits.
    #[error("no date fits it")]
    Never,
}

/// One set of numbers below 64, and whether it was written as a star.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field {
    bits: u64,
    star: bool,
}

impl Field {
    fn holds(self, number: i8) -> bool {
        u32::try_from(number).is_ok_and(|number| self.bits & (1 << number) != 0)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Cron {
    minute: Field,
    hour: Field,
    day: Field,
    month: Field,
    weekday: Field,
}

/// What a field may hold.
struct Bounds {
    name: &'static str,
    least: u8,
    most: u8,
    /// Words for the numbers from `least` on.
    words: &'static [&'static str],
}

const MINUTE: Bounds = Bounds { name: "minute", least: 0, most: 59, words: &[] };
const HOUR: Bounds = Bounds { name: "hour", least: 0, most: 23, words: &[] };
const DAY: Bounds = Bounds { name: "day", least: 1, most: 31, words: &[] };
const MONTH: Bounds = Bounds {
    name: "month",
    least: 1,
    most: 12,
    words: &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
};
/// 7 is Sunday too, as everywhere else.
const WEEKDAY: Bounds =
    Bounds { name: "weekday", least: 0, most: 7, words: &["sun", "mon", "tue", "wed", "thu", "fri", "sat"] };

/// Words for whole schedules.
const WORDS: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

/// February 29th of a Tuesday may be 40 years away, across 2100.
const YEARS: i16 = 41;

impl Schedule {
    /// Reads a schedule.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, ScheduleError> {
        let text = text.trim();
        let form = || ScheduleError::Form(text.to_owned());
        let (zone, rest) = match text.strip_prefix("CRON_TZ=").or_else(|| text.strip_prefix("TZ=")) {
            Some(zoned) => {
                let (zone, rest) = zoned.split_once(char::is_whitespace).ok_or_else(form)?;
                if !is_zone_name(zone) {
                    return Err(ScheduleError::Zone(zone.to_owned()));
                }
                (Some(zone.to_owned()), rest.trim_start())
            }
            None => (None, text),
        };
        if let Some(duration) = rest.strip_prefix("@every ") {
            let every = duration.trim();
            let every = seconds(every).ok_or_else(|| ScheduleError::Every(every.to_owned()))?;
            return Ok(Self { zone, when: When::Every(every) });
        }
        let fields = match WORDS.iter().find(|(word, _)| *word == rest) {
            Some((_, fields)) => fields,
            None => rest,
        };
        let cron = Cron::parse(fields).ok_or_else(form)??;
        // Found out now, not when somebody waits for a run that never comes. Every zone has the same calendar.
        cron.next(&Timestamp::UNIX_EPOCH.to_zoned(TimeZone::UTC)).ok_or(ScheduleError::Never)?;
        Ok(Self { zone, when: When::Cron(cron) })
    }

    /// Name of the time zone, when the schedule has one.
    #[must_use]
    pub fn zone(&self) -> Option<&str> {
        self.zone.as_deref()
    }

    /// Whether the time zone matters.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self.when, When::Cron(_))
    }

    /// The first moment after `last`, which is the time of the last run or of the beginning. `None` beyond the
    /// calendar.
    #[must_use]
    pub fn next(&self, last: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        match &self.when {
            When::Every(every) => last.checked_add(jiff::SignedDuration::try_from(*every).ok()?).ok(),
            When::Cron(cron) => cron.next(&last.to_zoned(zone.clone())),
        }
    }
}

/// Whether this names a zone below a directory of zones, and nothing else.
fn is_zone_name(name: &str) -> bool {
    let sound = |part: &str| {
        !part.is_empty()
            && part != ".."
            && part != "."
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'+' | b'.'))
    };
    name.len() <= 64 && name.split('/').all(sound)
}

/// `1h30m10s`: whole seconds, one at least.
fn seconds(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total = 0_u64;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let (unit, later) = if let Some(later) = rest.strip_prefix("ms") {
            // Allowed where it makes whole seconds.
            (None, later)
        } else {
            let unit = match rest.chars().next()? {
                's' => 1,
                'm' => 60,
                'h' => 3600,
                _ => return None,
            };
            (Some(unit), &rest[1..])
        };
        rest = later;
        let part = match unit {
            Some(unit) => number.checked_mul(unit)?,
            None if number.is_multiple_of(1000) => number / 1000,
            None => return None,
        };
        total = total.checked_add(part)?;
    }
    // Beyond that a run would be centuries away.
    (1..=u64::from(u32::MAX)).contains(&total).then(|| Duration::from_secs(total))
}

impl Cron {
    /// `None` when these are not five fields.
    fn parse(text: &str) -> Option<Result<Self, ScheduleError>> {
        let mut fields = text.split_whitespace();
        let [minute, hour, day, month, weekday] = std::array::from_fn(|_| fields.next());
        let (minute, hour, day, month, weekday) = (minute?, hour?, day?, month?, weekday?);
        if fields.next().is_some() {
            return None;
        }
        let read = || {
            let mut weekday = field(weekday, &WEEKDAY)?;
            weekday.bits |= weekday.bits >> 7;
            Ok(Self {
                minute: field(minute, &MINUTE)?,
                hour: field(hour, &HOUR)?,
                day: field(day, &DAY)?,
                month: field(month, &MONTH)?,
                weekday,
            })
        };
        Some(read())
    }

    fn fits_day(&self, at: &Zoned) -> bool {
        let weekday = match at.weekday() {
            Weekday::Sunday => 0,
            other => other.to_monday_one_offset(),
        };
        let (day, weekday) = (self.day.holds(at.day()), self.weekday.holds(weekday));
        self.month.holds(at.month())
            && if self.day.star || self.weekday.star { day && weekday } else { day || weekday }
    }

    fn next(&self, after: &Zoned) -> Option<Timestamp> {
        let into_minute = i64::from(after.second()) * 1_000_000_000 + i64::from(after.subsec_nanosecond());
        let mut at = after
            .checked_add(Span::new().minutes(1))
            .ok()?
            .checked_sub(Span::new().nanoseconds(into_minute))
            .ok()?;
        let last = at.year().checked_add(YEARS)?;
        while at.year() <= last {
            if !self.fits_day(&at) {
                at = at.tomorrow().ok()?.start_of_day().ok()?;
            } else if !self.hour.holds(at.hour()) {
                // By the clock on the wall, whose hours may be of any length.
                at = at.checked_add(Span::new().minutes(60 - i64::from(at.minute()))).ok()?;
            } else if !self.minute.holds(at.minute()) {
                at = at.checked_add(Span::new().minutes(1)).ok()?;
            } else {
                return Some(at.timestamp());
            }
        }
        None
    }
}

fn field(text: &str, bounds: &Bounds) -> Result<Field, ScheduleError> {
    let mut whole = Field { bits: 0, star: false };
    for part in text.split(',') {
        let Field { bits, star } = self::part(part, bounds).ok_or_else(|| ScheduleError::Field {
            field: bounds.name,
            least: bounds.least,
            most: bounds.most,
            text: part.to_owned(),
        })?;
        whole.bits |= bits;
        whole.star |= star;
    }
    Ok(whole)
}

/// `*`, `5`, `5-9`, each with `/2` behind it.
fn part(text: &str, bounds: &Bounds) -> Option<Field> {
    let (range, step) = match text.split_once('/') {
        Some((range, step)) => (range, Some(number(step)?)),
        None => (text, None),
    };
    let star = matches!(range, "*" | "?");
    let (first, last) = match range.split_once('-') {
        _ if star => (bounds.least, if bounds.most == 7 { 6 } else { bounds.most }),
        Some((first, last)) => (named(first, bounds)?, named(last, bounds)?),
        // With a step, a single number is where it begins.
        None if step.is_some() => (named(range, bounds)?, if bounds.most == 7 { 6 } else { bounds.most }),
        None => (named(range, bounds)?, named(range, bounds)?),
    };
    let step = step.unwrap_or(1);
    if step == 0 || first > last || first < bounds.least || last > bounds.most {
        return None;
    }
    let bits = (first..=last).step_by(usize::from(step)).fold(0, |bits, number| bits | 1 << number);
    Some(Field { bits, star: star && step == 1 })
}

fn named(text: &str, bounds: &Bounds) -> Option<u8> {
    let word = bounds.words.iter().position(|word| word.eq_ignore_ascii_case(text));
    match word {
        Some(at) => u8::try_from(at).ok().map(|at| at + bounds.least),
        None => number(text),
    }
}

fn number(text: &str) -> Option<u8> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn following(schedule: &str, after: &str, zone: &TimeZone, count: usize) -> Vec<String> {
        let schedule = Schedule::parse(schedule).unwrap();
        let mut at = after.parse::<Timestamp>().unwrap();
        let mut times = Vec::new();
        for _ in 0..count {
            at = schedule.next(at, zone).unwrap();
            times.push(at.to_string());
        }
        times
    }

    fn next(schedule: &str, after: &str) -> String {
        following(schedule, after, &TimeZone::UTC, 1).remove(0)
    }

    #[test]
    fn fields_ranges_steps_lists_and_names() {
        // 2026-07-15 is a Wednesday.
        let now = "2026-07-15T14:45:00Z";
        for (schedule, expected) in [
            ("0/15 * * * *", "2026-07-15T15:00:00Z"),
            ("20-35/15 * * * *", "2026-07-15T15:20:00Z"),
            ("* * * * *", "2026-07-15T14:46:00Z"),
            ("?  ? ? ? ?", "2026-07-15T14:46:00Z"),
            ("0 0 9 Feb *", "2027-02-09T00:00:00Z"),
            ("0 0 * Feb Sun", "2027-02-07T00:00:00Z"),
            ("5,50 14,16 * jul *", "2026-07-15T14:50:00Z"),
            ("0 12 * * 1-5", "2026-07-16T12:00:00Z"),
            ("0 12 * * 7", "2026-07-19T12:00:00Z"),
            ("0 12 * * 6-7", "2026-07-18T12:00:00Z"),
            ("0 0 29 2 *", "2028-02-29T00:00:00Z"),
            ("59 23 31 12 *", "2026-12-31T23:59:00Z"),
            ("@hourly", "2026-07-15T15:00:00Z"),
            ("@daily", "2026-07-16T00:00:00Z"),
            ("@midnight", "2026-07-16T00:00:00Z"),
            ("@weekly", "2026-07-19T00:00:00Z"),
            ("@monthly", "2026-08-01T00:00:00Z"),
            ("@annually", "2027-01-01T00:00:00Z"),
            ("@yearly", "2027-01-01T00:00:00Z"),
            ("@every 30s", "2026-07-15T14:45:30Z"),
            ("@every 1h2m3s", "2026-07-15T15:47:03Z"),
            ("@every 2000ms", "2026-07-15T14:45:02Z"),
        ] {
            assert_eq!(next(schedule, now), expected, "{schedule}");
        }
        assert_eq!(next("* * * * *", "2026-07-15T14:45:59.9Z"), "2026-07-15T14:46:00Z");
    }

    #[test]
    fn both_days_count_when_one_is_a_star_and_either_otherwise() {
        // 2026-07-15 is a Wednesday; the next Sunday is the 19th.
        for (schedule, expected) in [
            ("0 0 20 * Sun", "2026-07-19T00:00:00Z"),
            ("0 0 */10 * Sun", "2026-07-19T00:00:00Z"),
            ("0 0 20 * *", "2026-07-20T00:00:00Z"),
            ("0 0 * * Sun", "2026-07-19T00:00:00Z"),
            ("0 0 16 * ?", "2026-07-16T00:00:00Z"),
        ] {
            assert_eq!(next(schedule, "2026-07-15T14:45:00Z"), expected, "{schedule}");
        }
    }

    #[test]
    fn what_makes_no_schedule_is_told() {
        for (schedule, word) in [
            ("", "five fields"),
            ("* * * *", "five fields"),
            ("* * * * * *", "five fields"),
            ("@reboot", "five fields"),
            ("60 * * * *", "minute"),
            ("* 24 * * *", "hour"),
            ("* * 0 * *", "day"),
            ("* * * 13 *", "month"),
            ("* * * * 8", "weekday"),
            ("*/0 * * * *", "minute"),
            ("5-1 * * * *", "minute"),
            ("1,,2 * * * *", "minute"),
            ("-1 * * * *", "minute"),
            ("+1 * * * *", "minute"),
            ("1-2-3 * * * *", "minute"),
            ("* * * foo *", "month"),
            ("0 0 30 2 *", "no date"),
            ("@every 0s", "@every"),
            ("@every 1500ms", "@every"),
            ("@every 1.5h", "@every"),
            ("@every -1s", "@every"),
            ("@every", "five fields"),
            ("@every 99999999999h", "@every"),
            ("TZ=../../etc/passwd * * * * *", "time zone"),
            ("TZ=/etc/localtime * * * * *", "time zone"),
            ("TZ=UTC", "five fields"),
        ] {
            let error = Schedule::parse(schedule).unwrap_err().to_string();
            assert!(error.contains(word), "{schedule:?}: {error}");
        }
    }

    #[test]
    fn clocks_that_are_put_forward_or_back() {
        let zone = TimeZone::posix("EST5EDT,M3.2.0,M11.1.0").unwrap();
        // 02:30 does not exist on 2026-03-08.
        assert_eq!(following("30 2 * * *", "2026-03-07T08:00:00Z", &zone, 1), ["2026-03-09T06:30:00Z"]);
        // 01:30 comes twice on 2026-11-01.
        assert_eq!(
            following("30 1 * * *", "2026-11-01T04:00:00Z", &zone, 3),
            ["2026-11-01T05:30:00Z", "2026-11-01T06:30:00Z", "2026-11-02T06:30:00Z"]
        );
        assert_eq!(
            Schedule::parse("CRON_TZ=America/New_York 0 0 * * *").unwrap().zone(),
            Some("America/New_York")
        );
        assert_eq!(Schedule::parse("TZ=Etc/GMT+3 @daily").unwrap().zone(), Some("Etc/GMT+3"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,40}") {
            let _ = Schedule::parse(&text);
        }

        #[test]
        fn each_next_time_is_later_fits_and_skips_none(
            minute in 0_i8..60, hour in 0_i8..24, every in 1_u8..30, after in 0_i64..4_000_000_000,
        ) {
            let after = Timestamp::from_second(after).unwrap();
            let at = Schedule::parse(&format!("{minute} {hour} * * *")).unwrap().next(after, &TimeZone::UTC).unwrap();
            let local = at.to_zoned(TimeZone::UTC);
            prop_assert!(at > after && at.duration_since(after).as_secs() <= 86_400);
            prop_assert_eq!((local.minute(), local.hour(), local.second()), (minute, hour, 0));
            let steps = Schedule::parse(&format!("*/{every} * * * *")).unwrap();
            let at = steps.next(after, &TimeZone::UTC).unwrap();
            let mut minute = after.as_second().div_euclid(60) + 1;
            while minute.rem_euclid(60) % i64::from(every) != 0 {
                minute += 1;
            }
            prop_assert_eq!(at.as_second(), minute * 60);
        }
    }
}
