//! Signals that end `osb`.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit;

/// Number of SIGPIPE.
pub(crate) const PIPE: u8 = 13;

/// Watches for the signals by which people and supervisors end a program.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// From now on these signals no longer end the process by themselves.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The number of the next one. Cancel safe.
    pub(crate) async fn next(&mut self) -> u8 {
        // The numbers are the same on all Linux architectures.
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hangup.recv() => 1,
        }
    }
}

/// Gives `work` up at a signal, so that what it holds, such as half a file, is dropped and with that undone.
pub(crate) async fn undone_by(work: impl Future<Output = anyhow::Result<u8>>) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    tokio::select! {
        done = work => done,
        signal = signals.next() => Ok(exit::SIGNAL + signal),
    }
}
