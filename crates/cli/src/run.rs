//! `osb run`: a program in a sandbox of its own, with files in and out.
//!
//! The sandbox goes when the program does: after its end, after an error, after a signal. Should this process be
//! killed outright, the sandbox's lifetime ends it: it is short and extended as long as the program runs.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use osb_client::{Sandbox, Upload};
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, interval_at};

use crate::ImageCommand;
use crate::args::key_value;
use crate::command::{Program, ProgramArgs, finish, follow, quoted};
use crate::copy::{download_into, upload_into};
use crate::exit;
use crate::progress;
use crate::settings::Context;
use crate::shell;
use crate::signals::Signals;
use crate::streams::Streams;

/// How long a sandbox lives after it was last heard of.
const LEASE: Duration = Duration::from_secs(300);
/// Time between two extensions.
const RENEWAL: Duration = Duration::from_secs(90);

/// Arguments of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Image: a stored name, an alias, a registry reference, or host
    image: String,
    /// Variable for the program; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    env: Vec<(String, String)>,
    /// Limit such as cpu=2 or memory=512Mi; may be repeated
    #[arg(long, value_name = "NAME=AMOUNT", value_parser = key_value)]
    resource: Vec<(String, String)>,
    /// Label of the sandbox; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = key_value)]
    metadata: Vec<(String, String)>,
    /// Copy a local file or directory in before the program starts; may be repeated
    #[arg(long, value_name = "LOCAL:REMOTE", value_parser = copy_in)]
    copy_in: Vec<(PathBuf, String)>,
    /// Copy a file or directory out when the program has ended, however it did; may be repeated
    #[arg(long, value_name = "REMOTE:LOCAL", value_parser = copy_out)]
    copy_out: Vec<(String, PathBuf)>,
    /// Read standard input to its end first and give it to the program
    #[arg(short, long)]
    interactive: bool,
    /// Run the program on a terminal, as -it does with containers
    #[arg(short, long)]
    tty: bool,
    /// Pass a single word on as a program's name, even if it has blanks
    #[arg(long)]
    argv: bool,
    #[command(flatten)]
    program: ProgramArgs,
    /// Program and arguments, best behind --; one word with blanks is text for the shell [default: the image's own]
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    words: Vec<String>,
    #[arg(skip)]
    pub(crate) image_command: Option<ImageCommand>,
}

/// Splits where the place in the sandbox begins.
fn copy_in(text: &str) -> Result<(PathBuf, String), String> {
    match text.rfind(":/") {
        Some(at) if at > 0 => Ok((text[..at].into(), text[at + 1..].to_owned())),
        _ => Err(format!("'{text}' is no copy; use LOCAL:REMOTE such as src:/work/src")),
    }
}

/// Splits where the place here begins.
fn copy_out(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once(':') {
        Some((remote, local)) if remote.starts_with('/') && !local.is_empty() => {
            Ok((remote.to_owned(), local.into()))
        }
        _ => Err(format!("'{text}' is no copy; use REMOTE:LOCAL such as /work/out:out")),
    }
}

/// Where the program's input lies in the sandbox.
const INPUT: &str = "/tmp/.osb-input";

/// What is done in the sandbox.
struct Work {
    copy_in: Vec<(PathBuf, String)>,
    copy_out: Vec<(String, PathBuf)>,
    /// Standard input of the program, kept in a file without a name.
    input: Option<std::fs::File>,
    program: Program,
    args: ProgramArgs,
    /// On a terminal.
    tty: bool,
}

