//! Time on the wire: UTC, RFC 3339, six fraction digits or none.

use std::fmt;

use jiff::civil::{DateTime, Time};
use jiff::fmt::temporal::Pieces;
use jiff::tz::Offset;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A moment, with the precision of the wire (microseconds).
///
/// Written as `2026-11-30T18:49:18.189968Z`; the fraction is left out when it is zero. Read with any offset and
/// any number of fraction digits (cut to six), without an offset (UTC), as a date alone, or as Unix seconds, or
/// milliseconds when larger than 2·10¹⁰.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WireTime(i64);

/// The first moment of year 1 and the last of year 9999, in microseconds since the Unix epoch. A `jiff::Timestamp`
/// ends a day earlier, so that it fits every time zone.
const FIRST: i64 = -62_135_596_800_000_000;
const LAST: i64 = 253_402_300_799_999_999;
const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);

impl WireTime {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self::from(Timestamp::now())
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub fn as_micros(self) -> i64 {
        self.0
    }

    /// The moment `micros` after the Unix epoch; `None` beyond the years 1 to 9999.
    #[must_use]
    pub fn from_micros(micros: i64) -> Option<Self> {
        (FIRST..=LAST).contains(&micros).then_some(Self(micros))
    }

    /// The moment as a `jiff` time stamp; of the year 9999's last day, the last one that there is.
    #[must_use]
    pub fn timestamp(self) -> Timestamp {
        Timestamp::from_microsecond(self.0).unwrap_or(Timestamp::MAX)
    }

    /// This moment plus whole seconds; `None` beyond the year 9999.
    #[must_use]
    pub fn plus_seconds(self, seconds: i64) -> Option<Self> {
        seconds.checked_mul(1_000_000)?.checked_add(self.0).and_then(Self::from_micros)
    }

    fn civil(self) -> DateTime {
        EPOCH.checked_add(SignedDuration::from_micros(self.0)).unwrap_or(DateTime::MAX)
    }
}

impl From<Timestamp> for WireTime {
    fn from(at: Timestamp) -> Self {
        Self(at.as_microsecond().clamp(FIRST, LAST))
    }
}

impl fmt::Display for WireTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 % 1_000_000 == 0 {
            write!(f, "{:.0}Z", self.civil())
        } else {
            write!(f, "{:.6}Z", self.civil())
        }
    }
}

impl fmt::Debug for WireTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The text is no time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a time: RFC 3339 such as 2026-11-30T18:49:18Z is expected")]
pub struct InvalidTime;

impl std::str::FromStr for WireTime {
    type Err = InvalidTime;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if let Ok(number) = text.parse::<f64>() {
            return from_number(number);
        }
        let pieces = Pieces::parse(text).map_err(|_| InvalidTime)?;
        let offset = match pieces.to_numeric_offset() {
            Some(offset) => offset,
            None if pieces.time_zone_annotation().is_none() => Offset::UTC,
            None => return Err(InvalidTime),
        };
        let local = pieces.date().to_datetime(pieces.time().unwrap_or(Time::midnight()));
        let micros = local.duration_since(EPOCH).as_micros() - i128::from(offset.seconds()) * 1_000_000;
        i64::try_from(micros).ok().and_then(Self::from_micros).ok_or(InvalidTime)
    }
}

fn from_number(number: f64) -> Result<WireTime, InvalidTime> {
    if !number.is_finite() {
        return Err(InvalidTime);
    }
    let seconds = if number.abs() > 2e10 { number / 1000.0 } else { number };
    let micros = (seconds * 1e6).round();
    if micros.abs() > 9e18 {
        return Err(InvalidTime);
    }
    #[allow(clippy::cast_possible_truncation)]
    WireTime::from_micros(micros as i64).ok_or(InvalidTime)
}

impl Serialize for WireTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WireTime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Number(f64),
            Text(String),
        }
        match Raw::deserialize(deserializer)? {
            Raw::Number(number) => from_number(number),
            Raw::Text(text) => text.parse(),
        }
        .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_reference_reads_and_writes_utc() {
        for (input, output) in [
            ("2026-11-30T17:55:46.146776+00:00", "2026-11-30T17:55:46.146776Z"),
            ("2026-11-30T17:55:46.1467769Z", "2026-11-30T17:55:46.146776Z"),
            ("2026-11-30T17:55:46.558Z", "2026-11-30T17:55:46.558000Z"),
            ("2026-11-30T17:55:46+08:00", "2026-11-30T09:55:46Z"),
            ("2026-11-30T17:55:46", "2026-11-30T17:55:46Z"),
            ("2026-11-30", "2026-11-30T00:00:00Z"),
            ("2000000000", "2033-05-18T03:33:20Z"),
            ("2000000000000", "2033-05-18T03:33:20Z"),
            ("2026-11-30 17:55:46Z", "2026-11-30T17:55:46Z"),
            ("9999-12-31", "9999-12-31T00:00:00Z"),
            ("9999-12-31T23:59:59.9999999Z", "9999-12-31T23:59:59.999999Z"),
            ("9999-12-31T23:59:59+00:00", "9999-12-31T23:59:59Z"),
            ("253402300799000", "9999-12-31T23:59:59Z"),
            ("1969-12-31T23:59:59.5Z", "1969-12-31T23:59:59.500000Z"),
        ] {
            assert_eq!(input.parse::<WireTime>().unwrap().to_string(), output, "{input}");
        }
        assert!("soon".parse::<WireTime>().is_err());
        assert!("1e300".parse::<WireTime>().is_err());
        assert!("9999-12-31T23:59:59-01:00".parse::<WireTime>().is_err(), "that is the year 10000");
        assert!("2026-11-30T17:55:46[Europe/Berlin]".parse::<WireTime>().is_err());
    }

    #[test]
    fn the_last_day_of_9999_is_reached_and_not_passed() {
        let last = WireTime::from_micros(LAST).unwrap();
        assert_eq!(last.to_string().parse(), Ok(last));
        assert_eq!(WireTime::from_micros(LAST + 1), None);
        assert_eq!(last.plus_seconds(1), None);
        assert_eq!(WireTime::from_micros(FIRST).unwrap().to_string(), "0001-01-01T00:00:00Z");
        assert_eq!(WireTime::now().plus_seconds(i64::MAX), None);
    }
}
