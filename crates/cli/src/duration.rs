//! Durations on the command line.

use std::time::Duration;

/// Longest duration taken: 100 years, far from any overflow.
const MAX_SECONDS: u64 = 100 * 365 * 24 * 3600;

/// `30s`, `10m`, `1h30m` (units in this order) or plain seconds; more than zero.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is no duration; use 30s, 10m, 1h30m or seconds");
    let mut seconds: u64 = 0;
    let mut rest = text.trim();
    if rest.bytes().all(|b| b.is_ascii_digit()) {
        seconds = rest.parse().map_err(|_| wrong())?;
        rest = "";
    }
    for (unit, factor) in [('h', 3600), ('m', 60), ('s', 1)] {
        if let Some((number, tail)) = rest.split_once(unit) {
            let number: u64 = match number.bytes().all(|b| b.is_ascii_digit()) {
                true => number.parse().map_err(|_| wrong())?,
                false => return Err(wrong()),
            };
            seconds = number.checked_mul(factor).and_then(|n| n.checked_add(seconds)).ok_or_else(wrong)?;
            rest = tail;
        }
    }
    if !rest.is_empty() || seconds == 0 || seconds > MAX_SECONDS {
        return Err(wrong());
    }
    Ok(Duration::from_secs(seconds))
}

/// How long a sandbox lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// Until it is deleted.
    Endless,
    /// This long.
    For(Duration),
}

/// A duration or `none`.
pub(crate) fn parse_lifetime(text: &str) -> Result<Lifetime, String> {
    if text.trim().eq_ignore_ascii_case("none") {
        return Ok(Lifetime::Endless);
    }
    parse(text).map(Lifetime::For).map_err(|error| format!("{error}, or none"))
}

/// A duration as [`parse`] reads it.
pub(crate) fn format(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let mut text = String::new();
    for (unit, amount) in [('h', seconds / 3600), ('m', seconds / 60 % 60), ('s', seconds % 60)] {
        if amount > 0 {
            text.push_str(&format!("{amount}{unit}"));
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, seconds) in
            [("30s", 30), ("10m", 600), ("1h30m", 5400), ("1h1s", 3601), ("90", 90), (" 5m ", 300)]
        {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in
            ["", "0", "0s", "-5", "5x", "30s1h", "1.5h", "m", "h", "1d", "99999999999999999999", "1h 1m"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(parse_lifetime("None"), Ok(Lifetime::Endless));
        assert!(parse_lifetime("never").unwrap_err().contains("none"));
    }

    #[test]
    fn formats_what_it_reads() {
        for text in ["30s", "10m", "1h30m", "1h1s", "2h"] {
            assert_eq!(format(parse(text).unwrap()), text);
        }
        assert_eq!(format(Duration::ZERO), "0s");
    }
}
