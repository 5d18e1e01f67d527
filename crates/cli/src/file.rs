//! `osb file`: files in a sandbox.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use osb_client::{Download, FileInfo, Permission, Rename, Replacement, Upload};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::exit;
use crate::output::{Cell, Format};
use crate::sandbox::SandboxArg;
use crate::settings::Context;
use crate::streams::Streams;

/// What to do with files.
#[derive(Debug, Clone, Subcommand)]
pub enum FileAction {
    /// Write a file to standard output
    Cat {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// File in the sandbox
        path: String,
    },
    /// Write text, or standard input, to a file
    Write {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// File in the sandbox; missing directories are made
        path: String,
        /// The text; without it standard input is read
        #[arg(short, long)]
        content: Option<String>,
        #[command(flatten)]
        access: AccessArgs,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Copy a local file into the sandbox
    Upload {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Local file
        local: PathBuf,
        /// File in the sandbox; missing directories are made
        remote: String,
        #[command(flatten)]
        access: AccessArgs,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Copy a file out of the sandbox
    Download {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// File in the sandbox
        remote: String,
        /// Local file, replaced only when all has come; - is standard output
        local: PathBuf,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// List a directory
    Ls {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Directory in the sandbox
        path: String,
        /// Levels to go down
        #[arg(long, default_value_t = 1)]
        depth: u32,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Remove files
    Rm {
        #[command(flatten)]
        paths: PathsArgs,
    },
    /// Remove directories with all they hold
    Rmdir {
        #[command(flatten)]
        paths: PathsArgs,
    },
    /// Make directories and what is missing above them
    Mkdir {
        #[command(flatten)]
        paths: PathsArgs,
        #[command(flatten)]
        access: AccessArgs,
    },
    /// Move or rename a file
    Mv {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Existing path
        source: String,
        /// New path; must not exist
        destination: String,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Find files by name
    Search {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Directory to look in
        path: String,
        /// Glob such as *.txt
        #[arg(short, long)]
        pattern: String,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Show size, owner, mode and times
    Info {
        #[command(flatten)]
        paths: PathsArgs,
    },
    /// Set mode and owner
    Chmod {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Path in the sandbox
        path: String,
        /// Octal digits such as 644
        #[arg(long, value_parser = parse_mode)]
        mode: u32,
        /// Name or number
        #[arg(long)]
        owner: Option<String>,
        /// Name or number
        #[arg(long)]
        group: Option<String>,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Replace text in a file, everywhere it stands
    Replace {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// File in the sandbox
        path: String,
        /// Text to look for
        #[arg(long, allow_hyphen_values = true)]
        old: String,
        /// Text to put there
        #[arg(long, allow_hyphen_values = true)]
        new: String,
        /// Form of the output
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
}

/// Several paths of one sandbox.
#[derive(Debug, Clone, Args)]
pub struct PathsArgs {
    #[command(flatten)]
    sandbox: SandboxArg,
    /// Paths in the sandbox
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Mode and owner of what is made.
#[derive(Debug, Clone, Args)]
pub struct AccessArgs {
    /// Octal digits such as 644
    #[arg(long, value_parser = parse_mode)]
    mode: Option<u32>,
    /// Name or number
    #[arg(long)]
    owner: Option<String>,
    /// Name or number
    #[arg(long)]
    group: Option<String>,
}

impl AccessArgs {
    fn apply(self, mut upload: Upload) -> Upload {
        if let Some(mode) = self.mode {
            upload = upload.mode(mode);
        }
        if let Some(owner) = self.owner {
            upload = upload.owner(owner);
        }
        if let Some(group) = self.group {
            upload = upload.group(group);
        }
        upload
    }

    fn permission(self) -> Permission {
        let mode = self.mode.map_or(0, osb_client::mode_digits);
        Permission { mode, owner: self.owner, group: self.group }
    }
}

/// Permission bits from their octal digits.
fn parse_mode(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    match u32::from_str_radix(digits, 8) {
        Ok(mode) if (1..=0o777).contains(&mode) => Ok(mode),
        _ => Err(format!("'{text}' is no mode; use octal digits such as 644")),
    }
}

pub(crate) async fn run(context: &Context, action: FileAction, streams: &mut Streams) -> anyhow::Result<u8> {
    match action {
        FileAction::Cat { sandbox, path } => {
            let sandbox = sandbox.handle(context);
            to_stdout(sandbox.files().download(&path).await?, streams).await?;
        }
        FileAction::Write { sandbox, path, content, access, output } => {
            let content = match content {
                Some(text) => text.into_bytes(),
                None => {
                    let mut bytes = Vec::new();
                    streams.stdin.read_to_end(&mut bytes).await.context("standard input")?;
                    bytes
                }
            };
            let upload = access.apply(Upload::new(&path, content));
            sandbox.handle(context).files().upload([upload]).await?;
            context.printer(output).done(streams, &format!("written: {path}")).await?;
        }
        FileAction::Upload { sandbox, local, remote, access, output } => {
            let upload = access.apply(Upload::file(&remote, &local).await?);
            sandbox.handle(context).files().upload([upload]).await?;
            let message = format!("uploaded: {} to {remote}", local.display());
            context.printer(output).done(streams, &message).await?;
        }
        FileAction::Download { sandbox, remote, local, output } => {
            let download = sandbox.handle(context).files().download(&remote).await?;
            if local == Path::new("-") || local == Path::new("/dev/stdout") {
                to_stdout(download, streams).await?;
            } else {
                to_file(download, &local).await.with_context(|| local.display().to_string())?;
                let message = format!("downloaded: {remote} to {}", local.display());
                context.printer(output).done(streams, &message).await?;
            }
        }
        FileAction::Ls { sandbox, path, depth, output } => {
            let entries = sandbox.handle(context).files().list(&path, depth).await?;
            entries_out(context, output, &entries, streams).await?;
        }
        FileAction::Search { sandbox, path, pattern, output } => {
            let entries = sandbox.handle(context).files().search(&path, &pattern).await?;
            entries_out(context, output, &entries, streams).await?;
        }
        FileAction::Info { paths: PathsArgs { sandbox, paths, output } } => {
            let mut infos = sandbox.handle(context).files().info(&paths).await?;
            // In the order asked for.
            let entries: Vec<FileInfo> = paths.iter().filter_map(|path| infos.remove(path)).collect();
            entries_out(context, output, &entries, streams).await?;
        }
        FileAction::Rm { paths: PathsArgs { sandbox, paths, output } } => {
            sandbox.handle(context).files().remove(&paths).await?;
            paths_out(context, output, &paths, "deleted", streams).await?;
        }
        FileAction::Rmdir { paths: PathsArgs { sandbox, paths, output } } => {
            sandbox.handle(context).files().remove_directories(&paths).await?;
            paths_out(context, output, &paths, "deleted", streams).await?;
        }
        FileAction::Mkdir { paths: PathsArgs { sandbox, paths, output }, access } => {
            let permission = access.permission();
            let directories: BTreeMap<String, Permission> =
                paths.iter().map(|path| (path.clone(), permission.clone())).collect();
            sandbox.handle(context).files().make_directories(&directories).await?;
            paths_out(context, output, &paths, "created", streams).await?;
        }
        FileAction::Mv { sandbox, source, destination, output } => {
            let message = format!("moved: {source} to {destination}");
            sandbox.handle(context).files().rename(&[Rename { src: source, dest: destination }]).await?;
            context.printer(output).done(streams, &message).await?;
        }
        FileAction::Chmod { sandbox, path, mode, owner, group, output } => {
            let permission = AccessArgs { mode: Some(mode), owner, group }.permission();
            let message = format!("permissions set: {path}");
            sandbox.handle(context).files().set_permissions(&BTreeMap::from([(path, permission)])).await?;
            context.printer(output).done(streams, &message).await?;
        }
        FileAction::Replace { sandbox, path, old, new, output } => {
            let change = BTreeMap::from([(path.clone(), Replacement { old, new })]);
            let counts = sandbox.handle(context).files().replace(&change).await?;
            let count = counts.get(&path).copied().unwrap_or(0);
            let properties = vec![("path", Cell::from(&path)), ("replaced_count", Cell::from(count))];
            let json = json!({"path": path, "replaced_count": count});
            context.printer(output).object(streams, properties, &json).await?;
        }
    }
    Ok(exit::SUCCESS)
}

async fn to_stdout(mut download: Download, streams: &mut Streams) -> anyhow::Result<()> {
    while let Some(chunk) = download.chunk().await? {
        streams.stdout.write_all(&chunk).await?;
    }
    Ok(streams.stdout.flush().await?)
}

/// Writes beside the target and renames, so that the target is either as before or complete. An existing
/// file's mode stays. What is not a regular file (a pipe, a device) is written to directly.
async fn to_file(mut download: Download, target: &Path) -> anyhow::Result<()> {
    let existing = match tokio::fs::metadata(target).await {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    if existing.as_ref().is_some_and(std::fs::Metadata::is_dir) {
        anyhow::bail!("is a directory; name the file");
    }
    if existing.as_ref().is_some_and(|metadata| !metadata.is_file()) {
        let mut file = tokio::fs::OpenOptions::new().write(true).open(target).await?;
        return copy(&mut download, &mut file).await;
    }
    let name = target.file_name().context("is no file name")?.to_string_lossy().into_owned();
    let partial = target.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let mut file = tokio::fs::OpenOptions::new().write(true).create_new(true).open(&partial).await?;
    let result = async {
        if let Some(metadata) = existing {
            file.set_permissions(metadata.permissions()).await?;
        }
        copy(&mut download, &mut file).await?;
        Ok(tokio::fs::rename(&partial, target).await?)
    }
    .await;
    if result.is_err() {
        // The first failure is the one to tell.
        let _ = tokio::fs::remove_file(&partial).await;
    }
    result
}

async fn copy(download: &mut Download, file: &mut tokio::fs::File) -> anyhow::Result<()> {
    while let Some(chunk) = download.chunk().await? {
        file.write_all(&chunk).await?;
    }
    Ok(file.flush().await?)
}

async fn entries_out(
    context: &Context,
    output: Format,
    entries: &[FileInfo],
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let kind = |entry: &FileInfo| format!("{:?}", entry.kind).to_lowercase();
    let rows = entries
        .iter()
        .map(|entry| {
            vec![
                Cell::from(&entry.path),
                Cell::from(kind(entry)),
                Cell::from(entry.size),
                Cell::from(entry.mode),
                Cell::from(&entry.owner),
                Cell::from(&entry.group),
                Cell::from(&entry.modified_at),
            ]
        })
        .collect();
    let headings = ["path", "type", "size", "mode", "owner", "group", "modified_at"];
    context.printer(output).list(streams, &headings, rows, &entries).await
}

async fn paths_out(
    context: &Context,
    output: Format,
    paths: &[String],
    status: &str,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let rows = paths.iter().map(|path| vec![Cell::from(path), Cell::from(status)]).collect();
    let json: Vec<_> = paths.iter().map(|path| json!({"path": path, "status": status})).collect();
    context.printer(output).list(streams, &["path", "status"], rows, &json).await
}

#[cfg(test)]
mod tests {
    use super::parse_mode;

    #[test]
    fn modes() {
        assert_eq!(parse_mode("644"), Ok(0o644));
        assert_eq!(parse_mode("0755"), Ok(0o755));
        assert_eq!(parse_mode("0o700"), Ok(0o700));
        for bad in ["", "8", "1777", "rw", "-1", "0"] {
            assert!(parse_mode(bad).is_err(), "{bad}");
        }
    }
}
