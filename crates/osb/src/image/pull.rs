//! `osb image pull`.

use anyhow::{Context as _, bail};
use clap::Args;
use osb_cli::Streams;
use osb_engine::image::{HOST, LoadOptions, Reference};
use osb_registry::{Credentials, Phase, Platform, Progress, Puller};
use tokio::io::AsyncReadExt as _;
use tokio::sync::watch;

use super::meter::Meter;
use super::{CommonArgs, tell_loaded};

/// What to fetch.
#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// Name on its registry
    name: String,
    /// Another platform than this machine's
    #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
    platform: Option<Platform>,
    /// Account on the registry; its password is read by --password-stdin
    #[arg(short, long, value_name = "NAME", requires = "password_stdin")]
    username: Option<String>,
    /// Read the account's password or token from standard input
    #[arg(long, requires = "username")]
    password_stdin: bool,
    #[command(flatten)]
    common: CommonArgs,
}

pub(super) async fn run(args: PullArgs, streams: &mut Streams) -> anyhow::Result<()> {
    let credentials = match args.username {
        Some(username) => Some(Credentials { username, password: password(streams).await? }),
        None => None,
    };
    let images = args.common.images()?;
    let store = args.common.open()?;
    Reference::parse(&args.name)?;
    if store.resolve(&args.name)?.is_some_and(|image| image.reference == HOST) {
        bail!(
            "{} is built in: it shows this machine's own programs, and there is nothing to pull; use it as it is",
            args.name
        );
    }
    let name = images.target(&store, &args.name)?.to_string();
    let puller = Puller::new(images.registries)?;
    let workspace = store.workspace()?;
    let layout = workspace.path().join("layout");
    let meter = Meter::new(streams.stderr_is_terminal);
    let (sender, mut progress) = watch::channel(Progress::default());
    let known = |digest: &str| store.hold_layer(&workspace, digest);
    let pulled = {
        let pull = puller.pull(&name, args.platform.as_ref(), credentials, &layout, &known, &sender);
        let mut pull = std::pin::pin!(pull);
        loop {
            tokio::select! {
                pulled = &mut pull => break pulled,
                // The sender is ours and stays.
                _ = progress.changed() => show(&meter, *progress.borrow_and_update()),
            }
        }
    };
    meter.clear();
    // The registry's errors name the image.
    let pulled = pulled?;
    let options = LoadOptions {
        reference: Some(&name),
        called: Some(&name),
        architecture: Some(&pulled.platform.architecture),
        ..LoadOptions::default()
    };
    let loaded = store.load_with(&layout, options, &|progress| meter.show(progress));
    meter.clear();
    tell_loaded(&store, &loaded?, &args.common, streams).await
}

fn show(meter: &Meter, progress: Progress) {
    let layers = format!("layer {} of {}", progress.layers, progress.total_layers);
    match progress.phase {
        Phase::Resolving => meter.line("asking the registry", 0, 0, ""),
        Phase::Downloading | Phase::Unpacking => {
            meter.line("fetching", progress.bytes, progress.total_bytes, &layers);
        }
    }
}

/// What standard input holds, without the line end that `echo` and editors add.
async fn password(streams: &mut Streams) -> anyhow::Result<String> {
    const MOST: u64 = 64 << 10;
    if streams.stdin_is_terminal {
        bail!("--password-stdin reads the password from standard input: osb image pull … < FILE");
    }
    let mut text = String::new();
    (&mut streams.stdin)
        .take(MOST)
        .read_to_string(&mut text)
        .await
        .context("the password on standard input")?;
    let password = text.trim_end_matches(['\r', '\n']).to_owned();
    if password.is_empty() {
        bail!("there is no password on standard input");
    }
    Ok(password)
}
