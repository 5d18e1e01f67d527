//! Commands of the protocol's own command-line client whose server part does not exist yet. They are listed and
//! take their arguments, so that scripts can be checked, and say that they come later.

use clap::{Args, Subcommand, ValueEnum};

use crate::args::{OnlyRawArg, OutputArg, PageArgs, SandboxArg, key_value};
use crate::duration::parse as parse_duration;

/// The answer of such a command.
pub(crate) fn later(command: &str, what: &str) -> anyhow::Error {
    anyhow::anyhow!("`osb {command}` comes later: {what} is not in this version")
}

/// What to do with templates.
#[derive(Debug, Clone, Subcommand)]
pub enum TemplateAction {
    /// Make a template and start its build (later)
    Create(Box<TemplateArgs>),
    /// Show a template (later)
    Get {
        /// Id of the template
        template_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
    /// List templates (later)
    List {
        /// Only with this label; may be repeated
        #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
        metadata: Vec<(String, String)>,
        #[command(flatten)]
        page: PageArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Delete a template; its sandboxes go on (later)
    Delete {
        /// Id of the template
        template_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

/// Arguments of `template create`.
#[derive(Debug, Clone, Args)]
pub struct TemplateArgs {
    /// Image to build from
    #[arg(short, long, required_unless_present = "file")]
    image: Option<String>,
    /// Where the result goes, such as s3://bucket/name
    #[arg(short, long, required_unless_present = "file")]
    publish: Option<String>,
    /// The whole request as JSON, instead of the other options
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["image", "publish"])]
    file: Option<std::path::PathBuf>,
    /// Size such as cpu=1, memory=512Mi or disk=2Gi; may be repeated
    #[arg(long, value_name = "NAME=AMOUNT", value_parser = key_value)]
    resource: Vec<(String, String)>,
    /// Word of the entrypoint; repeat for each
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    entrypoint: Vec<String>,
    /// Variable; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    env: Vec<(String, String)>,
    /// Label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// How the result is stored
    #[arg(long, value_enum)]
    format: Option<TemplateFormat>,
    /// Probe that tells when the build is ready, such as tcp://127.0.0.1:44772
    #[arg(long, value_name = "PROBE")]
    readiness_probe: Option<String>,
    /// How long to wait when there is no probe
    #[arg(long, value_name = "SECONDS")]
    warmup_seconds: Option<u32>,
    #[command(flatten)]
    output: OutputArg,
}

/// Encodings of a template.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum TemplateFormat {
    /// Plain
    Native,
    /// Overlay block device
    Overlaybd,
}

impl TemplateAction {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Create(_) => "template create",
            Self::Get { .. } => "template get",
            Self::List { .. } => "template list",
            Self::Delete { .. } => "template delete",
        }
    }
}

/// What to do with snapshots.
#[derive(Debug, Clone, Subcommand)]
pub enum SnapshotAction {
    /// Make a snapshot of a sandbox (later)
    Create {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Name of the snapshot
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Show a snapshot (later)
    Get {
        /// Id of the snapshot
        snapshot_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
    /// List snapshots (later)
    List {
        /// Only of this sandbox
        #[arg(long, value_name = "ID")]
        sandbox_id: Option<String>,
        /// Only of this name
        #[arg(long)]
        name: Option<String>,
        /// Only in this state; may be repeated
        #[arg(long)]
        state: Vec<String>,
        #[command(flatten)]
        page: PageArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Delete a snapshot (later)
    Delete {
        /// Id of the snapshot
        snapshot_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

impl SnapshotAction {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "snapshot create",
            Self::Get { .. } => "snapshot get",
            Self::List { .. } => "snapshot list",
            Self::Delete { .. } => "snapshot delete",
        }
    }
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

/// What to do with shell sessions.
#[derive(Debug, Clone, Subcommand)]
pub enum SessionAction {
    /// Start a shell that keeps its variables and directory (later)
    Create {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Working directory
        #[arg(short, long, value_name = "DIR")]
        workdir: Option<String>,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Run a command in such a shell (later)
    Run {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Id of the session
        session_id: String,
        /// Working directory of this command
        #[arg(short, long, value_name = "DIR")]
        workdir: Option<String>,
        /// Kill the command after this time
        #[arg(short, long, value_name = "DURATION", value_parser = parse_duration)]
        timeout: Option<std::time::Duration>,
        #[command(flatten)]
        output: OnlyRawArg,
        /// The command
        #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
        words: Vec<String>,
    },
    /// End such a shell (later)
    Delete {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Id of the session
        session_id: String,
        #[command(flatten)]
        output: OutputArg,
    },
}

impl SessionAction {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "command session create",
            Self::Run { .. } => "command session run",
            Self::Delete { .. } => "command session delete",
        }
    }
}
