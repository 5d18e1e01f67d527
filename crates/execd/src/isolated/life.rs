//! The task that owns an isolated session while its shell lives: runs in turn, and the end.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use osb_protocol::boot::LineEndings;
use osb_protocol::execd::{Event, EventKind, ExecutionError};
use rustix::fs::OFlags;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::background::{self, BackgroundRun, TERMINATED, Told};
use super::isolator::{PIPES, word};
use super::place::Place;
use super::registry::Session;
use super::script::{Kind, Run};
use crate::app::App;
use crate::command::output::{self, Output};
use crate::command::pipe::{Found, Pipe};
use crate::http::ApiError;
use crate::process::exit::Exit;
use crate::process::watch;
use crate::session::control::{Message, Parser};
use crate::session::feeder::Feeder;
use crate::stream::event::{self, Source};
use crate::stream::feed::{Reader, Writer};
use crate::telemetry::{self, Timed};

/// Runs that may wait in one session.
const MOST_WAITING: usize = 64;
/// How often a run is interrupted that shall end: a shell forgets it when a program ends by itself at that moment.
const AGAIN: Duration = Duration::from_millis(250);
/// How often before what it waits for is killed, and before it is given up.
const PATIENCE: u32 = 8;
const LAST_PATIENCE: u32 = 24;
/// How long the session's first process may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Something to do for the session.
#[derive(Debug)]
pub(super) enum Work {
    Foreground(Job),
    Background {
        run: Arc<BackgroundRun>,
        code: String,
        envs: Vec<(String, String)>,
        begun: oneshot::Sender<Result<(), ApiError>>,
    },
}

/// A run in the foreground.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) code: String,
    pub(super) envs: Vec<(String, String)>,
    pub(super) timeout: Option<Duration>,
    pub(super) writer: Writer,
    /// The waiting request, until the stream is given to it.
    pub(super) answer: Option<(oneshot::Sender<Result<Reader, ApiError>>, Reader)>,
}

impl Job {
    fn accept(&mut self) {
        if let Some((answer, reader)) = self.answer.take() {
            // A client that has gone drops the reader, as at any later time.
            let _ = answer.send(Ok(reader));
        }
    }

    fn fail(&self, ename: &str, evalue: String, text: String) {
        let error = ExecutionError { ename: ename.to_owned(), evalue, traceback: Vec::new() };
        let event = Event {
            kind: EventKind::Error,
            text: Some(text),
            error: Some(error),
            timestamp: event::unix_millis(),
            ..Event::default()
        };
        self.writer.push(|out| event::push(out, &event));
    }

    fn broken(&self, message: impl Into<String>) {
        let message = message.into();
        self.fail("RuntimeError", message.clone(), message);
    }

    /// Says why it will not run, on the stream if that is out already.
    fn refuse(mut self, error: ApiError) {
        match self.answer.take() {
            Some((answer, _)) => drop(answer.send(Err(error))),
            None => self.broken(error.message),
        }
    }
}

/// A session whose shell lives.
#[derive(Debug)]
pub(super) struct Life {
    session: Arc<Session>,
    app: App,
    place: Place,
    /// Words of the shell.
    control: Pipe,
    parser: Parser,
    feeder: Feeder,
    /// To the session's first process.
    first: AsyncFd<OwnedFd>,
    /// Words to it that it has not obeyed yet.
    unanswered: usize,
    secret: String,
    number: u64,
    jobs: mpsc::Receiver<Work>,
    waiting: VecDeque<Work>,
    background: HashMap<String, Followed>,
}

/// A run in the background that has not ended.
#[derive(Debug)]
struct Followed {
    told: Option<Told>,
    /// Number of its process within the session.
    pid: Option<i32>,
    names: [String; 2],
}

/// What a session's shell has been made with.
#[derive(Debug)]
pub(super) struct Born {
    pub(super) place: Place,
    pub(super) feed: OwnedFd,
    pub(super) first: OwnedFd,
    pub(super) kind: Kind,
}

/// How a run came to its end.
enum Outcome {
    Back(i32),
    /// The shell is no more.
    Dead(String),
    Closed,
}

