//! `osb`: one program, several roles. It tells them apart by the name it is called under and by its first
//! argument, and hands over.

mod execd;
mod image;
mod logging;
mod purge;
mod server;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use osb_cli::{Globals, Streams, exit};

/// Sandboxes for programs that nobody has read.
///
/// Exit codes: 0 success, 1 failure, 2 wrong command line. `run` and `command run` pass the program's own code on
/// (128 + signal when a signal ended it), 127 when it cannot be executed, and 125 when it was not run or its end is
/// not known.
#[derive(Debug, Parser)]
#[command(name = "osb", version, disable_help_subcommand = true)]
struct Osb {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    role: Role,
}

#[allow(clippy::large_enum_variant, reason = "there is one of it")]
#[derive(Debug, Subcommand)]
enum Role {
    #[command(flatten)]
    Client(osb_cli::Action),
    /// Images stored on this machine
    #[command(disable_help_flag = true)]
    Image(Rest),
    /// Serve the API
    #[command(disable_help_flag = true)]
    Server(Rest),
}

/// Arguments of a role that has a command line of its own: it knows nothing of connections. Here the role is only
/// listed; `main` looks at the first argument before this is parsed.
#[derive(Debug, Args)]
struct Rest {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    rest: Vec<OsString>,
}

/// Images stored on this machine, with or without a running server.
#[derive(Debug, Parser)]
#[command(name = "osb image", version, disable_help_subcommand = true)]
struct OsbImage {
    #[command(subcommand)]
    action: image::ImageAction,
}

/// Serve the API.
#[derive(Debug, Parser)]
#[command(name = "osb server", version)]
struct OsbServer {
    #[command(flatten)]
    server: server::ServerArgs,
}

/// The command line of a program named `opensandbox-server`.
#[derive(Debug, Parser)]
#[command(name = "opensandbox-server", version, args_conflicts_with_subcommands = true)]
struct OpensandboxServer {
    #[command(flatten)]
    server: server::ServerArgs,
    /// Accepted and without effect
    #[arg(long)]
    reload: bool,
    #[command(subcommand)]
    action: Option<ServerAction>,
}

#[derive(Debug, Subcommand)]
enum ServerAction {
    /// Write a configuration file (not in this version)
    InitConfig(Rest),
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    // Helpers clone themselves into sandboxes and must not have a second thread: before everything else.
    if let Some(code) = args.get(1).and_then(|role| role.to_str()).and_then(osb_engine::helper_main) {
        return code;
    }
    // Fails only when a provider is installed already, and then there is one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    if called_as(args.first().map(OsString::as_os_str)) == "opensandbox-server" {
        return opensandbox_server(OpensandboxServer::parse_from(args));
    }
    match args.get(1).and_then(|role| role.to_str()) {
        Some("server") => serve(OsbServer::parse_from(&args[1..]).server),
        Some("image") => {
            let action = OsbImage::parse_from(&args[1..]).action;
            client(|mut streams| async move {
                image::run(action, &mut streams).await.unwrap_or_else(|error| failure(&error))
            })
        }
        _ => match Osb::parse_from(args) {
            Osb { globals, role: Role::Client(action) } => client(|mut streams| async move {
                let var = |name: &str| std::env::var(name).ok();
                osb_cli::run(&globals, action, var, &mut streams).await
            }),
            Osb { role: Role::Image(_) | Role::Server(_), .. } => {
                failure(&anyhow::anyhow!("connection options do not go with this command: put it first"));
                ExitCode::from(exit::USAGE)
            }
        },
    }
}

fn serve(args: server::ServerArgs) -> ExitCode {
    ExitCode::from(server::run(args).unwrap_or_else(|error| failure(&error)))
}

fn opensandbox_server(args: OpensandboxServer) -> ExitCode {
    if let Some(ServerAction::InitConfig(_)) = args.action {
        return ExitCode::from(failure(&anyhow::anyhow!(
            "init-config is not in this version; the server runs without a file, and docs/configuration.md lists all keys"
        )));
    }
    serve(args.server)
}

/// The last part of the name that this program was called under.
fn called_as(name: Option<&OsStr>) -> String {
    name.map(Path::new)
        .and_then(Path::file_name)
        .map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}

/// Runs a client command. One thread suffices, and starts sooner than several.
fn client<F, R>(run: F) -> ExitCode
where
    F: FnOnce(Streams) -> R,
    R: Future<Output = u8>,
{
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return ExitCode::from(failure(&error.into())),
    };
    let code = runtime.block_on(async { run(Streams::standard()).await });
    // A thread may still wait for standard input; the process need not.
    runtime.shutdown_background();
    ExitCode::from(code)
}

/// Says what went wrong, in one line.
fn failure(error: &anyhow::Error) -> u8 {
    use std::io::Write as _;
    // Standard error may be closed; there is no other place to say so.
    let _ = writeln!(std::io::stderr(), "error: {}", osb_cli::printable(&told(error)));
    exit::FAILURE
}

/// An error and its causes; a cause that the text before it already tells is not told again.
fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once() {
        let io = || std::io::Error::other("disk is gone");
        assert_eq!(told(&anyhow::Error::new(io()).context("read it: disk is gone")), "read it: disk is gone");
        assert_eq!(told(&anyhow::Error::new(io()).context("read it")), "read it: disk is gone");
    }

    #[test]
    fn command_lines_are_well_formed() {
        <Osb as clap::CommandFactory>::command().debug_assert();
        <OsbImage as clap::CommandFactory>::command().debug_assert();
        <OsbServer as clap::CommandFactory>::command().debug_assert();
        <OpensandboxServer as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn the_name_decides_the_role() {
        assert_eq!(called_as(Some(OsStr::new("/usr/bin/opensandbox-server"))), "opensandbox-server");
        assert_eq!(called_as(Some(OsStr::new("osb"))), "osb");
        assert_eq!(called_as(None), "");
    }
}
