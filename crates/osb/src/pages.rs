//! What the program tells of itself: completions, manual pages, help by name.

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::ValueEnum;
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

/// Shows the help of the command that `words` name, or the page about a topic.
pub(crate) fn help(words: &[String]) -> anyhow::Result<u8> {
    if let [name] = words
        && whole().find_subcommand(name).is_none()
        && let Some(page) = topic(name)
    {
        return out(page.as_bytes());
    }
    let error = asked(words);
    error.print()?;
    Ok(if error.use_stderr() { exit::USAGE } else { exit::SUCCESS })
}

/// What the parser says to `osb WORDS --help`: the help, or that there is no such command.
fn asked(words: &[String]) -> clap::Error {
    let line = std::iter::once("osb").chain(words.iter().map(String::as_str)).chain(["--help"]);
    match whole().try_get_matches_from(line) {
        Err(error) => error,
        Ok(_) => whole().error(clap::error::ErrorKind::InvalidSubcommand, "no such command"),
    }
}

/// The page about a topic.
fn topic(_name: &str) -> Option<&'static str> {
    None
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
    }
}
