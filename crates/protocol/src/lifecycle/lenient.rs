//! How numbers and flags of requests are read.

use serde::{Deserialize, Deserializer, de};

struct WholeNumber;

impl de::Visitor<'_> for WholeNumber {
    type Value = i64;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<i64, E> {
        Ok(v)
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<i64, E> {
        i64::try_from(v).map_err(|_| E::custom("a whole number of at most 63 bits is expected"))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<i64, E> {
        #[allow(clippy::cast_possible_truncation)]
        if v.fract() == 0.0 && v.abs() < 9.2e18 {
            Ok(v as i64)
        } else {
            Err(E::custom("a whole number is expected"))
        }
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<i64, E> {
        let text = v.trim();
        let whole = text.strip_suffix(".0").unwrap_or(text);
        whole.parse().map_err(|_| E::custom("a whole number is expected"))
    }
}

struct Lenient(i64);

impl<'de> Deserialize<'de> for Lenient {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WholeNumber).map(Self)
    }
}

/// A required whole number.
pub(super) fn int<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    Lenient::deserialize(deserializer).map(|n| n.0)
}

/// An optional whole number.
pub(super) fn opt_int<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    Option::<Lenient>::deserialize(deserializer).map(|n| n.map(|n| n.0))
}

/// A value whose `null` means its default.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// A flag that is on unless it is sent as `false`.
pub(super) fn or_true<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Option::<bool>::deserialize(deserializer).map(|v| v.unwrap_or(true))
}

/// Default of [`or_true`] members.
pub(super) fn yes() -> bool {
    true
}