impl Life {
    pub(super) fn new(
        session: Arc<Session>,
        app: App,
        born: Born,
        jobs: mpsc::Receiver<Work>,
    ) -> io::Result<Self> {
        let Born { place, feed, first, kind } = born;
        let control = Pipe::new(place.pipe("control", OFlags::RDWR)?)?;
        rustix::io::ioctl_fionbio(&feed, true)?;
        rustix::io::ioctl_fionbio(&first, true)?;
        Ok(Self {
            session,
            app,
            place,
            control,
            parser: Parser::default(),
            feeder: Feeder::new(feed, kind.begin().to_vec())?,
            first: watch::readable(first).map_err(|(_, error)| error)?,
            unanswered: 0,
            secret: crate::random::uuid().simple().to_string(),
            number: 0,
            jobs,
            waiting: VecDeque::new(),
            background: HashMap::new(),
        })
    }

    /// Serves until the session is closed, is idle for too long, or its shell ends. Whoever waits is told; the reason
    /// is given if it was the shell.
    pub(super) async fn live(mut self) -> Option<String> {
        let reason = loop {
            let work = match self.waiting.pop_front() {
                Some(work) => work,
                None => match self.idle().await {
                    Ok(work) => work,
                    Err(reason) => break reason,
                },
            };
            match work {
                Work::Foreground(job) => {
                    self.session.run_begins();
                    let outcome = self.foreground(job).await;
                    self.session.run_ends();
                    match outcome {
                        Outcome::Back(_) => {}
                        Outcome::Dead(reason) => break Some(reason),
                        Outcome::Closed => break None,
                    }
                }
                Work::Background { run, code, envs, begun } => {
                    let started = self.start(&run, code, &envs).await;
                    let _ = begun.send(started);
                }
            }
        };
        self.jobs.close();
        while let Ok(work) = self.jobs.try_recv() {
            self.waiting.push_back(work);
        }
        for work in self.waiting.drain(..) {
            match work {
                Work::Foreground(mut job) => {
                    job.accept();
                    job.broken(TERMINATED);
                }
                Work::Background { begun, .. } => drop(begun.send(Err(ApiError::runtime(TERMINATED)))),
            }
        }
        // Dropping what is followed tells its tasks.
        reason
    }

    /// Waits for the next run and keeps up with the shell meanwhile. An error is the end, with the reason if it was not
    /// asked for.
    async fn idle(&mut self) -> Result<Work, Option<String>> {
        loop {
            let expires = if self.background.is_empty() { self.session.idle_until() } else { None };
            let never = Instant::now() + Duration::from_secs(3600);
            tokio::select! {
                () = self.session.closing.cancelled() => return Err(None),
                work = self.jobs.recv() => return work.ok_or(None),
                word = first_word(&self.first) => match word {
                    First::Done => self.unanswered = self.unanswered.saturating_sub(1),
                    First::Dead(end) => return Err(Some(end)),
                },
                () = self.feeder.turn() => {}
                messages = listen(&self.control, &mut self.parser) => {
                    for message in messages {
                        self.heard(message);
                    }
                }
                () = sleep_until(expires.unwrap_or(never)), if expires.is_some() => {
                    self.session.expire();
                    return Err(None);
                }
            }
        }
    }

    /// Takes a word that is about a run in the background.
    fn heard(&mut self, message: Message) {
        let Message::Report { mark, status, .. } = message else { return };
        if let Some(mark) = mark.strip_suffix(".pid") {
            if let Some(followed) = self.background.get_mut(mark) {
                followed.pid = Some(status);
            }
        } else if let Some(mut followed) = self.background.remove(&mark) {
            for name in &followed.names {
                self.place.remove(name);
            }
            if let Some(told) = followed.told.take() {
                let _ = told.send(Ok(status));
            }
            self.session.touch();
        }
    }

    fn next(&mut self) -> (String, [String; 2]) {
        self.number += 1;
        let mark = format!("{}.{}", self.secret, self.number);
        (mark, [format!("out.{}", self.number), format!("code.{}", self.number)])
    }

    fn leave(&self, names: &[String; 2], code: &str) -> Result<Pipe, ApiError> {
        let failed =
            |error: io::Error| ApiError::runtime(format!("the session cannot be given a run: {error}"));
        let output = self.place.pipe(&names[0], OFlags::RDONLY).and_then(Pipe::new).map_err(failed)?;
        if let Err(error) = self.place.leave(&names[1], code.as_bytes()) {
            self.place.remove(&names[0]);
            return Err(failed(error));
        }
        Ok(output)
    }

