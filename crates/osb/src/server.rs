//! `osb server`: puts the parts together and serves.

use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use osb_cli::{exit, printable};
use osb_engine::net::{Cidr, Mode, NetConfig};
use osb_engine::{CheckResult, DEFAULT_DROP, EngineConfig, ExecdSource, Limits, UserNamespace};
use osb_runtime_embedded::{Credentials, EmbeddedRuntime, Images, RegistrySettings, Settings};
use osb_server::config::{
    Config, EmbeddedConfig, Env, Loaded, NetworkMode, PullPolicy, RegistryConfig, Source, UserNamespaceMode,
    env as config_env, load,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::{execd, guard, logging, purge};

/// Arguments of the server.
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// Configuration file [env: SANDBOX_CONFIG_PATH] [default: ~/.sandbox.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check configuration and machine, then end
    #[arg(long, conflicts_with = "purge")]
    check: bool,
    /// End all sandboxes of this server, remove everything it keeps, images too, then end
    #[arg(long)]
    purge: bool,
}

pub(crate) fn run(args: ServerArgs) -> anyhow::Result<u8> {
    let env = Env::of_process();
    if args.check {
        return check(args.config.as_deref(), &env);
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(workers(&env)).enable_all().build()?;
    if args.purge {
        let config = read_config(args.config.as_deref(), &env)?;
        logging::start(&config.log)?;
        runtime.block_on(purge::run(&config))?;
        return Ok(exit::SUCCESS);
    }
    let loaded = guard::load(args.config.as_deref(), &env)?;
    logging::start(&loaded.config.log)?;
    // On a worker: the thread that blocks would have to be woken for every new connection.
    let result = runtime.block_on(async { runtime.spawn(serve(loaded)).await })?;
    // What still runs is either a connection that had its time or a thread that waits for nothing.
    runtime.shutdown_background();
    result.map(|()| exit::SUCCESS)
}

/// Threads that serve: half the processors, since the sandboxes want some too, and each thread that has something to
/// do wakes another one to look for more. `TOKIO_WORKER_THREADS` says otherwise.
fn workers(env: &Env) -> usize {
    let wanted = env.get("TOKIO_WORKER_THREADS").and_then(|number| number.parse().ok());
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    wanted.unwrap_or(processors / 2).max(1)
}

async fn serve(loaded: Loaded) -> anyhow::Result<()> {
    let Loaded { config, source, warnings } = loaded;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    match source {
        Source::File(path) => tracing::info!(path = %path.display(), "configuration"),
        Source::Default(path) => tracing::info!(
            "no configuration at {}: serving this machine only; the key is in {}",
            path.display(),
            config.embedded.data_dir.join("api-key").display()
        ),
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // First of all, so that a taken port ends the start before anything is made. Connections wait until the rest is up.
    let listener = osb_server::bind(&config)
        .await
        .with_context(|| format!("cannot listen on {}:{}", config.server.host, config.server.port))?;
    let images = image_settings(&config.embedded)?;
    let engine = EmbeddedRuntime::start(engine_config(&config.embedded, execd::find()?), images)?;
    execd::forget();
    let shutdown = async move {
        let signal = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!(signal, "stopping; sandboxes go on");
    };
    osb_server::serve(config, Arc::new(engine), listener, shutdown).await?;
    Ok(())
}

/// The settings that the server would run with. Unlike a start it neither makes a key nor insists on one.
pub(crate) fn read_config(explicit: Option<&Path>, env: &Env) -> anyhow::Result<Config> {
    let named = explicit.map(Path::to_path_buf).or_else(|| {
        env.get(config_env::CONFIG_PATH).filter(|path| !path.is_empty()).map(|path| env.expand(path))
    });
    let path = named.clone().unwrap_or_else(|| env.expand("~/.sandbox.toml"));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound && named.is_none() => String::new(),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let (config, _) = Config::parse(&text, env).with_context(|| path.display().to_string())?;
    Ok(config)
}

/// The engine's settings from the file's.
pub(crate) fn engine_config(config: &EmbeddedConfig, execd: ExecdSource) -> EngineConfig {
    let usual = EngineConfig::new(&config.data_dir, execd);
    let dns: Vec<SocketAddr> =
        config.dns_servers.iter().map(|address| SocketAddr::new(*address, 53)).collect();
    EngineConfig {
        spawners: config.spawners.unwrap_or(usual.spawners),
        ready_slots: config.ready_slots,
        image_aliases: config.image_aliases.clone(),
        image_max_disk: config.images.max_disk.map(|most| most.0),
        default_limits: Limits {
            cpu_nanos: config.default_limits.cpu.0,
            memory_bytes: config.default_limits.memory.0,
            pids: config.default_limits.pids,
        },
        max_sandboxes: config.max_sandboxes,
        user_namespace: match config.user_namespace {
            UserNamespaceMode::Auto => UserNamespace::Auto,
            UserNamespaceMode::Required => UserNamespace::Required,
            UserNamespaceMode::Off => UserNamespace::Off,
        },
        drop_capabilities: config
            .drop_capabilities
            .clone()
            .unwrap_or_else(|| DEFAULT_DROP.map(str::to_owned).to_vec()),
        listen_tcp: config.execd_listen_tcp,
        memory_floor_bytes: config.memory_reserve.0,
        disk_floor_bytes: config.disk_reserve.0,
        network: NetConfig {
            mode: match config.network {
                NetworkMode::Internet => Mode::Internet,
                NetworkMode::None => Mode::None,
                NetworkMode::Open => Mode::Open,
            },
            pool: config.network_pool.map(|range| Cidr::new(range.address, range.prefix)),
            allow_private: config
                .allow_private
                .iter()
                .map(|range| Cidr::new(range.address, range.prefix))
                .collect(),
            dns_servers: (!dns.is_empty()).then_some(dns),
            ..NetConfig::default()
        },
        ..usual
    }
}

/// Where images come from, by the file's settings. Reads the files of passwords.
pub(crate) fn image_settings(config: &EmbeddedConfig) -> anyhow::Result<Images> {
    let images = &config.images;
    let usual = Settings::new(config.data_dir.join("downloads"));
    let mut registries = std::collections::BTreeMap::new();
    for (host, registry) in &config.registries {
        let settings =
            registry_settings(registry).with_context(|| format!("embedded.registries.{host:?}"))?;
        registries.insert(host.clone(), settings);
    }
    Ok(Images {
        policy: match images.pull_policy {
            PullPolicy::IfNotPresent => osb_runtime_embedded::PullPolicy::IfNotPresent,
            PullPolicy::Always => osb_runtime_embedded::PullPolicy::Always,
            PullPolicy::Never => osb_runtime_embedded::PullPolicy::Never,
        },
        default_registry: images.default_registry.clone(),
        registries: Settings {
            registries,
            docker_config: images.docker_config.clone(),
            concurrent_downloads: images.concurrent_downloads,
            max_image_bytes: images.max_disk.map_or(usual.max_image_bytes, |most| most.0),
            reserve_bytes: config.disk_reserve.0,
            ..usual
        },
    })
}

fn registry_settings(registry: &RegistryConfig) -> anyhow::Result<RegistrySettings> {
    let password = match (&registry.password, &registry.password_file) {
        (Some(password), _) => Some(password.0.clone()),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path);
            let text = text.with_context(|| format!("password_file {}", path.display()))?;
            // Editors and `echo` end the line.
            Some(text.trim_end_matches(['\r', '\n']).to_owned())
        }
        (None, None) => None,
    };
    let credentials = registry
        .username
        .clone()
        .zip(password)
        .map(|(username, password)| Credentials { username, password });
    Ok(RegistrySettings {
        mirrors: registry.mirrors.clone(),
        plain_http: registry.plain_http,
        credentials,
        ca_file: registry.ca_file.clone(),
    })
}

