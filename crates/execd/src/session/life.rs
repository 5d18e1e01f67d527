//! The task that owns a session: its shell, the runs that wait for their turn, and the end of both.
//!
//! A run ends when the shell says so or is no more. A shell that ends takes nothing with it that a session is for: it
//! says at the end of each run, and once more when it leaves in good order, what it has become, and the next run
//! begins in a new shell that is told.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use osb_protocol::execd::ExecutionError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::control::{Message, Parser};
use super::place::{Opened, Place};
use super::script::{self, Kind, LONGEST_FED};
use super::shell::{Born, Recipe, Shell};
use crate::app::App;
use crate::command::envfile;
use crate::command::output::{self, Output, ended};
use crate::command::pipe::{Found, Pipe};
use crate::command::prepare::file_variables;
use crate::command::run::{OUT_OF_MEMORY, PING, out_of_memory};
use crate::command::stop::{Timer, blocking};
use crate::http::ApiError;
use crate::process::exit::Exit;
use crate::process::tree::{self, Marks};
use crate::stream::event::{self, Source};
use crate::stream::feed::{Reader, Writer};
use crate::telemetry::{self, Timed};

/// Runs that may wait in one session.
const MOST_WAITING: usize = 64;
/// Limit of a run that names none.
const LONGEST_RUN: Duration = Duration::from_secs(24 * 60 * 60);
/// How often a shell is looked at that says nothing.
const LOOK: Duration = Duration::from_millis(500);
/// Exit code of a run whose own one cannot be known.
const UNKNOWN: i32 = 255;

/// A run as it was asked for.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) command: String,
    pub(super) cwd: Option<String>,
    pub(super) timeout: Option<Duration>,
    pub(super) writer: Writer,
    /// The waiting request, until the stream is given to it.
    pub(super) answer: Option<(oneshot::Sender<Result<Reader, ApiError>>, Reader)>,
}

impl Job {
    /// Gives the stream out.
    fn accept(&mut self) {
        if let Some((answer, reader)) = self.answer.take() {
            // A client that has gone drops the reader, as at any later time.
            let _ = answer.send(Ok(reader));
        }
    }

    /// Says why it will not run, on the stream if that is out already.
    fn refuse(mut self, error: ApiError) {
        match self.answer.take() {
            Some((answer, _)) => drop(answer.send(Err(error))),
            None => fail(&self.writer, "RuntimeError", error.message.clone(), vec![error.message]),
        }
    }
}

/// A word that nobody guesses. Short, because bash reads each byte of it by itself.
fn secret() -> String {
    let (first, second) = crate::random::uuid().as_u64_pair();
    format!("{:016x}", first ^ second)
}

fn fail(writer: &Writer, ename: &str, evalue: String, traceback: Vec<String>) {
    let error = ExecutionError { ename: ename.to_owned(), evalue, traceback };
    writer.push(|out| event::push_error(out, error));
}

/// A session and its shell.
#[derive(Debug)]
pub(super) struct Life {
    app: App,
    recipe: Arc<Recipe>,
    place: Arc<Place>,
    control: Pipe,
    parser: Parser,
    shell: Option<Shell>,
    /// What the shell before this one has become.
    state: Option<Vec<u8>>,
    /// Exit code of the last run.
    status: i32,
    tracing: String,
    secret: String,
    /// Variables of the sandbox's file that the shell knows of.
    variables: Vec<(OsString, OsString)>,
    number: u64,
    jobs: mpsc::Receiver<Job>,
    waiting: VecDeque<Job>,
    closing: CancellationToken,
    running: watch::Sender<Option<Running>>,
}

/// The run under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Running {
    pid: i32,
    tag: u64,
}

impl Running {
    /// By which its processes are known: a mark of its own, or where the shell could not be given one, the session's.
    pub(super) fn marks(self) -> Marks {
        if tree::mark_of(self.pid) == Some(self.tag) { self.tag.into() } else { Marks::family(self.tag) }
    }
}

/// What the outside holds of a session's task.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) jobs: mpsc::Receiver<Job>,
    pub(super) closing: CancellationToken,
    pub(super) running: watch::Sender<Option<Running>>,
}