    async fn start(
        &mut self,
        run: &Arc<BackgroundRun>,
        code: String,
        envs: &[(String, String)],
    ) -> Result<(), ApiError> {
        self.background.retain(|_, followed| followed.told.as_ref().is_some_and(|told| !told.is_closed()));
        let (mark, names) = self.next();
        let output = self.leave(&names, &code)?;
        let text = Run { mark: &mark, dir: PIPES, output: &names[0], code: &names[1], envs };
        self.feeder.tell(&text.background());
        let (told, hear) = oneshot::channel();
        self.background.insert(mark, Followed { told: Some(told), pid: None, names });
        self.session.touch();
        let (run, app, began) = (Arc::clone(run), self.app.clone(), Instant::now());
        tokio::spawn(async move {
            let success = background::follow(run, output, hear).await;
            measured(&app, success, began);
        });
        Ok(())
    }

    async fn foreground(&mut self, mut job: Job) -> Outcome {
        let (mark, names) = self.next();
        let output = match self.leave(&names, &job.code) {
            Ok(output) => output,
            Err(error) => {
                job.refuse(error);
                return Outcome::Back(0);
            }
        };
        let began = Instant::now();
        let run = Run { mark: &mark, dir: PIPES, output: &names[0], code: &names[1], envs: &job.envs };
        self.feeder.tell(&run.foreground());
        let report = run.report();
        job.accept();
        let mut out = Output::new(output, Source::Stdout, LineEndings::Strip);
        let mut ending = None;
        let mut outcome = self.follow(&job, &mut out, &mark, &report, &mut ending).await;
        if matches!(outcome, Outcome::Back(_))
            && let Err(end) = self.settle().await
        {
            outcome = Outcome::Dead(end);
        }
        for name in &names {
            self.place.remove(name);
        }
        let mut none = Output::closed(Source::Stderr, LineEndings::Strip);
        output::drain(&job.writer, &mut out, &mut none).await;
        out.forget();
        measured(&self.app, matches!((&outcome, ending), (Outcome::Back(0), None)), began);
        match (&outcome, ending) {
            (Outcome::Closed, _) => job.broken(TERMINATED),
            (Outcome::Dead(reason), _) => job.broken(format!("{TERMINATED}: {reason}")),
            (Outcome::Back(_), Some(Ending::TimedOut)) => {
                let seconds = job.timeout.unwrap_or_default().as_secs();
                job.broken(format!(
                    "the run was interrupted after its time limit of {seconds} s; the session goes on"
                ));
            }
            (Outcome::Back(0), _) => {
                let event = Event {
                    kind: EventKind::ExecutionComplete,
                    timestamp: event::unix_millis(),
                    ..Event::default()
                };
                job.writer.push(|out| event::push(out, &event));
            }
            (Outcome::Back(code), _) => job.fail("ExitError", code.to_string(), Exit::Code(*code).words()),
        }
        outcome
    }

    async fn follow(
        &mut self,
        job: &Job,
        out: &mut Output,
        mark: &str,
        report: &[u8],
        ending: &mut Option<Ending>,
    ) -> Outcome {
        let never = Instant::now() + Duration::from_secs(400 * 24 * 3600);
        let limit = job.timeout.map_or(never, |timeout| Instant::now() + timeout);
        // When more is done to end the run, once it shall end.
        let mut next = never;
        let mut steps = 0;
        loop {
            let full = job.writer.is_full();
            tokio::select! {
                messages = listen(&self.control, &mut self.parser) => {
                    let mut outcome = None;
                    for message in messages {
                        match message {
                            Message::Report { mark: said, status, .. } if said == mark => outcome = Some(Outcome::Back(status)),
                            message => self.heard(message),
                        }
                    }
                    if let Some(outcome) = outcome {
                        return outcome;
                    }
                }
                word = first_word(&self.first) => match word {
                    First::Done => self.unanswered = self.unanswered.saturating_sub(1),
                    First::Dead(end) => return Outcome::Dead(end),
                },
                () = self.session.closing.cancelled() => return Outcome::Closed,
                () = self.feeder.turn() => {}
                () = out.turn(&job.writer), if !full && out.is_open() => {}
                () = job.writer.room(), if full => {}
                () = job.writer.abandoned(), if !full && ending.is_none() => {
                    *ending = Some(Ending::Left);
                    next = Instant::now();
                }
                () = sleep_until(limit), if ending.is_none() => {
                    *ending = Some(Ending::TimedOut);
                    next = Instant::now();
                }
                () = sleep_until(next), if ending.is_some() => {
                    if steps >= LAST_PATIENCE {
                        return Outcome::Dead("the shell did not give up the run and was ended".to_owned());
                    }
                    if steps >= PATIENCE {
                        self.say(word::KILL);
                    }
                    self.say(word::INTERRUPT);
                    // A shell may forget what it has read when it is interrupted.
                    self.feeder.tell(report);
                    next = Instant::now() + AGAIN;
                    steps += 1;
                }
                Some(work) = self.jobs.recv() => self.queue(work).await,
            }
        }
    }

