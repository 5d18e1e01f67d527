//! The question before a server without a key starts.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use osb_server::config::{self, ConfigError, Env, Loaded, env as config_env};

/// How long the answer may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// The only answer that counts.
const YES: &str = "YES";

/// Reads the configuration. When there is no key, a person at the terminal may let the server start all the same.
///
/// # Errors
/// As [`config::load`].
pub(crate) fn load(explicit: Option<&Path>, env: &Env) -> Result<Loaded, ConfigError> {
    match config::load(explicit, env) {
        Err(ConfigError::NoKey) if io::stdin().is_terminal() && agreed() => {
            config::load(explicit, &without_key(std::env::vars()))
        }
        other => other,
    }
}

fn agreed() -> bool {
    let mut stderr = io::stderr().lock();
    let asked = write!(
        stderr,
        "No API key is configured: everybody who reaches the port can run programs here.\n\
         Type {YES} within {} seconds to start without one: ",
        PATIENCE.as_secs()
    );
    if asked.and_then(|()| stderr.flush()).is_err() {
        return false;
    }
    drop(stderr);
    let (send, receive) = mpsc::channel();
    // It goes on waiting when the time is over; the process does not.
    std::thread::spawn(move || {
        let mut line = String::new();
        if io::stdin().lock().read_line(&mut line).is_ok() {
            let _ = send.send(line);
        }
    });
    let answer = receive.recv_timeout(PATIENCE);
    if answer.is_err() {
        let _ = writeln!(io::stderr());
    }
    answer.is_ok_and(|line| means_yes(&line))
}

fn means_yes(line: &str) -> bool {
    line.trim_end_matches(['\r', '\n']) == YES
}

/// The environment with the leave that was just given.
fn without_key(vars: impl Iterator<Item = (String, String)>) -> Env {
    vars.chain([(config_env::INSECURE.to_owned(), YES.to_owned())]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_yes_is_yes() {
        assert!(means_yes("YES\n") && means_yes("YES\r\n") && means_yes("YES"));
        for other in ["yes\n", "Y\n", "\n", "", " YES\n", "YES please\n"] {
            assert!(!means_yes(other), "{other:?}");
        }
        let env = without_key([("HOME".to_owned(), "/h".to_owned())].into_iter());
        assert_eq!((env.get(config_env::INSECURE), env.get("HOME")), (Some("YES"), Some("/h")));
    }
}