/// What must be at hand before a run.
struct Ready {
    opened: Opened,
    born: Option<Born>,
    cwd: Option<OsString>,
    variables: Vec<(OsString, OsString)>,
    text: Option<PathBuf>,
    command: String,
    pid: i32,
    marked: bool,
}

/// How a run came to its end.
enum Outcome {
    Back { status: i32, options: String },
    Gone(Exit),
    Lost,
    Closed,
}

impl Life {
    /// Takes over a shell that has been started.
    pub(super) fn new(
        app: App,
        recipe: Recipe,
        (place, control): (Place, OwnedFd),
        born: Born,
        ends: Ends,
    ) -> std::io::Result<Self> {
        let shell = born.watch()?;
        Ok(Self {
            app,
            variables: recipe.variables.clone(),
            recipe: recipe.into(),
            place: place.into(),
            control: Pipe::new(control)?,
            parser: Parser::default(),
            shell: Some(shell),
            state: None,
            status: 0,
            tracing: String::new(),
            secret: secret(),
            number: 0,
            jobs: ends.jobs,
            waiting: VecDeque::new(),
            closing: ends.closing,
            running: ends.running,
        })
    }

    /// Serves until the session is closed.
    pub(super) async fn live(mut self) {
        loop {
            let job = match self.waiting.pop_front() {
                Some(job) => job,
                None => match self.idle().await {
                    Some(job) => job,
                    None => break,
                },
            };
            self.run(job).await;
            self.running.send_replace(None);
            if self.closing.is_cancelled() {
                break;
            }
        }
        self.close().await;
    }

    /// Waits for the next run; keeps up with the shell meanwhile. `None` when the session is to end.
    async fn idle(&mut self) -> Option<Job> {
        loop {
            tokio::select! {
                () = self.closing.cancelled() => return None,
                job = self.jobs.recv() => return job,
                end = turn(&mut self.shell) => {
                    if end.is_some() {
                        self.shell = None;
                    }
                }
                // There is nothing to say between runs.
                _ = listen(&self.control, &mut self.parser) => {}
            }
        }
    }

    async fn run(&mut self, mut job: Job) {
        // A shell that turns out to be of no use before the command has begun is replaced, once.
        for again in [true, false] {
            let ready = match self.prepare(&mut job).await {
                Ok(ready) => ready,
                Err(error) => return job.refuse(error),
            };
            match self.attempt(&mut job, ready).await {
                Some(begun) if !begun && again && !self.closing.is_cancelled() => {}
                Some(begun) if !begun => {
                    let message = "the command was not run: the session's shell cannot open its output; delete the session and make a new one";
                    return job.refuse(ApiError::runtime(message));
                }
                _ => return,
            }
        }
    }

