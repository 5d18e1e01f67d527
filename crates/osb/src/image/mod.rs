//! `osb image`: the images stored on this machine. Works on the data directory, with or without a running server;
//! the API never takes paths.

mod build;
mod dockerfile;
mod meter;
mod pull;
mod show;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use osb_cli::{Format, Printer, Streams, exit};
use osb_engine::image::{ImageStore, LoadOptions, Loaded, Options, Prune, Removed};
use osb_runtime_embedded::Images;
use osb_server::config::{Config, Env};

use meter::Meter;

/// What to do with images.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageAction {
    /// Store an image: an archive (docker save, OCI, root file system) or a directory
    ///
    /// Examples: `osb image load app.tar`, `docker save app | osb image load -`,
    /// `osb image load --name base:12 rootfs.tar.zst`
    Load {
        /// Archive or directory; `-` is an archive on standard input
        path: PathBuf,
        /// Name to store it under, when the archive has none or another
        #[arg(long, value_name = "REFERENCE")]
        name: Option<String>,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Fetch an image from a registry
    ///
    /// Accounts come from --username, the server's configuration or Docker's; layers that are stored are not fetched
    /// again, and a fetch that was broken off goes on where it ended.
    ///
    /// Examples: `osb image pull python:3.12`,
    /// `osb image pull --username me --password-stdin registry.example.com/team/app:v1 < token`
    Pull(pull::PullArgs),
    /// Make an image of a root file system, another image or a Dockerfile
    ///
    /// PATH is a directory or an archive, as for `load`, and the options change how it is run; or a directory with a
    /// Dockerfile, which buildah or docker executes.
    ///
    /// Examples: `osb image build rootfs --name base:12 --env LANG=C.UTF-8 --workdir /srv`,
    /// `osb image build . --name app:1`, `osb image build -f ci.Dockerfile . --name ci --build-arg V=3`
    Build(Box<build::BuildArgs>),
    /// List stored images
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Show an image's configuration, layers and sandboxes
    Inspect {
        /// Name, alias, or the beginning of an id
        name: String,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Remove names, and with its last name an image
    ///
    /// An image that sandboxes run of is refused.
    Rm {
        /// Names, or beginnings of ids
        #[arg(required = true)]
        names: Vec<String>,
        /// Remove names also while sandboxes run of the image; its layers go when they have ended
        #[arg(short, long)]
        force: bool,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Delete what is not needed
    ///
    /// Without options: layers that no image needs. Sandboxes never lose what they run on.
    ///
    /// Examples: `osb image prune`, `osb image prune --all`, `osb image prune --until 7d --dry-run`
    Prune {
        /// Also images that no sandbox runs of
        #[arg(short, long)]
        all: bool,
        /// Also images that were not used for so long: 12h, 7d
        #[arg(long, value_name = "DURATION", value_parser = age)]
        until: Option<Duration>,
        /// Only say what would be deleted
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// List other names of images, or make NAME stand for TARGET
    ///
    /// `repository:*` stands for all its tags. Example: `osb image alias 'team/code:*' code:3`
    Alias {
        /// The other name
        #[arg(requires = "target_or_rm")]
        name: Option<String>,
        /// The name it stands for
        #[arg(group = "target_or_rm")]
        target: Option<String>,
        /// Remove the other name
        #[arg(long, group = "target_or_rm", requires = "name")]
        rm: bool,
        #[command(flatten)]
        common: CommonArgs,
    },
}

/// Options of all image commands.
#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// The server's configuration file, which names the data directory
    #[arg(long, value_name = "FILE", conflicts_with = "data_dir")]
    config: Option<PathBuf>,
    /// Data directory of the server [default: as the server's configuration says]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// Forms of output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Columns for people
    #[default]
    Table,
    /// One JSON document for programs
    Json,
    /// The same as YAML
    Yaml,
    /// Names alone, one a line
    Raw,
}

impl CommonArgs {
    fn config(&self) -> anyhow::Result<Config> {
        crate::server::read_config(self.config.as_deref(), &Env::of_process())
    }

    fn open(&self) -> anyhow::Result<ImageStore> {
        let (data_dir, options) = match &self.data_dir {
            Some(dir) => (dir.clone(), Options::default()),
            None => {
                let embedded = self.config()?.embedded;
                let options = Options {
                    aliases: embedded.image_aliases,
                    max_disk: embedded.images.max_disk.map(|bytes| bytes.0),
                    ..Options::default()
                };
                (embedded.data_dir, options)
            }
        };
        if !rustix::process::geteuid().is_root() {
            anyhow::bail!("images belong to root: run it with sudo");
        }
        ImageStore::open_with(&data_dir, options)
            .with_context(|| format!("image store in {}", data_dir.display()))
    }

    /// Where images come from.
    fn images(&self) -> anyhow::Result<Images> {
        match &self.data_dir {
            Some(dir) => Ok(Images::stored_only(dir)),
            None => crate::server::image_settings(&self.config()?.embedded),
        }
    }

    fn printer(&self, streams: &Streams) -> Printer {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let format = match self.output {
            Output::Json => Format::Json,
            Output::Yaml => Format::Yaml,
            Output::Table | Output::Raw => Format::Table,
        };
        Printer { format, color: streams.stdout_is_terminal && !no_color }
    }

    fn is_raw(&self) -> bool {
        self.output == Output::Raw
    }
}

pub(crate) async fn run(action: ImageAction, streams: &mut Streams) -> anyhow::Result<u8> {
    match action {
        ImageAction::Load { path, name, common } => {
            let store = common.open()?;
            let is_stdin = path.as_os_str() == "-";
            let path = if is_stdin { PathBuf::from("/dev/stdin") } else { path };
            let options = LoadOptions {
                reference: name.as_deref(),
                called: is_stdin.then_some("standard input"),
                ..LoadOptions::default()
            };
            let meter = Meter::new(streams.stderr_is_terminal);
            let loaded = store.load_with(&path, options, &|progress| meter.show(progress));
            meter.clear();
            // Its messages name the file.
            tell_loaded(&store, &loaded?, &common, streams).await?;
        }
        ImageAction::Pull(args) => pull::run(args, streams).await?,
        ImageAction::Build(args) => build::run(*args, streams).await?,
        ImageAction::List { common } => {
            let store = common.open()?;
            show::list(&store, &store.list()?, &common, streams).await?;
        }
        ImageAction::Inspect { name, common } => {
            let store = common.open()?;
            let image = store.inspect(&name)?;
            show::inspect(&store, &image, &common, streams).await?;
        }
        ImageAction::Rm { names, force, common } => {
            let store = common.open()?;
            let mut removed = Removed::default();
            for name in &names {
                let this = store.remove(name, force)?;
                removed.names.extend(this.names);
                removed.images.extend(this.images);
                removed.layers += this.layers;
                removed.bytes += this.bytes;
                // What the last one found still in use is all of it.
                (removed.kept, removed.kept_bytes) = (this.kept, this.kept_bytes);
            }
            show::removed(&removed, false, &common, streams).await?;
        }
        ImageAction::Prune { all, until, dry_run, common } => {
            let which = match (until, all) {
                (Some(age), _) => Prune::UnusedFor(age),
                (None, true) => Prune::Unused,
                (None, false) => Prune::Dangling,
            };
            let removed = common.open()?.prune(which, dry_run)?;
            show::removed(&removed, dry_run, &common, streams).await?;
        }
        ImageAction::Alias { name, target, rm, common } => {
            let store = common.open()?;
            match (name, target) {
                (Some(name), Some(target)) => {
                    store.set_alias(&name, &target)?;
                    let printer = common.printer(streams);
                    printer.done(streams, &format!("{name} stands for {target}")).await?;
                    if store.resolve(&target)?.is_none() {
                        streams.note(&format!("there is no image {target} yet")).await;
                    }
                }
                (Some(name), None) if rm => {
                    store.remove_alias(&name)?;
                    common.printer(streams).done(streams, &format!("alias removed: {name}")).await?;
                }
                _ => show::aliases(&store, &common, streams).await?,
            }
        }
    }
    Ok(exit::SUCCESS)
}

async fn tell_loaded(
    store: &ImageStore,
    loaded: &Loaded,
    common: &CommonArgs,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    for warning in &loaded.warnings {
        streams.note(warning).await;
    }
    show::list(store, &loaded.images, common, streams).await
}

/// A duration with a unit: `90m`, `12h`, `7d`, `1d12h`.
fn age(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is no duration; use 90m, 12h or 7d");
    let mut seconds: u64 = 0;
    let mut number = None::<u64>;
    for c in text.trim().chars() {
        if let Some(digit) = c.to_digit(10) {
            let more = number.unwrap_or(0).checked_mul(10).and_then(|n| n.checked_add(digit.into()));
            number = Some(more.ok_or_else(wrong)?);
            continue;
        }
        let factor = match c {
            'd' => 86_400,
            'h' => 3_600,
            'm' => 60,
            's' => 1,
            _ => return Err(wrong()),
        };
        let more = number.take().and_then(|n| n.checked_mul(factor)).and_then(|n| n.checked_add(seconds));
        seconds = more.ok_or_else(wrong)?;
    }
    match number {
        None if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units() {
        let seconds = |text: &str| age(text).map(|age| age.as_secs());
        assert_eq!(seconds("7d"), Ok(604_800));
        assert_eq!(seconds("1d12h"), Ok(129_600));
        assert_eq!(seconds("90m"), Ok(5_400));
        for wrong in
            ["", "7", "d", "0h", "1w", "-1h", "1h30", "99999999999999999999d", "9999999999999999999d"]
        {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
