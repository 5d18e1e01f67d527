//! The commands that can be asked about: all that run, and those that have ended for a while, as long as their number
//! and size stay within the bounds of [`Retention`].

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use osb_protocol::execd::{CommandStatus, CommandUsage};
use tokio::sync::watch;

use super::retention::Retention;
use super::spool::{Spool, Stock};
use crate::process::exit::Consumed;
use crate::process::tree;

/// How much text of ended commands is kept.
const MOST_TEXT: usize = 8 << 20;
/// How many files ended commands may hold open with their output.
const MOST_FILES: u64 = 512;
/// Sweeps come no closer than this.
const SWEEP: Duration = Duration::from_secs(60);

/// How long [`Registry::close_all`] waits for a program that the file system hands out.
const LOADED_WITHIN: Duration = Duration::from_secs(2);

/// Where a command stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The program has not been executed yet.
    Starting,
    /// It runs under this process id.
    Running(i32),
    /// It has ended, or could not be started.
    Ended(Ended),
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    end: End,
    at: Timestamp,
}

/// An end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// Exit code, 128 + signal, or 255 when it could not be started.
    pub exit_code: i32,
    /// What went wrong.
    pub error: Option<String>,
    /// What it has used, where that is known.
    pub consumed: Option<Consumed>,
}

impl End {
    /// Of a command that nothing more is known of.
    #[must_use]
    pub fn failed(exit_code: i32, error: String) -> Self {
        Self { exit_code, error: Some(error), consumed: None }
    }
}

/// One run of a command.
#[derive(Debug)]
pub struct Command {
    /// 32 hexadecimal digits.
    pub id: String,
    /// As the status shows it.
    pub content: String,
    /// Mark of its processes.
    pub tag: u64,
    /// Output of a background command.
    pub spool: Option<Spool>,
    started_at: Timestamp,
    phase: watch::Sender<Phase>,
}

impl Command {
    /// A command that is about to start.
    #[must_use]
    pub fn new(id: uuid::Uuid, content: String, spool: Option<Spool>) -> Self {
        Self {
            id: id.simple().to_string(),
            content,
            tag: tree::tag(id.as_u64_pair().1),
            spool,
            started_at: Timestamp::now(),
            phase: watch::Sender::new(Phase::Starting),
        }
    }

    /// Follows the command.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Its program has been executed.
    pub fn running(&self, pid: i32) {
        self.phase.send_replace(Phase::Running(pid));
    }

    /// The answer to a question about it.
    #[must_use]
    pub fn status(&self) -> CommandStatus {
        let phase = self.phase.borrow();
        let ended = match &*phase {
            Phase::Ended(ended) => Some(ended),
            _ => None,
        };
        CommandStatus {
            id: self.id.clone(),
            content: self.content.clone(),
            running: ended.is_none(),
            exit_code: ended.map(|ended| ended.end.exit_code),
            error: ended.and_then(|ended| ended.end.error.clone()),
            started_at: self.started_at.to_string(),
            finished_at: ended.map(|ended| ended.at.to_string()),
            usage: ended.and_then(|ended| ended.end.consumed).map(usage),
        }
    }
}

fn usage(consumed: Consumed) -> CommandUsage {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    CommandUsage {
        cpu_user_us: micros(consumed.user),
        cpu_system_us: micros(consumed.system),
        peak_memory_bytes: consumed.peak_memory,
    }
}

/// All commands.
#[derive(Debug, Default)]
pub struct Registry {
    state: Arc<Mutex<State>>,
    retention: Retention,
    stock: Arc<Stock>,
}

#[derive(Debug, Default)]
struct State {
    commands: HashMap<String, Arc<Command>>,
    /// Ended ones, oldest first.
    ended: VecDeque<(Instant, Arc<Command>)>,
    ended_text: usize,
    /// A task waits for the next one to have been kept long enough.
    sweeper: bool,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Every holder leaves the state whole between its statements.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// No commands yet.
    #[must_use]
    pub fn new(retention: Retention) -> Self {
        Self { retention, ..Self::default() }
    }