pub(crate) async fn run(context: &Context, args: RunArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    if args.tty {
        if !streams.stdin_is_terminal {
            anyhow::bail!("-t needs a terminal as standard input; leave it out where there is none");
        }
        args.program.for_terminal()?;
    }
    let mut signals = Signals::new()?;
    let image = args.image.clone();
    let mut create = context.client.create(args.image).timeout(LEASE);
    for (name, value) in args.env {
        create = create.env(name, value);
    }
    for (name, amount) in args.resource {
        create = create.resource(name, amount);
    }
    for (key, value) in args.metadata {
        create = create.metadata(key, value);
    }
    for (local, _) in &args.copy_in {
        // Better known before a sandbox is made.
        std::fs::metadata(local).with_context(|| local.display().to_string())?;
    }
    let input = match args.interactive && !args.tty {
        true => tokio::select! {
            input = spool(streams) => Some(input?),
            signal = signals.next() => return Ok(exit::SIGNAL + signal),
        },
        false => None,
    };
    // The image's own command is known when the image is: it may be fetched only now.
    let own = match args.words.is_empty() {
        true => args.image_command.map(|find| find(&image)).transpose()?.flatten(),
        false => None,
    };
    let terminal = streams.stderr_is_terminal;
    let made = progress::while_pending(context, Some(image.clone()), terminal, create.send());
    let sandbox = match make(made, &mut signals, streams).await? {
        Made::Sandbox(sandbox) => sandbox,
        Made::Signal(signal) => return Ok(exit::SIGNAL + signal),
    };
    let work = async {
        let program = match args.words.is_empty() {
            true => Program::Argv(own_command(&image, own, args.image_command)?),
            false => Program::from_words(args.words, args.argv),
        };
        let work = Work {
            copy_in: args.copy_in,
            copy_out: args.copy_out,
            input,
            program,
            args: args.program,
            tty: args.tty,
        };
        work.carry_out(&sandbox, streams).await
    };
    let ended = tokio::select! {
        ended = leased(&sandbox, work) => ended.map(Ended::Itself),
        signal = signals.next() => Ok(Ended::Signal(signal)),
    };
    remove(&sandbox, &mut signals, streams).await;
    match ended? {
        Ended::Itself(code) => Ok(code),
        Ended::Signal(signal) => Ok(exit::SIGNAL + signal),
    }
}

/// The program that the image brings along.
fn own_command(
    image: &str,
    known: Option<Vec<String>>,
    find: Option<ImageCommand>,
) -> anyhow::Result<Vec<String>> {
    let known = match known {
        Some(known) => Some(known),
        None => find.map(|find| find(image)).transpose()?.flatten(),
    };
    match known {
        None => anyhow::bail!(
            "what image '{image}' runs by itself is known only where it is stored: name the program behind --"
        ),
        Some(words) if words.is_empty() => {
            anyhow::bail!("image '{image}' has no program of its own: name one behind --")
        }
        Some(words) => Ok(words),
    }
}

/// Reads standard input to its end: the protocol has no way to pass it on piece by piece.
async fn spool(streams: &mut Streams) -> anyhow::Result<std::fs::File> {
    if streams.stdin_is_terminal {
        anyhow::bail!("-i passes a file or a pipe on; -it runs the program on a terminal");
    }
    let file = tempfile::tempfile().context("room for standard input")?;
    let mut writer = tokio::fs::File::from_std(file.try_clone()?);
    tokio::io::copy(&mut streams.stdin, &mut writer).await.context("standard input")?;
    writer.flush().await?;
    Ok(file)
}

impl Work {
    /// Copies in, runs, copies out; the program's exit code.
    async fn carry_out(self, sandbox: &Sandbox, streams: &mut Streams) -> anyhow::Result<u8> {
        for (local, remote) in &self.copy_in {
            upload_into(sandbox, local, remote, streams).await?.note_skipped(streams).await;
        }
        let mut program = self.program;
        if let Some(input) = &self.input {
            // By way of the descriptor: the file has no name.
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(input));
            let upload = Upload::file(INPUT, std::path::Path::new(&path)).await?.mode(0o644);
            sandbox.files().upload([upload]).await?;
            program = with_input(program);
        }
        let code = if self.tty {
            shell::run_program(sandbox, self.args.for_terminal()?, &program, streams).await?
        } else {
            // The sandbox has the variables already.
            let command = self.args.build(program, sandbox, []);
            let mut running = None;
            let exit = follow(command, &mut running, streams).await?;
            finish(&exit, streams).await?
        };
        for (remote, local) in &self.copy_out {
            match download_into(sandbox, remote, local, streams).await {
                Ok(moved) => moved.note_skipped(streams).await,
                // The program's own failure counts for more.
                Err(error) if code != exit::SUCCESS => {
                    streams.note(&format!("not copied out: {remote}: {error:#}")).await;
                }
                Err(error) => return Err(error.context(format!("not copied out: {remote}"))),
            }
        }
        Ok(code)
    }
}

