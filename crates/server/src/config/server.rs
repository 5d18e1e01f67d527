//! Sections that every runtime shares.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use osb_protocol::boot::LineEndings;

use super::env;
use super::reader::Section;

/// A text that never shows up in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// `[server]`.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// `host`, default `0.0.0.0`: address to bind.
    pub host: String,
    /// `port`, default 8080.
    pub port: u16,
    /// `api_key`, no default: the one key. `OPENSANDBOX_SERVER_API_KEY` wins even when it is empty. Blank is none.
    pub api_key: Option<Secret>,
    /// `eip`, no default: public host put into endpoints as it is; may hold a port and a path.
    pub eip: Option<String>,
    /// `max_sandbox_timeout_seconds`, no default: longest lifetime that a create may ask for. At least 60.
    pub max_sandbox_timeout: Option<i64>,
    /// `timeout_keep_alive`, default 30: seconds an idle connection is kept. What counts is at least 120:
    /// clients keep idle connections for up to 90 s and would meet a closed one.
    pub keep_alive: Duration,
    /// `limit_concurrency`, default 1024: connections at a time, further ones get a 503. 0 is no limit.
    pub limit_concurrency: usize,
    /// `timeout_graceful_shutdown`, default 5: seconds that requests get when the server stops.
    pub graceful_shutdown: Duration,
    /// `backlog`, default 2048: length of the listen queue.
    pub backlog: u32,
    /// `strict_requests`, default false: refuse unknown members of request objects (422) instead of dropping them.
    pub strict_requests: bool,
    /// `require_endpoint_token`, default false: every sandbox's endpoints demand a token of their own, which the
    /// endpoint answer carries in its `headers`.
    pub require_endpoint_token: bool,
}

impl ServerConfig {
    pub(super) fn read(mut section: Section<'_, '_>) -> Self {
        let from_env = section.findings().env().get(env::API_KEY);
        let mut api_key = section.text("api_key");
        if let Some(key) = from_env {
            api_key = Some(key.to_owned()).filter(|key| !key.trim().is_empty());
        }
        let keep_alive = section.int_or("timeout_keep_alive", 1..=i64::MAX, 30_u64);
        let this = Self {
            host: section.text_or("host", "0.0.0.0"),
            port: section.int_or("port", 1..=65535, 8080),
            api_key: api_key.map(Secret),
            eip: section.text("eip").map(|eip| eip.trim().trim_end_matches('/').to_owned()),
            max_sandbox_timeout: section.int("max_sandbox_timeout_seconds", 60..=i64::MAX),
            keep_alive: Duration::from_secs(keep_alive.max(120)),
            limit_concurrency: section.int_or("limit_concurrency", 0..=i64::MAX, 1024),
            graceful_shutdown: Duration::from_secs(section.int_or(
                "timeout_graceful_shutdown",
                1..=86_400,
                5,
            )),
            backlog: section.int_or("backlog", 1..=i64::from(i32::MAX), 2048),
            strict_requests: section.flag("strict_requests", false),
            require_endpoint_token: section.flag("require_endpoint_token", false),
        };
        // Of the reference's HTTP machinery: checked, without effect here.
        section.int("thread_pool_size", 1..=i64::MAX);
        section.word("loop", &[("auto", ()), ("uvloop", ()), ("asyncio", ())], ());
        section.word("http", &[("auto", ()), ("httptools", ()), ("h11", ())], ());
        section.end();
        this
    }
}

/// `[log]`.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// `level`, default `INFO`: CRITICAL, ERROR, WARNING, INFO or DEBUG.
    pub level: LogLevel,
    /// `file_enabled`, default false: write to files instead of standard output.
    pub file_enabled: bool,
    /// `file_path`, default `~/logs/opensandbox/server.log`.
    pub file_path: PathBuf,
    /// `access_file_path`, default `~/logs/opensandbox/access.log`: one line per request, whatever the level;
    /// written only beside `file_path`.
    pub access_file_path: PathBuf,
    /// `file_max_bytes`, default 104857600: size at which a file is put aside.
    pub file_max_bytes: u64,
    /// `file_backup_count`, default 5: files kept.
    pub file_backup_count: u32,
}

/// Levels of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Errors; the reference's CRITICAL is the same to us.
    Error,
    /// And warnings.
    Warn,
    /// And what an operator did.
    Info,
    /// And details.
    Debug,
}

