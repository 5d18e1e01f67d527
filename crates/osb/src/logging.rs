//! The server's log: standard output, or files that are put aside when they are full; then requests have one of
//! their own.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use osb_server::ACCESS_TARGET;
use osb_server::config::{LogConfig, LogLevel};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Starts logging as configured. `RUST_LOG` wins over the configured level.
pub(crate) fn start(config: &LogConfig) -> anyhow::Result<()> {
    let level = match config.level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let access = if config.file_enabled { "info" } else { "off" };
    let filter = filter.add_directive(format!("{ACCESS_TARGET}={access}").parse()?);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_target(false);
    let result = if config.file_enabled {
        let open = |path: &Path| {
            LogFile::open(path, config.file_max_bytes, config.file_backup_count)
                .with_context(|| format!("log file {}", path.display()))
        };
        let files = Files { main: open(&config.file_path)?, access: open(&config.access_file_path)? };
        builder.with_ansi(false).with_writer(files).try_init()
    } else {
        let terminal = io::IsTerminal::is_terminal(&io::stdout());
        builder.with_ansi(terminal).with_writer(io::stdout).try_init()
    };
    result.map_err(|error| anyhow::anyhow!("log: {error}"))
}

/// A file of bounded size; older parts are kept as `NAME.1` (the newest) to `NAME.<backups>`.
#[derive(Debug, Clone)]
pub(crate) struct LogFile(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    path: PathBuf,
    file: File,
    size: u64,
    max_bytes: u64,
    backups: u32,
}

impl LogFile {
    fn open(path: &Path, max_bytes: u64, backups: u32) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        let file = append(path)?;
        let size = file.metadata()?.len();
        Ok(Self(Arc::new(Mutex::new(State { path: path.to_owned(), file, size, max_bytes, backups }))))
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

impl State {
    fn rotate(&mut self) -> io::Result<()> {
        let part = |number: u32| {
            let mut name = self.path.as_os_str().to_owned();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        for number in (1..self.backups).rev() {
            if part(number).exists() {
                std::fs::rename(part(number), part(number + 1))?;
            }
        }
        if self.backups == 0 {
            self.file.set_len(0)?;
        } else {
            std::fs::rename(&self.path, part(1))?;
            self.file = append(&self.path)?;
        }
        self.size = 0;
        Ok(())
    }
}

impl Write for &LogFile {
    /// Takes one whole entry. What cannot be put aside goes on growing: a log is worth more than its bound.
    fn write(&mut self, entry: &[u8]) -> io::Result<usize> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let length = entry.len() as u64;
        if state.size > 0 && state.size.saturating_add(length) > state.max_bytes {
            let _ = state.rotate();
        }
        state.file.write_all(entry)?;
        state.size += length;
        Ok(entry.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One file for what the server does, one for what it is asked.
#[derive(Debug)]
struct Files {
    main: LogFile,
    access: LogFile,
}

impl<'a> MakeWriter<'a> for Files {
    type Writer = &'a LogFile;

    fn make_writer(&'a self) -> Self::Writer {
        &self.main
    }

    fn make_writer_for(&'a self, metadata: &tracing::Metadata<'_>) -> Self::Writer {
        if metadata.target() == ACCESS_TARGET { &self.access } else { &self.main }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(dir: &Path) -> Vec<(String, String)> {
        let mut parts: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let text = std::fs::read_to_string(entry.path()).unwrap();
                (entry.file_name().into_string().unwrap(), text)
            })
            .collect();
        parts.sort();
        parts
    }

    #[test]
    fn full_files_are_put_aside_and_the_oldest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let log = LogFile::open(&dir.path().join("log"), 10, 2).unwrap();
        for entry in ["one\n", "two\n", "three\n", "four is long\n", "five\n"] {
            (&log).write_all(entry.as_bytes()).unwrap();
        }
        let pair = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        assert_eq!(
            parts(dir.path()),
            [pair("log", "five\n"), pair("log.1", "four is long\n"), pair("log.2", "three\n")]
        );
    }

    #[test]
    fn requests_have_a_file_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str| LogFile::open(&dir.path().join(name), 1000, 1).unwrap();
        let files = Files { main: open("server"), access: open("access") };
        let log =
            tracing_subscriber::fmt().with_ansi(false).without_time().with_target(false).with_writer(files);
        tracing::subscriber::with_default(log.finish(), || {
            tracing::info!("serving");
            tracing::info!(target: ACCESS_TARGET, "GET /health 200");
        });
        let pair = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        assert_eq!(
            parts(dir.path()),
            [pair("access", " INFO GET /health 200\n"), pair("server", " INFO serving\n")]
        );
    }

    #[test]
    fn size_counts_over_restarts_and_no_backups_means_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/log");
        for entry in ["12345678\n", "abc\n"] {
            let log = LogFile::open(&path, 10, 0).unwrap();
            (&log).write_all(entry.as_bytes()).unwrap();
        }
        assert_eq!(parts(path.parent().unwrap()), [("log".to_owned(), "abc\n".to_owned())]);
    }
}
