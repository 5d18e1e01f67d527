//! Configuration files and where they come from.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use osb_protocol::boot::LineEndings;
use osb_server::config::{Config, ConfigError, Env, NetworkMode, Source, load};

fn parse(text: &str) -> Result<(Config, Vec<String>), ConfigError> {
    Config::parse(text, &Env::default())
}

#[test]
fn a_full_file_is_read() {
    let text = r#"
        [server]
        host = "0.0.0.0"
        port = "9000"
        api_key = "k"
        eip = "https://a.example/x/"
        max_sandbox_timeout_seconds = 86400.0
        timeout_keep_alive = 200
        limit_concurrency = 0
        thread_pool_size = 10
        loop = "uvloop"
        strict_requests = "yes"
        [log]
        level = "warning"
        [runtime]
        type = "embedded"
        execd_image = "ignored:1"
        [docker]
        network_mode = "bridge"
        sandbox_env = { A = "b" }
        [egress]
        mode = "dns+nft"
        [kubernetes]
        informer_enabled = true
        read_qps = 5
        [store]
        path = "/var/lib/x.db"
        [execd]
        line_endings = "strip"
        [embedded]
        network = "open"
        network_pool = "10.99.0.0/16"
        allow_private = ["10.0.0.0/8", "192.168.1.7"]
        dns_servers = ["1.1.1.1", "::1"]
        ready_slots = 0
        endpoint_suffix = "Localhost."
        [embedded.default_limits]
        cpu = 2
        memory = "512Mi"
        [embedded.image_aliases]
        py = "python:3.12"
    "#;
    let (config, warnings) = parse(text).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(config.server.port, 9000);
    assert_eq!(config.server.eip.as_deref(), Some("https://a.example/x"));
    assert_eq!(config.server.max_sandbox_timeout, Some(86400));
    assert_eq!(config.server.keep_alive, Duration::from_secs(200));
    assert!(config.server.strict_requests);
    assert_eq!(config.store_path(), std::path::Path::new("/var/lib/x.db"));
    assert_eq!(config.execd.line_endings, LineEndings::Strip);
    assert_eq!(config.embedded.network, NetworkMode::Open);
    assert_eq!(config.embedded.allow_private.len(), 2);
    assert_eq!(config.embedded.dns_servers.len(), 2);
    assert_eq!(config.embedded.default_limits.cpu.millis(), 2000);
    assert_eq!(config.embedded.endpoint_suffix.as_deref(), Some("localhost"));
    assert_eq!(config.embedded.image_aliases["py"], "python:3.12");
    assert!(!format!("{config:?}").contains("\"k\""));
}

#[test]
fn defaults() {
    let (config, _) = parse("").unwrap();
    assert_eq!((config.server.host.as_str(), config.server.port), ("0.0.0.0", 8080));
    assert_eq!(config.server.keep_alive, Duration::from_secs(120), "clients keep connections for 90 s");
    assert_eq!(config.server.limit_concurrency, 1024);
    assert_eq!(config.embedded.ready_slots, 128);
    assert_eq!(config.embedded.network, NetworkMode::Internet);
    assert_eq!(config.embedded.default_limits.pids, 4096);
    assert_eq!(config.store_path(), std::path::Path::new("/var/lib/opensandbox/opensandbox.db"));
}

#[test]
fn unknown_keys_are_named_with_their_line() {
    let (_, warnings) = parse("[server]\nport = 1\nprot = 2\n[surprise]\nx = 1\n").unwrap();
    assert_eq!(
        warnings,
        ["line 3: unknown key server.prot is ignored", "line 4: unknown key surprise is ignored"]
    );
}

#[test]
fn wrong_values_are_named_and_never_repeated() {
    for (text, key) in [
        ("[server]\nport = 70000", "server.port"),
        ("[server]\nport = \"hunter2\"", "server.port"),
        ("[server]\napi_key = 7777", "server.api_key"),
        ("[server]\nstrict_requests = \"hunter2\"", "server.strict_requests"),
        ("[server]\nloop = \"hunter2\"", "server.loop"),
        ("[server]\nmax_sandbox_timeout_seconds = 5", "server.max_sandbox_timeout_seconds"),
        ("server = \"hunter2\"", "server"),
        ("[runtime]\ntype = \"docker\"", "runtime.type"),
        ("[runtime]\ntype = \"hunter2\"", "runtime.type"),
        ("[runtime]\nexecd_image = \"x\"", "runtime.type"),
        ("[log]\nlevel = \"hunter2\"", "log.level"),
        ("[store]\ntype = \"postgresql\"", "store.type"),
        ("[docker]\nport_range_min = 2000\nport_range_max = 2050", "docker.port_range_max"),
        ("[docker]\npublish_host = \"hunter2\"", "docker.publish_host"),
        ("[egress]\notlp_endpoint = \"ftp://hunter2\"", "egress.otlp_endpoint"),
        ("[egress.upstream_proxy]\nurl = \"http://hunter2\"", "egress.upstream_proxy"),
        ("[ingress]\nmode = \"gateway\"", "ingress"),
        ("[ingress.gateway]\naddress = \"hunter2\"", "ingress.gateway.address"),
        ("[secure_runtime]\ntype = \"gvisor\"", "secure_runtime.type"),
        ("[secure_runtime]\ndocker_runtime = \"hunter2\"", "secure_runtime.type"),
        ("[tenants]\nprovider = \"file\"", "tenants"),
        ("[embedded]\nnetwork_pool = \"10.0.0.1/8\"", "embedded.network_pool"),
        ("[embedded]\ndata_dir = \"hunter2\"", "embedded.data_dir"),
        ("[embedded]\nspawners = 9", "embedded.spawners"),
        ("[embedded]\nallow_private = [\"hunter2\"]", "embedded.allow_private"),
        ("[embedded.images]\npull_policy = \"hunter2\"", "embedded.images.pull_policy"),
        ("[embedded.images]\nconcurrent_downloads = 0", "embedded.images.concurrent_downloads"),
        ("[embedded.images]\ndefault_registry = \"https://hunter2\"", "embedded.images.default_registry"),
        ("[embedded.registries.\"a.b\"]\nusername = \"hunter2\"", "embedded.registries.a.b.username"),
        ("[embedded.registries.\"a.b\"]\npassword = \"hunter2\"", "embedded.registries.a.b.username"),
        (
            "[embedded.registries.\"a.b\"]\nusername = \"u\"\npassword = \"hunter2\"\npassword_file = \"/f\"",
            "embedded.registries.a.b.password_file",
        ),
        ("[embedded.registries.\"https://a.b\"]\nplain_http = true", "embedded.registries.https://a.b"),
        ("[embedded.default_limits]\nmemory = \"hunter2\"", "embedded.default_limits.memory"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(key), "{text}: {error}");
        assert!(!error.contains("hunter2") && !error.contains("7777"), "{error}");
    }
    let error = parse("[server]\napi_key = \"hunter2\nport = 1").unwrap_err().to_string();
    assert!(error.starts_with("line 2 ") && !error.contains("hunter2"), "{error}");
}

