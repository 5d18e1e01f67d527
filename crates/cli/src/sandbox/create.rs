//! `osb sandbox create`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use osb_client::protocol::lifecycle::{
    CreateSandboxRequest, CredentialProxyConfig, ImageAuth, ImageSpec, NetworkPolicy, Volume,
};
use osb_client::{DEFAULT_ENTRYPOINT, DEFAULT_TIMEOUT};
use serde_json::{Map, Value, json};

use super::request;
use crate::args::{OutputArg, key_value};
use crate::duration::{Lifetime, format as format_duration, parse as parse_duration, parse_lifetime};
use crate::exit;
use crate::output::Cell;
use crate::progress;
use crate::settings::Context;
use crate::streams::Streams;

/// Arguments of `sandbox create`.
#[derive(Debug, Clone, Args)]
pub struct CreateArgs {
    /// Image: a stored name, an alias, a registry reference, or host
    #[arg(short, long)]
    image: Option<String>,
    /// Name at the image's registry
    #[arg(long, value_name = "NAME", requires = "image_auth_password")]
    image_auth_username: Option<String>,
    /// Password or token at the image's registry
    #[arg(long, value_name = "PASSWORD", requires = "image_auth_username")]
    image_auth_password: Option<String>,
    /// Template to start from instead of an image
    #[arg(long, value_name = "ID", conflicts_with_all = ["image", "snapshot_id"])]
    template: Option<String>,
    /// Snapshot to start from instead of an image
    #[arg(long, value_name = "ID", conflicts_with = "image")]
    snapshot_id: Option<String>,
    /// The whole request as JSON, in the names of the API, instead of the other options
    #[arg(short, long, value_name = "FILE")]
    #[arg(conflicts_with_all = ["image", "template", "snapshot_id", "timeout", "env", "metadata", "extension"])]
    #[arg(conflicts_with_all = ["resource", "entrypoint", "network_policy_file", "credential_proxy"])]
    #[arg(conflicts_with_all = ["volumes_file", "image_auth_username", "image_auth_password"])]
    file: Option<PathBuf>,
    /// Lifetime: 30s, 10m, 1h30m, seconds, or none [default: 10m]
    #[arg(short, long, value_name = "DURATION", value_parser = parse_lifetime)]
    timeout: Option<Lifetime>,
    /// Variable; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    env: Vec<(String, String)>,
    /// Label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// Extension; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    extension: Vec<(String, String)>,
    /// Limit such as cpu=2 or memory=512Mi; may be repeated
    #[arg(long, value_name = "NAME=AMOUNT", value_parser = key_value)]
    resource: Vec<(String, String)>,
    /// Word of the entrypoint; repeat for each [default: tail -f /dev/null]
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    entrypoint: Vec<String>,
    /// Network policy as JSON
    #[arg(long, value_name = "FILE")]
    network_policy_file: Option<PathBuf>,
    /// Let the network policy's gateway put credentials into requests
    #[arg(long, requires = "network_policy_file")]
    credential_proxy: bool,
    /// Volumes as a JSON array
    #[arg(long, value_name = "FILE")]
    volumes_file: Option<PathBuf>,
    /// Do not wait until the sandbox answers
    #[arg(long)]
    skip_health_check: bool,
    /// How long the sandbox may take to answer [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    ready_timeout: Option<Duration>,
    #[command(flatten)]
    output: OutputArg,
}

