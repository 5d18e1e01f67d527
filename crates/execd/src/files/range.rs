//! The `Range` header and the dates of conditional requests.

use http::{HeaderMap, header};
use jiff::Timestamp;
use jiff::fmt::rfc2822::{DateTimeParser, DateTimePrinter};

/// The header asks for nothing that the file has, or is not a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unsatisfiable;

/// One range as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spec {
    From(u64, Option<u64>),
    Last(u64),
}

/// First byte and length of the first range of `text` in a file of `size` bytes. All ranges must be well-formed,
/// only the first counts.
pub(crate) fn parse(text: &str, size: u64) -> Result<(u64, u64), Unsatisfiable> {
    let text = text.trim();
    let ranges = match text.split_at_checked(6) {
        Some((unit, ranges)) if unit.eq_ignore_ascii_case("bytes=") => ranges,
        _ => return Err(Unsatisfiable),
    };
    let mut specs = ranges.split(',').map(str::trim).filter(|range| !range.is_empty()).map(spec);
    let first = specs.next().ok_or(Unsatisfiable)??;
    if specs.any(|other| other.is_err()) {
        return Err(Unsatisfiable);
    }
    match first {
        Spec::From(start, end) if start < size => {
            let last = end.unwrap_or(u64::MAX).min(size - 1);
            Ok((start, last - start + 1))
        }
        Spec::Last(length) if length > 0 && size > 0 => {
            let length = length.min(size);
            Ok((size - length, length))
        }
        Spec::From(..) | Spec::Last(_) => Err(Unsatisfiable),
    }
}

fn spec(range: &str) -> Result<Spec, Unsatisfiable> {
    let (start, end) = range.split_once('-').ok_or(Unsatisfiable)?;
    let (start, end) = (start.trim(), end.trim());
    if start.is_empty() {
        return number(end).map(Spec::Last);
    }
    let start = number(start)?;
    let end = if end.is_empty() { None } else { Some(number(end)?) };
    if end.is_some_and(|end| end < start) {
        return Err(Unsatisfiable);
    }
    Ok(Spec::From(start, end))
}

/// Larger numbers than any file are as good as the largest.
fn number(text: &str) -> Result<u64, Unsatisfiable> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Unsatisfiable);
    }
    Ok(text.parse().unwrap_or(u64::MAX))
}

/// What a conditional request comes to. Files have a date and no entity tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Answer with the file.
    Go,
    /// 304.
    NotModified,
    /// 412.
    Failed,
}

/// Weighs `If-Match`, `If-Unmodified-Since`, `If-None-Match` and `If-Modified-Since`, in the standard's order.
pub(crate) fn condition(headers: &HeaderMap, modified: Timestamp) -> Condition {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let date = |name| text(name).and_then(parse_date);
    if let Some(tags) = text(header::IF_MATCH) {
        if tags != "*" {
            return Condition::Failed;
        }
    } else if date(header::IF_UNMODIFIED_SINCE).is_some_and(|date| seconds(modified) > seconds(date)) {
        return Condition::Failed;
    }
    let unchanged = match text(header::IF_NONE_MATCH) {
        Some(tags) => tags == "*",
        None => date(header::IF_MODIFIED_SINCE).is_some_and(|date| seconds(modified) <= seconds(date)),
    };
    if unchanged { Condition::NotModified } else { Condition::Go }
}

/// Whether `If-Range` allows a part: its date must be the file's, and a tag is never ours.
pub(crate) fn range_is_allowed(headers: &HeaderMap, modified: Timestamp) -> bool {
    headers.get(header::IF_RANGE).is_none_or(|value| {
        let date = value.to_str().ok().and_then(parse_date);
        date.is_some_and(|date| seconds(date) == seconds(modified))
    })
}

fn seconds(at: Timestamp) -> i64 {
    // Dates on the wire have no fraction, so neither may the file's.
    at.as_second()
}