#[test]
fn variables_win_over_the_file() {
    let env: Env = [
        ("OPENSANDBOX_SERVER_PORT", "9"),
        ("OPENSANDBOX_SERVER_API_KEY", ""),
        ("OPENSANDBOX_EMBEDDED_DATA_DIR", "~/osb"),
        ("OPENSANDBOX_EMBEDDED_DEFAULT_LIMITS_CPU", "3"),
        ("OPENSANDBOX_EMBEDDED_DNS_SERVERS", "1.1.1.1, 9.9.9.9"),
        ("HOME", "/home/u"),
    ]
    .into_iter()
    .collect();
    let (config, _) = Config::parse("[server]\nport = 1\napi_key = \"k\"", &env).unwrap();
    assert_eq!(config.server.port, 9);
    assert_eq!(config.server.api_key, None, "the empty key wins");
    assert_eq!(config.embedded.data_dir, std::path::Path::new("/home/u/osb"));
    assert_eq!(config.embedded.default_limits.cpu.millis(), 3000);
    assert_eq!(config.embedded.dns_servers.len(), 2);
}

fn env(pairs: &[(&str, &str)]) -> Env {
    pairs.iter().copied().collect()
}

#[test]
fn the_file_is_looked_for_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().to_str().unwrap();
    let write = |name: &str, port: u16| {
        let path = dir.path().join(name);
        std::fs::write(&path, format!("[server]\nport = {port}\napi_key = \"k\"")).unwrap();
        path
    };
    let flag = write("flag.toml", 1);
    let variable = write("variable.toml", 2);
    write(".sandbox.toml", 3);
    let both = env(&[("HOME", home), ("SANDBOX_CONFIG_PATH", "~/variable.toml")]);
    assert_eq!(load(Some(&flag), &both).unwrap().config.server.port, 1);
    let loaded = load(None, &both).unwrap();
    assert_eq!((loaded.config.server.port, loaded.source), (2, Source::File(variable)));
    assert_eq!(load(None, &env(&[("HOME", home)])).unwrap().config.server.port, 3);
    for missing in
        [load(Some(&dir.path().join("no")), &both), load(None, &env(&[("SANDBOX_CONFIG_PATH", "/no")]))]
    {
        assert!(matches!(missing, Err(ConfigError::Unreadable { .. })));
    }
}

#[test]
fn without_a_key_a_file_does_not_serve() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    std::fs::write(&path, "[server]\nport = 1\napi_key = \"  \"").unwrap();
    assert!(matches!(load(Some(&path), &env(&[])), Err(ConfigError::NoKey)));
    assert!(matches!(
        load(Some(&path), &env(&[("OPENSANDBOX_INSECURE_SERVER", "yes")])),
        Err(ConfigError::NoKey)
    ));
    let loaded = load(Some(&path), &env(&[("OPENSANDBOX_INSECURE_SERVER", "YES")])).unwrap();
    assert_eq!(loaded.config.server.api_key, None);
    load(Some(&path), &env(&[("OPENSANDBOX_SERVER_API_KEY", "k")])).unwrap();
}

#[test]
fn without_a_file_the_server_guards_itself() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().to_str().unwrap();
    let data = dir.path().join("data");
    let env = env(&[("HOME", home), ("OPENSANDBOX_EMBEDDED_DATA_DIR", data.to_str().unwrap())]);
    let loaded = load(None, &env).unwrap();
    assert!(matches!(loaded.source, Source::Default(_)));
    assert!(loaded.config.is_loopback());
    let key = loaded.config.server.api_key.unwrap().0;
    assert!(key.len() >= 32);
    let credentials = dir.path().join(".config/opensandbox/credentials.toml");
    for (path, text) in [
        (data.join("api-key"), format!("{key}\n")),
        (
            credentials,
            format!(
                "# Written by the server at its start.\ndomain = \"127.0.0.1:8080\"\napi_key = \"{key}\"\n"
            ),
        ),
    ] {
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(load(None, &env).unwrap().config.server.api_key.unwrap().0, key, "kept over restarts");
}
