//! The time zones of the image. What it does not have cannot be followed, except UTC.

use std::io::{self, Read as _};
use std::path::Path;

use jiff::tz::TimeZone;

/// Where systems keep their zones.
const PLACES: [&str; 3] = ["/usr/share/zoneinfo", "/usr/share/lib/zoneinfo", "/etc/zoneinfo"];
/// Zone of the system.
const LOCAL: &str = "/etc/localtime";
/// No zone comes near this.
const LIMIT: u64 = 1 << 20;

/// The zone of this name, or without one that of the system: of the variable `TZ`, of `/etc/localtime`, or UTC.
///
/// # Errors
/// There is no such zone here.
pub(super) fn find(name: Option<&str>, tz: Option<&str>) -> io::Result<TimeZone> {
    match name {
        Some("UTC" | "Etc/UTC" | "GMT" | "Z") => Ok(TimeZone::UTC),
        Some("Local") | None => Ok(local(tz)),
        Some(name) => named(name).ok_or_else(|| {
            io::Error::other(format!(
                "time zone {name:?} is not installed here: install the package tzdata or use UTC"
            ))
        }),
    }
}

fn local(tz: Option<&str>) -> TimeZone {
    let system = || read(Path::new(LOCAL), "Local").unwrap_or(TimeZone::UTC);
    match tz.map(|tz| tz.trim_start_matches(':')) {
        None => system(),
        Some("") => TimeZone::UTC,
        Some(path) if path.starts_with('/') => read(Path::new(path), "Local").unwrap_or(TimeZone::UTC),
        Some(text) => named(text).or_else(|| TimeZone::posix(text).ok()).unwrap_or(TimeZone::UTC),
    }
}

fn named(name: &str) -> Option<TimeZone> {
    // Schedules are checked already; the variable is not.
    if name.split('/').any(|part| part.is_empty() || part.starts_with('.')) {
        return None;
    }
    PLACES.iter().find_map(|place| read(&Path::new(place).join(name), name))
}

fn read(path: &Path, name: &str) -> Option<TimeZone> {
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return None;
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(LIMIT).read_to_end(&mut bytes).ok()?;
    TimeZone::tzif(name, &bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_found_by_name_and_strangers_are_told() {
        assert_eq!(find(Some("UTC"), None).unwrap(), TimeZone::UTC);
        assert!(find(Some("Nowhere/Land"), None).unwrap_err().to_string().contains("tzdata"));
        assert_eq!(find(None, Some("")).unwrap(), TimeZone::UTC);
        assert_eq!(find(None, Some("../../etc/passwd")).unwrap(), TimeZone::UTC);
        assert_ne!(find(None, Some("EST5")).unwrap(), TimeZone::UTC);
        if Path::new("/usr/share/zoneinfo/Europe/Berlin").exists() {
            let berlin = find(Some("Europe/Berlin"), None).unwrap();
            let noon = "2026-07-01T12:00:00Z".parse::<jiff::Timestamp>().unwrap().to_zoned(berlin);
            assert_eq!(noon.hour(), 14);
        }
    }
}
