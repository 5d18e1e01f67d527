//! Settings of the engine.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::caps::DEFAULT_DROP;
use crate::net::NetConfig;

/// Where the daemon that runs inside every sandbox comes from.
#[derive(Debug, Clone)]
pub enum ExecdSource {
    /// A file.
    Path(PathBuf),
    /// Its bytes, as the release binary carries them.
    Bytes(&'static [u8]),
}

/// Whether sandboxes get a user namespace with their own range of ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UserNamespace {
    /// Where the kernel can do it.
    #[default]
    Auto,
    /// The engine does not start without.
    Required,
    /// Never. Root inside is root outside, held by capabilities and the system call filter alone.
    Off,
}

/// Limits of the work inside a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Billionths of a processor.
    pub cpu_nanos: u64,
    /// Bytes of memory, without swap.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cpu_nanos: 1_000_000_000, memory_bytes: 2 << 30, pids: 4096 }
    }
}

/// Settings of [`crate::Engine::start`].
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Everything the engine keeps on disk. One engine per directory.
    pub data_dir: PathBuf,
    /// Directory for sockets; `None` is `/run/opensandbox-<instance>`.
    pub run_dir: Option<PathBuf>,
    /// The daemon.
    pub execd: ExecdSource,
    /// Program to start helpers from; `None` is this program itself (`/proc/self/exe`). It must hand arguments
    /// that begin with [`crate::SPAWNER_ARG`] or [`crate::PREPARER_ARG`] to [`crate::helper_main`].
    pub helper: Option<PathBuf>,
    /// Processes that start sandboxes, 1 to 8.
    pub spawners: usize,
    /// Prepared sandboxes of the image used most.
    pub ready_slots: usize,
    /// Other names of stored images, alias to name.
    pub image_aliases: BTreeMap<String, String>,
    /// Bytes of disk that images may take; `None` is as many as there are.
    pub image_max_disk: Option<u64>,
    /// Limits where a request names none.
    pub default_limits: Limits,
    /// Most sandboxes at a time.
    pub max_sandboxes: usize,
    /// First host id of the first sandbox's range; each takes 65,536.
    pub id_base: u32,
    /// User namespaces.
    pub user_namespace: UserNamespace,
    /// Capabilities taken from the usual fourteen.
    pub drop_capabilities: Vec<String>,
    /// Whether `execd` listens on TCP 44772 inside as well.
    pub listen_tcp: bool,
    /// Creates are refused when less memory than this is available.
    pub memory_floor_bytes: u64,
    /// Creates are refused when less disk than this is free.
    pub disk_floor_bytes: u64,
    /// Network of the sandboxes.
    pub network: NetConfig,
}

impl EngineConfig {
    /// The usual settings for a data directory and a daemon.
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>, execd: ExecdSource) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            data_dir: data_dir.into(),
            run_dir: None,
            execd,
            helper: None,
            spawners: cores.min(2),
            ready_slots: 128,
            image_aliases: BTreeMap::new(),
            image_max_disk: None,
            default_limits: Limits::default(),
            max_sandboxes: 2000,
            id_base: 0x1000_0000,
            user_namespace: UserNamespace::Auto,
            drop_capabilities: DEFAULT_DROP.map(str::to_owned).to_vec(),
            listen_tcp: false,
            memory_floor_bytes: 256 << 20,
            disk_floor_bytes: 256 << 20,
            network: NetConfig::default(),
        }
    }
}
