//! The client commands of `osb`: what a person at a terminal, or a script, does with sandboxes.
//!
//! Arguments are parsed into one struct per command; each command is one file that maps them to calls of
//! `osb_client` and prints the answer. Nothing here knows how sandboxes are made.

mod args;
mod command;
mod config;
mod copy;
mod devops;
mod duration;
mod events;
mod examples;
pub mod exit;
mod file;
mod forward;
mod later;
mod logs;
mod output;
mod progress;
mod run;
mod sandbox;
mod session;
mod settings;
mod shell;
mod signals;
mod skills;
mod snapshot;
mod streams;
mod suggest;
mod template;
mod top;
mod transfer;

use clap::{Args, Subcommand};

pub use examples::{command_lines, with_examples};
pub use output::{Cell, Format, Printer, RawFormat, Row, printable};
pub use streams::Streams;

use settings::Context;

/// Options of every client command.
#[derive(Debug, Clone, Default, Args)]
pub struct Globals {
    /// API key [env: OPEN_SANDBOX_API_KEY]
    #[arg(long, global = true, value_name = "KEY", help_heading = "Global options")]
    pub api_key: Option<String>,
    /// Server as host:port, with or without http:// [env: OPEN_SANDBOX_DOMAIN] [default: localhost:8080]
    #[arg(long, global = true, value_name = "HOST:PORT", help_heading = "Global options")]
    pub domain: Option<String>,
    /// http or https [env: OPEN_SANDBOX_PROTOCOL] [default: http]
    #[arg(long, global = true, value_name = "SCHEME", help_heading = "Global options")]
    pub protocol: Option<String>,
    /// Time limit of ordinary calls [env: OPEN_SANDBOX_REQUEST_TIMEOUT] [default: 30]
    #[arg(long, global = true, value_name = "SECONDS", help_heading = "Global options")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout: Option<u64>,
    /// Reach sandboxes through the server (the default) [env: OPEN_SANDBOX_USE_SERVER_PROXY]
    #[arg(long, global = true, overrides_with = "no_use_server_proxy", help_heading = "Global options")]
    pub use_server_proxy: bool,
    /// Reach sandboxes at addresses of their own
    #[arg(long, global = true, help_heading = "Global options")]
    pub no_use_server_proxy: bool,
    /// Settings file [default: ~/.opensandbox/config.toml]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub config: Option<std::path::PathBuf>,
    /// Settings of this [profiles.NAME] in the settings file [env: OPEN_SANDBOX_PROFILE]
    #[arg(long, global = true, value_name = "NAME", help_heading = "Global options")]
    pub profile: Option<String>,
    /// Say which server and settings are used
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub verbose: bool,
    /// Never colour output
    #[arg(long, global = true, help_heading = "Global options")]
    pub no_color: bool,
}

/// The client commands.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// Run a program in a new sandbox and delete the sandbox afterwards
    #[command(mut_arg("timeout", |timeout| timeout.short(None)))]
    Run(run::RunArgs),
    /// Open a shell, or another program, on a terminal in a sandbox
    Shell(shell::ShellArgs),
    /// Make, list and end sandboxes
    #[command(subcommand, visible_alias = "sb")]
    Sandbox(sandbox::SandboxAction),
    /// Run commands in a sandbox
    #[command(subcommand)]
    Command(command::CommandAction),
    /// Read and write files in a sandbox
    #[command(subcommand)]
    File(file::FileAction),
    /// Copy files and directories into a sandbox or out of it
    Cp(copy::CopyArgs),
    /// Show what a sandbox's entrypoint, or a background command, writes
    Logs(logs::LogsArgs),
    /// Show what sandboxes use at the moment
    Top(top::TopArgs),
    /// Tell what happens to sandboxes, as it happens
    Events(events::EventsArgs),
    /// Let ports of this machine lead to ports in a sandbox
    PortForward(forward::ForwardArgs),
    /// Look into a sandbox, by scope
    #[command(subcommand)]
    Diagnostics(devops::DiagnosticsAction),
    /// Look into a sandbox, as text
    #[command(subcommand)]
    Devops(devops::DevopsAction),
    /// Read and write the settings file
    #[command(subcommand)]
    Config(config::ConfigAction),
    /// Teach AI coding tools to use this program
    #[command(subcommand)]
    Skills(skills::SkillsAction),
    /// Templates: images prepared for starts
    #[command(subcommand)]
    Template(template::TemplateAction),
    /// Snapshots of sandboxes
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotAction),
    /// Where a sandbox may connect to (later)
    #[command(subcommand)]
    Egress(later::EgressAction),
    /// Credentials that never enter the sandbox (later)
    #[command(subcommand)]
    CredentialVault(later::VaultAction),
}

