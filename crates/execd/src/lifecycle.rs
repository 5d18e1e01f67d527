//! From a daemon that answers to a sandbox that works: the hook before the entrypoint, the entrypoint, the hooks by
//! the clock, and all of it again when the daemon is bound to another sandbox.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::binding::Access;
use crate::hooks::periodic::Running;
use crate::hooks::{self, Plan};
use crate::init::Superior;

/// How far the daemon is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Waits for its binding; serves nothing else.
    Gated,
    /// The hook before the entrypoint is still to run, or runs.
    Starting,
    /// Being bound anew.
    Binding,
    /// Work may begin.
    Ready,
    /// Binding it has failed.
    Failed,
}

/// How a daemon comes to work; nothing here changes.
#[derive(Debug, Default)]
pub struct Setup {
    /// Hooks from the start.
    pub plan: Arc<Plan>,
    /// Whether the hook before the entrypoint is done with, as for a daemon that replaces a dead one.
    pub begun: bool,
    /// File in which a bootstrap script follows the start.
    pub status_file: Option<PathBuf>,
    /// The process that owns the entrypoint, where that is ours.
    pub superior: Option<Superior>,
    /// Who keeps the output of hooks beside the log.
    pub keeper: Option<tokio::sync::Mutex<pipe::Sender>>,
    /// Environment from the start, without the daemon's own variables.
    pub env: Vec<(OsString, OsString)>,
    /// Who may bind the daemon; `None` is nobody.
    pub init_access: Option<Access>,
    /// Whether it has to be bound before anything else is served.
    pub gated: bool,
    /// Whether signals to the daemon are meant for commands as well, as where nobody else would pass them on.
    pub forwards: bool,
}

/// The daemon's way to work.
#[derive(Debug)]
pub struct Lifecycle {
    setup: Setup,
    /// A gated daemon that was bound well.
    opened: AtomicBool,
    phase: watch::Sender<Phase>,
    /// Held by whoever changes what the daemon is bound to.
    pub(crate) turn: tokio::sync::Mutex<()>,
    periodic: Mutex<Option<Arc<Running>>>,
    stop: CancellationToken,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self::new(Setup::default())
    }
}

impl std::ops::Deref for Lifecycle {
    type Target = Setup;

    fn deref(&self) -> &Setup {
        &self.setup
    }
}

impl Setup {
    /// Whether there is something to do before anybody calls.
    #[must_use]
    pub fn is_eager(&self) -> bool {
        !self.plan.is_empty() || self.superior.is_some() || self.status_file.is_some()
    }
}

impl Lifecycle {
    /// At its beginning.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let phase = if setup.gated && !setup.begun {
            Phase::Gated
        } else if setup.begun || !setup.is_eager() {
            Phase::Ready
        } else {
            Phase::Starting
        };
        Self {
            setup,
            opened: AtomicBool::new(phase == Phase::Ready),
            phase: watch::Sender::new(phase),
            turn: tokio::sync::Mutex::default(),
            periodic: Mutex::default(),
            stop: CancellationToken::new(),
        }
    }

    /// How far the daemon is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(crate) fn enter(&self, phase: Phase) {
        match phase {
            Phase::Ready => self.opened.store(true, Ordering::Relaxed),
            Phase::Failed => self.opened.store(false, Ordering::Relaxed),
            Phase::Gated | Phase::Starting | Phase::Binding => {}
        }
        self.phase.send_replace(phase);
    }

    /// Whether nothing is served but what binds the daemon.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.gated && !self.opened.load(Ordering::Relaxed)
    }

    /// Tells the bootstrap script how far the start is.
    ///
    /// # Errors
    /// The script would wait in vain.
    fn report(&self, word: &str) -> Result<(), String> {
        let Some(path) = &self.status_file else { return Ok(()) };
        // The script makes the file; one that is gone means that nobody waits.
        std::fs::File::options()
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(format!("{word}\n").as_bytes()))
            .map_err(|error| format!("{}: the start cannot be reported: {error}", path.display()))
    }

    /// Runs the hook before the entrypoint, if there is one.
    ///
    /// # Errors
    /// The sandbox must not work.
    pub(crate) async fn pre_start(&self, app: &App, plan: &Plan) -> Result<(), String> {
        if let Some(hook) = &plan.pre_start {
            self.report(&format!("running {}", hook.timeout.as_secs()))?;
            if let Err(error) = hooks::run(app, hook, &self.stop).await {
                let _ = self.report("done 1");
                return Err(error);
            }
        }
        self.report("done 0")
    }

    /// Follows the periodic hooks of a plan instead of those before.
    pub(crate) fn follow(&self, app: &App, plan: &Plan) -> Result<(), String> {
        let running = Running::start(app, plan).map_err(|error| error.to_string())?;
        *self.periodic.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(running));
        Ok(())
    }

    /// Ends periodic hooks that run, and follows none any more.
    pub(crate) async fn unfollow(&self) {
        let running = self.periodic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(running) = running {
            running.stop().await;
        }
    }

    /// Ends all hooks.
    pub(crate) async fn close(&self) {
        self.stop.cancel();
        self.unfollow().await;
    }
}

/// The way from the daemon's start to work, unless it waits for its binding.
///
/// # Errors
/// The sandbox must not work; whoever owns the entrypoint has been told.
pub(crate) async fn begin(app: &App) -> Result<(), String> {
    let life = &app.lifecycle;
    if life.phase() == Phase::Gated || !life.is_eager() {
        return Ok(());
    }
    let plan = Arc::clone(&life.plan);
    if !life.begun {
        let _turn = life.turn.lock().await;
        if let Err(error) = life.pre_start(app, &plan).await {
            if let Some(superior) = &life.superior {
                superior.refuse(&error);
            }
            return Err(error);
        }
        if let Some(superior) = &life.superior {
            superior.start().await?;
        }
        life.enter(Phase::Ready);
    }
    // A sandbox that has begun its work goes on without a hook that cannot be followed.
    if let Err(error) = life.follow(app, &plan) {
        tracing::error!(%error, "periodic hooks are not run");
    }
    Ok(())
}
