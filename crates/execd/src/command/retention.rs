//! How long ended commands and their output are kept, and how much of it.

use std::ffi::OsString;
use std::time::Duration;

use osb_protocol::quantity::MemoryBytes;

/// Least bytes that may be asked for, so that a piece on disk is worth its descriptor.
const LEAST_BYTES: u64 = 64 << 10;

/// Bounds of what is kept for whoever asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How long an ended command can be asked about.
    pub age: Duration,
    /// How many ended commands can be asked about.
    pub commands: usize,
    /// Newest bytes kept of one background command's output.
    pub log_bytes: u64,
    /// Bytes kept of all background commands' output.
    pub logs_bytes: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            age: Duration::from_secs(24 * 60 * 60),
            commands: 4096,
            log_bytes: 64 << 20,
            logs_bytes: 256 << 20,
        }
    }
}

impl Retention {
    /// Names of the settings as flags; as variables they are `EXECD_COMMAND_RETENTION` and so on.
    pub const FLAGS: [&str; 4] =
        ["command-retention", "command-retention-count", "command-log-bytes", "command-logs-bytes"];

    /// Sets one of [`Retention::FLAGS`].
    ///
    /// # Errors
    /// The value is none, for people; nothing has changed.
    pub fn set(&mut self, flag: &str, value: &str) -> Result<(), String> {
        let wrong = |wanted: &str| format!("--{flag}: {value:?} is not {wanted}");
        let bytes = || {
            let bytes = value.parse::<MemoryBytes>().ok().map(|bytes| bytes.0);
            bytes.filter(|bytes| *bytes >= LEAST_BYTES).ok_or_else(|| wrong("an amount of 64Ki or more"))
        };
        match flag {
            "command-retention" => {
                self.age = duration(value).ok_or_else(|| wrong("a duration such as 24h, 90m or 30s"))?;
            }
            "command-retention-count" => {
                let count = value.parse().ok().filter(|count| *count > 0);
                self.commands = count.ok_or_else(|| wrong("a number from 1"))?;
            }
            "command-log-bytes" => self.log_bytes = bytes()?,
            "command-logs-bytes" => self.logs_bytes = bytes()?,
            _ => return Err(format!("--{flag} is not known; see --help")),
        }
        Ok(())
    }

    /// The variables' settings. What is wrong with one is in the list, which then has no effect.
    pub fn from_variables(var: impl Fn(&str) -> Option<OsString>) -> (Self, Vec<String>) {
        let mut retention = Self::default();
        let mut mistakes = Vec::new();
        for flag in Self::FLAGS {
            let name = format!("EXECD_{}", flag.replace('-', "_").to_ascii_uppercase());
            let Some(value) = var(&name).filter(|value| !value.is_empty()) else { continue };
            if let Err(error) = retention.set(flag, &value.to_string_lossy()) {
                mistakes.push(format!("{name}: {error}"));
            }
        }
        (retention, mistakes)
    }
}

/// A duration as Go writes them, whole numbers only: `24h`, `1h30m`, `200ms`.
fn duration(text: &str) -> Option<Duration> {
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = rest[..digits].parse().ok()?;
        let unit = rest[digits..].bytes().take_while(u8::is_ascii_alphabetic).count();
        let millis = match &rest[digits..digits + unit] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        total = total.checked_add(Duration::from_millis(number.checked_mul(millis)?))?;
        rest = &rest[digits + unit..];
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_mistakes_named() {
        let mut retention = Retention::default();
        for (flag, value) in Retention::FLAGS.into_iter().zip(["1h30m", "7", "1Mi", "2Mi"]) {
            retention.set(flag, value).unwrap();
        }
        let wanted = Retention {
            age: Duration::from_secs(5400),
            commands: 7,
            log_bytes: 1 << 20,
            logs_bytes: 2 << 20,
        };
        assert_eq!(retention, wanted);
        for (flag, value) in [
            ("command-retention", "1 day"),
            ("command-retention", ""),
            ("command-retention", "h"),
            ("command-retention", "99999999999999999999h"),
            ("command-retention-count", "0"),
            ("command-log-bytes", "1Ki"),
            ("command-logs-bytes", "-1"),
        ] {
            assert!(retention.set(flag, value).unwrap_err().contains(flag), "{flag} {value}");
        }
        assert_eq!(retention, wanted);
    }

    #[test]
    fn variables_have_the_flags_names() {
        let var = |name: &str| match name {
            "EXECD_COMMAND_RETENTION" => Some("10s".into()),
            "EXECD_COMMAND_LOG_BYTES" => Some("x".into()),
            _ => None,
        };
        let (retention, mistakes) = Retention::from_variables(var);
        assert_eq!(retention, Retention { age: Duration::from_secs(10), ..Retention::default() });
        assert_eq!(mistakes.len(), 1);
        assert!(mistakes[0].starts_with("EXECD_COMMAND_LOG_BYTES"));
    }
}
