//! What a create must fulfil, in the order in which the contract checks it.

use std::collections::BTreeMap;

use osb_protocol::labels::{self, LabelError};
use osb_protocol::lifecycle::{CreateSandboxRequest, MIN_TIMEOUT_SECONDS, PlatformSpec};
use osb_protocol::time::WireTime;
use osb_runtime::{Credentials, ImageSource, Limits, Platform, SandboxSpec};

use super::{hooks, volumes};
use crate::config::Config;
use crate::error::{ApiError, Issue, Loc};
use crate::sandbox::{Kept, Order, RENEW_EXTENSION, SHOWN_EXTENSIONS};

/// Variable that carries hooks to a daemon; not for clients.
const LIFECYCLE_VARIABLE: &str = "OPENSANDBOX_LIFECYCLE";
/// Prefix of variables for the egress service.
const EGRESS_PREFIX: &str = "OPENSANDBOX_EGRESS_";
/// Those of them that a request may set.
const EGRESS_VARIABLES: [&str; 11] = [
    "LOG_LEVEL",
    "DNS_UPSTREAM_TIMEOUT",
    "MITMPROXY_SSL_INSECURE",
    "MITMPROXY_TRANSPARENT",
    "MITMPROXY_EXTRA_PORTS",
    "DENY_WEBHOOK",
    "METRICS_EXTRA_ATTRS",
    "CREDENTIAL_VAULT_REQUIRE_TLS",
    "CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH",
    "CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS",
    "POLICY_FILE",
];

/// Turns a request into an order.
pub(crate) fn check(request: CreateSandboxRequest, config: &Config) -> Result<Order, ApiError> {
    let created_at = WireTime::now();
    validate(&request)?;
    let mut extensions = request.extensions.unwrap_or_default();
    check_extensions(&extensions)?;
    if is_set(request.snapshot_id.as_deref()) {
        return Err(ApiError::SnapshotNotFound);
    }
    if is_set(extensions.get("poolRef").map(String::as_str)) {
        return Err(ApiError::UnsupportedPoolRef);
    }
    let entrypoint = request.entrypoint.filter(|e| !e.is_empty()).ok_or(ApiError::InvalidEntrypoint)?;
    let command = split(&entrypoint)?;
    let metadata = request.metadata.unwrap_or_default();
    for (key, value) in &metadata {
        labels::check(key, value).map_err(ApiError::InvalidLabel)?;
    }
    let platform = request.platform.map(check_platform).transpose()?;
    let expires_at = check_timeout(request.timeout, created_at, config)?;
    if request.network_policy.is_some() {
        return Err(not_here("networkPolicy is not supported by this runtime yet: create without it"));
    }
    let limits = request.resource_limits.unwrap_or_default();
    let work = check_limits(&limits)?;
    let env = check_env(request.env.unwrap_or_default())?;
    check_size(&command, &env)?;
    let lifecycle = request.lifecycle.map(hooks::check).transpose()?.flatten();
    volumes::check(request.volumes.as_deref().unwrap_or_default(), &config.allowed_host_paths)?;
    let (name, auth) =
        request.image.map(|image| (image.uri.trim().to_owned(), image.auth)).unwrap_or_default();
    let image = ImageSource {
        name,
        platform: platform
            .as_ref()
            .map(|platform| Platform { os: platform.os.clone(), arch: platform.arch.clone() }),
        credentials: auth.map(|auth| Credentials { username: auth.username, password: auth.password }),
    };
    extensions.retain(|key, _| key == RENEW_EXTENSION || key.starts_with(SHOWN_EXTENSIONS));
    let endpoint_token = (request.secure_access || config.server.require_endpoint_token).then(token);
    Ok(Order {
        spec: SandboxSpec {
            id: None,
            entrypoint: command,
            env,
            limits: work,
            line_endings: config.execd.line_endings,
            lifecycle,
        },
        image,
        kept: Kept {
            created_at,
            expires_at,
            entrypoint,
            platform,
            metadata,
            extensions,
            limits,
            endpoint_token,
        },
    })
}