/// The form of `Last-Modified`; `None` for years that it cannot carry.
pub(crate) fn format_date(at: Timestamp) -> Option<String> {
    DateTimePrinter::new().timestamp_to_rfc9110_string(&at).ok()
}

fn parse_date(text: &str) -> Option<Timestamp> {
    DateTimeParser::new().parse_timestamp(text.trim()).ok()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges() {
        for (text, expected) in [
            ("bytes=0-2", Some((0, 3))),
            ("bytes=0-", Some((0, 10))),
            ("bytes=9-", Some((9, 1))),
            ("bytes=2-99", Some((2, 8))),
            ("bytes=-4", Some((6, 4))),
            ("bytes=-99", Some((0, 10))),
            ("Bytes= 1 - 2 ", Some((1, 2))),
            ("bytes=1-2,4-5", Some((1, 2))),
            ("bytes=,1-2", Some((1, 2))),
            ("bytes=0-99999999999999999999999", Some((0, 10))),
            ("bytes=10-", None),
            ("bytes=-0", None),
            ("bytes=5-3", None),
            ("bytes=1-2,x", None),
            ("bytes=", None),
            ("bytes=-", None),
            ("bytes=a-b", None),
            ("bytes=+1-2", None),
            ("bytes=1", None),
            ("lines=1-2", None),
            ("", None),
            ("bytesü=1-2", None),
        ] {
            assert_eq!(parse(text, 10).ok(), expected, "{text}");
        }
        assert_eq!(parse("bytes=0-", 0), Err(Unsatisfiable));
        assert_eq!(parse("bytes=-1", 0), Err(Unsatisfiable));
    }

    #[test]
    fn conditions() {
        let modified = Timestamp::new(1_700_000_000, 500_000_000).unwrap();
        let (same, before) = ("Tue, 14 Nov 2023 22:13:20 GMT", "Tue, 14 Nov 2023 22:13:19 GMT");
        assert_eq!(format_date(modified).as_deref(), Some(same));
        let check = |name: header::HeaderName, value: &'static str| {
            let headers = HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
            (condition(&headers, modified), range_is_allowed(&headers, modified))
        };
        assert_eq!(check(header::IF_MODIFIED_SINCE, same).0, Condition::NotModified);
        assert_eq!(check(header::IF_MODIFIED_SINCE, before).0, Condition::Go);
        assert_eq!(check(header::IF_MODIFIED_SINCE, "nonsense").0, Condition::Go);
        assert_eq!(check(header::IF_UNMODIFIED_SINCE, same).0, Condition::Go);
        assert_eq!(check(header::IF_UNMODIFIED_SINCE, before).0, Condition::Failed);
        assert_eq!(check(header::IF_NONE_MATCH, "*").0, Condition::NotModified);
        assert_eq!(check(header::IF_NONE_MATCH, "\"x\"").0, Condition::Go);
        assert_eq!(check(header::IF_MATCH, "*").0, Condition::Go);
        assert_eq!(check(header::IF_MATCH, "\"x\"").0, Condition::Failed);
        assert!(check(header::IF_RANGE, same).1);
        assert!(!check(header::IF_RANGE, before).1);
        assert!(!check(header::IF_RANGE, "\"x\"").1);
    }

    proptest! {
        #[test]
        fn a_range_lies_within_the_file(text in "(bytes=)?[-0-9, ]{0,20}", size in 0_u64..30) {
            if let Ok((start, length)) = parse(&text, size) {
                prop_assert!(length > 0 && start + length <= size);
            }
        }

        #[test]
        fn written_ranges_are_read_back(start in 0_u64..100, length in 1_u64..100) {
            let text = format!("bytes={start}-{}", start + length - 1);
            prop_assert_eq!(parse(&text, 1000), Ok((start, length)));
            prop_assert_eq!(parse(&format!("bytes=-{length}"), 1000), Ok((1000 - length, length)));
        }
    }
}