/// The program with the file of input as its standard input.
fn with_input(program: Program) -> Program {
    match program {
        Program::Shell(text) => Program::Shell(format!("exec <{}\n{text}", quoted(INPUT))),
        Program::Argv(words) => {
            let shell = ["sh", "-c", r#"exec "$@" <"$0""#, INPUT].map(str::to_owned);
            Program::Argv(shell.into_iter().chain(words).collect())
        }
    }
}

enum Ended {
    Itself(u8),
    Signal(u8),
}

enum Made {
    Sandbox(Sandbox),
    Signal(u8),
}

/// Makes the sandbox. On a signal the create is seen through, since only its answer tells what to delete.
async fn make(
    made: impl Future<Output = osb_client::Result<Sandbox>>,
    signals: &mut Signals,
    streams: &mut Streams,
) -> anyhow::Result<Made> {
    tokio::pin!(made);
    let signal = tokio::select! {
        sandbox = &mut made => return Ok(Made::Sandbox(sandbox?)),
        signal = signals.next() => signal,
    };
    tokio::select! {
        sandbox = &mut made => {
            if let Ok(sandbox) = sandbox {
                remove(&sandbox, signals, streams).await;
            }
        }
        _ = signals.next() => {
            streams.note("interrupted twice: a sandbox that was being made ends within five minutes").await;
        }
    }
    Ok(Made::Signal(signal))
}

/// Keeps the sandbox alive as long as the work lasts.
async fn leased<T>(sandbox: &Sandbox, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    let mut renewal = interval_at(Instant::now() + RENEWAL, RENEWAL);
    loop {
        tokio::select! {
            done = &mut work => return done,
            // A failure shows when the program's output breaks off; the next extension may succeed.
            _ = renewal.tick() => { let _ = sandbox.renew(LEASE).await; }
        }
    }
}

/// Deletes the sandbox. A further signal stops waiting for that.
async fn remove(sandbox: &Sandbox, signals: &mut Signals, streams: &mut Streams) {
    let result = tokio::select! {
        result = sandbox.kill() => result,
        _ = signals.next() => {
            let id = sandbox.id();
            streams.note(&format!("sandbox {id} may be left; it ends within five minutes")).await;
            return;
        }
    };
    if let Err(error) = result
        && !error.is_not_found()
    {
        let id = sandbox.id();
        streams.note(&format!("sandbox {id} was not deleted and ends within five minutes: {error}")).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies() {
        assert_eq!(copy_in("a:b:/c:d"), Ok(("a:b".into(), "/c:d".to_owned())));
        assert_eq!(copy_in("src:/w/"), Ok(("src".into(), "/w/".to_owned())));
        assert_eq!(copy_out("/a:b:c"), Ok(("/a".to_owned(), "b:c".into())));
        for bad in ["", "a", "a:", ":/b", "a:b"] {
            assert!(copy_in(bad).is_err(), "{bad}");
        }
        for bad in ["", "/a", "/a:", ":b", "a:b"] {
            assert!(copy_out(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_images_own_program_is_found_before_or_after_its_fetch() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let found: ImageCommand = |_| Ok(Some(vec!["/app".to_owned()]));
        assert_eq!(own_command("i", Some(words(&["a", "b"])), None).unwrap(), ["a", "b"]);
        assert_eq!(own_command("i", None, Some(found)).unwrap(), ["/app"]);
        let error = |known, find| own_command("i", known, find).unwrap_err().to_string();
        assert!(error(None, None).contains("known only where it is stored"));
        assert!(error(None, Some(|_| Ok(None))).contains("known only where it is stored"));
        assert!(error(Some(Vec::new()), None).contains("no program of its own"));
    }

    #[test]
    fn input_comes_from_the_file() {
        let argv = Program::Argv(vec!["sort".to_owned(), "-r".to_owned()]);
        let words = ["sh", "-c", r#"exec "$@" <"$0""#, INPUT, "sort", "-r"].map(str::to_owned);
        assert_eq!(with_input(argv), Program::Argv(words.to_vec()));
        let text = Program::Shell("cat <<E\nx\nE".to_owned());
        assert_eq!(with_input(text), Program::Shell("exec </tmp/.osb-input\ncat <<E\nx\nE".to_owned()));
    }
}
