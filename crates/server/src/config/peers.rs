//! Sections of the other runtimes: read so that people's files go through a check and misspelt keys are named,
//! without effect until those runtimes are here.

use super::reader::Section;

/// `[docker]`.
pub(super) fn docker(mut section: Section<'_, '_>) {
    section.text("network_mode");
    section.int("api_timeout", 1..=i64::MAX);
    section.text("host_ip");
    section.list("drop_capabilities");
    section.flag("no_new_privileges", true);
    section.text("apparmor_profile");
    section.text("seccomp_profile");
    section.int("pids_limit", 0..=i64::MAX);
    let min: i64 = section.int_or("port_range_min", 1024..=65_535, 40_000);
    let max: i64 = section.int_or("port_range_max", 1024..=65_535, 60_000);
    if max - min < 100 {
        section.refuse::<()>("port_range_max", "it must exceed port_range_min by at least 100");
    }
    section.parsed("publish_host", |text| {
        text.parse::<std::net::Ipv4Addr>().map_err(|_| "an IPv4 address is expected")
    });
    section.map("sandbox_env");
    section.list("sandbox_binds");
    section.end();
}

/// `[egress]`. Returns whether an image is named.
pub(super) fn egress(mut section: Section<'_, '_>) {
    section.text("image");
    let nft = section.word("mode", &[("dns", false), ("dns+nft", true)], false);
    section.flag("disable_ipv6", true);
    section.parsed("otlp_endpoint", |text| {
        let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        match rest {
            Some(host) if !host.is_empty() && !host.starts_with('/') => Ok(()),
            _ => Err("an address that begins with http:// or https:// is expected"),
        }
    });
    section.float_or("readiness_timeout_seconds", 0.0, true, 30.0);
    section.map("requests");
    section.map("limits");
    let mut proxy = section.section("upstream_proxy");
    if proxy.present() {
        if !nft {
            proxy.refuse::<()>("url", "[egress.upstream_proxy] needs egress.mode = \"dns+nft\"");
        }
        if proxy.text("url").is_none() {
            proxy.refuse::<()>("url", "it is required");
        }
        if proxy.text("authorization").is_some_and(|text| text.contains(['\r', '\n'])) {
            proxy.refuse::<()>("authorization", "it must not hold a line break");
        }
        proxy.text("ca_cert_path");
        proxy.text("ca_secret_name");
    }
    proxy.end();
    section.end();
}

/// `[ingress]`. Returns whether a gateway is configured.
pub(super) fn ingress(mut section: Section<'_, '_>) -> bool {
    let gateway = section.word("mode", &[("direct", false), ("gateway", true)], false);
    let mut address = section.section("gateway");
    let has_address = address.text("address").is_some();
    if has_address && !gateway {
        address.refuse::<()>("address", "it needs ingress.mode = \"gateway\"");
    }
    if gateway && !has_address {
        address.refuse::<()>("address", "it is required with ingress.mode = \"gateway\"");
    }
    let mut route = address.section("route");
    route.word("mode", &[("wildcard", ()), ("header", ()), ("uri", ())], ());
    route.end();
    address.end();
    let mut access = section.section("secure_access");
    if access.present() && !gateway {
        access.refuse::<()>("keys", "[ingress.secure_access] needs ingress.mode = \"gateway\"");
    }
    access.text("active_key");
    for mut key in access.sections("keys") {
        key.text("key_id");
        key.text("key");
        key.end();
    }
    access.end();
    section.end();
    gateway
}

/// `[storage]`.
pub(super) fn storage(mut section: Section<'_, '_>) -> Vec<String> {
    let allowed = section.list("allowed_host_paths").unwrap_or_default();
    section.text("volume_default_size");
    section.text("ossfs_mount_root");
    section.end();
    allowed
}

/// `[secure_runtime]`. Returns whether one is asked for.
pub(super) fn secure_runtime(mut section: Section<'_, '_>) -> bool {
    let words = [("gvisor", true), ("kata", true), ("firecracker", true)];
    let wanted = section.word("type", &words, false);
    let docker = section.text("docker_runtime").is_some();
    let class = section.text("k8s_runtime_class").is_some();
    if !wanted && (docker || class) {
        section.refuse::<()>("type", "it is required when a runtime is named");
    }
    section.end();
    wanted
}

/// `[kubernetes]` and `[agent_sandbox]`.
pub(super) fn kubernetes(root: &mut Section<'_, '_>) {
    let mut section = root.section("kubernetes");
    for key in [
        "kubeconfig_path",
        "namespace",
        "workload_provider",
        "batchsandbox_template_file",
        "image_pull_policy",
        "fastpath_endpoint",
        "fastpath_resource_pool",
        "template_s3_publish_secret",
    ] {
        section.text(key);
    }
    section.ignore("execd_init_resources");
    for key in [
        "sandbox_create_timeout_seconds",
        "pool_acquisition_timeout_seconds",
        "informer_resync_seconds",
        "informer_watch_timeout_seconds",
    ] {
        section.int(key, 1..=i64::MAX);
    }
    section.float_or("sandbox_create_poll_interval_seconds", 0.0, true, 1.0);
    for key in ["read_qps", "write_qps"] {
        section.float_or(key, 0.0, false, 0.0);
    }
    for key in ["read_burst", "write_burst"] {
        section.int(key, 0..=i64::MAX);
    }
    for key in ["fastpath_timeout_seconds", "fastpath_wait_ready_seconds"] {
        section.float_or(key, 1.0, false, 30.0);
    }
    section.flag("insecure_skip_tls_verify", false);
    // Of older releases.
    for key in ["informer_enabled", "service_account", "snapshot_create_timeout_seconds"] {
        section.ignore(key);
    }
    section.end();
    let mut agent = root.section("agent_sandbox");
    agent.text("template_file");
    agent.word("shutdown_policy", &[("Delete", ()), ("Retain", ())], ());
    agent.flag("ingress_enabled", true);
    agent.end();
}
