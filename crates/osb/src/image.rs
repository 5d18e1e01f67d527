//! `osb image`: the images stored on this machine. Works on the data directory, with or without a running server;
//! the API never takes paths.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use osb_cli::{Cell, Format, Printer, Streams, exit};
use osb_engine::image::{Image, ImageStore, Options, Progress};
use osb_server::config::Env;
use serde_json::{Value, json};

/// What to do with images.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageAction {
    /// Store an image: an archive (docker save, OCI, root file system) or a directory
    Load {
        /// Archive or directory
        path: PathBuf,
        /// Name to store it under, when the archive has none or another
        #[arg(long, value_name = "REFERENCE")]
        name: Option<String>,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// List stored images
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Show an image's configuration and layers
    Inspect {
        /// Name, alias, or the beginning of an id
        name: String,
        #[command(flatten)]
        common: CommonArgs,
    },
    /// Remove a name, and with its last name the image
    Rm {
        /// Name, or the beginning of an id
        name: String,
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
    output: Format,
}

impl CommonArgs {
    fn open(&self) -> anyhow::Result<ImageStore> {
        let (data_dir, aliases) = match &self.data_dir {
            Some(dir) => (dir.clone(), std::collections::BTreeMap::new()),
            None => {
                let config = crate::server::read_config(self.config.as_deref(), &Env::of_process())?;
                (config.embedded.data_dir, config.embedded.image_aliases)
            }
        };
        ImageStore::open_with(&data_dir, Options { aliases, ..Options::default() })
            .with_context(|| format!("image store in {}", data_dir.display()))
    }

    fn printer(&self, streams: &Streams) -> Printer {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Printer { format: self.output, color: streams.stdout_is_terminal && !no_color }
    }
}

pub(crate) async fn run(action: ImageAction, streams: &mut Streams) -> anyhow::Result<u8> {
    match action {
        ImageAction::Load { path, name, common } => {
            let store = common.open()?;
            let printer = common.printer(streams);
            let meter = Meter::new(streams.stderr_is_terminal);
            let loaded = store.load(&path, name.as_deref(), &|progress| meter.show(progress));
            meter.clear();
            let loaded = loaded.with_context(|| path.display().to_string())?;
            for warning in &loaded.warnings {
                streams.note(warning).await;
            }
            let images: Vec<&Image> = loaded.images.iter().map(AsRef::as_ref).collect();
            list(&images, printer, streams).await?;
        }
        ImageAction::List { common } => {
            let images = common.open()?.list()?;
            let images: Vec<&Image> = images.iter().map(AsRef::as_ref).collect();
            list(&images, common.printer(streams), streams).await?;
        }
        ImageAction::Inspect { name, common } => {
            let image = common.open()?.inspect(&name)?;
            let config = &image.config;
            let properties = vec![
                ("name", Cell::from(&image.reference)),
                ("id", Cell::from(&image.id)),
                ("size", Cell::from(size_in_words(image.size_bytes))),
                ("created", Cell::optional(image.created)),
                ("platform", Cell::from(format!("{}/{}", config.os, config.architecture))),
                ("user", Cell::optional(config.user.as_ref())),
                ("workdir", Cell::optional(config.workdir.as_ref())),
                ("entrypoint", Cell::from(config.entrypoint.join(" "))),
                ("cmd", Cell::from(config.cmd.join(" "))),
            ];
            common.printer(streams).object(streams, properties, &to_json(&image)).await?;
        }
        ImageAction::Rm { name, common } => {
            // Which sandboxes run is the server's to know: it deletes layers that are in use when they no longer are.
            let removed = common.open()?.remove(&name, &|_: &Path| true)?;
            let what = if removed.image { "image removed" } else { "name removed" };
            common.printer(streams).done(streams, &format!("{what}: {name}")).await?;
        }
    }
    Ok(exit::SUCCESS)
}

async fn list(images: &[&Image], printer: Printer, streams: &mut Streams) -> anyhow::Result<()> {
    let rows = images
        .iter()
        .map(|image| {
            vec![
                Cell::from(&image.reference),
                Cell::from(short_id(&image.id)),
                Cell::from(size_in_words(image.size_bytes)),
                Cell::optional(image.created),
            ]
        })
        .collect();
    let json: Vec<Value> = images.iter().map(|image| to_json(image)).collect();
    printer.list(streams, &["name", "id", "size", "created"], rows, &json).await
}

fn to_json(image: &Image) -> Value {
    json!({
        "name": image.reference,
        "id": image.id,
        "size_bytes": image.size_bytes,
        "created": image.created.map(|at| at.to_string()),
        "config": image.config,
        "layers": image.roots.iter().flat_map(|root| &root.lowers).collect::<Vec<_>>(),
    })
}

fn short_id(id: &str) -> &str {
    let hex = id.strip_prefix("sha256:").unwrap_or(id);
    hex.get(..12).unwrap_or(hex)
}

fn size_in_words(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss)] // Shown with one digit.
    let mut amount = bytes as f64;
    for unit in ["B", "KiB", "MiB"] {
        if amount < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{amount:.1} {unit}") };
        }
        amount /= 1024.0;
    }
    format!("{amount:.1} GiB")
}

/// A line on the terminal that says how far a load is.
struct Meter {
    enabled: bool,
    last_percent: Mutex<u64>,
}

impl Meter {
    fn new(enabled: bool) -> Self {
        Self { enabled, last_percent: Mutex::new(u64::MAX) }
    }

    /// Called from several threads, many times a second: writes only when the figure changes.
    fn show(&self, progress: Progress) {
        if !self.enabled || progress.total_bytes == 0 {
            return;
        }
        let percent = progress.bytes.saturating_mul(100) / progress.total_bytes;
        let mut last = self.last_percent.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *last != percent {
            *last = percent;
            write_err(&format!(
                "\r\x1b[Kloading: {percent} %, layer {} of {}",
                progress.layers, progress.total_layers
            ));
        }
    }

    fn clear(&self) {
        if self.enabled {
            write_err("\r\x1b[K");
        }
    }
}

fn write_err(text: &str) {
    use std::io::Write as _;
    // A terminal that is gone needs no progress.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ids_are_short() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")]
        {
            assert_eq!(size_in_words(bytes), text);
        }
        assert_eq!(short_id("sha256:0123456789abcdef"), "0123456789ab");
        assert_eq!(short_id("host"), "host");
    }
}
