//! What the program tells of itself: completions, manual pages, help by name.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, bail};
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

/// Shows the help of the command that `words` name, or the page about a topic.
pub(crate) fn help(words: &[String]) -> anyhow::Result<u8> {
    let mut root = whole();
    root.build();
    if let [name] = words
        && root.find_subcommand(name).is_none()
        && let Some(page) = topic(name)
    {
        return out(page.as_bytes());
    }
    let mut command = &root;
    for word in words {
        command = match command.find_subcommand(word) {
            Some(below) => below,
            None => bail!("{}", unknown(command, word)),
        };
    }
    let help = command.clone().render_long_help();
    if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        return out(help.ansi().to_string().as_bytes());
    }
    out(help.to_string().as_bytes())
}

/// The page about a topic.
fn topic(_name: &str) -> Option<&'static str> {
    None
}

fn unknown(command: &Command, word: &str) -> String {
    let name = command.get_bin_name().unwrap_or("osb");
    let known: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    match known.is_empty() {
        true => format!("`{name}` has no command '{word}'"),
        false => format!("`{name}` has no command '{word}'; it has: {}", known.join(", ")),
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
    fn words_that_name_nothing_are_answered_with_what_there_is() {
        let error = help(&["sandbox".to_owned(), "mkae".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("`osb sandbox` has no command 'mkae'; it has: create, list"), "{error}");
    }
}
