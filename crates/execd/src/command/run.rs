//! The life of a command: start, output, end.
//!
//! A run ends when its process ends, not when its output does: a server left in the background keeps the pipes
//! open for as long as it lives. What is in the pipes at that moment is delivered; where somebody still holds one,
//! a short quiet time decides that nothing more is coming. Then the terminal event goes out, and what the others
//! write later is read and forgotten.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use osb_protocol::execd::ExecutionError;
use tokio::sync::oneshot::{self, error::RecvError};
use tokio::time::{Instant, sleep_until};

use super::output::{self, Output, QUIET, ended_counted};
use super::pipe::{self, Found, Pipe};
use super::prepare::{Checked, Way};
use super::registry::{Command, End};
use super::stop::{Timer, blocking};
use crate::app::App;
use crate::http::ApiError;
use crate::process::exit::{self, Consumed, Exit};
use crate::process::spawn::{self, Program, SpawnError, Stdio};
use crate::process::{null, tree, watch};
use crate::stream::event::{self, Source};
use crate::stream::feed::{self, Reader, Writer};
use crate::telemetry::{self, Timed};

/// Signs of life.
pub(crate) const PING: Duration = Duration::from_secs(3);
/// A start that takes longer is told to the client before it is over.
const SLOW_START: Duration = Duration::from_millis(5);
/// Exit code of a command that could not be started.
const NOT_STARTED: i32 = 255;

/// A process with the ends of its output.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    /// One for both outputs of a background command, two otherwise.
    pub(crate) outputs: Vec<OwnedFd>,
    /// Out-of-memory kills of the sandbox before the start.
    pub(crate) oom_kills: Option<u64>,
}

/// Starts a command and gives its event stream. The run goes on when the caller stops waiting.
///
/// # Errors
/// The request cannot be carried out; nothing was started.
pub async fn start(app: App, request: Checked) -> Result<Reader, ApiError> {
    let (answer, answered) = oneshot::channel();
    tokio::spawn(async move {
        let (prepared, is_prepared) = oneshot::channel();
        let (started, mut is_started) = oneshot::channel();
        let id = crate::random::uuid();
        let background = request.background;
        let spool = background.then(|| app.commands.spool(temp_dir(&app)));
        let command = Arc::new(Command::new(id, request.content(), spool));
        let timeout = request.timeout;
        let shown = tracing::enabled!(tracing::Level::INFO).then(|| request.shown());
        // Directories and programs may lie on a file system that does not answer, and the clone takes its time.
        let (app_there, tag) = (app.clone(), command.tag);
        tokio::task::spawn_blocking(move || match request.prepare(&app_there, tag, Way::Shortest) {
            Ok(ready) => {
                let _ = prepared.send(Ok(Instant::now()));
                let mut result = launch(&app_there, &ready.program, background);
                if result.is_err() && ready.is_direct {
                    result = launch_shell(&app_there, &request, tag);
                }
                let _ = started.send(result);
            }
            Err(error) => {
                let _ = prepared.send(Err(error));
            }
        });
        // Most starts are over at once. To be woken for each of the two steps takes longer than the second one.
        let outcome = tokio::select! {
            biased;
            outcome = &mut is_started => Some(outcome),
            () = tokio::time::sleep(SLOW_START) => None,
        };
        let began = match is_prepared.await {
            Ok(Ok(began)) => began,
            Ok(Err(error)) => return drop(answer.send(Err(error))),
            Err(_) => return drop(answer.send(Err(ApiError::runtime("the start was broken off")))),
        };
        app.commands.insert(Arc::clone(&command));
        if let Some(shown) = shown {
            tracing::info!(id = command.id, command = shown, background, "command");
        }
        let (writer, reader) = feed::feed();
        writer.open(|out| {
            event::push_init(out, &command.id);
            event::push_ping(out);
        });
        // A client that has gone already drops the reader, which the run then notices as at any later time.
        let _ = answer.send(Ok(reader));
        let run = Run { app, command, writer, began, timeout };
        match outcome {
            Some(outcome) => run.follow(outcome).await,
            None => run.follow_slow(is_started).await,
        }
    });
    answered.await.unwrap_or_else(|_| Err(ApiError::runtime("the run was broken off")))
}

