//! What the hooks of a create must fulfil.

use std::collections::BTreeSet;

use osb_protocol::lifecycle::{LifecycleHook, PeriodicLifecycleHook, SandboxLifecycle};
use osb_protocol::schedule::Schedule;

use crate::error::ApiError;

/// Longest text of one word, with the null byte at its end; the kernel takes no longer one.
const LONGEST: usize = 128 << 10;
/// How many periodic hooks there may be, each of which is followed all the time.
const MOST: usize = 64;

/// Limits of members, each told to `refuse` with its place.
pub(super) fn malformed(lifecycle: &SandboxLifecycle, refuse: &mut impl FnMut(&[&str], &str)) {
    let blank = |command: &[String]| command.first().is_none_or(|program| program.trim().is_empty());
    if let Some(hook) = &lifecycle.pre_start {
        if blank(&hook.command) {
            refuse(&["lifecycle", "preStart", "command"], "a program is expected");
        }
        if hook.timeout_seconds.is_some_and(|s| !(1..=10_800).contains(&s)) {
            refuse(&["lifecycle", "preStart", "timeoutSeconds"], "1 to 10800 seconds are expected");
        }
    }
    let mut names = BTreeSet::new();
    for (at, hook) in lifecycle.periodic.iter().flatten().enumerate() {
        let at = at.to_string();
        let mut refuse = |member: &str, msg: &str| refuse(&["lifecycle", "periodic", &at, member], msg);
        if hook.name.trim().is_empty() {
            refuse("name", "a name is expected");
        }
        if hook.schedule.trim().is_empty() {
            refuse("schedule", "a schedule is expected");
        }
        if blank(&hook.command) {
            refuse("command", "a program is expected");
        }
        if hook.timeout_seconds.is_some_and(|s| !(1..=300).contains(&s)) {
            refuse("timeoutSeconds", "1 to 300 seconds are expected");
        }
        if !names.insert(hook.name.trim()) {
            refuse("name", "names must be unique");
        }
    }
}

/// Checks values, before a sandbox is made for them, and takes blanks off names and schedules. `None`: there is
/// nothing to run.
pub(super) fn check(lifecycle: SandboxLifecycle) -> Result<Option<SandboxLifecycle>, ApiError> {
    let SandboxLifecycle { pre_start, periodic } = lifecycle;
    if let Some(LifecycleHook { command, .. }) = &pre_start {
        words("lifecycle.preStart", command)?;
    }
    let mut kept = Vec::new();
    for hook in periodic.into_iter().flatten() {
        let PeriodicLifecycleHook { name, schedule, command, timeout_seconds } = hook;
        let (name, schedule) = (name.trim().to_owned(), schedule.trim().to_owned());
        let place = format!("lifecycle.periodic {name:?}");
        words(&place, &command)?;
        Schedule::parse(&schedule)
            .map_err(|error| ApiError::InvalidParameter(format!("{place}: schedule: {error}")))?;
        kept.push(PeriodicLifecycleHook { name, schedule, command, timeout_seconds });
    }
    if kept.len() > MOST {
        return Err(ApiError::InvalidParameter(format!("lifecycle.periodic: {MOST} hooks are the most")));
    }
    if pre_start.is_none() && kept.is_empty() {
        return Ok(None);
    }
    Ok(Some(SandboxLifecycle { pre_start, periodic: Some(kept).filter(|kept| !kept.is_empty()) }))
}

fn words(place: &str, command: &[String]) -> Result<(), ApiError> {
    if command.iter().any(|word| word.contains('\0')) {
        return Err(ApiError::InvalidParameter(format!("{place}: a command cannot hold a null byte")));
    }
    if command.iter().any(|word| word.len() >= LONGEST) || command.len() > 10_000 {
        return Err(ApiError::InvalidParameter(format!("{place}: the command is too long")));
    }
    Ok(())
}
