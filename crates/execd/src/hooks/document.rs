//! The hooks as texts have them: JSON of the control plane, TOML of the file in which they are kept.
//!
//! Unknown members are refused: a hook that is not run because of a slip in its name would go unnoticed.

use osb_protocol::lifecycle::{LifecycleHook, PeriodicLifecycleHook, SandboxLifecycle};
use serde::{Deserialize, Serialize};

/// The only version there is.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    #[serde(default = "version")]
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pre_start: Option<One>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    periodic: Option<Vec<Repeated>>,
}

/// Files of the first releases spell the limit with an underscore, and so must those that they may come to read.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct One {
    command: Vec<String>,
    #[serde(default, alias = "timeoutSeconds", skip_serializing_if = "Option::is_none")]
    timeout_seconds: Option<i64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Repeated {
    name: String,
    schedule: String,
    command: Vec<String>,
    #[serde(default, alias = "timeoutSeconds", skip_serializing_if = "Option::is_none")]
    timeout_seconds: Option<i64>,
}

fn version() -> u32 {
    VERSION
}

/// Reads JSON, or TOML when the text does not begin with a brace.
///
/// # Errors
/// What is wrong with the text.
pub(crate) fn parse(text: &str) -> Result<SandboxLifecycle, String> {
    let text = text.trim();
    let document: Document = if text.starts_with('{') {
        serde_json::from_str(text).map_err(|error| error.to_string())?
    } else {
        toml::from_str(text).map_err(|error| error.message().to_owned())?
    };
    if document.version != VERSION {
        return Err(format!("version {} is not known here, only {VERSION}", document.version));
    }
    Ok(SandboxLifecycle {
        pre_start: document
            .pre_start
            .map(|hook| LifecycleHook { command: hook.command, timeout_seconds: hook.timeout_seconds }),
        periodic: document.periodic.map(|hooks| {
            hooks
                .into_iter()
                .map(|hook| PeriodicLifecycleHook {
                    name: hook.name,
                    schedule: hook.schedule,
                    command: hook.command,
                    timeout_seconds: hook.timeout_seconds,
                })
                .collect()
        }),
    })
}

/// The text in which hooks are kept.
///
/// # Errors
/// They have no such form.
pub(super) fn to_toml(hooks: &SandboxLifecycle) -> Result<String, String> {
    let document = Document {
        version: VERSION,
        pre_start: hooks
            .pre_start
            .clone()
            .map(|hook| One { command: hook.command, timeout_seconds: hook.timeout_seconds }),
        periodic: hooks.periodic.clone().map(|hooks| {
            hooks
                .into_iter()
                .map(|hook| Repeated {
                    name: hook.name,
                    schedule: hook.schedule,
                    command: hook.command,
                    timeout_seconds: hook.timeout_seconds,
                })
                .collect()
        }),
    };
    toml::to_string(&document).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read_and_what_is_kept_reads_the_same() {
        let json = r#"{"preStart":{"command":["/bin/a","b \"c\"\n"],"timeoutSeconds":5},
            "periodic":[{"name":"n","schedule":"@hourly","command":["x"]},
                        {"name":"m","schedule":"* * * * *","command":["y"],"timeoutSeconds":7}]}"#;
        let hooks = parse(json).unwrap();
        assert_eq!(hooks.pre_start.as_ref().unwrap().timeout_seconds, Some(5));
        let kept = to_toml(&hooks).unwrap();
        assert!(kept.starts_with("version = 1\n") && kept.contains("[preStart]"), "{kept}");
        assert!(kept.contains("timeout_seconds = 5") && kept.contains("[[periodic]]"), "{kept}");
        assert_eq!(parse(&kept).unwrap(), hooks);
        assert_eq!(parse("{}").unwrap(), SandboxLifecycle::default());
        assert_eq!(parse(r#"{"version":1,"preStart":null}"#).unwrap(), SandboxLifecycle::default());
    }

    #[test]
    fn slips_are_told() {
        for (text, word) in [
            ("{", "EOF"),
            (r#"{"prestart":{"command":["a"]}}"#, "prestart"),
            (r#"{"preStart":{"command":["a"],"timeout":3}}"#, "timeout"),
            (r#"{"preStart":{"command":"a"}}"#, "sequence"),
            (r#"{"periodic":[{"name":"n","command":["a"]}]}"#, "schedule"),
            (r#"{"version":2}"#, "version 2"),
            ("version = 1\nx = 2", "x"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