/// Starts the shell in place of a program that it may have more to say about.
fn launch_shell(app: &App, request: &Checked, tag: u64) -> Result<Started, SpawnError> {
    let failed = |error: ApiError| SpawnError { errno: 0, message: error.message };
    let ready = request.prepare(app, tag, Way::Shell).map_err(failed)?;
    launch(app, &ready.program, request.background)
}

/// Makes the pipes and starts the program. Blocks until its exec.
pub(crate) fn launch(app: &App, program: &Program, background: bool) -> Result<Started, SpawnError> {
    let pipes = |error: io::Error| SpawnError {
        errno: error.raw_os_error().unwrap_or(0),
        message: format!("cannot make the pipes of the command: {error}"),
    };
    let null = null::open().map_err(|error| SpawnError {
        errno: error.raw_os_error().unwrap_or(0),
        message: format!("cannot make an empty input for the command: {error}"),
    })?;
    let oom_kills = app.limits.oom_kills();
    let (out, out_write) = pipe::pair().map_err(pipes)?;
    let mut outputs = vec![out];
    let err_write = if background {
        None
    } else {
        let (err, err_write) = pipe::pair().map_err(pipes)?;
        outputs.push(err);
        Some(err_write)
    };
    let stdio = Stdio {
        stdin: null.as_fd(),
        stdout: out_write.as_fd(),
        stderr: err_write.as_ref().unwrap_or(&out_write).as_fd(),
    };
    exit::forget_own_peak();
    let spawned = spawn::spawn(program, stdio, &app.limits.work_cgroup)?;
    Ok(Started { pid: spawned.pid, pidfd: spawned.pidfd, outputs, oom_kills })
}

/// What to say of a kill by the kernel for want of memory.
pub(crate) const OUT_OF_MEMORY: &str = "out of memory: the kernel killed a process because the sandbox's memory \
    limit was reached; raise the limit or use less memory";

/// Whether the kernel has killed for want of memory since it was asked `before`.
pub(crate) fn out_of_memory(app: &App, before: Option<u64>) -> bool {
    before.is_some_and(|before| app.limits.oom_kills().is_some_and(|now| now > before))
}

/// Where the sandbox keeps what is temporary.
pub(crate) fn temp_dir(app: &App) -> PathBuf {
    app.binding().var("TMPDIR").filter(|dir| !dir.is_empty()).map_or_else(|| "/tmp".into(), PathBuf::from)
}

/// One run.
struct Run {
    app: App,
    command: Arc<Command>,
    writer: Writer,
    began: Instant,
    timeout: Option<Duration>,
}

impl Run {
    /// As [`Run::follow`], for a start that is not over yet.
    async fn follow_slow(self, mut receiver: oneshot::Receiver<Result<Started, SpawnError>>) {
        match self.await_start(&mut receiver).await {
            Some(outcome) => self.follow(outcome).await,
            None => self.give_up_start(receiver).await,
        }
    }

    async fn follow(self, outcome: Result<Result<Started, SpawnError>, RecvError>) {
        let started = match outcome {
            Ok(Ok(started)) => started,
            Ok(Err(SpawnError { message, .. })) => return self.not_started(message),
            Err(_) => return self.not_started("the start was broken off".to_owned()),
        };
        self.command.running(started.pid);
        if self.command.spool.is_some() {
            self.background(started).await;
        } else {
            self.foreground(started).await;
        }
    }

    /// Waits for the exec, which a file system that does not answer may hold up; the client hears from us
    /// meanwhile. `None` when the time limit comes first.
    async fn await_start(
        &self,
        started: &mut oneshot::Receiver<Result<Started, SpawnError>>,
    ) -> Option<Result<Result<Started, SpawnError>, RecvError>> {
        let timer = Timer::new(self.began, self.timeout);
        loop {
            tokio::select! {
                biased;
                outcome = &mut *started => return Some(outcome),
                () = timer.expired() => return None,
                () = tokio::time::sleep(PING) => self.writer.push(event::push_ping),
            }
        }
    }

