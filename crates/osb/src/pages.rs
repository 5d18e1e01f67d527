//! What the program tells of itself: completions, manual pages, help by name.

mod text;
mod topics;

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::{Command, ValueEnum};
use osb_cli::exit;

use crate::whole;

/// Shells that completions are written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    /// Bash
    Bash,
    /// Zsh
    Zsh,
    /// fish
    Fish,
}

/// Writes a shell's completions to standard output.
pub(crate) fn completions(shell: Shell) -> anyhow::Result<u8> {
    let generator = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut text = Vec::new();
    clap_complete::generate(generator, &mut whole(), "osb", &mut text);
    out(&text)
}

/// Writes `osb.1`, `osb-sandbox.1`, `osb-sandbox-create.1` and so on.
pub(crate) fn manual(directory: &Path) -> anyhow::Result<u8> {
    let failed = || directory.display().to_string();
    std::fs::create_dir_all(directory).with_context(failed)?;
    clap_mangen::generate_to(whole(), directory).with_context(failed)?;
    Ok(exit::SUCCESS)
}

/// What stands below the help of the whole program.
pub(crate) fn after_help() -> String {
    format!("{}\n{}", topics::list(), exit::help())
}

/// Shows the help of the command that `words` name, or the page about a topic or an error's code.
pub(crate) fn help(words: &[String]) -> anyhow::Result<u8> {
    if let [name] = words
        && whole().find_subcommand(name).is_none()
        && let Some(page) = page(name)
    {
        return out(page.as_bytes());
    }
    let error = asked(words);
    error.print()?;
    if !error.use_stderr() {
        return Ok(exit::SUCCESS);
    }
    if words.len() == 1 {
        // Standard error may be closed; there is no other place to say so.
        let _ = write!(std::io::stderr(), "\n{}", topics::list());
    }
    Ok(exit::USAGE)
}

/// The page that one word stands for.
fn page(name: &str) -> Option<String> {
    topics::find(name).map(topics::Topic::text).or_else(|| topics::error_code(name))
}

/// What the parser says to `osb WORDS --help`: the help, or that there is no such command.
fn asked(words: &[String]) -> clap::Error {
    // A topic is no command, but may be what a misspelt word means.
    let known = topics::TOPICS.iter().map(|topic| Command::new(topic.name).hide(true));
    let tree = if words.len() == 1 { whole().subcommands(known) } else { whole() };
    let line = std::iter::once("osb").chain(words.iter().map(String::as_str)).chain(["--help"]);
    match tree.try_get_matches_from(line) {
        Err(error) => error,
        Ok(_) => whole().error(clap::error::ErrorKind::InvalidSubcommand, "no such command"),
    }
}

fn out(bytes: &[u8]) -> anyhow::Result<u8> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(exit::SUCCESS),
        // Whoever reads has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(exit::SUCCESS),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_know_all_commands() {
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut whole(), "osb", &mut text);
            let text = String::from_utf8(text).unwrap();
            for word in ["port-forward", "skip-health-check", "init-config", "inspect"] {
                assert!(text.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn there_is_a_page_for_every_command() {
        let dir = tempfile::tempdir().unwrap();
        manual(dir.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(page("osb.1").contains("Exit codes"));
        let create = page("osb-sandbox-create.1");
        assert!(create.contains("skip\\-health\\-check") && create.contains("Examples"), "{create}");
        assert!(dir.path().join("osb-server-init-config.1").exists());
    }

    #[test]
    fn help_is_that_of_the_option_and_mistakes_get_a_hint() {
        let said = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let error = asked(&words);
            (error.use_stderr(), error.to_string())
        };
        let (wrong, text) = said(&["sandbox", "create"]);
        assert!(!wrong && text.contains("Usage: osb sandbox create") && text.contains("Examples:"), "{text}");
        let (wrong, text) = said(&["sandbox", "craete"]);
        assert!(wrong && text.contains("'create'"), "{text}");
        assert!(said(&["server", "init-config"]).1.contains("Usage: osb server init-config"));
        let (wrong, text) = said(&["isolatoin"]);
        assert!(wrong && text.contains("'isolation'"), "{text}");
        let (wrong, text) = said(&["imagse"]);
        assert!(wrong && text.contains("'image'") && text.contains("'images'"), "{text}");
    }

    #[test]
    fn topics_do_not_hide_commands_and_are_listed() {
        let help = asked(&[]).to_string();
        for topic in &topics::TOPICS {
            assert!(whole().find_subcommand(topic.name).is_none(), "{}", topic.name);
            assert!(help.contains(&format!("\n  {} ", topic.name)), "{help}");
        }
        assert!(page("Images").is_some() && page("FILE_NOT_FOUND").is_some() && page("nothing").is_none());
    }
}
