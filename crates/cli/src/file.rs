//! `osb file`: files in a sandbox.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use osb_client::{FileInfo, Permission, Rename, Replacement, Sandbox, Upload};
use serde_json::json;
use tokio::io::AsyncReadExt as _;

use crate::args::{OnlyRawArg, OutputArg, SandboxArg};
use crate::exit;
use crate::output::Cell;
use crate::settings::Context;
use crate::streams::Streams;
use crate::transfer::{self, Access};

/// What to do with files.
#[derive(Debug, Clone, Subcommand)]
pub enum FileAction {
    /// Write a file to standard output
    Cat {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// File in the sandbox
        path: String,
        #[command(flatten)]
        encoding: EncodingArg,
        #[command(flatten)]
        output: OnlyRawArg,
    },
    /// Write text, or standard input, to a file
    Write {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// File in the sandbox; missing directories are made
        path: String,
        /// The text; without it standard input is read
        #[arg(short, long)]
        #[arg(allow_hyphen_values = true)]
        content: Option<String>,
        #[command(flatten)]
        encoding: EncodingArg,
        #[command(flatten)]
        access: AccessArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Copy a local file, or with -r a directory, into the sandbox
    Upload {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// Local file or directory
        #[arg(value_name = "LOCAL_PATH")]
        local: PathBuf,
        /// Its path in the sandbox; missing directories are made
        #[arg(value_name = "REMOTE_PATH")]
        remote: String,
        /// Copy a directory with all it holds
        #[arg(short, long)]
        recursive: bool,
        #[command(flatten)]
        access: AccessArgs,
        #[command(flatten)]
        output: OutputArg,
    },
    /// Copy a file, or with -r a directory, out of the sandbox
    Download {
        #[command(flatten)]
        sandbox: SandboxArg,
        /// File or directory in the sandbox
        #[arg(value_name = "REMOTE_PATH")]
        remote: String,
        /// Local path, replaced only when all has come; - is standard output
        #[arg(value_name = "LOCAL_PATH")]
        local: PathBuf,
        /// Copy a directory with all it holds
        #[arg(short, long)]
        recursive: bool,
        #[command(flatten)]
        output: OutputArg,
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
        #[command(flatten)]
        output: OutputArg,
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
        #[command(flatten)]
        output: OutputArg,
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
        #[command(flatten)]
        output: OutputArg,
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
        #[command(flatten)]
        output: OutputArg,
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
        #[command(flatten)]
        output: OutputArg,
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
    #[command(flatten)]
    output: OutputArg,
}

/// `--encoding`: bytes are passed on as they are, which is right for UTF-8.
#[derive(Debug, Clone, Args)]
pub struct EncodingArg {
    /// utf-8; other encodings are not converted
    #[arg(long, value_name = "NAME", value_parser = parse_encoding)]
    encoding: Option<()>,
}

fn parse_encoding(text: &str) -> Result<(), String> {
    match text.to_ascii_lowercase().replace('_', "-").as_str() {
        "utf-8" | "utf8" | "ascii" | "us-ascii" => Ok(()),
        _ => Err("text is passed on as it is; use utf-8, and convert with iconv".to_owned()),
    }
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

impl From<AccessArgs> for Access {
    fn from(args: AccessArgs) -> Self {
        Self { mode: args.mode, owner: args.owner, group: args.group }
    }
}

fn permission(access: Access) -> Permission {
    let mode = access.mode.map_or(0, osb_client::mode_digits);
    Permission { mode, owner: access.owner, group: access.group }
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
        FileAction::Cat { sandbox, path, .. } => {
            let sandbox = sandbox.handle(context);
            let download = match sandbox.files().download(&path).await {
                Ok(download) => download,
                Err(error) => return Err(unreadable(&sandbox, &path, error).await),
            };
            match streams.stdout_is_terminal {
                true => transfer::to_terminal(download, &path, streams).await?,
                false => transfer::to_stdout(download, streams).await?,
            }
        }
        FileAction::Write { sandbox, path, content, access, output, .. } => {
            let content = match content {
                Some(text) => text.into_bytes(),
                None => {
                    let mut bytes = Vec::new();
                    streams.stdin.read_to_end(&mut bytes).await.context("standard input")?;
                    bytes
                }
            };
            let upload = Access::from(access).apply(Upload::new(&path, content));
            sandbox.handle(context).files().upload([upload]).await?;
            context.printer(output.output).done(streams, &format!("written: {path}")).await?;
        }
        FileAction::Upload { sandbox, local, remote, recursive, access, output } => {
            let sandbox = sandbox.handle(context);
            let access = Access::from(access);
            let moved = transfer::upload(&sandbox, &local, &remote, recursive, &access, streams).await?;
            moved.note_skipped(streams).await;
            let what = if recursive { format!(": {}", moved.told()) } else { String::new() };
            let message = format!("uploaded: {} to {remote}{what}", local.display());
            context.printer(output.output).done(streams, &message).await?;
        }
        FileAction::Download { sandbox, remote, local, recursive, output } => {
            let sandbox = sandbox.handle(context);
            if local == Path::new("-") || local == Path::new("/dev/stdout") {
                transfer::to_stdout(sandbox.files().download(&remote).await?, streams).await?;
                return Ok(exit::SUCCESS);
            }
            let moved = transfer::download(&sandbox, &remote, &local, recursive, streams).await?;
            moved.note_skipped(streams).await;
            let what = if recursive { format!(": {}", moved.told()) } else { String::new() };
            let message = format!("downloaded: {remote} to {}{what}", local.display());
            context.printer(output.output).done(streams, &message).await?;
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
            let permission = permission(access.into());
            let directories: BTreeMap<String, Permission> =
                paths.iter().map(|path| (path.clone(), permission.clone())).collect();
            sandbox.handle(context).files().make_directories(&directories).await?;
            paths_out(context, output, &paths, "created", streams).await?;
        }
        FileAction::Mv { sandbox, source, destination, output } => {
            let message = format!("moved: {source} to {destination}");
            sandbox.handle(context).files().rename(&[Rename { src: source, dest: destination }]).await?;
            context.printer(output.output).done(streams, &message).await?;
        }
        FileAction::Chmod { sandbox, path, mode, owner, group, output } => {
            let permission = permission(Access { mode: Some(mode), owner, group });
            let message = format!("permissions set: {path}");
            sandbox.handle(context).files().set_permissions(&BTreeMap::from([(path, permission)])).await?;
            context.printer(output.output).done(streams, &message).await?;
        }
        FileAction::Replace { sandbox, path, old, new, output } => {
            let change = BTreeMap::from([(path.clone(), Replacement { old, new })]);
            let counts = sandbox.handle(context).files().replace(&change).await?;
            let count = counts.get(&path).copied().unwrap_or(0);
            let message = format!("replaced in {path}: {count}");
            let properties = vec![("path", Cell::from(&path)), ("replaced_count", Cell::from(count))];
            let json = json!({"status": "ok", "message": message, "path": path, "replaced_count": count});
            context.printer(output.output).object(streams, properties, &json).await?;
        }
    }
    Ok(exit::SUCCESS)
}

/// Why a file cannot be read, with the command that helps: the daemon's words name calls of its protocol.
async fn unreadable(sandbox: &Sandbox, path: &str, error: osb_client::Error) -> anyhow::Error {
    let id = sandbox.id();
    if error.code().is_some_and(|code| code.ends_with("SANDBOX_NOT_FOUND")) {
        return error.into();
    }
    let hint = match error.status() {
        Some(404) if !path.starts_with('/') => "paths in a sandbox begin with /".to_owned(),
        // Daemons answer differently for a directory; a link may lead to one.
        Some(400 | 500) if sandbox.files().list(path, 1).await.is_ok() => {
            return anyhow::anyhow!(
                "{path} is a directory: `osb file ls {id} {path}` lists it, `osb cp {id}:{path} .` copies it"
            );
        }
        _ => return error.into(),
    };
    anyhow::anyhow!("{error}; {hint}")
}

async fn entries_out(
    context: &Context,
    output: OutputArg,
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
                Cell::from(&entry.created_at),
                Cell::from(&entry.modified_at),
            ]
        })
        .collect();
    let headings = ["path", "type", "size", "mode", "owner", "group", "created_at", "modified_at"];
    let json: Vec<_> = entries.iter().map(entry_json).collect();
    context.printer(output.output).list(streams, &headings, rows, &json).await
}

/// A file under the names that the SDKs give its properties.
fn entry_json(entry: &FileInfo) -> serde_json::Value {
    json!({
        "path": entry.path,
        "entry_type": entry.kind,
        "size": entry.size,
        "mode": entry.mode,
        "owner": entry.owner,
        "group": entry.group,
        "created_at": entry.created_at,
        "modified_at": entry.modified_at,
    })
}

async fn paths_out(
    context: &Context,
    output: OutputArg,
    paths: &[String],
    status: &str,
    streams: &mut Streams,
) -> anyhow::Result<()> {
    let rows = paths.iter().map(|path| vec![Cell::from(path), Cell::from(status)]).collect();
    let json: Vec<_> = paths.iter().map(|path| json!({"path": path, "status": status})).collect();
    context.printer(output.output).list(streams, &["path", "status"], rows, &json).await
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
