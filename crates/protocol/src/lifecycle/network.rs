//! Network policies.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::lenient;
#[cfg(feature = "openapi")]
use super::schemas;

/// Which destinations a sandbox may reach.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkPolicy {
    /// What happens where no rule matches; absent means deny.
    #[serde(default, alias = "default_action", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::policy_action, required = false))]
    pub default_action: Option<PolicyAction>,
    /// Rules in order.
    #[serde(default, deserialize_with = "lenient::or_default")]
    #[cfg_attr(feature = "openapi", schema(required = false, default = json!([])))]
    pub egress: Vec<NetworkRule>,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkRule {
    /// What happens.
    #[cfg_attr(feature = "openapi", schema(schema_with = schemas::policy_action))]
    pub action: PolicyAction,
    /// Domain, wildcard domain, address or range.
    #[cfg_attr(feature = "openapi", schema(min_length = 1))]
    pub target: String,
}

/// Let pass or refuse. Read in any case: one official client writes it with a capital.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyAction {
    /// Let pass.
    Allow,
    /// Refuse.
    Deny,
}

impl<'de> Deserialize<'de> for PolicyAction {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Word;
        impl de::Visitor<'_> for Word {
            type Value = PolicyAction;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("'allow' or 'deny'")
            }

            fn visit_str<E: de::Error>(self, v: &str) -> Result<PolicyAction, E> {
                match v.trim() {
                    word if word.eq_ignore_ascii_case("allow") => Ok(PolicyAction::Allow),
                    word if word.eq_ignore_ascii_case("deny") => Ok(PolicyAction::Deny),
                    _ => Err(E::custom("'allow' or 'deny' is expected")),
                }
            }
        }
        deserializer.deserialize_str(Word)
    }
}

/// State of a sandbox's policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PolicyStatusResponse {
    /// `ok`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub status: Option<String>,
    /// `enforcing`, `allow_all` or `deny_all`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub mode: Option<String>,
    /// By what means.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub enforcement_mode: Option<String>,
    /// Why it is so.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub reason: Option<String>,
    /// The policy itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(nullable = false))]
    pub policy: Option<NetworkPolicy>,
}
