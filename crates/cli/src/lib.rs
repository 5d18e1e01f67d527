//! The client commands of `osb`: what a person at a terminal, or a script, does with sandboxes.
//!
//! Arguments are parsed into one struct per command; each command is one file that maps them to calls of
//! `osb_client` and prints the answer. Nothing here knows how sandboxes are made.

mod command;
mod duration;
mod file;
mod output;
mod run;
mod sandbox;
mod settings;
mod signals;
mod streams;

use clap::{Args, Subcommand};

pub use output::{Cell, Format, Printer, Row, printable};
pub use streams::Streams;

use settings::Context;

/// Exit codes. Those of commands that ran in a sandbox are passed on as they are.
pub mod exit {
    /// All went well.
    pub const SUCCESS: u8 = 0;
    /// Something failed; standard error says what.
    pub const FAILURE: u8 = 1;
    /// The command line is not right.
    pub const USAGE: u8 = 2;
    /// `run` and `command run`: the failure is not the program's; it was not started or its end is not known.
    pub const NOT_RUN: u8 = 125;
    /// The program cannot be executed.
    pub const NOT_FOUND: u8 = 127;
    /// Added to the number of the signal that ended `osb`, or the program.
    pub const SIGNAL: u8 = 128;
}

/// Options of every client command.
#[derive(Debug, Clone, Default, Args)]
pub struct Globals {
    /// API key [env: OPEN_SANDBOX_API_KEY]
    #[arg(long, global = true, value_name = "KEY", help_heading = "Connection")]
    pub api_key: Option<String>,
    /// Server as host:port, with or without http:// [env: OPEN_SANDBOX_DOMAIN] [default: localhost:8080]
    #[arg(long, global = true, value_name = "HOST:PORT", help_heading = "Connection")]
    pub domain: Option<String>,
    /// http or https [env: OPEN_SANDBOX_PROTOCOL] [default: http]
    #[arg(long, global = true, value_name = "SCHEME", help_heading = "Connection")]
    pub protocol: Option<String>,
    /// Time limit of ordinary calls [env: OPEN_SANDBOX_REQUEST_TIMEOUT] [default: 30]
    #[arg(long, global = true, value_name = "SECONDS", help_heading = "Connection")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout: Option<u64>,
    /// Reach sandboxes through the server (the default) [env: OPEN_SANDBOX_USE_SERVER_PROXY]
    #[arg(long, global = true, overrides_with = "no_use_server_proxy", help_heading = "Connection")]
    pub use_server_proxy: bool,
    /// Reach sandboxes at addresses of their own
    #[arg(long, global = true, help_heading = "Connection")]
    pub no_use_server_proxy: bool,
    /// Settings file [default: ~/.opensandbox/config.toml]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Connection")]
    pub config: Option<std::path::PathBuf>,
    /// Never colour output
    #[arg(long, global = true)]
    pub no_color: bool,
}

/// The client commands.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// Run a program in a new sandbox and delete the sandbox afterwards
    Run(run::RunArgs),
    /// Make, list and end sandboxes
    #[command(subcommand, visible_alias = "sb")]
    Sandbox(sandbox::SandboxAction),
    /// Run commands in a sandbox
    #[command(subcommand)]
    Command(command::CommandAction),
    /// Read and write files in a sandbox
    #[command(subcommand)]
    File(file::FileAction),
}

impl Action {
    /// Exit code of a failure that is not the program's own.
    fn failure_code(&self) -> u8 {
        match self {
            Self::Run(_) | Self::Command(command::CommandAction::Run(_)) => exit::NOT_RUN,
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
    let context = match Context::load(globals, &var, streams) {
        Ok(context) => context,
        Err(error) => {
            streams.error(&error, streams.wants_color(globals.no_color, &var)).await;
            return failure_code;
        }
    };
    let result = match action {
        Action::Run(args) => run::run(&context, args, streams).await,
        Action::Sandbox(action) => sandbox::run(&context, action, streams).await,
        Action::Command(action) => command::run(&context, action, streams).await,
        Action::File(action) => file::run(&context, action, streams).await,
    };
    match result {
        Ok(code) => code,
        // The reader of a pipe has gone: nobody is there to be told.
        Err(error) if streams::is_broken_pipe(&error) => exit::SIGNAL + signals::PIPE,
        Err(error) => {
            streams.error(&error, context.color_errors).await;
            failure_code
        }
    }
}
