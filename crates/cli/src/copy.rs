//! `osb cp`: files and trees between here and a sandbox.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use osb_client::{FileKind, Sandbox};

use crate::args::OutputArg;
use crate::exit;
use crate::settings::Context;
use crate::streams::Streams;
use crate::transfer::{self, Access, Moved};

/// Arguments of `cp`.
#[derive(Debug, Clone, Args)]
pub struct CopyArgs {
    /// What to copy: a local path, or SANDBOX_ID:PATH
    #[arg(value_name = "SOURCE")]
    source: String,
    /// Where to: a local path, or SANDBOX_ID:PATH; into it when it is a directory
    #[arg(value_name = "DESTINATION")]
    destination: String,
    /// Accepted and without effect: directories are always copied with all they hold
    #[arg(short, long, hide = true)]
    recursive: bool,
    #[command(flatten)]
    output: OutputArg,
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side<'a> {
    Here(&'a Path),
    Sandbox(&'a str, &'a str),
}

/// A colon behind a bare word begins a path in a sandbox; `./a:b` is a local name.
fn side(text: &str) -> Side<'_> {
    match text.split_once(':') {
        Some((id, path)) if !id.is_empty() && !id.contains('/') && id != "." && id != ".." => {
            Side::Sandbox(id, path)
        }
        _ => Side::Here(Path::new(text)),
    }
}

pub(crate) async fn run(context: &Context, args: CopyArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let moved = match (side(&args.source), side(&args.destination)) {
        (Side::Here(local), Side::Sandbox(id, remote)) => {
            upload_into(&context.sandbox(id), local, remote, streams).await?
        }
        (Side::Sandbox(id, remote), Side::Here(local)) => {
            download_into(&context.sandbox(id), remote, local, streams).await?
        }
        (Side::Here(_), Side::Here(_)) => bail!("neither side is in a sandbox: write SANDBOX_ID:PATH"),
        (Side::Sandbox(..), Side::Sandbox(..)) => bail!("one side has to be a local path"),
    };
    moved.note_skipped(streams).await;
    let message = format!("copied: {} to {}: {}", args.source, args.destination, moved.told());
    context.printer(args.output.output).done(streams, &message).await?;
    Ok(exit::SUCCESS)
}

/// Copies to `remote`, or into it when it is a directory.
pub(crate) async fn upload_into(
    sandbox: &Sandbox,
    local: &Path,
    remote: &str,
    streams: &Streams,
) -> anyhow::Result<Moved> {
    if !remote.starts_with('/') {
        bail!("'{remote}' is no place in a sandbox: paths there begin with /");
    }
    let into = remote.ends_with('/') || is_directory(sandbox, remote).await?;
    let remote = if into && !transfer::means_content(local) {
        let local = std::path::absolute(local)?;
        let name = local.file_name().with_context(|| format!("{} has no name", local.display()))?;
        let name = name.to_str().with_context(|| format!("{}: not UTF-8", local.display()))?;
        transfer::joined(remote, name)
    } else {
        remote.to_owned()
    };
    transfer::upload(sandbox, local, &remote, true, &Access::default(), streams).await
}

/// Copies to `local`, or into it when it is a directory.
pub(crate) async fn download_into(
    sandbox: &Sandbox,
    remote: &str,
    local: &Path,
    streams: &Streams,
) -> anyhow::Result<Moved> {
    if !remote.starts_with('/') {
        bail!("'{remote}' is no place in a sandbox: paths there begin with /");
    }
    let bytes = local.as_os_str().as_encoded_bytes();
    let into = local.is_dir() || bytes.ends_with(b"/");
    let content = transfer::means_content(Path::new(remote));
    let source = if content { remote.trim_end_matches('.') } else { remote };
    let source = match source.trim_end_matches('/') {
        "" => "/",
        trimmed => trimmed,
    };
    let target: PathBuf = match Path::new(source).file_name() {
        Some(name) if into && !content => local.join(name),
        _ => local.to_owned(),
    };
    transfer::download(sandbox, source, &target, true, streams).await
}

async fn is_directory(sandbox: &Sandbox, path: &str) -> anyhow::Result<bool> {
    match sandbox.files().info(&[path]).await {
        Ok(infos) => Ok(infos.values().any(|info| info.kind == FileKind::Directory)),
        // There is no such file, or no such sandbox: the copy will tell.
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides() {
        assert_eq!(side("abc:/x"), Side::Sandbox("abc", "/x"));
        assert_eq!(side("abc:/x:y"), Side::Sandbox("abc", "/x:y"));
        for local in ["/abc:/x", "./a:b", "a/b:c", "abc", ":x", "."] {
            assert_eq!(side(local), Side::Here(Path::new(local)), "{local}");
        }
    }
}
