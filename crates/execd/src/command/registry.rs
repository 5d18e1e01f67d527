//! The commands that can be asked about: all that run, and those that have ended for a day, as long as their number
//! and size stay within bounds.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use osb_protocol::execd::CommandStatus;
use tokio::sync::watch;

use super::spool::Spool;
use crate::process::tree;

/// How long an ended command can be asked about.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// How many ended commands are kept.
const MOST_ENDED: usize = 4096;
/// How much text of ended commands is kept.
const MOST_TEXT: usize = 8 << 20;
/// How much output of ended background commands is kept; beyond it the oldest lose theirs.
const MOST_OUTPUT: u64 = 256 << 20;

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
    /// Exit code, 128 + signal, or 255 when it could not be started.
    pub exit_code: i32,
    /// What went wrong.
    pub error: Option<String>,
    /// When.
    pub at: Timestamp,
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
            exit_code: ended.map(|ended| ended.exit_code),
            error: ended.and_then(|ended| ended.error.clone()),
            started_at: self.started_at.to_string(),
            finished_at: ended.map(|ended| ended.at.to_string()),
        }
    }
}

/// All commands.
#[derive(Debug, Default)]
pub struct Registry(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    commands: HashMap<String, Arc<Command>>,
    /// Ended ones, oldest first.
    ended: VecDeque<(Instant, Arc<Command>)>,
    ended_text: usize,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every holder leaves the state whole between its statements.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a command known. Comes before its id leaves the daemon.
    pub fn insert(&self, command: Arc<Command>) {
        let mut state = self.lock();
        state.sweep(Instant::now());
        state.commands.insert(command.id.clone(), command);
    }

    /// The command of that id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<Arc<Command>> {
        let mut state = self.lock();
        state.sweep(Instant::now());
        state.commands.get(id).cloned()
    }

    /// Records a command's end. Comes before the client hears of it.
    pub fn ended(&self, command: &Arc<Command>, exit_code: i32, error: Option<String>) {
        {
            let mut state = self.lock();
            state.ended_text += command.content.len();
            state.ended.push_back((Instant::now(), Arc::clone(command)));
            state.sweep(Instant::now());
            if command.spool.is_some() {
                state.trim_output();
            }
        }
        command.phase.send_replace(Phase::Ended(Ended { exit_code, error, at: Timestamp::now() }));
    }
}

impl State {
    fn sweep(&mut self, now: Instant) {
        while let Some((at, _)) = self.ended.front()
            && (now.saturating_duration_since(*at) > RETENTION
                || self.ended.len() > MOST_ENDED
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

    fn trim_output(&self) {
        let spools = || self.ended.iter().filter_map(|(_, command)| command.spool.as_ref());
        let mut total: u64 = spools().map(Spool::size).sum();
        for spool in spools() {
            if total <= MOST_OUTPUT {
                break;
            }
            total -= spool.size();
            spool.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(content: &str) -> Arc<Command> {
        Arc::new(Command::new(uuid::Uuid::new_v4(), content.to_owned(), None))
    }

    #[test]
    fn a_command_is_known_from_insertion_to_the_end_of_its_retention() {
        let registry = Registry::default();
        let one = command("true");
        registry.insert(Arc::clone(&one));
        assert!(registry.get(&one.id).unwrap().status().running);
        registry.ended(&one, 3, Some("exit status 3".to_owned()));
        let status = registry.get(&one.id).unwrap().status();
        assert_eq!((status.running, status.exit_code), (false, Some(3)));
        assert!(status.finished_at.unwrap().ends_with('Z'));
        registry.lock().sweep(Instant::now() + RETENTION + Duration::from_secs(1));
        assert!(registry.get(&one.id).is_none());
    }

    #[test]
    fn ended_commands_are_bounded_and_running_ones_stay() {
        let registry = Registry::default();
        let running = command("sleep");
        registry.insert(Arc::clone(&running));
        for _ in 0..MOST_ENDED + 10 {
            let one = command("x");
            registry.insert(Arc::clone(&one));
            registry.ended(&one, 0, None);
        }
        for _ in 0..20 {
            let large = command(&"x".repeat(1 << 20));
            registry.insert(Arc::clone(&large));
            registry.ended(&large, 0, None);
        }
        let state = registry.lock();
        assert!(state.ended.len() <= 9 && state.commands.len() == state.ended.len() + 1);
        assert!(state.commands.contains_key(&running.id));
    }
}
