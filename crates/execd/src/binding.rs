//! What the daemon is bound to: the sandbox it serves, who may call it, and the variables of what it starts.
//!
//! All of it changes together when the control plane binds the daemon anew ([`crate::runtime_init`]), so a reader
//! takes one [`Binding`] and sees nothing half way.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, PoisonError, RwLock};

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// Variable that names the sandbox to its programs.
pub const SANDBOX_ID: &str = "OPENSANDBOX_ID";

/// Everything that changes when the daemon is bound anew.
#[derive(Debug, Default)]
pub struct Binding {
    /// The sandbox's id, where anybody has told it.
    pub sandbox_id: Option<String>,
    /// Opaque number of the allocation; `None` before the first runtime init.
    pub generation: Option<u64>,
    /// Attributes for each point of telemetry, beside the id and the generation.
    pub attributes: BTreeMap<String, String>,
    /// Who may call.
    pub access: Access,
    /// Environment of everything the API starts, and of `$NAME` in paths. Later entries win.
    pub env: Vec<(OsString, OsString)>,
}

/// Who may call.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Access {
    /// Everybody.
    #[default]
    Open,
    /// Whoever sends this token.
    Token(String),
    /// Whoever sends a token with this SHA-256.
    Hash([u8; 32]),
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::Open { "Open" } else { "***" })
    }
}

impl Access {
    /// An empty token asks for none.
    #[must_use]
    pub fn of_token(token: Option<String>) -> Self {
        token.filter(|token| !token.is_empty()).map_or(Self::Open, Self::Token)
    }

    /// Whether a request that sends this token may pass. Takes as long for each wrong one.
    #[must_use]
    pub fn admits(&self, sent: Option<&[u8]>) -> bool {
        match (self, sent) {
            (Self::Open, _) => true,
            (_, None) => false,
            (Self::Token(token), Some(sent)) => token.as_bytes().ct_eq(sent).into(),
            (Self::Hash(hash), Some(sent)) => Sha256::digest(sent).ct_eq(hash.as_slice()).into(),
        }
    }
}

impl Binding {
    /// What the daemon is bound to from its start.
    #[must_use]
    pub fn at_start(env: Vec<(OsString, OsString)>, access: Access) -> Self {
        let mut binding = Self { access, env, ..Self::default() };
        binding.sandbox_id =
            binding.var(SANDBOX_ID).and_then(OsStr::to_str).filter(|id| !id.is_empty()).map(str::to_owned);
        binding
    }

    /// The last value of a variable.
    #[must_use]
    pub fn var(&self, name: &str) -> Option<&OsStr> {
        self.env.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_os_str())
    }
}

/// The binding of the moment.
#[derive(Debug, Default)]
pub struct Current(RwLock<Arc<Binding>>);

impl Current {
    /// Begins with this one.
    #[must_use]
    pub fn new(binding: Binding) -> Self {
        Self(RwLock::new(Arc::new(binding)))
    }

    /// The whole of it as it is now.
    #[must_use]
    pub fn get(&self) -> Arc<Binding> {
        // A holder that panics leaves the old one or the new one.
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts another in its place.
    pub fn set(&self, binding: Binding) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(binding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_token_is_admitted() {
        assert!(Access::Open.admits(None) && Access::of_token(Some(String::new())).admits(None));
        let hash = Access::Hash(Sha256::digest(b"secret").into());
        for access in [Access::of_token(Some("secret".to_owned())), hash] {
            assert!(access.admits(Some(b"secret")));
            for wrong in [None, Some(&b""[..]), Some(b"secre"), Some(b"secret1"), Some(b"Secret")] {
                assert!(!access.admits(wrong), "{wrong:?}");
            }
            assert_eq!(format!("{access:?}"), "***");
        }
    }

    #[test]
    fn the_id_is_taken_from_the_environment_and_the_last_entry_wins() {
        let env = |list: &[(&str, &str)]| list.iter().map(|(n, v)| (n.into(), v.into())).collect::<Vec<_>>();
        let binding = Binding::at_start(env(&[(SANDBOX_ID, "a"), (SANDBOX_ID, "b")]), Access::Open);
        assert_eq!((binding.sandbox_id.as_deref(), binding.var("X")), (Some("b"), None));
        assert_eq!(Binding::at_start(env(&[(SANDBOX_ID, "")]), Access::Open).sandbox_id, None);
    }
}
