//! A server of our own for the time of a figure.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::http::Conn;

/// API key of the server.
pub(crate) const KEY: &str = "bench";

/// The program to measure.
pub(crate) fn binary() -> Result<PathBuf> {
    let binary = std::env::var_os("OSB_BIN").map_or_else(|| PathBuf::from("dist/osb"), PathBuf::from);
    if !binary.exists() {
        bail!("{} is not there: run `make build` first", binary.display());
    }
    Ok(binary)
}

/// What differs between servers of figures.
#[derive(Default)]
pub(crate) struct Options {
    /// A registry that is asked without TLS.
    pub(crate) plain_registry: Option<String>,
    /// A data directory that stays.
    pub(crate) data_dir: Option<PathBuf>,
}

/// A running `dist/osb server` with a data directory of its own, both gone when this is dropped.
pub(crate) struct Server {
    child: Child,
    directory: PathBuf,
    binary: PathBuf,
    port: u16,
    /// From start to the first answer.
    pub(crate) ready: Duration,
    /// Image that cold creates use.
    pub(crate) image: String,
}

impl Server {
    pub(crate) async fn start(options: Options) -> Result<Self> {
        let binary = binary()?;
        let prepared = std::env::var("BENCH_READY_SLOTS")
            .map_or_else(|_| String::new(), |number| format!("ready_slots = {number}\n"));
        let registry = options.plain_registry.map_or_else(String::new, |registry| {
            format!("[embedded.registries.\"{registry}\"]\nplain_http = true\n")
        });
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("osb-bench-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let data_dir = options.data_dir.unwrap_or_else(|| directory.join("data"));
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let config = directory.join("config.toml");
        std::fs::write(
            &config,
            format!(
                "[server]\nhost = \"127.0.0.1\"\nport = {port}\napi_key = \"{KEY}\"\n[runtime]\ntype = \"embedded\"\n[embedded]\ndata_dir = \"{}\"\n{prepared}{registry}",
                data_dir.display()
            ),
        )?;
        let mut image = "host".to_owned();
        if let Some(rootfs) = std::env::var_os("BENCH_ROOTFS") {
            "bench:rootfs".clone_into(&mut image);
            let loaded = Command::new(&binary)
                .args(["image", "load", "--name", &image, "--config"])
                .arg(&config)
                .arg(rootfs)
                .stdout(Stdio::null())
                .status()?;
            if !loaded.success() {
                bail!("loading BENCH_ROOTFS failed");
            }
        }
        let began = Instant::now();
        let log = std::fs::File::create(directory.join("server.log"))?;
        let child = Command::new(&binary)
            .arg("server")
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut server = Self { child, directory, binary, port, ready: Duration::ZERO, image };
        loop {
            if let Ok(mut conn) = server.conn().await
                && conn.call("GET", "/health", "").await.is_ok()
            {
                break;
            }
            if let Some(status) = server.child.try_wait()? {
                let log = std::fs::read_to_string(server.directory.join("server.log")).unwrap_or_default();
                bail!("server ended with {status}:\n{log}");
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        server.ready = began.elapsed();
        Ok(server)
    }

    /// Waits until the pool of prepared slots has had time to fill and the machine is quiet.
    pub(crate) async fn settle(&self) {
        tokio::time::sleep(Duration::from_secs(3)).await;
    }

    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) async fn conn(&self) -> Result<Conn> {
        Conn::open(&self.host(), KEY).await
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
        let _ = Command::new(&self.binary)
            .args(["server", "--purge", "--config"])
            .arg(self.directory.join("config.toml"))
            .stdout(Stdio::null())
            .status();
        let _ = std::fs::remove_dir_all(&self.directory).context("removing the bench's directory");
    }
}

/// Host pids of a sandbox's two `execd` processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Execd {
    /// PID 1 inside.
    pub(crate) init: u32,
    /// The one that serves.
    pub(crate) daemon: u32,
}

impl Execd {
    /// Finds them by the sandbox's PID namespace; others are prepared beside it.
    pub(crate) async fn of(conn: &mut Conn, id: &str) -> Result<Self> {
        let namespace = conn.output(id, "readlink /proc/self/ns/pid").await?;
        let (mut init, mut daemon) = (None, None);
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let own = std::fs::read_link(entry.path().join("ns/pid")).unwrap_or_default();
            let line = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            if own.as_os_str() != namespace.trim() || !line.contains("--boot-fd") {
                continue;
            }
            let status = std::fs::read_to_string(entry.path().join("status"))?;
            let inside = status.lines().find(|line| line.starts_with("NSpid:")).unwrap_or_default();
            let place = if inside.ends_with("\t1") { &mut init } else { &mut daemon };
            *place = Some(pid);
        }
        let (init, daemon) = init.zip(daemon).context("the sandbox's execd was not found")?;
        Ok(Self { init, daemon })
    }
}
