//! Amounts of CPU and memory as the Docker runtime's grammar has them.

use std::str::FromStr;

/// Why an amount is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not of the grammar, zero, negative or beyond what can be counted.
    #[error("cpu must be a positive number of cores such as 0.5, 2 or 500m")]
    Cpu,
    /// See [`MemoryBytes`].
    #[error(
        "memory must be a positive whole number with an optional unit (k, Ki, M, Mi, G, Gi, T, Ti), such as 512Mi"
    )]
    Memory,
}

/// CPU time per time, in billionths of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuNanos(pub u64);

impl CpuNanos {
    /// Rounded up to thousandths of a core.
    #[must_use]
    pub fn millis(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }
}

impl FromStr for CpuNanos {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (number, scale) = match text.strip_suffix('m') {
            Some(number) => (number, 1e6),
            None => (text, 1e9),
        };
        let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let value: f64 = number.parse().map_err(|_| QuantityError::Cpu)?;
        let nanos = value * scale;
        if !plain || !(1.0..9.2e18).contains(&nanos) {
            return Err(QuantityError::Cpu);
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        Ok(Self(nanos as u64))
    }
}

/// Memory in bytes: a whole number and an optional unit in any case; `k` `m` `g` `t` are powers of 1000 (also
/// with `b` behind), `ki` `mi` `gi` `ti` of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemoryBytes(pub u64);

impl FromStr for MemoryBytes {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = text[..digits].parse().map_err(|_| QuantityError::Memory)?;
        let unit: u64 = match text[digits..].trim_start().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" => 1_000,
            "ki" => 1 << 10,
            "m" | "mb" => 1_000_000,
            "mi" => 1 << 20,
            "g" | "gb" => 1_000_000_000,
            "gi" => 1 << 30,
            "t" | "tb" => 1_000_000_000_000,
            "ti" => 1 << 40,
            _ => return Err(QuantityError::Memory),
        };
        match number.checked_mul(unit) {
            Some(bytes) if bytes > 0 && i64::try_from(bytes).is_ok() => Ok(Self(bytes)),
            _ => Err(QuantityError::Memory),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_grammar() {
        for (text, nanos) in
            [("1", 1_000_000_000), ("0.5", 500_000_000), ("500m", 500_000_000), (" 2 ", 2_000_000_000)]
        {
            assert_eq!(text.parse(), Ok(CpuNanos(nanos)), "{text}");
        }
        for text in ["", "0", "-1", "1e3", "nan", "inf", "1k", "m", "9999999999999", "0.0000000001"] {
            assert_eq!(text.parse::<CpuNanos>(), Err(QuantityError::Cpu), "{text}");
        }
    }

    #[test]
    fn memory_grammar() {
        for (text, bytes) in [
            ("1", 1),
            ("1b", 1),
            ("2k", 2000),
            ("2Ki", 2048),
            ("512Mi", 536_870_912),
            (" 1 GB ", 1_000_000_000),
            ("1TI", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(MemoryBytes(bytes)), "{text}");
        }
        for text in ["", "0", "-1", "1.5Gi", "1MiB", "1x", "Gi", "99999999999999999999", "9999999Ti"] {
            assert_eq!(text.parse::<MemoryBytes>(), Err(QuantityError::Memory), "{text}");
        }
    }
}
