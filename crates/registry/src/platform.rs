//! Which image of several runs on a machine.

use std::fmt;
use std::str::FromStr;

/// Operating system, architecture and its variant, in the words that images use.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, `arm`, ….
    pub architecture: String,
    /// `v7` of `arm`, `v8` of `arm64`, `v3` of `amd64`, ….
    pub variant: Option<String>,
}

impl Platform {
    /// Linux on this machine.
    #[must_use]
    pub fn host() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "arm" => ("arm", Some("v7")),
            "x86" => ("386", None),
            "powerpc64" => ("ppc64le", None),
            other => (other, None),
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant: variant.map(str::to_owned) }
    }

    /// How well an image for `self` serves who wants `wanted`; `None` when it does not run there.
    ///
    /// A variant runs on itself and on later ones. An image that names none is for the plainest (`v8` of `arm64`,
    /// `v1` of `amd64`), or, of `arm`, for `v7`, since that is what its makers mean.
    pub(crate) fn fitness(&self, wanted: &Self) -> Option<u32> {
        if self.os != wanted.os || self.architecture != wanted.architecture {
            return None;
        }
        match (self.level(), wanted.level()) {
            (Some(own), Some(most)) => (own <= most).then_some(own),
            _ => (self.variant == wanted.variant).then_some(0),
        }
    }

    /// The variant as a number; `None` where variants have no order.
    fn level(&self) -> Option<u32> {
        let plain = match self.architecture.as_str() {
            "arm" => 7,
            "arm64" => 8,
            _ => 1,
        };
        let Some(variant) = self.variant.as_deref().filter(|variant| !variant.is_empty()) else {
            return Some(plain);
        };
        let number = variant.strip_prefix('v')?.split('.').next()?;
        number.parse().ok().filter(|_| number.bytes().all(|byte| byte.is_ascii_digit()))
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) if !variant.is_empty() => write!(f, "/{variant}"),
            _ => Ok(()),
        }
    }
}

/// A text that is not `os/architecture[/variant]`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a platform is written os/architecture or os/architecture/variant, for example linux/arm64")]
pub struct InvalidPlatform;

impl FromStr for Platform {
    type Err = InvalidPlatform;

    fn from_str(text: &str) -> Result<Self, InvalidPlatform> {
        let word = |word: &&str| {
            !word.is_empty()
                && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        let words: Vec<&str> = text.split('/').collect();
        if !words.iter().all(word) {
            return Err(InvalidPlatform);
        }
        let architecture = |word: &str| match word {
            "x86_64" | "x86-64" => "amd64".to_owned(),
            "aarch64" => "arm64".to_owned(),
            other => other.to_owned(),
        };
        match words.as_slice() {
            [os, arch] => Ok(Self { os: (*os).into(), architecture: architecture(arch), variant: None }),
            [os, arch, variant] => Ok(Self {
                os: (*os).into(),
                architecture: architecture(arch),
                variant: Some((*variant).into()),
            }),
            _ => Err(InvalidPlatform),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best<'a>(wanted: &str, offered: &[&'a str]) -> Option<&'a str> {
        let wanted: Platform = wanted.parse().unwrap();
        let fitness = |text: &&&str| text.parse::<Platform>().unwrap().fitness(&wanted);
        // The first of the fittest.
        offered.iter().filter(|text| fitness(text).is_some()).rev().max_by_key(fitness).copied()
    }

    #[test]
    fn variants() {
        for (wanted, offered, expected) in [
            ("linux/amd64", &["linux/386", "linux/amd64"][..], Some("linux/amd64")),
            ("linux/amd64", &["linux/amd64/v3", "linux/amd64/v1"], Some("linux/amd64/v1")),
            ("linux/amd64", &["linux/amd64/v3"], None),
            ("linux/amd64/v3", &["linux/amd64", "linux/amd64/v2", "linux/amd64/v4"], Some("linux/amd64/v2")),
            ("linux/arm/v7", &["linux/arm/v5", "linux/arm/v6", "linux/arm/v7"], Some("linux/arm/v7")),
            ("linux/arm/v6", &["linux/arm/v5", "linux/arm/v7"], Some("linux/arm/v5")),
            ("linux/arm", &["linux/arm/v6", "linux/arm/v7"], Some("linux/arm/v7")),
            ("linux/arm/v6", &["linux/arm"], None),
            ("linux/arm64", &["linux/arm/v7", "linux/arm64/v8"], Some("linux/arm64/v8")),
            ("linux/arm64/v8", &["linux/arm64"], Some("linux/arm64")),
            ("linux/arm64", &["linux/arm64/v9"], None),
            ("linux/arm64/v9", &["linux/arm64/v9", "linux/arm64"], Some("linux/arm64/v9")),
            ("linux/aarch64", &["linux/arm64", "linux/arm64/v8"], Some("linux/arm64")),
            ("linux/amd64", &["windows/amd64"], None),
            (
                "linux/mips/softfloat",
                &["linux/mips/hardfloat", "linux/mips/softfloat"],
                Some("linux/mips/softfloat"),
            ),
        ] {
            assert_eq!(best(wanted, offered), expected, "{wanted} of {offered:?}");
        }
    }

    #[test]
    fn texts() {
        for text in ["linux/amd64", "linux/arm/v7"] {
            assert_eq!(text.parse::<Platform>().unwrap().to_string(), text);
        }
        for text in ["", "linux", "linux/", "/amd64", "a/b/c/d", "linux/am d64", "linux/amd64\n"] {
            assert_eq!(text.parse::<Platform>(), Err(InvalidPlatform), "{text:?}");
        }
    }
}
