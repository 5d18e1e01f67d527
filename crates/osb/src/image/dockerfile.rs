//! Dockerfiles are executed by the programs made for it, where this machine has one.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

/// A Dockerfile to execute.
pub(super) struct Job<'a> {
    pub(super) file: &'a Path,
    pub(super) context: &'a Path,
    pub(super) build_args: &'a [String],
    pub(super) target: Option<&'a str>,
    /// Where the image goes, as an archive.
    pub(super) archive: &'a Path,
}

/// Who executes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Builder {
    Buildah,
    Docker,
}

impl Builder {
    fn program(self) -> &'static str {
        match self {
            Self::Buildah => "buildah",
            Self::Docker => "docker",
        }
    }
}

impl Job<'_> {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let Some(builder) = find(&path) else {
            bail!(
                "a Dockerfile needs buildah or docker to execute it, and this machine has neither; install one (on Debian: sudo apt-get install buildah), or build the image elsewhere and bring it with `osb image load`"
            );
        };
        let tag = format!("localhost/osb-build-{}", std::process::id());
        let built = self.build(builder, &tag);
        let saved = built.and_then(|()| match builder {
            Builder::Buildah => {
                let target = format!("oci-archive:{}", self.archive.display());
                call(Command::new("buildah").args(["push", "--quiet", &tag, &target]))
            }
            Builder::Docker => {
                call(Command::new("docker").args(["save", "--output"]).arg(self.archive).arg(&tag))
            }
        });
        // The builder's own layers stay for the next build; the name was only for us.
        let _ = Command::new(builder.program())
            .args(["rmi", &tag])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        saved
    }

    fn build(&self, builder: Builder, tag: &str) -> anyhow::Result<()> {
        let mut command = Command::new(builder.program());
        command.arg("build").arg("--file").arg(self.file).args(["--tag", tag]);
        if builder == Builder::Buildah {
            command.args(["--layers", "--format", "oci"]);
        }
        for argument in self.build_args {
            command.args(["--build-arg", argument]);
        }
        if let Some(target) = self.target {
            command.args(["--target", target]);
        }
        call(command.arg(self.context))
    }
}

/// Runs it with its messages on our standard error, for standard output is the answer's.
fn call(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let stderr = std::io::stderr().lock();
    let output = rustix::io::dup(&stderr).context("standard error")?;
    drop(stderr);
    let status = command
        .stdin(Stdio::null())
        .stdout(output)
        .status()
        .with_context(|| format!("cannot start {name}"))?;
    if !status.success() {
        bail!("{name} failed ({status}); its messages above say why");
    }
    Ok(())
}

/// The builder to take of those in `path`: buildah needs no daemon.
fn find(path: &OsStr) -> Option<Builder> {
    let holds =
        |program: &str| std::env::split_paths(path).any(|dir: PathBuf| is_program(&dir.join(program)));
    [Builder::Buildah, Builder::Docker].into_iter().find(|builder| holds(builder.program()))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn buildah_goes_before_docker() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str, mode| {
            let path = dir.path().join(name);
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let found = || find(dir.path().as_os_str());
        assert_eq!(found(), None);
        place("buildah", 0o644);
        assert_eq!(found(), None);
        place("docker", 0o755);
        assert_eq!(found(), Some(Builder::Docker));
        place("buildah", 0o755);
        assert_eq!(found(), Some(Builder::Buildah));
    }
}