    fn not_started(&self, message: String) {
        self.ended(End::failed(NOT_STARTED, message.clone()));
        self.fail(message.clone(), vec![message]);
    }

    /// The time limit has passed before the exec: the client is told, and what starts after all is killed.
    async fn give_up_start(self, started: oneshot::Receiver<Result<Started, SpawnError>>) {
        let message = "the time limit has passed while the program was still being loaded".to_owned();
        let exit = Exit::Signal(libc::SIGKILL);
        self.ended(End::failed(exit.code(), message.clone()));
        self.fail(exit.code().to_string(), vec![message]);
        let tag = self.command.tag;
        drop(self);
        if let Ok(Ok(started)) = started.await {
            let _ =
                blocking(move || tree::kill(tag).and_then(|()| exit::wait_blocking(&started.pidfd))).await;
        }
    }

    async fn foreground(self, started: Started) {
        let pidfd = match watch::readable(started.pidfd) {
            Ok(pidfd) => pidfd,
            Err((pidfd, error)) => return self.lost(&pidfd, &error).await,
        };
        let mut fds = started.outputs.into_iter();
        let mut output = |source| {
            let pipe = Pipe::new(fds.next().ok_or(io::ErrorKind::NotFound)?)?;
            Ok(Output::new(pipe, source, self.app.line_endings))
        };
        let both: io::Result<_> = output(Source::Stdout).and_then(|out| Ok((out, output(Source::Stderr)?)));
        let (mut out, mut err) = match both {
            Ok(both) => both,
            Err(error) => return self.lost(pidfd.get_ref(), &error).await,
        };
        let mut timer = Timer::new(self.began, self.timeout);
        let mut ping = self.began + PING;
        let mut abandoned = false;
        let (exit, consumed) = loop {
            let full = self.writer.is_full();
            tokio::select! {
                end = ended_counted(&pidfd) => break end,
                () = out.turn(&self.writer), if !full && out.is_open() => {}
                () = err.turn(&self.writer), if !full && err.is_open() => {}
                () = self.writer.room(), if full => {}
                () = self.writer.abandoned(), if !full && !abandoned => abandoned = true,
                () = timer.expired() => timer.kill(self.command.tag),
                () = sleep_until(ping), if !abandoned => {
                    self.writer.push(event::push_ping);
                    ping = Instant::now() + PING;
                }
            }
        };
        let timed_out = self.time_out(&mut timer).await;
        // The end is a fact now, however long the client takes to read what came before it.
        let failure = self.record((exit, consumed), started.oom_kills, timed_out);
        output::drain(&self.writer, &mut out, &mut err).await;
        match failure {
            None => self.writer.push(|out| event::push_complete(out, self.began.elapsed())),
            Some(traceback) => self.fail(exit.code().to_string(), traceback),
        }
        out.forget();
        err.forget();
    }

    /// Waits for the kill at the time limit, if it has passed, and says what there is to say about it.
    async fn time_out(&self, timer: &mut Timer) -> Option<String> {
        if !timer.killed {
            return None;
        }
        let outcome = match timer.finish().await {
            Ok(()) => "all processes of the command were killed".to_owned(),
            Err(error) => error.to_string(),
        };
        let millis = self.timeout.unwrap_or_default().as_millis();
        Some(format!("the time limit of {millis} ms has passed; {outcome}"))
    }

