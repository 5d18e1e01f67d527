//! `osb image build`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use osb_cli::Streams;
use osb_engine::image::{ConfigChange, LoadOptions};

use super::dockerfile;
use super::meter::Meter;
use super::{CommonArgs, tell_loaded};

/// What to build, and how the result is run.
#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// Directory or archive
    path: PathBuf,
    /// Name of the new image
    #[arg(short = 't', long, value_name = "REFERENCE", visible_alias = "tag")]
    name: String,
    /// Dockerfile to execute [default: Dockerfile or Containerfile in PATH]
    #[arg(short, long, value_name = "FILE", help_heading = "Dockerfile")]
    file: Option<PathBuf>,
    /// Argument of the Dockerfile
    #[arg(long, value_name = "NAME=VALUE", help_heading = "Dockerfile")]
    build_arg: Vec<String>,
    /// Stage of the Dockerfile to stop at
    #[arg(long, value_name = "STAGE", help_heading = "Dockerfile")]
    target: Option<String>,
    /// Variable of the image, may be repeated
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair, help_heading = "Configuration")]
    env: Vec<(String, String)>,
    /// Directory that commands start in
    #[arg(short, long, value_name = "DIR", value_parser = absolute, help_heading = "Configuration")]
    workdir: Option<String>,
    /// User and perhaps group that commands run as
    #[arg(short, long, value_name = "USER[:GROUP]", help_heading = "Configuration")]
    user: Option<String>,
    /// First words of the image's command, as a JSON list or as words between blanks
    #[arg(long, value_name = "WORDS", value_parser = words, help_heading = "Configuration")]
    entrypoint: Option<Words>,
    /// Further words of the image's command
    #[arg(
        long, value_name = "WORDS", value_parser = words, allow_hyphen_values = true, help_heading = "Configuration"
    )]
    cmd: Option<Words>,
    /// Label, may be repeated
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = pair, help_heading = "Configuration")]
    label: Vec<(String, String)>,
    /// Port that the image's program listens on, may be repeated
    #[arg(long, value_name = "PORT[/tcp|udp]", value_parser = port, help_heading = "Configuration")]
    expose: Vec<String>,
    /// Directory meant for data, may be repeated
    #[arg(long, value_name = "DIR", value_parser = absolute, help_heading = "Configuration")]
    volume: Vec<String>,
    /// Signal that asks the image's program to end
    #[arg(long, value_name = "SIGNAL", value_parser = signal, help_heading = "Configuration")]
    stop_signal: Option<String>,
    #[command(flatten)]
    common: CommonArgs,
}

/// The words of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Words(Vec<String>);

impl BuildArgs {
    fn change(&self) -> ConfigChange {
        ConfigChange {
            env: self.env.clone(),
            workdir: self.workdir.clone(),
            user: self.user.clone(),
            entrypoint: self.entrypoint.clone().map(|Words(words)| words),
            cmd: self.cmd.clone().map(|Words(words)| words),
            labels: self.label.iter().cloned().collect::<BTreeMap<_, _>>(),
            exposed_ports: self.expose.clone(),
            volumes: self.volume.clone(),
            stop_signal: self.stop_signal.clone(),
        }
    }

    /// The Dockerfile to execute, if that is what is meant.
    fn dockerfile(&self) -> anyhow::Result<Option<PathBuf>> {
        if let Some(file) = &self.file {
            if !file.is_file() {
                bail!("there is no Dockerfile {}", file.display());
            }
            return Ok(Some(file.clone()));
        }
        if !self.path.is_dir() {
            return Ok(None);
        }
        let found = ["Dockerfile", "Containerfile"].map(|name| self.path.join(name));
        Ok(found.into_iter().find(|file| file.is_file()))
    }
}

