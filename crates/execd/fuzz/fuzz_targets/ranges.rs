//! Ranges of downloads: they lie in the file, and are what a careful reader makes of the header.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use osb_execd::fuzz::range;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    text: &'a str,
    start: u64,
    end: u64,
    size: u64,
}

/// The first range, by numbers that never overflow.
fn careful(text: &str, size: u64) -> Option<(u64, u64)> {
    let number = |text: &str| {
        let text = text.trim();
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u128>().unwrap_or(u128::MAX))
    };
    let text = text.trim();
    if !text.get(..6)?.eq_ignore_ascii_case("bytes=") {
        return None;
    }
    let size = u128::from(size);
    let mut all = Vec::new();
    for part in text[6..].split(',').filter(|part| !part.trim().is_empty()) {
        let (start, end) = part.split_once('-')?;
        all.push(match (start.trim(), end.trim()) {
            ("", last) => (size.saturating_sub(number(last)?), size),
            (first, "") => (number(first)?, size),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                // Both beyond any file: which is larger nobody can tell.
                if last.min(u64::MAX.into()) < first.min(u64::MAX.into()) {
                    return None;
                }
                (first, last.saturating_add(1).min(size))
            }
        });
    }
    let &(start, end) = all.first()?;
    (start < end).then(|| (u64::try_from(start).unwrap(), u64::try_from(end - start).unwrap()))
}

fuzz_target!(|input: Input<'_>| {
    let sizes = [input.size, input.size % 16, 0, 1, u64::MAX];
    let made = [
        input.text.to_owned(),
        format!("bytes={}", input.text),
        format!("bytes={}-{}", input.start, input.end),
        format!("bytes={}-", input.start),
        format!("bytes=-{}", input.end),
        format!("bytes={}-{}, {}-", input.start % 16, input.end % 16, input.start % 8),
    ];
    for text in &made {
        for size in sizes {
            let found = range(text, size);
            if let Some((start, length)) = found {
                assert!(
                    length > 0 && start.checked_add(length).is_some_and(|end| end <= size),
                    "{text} of {size}"
                );
            }
            assert_eq!(found, careful(text, size), "{text} of {size}");
        }
    }
});
