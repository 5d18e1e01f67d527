//! `osb`: one program, several roles. It tells them apart by the name it is called under and by its first
//! argument, and hands over.

mod execd;
mod guard;
mod image;
mod image_command;
mod init_config;
mod logging;
mod pages;
mod purge;
mod server;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, ColorChoice, Command, CommandFactory as _, Parser, Subcommand};
use osb_cli::{Globals, Streams, exit};

/// Isolated machines for programs that nobody has read
#[derive(Debug, Parser)]
// Said twice, an option means what it says last, as in the official program.
#[command(name = "osb", version, disable_help_subcommand = true, args_override_self = true)]
#[command(after_help = pages::after_help())]
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
    /// Write completions for a shell
    Completions {
        /// Which shell
        shell: pages::Shell,
    },
    /// Write manual pages, one for each command
    Man {
        /// Directory for the pages; is made
        #[arg(value_name = "DIR")]
        directory: std::path::PathBuf,
    },
    /// Show the help of a command, or a page about a topic
    Help {
        /// Words of the command, or the topic
        #[arg(value_name = "WORD")]
        words: Vec<String>,
    },
}

/// Arguments of a role that has a command line of its own: it knows nothing of connections. Here the role is only
/// listed; `main` looks at the first argument before this is parsed.
#[derive(Debug, Args)]
struct Rest {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    rest: Vec<OsString>,
}

/// Images stored on this machine, with or without a running server
#[derive(Debug, Parser)]
#[command(name = "image", version, disable_help_subcommand = true)]
struct OsbImage {
    #[command(subcommand)]
    action: image::ImageAction,
}

/// Serve the API
#[derive(Debug, Parser)]
#[command(name = "server", version, args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct OsbServer {
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
    /// Write a configuration file in which every key is explained
    InitConfig(init_config::InitConfigArgs),
    /// Move snapshots to another store (later)
    #[command(disable_help_flag = true)]
    MigrateSnapshots(Rest),
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    // Helpers clone themselves into sandboxes and must not have a second thread: before everything else.
    if let Some(code) = args.get(1).and_then(|role| role.to_str()).and_then(osb_engine::helper_main) {
        return code;
    }
    if called_as(args.first().map(OsString::as_os_str)) == "opensandbox-server" {
        return serve(parse(OsbServer::command().name("opensandbox-server"), args));
    }
    match args.get(1).and_then(|role| role.to_str()) {
        Some("server") => serve(parse(part("server"), args.into_iter().skip(1).collect())),
        Some("image") => {
            let OsbImage { action } = parse(part("image"), args.into_iter().skip(1).collect());
            install_cryptography();
            client(|mut streams| async move {
                image::run(action, &mut streams).await.unwrap_or_else(|error| failure(&error))
            })
        }
        _ => osb(parse(osb_cli::with_examples(Osb::command()), args)),
    }
}

fn osb(Osb { globals, role }: Osb) -> ExitCode {
    let done = match role {
        Role::Client(action) => {
            install_cryptography();
            let action = action.with_image_command(image_command::of);
            return client(|mut streams| async move {
                let var = |name: &str| std::env::var(name).ok();
                osb_cli::run(&globals, action, var, &mut streams).await
            });
        }
        Role::Image(_) | Role::Server(_) => {
            failure(&anyhow::anyhow!("connection options do not go with this command: put it first"));
            return ExitCode::from(exit::USAGE);
        }
        Role::Completions { shell } => pages::completions(shell),
        Role::Man { directory } => pages::manual(&directory),
        Role::Help { words } => pages::help(&words),
    };
    ExitCode::from(done.unwrap_or_else(|error| failure(&error)))
}

/// The whole program as one tree, for pages and completions.
fn whole() -> Command {
    let tree = Osb::command()
        .mut_subcommand("image", |_| OsbImage::command())
        .mut_subcommand("server", |_| OsbServer::command());
    osb_cli::with_examples(tree)
}

/// One role of the tree as a program of its own.
fn part(name: &str) -> Command {
    let tree = match name {
        "image" => OsbImage::command(),
        _ => OsbServer::command(),
    };
    let within = Command::new("osb").subcommand(tree);
    let within = osb_cli::with_examples(within);
    within.find_subcommand(name).cloned().unwrap_or_else(OsbServer::command).bin_name(format!("osb {name}"))
}

