//! Where the sandbox daemon of this build is.

use std::path::{Path, PathBuf};

use osb_engine::ExecdSource;

include!(concat!(env!("OUT_DIR"), "/execd.rs"));

/// There is no daemon.
#[derive(Debug, thiserror::Error)]
#[error(
    "this build carries no sandbox daemon and there is none at {}: run `make build`, which makes one, or build it with `cargo build --release -p osb-execd --target x86_64-unknown-linux-musl` and put `execd` there", .0.display()
)]
pub(crate) struct Missing(PathBuf);

/// The daemon that was built in, else the file `execd` beside this program.
pub(crate) fn find() -> Result<ExecdSource, Missing> {
    match EMBEDDED {
        Some(bytes) => Ok(ExecdSource::Bytes(bytes)),
        None => beside(&std::env::current_exe().unwrap_or_default()),
    }
}

fn beside(program: &Path) -> Result<ExecdSource, Missing> {
    let path = program.with_file_name("execd");
    if path.is_file() { Ok(ExecdSource::Path(path)) } else { Err(Missing(path)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_daemon_looks_beside_itself_and_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("osb");
        let error = beside(&program).unwrap_err().to_string();
        assert!(error.contains("make build") && error.contains(dir.path().to_str().unwrap()), "{error}");
        std::fs::write(dir.path().join("execd"), "x").unwrap();
        assert!(matches!(beside(&program), Ok(ExecdSource::Path(path)) if path == dir.path().join("execd")));
    }

    #[test]
    fn an_embedded_daemon_is_a_program() {
        if let Some(bytes) = EMBEDDED {
            assert!(bytes.starts_with(b"\x7fELF"));
        }
    }
}