pub(super) async fn run(context: &Context, args: CreateArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let (output, skip, ready) = (args.output.output, args.skip_health_check, args.ready_timeout);
    let file = args.file.clone();
    let (request, timeout) = match &file {
        Some(path) => {
            let (request, has_timeout) = request::read(path)?;
            let timeout = match request.timeout {
                _ if !has_timeout => "sdk-default".to_owned(),
                None => "manual-cleanup".to_owned(),
                Some(seconds) => format_duration(Duration::from_secs(seconds.unsigned_abs())),
            };
            (request, timeout)
        }
        None => build(context, args)?,
    };
    let source = request::source(&request);
    let mut create = context.client.create_with(request);
    if let Some(limit) = ready {
        create = create.ready_timeout(limit);
    }
    if skip {
        create = create.skip_ready_check();
    }
    let image = create.request().image.as_ref().map(|image| image.uri.clone());
    let terminal = streams.stderr_is_terminal;
    let sandbox = progress::while_pending(context, image, terminal, create.send()).await?;
    let mut shown = vec![("id", sandbox.id().to_owned()), ("status", "created".to_owned())];
    shown.push(("timeout", timeout));
    shown.extend(source);
    shown.extend(file.map(|path| ("request_file", path.display().to_string())));
    let json: Map<String, Value> =
        shown.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let properties = shown.iter().map(|(name, value)| (*name, Cell::from(value))).collect();
    context.printer(output).object(streams, properties, &json).await?;
    Ok(exit::SUCCESS)
}

/// The request that the options describe, and the lifetime in the words of this command's answer.
fn build(context: &Context, args: CreateArgs) -> anyhow::Result<(CreateSandboxRequest, String)> {
    let lifetime = args.timeout.or(context.lifetime);
    let mut request = CreateSandboxRequest {
        timeout: match lifetime {
            Some(Lifetime::For(lifetime)) => Some(i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX)),
            Some(Lifetime::Endless) => None,
            None => Some(DEFAULT_TIMEOUT.as_secs().cast_signed()),
        },
        metadata: filled(args.metadata),
        extensions: filled(args.extension),
        ..CreateSandboxRequest::default()
    };
    let timeout = match lifetime {
        None => "sdk-default".to_owned(),
        Some(Lifetime::Endless) => "manual-cleanup".to_owned(),
        Some(Lifetime::For(lifetime)) => format_duration(lifetime),
    };
    if let Some(path) = &args.network_policy_file {
        request.network_policy = Some(request::read_part::<NetworkPolicy>(path)?);
    }
    if let Some(id) = args.template {
        let shaping = [
            ("--env", !args.env.is_empty()),
            ("--resource", !args.resource.is_empty()),
            ("--entrypoint", !args.entrypoint.is_empty()),
            ("--volumes-file", args.volumes_file.is_some()),
            ("--credential-proxy", args.credential_proxy),
            ("--image-auth-username", args.image_auth_username.is_some()),
        ];
        if let Some((option, _)) = shaping.into_iter().find(|(_, given)| *given) {
            bail!("{option} does not go with --template: the template has decided that");
        }
        if lifetime == Some(Lifetime::Endless) {
            bail!("a sandbox from a template needs a lifetime: give --timeout");
        }
        request.template_id = Some(id);
        return Ok((request, timeout));
    }
    match (args.snapshot_id, args.image.or_else(|| context.image.clone())) {
        (Some(id), _) => request.snapshot_id = Some(id),
        (None, Some(uri)) => {
            let auth = args
                .image_auth_username
                .zip(args.image_auth_password)
                .map(|(username, password)| ImageAuth { username, password });
            request.image = Some(ImageSpec { uri, auth });
            request.entrypoint = Some(DEFAULT_ENTRYPOINT.map(str::to_owned).to_vec());
        }
        (None, None) => bail!("no image: give --image NAME, for instance --image host"),
    }
    if !args.entrypoint.is_empty() {
        request.entrypoint = Some(args.entrypoint);
    }
    let mut limits = request::default_limits();
    limits.extend(args.resource);
    request.resource_limits = Some(limits);
    request.env = filled(args.env.into_iter().map(|(name, value)| (name, Some(value))));
    if args.credential_proxy {
        request.credential_proxy = Some(CredentialProxyConfig { enabled: true });
    }
    if let Some(path) = &args.volumes_file {
        request.volumes = Some(request::read_part::<Vec<Volume>>(path).context("an array of volumes")?);
    }
    Ok((request, timeout))
}

fn filled<V>(pairs: impl IntoIterator<Item = (String, V)>) -> Option<std::collections::BTreeMap<String, V>> {
    let map: std::collections::BTreeMap<String, V> = pairs.into_iter().collect();
    (!map.is_empty()).then_some(map)
}