    /// A place for a background command's output, with files in `directory` when it becomes much.
    #[must_use]
    pub fn spool(&self, directory: PathBuf) -> Spool {
        Spool::new(directory, self.retention.log_bytes, Arc::clone(&self.stock))
    }

    /// Makes a command known. Comes before its id leaves the daemon.
    pub fn insert(&self, command: Arc<Command>) {
        let mut state = lock(&self.state);
        state.sweep(Instant::now(), &self.retention);
        state.commands.insert(command.id.clone(), command);
    }

    /// The command of that id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<Arc<Command>> {
        let mut state = lock(&self.state);
        state.sweep(Instant::now(), &self.retention);
        state.commands.get(id).cloned()
    }

    /// Those that run.
    #[must_use]
    pub fn running(&self) -> Vec<Arc<Command>> {
        let runs = |command: &&Arc<Command>| !matches!(*command.phase.borrow(), Phase::Ended(_));
        lock(&self.state).commands.values().filter(runs).cloned().collect()
    }

    /// Kills all that runs. Returns when their ends are recorded.
    pub async fn close_all(&self) {
        for command in self.running() {
            let tag = command.tag;
            // One that is still being loaded is looked for again when it has been.
            let mut phase = command.follow();
            let started = phase.wait_for(|phase| *phase != Phase::Starting);
            let _ = tokio::time::timeout(LOADED_WITHIN, started).await;
            let killed = tokio::task::spawn_blocking(move || tree::kill(tag)).await;
            if let Ok(Err(error)) = killed {
                tracing::warn!(command = command.id, %error, "not all processes of a command have ended");
            }
            let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_)));
            let _ = tokio::time::timeout(LOADED_WITHIN, ended).await;
        }
    }

    /// Records a command's end. Comes before the client hears of it.
    pub fn ended(&self, command: &Arc<Command>, end: End) {
        {
            let mut state = lock(&self.state);
            state.ended_text += command.content.len();
            state.ended.push_back((Instant::now(), Arc::clone(command)));
            state.sweep(Instant::now(), &self.retention);
            if !std::mem::replace(&mut state.sweeper, true) {
                let sweeping = sweep_on(Arc::downgrade(&self.state), self.retention);
                state.sweeper =
                    tokio::runtime::Handle::try_current().map(|runtime| runtime.spawn(sweeping)).is_ok();
            }
        }
        command.phase.send_replace(Phase::Ended(Ended { end, at: Timestamp::now() }));
    }

    /// Keeps all outputs together within their bound: first the commands that ended longest ago lose theirs, then
    /// the largest of those that run loses its oldest part. May wait for a disk.
    pub fn make_room(&self) {
        let is_too_much =
            || self.stock.total() > self.retention.logs_bytes || self.stock.files() > MOST_FILES;
        if !is_too_much() {
            return;
        }
        let state = lock(&self.state);
        for spool in state.ended.iter().filter_map(|(_, command)| command.spool.as_ref()) {
            if !is_too_much() {
                return;
            }
            spool.close();
        }
        while self.stock.total() > self.retention.logs_bytes {
            let spools = state.commands.values().filter_map(|command| command.spool.as_ref());
            // What is in memory has a bound of its own.
            if !spools.max_by_key(|spool| spool.on_disk()).is_some_and(Spool::shrink) {
                return;
            }
        }
    }
}

/// Forgets what has been kept long enough, as long as there is anything.
async fn sweep_on(state: Weak<Mutex<State>>, retention: Retention) {
    let mut pause = retention.age;
    loop {
        tokio::time::sleep(pause.max(SWEEP.min(retention.age))).await;
        let Some(state) = state.upgrade() else { return };
        let mut state = lock(&state);
        let now = Instant::now();
        state.sweep(now, &retention);
        match state.ended.front() {
            Some((at, _)) => pause = (retention.age + Duration::from_millis(1)).saturating_sub(now - *at),
            None => {
                state.sweeper = false;
                return;
            }
        }
    }
}

