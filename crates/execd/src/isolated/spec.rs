//! What a request for a session may ask, and the plan that it becomes.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::time::Duration;

use http::StatusCode;
use osb_protocol::execd::{EnvPassthrough, IsolatedSessionSpec, code};

use super::isolator::wire::{Bind, Mode, Plan, Tree, Who};
use super::script::Kind;
use crate::app::App;
use crate::command::prepare::{DEFAULT_PATH, shell};
use crate::http::ApiError;

/// Bound of a session's upper layers in memory, if those on disk may not take less.
const UPPER_IN_MEMORY: u64 = 1 << 30;
/// Bound of everything else that a session keeps in memory, each by itself, where the sandbox has no limit.
const MEMORY: u64 = 512 << 20;
/// Trees and binds of one session, each.
const MOST_MOUNTS: usize = 64;
/// Names that do not pass unless somebody says which do; `*` stands for anything.
const SECRET: [&str; 9] =
    ["*_API_KEY", "*_TOKEN", "*_SECRET", "*_PASSWORD", "AWS_*", "ALI_*", "ALIYUN_*", "K8S_*", "KUBE_*"];

/// A request that makes sense.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) plan: Plan,
    pub(super) kind: Kind,
    /// Ends after so much time without a run.
    pub(super) idle: Option<Duration>,
    /// Whether runs in the background have a place to write.
    pub(super) background: bool,
}

/// 400, the request's form is wrong.
fn shape(message: impl Into<String>) -> ApiError {
    ApiError::invalid(message)
}

/// 400, what it names cannot be.
pub(super) fn refused(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, code::RUNTIME_ERROR, message)
}

/// Checks everything that needs no look at the disk.
///
/// # Errors
/// What is wrong.
pub(super) fn check(app: &App, spec: &IsolatedSessionSpec, id: &str) -> Result<Checked, ApiError> {
    let own_tmp = match spec.profile.as_deref().unwrap_or_default() {
        "" | "strict" => true,
        "balanced" => false,
        other => return Err(refused(format!("'profile' is 'strict' or 'balanced', not {other:?}"))),
    };
    let trees = trees(spec)?;
    let binds = binds(spec)?;
    let idle = u64::try_from(spec.idle_timeout_seconds.unwrap_or(0))
        .map_err(|_| shape("'idle_timeout_seconds' must not be negative; 0 is never"))?;
    let env = environment(app, spec.env_passthrough.as_ref())?;
    let path = env
        .iter()
        .find_map(|(name, value)| (name == "PATH").then_some(value.as_os_str()))
        .unwrap_or_else(|| std::ffi::OsStr::new(DEFAULT_PATH));
    let (shell, name) = shell(path);
    let kind = if name == "bash" { Kind::Bash } else { Kind::Sh };
    let config = app.isolated.config();
    let writable = |tree: &Tree| matches!(tree.mode, Mode::ReadWrite | Mode::Overlay { on_disk: true });
    let plan = Plan {
        id: id.to_owned(),
        binds,
        allowed: config.allowed_writable.clone(),
        own_tmp,
        share_net: spec.share_net.unwrap_or(true),
        who: who(spec)?,
        env: env
            .into_iter()
            .map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat())
            .collect(),
        shell: shell.to_string_lossy().into_owned(),
        argv: kind.argv(),
        memory_bytes: app.limits.memory_bytes.map_or(MEMORY, |limit| (limit / 2).max(1 << 20)),
        upper_bytes: config.upper_max_bytes.map_or(UPPER_IN_MEMORY, |bytes| bytes.min(UPPER_IN_MEMORY)),
        refused_calls: config.refused_calls.clone(),
        trees,
    };
    let background = plan.trees.first().is_some_and(writable);
    Ok(Checked {
        plan,
        kind,
        idle: Some(Duration::from_secs(idle)).filter(|idle| !idle.is_zero()),
        background,
    })
}

fn absolute(what: &str, path: &str) -> Result<String, String> {
    if path.contains('\0') {
        return Err(format!("{what} holds a NUL byte"));
    }
    if !path.starts_with('/') {
        return Err(format!("{what} must be an absolute path, not {path:?}"));
    }
    if Path::new(path).components().any(|component| component == std::path::Component::ParentDir) {
        return Err(format!("{what}: {path:?} must not hold '..'"));
    }
    let clean = Path::new(path).components().collect::<std::path::PathBuf>();
    Ok(clean.to_string_lossy().into_owned())
}