impl LogConfig {
    pub(super) fn read(mut section: Section<'_, '_>) -> Self {
        let env = section.findings().env();
        let levels = [
            ("CRITICAL", LogLevel::Error),
            ("ERROR", LogLevel::Error),
            ("WARNING", LogLevel::Warn),
            ("WARN", LogLevel::Warn),
            ("INFO", LogLevel::Info),
            ("DEBUG", LogLevel::Debug),
        ];
        let this = Self {
            level: section.word("level", &levels, LogLevel::Info),
            file_enabled: section.flag("file_enabled", false),
            file_path: env.expand(&section.text_or("file_path", "~/logs/opensandbox/server.log")),
            access_file_path: env
                .expand(&section.text_or("access_file_path", "~/logs/opensandbox/access.log")),
            file_max_bytes: section.int_or("file_max_bytes", 1..=i64::MAX, 104_857_600),
            file_backup_count: section.int_or("file_backup_count", 0..=i64::from(u32::MAX), 5),
        };
        section.end();
        this
    }
}

/// `[renew_intent]`: renewal of sandboxes on access.
#[derive(Debug, Clone)]
pub struct RenewIntentConfig {
    /// `enabled`, default false.
    pub enabled: bool,
    /// `min_interval_seconds`, default 60: quiet time of a sandbox after a renewal.
    pub min_interval: Duration,
}

impl RenewIntentConfig {
    pub(super) fn read(mut section: Section<'_, '_>) -> Self {
        let this = Self {
            enabled: section.flag("enabled", false),
            min_interval: Duration::from_secs(section.int_or("min_interval_seconds", 1..=i64::MAX, 60)),
        };
        let mut redis = section.section("redis");
        if redis.flag("enabled", false) {
            redis.refuse::<()>("enabled", "renewal by a gateway's intents is not in this build yet");
        }
        redis.text("dsn");
        redis.text("queue_key");
        redis.int("consumer_concurrency", 1..=i64::MAX);
        redis.end();
        section.end();
        this
    }
}

/// `[store]`: where the server keeps its records.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// `path`, no default here: SQLite file. Unset on the embedded runtime: `opensandbox.db` in its `data_dir`.
    pub path: Option<PathBuf>,
}

impl StoreConfig {
    pub(super) fn read(mut section: Section<'_, '_>) -> Self {
        let env = section.findings().env();
        let sqlite = section.word("type", &[("sqlite", true), ("postgresql", false)], true);
        if !sqlite {
            section.refuse::<()>("type", "postgresql is not in this build yet: use sqlite");
        }
        let this = Self { path: section.text("path").map(|path| env.expand(&path)) };
        let mut postgresql = section.section("postgresql");
        for key in [
            "dsn",
            "min_pool_size",
            "max_pool_size",
            "connect_timeout_seconds",
            "pool_timeout_seconds",
            "snapshot_recovery_interval_seconds",
        ] {
            postgresql.ignore(key);
        }
        postgresql.end();
        section.end();
        this
    }
}

/// `[execd]`: the daemon inside sandboxes.
#[derive(Debug, Clone, Copy)]
pub struct ExecdConfig {
    /// `line_endings`, default `keep`: whether command output carries its line ends (`keep`) or not (`strip`, for
    /// clients older than 1.1).
    pub line_endings: LineEndings,
}

impl ExecdConfig {
    pub(super) fn read(mut section: Section<'_, '_>) -> Self {
        let words =
            [("keep", LineEndings::Keep), ("preserve", LineEndings::Keep), ("strip", LineEndings::Strip)];
        let this = Self { line_endings: section.word("line_endings", &words, LineEndings::Keep) };
        section.end();
        this
    }
}

/// `[proxy]` and `[otel]`: checked, without effect on the embedded runtime or in this build.
pub(super) fn read_without_effect(root: &mut Section<'_, '_>) {
    let mut proxy = root.section("proxy");
    // The embedded runtime has one way into a sandbox.
    proxy.flag("resolve_internal", true);
    proxy.end();
    let mut otel = root.section("otel");
    if otel.flag("enabled", false) {
        otel.findings().warn("otel.enabled: export of metrics is not in this build yet");
    }
    otel.text("endpoint");
    otel.text("service_name");
    otel.int("export_interval_millis", 1000..=i64::MAX);
    otel.end();
}
