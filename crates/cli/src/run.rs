//! `osb run`: a program in a sandbox of its own.
//!
//! The sandbox goes when the program does: after its end, after an error, after a signal. Should this process be
//! killed outright, the sandbox's lifetime ends it: it is short and extended as long as the program runs.

use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use osb_client::{CreateSandbox, Exit, Sandbox};
use tokio::time::{Instant, interval_at};

use crate::command::{ProgramArgs, finish, follow};
use crate::exit;
use crate::sandbox::key_value;
use crate::settings::Context;
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
    #[command(flatten)]
    program: ProgramArgs,
}

pub(crate) async fn run(context: &Context, args: RunArgs, streams: &mut Streams) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
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
    let sandbox = match make(create, &mut signals, streams).await? {
        Made::Sandbox(sandbox) => sandbox,
        Made::Signal(signal) => return Ok(exit::SIGNAL + signal),
    };
    let ended = tokio::select! {
        ended = follow_leased(&sandbox, args.program, streams) => ended.map(Ended::Itself),
        signal = signals.next() => Ok(Ended::Signal(signal)),
    };
    remove(&sandbox, &mut signals, streams).await;
    match ended? {
        Ended::Itself(exit) => finish(&exit, streams).await,
        Ended::Signal(signal) => Ok(exit::SIGNAL + signal),
    }
}

enum Ended {
    Itself(Exit),
    Signal(u8),
}

enum Made {
    Sandbox(Sandbox),
    Signal(u8),
}

/// Makes the sandbox. On a signal the create is seen through, since only its answer tells what to delete.
async fn make(create: CreateSandbox, signals: &mut Signals, streams: &mut Streams) -> anyhow::Result<Made> {
    let mut created = tokio::spawn(create.send());
    let signal = tokio::select! {
        sandbox = &mut created => return Ok(Made::Sandbox(sandbox.context("create")??)),
        signal = signals.next() => signal,
    };
    tokio::select! {
        sandbox = &mut created => {
            if let Ok(Ok(sandbox)) = sandbox {
                remove(&sandbox, signals, streams).await;
            }
        }
        _ = signals.next() => {
            streams.note("interrupted twice: a sandbox that was being made ends within five minutes").await;
        }
    }
    Ok(Made::Signal(signal))
}

async fn follow_leased(
    sandbox: &Sandbox,
    program: ProgramArgs,
    streams: &mut Streams,
) -> anyhow::Result<Exit> {
    // The sandbox has the variables already.
    let command = program.build(sandbox, Vec::new());
    let mut running = None;
    let program = follow(command, &mut running, streams);
    tokio::pin!(program);
    let mut renewal = interval_at(Instant::now() + RENEWAL, RENEWAL);
    loop {
        tokio::select! {
            ended = &mut program => return ended,
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