    /// Waits until no signal is on its way any more, which would hit the next run.
    async fn settle(&mut self) -> Result<(), String> {
        let end = Instant::now() + ANSWER;
        while self.unanswered > 0 {
            tokio::select! {
                word = first_word(&self.first) => match word {
                    First::Done => self.unanswered -= 1,
                    First::Dead(end) => return Err(end),
                },
                () = sleep_until(end) => return Err("its first process does not answer".to_owned()),
            }
        }
        Ok(())
    }

    /// Takes what has come while a run is under way. Runs in the background wait too: the shell is busy.
    async fn queue(&mut self, work: Work) {
        if self.waiting.len() >= MOST_WAITING {
            return match work {
                Work::Foreground(job) => job.refuse(busy()),
                Work::Background { begun, .. } => drop(begun.send(Err(busy()))),
            };
        }
        match work {
            Work::Foreground(mut job) => {
                job.accept();
                self.waiting.push_back(Work::Foreground(job));
            }
            Work::Background { run, code, envs, begun } => {
                // The shell reads it when it gets there.
                let started = self.start(&run, code, &envs).await;
                let _ = begun.send(started);
            }
        }
    }

    /// Tells the session's first process what to do with the run in the foreground.
    fn say(&mut self, what: u8) {
        let spared = self.background.values().filter_map(|followed| followed.pid).take(word::MOST_SPARED);
        let mut message = vec![what];
        message.extend(spared.flat_map(i32::to_ne_bytes));
        // One that does not listen will not be waited for.
        if rustix::io::write(self.first.get_ref(), &message).is_ok() {
            self.unanswered += 1;
        }
    }
}

/// Why a run is to end before it has come to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    TimedOut,
    /// Nobody listens.
    Left,
}

/// Counts a run that has ended.
fn measured(app: &App, success: bool, began: Instant) {
    if let Some(telemetry) = &app.telemetry {
        let attributes = vec![telemetry::result(success)];
        telemetry.record(&app.binding.get(), Timed::Isolation, attributes, began.elapsed());
    }
}

/// 503: too much waits already.
pub(super) fn busy() -> ApiError {
    ApiError::new(
        http::StatusCode::SERVICE_UNAVAILABLE,
        osb_protocol::execd::code::SERVICE_UNAVAILABLE,
        format!("{MOST_WAITING} runs wait in this session already; wait for them or make another session"),
    )
}

/// What the session's first process says.
enum First {
    /// A word to it was obeyed.
    Done,
    /// The shell has ended, in this way.
    Dead(String),
}

/// Waits for a word of the session's first process. Cancel safe.
async fn first_word(first: &AsyncFd<OwnedFd>) -> First {
    loop {
        let Ok(mut guard) = first.readable().await else {
            return First::Dead("it cannot be watched".to_owned());
        };
        let mut word = [0; 4];
        match rustix::io::read(first.get_ref(), &mut word) {
            Ok(1) => return First::Done,
            Ok(4) => {
                let exit = Exit::from_wait_status(i32::from_ne_bytes(word));
                return First::Dead(exit.map_or_else(
                    || "the shell has ended".to_owned(),
                    |exit| match exit {
                        Exit::Code(code) => format!("the shell has left with exit code {code}"),
                        exit @ Exit::Signal(_) => format!("the shell: {}", exit.words()),
                    },
                ));
            }
            Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => return First::Dead("its processes were killed".to_owned()),
        }
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