fn trees(spec: &IsolatedSessionSpec) -> Result<Vec<Tree>, ApiError> {
    let mode = |what: &str, mode: Option<&str>, persist: Option<bool>| {
        let mode = match mode.unwrap_or_default() {
            "" | "overlay" => Mode::Overlay { on_disk: persist.unwrap_or(true) },
            "rw" => Mode::ReadWrite,
            "ro" => Mode::ReadOnly,
            other => return Err(shape(format!("{what}.mode is 'rw', 'ro' or 'overlay', not {other:?}"))),
        };
        if persist.is_some() && !matches!(mode, Mode::Overlay { .. }) {
            return Err(shape(format!("{what}.persist goes with the mode 'overlay' only")));
        }
        Ok(mode)
    };
    let mut trees = Vec::new();
    if let Some(workspace) = &spec.workspace {
        let path = absolute("workspace.path", &workspace.path).map_err(shape)?;
        trees.push(Tree { path, mode: mode("workspace", workspace.mode.as_deref(), None)? });
    }
    for (number, overlay) in spec.overlays.iter().flatten().enumerate() {
        let what = format!("overlays[{number}]");
        let path = absolute(&format!("{what}.path"), &overlay.path).map_err(shape)?;
        trees.push(Tree { path, mode: mode(&what, overlay.mode.as_deref(), overlay.persist)? });
    }
    if trees.is_empty() {
        return Err(shape("'workspace' or at least one of 'overlays' is required"));
    }
    if trees.len() > MOST_MOUNTS {
        return Err(shape(format!("more than {MOST_MOUNTS} trees")));
    }
    for (number, one) in trees.iter().enumerate() {
        for other in &trees[..number] {
            let (one, other) = (Path::new(&one.path), Path::new(&other.path));
            if one.starts_with(other) || other.starts_with(one) {
                return Err(shape(format!(
                    "{} and {} overlap; trees must lie beside one another",
                    other.display(),
                    one.display()
                )));
            }
        }
    }
    Ok(trees)
}

fn binds(spec: &IsolatedSessionSpec) -> Result<Vec<Bind>, ApiError> {
    let mut binds = Vec::new();
    for path in spec.extra_writable.iter().flatten() {
        let path = absolute("a path of 'extra_writable'", path).map_err(refused)?;
        binds.push(Bind { source: path.clone(), dest: path, readonly: false });
    }
    for bind in spec.binds.iter().flatten() {
        let source = absolute("binds.source", &bind.source).map_err(refused)?;
        let dest = match bind.dest.as_deref().filter(|dest| !dest.is_empty()) {
            Some(dest) => absolute("binds.dest", dest).map_err(refused)?,
            None => source.clone(),
        };
        if dest == "/" || ["/proc", "/sys", "/dev"].iter().any(|place| Path::new(&dest).starts_with(place)) {
            return Err(refused(format!("binds.dest: nothing can be mounted on '{dest}'")));
        }
        binds.push(Bind { source, dest, readonly: bind.readonly });
    }
    if binds.len() > MOST_MOUNTS {
        return Err(shape(format!("more than {MOST_MOUNTS} binds")));
    }
    Ok(binds)
}

/// The targets of binds must exist. Touches the file system.
///
/// # Errors
/// One does not.
pub(super) fn targets_exist(plan: &Plan) -> Result<(), ApiError> {
    for bind in &plan.binds {
        if let Err(error) = std::fs::symlink_metadata(&bind.dest) {
            return Err(refused(format!("binds: '{}' must exist: {error}", bind.dest)));
        }
    }
    Ok(())
}

fn who(spec: &IsolatedSessionSpec) -> Result<Who, ApiError> {
    if spec.uid == Some(u32::MAX) || spec.gid == Some(u32::MAX) {
        return Err(shape("'uid' and 'gid' are at most 4294967294"));
    }
    let (own_uid, own_gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (uid, gid) = (spec.uid.unwrap_or(own_uid), spec.gid.unwrap_or(own_gid));
    match spec.uid_mode.as_deref().unwrap_or_default() {
        "" | "setpriv" if (uid, gid) == (own_uid, own_gid) => Ok(Who::Daemon),
        "" | "setpriv" => Ok(Who::Real { uid, gid }),
        "userns" => Ok(Who::Seeming { uid, gid }),
        other => Err(shape(format!("'uid_mode' is 'setpriv' or 'userns', not {other:?}"))),
    }
}

fn environment(app: &App, rule: Option<&EnvPassthrough>) -> Result<Vec<(OsString, OsString)>, ApiError> {
    let none = EnvPassthrough::default();
    let rule = rule.unwrap_or(&none);
    let listed = |name: &OsString| rule.keys.iter().any(|key| name == key.as_str());
    let passes: &dyn Fn(&OsString) -> bool = match rule.mode.as_deref().unwrap_or_default() {
        "allow" => &listed,
        "" | "deny" if rule.keys.is_empty() => &|name| !is_secret(name),
        "" | "deny" => &|name| !listed(name),
        other => return Err(shape(format!("'env_passthrough.mode' is 'allow' or 'deny', not {other:?}"))),
    };
    let mut env = std::collections::BTreeMap::new();
    for (name, value) in &app.binding().env {
        if passes(name) && !crate::start::is_private(name) {
            env.insert(name.clone(), value.clone());
        }
    }
    Ok(env.into_iter().collect())
}

fn is_secret(name: &OsString) -> bool {
    let name = name.clone().into_vec().to_ascii_uppercase();
    SECRET.iter().any(|pattern| match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(end), _) => name.ends_with(end.as_bytes()),
        (_, Some(start)) => name.starts_with(start.as_bytes()),
        _ => name == pattern.as_bytes(),
    })
}