/// 422: limits of members, then the rules between them.
fn validate(request: &CreateSandboxRequest) -> Result<(), ApiError> {
    let mut issues = Vec::new();
    let mut refuse = |loc: &[&str], msg: &str| {
        let steps: Vec<&str> = std::iter::once("body").chain(loc.iter().copied()).collect();
        issues.push(Issue::new("value_error", &steps, msg));
    };
    if request.timeout.is_some_and(|seconds| seconds < MIN_TIMEOUT_SECONDS) {
        refuse(&["timeout"], "at least 60 seconds are expected, or none for a sandbox that never expires");
    }
    if request.entrypoint.as_ref().is_some_and(Vec::is_empty) {
        refuse(&["entrypoint"], "at least one item is expected");
    }
    if request.template_id.as_deref() == Some("") {
        refuse(&["templateId"], "at least one character is expected");
    }
    for rule in request.network_policy.iter().flat_map(|policy| &policy.egress) {
        if rule.target.is_empty() {
            refuse(&["networkPolicy", "egress", "target"], "at least one character is expected");
        }
    }
    if let Some(lifecycle) = &request.lifecycle {
        hooks::malformed(lifecycle, &mut refuse);
    }
    for (at, volume) in request.volumes.iter().flatten().enumerate() {
        for (member, msg) in volumes::malformed(volume) {
            let at = at.to_string();
            refuse(&["volumes", &at, member], msg);
        }
    }
    if issues.is_empty()
        && let Some(msg) = broken_rule(request)
    {
        issues.push(Issue {
            kind: "value_error",
            loc: vec![Loc::Name("body".to_owned())],
            msg: msg.to_owned(),
        });
    }
    if issues.is_empty() { Ok(()) } else { Err(ApiError::Validation(issues)) }
}

/// The first rule between members that is broken, in the contract's order.
fn broken_rule(request: &CreateSandboxRequest) -> Option<&'static str> {
    if request.env.as_ref().is_some_and(|env| env.contains_key(LIFECYCLE_VARIABLE)) {
        return Some("env must not set OPENSANDBOX_LIFECYCLE: it is reserved");
    }
    let image = request.image.as_ref().is_some_and(|image| !image.uri.trim().is_empty());
    let snapshot = is_set(request.snapshot_id.as_deref());
    if is_set(request.template_id.as_deref()) {
        let other = image
            || snapshot
            || request.entrypoint.is_some()
            || request.env.is_some()
            || request.resource_limits.is_some()
            || request.resource_requests.is_some()
            || request.volumes.is_some()
            || request.platform.is_some()
            || request.credential_proxy.is_some()
            || request.lifecycle.is_some()
            || request.secure_access;
        if other {
            return Some(
                "templateId excludes image, snapshotId, entrypoint, env, resourceLimits, resourceRequests, \
                 volumes, platform, credentialProxy, lifecycle and secureAccess",
            );
        }
        return request.timeout.is_none().then_some("templateId needs timeout");
    }
    if is_set(request.extensions.as_ref().and_then(|e| e.get("poolRef")).map(String::as_str)) {
        return (request.lifecycle.is_some() || snapshot)
            .then_some("extensions.poolRef excludes lifecycle and snapshotId");
    }
    if request.credential_proxy.as_ref().is_some_and(|proxy| proxy.enabled)
        && request.network_policy.is_none()
    {
        return Some("credentialProxy needs networkPolicy");
    }
    if image == snapshot {
        return Some("exactly one of image and snapshotId is required");
    }
    if image && request.entrypoint.is_none() {
        return Some("image needs entrypoint");
    }
    request.resource_limits.is_none().then_some("resourceLimits is required; {} takes the server's defaults")
}

fn check_extensions(extensions: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if let Some(text) = extensions.get(RENEW_EXTENSION)
        && !text.trim().parse::<u32>().is_ok_and(|seconds| (300..=86_400).contains(&seconds))
    {
        return Err(ApiError::InvalidParameter(format!(
            "extensions.{RENEW_EXTENSION} must be a whole number of seconds from 300 to 86400"
        )));
    }
    Ok(())
}

fn check_platform(platform: PlatformSpec) -> Result<PlatformSpec, ApiError> {
    let os = platform.os.trim().to_ascii_lowercase();
    let arch = platform.arch.trim().to_ascii_lowercase();
    if !matches!(os.as_str(), "linux" | "windows") {
        return Err(ApiError::InvalidParameter("platform.os must be linux or windows".to_owned()));
    }
    if !matches!(arch.as_str(), "amd64" | "arm64") {
        return Err(ApiError::InvalidParameter("platform.arch must be amd64 or arm64".to_owned()));
    }
    let own = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    if os != "linux" || arch != own {
        return Err(not_here(&format!("this server runs sandboxes of platform linux/{own} only")));
    }
    Ok(PlatformSpec { os, arch })
}

fn check_timeout(
    timeout: Option<i64>,
    created_at: WireTime,
    config: &Config,
) -> Result<Option<WireTime>, ApiError> {
    let Some(seconds) = timeout else { return Ok(None) };
    if let Some(max) = config.server.max_sandbox_timeout
        && seconds > max
    {
        return Err(ApiError::InvalidParameter(format!(
            "timeout must not exceed {max} seconds on this server (server.max_sandbox_timeout_seconds)"
        )));
    }
    created_at.plus_seconds(seconds).map(Some).ok_or_else(|| {
        ApiError::InvalidParameter("timeout is too large: it ends after the year 9999".to_owned())
    })
}

