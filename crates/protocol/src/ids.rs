//! Identifiers.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The id of a sandbox: a random UUID (version 4), written with dashes and in lower case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SandboxId(Uuid);

impl SandboxId {
    /// A new random id.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// The first block of the id (8 characters): host name of the sandbox, and what people say aloud.
    #[must_use]
    pub fn short(&self) -> String {
        self.0.to_string()[..8].to_owned()
    }
}

/// The text is not an id in its one canonical spelling.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a sandbox id: 36 characters of a lower-case UUID are expected")]
pub struct InvalidId;

impl FromStr for SandboxId {
    type Err = InvalidId;

    /// Only the canonical spelling is an id, so that one sandbox has one URL.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let uuid = Uuid::try_parse(text).map_err(|_| InvalidId)?;
        if uuid.to_string() == text { Ok(Self(uuid)) } else { Err(InvalidId) }
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_canonical_spelling_parses() {
        let id = SandboxId::random();
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in
            ["", "x", "382A5B88-4249-4CBC-8878-61A7C43FF6A4", "382a5b8842494cbc887861a7c43ff6a4", "../etc"]
        {
            assert_eq!(bad.parse::<SandboxId>(), Err(InvalidId), "{bad}");
        }
        assert_eq!(id.short().len(), 8);
    }
}
