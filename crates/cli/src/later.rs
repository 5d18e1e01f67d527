//! Commands of the protocol's own command-line client whose server part does not exist yet. They are listed and
//! take their arguments, so that scripts can be checked, and say that they come later.

use clap::{Args, Subcommand};

use crate::args::{OutputArg, SandboxArg, key_value};

/// The answer of such a command.
pub(crate) fn later(command: &str, what: &str) -> anyhow::Error {
    anyhow::anyhow!("`osb {command}` comes later: {what} is not in this version")
}

/// What to do with network rules.
#[derive(Debug, Clone, Subcommand)]
pub enum EgressAction {
    /// Show where a sandbox may connect to (later)
    Get {
        #[command(flatten)]
        sandbox: SandboxArg,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Add rules; one for the same target is replaced (later)
    Patch {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// allow=TARGET or deny=TARGET; may be repeated
        #[arg(long, value_name = "ACTION=TARGET", required = true, value_parser = key_value)]
        rule: Vec<(String, String)>,
        #[command(flatten)]
        output: OutputArg,
    },
}

impl EgressAction {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Get { .. } => "egress get",
            Self::Patch { .. } => "egress patch",
        }
    }
}

/// What to do with a credential vault.
#[derive(Debug, Clone, Subcommand)]
pub enum VaultAction {
    /// Make a sandbox's vault (later)
    Create(VaultFileArgs),
    /// Change credentials and bindings in one step (later)
    Patch(VaultFileArgs),
    /// Show a vault without its secrets (later)
    Get(VaultArgs),
    /// Delete a vault (later)
    Delete(VaultArgs),
    /// Look at credentials, without their secrets
    #[command(subcommand)]
    Credential(VaultItemAction),
    /// Look at bindings
    #[command(subcommand)]
    Binding(VaultItemAction),
}

/// A sandbox's vault.
#[derive(Debug, Clone, Args)]
pub struct VaultArgs {
    #[command(flatten)]
    sandbox: SandboxArg,
    #[command(flatten)]
    output: OutputArg,
}

/// A sandbox's vault and a file with what goes there.
#[derive(Debug, Clone, Args)]
pub struct VaultFileArgs {
    #[command(flatten)]
    vault: VaultArgs,
    /// JSON or YAML; - is standard input
    #[arg(long, value_name = "FILE")]
    file: std::path::PathBuf,
}

/// What to look at in a vault.
#[derive(Debug, Clone, Subcommand)]
pub enum VaultItemAction {
    /// List them (later)
    List(VaultArgs),
    /// Show one (later)
    Get {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Its name
        name: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

impl VaultAction {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Create(_) => "credential-vault create",
            Self::Patch(_) => "credential-vault patch",
            Self::Get(_) => "credential-vault get",
            Self::Delete(_) => "credential-vault delete",
            Self::Credential(VaultItemAction::List(_)) => "credential-vault credential list",
            Self::Credential(VaultItemAction::Get { .. }) => "credential-vault credential get",
            Self::Binding(VaultItemAction::List(_)) => "credential-vault binding list",
            Self::Binding(VaultItemAction::Get { .. }) => "credential-vault binding get",
        }
    }
}