impl State {
    fn sweep(&mut self, now: Instant, retention: &Retention) {
        while let Some((at, _)) = self.ended.front()
            && (now.saturating_duration_since(*at) > retention.age
                || self.ended.len() > retention.commands
                || (self.ended_text > MOST_TEXT && self.ended.len() > 1))
            && let Some((_, command)) = self.ended.pop_front()
        {
            self.ended_text -= command.content.len();
            self.commands.remove(&command.id);
            if let Some(spool) = &command.spool {
                spool.close();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(content: &str) -> Arc<Command> {
        Arc::new(Command::new(crate::random::uuid(), content.to_owned(), None))
    }

    fn success() -> End {
        End { exit_code: 0, error: None, consumed: None }
    }

    fn with_output(registry: &Registry, bytes: usize) -> Arc<Command> {
        let spool = registry.spool(std::env::temp_dir());
        let command = Arc::new(Command::new(crate::random::uuid(), "x".to_owned(), Some(spool)));
        registry.insert(Arc::clone(&command));
        command.spool.as_ref().unwrap().append(&vec![b'x'; bytes]);
        registry.make_room();
        command
    }

    #[test]
    fn all_outputs_together_are_bounded_and_the_ended_ones_go_first() {
        let retention = Retention { log_bytes: 400_000, logs_bytes: 1_000_000, ..Retention::default() };
        let registry = Registry::new(retention);
        let ended = with_output(&registry, 300_000);
        registry.ended(&ended, success());
        let running: Vec<_> = (0..4).map(|_| with_output(&registry, 400_000)).collect();
        assert_eq!(ended.spool.as_ref().unwrap().on_disk(), 0);
        assert!(registry.stock.total() <= 1_000_000);
        for command in &running {
            let snapshot = command.spool.as_ref().unwrap().snapshot(0);
            assert_eq!(snapshot.start + snapshot.length, 400_000, "offsets stay");
            assert!(snapshot.length >= 150_000, "the largest gives, not the first: {}", snapshot.length);
        }
    }

    #[test]
    fn ended_commands_hold_few_files() {
        let registry = Registry::default();
        for _ in 0..700 {
            let ended = with_output(&registry, 70_000);
            registry.ended(&ended, success());
        }
        assert!(registry.stock.files() <= MOST_FILES, "{}", registry.stock.files());
    }

    #[tokio::test]
    async fn what_has_been_kept_long_enough_goes_by_itself() {
        let registry = Registry::new(Retention { age: Duration::from_millis(30), ..Retention::default() });
        for _ in 0..2 {
            let command = with_output(&registry, 100_000);
            registry.ended(&command, success());
            drop(command);
            let end = Instant::now() + Duration::from_secs(10);
            while registry.stock.total() > 0 || lock(&registry.state).sweeper {
                assert!(Instant::now() < end);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        assert!(lock(&registry.state).commands.is_empty());
    }

    #[test]
    fn a_command_is_known_from_insertion_to_the_end_of_its_retention() {
        let registry = Registry::default();
        let one = command("true");
        registry.insert(Arc::clone(&one));
        assert!(registry.get(&one.id).unwrap().status().running);
        registry.ended(&one, End { exit_code: 3, error: Some("exit status 3".to_owned()), consumed: None });
        let status = registry.get(&one.id).unwrap().status();
        assert_eq!((status.running, status.exit_code), (false, Some(3)));
        assert!(status.finished_at.unwrap().ends_with('Z'));
        let later = Instant::now() + Retention::default().age + Duration::from_secs(1);
        lock(&registry.state).sweep(later, &registry.retention);
        assert!(registry.get(&one.id).is_none());
    }

    #[test]
    fn ended_commands_are_bounded_and_running_ones_stay() {
        let registry = Registry::default();
        let running = command("sleep");
        registry.insert(Arc::clone(&running));
        for _ in 0..Retention::default().commands + 10 {
            let one = command("x");
            registry.insert(Arc::clone(&one));
            registry.ended(&one, success());
        }
        for _ in 0..20 {
            let large = command(&"x".repeat(1 << 20));
            registry.insert(Arc::clone(&large));
            registry.ended(&large, success());
        }
        let state = lock(&registry.state);
        assert!(state.ended.len() <= 9 && state.commands.len() == state.ended.len() + 1);
        assert!(state.commands.contains_key(&running.id));
    }
}
