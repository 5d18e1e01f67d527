//! `/ready` and `/internal/init`: the control plane binds a running daemon to a sandbox, once or again and again.
//!
//! Whoever may reach the port may bind; the address is the guard that the protocol gives. So a daemon is bindable
//! only where that is meant: as an ordinary daemon, and with a secret when one was delivered at the start. Under the
//! embedded engine, whose orders say everything and whose port belongs to the sandbox's own programs, it is not.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use osb_protocol::execd::{ReadyResponse, RuntimeInitRequest, RuntimeInitResponse, code};

use crate::app::App;
use crate::binding::{Access, Binding, SANDBOX_ID};
use crate::command::envfile;
use crate::hooks::{self, CONFIG_FILE, Plan, TRANSPORT};
use crate::http::{ApiError, Json, json, not_found};
use crate::lifecycle::Phase;
use crate::start;

/// Header with the secret of [`SECRET`].
pub const SECRET_HEADER: HeaderName = HeaderName::from_static("x-execd-runtime-init-token");
/// Variable with a secret that a binding must bring, where the network is no guard.
pub const SECRET: &str = "EXECD_RUNTIME_INIT_TOKEN";

/// Longest id of a sandbox.
const ID_LENGTH: usize = 128;
/// Longest name of a variable.
const NAME_LENGTH: usize = 256;
/// Bounds of telemetry attributes: how many, and how long names and values.
const ATTRIBUTES: (usize, usize, usize) = (64, 128, 1024);
/// Attributes that the binding itself gives.
const OWN_ATTRIBUTES: [&str; 2] = ["sandbox_id", "generation"];

/// The routes.
pub fn router() -> axum::Router<App> {
    axum::Router::new().route("/ready", get(ready)).route("/internal/init", post(init))
}

async fn ready(State(app): State<App>) -> Response {
    let initialized = app.lifecycle.phase() == Phase::Ready;
    let binding = app.binding();
    let bound = binding.generation.is_some();
    let mut answer = json(&ReadyResponse {
        initialized,
        sandbox_id: binding.sandbox_id.clone().filter(|_| bound),
        generation: binding.generation,
    });
    if !initialized {
        *answer.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    answer
}

async fn init(
    State(app): State<App>,
    headers: HeaderMap,
    Json(request): Json<RuntimeInitRequest>,
) -> Result<Response, ApiError> {
    let Some(access) = &app.lifecycle.init_access else { return Ok(not_found().await.into_response()) };
    let sent = headers.get(&SECRET_HEADER).map(HeaderValue::as_bytes);
    if !access.admits(sent) {
        let message = format!("Unauthorized: invalid or missing header {SECRET_HEADER}");
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, code::UNAUTHORIZED, message));
    }
    let checked = Checked::new(request)?;
    // In a task of its own: a client that leaves must not stop it half way.
    match tokio::spawn(apply(app, checked)).await {
        Ok(result) => result.map(|answer| json(&answer)),
        Err(error) => Err(ApiError::runtime(format!("the binding was broken off: {error}"))),
    }
}

/// What becomes of the entrypoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Keep,
    Restart,
}

/// A request that keeps all rules.
#[derive(Debug)]
struct Checked {
    id: String,
    generation: u64,
    hash: Option<[u8; 32]>,
    envs: BTreeMap<String, String>,
    plan: Option<Plan>,
    attributes: BTreeMap<String, String>,
    policy: Policy,
    preserve: bool,
    warnings: Vec<String>,
    /// As it came.
    raw: RuntimeInitRequest,
}

impl Checked {
    fn new(request: RuntimeInitRequest) -> Result<Self, ApiError> {
        let raw = request.clone();
        let invalid = |message: String| ApiError::invalid(message);
        let id = request.sandbox_id.trim().to_owned();
        if id.is_empty() || id.chars().count() > ID_LENGTH || id.contains(char::is_control) {
            return Err(invalid(format!("'sandboxId' must have 1 to {ID_LENGTH} characters")));
        }
        if request.generation == 0 {
            return Err(invalid("'generation' must be above 0".to_owned()));
        }
        let hash = match request.access_token_hash.as_deref() {
            None | Some("") => None,
            Some(text) => Some(digest(text).ok_or_else(|| {
                invalid("'accessTokenHash' must be 'sha256:' and 64 hexadecimal digits".to_owned())
            })?),
        };
        let envs = request.envs.unwrap_or_default();
        for (name, value) in &envs {
            if name.len() > NAME_LENGTH || !envfile::is_name(name.as_bytes()) {
                return Err(invalid(format!("'envs': {name:?} cannot be the name of a variable")));
            }
            if is_reserved(name) {
                return Err(invalid(format!("'envs': {name} is reserved for execd")));
            }
            if value.contains('\0') {
                return Err(invalid(format!("'envs': the value of {name} holds a NUL byte")));
            }
        }
        let plan = match request.lifecycle {
            None => None,
            Some(hooks) => {
                let plan = hooks::parse(&hooks.to_string()).and_then(|hooks| Plan::new(&hooks));
                Some(plan.map_err(|error| invalid(format!("'lifecycle': {error}")))?)
            }
        };
        let mut attributes = request.telemetry.and_then(|telemetry| telemetry.attributes).unwrap_or_default();
        let mut warnings = Vec::new();
        let (most, name_length, value_length) = ATTRIBUTES;
        if attributes.len() > most {
            return Err(invalid(format!("'telemetry.attributes' must not have more than {most} entries")));
        }
        for (name, value) in &attributes {
            if name.trim().is_empty() || name.len() > name_length {
                return Err(invalid(format!(
                    "'telemetry.attributes': a name must have 1 to {name_length} characters"
                )));
            }
            if value.len() > value_length {
                return Err(invalid(format!(
                    "'telemetry.attributes': the value of {name:?} must not have more than {value_length} characters"
                )));
            }
        }
        for name in OWN_ATTRIBUTES {
            if attributes.remove(name).is_some() {
                warnings.push(format!("telemetry attribute {name} is reserved and was dropped"));
            }
        }
        let policy = match request.entrypoint_policy.as_deref() {
            None | Some("" | "keep") => Policy::Keep,
            Some("restart") => Policy::Restart,
            Some(_) => return Err(invalid("'entrypointPolicy' must be 'keep' or 'restart'".to_owned())),
        };
        let preserve = request.preserve_runtime_state.unwrap_or(false);
        let generation = request.generation;
        Ok(Self { id, generation, hash, envs, plan, attributes, policy, preserve, warnings, raw })
    }