/// Finds the program that an image brings along; `None` when the image is not known.
pub type ImageCommand = fn(&str) -> anyhow::Result<Option<Vec<String>>>;

impl Action {
    /// Lets `run` without a command run the image's own.
    #[must_use]
    pub fn with_image_command(mut self, find: ImageCommand) -> Self {
        if let Self::Run(args) = &mut self {
            args.image_command = Some(find);
        }
        self
    }

    /// Exit code of a failure that is not the program's own.
    fn failure_code(&self) -> u8 {
        match self {
            Self::Run(_)
            | Self::Shell(_)
            | Self::Command(
                command::CommandAction::Run(_)
                | command::CommandAction::Session(session::SessionAction::Run { .. }),
            ) => exit::NOT_RUN,
            _ => exit::FAILURE,
        }
    }
}

/// Does what the arguments say and returns the exit code. `var` reads the environment.
pub async fn run(
    globals: &Globals,
    action: Action,
    var: impl Fn(&str) -> Option<String>,
    streams: &mut Streams,
) -> u8 {
    let failure_code = action.failure_code();
    let mut context = None;
    match dispatch(globals, action, &var, streams, &mut context).await {
        Ok(code) => code,
        // The reader of a pipe has gone: nobody is there to be told.
        Err(error) if streams::is_broken_pipe(&error) => exit::SIGNAL + signals::PIPE,
        Err(error) => {
            match &context {
                Some(context) => streams.failure(context, &error).await,
                None => streams.error(&error, streams.wants_color(globals.no_color, &var)).await,
            }
            failure_code
        }
    }
}

/// Commands that need no server come first: they work with settings that cannot be used, and start sooner.
async fn dispatch(
    globals: &Globals,
    action: Action,
    var: &impl Fn(&str) -> Option<String>,
    streams: &mut Streams,
    loaded: &mut Option<Context>,
) -> anyhow::Result<u8> {
    let action = match action {
        Action::Config(action) => return config::run(globals, action, var, streams).await,
        Action::Skills(action) => return skills::run(globals, action, var, streams).await,
        Action::Egress(action) => return Err(later::later(action.name(), "control of connections")),
        Action::CredentialVault(action) => return Err(later::later(action.name(), "the credential vault")),
        other => other,
    };
    let context = &*loaded.insert(Context::load(globals, var, streams).await?);
    match action {
        Action::Run(args) => run::run(context, args, streams).await,
        Action::Shell(args) => shell::run(context, args, streams).await,
        Action::Sandbox(action) => sandbox::run(context, action, streams).await,
        Action::Command(action) => command::run(context, action, streams).await,
        Action::File(action) => signals::undone_by(file::run(context, action, streams)).await,
        Action::Cp(args) => signals::undone_by(copy::run(context, args, streams)).await,
        Action::Logs(args) => logs::run(context, args, streams).await,
        Action::Top(args) => top::run(context, args, streams).await,
        Action::Events(args) => events::run(context, args, streams).await,
        Action::PortForward(args) => forward::run(context, args, streams).await,
        Action::Diagnostics(action) => devops::diagnostics(context, action, streams).await,
        Action::Devops(action) => devops::devops(context, action, streams).await,
        Action::Template(action) => template::run(context, action, streams).await,
        Action::Snapshot(action) => snapshot::run(context, action, streams).await,
        Action::Config(_) | Action::Skills(_) | Action::Egress(_) | Action::CredentialVault(_) => {
            Ok(exit::SUCCESS)
        }
    }
}