    /// Makes the end known to whoever asks, and gives what there is to say when it was none of success.
    fn record(
        &self,
        (exit, consumed): (Exit, Option<Consumed>),
        oom_kills: Option<u64>,
        timed_out: Option<String>,
    ) -> Option<Vec<String>> {
        let mut traceback = vec![exit.words()];
        if let Some(timed_out) = timed_out {
            traceback.push(timed_out);
        } else if exit.signal() == Some(libc::SIGKILL) && out_of_memory(&self.app, oom_kills) {
            traceback.push(OUT_OF_MEMORY.to_owned());
        }
        let failure = Some(traceback).filter(|_| exit != Exit::Code(0));
        let error = failure.as_ref().map(|traceback| traceback.join("; "));
        self.ended(End { exit_code: exit.code(), error, consumed });
        failure
    }

    /// Makes the end known.
    fn ended(&self, end: End) {
        if let Some(telemetry) = &self.app.telemetry {
            let success = telemetry::result(end.exit_code == 0);
            let attributes = vec![("operation", "run_command".to_owned()), success];
            telemetry.record(&self.app.binding.get(), Timed::Execution, attributes, self.began.elapsed());
        }
        self.app.commands.ended(&self.command, end);
    }

    fn fail(&self, evalue: String, traceback: Vec<String>) {
        let error = ExecutionError { ename: "CommandExecError".to_owned(), evalue, traceback };
        self.writer.push(|out| event::push_error(out, error));
    }

    /// The process runs but cannot be followed: it is ended, so that nothing runs that nobody knows of.
    async fn lost(&self, pidfd: &OwnedFd, error: &io::Error) {
        let message = format!("the command cannot be followed and was killed: {error}");
        let tag = self.command.tag;
        let _ = blocking(move || tree::kill(tag)).await;
        let _ = exit::reap(pidfd);
        let exit_code = Exit::Signal(libc::SIGKILL).code();
        self.ended(End::failed(exit_code, message.clone()));
        self.fail("137".to_owned(), vec![message]);
    }

    async fn background(mut self, mut started: Started) {
        let pidfd = match watch::readable(started.pidfd) {
            Ok(pidfd) => pidfd,
            Err((pidfd, error)) => return self.lost(&pidfd, &error).await,
        };
        let pipe = started.outputs.pop().ok_or_else(|| io::ErrorKind::NotFound.into()).and_then(Pipe::new);
        let pipe = match pipe {
            Ok(pipe) => pipe,
            Err(error) => return self.lost(pidfd.get_ref(), &error).await,
        };
        self.writer.push(|out| event::push_complete(out, self.began.elapsed()));
        // Dropping the writer ends the client's stream.
        self.writer = feed::feed().0;
        let mut collector = tokio::spawn(collect(pipe, self.app.clone(), Arc::clone(&self.command)));
        let mut timer = Timer::new(self.began, self.timeout);
        let (exit, consumed) = loop {
            tokio::select! {
                end = ended_counted(&pidfd) => break end,
                () = timer.expired() => timer.kill(self.command.tag),
            }
        };
        let timed_out = self.time_out(&mut timer).await;
        // The status must not say "ended" before the last output can be read; others may hold the pipe for ever.
        let _ = tokio::time::timeout(QUIET, &mut collector).await;
        self.record((exit, consumed), started.oom_kills, timed_out);
    }
}

/// Moves a background command's output to its store until the last writer has gone.
async fn collect(pipe: Pipe, app: App, command: Arc<Command>) {
    let Some(spool) = &command.spool else { return };
    loop {
        let Ok(mut guard) = pipe.readable().await else { return };
        let mut late = Vec::new();
        let found = pipe.read(|piece| {
            if spool.may_block(piece.len()) {
                late.extend_from_slice(piece);
                return false;
            }
            spool.append(piece);
            true
        });
        if found == Found::Idle {
            guard.clear_ready();
        }
        drop(guard);
        if !late.is_empty() {
            let (owner, app) = (Arc::clone(&command), app.clone());
            let stored = tokio::task::spawn_blocking(move || {
                if let Some(spool) = &owner.spool {
                    spool.append(&late);
                    app.commands.make_room();
                }
            });
            let _ = stored.await;
        }
        if found == Found::Closed {
            return;
        }
        tokio::task::consume_budget().await;
    }
}