pub(super) async fn run(args: BuildArgs, streams: &mut Streams) -> anyhow::Result<()> {
    let change = args.change();
    let dockerfile = args.dockerfile()?;
    if dockerfile.is_none() && (!args.build_arg.is_empty() || args.target.is_some()) {
        bail!(
            "--build-arg and --target belong to a Dockerfile, and {} has none; name it by --file",
            args.path.display()
        );
    }
    let store = args.common.open()?;
    let workspace = store.workspace()?;
    let built = match &dockerfile {
        Some(file) => {
            let archive = workspace.path().join("built.tar");
            let job = dockerfile::Job {
                file,
                context: &args.path,
                build_args: &args.build_arg,
                target: args.target.as_deref(),
                archive: &archive,
            };
            job.run()?;
            archive
        }
        None => args.path.clone(),
    };
    let built_by = dockerfile.as_ref().map(|file| format!("the image of {}", file.display()));
    let options = LoadOptions {
        reference: Some(&args.name),
        called: built_by.as_deref(),
        change: Some(&change),
        ..LoadOptions::default()
    };
    let meter = Meter::new(streams.stderr_is_terminal);
    let loaded = store.load_with(&built, options, &|progress| meter.show(progress));
    meter.clear();
    tell_loaded(&store, &loaded?, &args.common, streams).await
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !text.contains('\0') => Ok((name.into(), value.into())),
        _ => Err(format!("'{text}' is not NAME=VALUE")),
    }
}

fn absolute(text: &str) -> Result<String, String> {
    let plain =
        Path::new(text).is_absolute() && !Path::new(text).components().any(|part| part.as_os_str() == "..");
    if plain { Ok(text.into()) } else { Err(format!("'{text}' is no absolute path inside the image")) }
}

fn words(text: &str) -> Result<Words, String> {
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text)
            .map(Words)
            .map_err(|error| format!("no JSON list of words: {error}"));
    }
    let words: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    if words.iter().any(|word| word.contains(['"', '\'', '\\'])) {
        return Err("quoted words are given as a JSON list: [\"sh\", \"-c\", \"echo a b\"]".into());
    }
    Ok(Words(words))
}

fn port(text: &str) -> Result<String, String> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    match port.parse::<u16>() {
        Ok(number) if number > 0 && matches!(protocol, "tcp" | "udp" | "sctp") => {
            Ok(format!("{number}/{protocol}"))
        }
        _ => Err(format!("'{text}' is no port; use 8080 or 53/udp")),
    }
}

fn signal(text: &str) -> Result<String, String> {
    let name = text.strip_prefix("SIG").unwrap_or(text);
    let number = name.parse::<u8>().is_ok_and(|number| (1..=64).contains(&number));
    let named = !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b"+-".contains(&b));
    if number || (named && !name.starts_with(|c: char| c.is_ascii_digit())) {
        Ok(if number { name.into() } else { format!("SIG{name}") })
    } else {
        Err(format!("'{text}' is no signal; use SIGTERM or 15"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_command_may_begin_with_hyphens() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: BuildArgs,
        }
        for (word, read) in [("--version", vec!["--version"]), ("-m http.server", vec!["-m", "http.server"])]
        {
            let line = ["build", "root", "--cmd", word, "--name", "own:1"];
            let args = <Line as clap::Parser>::try_parse_from(line).unwrap().args;
            assert_eq!(args.cmd.unwrap().0, read);
            assert_eq!(args.name, "own:1");
        }
    }

    #[test]
    fn values_are_read_strictly() {
        assert_eq!(pair("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert!(pair("A").is_err() && pair("=b").is_err());
        assert_eq!(absolute("/a/b"), Ok("/a/b".into()));
        assert!(absolute("a").is_err() && absolute("/a/../b").is_err());
        let list = |words: &[&str]| Words(words.iter().map(|word| (*word).to_owned()).collect());
        assert_eq!(words("python -m http.server"), Ok(list(&["python", "-m", "http.server"])));
        assert_eq!(words(r#"["sh", "-c", "echo a b"]"#), Ok(list(&["sh", "-c", "echo a b"])));
        assert_eq!(words(""), Ok(list(&[])));
        assert!(words("sh -c 'a b'").is_err() && words("[1]").is_err());
        assert_eq!(port("80"), Ok("80/tcp".into()));
        assert_eq!(port("53/udp"), Ok("53/udp".into()));
        assert!(port("0").is_err() && port("70000").is_err() && port("1/x").is_err());
        assert_eq!(signal("INT"), Ok("SIGINT".into()));
        assert_eq!(signal("SIGRTMIN+3"), Ok("SIGRTMIN+3".into()));
        assert_eq!(signal("9"), Ok("9".into()));
        assert!(signal("99").is_err() && signal("").is_err() && signal("a b").is_err());
    }
}