/// Says whether the server would start and what sandboxes would lack.
fn check(explicit: Option<&Path>, env: &Env) -> anyhow::Result<u8> {
    let config = read_config(explicit, env)?;
    let mut lines = Vec::new();
    let has_file = explicit.is_some()
        || env.get(config_env::CONFIG_PATH).is_some_and(|path| !path.is_empty())
        || env.expand("~/.sandbox.toml").exists();
    // With a file, reading it as a start does has no effects and tells all warnings; without one a key is made.
    match if has_file { load(explicit, env).map(Some) } else { Ok(None) } {
        Ok(loaded) => {
            let warnings = loaded.map(|loaded| loaded.warnings).unwrap_or_default();
            let what = if has_file { "the file can be used" } else { "no file: serves this machine only" };
            lines.push((CheckResult::Ok, "configuration", what.to_owned()));
            lines.extend(warnings.into_iter().map(|warning| (CheckResult::Warn, "configuration", warning)));
        }
        Err(error) => lines.push((CheckResult::Fail, "configuration", error.to_string())),
    }
    match image_settings(&config.embedded).and_then(|images| Ok(images.check()?)) {
        Ok(()) => {
            let what = match config.embedded.images.pull_policy {
                PullPolicy::Never => "images are not pulled".to_owned(),
                _ => format!("{} set up", config.embedded.registries.len()),
            };
            lines.push((CheckResult::Ok, "registries", what));
        }
        Err(error) => lines.push((CheckResult::Fail, "registries", format!("{error:#}"))),
    }
    match execd::find() {
        Ok(execd) => {
            let what = match &execd {
                ExecdSource::Bytes(bytes) => format!("built in, {} KiB", bytes.len() / 1024),
                ExecdSource::Path(path) => path.display().to_string(),
            };
            lines.push((CheckResult::Ok, "execd", what));
            let items = osb_engine::check(&engine_config(&config.embedded, execd));
            lines.extend(items.into_iter().map(|item| (item.result, item.name, item.message)));
        }
        Err(error) => lines.push((CheckResult::Fail, "execd", error.to_string())),
    }
    let width = lines.iter().map(|(_, name, _)| name.len()).max().unwrap_or(0);
    let mut stdout = std::io::stdout().lock();
    for (result, name, message) in &lines {
        let result = match result {
            CheckResult::Ok => "ok  ",
            CheckResult::Warn => "warn",
            CheckResult::Fail => "FAIL",
        };
        writeln!(stdout, "{result}  {name:width$}  {}", printable(message))?;
    }
    if lines.iter().any(|(result, _, _)| *result == CheckResult::Fail) {
        bail!("the server cannot run like this: see the lines marked FAIL");
    }
    Ok(exit::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(text: &str) -> EngineConfig {
        let (config, _) = Config::parse(text, &Env::default()).unwrap();
        engine_config(&config.embedded, ExecdSource::Path("/execd".into()))
    }

    #[test]
    fn an_empty_file_gives_the_engines_own_defaults() {
        let usual = EngineConfig::new("/var/lib/opensandbox", ExecdSource::Path("/execd".into()));
        assert_eq!(format!("{:?}", engine("")), format!("{usual:?}"));
    }

    #[test]
    fn every_setting_reaches_the_engine() {
        let engine = engine(
            r#"
            [embedded]
            data_dir = "/data"
            network = "open"
            network_pool = "10.9.0.0/16"
            allow_private = ["192.168.1.0/24"]
            dns_servers = ["9.9.9.9", "::1"]
            ready_slots = 3
            spawners = 4
            user_namespace = "required"
            max_sandboxes = 7
            image_aliases = { "a:*" = "host" }
            memory_reserve = "1Gi"
            disk_reserve = "2Gi"
            drop_capabilities = ["NET_RAW"]
            execd_listen_tcp = true
            [embedded.images]
            max_disk = "3Gi"
            [embedded.default_limits]
            cpu = "500m"
            memory = "1Gi"
            pids = 99
            "#,
        );
        let cidr = |text: &str| text.parse::<Cidr>().unwrap();
        assert_eq!(engine.data_dir, Path::new("/data"));
        assert_eq!(
            engine.network,
            NetConfig {
                mode: Mode::Open,
                pool: Some(cidr("10.9.0.0/16")),
                allow_private: vec![cidr("192.168.1.0/24")],
                dns_servers: Some(vec!["9.9.9.9:53".parse().unwrap(), "[::1]:53".parse().unwrap()]),
                ..NetConfig::default()
            }
        );
        assert_eq!((engine.ready_slots, engine.spawners, engine.max_sandboxes), (3, 4, 7));
        assert_eq!(engine.user_namespace, UserNamespace::Required);
        assert_eq!(engine.image_aliases.get("a:*").map(String::as_str), Some("host"));
        assert_eq!((engine.memory_floor_bytes, engine.disk_floor_bytes), (1 << 30, 2 << 30));
        assert_eq!((engine.drop_capabilities, engine.listen_tcp), (vec!["NET_RAW".to_owned()], true));
        let limits = Limits { cpu_nanos: 500_000_000, memory_bytes: 1 << 30, pids: 99 };
        assert_eq!(engine.default_limits, limits);
        assert_eq!(engine.image_max_disk, Some(3 << 30));
    }

    #[test]
    fn every_setting_of_images_reaches_the_puller() {
        let dir = tempfile::tempdir().unwrap();
        let password = dir.path().join("password");
        std::fs::write(&password, "from a file\n").unwrap();
        let text = format!(
            r#"
            [embedded]
            data_dir = "/data"
            disk_reserve = "2Gi"
            [embedded.images]
            pull_policy = "always"
            max_disk = "3Gi"
            docker_config = "/d/config.json"
            concurrent_downloads = 7
            default_registry = "127.0.0.1:5000"
            [embedded.registries."127.0.0.1:5000"]
            plain_http = true
            username = "u"
            password_file = "{}"
            [embedded.registries."docker.io"]
            mirrors = ["mirror.example"]
            ca_file = "/ca.pem"
            "#,
            password.display()
        );
        let (config, warnings) = Config::parse(&text, &Env::default()).unwrap();
        assert_eq!(warnings, Vec::<String>::new());
        let images = image_settings(&config.embedded).unwrap();
        assert_eq!(images.policy, osb_runtime_embedded::PullPolicy::Always);
        assert_eq!(images.default_registry, "127.0.0.1:5000");
        let registries = images.registries;
        assert_eq!(registries.docker_config.as_deref(), Some(Path::new("/d/config.json")));
        assert_eq!(registries.downloads_dir, Path::new("/data/downloads"));
        assert_eq!((registries.concurrent_downloads, registries.reserve_bytes), (7, 2 << 30));
        assert_eq!(registries.max_image_bytes, 3 << 30);
        let local = &registries.registries["127.0.0.1:5000"];
        let account = Credentials { username: "u".to_owned(), password: "from a file".to_owned() };
        assert_eq!((local.plain_http, local.credentials.as_ref()), (true, Some(&account)));
        let hub = &registries.registries["docker.io"];
        assert_eq!(
            (hub.mirrors.as_slice(), hub.ca_file.as_deref()),
            (&["mirror.example".to_owned()][..], Some(Path::new("/ca.pem")))
        );
        std::fs::remove_file(&password).unwrap();
        let error = format!("{:#}", image_settings(&config.embedded).unwrap_err());
        assert!(error.contains("127.0.0.1:5000") && error.contains("password_file"), "{error}");
    }

    #[test]
    fn reading_the_configuration_makes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let env: Env = [("HOME", home.path().to_str().unwrap())].into_iter().collect();
        assert_eq!(read_config(None, &env).unwrap().server.port, 8080);
        std::fs::write(
            home.path().join(".sandbox.toml"),
            "[server]\nport = 9\n[runtime]\ntype = \"embedded\"\n",
        )
        .unwrap();
        assert_eq!(read_config(None, &env).unwrap().server.port, 9);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);
        assert!(read_config(Some(Path::new("/nonexistent")), &env).is_err());
    }
}