    /// What the daemon is bound to from now on. `env` is its environment from the start.
    fn binding(&self, mut env: Vec<(OsString, OsString)>, access: Access) -> Binding {
        env.extend(self.envs.iter().map(|(name, value)| (name.into(), value.into())));
        env.push((SANDBOX_ID.into(), OsString::from(&self.id)));
        Binding {
            sandbox_id: Some(self.id.clone()),
            generation: Some(self.generation),
            attributes: self.attributes.clone(),
            access: self.hash.map_or(access, Access::Hash),
            env,
        }
    }
}

fn digest(text: &str) -> Option<[u8; 32]> {
    let digits = text.strip_prefix("sha256:")?;
    if digits.len() != 64 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut hash = [0; 32];
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(hash)
}

fn is_reserved(name: &str) -> bool {
    let upper = name.to_ascii_uppercase();
    start::is_private(OsStr::new(&upper))
        || matches!(upper.as_str(), "EXECD_ENVS" | TRANSPORT | CONFIG_FILE | SECRET)
}

/// The request for a daemon that comes later: a token that an earlier one has brought still counts.
fn to_remember(request: &RuntimeInitRequest, access: &Access) -> RuntimeInitRequest {
    use std::fmt::Write as _;
    let mut request = request.clone();
    if let Access::Hash(hash) = access {
        let mut text = "sha256:".to_owned();
        for byte in hash {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
        }
        request.access_token_hash = Some(text);
    }
    request
}

/// What a daemon that has died was bound to, for its successor: the binding, and hooks if it brought any.
pub(crate) fn restore(
    request: RuntimeInitRequest,
    env: Vec<(OsString, OsString)>,
    access: Access,
) -> Result<(Binding, Option<Plan>), String> {
    let mut checked = Checked::new(request).map_err(|error| error.message)?;
    let plan = checked.plan.take();
    Ok((checked.binding(env, access), plan))
}

async fn apply(app: App, request: Checked) -> Result<RuntimeInitResponse, ApiError> {
    let life = &app.lifecycle;
    let Ok(_turn) = life.turn.try_lock() else {
        return Err(ApiError::new(
            StatusCode::CONFLICT,
            code::ALREADY_INITIALIZED,
            "the daemon is being started or bound at this moment; ask GET /ready and try again",
        ));
    };
    let before = life.phase();
    life.enter(Phase::Binding);
    let result = bind(&app, request, before).await;
    match &result {
        Ok(answer) => {
            tracing::info!(sandbox = answer.sandbox_id, generation = answer.generation, "bound");
            life.enter(Phase::Ready);
        }
        Err(error) => {
            tracing::error!(%error, "the binding could not be applied");
            life.enter(Phase::Failed);
        }
    }
    result
}

async fn bind(app: &App, request: Checked, before: Phase) -> Result<RuntimeInitResponse, ApiError> {
    let life = &app.lifecycle;
    let mut warnings = request.warnings.clone();
    let owned = life.superior.as_ref();
    let restart = request.policy == Policy::Restart && !request.preserve;
    if !request.preserve {
        life.unfollow().await;
        app.commands.close_all().await;
        app.sessions.close_all().await;
        app.terminals.close_all().await;
        app.isolated.close_all().await;
        if let Some(superior) = owned.filter(|_| restart) {
            superior.end_entrypoint().await.map_err(ApiError::runtime)?;
        }
    }
    app.binding.set(request.binding(life.env.clone(), app.binding().access.clone()));
    if let Some(superior) = owned {
        superior.remember(to_remember(&request.raw, &app.binding().access));
    }
    let plan = request.plan.map_or_else(|| Arc::clone(&life.plan), Arc::new);
    if !request.preserve {
        life.pre_start(app, &plan).await.map_err(ApiError::runtime)?;
        if let Err(error) = life.follow(app, &plan) {
            tracing::error!(%error, "periodic hooks are not run");
            warnings.push(format!("periodic hooks are not run: {error}"));
        }
    }
    match owned {
        Some(superior) if restart => {
            superior.start_with(&app.binding().env).await.map_err(ApiError::runtime)?;
        }
        Some(superior) if before == Phase::Gated && !superior.has_started() => {
            warnings.push("entrypointPolicy=keep: the entrypoint was not started".to_owned());
        }
        None if request.policy == Policy::Restart => {
            warnings
                .push("entrypointPolicy=restart ignored: execd does not own the entrypoint here".to_owned());
        }
        _ => {}
    }
    Ok(RuntimeInitResponse {
        status: "initialized".to_owned(),
        sandbox_id: request.id,
        generation: request.generation,
        warning: warnings,
    })
}
