//! Time on the wire: UTC, RFC 3339, six fraction digits or none.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A moment, with the precision of the wire (microseconds).
///
/// Written as `2026-11-30T18:49:18.189968Z`; the fraction is left out when it is zero. Read with any offset and
/// any number of fraction digits (cut to six), without an offset (UTC), as a date alone, or as Unix seconds, or
/// milliseconds when larger than 2·10¹⁰.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WireTime(Timestamp);

impl WireTime {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self::from(Timestamp::now())
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub fn as_micros(self) -> i64 {
        self.0.as_microsecond()
    }

    /// The moment `micros` after the Unix epoch; `None` beyond the year 9999.
    #[must_use]
    pub fn from_micros(micros: i64) -> Option<Self> {
        Timestamp::from_microsecond(micros).ok().map(Self)
    }

    /// The moment as a `jiff` time stamp.
    #[must_use]
    pub fn timestamp(self) -> Timestamp {
        self.0
    }

    /// This moment plus whole seconds; `None` beyond the year 9999.
    #[must_use]
    pub fn plus_seconds(self, seconds: i64) -> Option<Self> {
        self.0.checked_add(jiff::SignedDuration::from_secs(seconds)).ok().map(Self)
    }
}

impl From<Timestamp> for WireTime {
    fn from(at: Timestamp) -> Self {
        Self(Timestamp::from_microsecond(at.as_microsecond()).unwrap_or(at))
    }
}

impl fmt::Display for WireTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.subsec_microsecond() == 0 && self.0.subsec_nanosecond() == 0 {
            write!(f, "{:.0}", self.0)
        } else {
            write!(f, "{:.6}", self.0)
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
        if let Ok(at) = text.parse::<Timestamp>() {
            return Ok(Self::from(at));
        }
        if let Ok(at) = text.parse::<jiff::civil::DateTime>() {
            return at
                .to_zoned(jiff::tz::TimeZone::UTC)
                .map(|z| Self::from(z.timestamp()))
                .map_err(|_| InvalidTime);
        }
        Err(InvalidTime)
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
        ] {
            assert_eq!(input.parse::<WireTime>().unwrap().to_string(), output, "{input}");
        }
        assert!("soon".parse::<WireTime>().is_err());
        assert!("1e300".parse::<WireTime>().is_err());
    }
}