/// Parses a command line, or says what is wrong with it and ends.
fn parse<T: clap::FromArgMatches>(command: Command, args: Vec<OsString>) -> T {
    let plain = args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--no-color");
    let mut command = if plain { command.color(ColorChoice::Never) } else { command };
    let parsed = command.try_get_matches_from_mut(args).and_then(|matches| T::from_arg_matches(&matches));
    match parsed {
        Ok(parsed) => parsed,
        Err(error) if error.kind() == ErrorKind::DisplayVersion => {
            use std::io::Write as _;
            // In the words of the protocol's own client.
            let _ = writeln!(std::io::stdout(), "opensandbox, version {}", env!("CARGO_PKG_VERSION"));
            std::process::exit(i32::from(exit::SUCCESS))
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            use std::io::Write as _;
            // A group without a command shows what it has; that is no mistake.
            let _ = write!(std::io::stdout(), "{}", error.render());
            std::process::exit(i32::from(exit::SUCCESS))
        }
        Err(error) => error.format(&mut command).exit(),
    }
}

/// Fails only when a provider is installed already, and then there is one.
fn install_cryptography() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

fn serve(args: OsbServer) -> ExitCode {
    install_cryptography();
    let done = match args.action {
        None => server::run(args.server),
        Some(ServerAction::InitConfig(args)) => return ExitCode::from(init_config::run(&args)),
        Some(ServerAction::MigrateSnapshots(_)) => {
            Err(anyhow::anyhow!("`migrate-snapshots` comes later: snapshots are not in this version"))
        }
    };
    ExitCode::from(done.unwrap_or_else(|error| failure(&error)))
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
        whole().debug_assert();
        part("image").debug_assert();
        part("server").debug_assert();
    }

    /// Whether a help text has an example, and every example is a command line that is taken.
    #[test]
    fn every_command_has_examples_and_they_are_right() {
        fn leaves(command: &Command, path: &str, missing: &mut Vec<String>) {
            for sub in command.get_subcommands() {
                leaves(sub, &format!("{path} {}", sub.get_name()), missing);
            }
            let help = command.clone().render_long_help().to_string();
            let later = command.get_name() == "migrate-snapshots";
            if !command.has_subcommands() && !help.contains("Example") && !later {
                missing.push(path.to_owned());
            }
        }
        let mut missing = Vec::new();
        leaves(&whole(), "osb", &mut missing);
        assert!(missing.is_empty(), "{missing:?}");
        for words in osb_cli::command_lines() {
            let taken = whole().try_get_matches_from(&words);
            assert!(taken.is_ok(), "{words:?}: {}", taken.unwrap_err());
        }
    }

    /// The help of every client command, without the options that all have.
    #[test]
    fn help_texts_are_as_reviewed() {
        fn add(command: &Command, path: &str, text: &mut String) {
            let help = command.clone().bin_name(path).render_help().to_string();
            let mut global = false;
            text.push_str(&format!("===== {path}\n"));
            for line in help.lines() {
                // Headings stand at the left.
                if !line.starts_with(' ') && !line.is_empty() {
                    global = line == "Global options:";
                }
                if !global && !line.contains("Print help") {
                    text.push_str(&format!("{}\n", line.trim_end()));
                }
            }
            for sub in command.get_subcommands() {
                add(sub, &format!("{path} {}", sub.get_name()), text);
            }
        }
        let mut text = String::new();
        let mut root = osb_cli::with_examples(Osb::command());
        root.build();
        for sub in root.get_subcommands().filter(|sub| !["image", "server"].contains(&sub.get_name())) {
            add(sub, &format!("osb {}", sub.get_name()), &mut text);
        }
        insta::assert_snapshot!("help", text);
    }

    #[test]
    fn the_name_decides_the_role() {
        assert_eq!(called_as(Some(OsStr::new("/usr/bin/opensandbox-server"))), "opensandbox-server");
        assert_eq!(called_as(Some(OsStr::new("osb"))), "osb");
        assert_eq!(called_as(None), "");
    }
}
