//! How an end is told to people and programs.

use osb_runtime::Ended;

const EXITED: &str = "CONTAINER_EXITED";
const EXITED_ERROR: &str = "CONTAINER_EXITED_ERROR";
const OOM_KILLED: &str = "OOM_KILLED";
const LOST: &str = "CONTAINER_LOST";

/// SIGKILL, as the out-of-memory killer sends it.
const KILL: i32 = 9;

/// Words for the engine's finding. A kill signal counts as the out-of-memory killer's when that has been at work here.
pub(crate) fn told(ended: &osb_engine::Ended) -> Ended {
    let (reason, message) = match (ended.exit_code, ended.signal) {
        (Some(0), _) => (EXITED, "the entrypoint ended with exit code 0".to_owned()),
        (Some(code), Some(KILL)) if ended.oom_kills > 0 => (
            OOM_KILLED,
            format!(
                "the entrypoint was killed because the sandbox ran out of memory (OOMKilled, exit code {code})"
            ),
        ),
        (Some(code), Some(signal)) => {
            (EXITED_ERROR, format!("the entrypoint was killed by signal {signal} (exit code {code})"))
        }
        (Some(code), None) => (EXITED_ERROR, format!("the entrypoint ended with exit code {code}")),
        (None, _) if ended.host_restarted => (LOST, "the host was restarted".to_owned()),
        (None, _) if ended.oom_kills > 0 => (
            OOM_KILLED,
            "the sandbox's first process was killed; the sandbox had run out of memory".to_owned(),
        ),
        (None, _) => (LOST, "the sandbox's first process was killed from outside".to_owned()),
    };
    Ended {
        failed: ended.exit_code != Some(0),
        reason: reason.to_owned(),
        message,
        exit_code: ended.exit_code,
    }
}

/// For a sandbox of which nothing is known any more.
pub(crate) fn lost() -> Ended {
    Ended {
        failed: true,
        reason: LOST.to_owned(),
        message: "the server's record of the sandbox cannot be read".to_owned(),
        exit_code: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_has_its_words() {
        let end = |exit_code, signal, oom_kills, host_restarted| {
            let told = told(&osb_engine::Ended { exit_code, signal, oom_kills, host_restarted });
            (told.failed, told.reason, told.message)
        };
        for ((failed, reason, message), expected) in [
            (end(Some(0), None, 0, false), (false, EXITED, "exit code 0")),
            (end(Some(7), None, 0, false), (true, EXITED_ERROR, "exit code 7")),
            (end(Some(143), Some(15), 3, false), (true, EXITED_ERROR, "signal 15")),
            (end(Some(137), Some(9), 0, false), (true, EXITED_ERROR, "exit code 137")),
            (end(Some(137), Some(9), 1, false), (true, OOM_KILLED, "OOMKilled, exit code 137")),
            (end(None, None, 0, false), (true, LOST, "from outside")),
            (end(None, None, 1, false), (true, OOM_KILLED, "out of memory")),
            (end(None, None, 0, true), (true, LOST, "host was restarted")),
        ] {
            assert_eq!((failed, reason.as_str()), (expected.0, expected.1));
            assert!(message.contains(expected.2), "{message}");
        }
    }
}
