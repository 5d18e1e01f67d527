//! A daemon whose sessions keep what is temporary in a directory of the test.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use serde_json::{Value, json};

use crate::common::{Daemon, Run, Stream, eventually, open_at};

pub struct Host {
    pub daemon: Daemon,
    pub tmp: tempfile::TempDir,
}

pub struct Session<'a> {
    pub host: &'a Host,
    pub id: String,
}

impl Host {
    pub fn start() -> Self {
        Self::with(&[], &[])
    }

    pub fn with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let tmp = tempfile::tempdir().unwrap();
        let mut all = vec![("TMPDIR", tmp.path().to_str().unwrap())];
        all.extend_from_slice(env);
        Self { daemon: Daemon::with(args, &all), tmp }
    }

    pub fn open(&self) -> Session<'_> {
        self.open_in(json!({}))
    }

    pub fn open_in(&self, body: Value) -> Session<'_> {
        let answer = self.daemon.call("POST", "/session", Some(body));
        assert_eq!(answer.head.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        Session { host: self, id: answer.json()["session_id"].as_str().unwrap().to_owned() }
    }

    /// What lies in the directory for temporary things.
    pub fn left(&self) -> usize {
        std::fs::read_dir(self.tmp.path()).unwrap().count()
    }
}

impl Drop for Host {
    /// A daemon that is asked to stop ends its sessions, so that a failed test leaves nothing behind.
    fn drop(&mut self) {
        let pid = i32::try_from(self.daemon.child.id()).unwrap();
        // SAFETY: signals our own child, which has not been reaped.
        unsafe { libc::kill(pid, libc::SIGTERM) };
        for _ in 0..500 {
            if self.daemon.child.try_wait().unwrap().is_some() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

impl Session<'_> {
    pub fn stream(&self, body: Value) -> Stream {
        open_at(self.host.daemon.connect(), &format!("/session/{}/run", self.id), body)
    }

    pub fn post(&self, body: Value) -> Run {
        let mut stream = self.stream(body);
        let mut run = Run::default();
        while let Some((at, event)) = stream.next_event() {
            run.times.push(at);
            run.events.push(event);
        }
        run.check();
        assert_eq!(run.id(), self.id);
        assert!(run.texts("stderr").is_empty());
        run
    }

    /// Runs a command: output and exit code.
    pub fn run(&self, command: &str) -> (String, i32) {
        let run = self.post(json!({ "command": command }));
        (run.stdout(), run.exit_code())
    }

    /// Output of a command that must succeed.
    pub fn out(&self, command: &str) -> String {
        let (out, code) = self.run(command);
        assert_eq!(code, 0, "{command}: {out}");
        out
    }

    pub fn delete(&self) -> u16 {
        self.host.daemon.call("DELETE", &format!("/session/{}", self.id), None).head.status
    }
}

/// Processes whose command line holds these words, zombies not counted.
pub fn processes(words: &str) -> usize {
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).replace('\0', " ").contains(words)
        })
        .count()
}

pub fn gone(words: &str) {
    eventually(&format!("the end of {words}"), || processes(words) == 0);
}
