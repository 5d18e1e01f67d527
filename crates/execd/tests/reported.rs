//! Faults that users of such daemons have reported and that no other file has a place for.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod shells;

use common::{Daemon, eventually};
use serde_json::json;

#[test]
fn a_background_command_tells_its_number_and_ends_by_its_id() {
    let daemon = Daemon::start();
    let run = daemon.post(json!({ "command": "sleep 987071 & echo $!; wait", "background": true }));
    let logs = || daemon.call("GET", &format!("/command/{}/logs?cursor=0", run.id()), None).body;
    eventually("its number", || logs().ends_with(b"\n"));
    let pid: u32 = String::from_utf8(logs()).unwrap().trim().parse().unwrap();
    let line = || std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    eventually("the program", || line() == "sleep\0987071\0");
    assert_eq!(daemon.call("DELETE", &format!("/command?id={}", run.id()), None).head.status, 200);
    assert_eq!(shells::processes("sleep 987071"), 0);
}

#[test]
fn a_script_with_a_heredoc_and_a_detached_child_runs_and_ends() {
    let daemon = Daemon::start();
    let script = "cat <<'END'\n$HOME `x` \"quoted\" \\\nEND\nsetsid nohup sleep 987072 >/dev/null 2>&1 & disown\necho done";
    let run = daemon.run(script);
    assert_eq!((run.check().stdout().as_str(), run.exit_code()), ("$HOME `x` \"quoted\" \\\ndone\n", 0));
    eventually("the child", || shells::processes("sleep 987072") == 1);
    daemon.run("pkill -f '^sleep 987072'");
    shells::gone("sleep 987072");
}

#[test]
fn the_next_command_does_not_wait_for_what_the_last_one_left() {
    let daemon = Daemon::start();
    for left in ["nohup sh -c 'sleep 987073 &'", "sleep 987073 & disown", "(sleep 987073 | cat) &"] {
        daemon.run(left).check();
        eventually("what is left", || shells::processes("sleep 987073") >= 1);
        assert_eq!(daemon.run("echo next").check().stdout(), "next\n", "{left}");
        daemon.run("pkill -f '^sleep 987073'");
        shells::gone("sleep 987073");
    }
}