    /// Everything that may block, done elsewhere.
    async fn prepare(&mut self, job: &mut Job) -> Result<Ready, ApiError> {
        self.number += 1;
        let tag = tree::member(self.recipe.tag, self.number);
        if self.shell.is_none() {
            let place = Arc::clone(&self.place);
            let left = tokio::task::spawn_blocking(move || place.take_state()).await;
            // A shell that has left nothing changes nothing.
            self.state = left.ok().flatten().or_else(|| self.state.take());
        }
        let state = if self.shell.is_none() { self.state.clone() } else { None };
        let pid = self.shell.as_ref().map(|shell| shell.pid);
        let (app, recipe, place) = (self.app.clone(), self.recipe.clone(), self.place.clone());
        let (cwd, command) = (job.cwd.clone(), std::mem::take(&mut job.command));
        // Then all that is touched lies in memory or on a disk of this machine. Another thread would take longer to
        // wake than this takes.
        let is_quick = self.recipe.is_local && pid.is_some() && cwd.is_none() && command.len() <= LONGEST_FED;
        let work = move || -> Result<Ready, ApiError> {
            let failed = |error: std::io::Error| {
                ApiError::runtime(format!(
                    "the session's output in {} cannot be opened: {error}",
                    place.dir().display()
                ))
            };
            let cwd = match cwd.filter(|cwd| !cwd.is_empty()) {
                None => None,
                Some(cwd) => Some(recipe.enter(&app, &cwd)?),
            };
            let opened = place.open_output().map_err(failed)?;
            let born = match pid {
                Some(_) => None,
                None => Some(
                    recipe.start(&app, &place, state.as_deref()).map_err(|e| ApiError::runtime(e.message))?,
                ),
            };
            let pid = born.as_ref().map(Born::pid).or(pid).unwrap_or_default();
            let variables = file_variables(&app);
            let long = recipe.kind == Kind::Bash && command.len() > LONGEST_FED;
            let text = if long { place.leave("text", command.as_bytes()) } else { None };
            let marked = tree::retag(pid, tag).is_ok();
            Ok(Ready { opened, born, cwd, variables, text, command, pid, marked })
        };
        if is_quick {
            return work();
        }
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(error) => Err(ApiError::runtime(error.to_string())),
        }
    }

    /// Feeds the command to the shell and follows it. Tells whether it has begun; `None` when that does not matter.
    async fn attempt(&mut self, job: &mut Job, ready: Ready) -> Option<bool> {
        let lost = |error: std::io::Error| {
            ApiError::runtime(format!("the session's shell cannot be followed: {error}"))
        };
        let opened = (|| {
            if let Some(control) = ready.opened.control {
                self.control = Pipe::new(control)?;
                self.parser.reset();
            }
            if let Some(born) = ready.born {
                self.parser.reset();
                self.shell = Some(born.watch()?);
            }
            Pipe::new(ready.opened.output)
        })();
        let output = match opened {
            Ok(output) => output,
            Err(error) => {
                self.kill(Marks::family(self.recipe.tag)).await;
                let (writer, answer) = (&job.writer, job.answer.take());
                let error = lost(error);
                match answer {
                    Some((answer, _)) => drop(answer.send(Err(error))),
                    None => fail(writer, "RuntimeError", error.message.clone(), vec![error.message]),
                }
                return None;
            }
        };
        let tag = tree::member(self.recipe.tag, self.number);
        let mark = format!("{}.{}", self.secret, self.number);
        let text =
            ready.text.as_deref().map_or(script::Text::Fed(ready.command.as_bytes()), script::Text::File);
        let news = self.news(ready.variables);
        let run = script::Run {
            mark: &mark,
            number: self.number,
            text,
            cwd: ready.cwd.as_deref(),
            status: self.status,
            tracing: &self.tracing,
            variables: &news,
            tag: (!ready.marked && self.recipe.kind == Kind::Bash).then_some(tag),
        };
        let text = self.recipe.kind.run(&self.place.names(), &run);
        if let Some(shell) = &mut self.shell {
            shell.tell(&text);
        }
        self.status = 0;
        let running = Running { pid: ready.pid, tag };
        self.running.send_replace(Some(running));
        job.accept();

        let mut out = Output::new(output, Source::Stdout, self.app.line_endings);
        let oom_kills = self.app.limits.oom_kills();
        let began = Instant::now();
        let mut timer = Timer::new(began, Some(job.timeout.unwrap_or(LONGEST_RUN)));
        let mut follow = Follow { mark: &mark, begun: false, running };
        let outcome = self.follow(job, &mut out, &mut timer, &mut follow).await;
        let begun = follow.begun;
        let outcome = match outcome {
            Outcome::Lost => {
                self.kill(tag.into()).await;
                self.reap().await;
                Outcome::Lost
            }
            Outcome::Closed => {
                self.kill(Marks::family(tag)).await;
                Outcome::Closed
            }
            outcome => outcome,
        };
        let timed_out = match timer.killed {
            false => None,
            true => Some(match timer.finish().await {
                Ok(()) => "all processes of the command were killed".to_owned(),
                Err(error) => error.to_string(),
            }),
        };
        self.place.close_output();
        if !begun
            && !timer.killed
            && matches!(outcome, Outcome::Back { .. } | Outcome::Gone(_) | Outcome::Lost)
        {
            if self.shell.is_some() {
                self.kill(tag.into()).await;
                self.reap().await;
            }
            job.command = ready.command;
            return Some(false);
        }
        let mut none = Output::closed(Source::Stderr, self.app.line_endings);
        output::drain(&job.writer, &mut out, &mut none).await;
        out.forget();

        let (code, mut traceback) = match &outcome {
            Outcome::Back { status, .. } => (*status, vec![Exit::Code(*status).words()]),
            Outcome::Gone(exit) => (exit.code(), vec![exit.words()]),
            Outcome::Lost => (UNKNOWN, vec!["the shell has stopped to answer and was ended".to_owned()]),
            Outcome::Closed => {
                (Exit::Signal(libc::SIGKILL).code(), vec!["the session was deleted".to_owned()])
            }
        };
        if let Outcome::Back { status, options } = &outcome {
            self.status = *status;
            self.tracing = options.chars().filter(|option| matches!(option, 'x' | 'v')).collect();
        }
        if let Some(timed_out) = timed_out {
            let millis = job.timeout.unwrap_or(LONGEST_RUN).as_millis();
            traceback.push(format!("the time limit of {millis} ms has passed; {timed_out}"));
        } else if matches!(outcome, Outcome::Gone(Exit::Signal(libc::SIGKILL)))
            && out_of_memory(&self.app, oom_kills)
        {
            traceback.push(OUT_OF_MEMORY.to_owned());
        }
        let kept = match outcome {
            Outcome::Gone(_) => {
                let place = Arc::clone(&self.place);
                tokio::task::spawn_blocking(move || place.has_last_words()).await.unwrap_or(false)
            }
            _ => false,
        };
        if matches!(outcome, Outcome::Gone(_) | Outcome::Lost) && !kept {
            traceback.push(
                "the session's shell has ended with this; the next run begins in a new one, with variables, functions \
                 and directory as they were before this run"
                    .to_owned(),
            );
        }
        if let Some(telemetry) = &self.app.telemetry {
            let attributes = vec![("operation", "run_in_session".to_owned()), telemetry::result(code == 0)];
            telemetry.record(&self.app.binding.get(), Timed::Execution, attributes, began.elapsed());
        }
        if code == 0 {
            job.writer.push(|out| event::push_complete(out, began.elapsed()));
        } else {
            fail(&job.writer, "CommandExecError", code.to_string(), traceback);
        }
        None
    }

    /// Follows a run until the shell says that it has ended, or has ended itself.
    async fn follow(
        &mut self,
        job: &Job,
        out: &mut Output,
        timer: &mut Timer,
        follow: &mut Follow<'_>,
    ) -> Outcome {
        let writer = &job.writer;
        let (mut ping, mut look) = (Instant::now() + PING, Instant::now() + LOOK);
        let mut abandoned = false;
        let mut suspicious = false;
        loop {
            let full = writer.is_full();
            tokio::select! {
                messages = listen(&self.control, &mut self.parser) => {
                    if let Some(outcome) = Self::hear(messages, follow) {
                        return outcome;
                    }
                }
                end = turn(&mut self.shell) => {
                    let Some(exit) = end else { continue };
                    self.shell = None;
                    // Its last words lie in the pipe.
                    let messages = read(&self.control, &mut self.parser);
                    self.parser.reset();
                    return Self::hear(messages, follow).unwrap_or(Outcome::Gone(exit));
                }
                () = out.turn(writer), if !full && out.is_open() => {}
                () = writer.room(), if full => {}
                () = self.closing.cancelled() => return Outcome::Closed,
                () = writer.abandoned(), if !full && !abandoned => abandoned = true,
                () = timer.expired() => {
                    timer.kill(follow.running.marks());
                }
                Some(mut other) = self.jobs.recv() => {
                    if self.waiting.len() < MOST_WAITING {
                        other.accept();
                        self.waiting.push_back(other);
                    } else {
                        other.refuse(busy());
                    }
                }
                () = sleep_until(ping) => {
                    ping = Instant::now() + PING;
                    for writer in self.waiting.iter().map(|job| &job.writer).chain([writer]) {
                        writer.push(event::push_ping);
                    }
                }
                () = sleep_until(look) => {
                    look = Instant::now() + LOOK;
                    // bash takes one line at a time: when it has taken the last one, it has said all it had to say.
                    let silent = self.recipe.kind == Kind::Bash
                        && self.shell.as_ref().is_some_and(Shell::has_read_all);
                    if silent && suspicious {
                        return Outcome::Lost;
                    }
                    suspicious = silent;
                }
            }
        }
    }

    fn hear(messages: Vec<Message>, follow: &mut Follow<'_>) -> Option<Outcome> {
        let mut outcome = None;
        for message in messages {
            match message {
                Message::Begin(mark) if mark == follow.mark => follow.begun = true,
                Message::Report { mark, status, options } if mark == follow.mark => {
                    outcome = Some(Outcome::Back { status, options });
                }
                _ => {}
            }
        }
        outcome
    }

    /// What has changed in the sandbox's file of variables: name, value before, value now.
    fn news(&mut self, now: Vec<(OsString, OsString)>) -> Vec<(OsString, Option<OsString>, OsString)> {
        let before = std::mem::replace(&mut self.variables, now);
        if before == self.variables {
            return Vec::new();
        }
        let latest = |all: &[(OsString, OsString)]| all.iter().cloned().collect::<BTreeMap<_, _>>();
        let before = latest(&before);
        latest(&self.variables)
            .into_iter()
            .filter(|(name, _)| envfile::is_name(name.as_bytes()))
            .map(|(name, value)| (before.get(&name).cloned(), name, value))
            .filter(|(before, _, value)| before.as_ref() != Some(value))
            .map(|(before, name, value)| (name, before, value))
            .collect()
    }

    async fn kill(&mut self, marks: Marks) {
        if let Err(error) = blocking(move || tree::kill(marks)).await {
            tracing::warn!(%error, "processes of a session are left");
        }
        self.reap().await;
    }

    /// Collects the status of a shell that has been killed.
    async fn reap(&mut self) {
        if let Some(shell) = self.shell.take() {
            let _ = rustix::process::pidfd_send_signal(shell.pidfd.get_ref(), rustix::process::Signal::KILL);
            ended(&shell.pidfd).await;
        }
    }

    async fn close(mut self) {
        self.kill(Marks::family(self.recipe.tag)).await;
        self.jobs.close();
        while let Ok(job) = self.jobs.try_recv() {
            self.waiting.push_back(job);
        }
        for job in self.waiting.drain(..) {
            job.refuse(super::unknown());
        }
        let place = self.place;
        let _ = tokio::task::spawn_blocking(move || drop(place)).await;
    }
}

