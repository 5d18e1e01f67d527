//! `[embedded]`: the built-in runtime.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use osb_protocol::quantity::{CpuNanos, MemoryBytes};

use super::images::{ImagesConfig, RegistryConfig};
use super::reader::Section;

/// What sandboxes may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkMode {
    /// Public addresses only.
    Internet,
    /// Nothing.
    None,
    /// Whatever the host reaches.
    Open,
}

/// Whether sandboxes get a user namespace with ids of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserNamespaceMode {
    /// Where the kernel can do it.
    Auto,
    /// The server does not start without.
    Required,
    /// Never.
    Off,
}

/// An IPv4 range in `address/prefix` form; host bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range4 {
    /// First address.
    pub address: Ipv4Addr,
    /// Bits of the prefix.
    pub prefix: u8,
}

impl std::str::FromStr for Range4 {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WANTED: &str = "an IPv4 range such as 10.0.0.0/8 is expected";
        let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
        let address: Ipv4Addr = address.parse().map_err(|_| WANTED)?;
        let prefix: u8 = prefix.parse().ok().filter(|p| *p <= 32).ok_or(WANTED)?;
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        if address.to_bits() & !mask != 0 {
            return Err("the range has host bits set: write its first address");
        }
        Ok(Self { address, prefix })
    }
}

/// Limits where a request names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DefaultLimits {
    /// `cpu`, default `1`.
    pub cpu: CpuNanos,
    /// `memory`, default `2Gi`.
    pub memory: MemoryBytes,
    /// `pids`, default 4096.
    pub pids: u32,
}

/// `[embedded]`.
#[derive(Debug, Clone)]
pub struct EmbeddedConfig {
    /// `data_dir`, default `/var/lib/opensandbox`: everything the runtime and the server keep. One server each.
    pub data_dir: PathBuf,
    /// `network`, default `internet`: `internet` (public addresses only), `none` or `open`.
    pub network: NetworkMode,
    /// `network_pool`, no default: IPv4 range that sandboxes get addresses from; unset: one is chosen that no
    /// route of the host covers.
    pub network_pool: Option<Range4>,
    /// `allow_private`, default empty: IPv4 ranges opened in mode `internet` that it would block.
    pub allow_private: Vec<Range4>,
    /// `dns_servers`, default empty: resolvers asked for sandboxes; empty: the host's.
    pub dns_servers: Vec<IpAddr>,
    /// `ready_slots`, default 128: sandboxes prepared ahead, 0 to 10000. Init and daemon of each wait already and
    /// take up to 1 MiB.
    pub ready_slots: usize,
    /// `spawners`, no default: processes that start sandboxes, 1 to 8; unset: by the number of cores.
    pub spawners: Option<usize>,
    /// `user_namespace`, default `auto`: `auto`, `required` or `off`.
    pub user_namespace: UserNamespaceMode,
    /// `max_sandboxes`, default 2000: live ones at a time.
    pub max_sandboxes: usize,
    /// `image_aliases`, default empty: other names of stored images, alias to name.
    pub image_aliases: BTreeMap<String, String>,
    /// `[embedded.images]`.
    pub images: ImagesConfig,
    /// `[embedded.registries]`, by host.
    pub registries: BTreeMap<String, RegistryConfig>,
    /// `endpoint_suffix`, no default: domain under which `PORT-ID.<suffix>` reaches a sandbox's port on the
    /// server's own listener. `localhost` works in browsers without DNS.
    pub endpoint_suffix: Option<String>,
    /// `[embedded.default_limits]`.
    pub default_limits: DefaultLimits,
    /// `memory_reserve`, default `256Mi`: creates are refused when less memory than this is available.
    pub memory_reserve: MemoryBytes,
    /// `disk_reserve`, default `256Mi`: creates are refused when less disk than this is free.
    pub disk_reserve: MemoryBytes,
    /// `drop_capabilities`, no default: capabilities taken from the usual fourteen; unset: the contract's list.
    pub drop_capabilities: Option<Vec<String>>,
    /// `execd_listen_tcp`, default false: the daemon also listens on TCP 44772 inside the sandbox, where any user
    /// of the sandbox reaches it.
    pub execd_listen_tcp: bool,
    /// `tombstone_seconds`, default 3600: how long a sandbox that ended by itself stays visible.
    pub tombstone: Duration,
}

impl EmbeddedConfig {
    pub(super) fn read(mut section: Section<'_, '_>) -> Self {
        let env = section.findings().env();
        let networks =
            [("internet", NetworkMode::Internet), ("none", NetworkMode::None), ("open", NetworkMode::Open)];
        let namespaces = [
            ("auto", UserNamespaceMode::Auto),
            ("required", UserNamespaceMode::Required),
            ("off", UserNamespaceMode::Off),
        ];
        let data_dir = env.expand(&section.text_or("data_dir", "/var/lib/opensandbox"));
        if !data_dir.is_absolute() {
            section.refuse::<()>("data_dir", "an absolute path is expected");
        }
        let allow_private = each(&mut section, "allow_private");
        let dns_servers = each_with(&mut section, "dns_servers", |text| {
            text.parse::<IpAddr>().map_err(|_| "a list of IP addresses is expected")
        });
        let mut limits = section.section("default_limits");
        let default_limits = DefaultLimits {
            cpu: limits.parsed("cpu", str::parse).unwrap_or(CpuNanos(1_000_000_000)),
            memory: limits.parsed("memory", str::parse).unwrap_or(MemoryBytes(2 << 30)),
            pids: limits.int_or("pids", 16..=4_194_304, 4096),
        };
        limits.end();
        let this = Self {
            data_dir,
            network: section.word("network", &networks, NetworkMode::Internet),
            network_pool: section.parsed("network_pool", str::parse),
            allow_private,
            dns_servers,
            ready_slots: section.int_or("ready_slots", 0..=10_000, 128),
            spawners: section.int("spawners", 1..=8).and_then(|n| usize::try_from(n).ok()),
            user_namespace: section.word("user_namespace", &namespaces, UserNamespaceMode::Auto),
            max_sandboxes: section.int_or("max_sandboxes", 1..=65_536, 2000),
            image_aliases: section.map("image_aliases"),
            images: ImagesConfig::read(section.section("images")),
            registries: RegistryConfig::read_all(&mut section),
            endpoint_suffix: section
                .text("endpoint_suffix")
                .map(|s| s.trim().trim_matches('.').to_lowercase()),
            default_limits,
            memory_reserve: section.parsed("memory_reserve", str::parse).unwrap_or(MemoryBytes(256 << 20)),
            disk_reserve: section.parsed("disk_reserve", str::parse).unwrap_or(MemoryBytes(256 << 20)),
            drop_capabilities: section.list("drop_capabilities"),
            execd_listen_tcp: section.flag("execd_listen_tcp", false),
            tombstone: Duration::from_secs(section.int_or("tombstone_seconds", 0..=31_536_000, 3600)),
        };
        section.end();
        this
    }
}

fn each<T: std::str::FromStr>(section: &mut Section<'_, '_>, key: &str) -> Vec<T>
where
    T::Err: std::fmt::Display,
{
    each_with(section, key, str::parse)
}

fn each_with<T, E: std::fmt::Display>(
    section: &mut Section<'_, '_>,
    key: &str,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Vec<T> {
    let mut values = Vec::new();
    for text in section.list(key).unwrap_or_default() {
        match parse(text.trim()) {
            Ok(value) => values.push(value),
            Err(error) => {
                section.refuse::<()>(key, &error.to_string());
            }
        }
    }
    values
}
