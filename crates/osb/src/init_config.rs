//! `osb server init-config`: a configuration file in which every key is explained, made from the page about them.

use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use osb_cli::exit;
use osb_server::config::Env;

/// The page, which is itself made from the types.
const PAGE: &str = include_str!("../../../docs/configuration.md");

/// Arguments of `init-config`.
#[derive(Debug, Args)]
pub(crate) struct InitConfigArgs {
    /// File to write [default: ~/.sandbox.toml]
    path: Option<PathBuf>,
    /// A file for this runtime instead
    #[arg(long, value_enum)]
    example: Option<Example>,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

/// Files for other runtimes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Example {
    /// Docker
    Docker,
    /// Docker, explained in Chinese
    DockerZh,
    /// Kubernetes
    K8s,
    /// Kubernetes, explained in Chinese
    K8sZh,
}

/// Writes the file. What goes wrong is said on standard output, as scripts expect of this command.
pub(crate) fn run(args: &InitConfigArgs) -> u8 {
    let (text, code) = match write(args) {
        Ok(path) => (format!("configuration written: {}", path.display()), exit::SUCCESS),
        Err(error) => (format!("error: {error:#}"), exit::FAILURE),
    };
    // Standard output may be closed; the exit code remains.
    let _ = writeln!(std::io::stdout(), "{}", osb_cli::printable(&text));
    code
}

fn write(args: &InitConfigArgs) -> anyhow::Result<PathBuf> {
    if args.example.is_some() {
        anyhow::bail!(
            "--example comes later: the docker and kubernetes runtimes are not in this version; without it the file is for the embedded one"
        );
    }
    let env = Env::of_process();
    let path = match &args.path {
        Some(path) => env.expand(&path.to_string_lossy()),
        None => env.expand("~/.sandbox.toml"),
    };
    let named = |error: std::io::Error| anyhow::anyhow!("{}: {error}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(named)?;
    }
    let text = skeleton(PAGE);
    if args.force {
        replace(&path, &text).map_err(named)?;
        return Ok(path);
    }
    // It will hold a key: its owner's alone.
    let made = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    match made {
        Ok(mut file) => file.write_all(text.as_bytes()).map_err(named)?,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            anyhow::bail!("{} exists; --force replaces it", path.display())
        }
        Err(error) => return Err(named(error)),
    }
    Ok(path)
}

fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let partial = PathBuf::from(name);
    let written = (|| {
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        file.write_all(text.as_bytes())?;
        std::fs::rename(&partial, path)
    })();
    if written.is_err() {
        // The first failure is the one to tell.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

/// A file with every section and key of the page: what has a default is commented out with it.
fn skeleton(page: &str) -> String {
    let mut text = "# Configuration of the server. What is commented out has the value shown, or none.\n\
                    # `osb server --check` reads this file without starting anything.\n\
                    \n[runtime]\ntype = \"embedded\"\n"
        .to_owned();
    for line in page.lines() {
        if let Some(section) = line.strip_prefix("## `[").and_then(|rest| rest.strip_suffix("]`")) {
            // A name in quotes stands for any number of sections.
            let comment = if section.contains('"') { "# " } else { "" };
            text.push_str(&format!("\n{comment}[{section}]\n"));
        } else if let Some(key) = Key::read(line) {
            if !key.meaning.is_empty() {
                text.push_str(&format!("# {}\n", key.meaning));
            }
            text.push_str(&format!("# {} = {}\n", key.name, key.value()));
        } else if line.starts_with("## ") {
            // What follows are examples for people.
            break;
        }
    }
    text
}

/// A row of a table of the page.
struct Key<'a> {
    name: &'a str,
    default: &'a str,
    meaning: String,
}

impl<'a> Key<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let cells: Vec<&str> = line.strip_prefix("| `")?.trim_end_matches(" |").splitn(3, " | ").collect();
        let [name, default, meaning] = cells[..] else { return None };
        let name = name.strip_suffix('`')?;
        Some(Self { name, default, meaning: meaning.replace('`', "") })
    }

    /// The default as TOML.
    fn value(&self) -> String {
        let bare = self.default.trim_matches('`');
        match bare {
            "–" | "" => "\"\"".to_owned(),
            "empty" => "[]".to_owned(),
            "true" | "false" => bare.to_owned(),
            number if number.parse::<i64>().is_ok() && !self.default.starts_with('`') => number.to_owned(),
            text => format!("{text:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use osb_server::config::Config;

    #[test]
    fn the_skeleton_is_a_file_that_the_server_takes() {
        let text = skeleton(PAGE);
        let (_, warnings) = Config::parse(&text, &Env::default()).unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        for word in
            ["[server]\n", "# port = 8080\n", "[embedded]\n", "# data_dir = \"/var/lib/opensandbox\"\n"]
        {
            assert!(text.contains(word), "{text}");
        }
        assert!(!text.contains("change-me"), "{text}");
    }

    /// Every key that is shown exists: with its comment mark taken away none is unknown.
    #[test]
    fn every_key_is_known() {
        let text = skeleton(PAGE);
        let set: String = text
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(rest) if rest.split_once(" = ").is_some_and(|(key, _)| !key.contains([' ', '.'])) => {
                    format!("{rest}\n")
                }
                Some(_) => "\n".to_owned(),
                None => format!("{line}\n"),
            })
            .collect();
        // Empty placeholders are no values; all else about the keys is right.
        match Config::parse(&set, &Env::default()) {
            Ok((_, warnings)) => {
                assert!(!warnings.iter().any(|text| text.contains("unknown")), "{warnings:?}");
            }
            Err(error) => assert!(!error.to_string().contains("valid TOML"), "{error}\n{set}"),
        }
    }
}