/// What is known of a run under way.
struct Follow<'a> {
    mark: &'a str,
    begun: bool,
    running: Running,
}

/// 503: too much waits already.
pub(super) fn busy() -> ApiError {
    ApiError::new(
        http::StatusCode::SERVICE_UNAVAILABLE,
        osb_protocol::execd::code::SERVICE_UNAVAILABLE,
        format!("{MOST_WAITING} runs wait in this session already; wait for them or make another session"),
    )
}

/// As [`Shell::turn`], for a shell that may not be there.
async fn turn(shell: &mut Option<Shell>) -> Option<Exit> {
    match shell {
        Some(shell) => shell.turn().await,
        None => std::future::pending().await,
    }
}

/// Waits for words of the shell. Cancel safe.
async fn listen(control: &Pipe, parser: &mut Parser) -> Vec<Message> {
    let Ok(mut guard) = control.readable().await else { return std::future::pending().await };
    let mut messages = Vec::new();
    match control.read(|piece| {
        parser.push(piece, |message| messages.push(message));
        true
    }) {
        Found::Idle => guard.clear_ready(),
        Found::More | Found::Closed => {}
    }
    messages
}

/// Words that have been said.
fn read(control: &Pipe, parser: &mut Parser) -> Vec<Message> {
    let mut messages = Vec::new();
    let mut waiting = control.waiting();
    while waiting > 0 {
        let mut length = 0;
        let found = control.read(|piece| {
            length += piece.len() as u64;
            parser.push(piece, |message| messages.push(message));
            true
        });
        waiting = waiting.saturating_sub(length);
        if found != Found::More {
            break;
        }
    }
    messages
}
