//! The processes beside the server: *spawners*, which start sandboxes, and the *preparer*, which makes ready what
//! a sandbox needs. Each is this same program executed anew, with a single thread, so that it can clone; the
//! server has many threads and must not. They live as long as their socket.

pub(crate) mod child;
pub(crate) mod handle;
pub(crate) mod message;
pub(crate) mod mounts;
mod overlay;
pub(crate) mod preparer;
mod spawner;
pub(crate) mod spawners;
mod startup;
mod userns;

use std::process::ExitCode;

/// First argument of a spawner.
pub const SPAWNER_ARG: &str = "__spawner";
/// First argument of the preparer.
pub const PREPARER_ARG: &str = "__preparer";

/// The main function of a helper; `role` is the first argument. `None` when it names no helper.
///
/// To be called before the process has a second thread.
#[must_use]
pub fn helper_main(role: &str) -> Option<ExitCode> {
    let result = match role {
        SPAWNER_ARG => spawner::run(),
        PREPARER_ARG => preparer::run(),
        _ => return None,
    };
    Some(match result {
        Ok(()) => ExitCode::SUCCESS,
        // The server reads the reason from the socket, where `startup` has sent it.
        Err(_) => ExitCode::FAILURE,
    })
}