/// Unknown keys are accepted and have no effect; `pids` and `disk` are ours.
fn check_limits(limits: &BTreeMap<String, String>) -> Result<Limits, ApiError> {
    fn read<T: std::str::FromStr>(limits: &BTreeMap<String, String>, key: &str) -> Result<Option<T>, ApiError>
    where
        T::Err: std::fmt::Display,
    {
        limits
            .get(key)
            .map(|text| {
                text.parse()
                    .map_err(|error| ApiError::InvalidParameter(format!("resourceLimits.{key}: {error}")))
            })
            .transpose()
    }
    if limits.contains_key("gpu") {
        return Err(not_here("resourceLimits.gpu is not supported by this runtime: create without it"));
    }
    let pids = match limits.get("pids") {
        None => None,
        Some(text) => Some(text.trim().parse::<u32>().ok().filter(|n| *n > 0).ok_or_else(|| {
            ApiError::InvalidParameter("resourceLimits.pids: a positive whole number is expected".to_owned())
        })?),
    };
    Ok(Limits {
        cpu: read(limits, "cpu")?,
        memory: read(limits, "memory")?,
        pids,
        disk: read(limits, "disk")?,
    })
}

/// Null values leave the variable out. Variables of the egress service reach no sandbox.
fn check_env(env: BTreeMap<String, Option<String>>) -> Result<Vec<(String, String)>, ApiError> {
    let mut kept = Vec::with_capacity(env.len());
    for (name, value) in env {
        if let Some(rest) = name.strip_prefix(EGRESS_PREFIX) {
            if !EGRESS_VARIABLES.contains(&rest) {
                return Err(ApiError::InvalidParameter(format!(
                    "env must not set {EGRESS_PREFIX}* variables other than the documented ones"
                )));
            }
            continue;
        }
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ApiError::InvalidParameter(
                "env has a name that is empty or holds '=' or a null byte".to_owned(),
            ));
        }
        let Some(value) = value else { continue };
        if value.contains('\0') {
            return Err(ApiError::InvalidParameter(
                "env has a value with a null byte, which no process can receive".to_owned(),
            ));
        }
        kept.push((name, value));
    }
    Ok(kept)
}

/// What the kernel takes is known before a sandbox is made for it.
fn check_size(command: &[String], env: &[(String, String)]) -> Result<(), ApiError> {
    /// Longest argument or variable, with the null byte at its end.
    const LONGEST: usize = 128 << 10;
    /// Arguments and variables together, with a pointer for each.
    const TOGETHER: usize = 2 << 20;
    let arguments = command.iter().map(|word| word.len() + 1);
    let variables = env.iter().map(|(name, value)| name.len() + value.len() + 2);
    let mut sum = 0;
    for length in arguments.chain(variables) {
        sum += length + size_of::<usize>();
        if length > LONGEST || sum > TOGETHER {
            return Err(ApiError::InvalidParameter(
                "entrypoint and env are too long: a program receives at most 128 KiB in each argument or variable \
                 and 2 MiB in all; put the data into a file"
                    .to_owned(),
            ));
        }
    }
    Ok(())
}

/// A list of one text that holds a blank is split as a shell would; anything else is the command as it is.
fn split(entrypoint: &[String]) -> Result<Vec<String>, ApiError> {
    if entrypoint.iter().any(|word| word.contains('\0')) {
        return Err(ApiError::InvalidParameter("entrypoint holds a null byte".to_owned()));
    }
    let words = match entrypoint {
        [line] if line.contains(char::is_whitespace) => super::words::split(line).ok_or_else(|| {
            ApiError::InvalidParameter(
                "entrypoint has an open quotation mark or a dangling backslash".to_owned(),
            )
        })?,
        words => words.to_vec(),
    };
    if words.first().is_none_or(|program| program.trim().is_empty()) {
        return Err(ApiError::InvalidEntrypoint);
    }
    Ok(words)
}

fn is_set(text: Option<&str>) -> bool {
    text.is_some_and(|text| !text.trim().is_empty())
}

fn not_here(message: &str) -> ApiError {
    ApiError::InvalidParameter(message.to_owned())
}

/// 32 random characters.
fn token() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// Checks the additions of a metadata patch.
pub(crate) fn check_patch(patch: &BTreeMap<String, Option<String>>) -> Result<(), ApiError> {
    for key in patch.keys() {
        if key.starts_with(labels::RESERVED_PREFIX) {
            return Err(ApiError::ReservedLabel(LabelError::Reserved(key.chars().take(80).collect())));
        }
    }
    for (key, value) in patch {
        if let Some(value) = value {
            labels::check(key, value).map_err(ApiError::InvalidLabel)?;
        }
    }
    Ok(())
}
