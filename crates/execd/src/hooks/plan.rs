//! Hooks that keep all rules.

use std::collections::BTreeSet;
use std::time::Duration;

use osb_protocol::lifecycle::SandboxLifecycle;
use osb_protocol::schedule::Schedule;

/// How long a hook may take when nothing is said.
const USUAL: Duration = Duration::from_secs(60);
/// Ten digits are the most that a bootstrap script takes for a time-out.
const LONGEST: i64 = 9_999_999_999;

/// The hooks of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Runs once, before the entrypoint.
    pub pre_start: Option<Hook>,
    /// Run again and again.
    pub periodic: Vec<Periodic>,
}

/// A command that the daemon runs by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// For people: `preStart hook`, `periodic hook "sync"`.
    pub title: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// When its processes are killed.
    pub timeout: Duration,
}

/// A hook with its schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Periodic {
    /// What runs.
    pub hook: Hook,
    /// When.
    pub schedule: Schedule,
}

impl Plan {
    /// Checks the hooks.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn new(hooks: &SandboxLifecycle) -> Result<Self, String> {
        let pre_start = match &hooks.pre_start {
            Some(hook) => {
                Some(Hook::new("preStart hook".to_owned(), hook.command.clone(), hook.timeout_seconds)?)
            }
            None => None,
        };
        let mut names = BTreeSet::new();
        let mut periodic = Vec::new();
        for hook in hooks.periodic.iter().flatten() {
            let name = hook.name.trim();
            if name.is_empty() {
                return Err("a periodic hook has a blank name".to_owned());
            }
            if !names.insert(name) {
                return Err(format!("two periodic hooks are called {name:?}"));
            }
            let title = format!("periodic hook {name:?}");
            let schedule =
                Schedule::parse(&hook.schedule).map_err(|error| format!("{title}: schedule: {error}"))?;
            periodic.push(Periodic {
                hook: Hook::new(title, hook.command.clone(), hook.timeout_seconds)?,
                schedule,
            });
        }
        Ok(Self { pre_start, periodic })
    }

    /// Whether there is nothing to run.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pre_start.is_none() && self.periodic.is_empty()
    }
}

impl Hook {
    fn new(title: String, argv: Vec<String>, seconds: Option<i64>) -> Result<Self, String> {
        if argv.first().is_none_or(|program| program.trim().is_empty()) {
            return Err(format!("{title}: the command must begin with a program"));
        }
        if argv.iter().any(|word| word.contains('\0')) {
            return Err(format!("{title}: a command cannot hold a NUL byte"));
        }
        let timeout = match seconds.unwrap_or(0) {
            0 => USUAL,
            seconds @ 1..=LONGEST => Duration::from_secs(seconds.unsigned_abs()),
            seconds => return Err(format!("{title}: {seconds} seconds are no time limit")),
        };
        Ok(Self { title, argv, timeout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<Plan, String> {
        Plan::new(&super::super::parse(text)?)
    }

    #[test]
    fn rules() {
        let good = r#"{"preStart":{"command":["a"]},
            "periodic":[{"name":" n ","schedule":" @hourly ","command":["x"],"timeoutSeconds":5}]}"#;
        let good = plan(good).unwrap();
        assert_eq!(good.pre_start.unwrap().timeout, USUAL);
        assert_eq!(good.periodic[0].hook.title, "periodic hook \"n\"");
        assert_eq!(good.periodic[0].hook.timeout, Duration::from_secs(5));
        assert!(plan(r#"{"periodic":[]}"#).unwrap().is_empty());
        for (text, word) in [
            (r#"{"preStart":{"command":[]}}"#, "preStart hook"),
            (r#"{"preStart":{"command":["  "]}}"#, "program"),
            (r#"{"preStart":{"command":["a\u0000"]}}"#, "NUL"),
            (r#"{"preStart":{"command":["a"],"timeoutSeconds":-1}}"#, "-1"),
            (r#"{"preStart":{"command":["a"],"timeoutSeconds":10000000000}}"#, "time limit"),
            (r#"{"periodic":[{"name":" ","schedule":"@hourly","command":["a"]}]}"#, "blank name"),
            (r#"{"periodic":[{"name":"a","schedule":"@often","command":["a"]}]}"#, "\"a\": schedule"),
            (
                r#"{"periodic":[{"name":"a","schedule":"@daily","command":["a"]},
                                {"name":"a ","schedule":"@daily","command":["a"]}]}"#,
                "two periodic hooks",
            ),
        ] {
            let error = plan(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
