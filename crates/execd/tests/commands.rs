//! Commands through the real binary: output, ends, ids. The faults that users of such daemons suffer from.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::time::{Duration, Instant};

use common::{Daemon, eventually, is_alive};
use serde_json::{Value, json};

#[test]
fn the_last_line_without_an_end_arrives() {
    let daemon = Daemon::start();
    let run = daemon.run("printf hello");
    assert_eq!(run.check().texts("stdout"), ["hello"]);
    assert_eq!(run.exit_code(), 0);
}

#[test]
fn the_exit_status_is_not_in_the_output() {
    let daemon = Daemon::start();
    let run = daemon.run("printf foo; exit 3");
    assert_eq!(run.check().stdout(), "foo");
    let error = &run.last()["error"];
    assert_eq!(error["ename"], "CommandExecError");
    assert_eq!(error["evalue"], "3");
    assert_eq!(error["traceback"], json!(["exit status 3"]));
}

#[test]
fn a_long_line_loses_nothing() {
    let daemon = Daemon::start();
    let run = daemon.run("head -c 1000000 /dev/zero | tr '\\0' a");
    assert_eq!(run.check().texts("stdout").len(), 1);
    assert_eq!(run.stdout().len(), 1_000_000);
    let run = daemon.run("head -c 5000000 /dev/zero | tr '\\0' '\\1'");
    assert_eq!(run.stdout().len(), 5_000_000);
    assert!(run.stdout().bytes().all(|byte| byte == 1));
}

#[test]
fn carriage_returns_are_sent_at_once() {
    let daemon = Daemon::start();
    let gate = daemon.gate("gate");
    let mut stream = daemon
        .stream(json!({ "command": format!("printf '10%%\\r20%%\\r'; {}; printf 'done\\n'", gate.wait()) }));
    assert_eq!(stream.until("stdout")["text"], "10%\r");
    assert_eq!(stream.until("stdout")["text"], "20%\r");
    gate.open();
    assert_eq!(stream.until("stdout")["text"], "done\n");
}

#[test]
fn line_ends_are_kept_or_stripped() {
    let command = "printf 'a\\n\\nb\\n\\n\\nc\\n'; printf 'x\\r'; sleep 0.05; printf '\\ny\\r\\nz'";
    let run = Daemon::start().run(command);
    assert_eq!(run.stdout(), "a\n\nb\n\n\nc\nx\r\ny\r\nz");
    assert_eq!(run.texts("stdout")[..6], ["a\n", "\n", "b\n", "\n", "\n", "c\n"]);
    let run = Daemon::with(&["--line-endings", "strip"], &[]).run(command);
    assert_eq!(run.texts("stdout"), ["a", "\n", "b", "\n", "\n", "c", "x", "y", "z"]);
}

#[test]
fn a_line_is_an_event_within_milliseconds() {
    let daemon = Daemon::start();
    let mut stream = daemon.stream(
        json!({ "command": "while read x; do :; done; for i in $(seq 20); do date +%s%N; sleep 0.05; done" }),
    );
    let mut late = Vec::new();
    for event in stream.rest().iter().filter(|event| event["type"] == "stdout") {
        let written: i64 = event["text"].as_str().unwrap().trim().parse::<i64>().unwrap() / 1_000_000;
        late.push(event["timestamp"].as_i64().unwrap() - written);
    }
    assert_eq!(late.len(), 20);
    // `date` prints before it ends; on a busy machine most may be late.
    assert!(late.iter().min().unwrap() <= &5, "{late:?}");
}

#[test]
fn bytes_that_are_not_utf8_are_replaced_one_by_one() {
    let daemon = Daemon::start();
    assert_eq!(daemon.run("printf '\\xff\\xfe'").stdout(), "\u{fffd}\u{fffd}");
    daemon.run("head -c 100000 /dev/urandom").check();
    let apart = daemon.run("printf '\\xc3'; sleep 0.05; printf '\\xa9\\n'; printf '\\xe2\\x82'");
    assert_eq!(apart.stdout(), "é\n\u{fffd}\u{fffd}");
    let many = daemon.run("for i in $(seq 200000); do printf é; done");
    assert_eq!(many.stdout(), "é".repeat(200_000));
}

#[test]
fn both_outputs_are_told_apart_in_arrival_order() {
    let daemon = Daemon::start();
    let (first, second) = (daemon.gate("first"), daemon.gate("second"));
    let command = format!("echo a; {}; echo b >&2; {}; echo c", first.wait(), second.wait());
    let mut stream = daemon.stream(json!({ "command": command }));
    let mut next = || loop {
        let (_, event) = stream.next_event().unwrap();
        if event["type"] != "init" && event["type"] != "ping" {
            break (event["type"].clone(), event["text"].clone());
        }
    };
    assert_eq!(next(), (json!("stdout"), json!("a\n")));
    first.open();
    assert_eq!(next(), (json!("stderr"), json!("b\n")));
    second.open();
    assert_eq!(next(), (json!("stdout"), json!("c\n")));
}

#[test]
fn much_output_arrives_whole_and_memory_stays_small() {
    let daemon = Daemon::start();
    daemon.run("true");
    let mut stream =
        daemon.stream(json!({ "command": "seq 1 300000; head -c 30000000 /dev/zero | tr '\\0' x" }));
    let (mut lines, mut bytes) = (0u64, 0u64);
    while let Some((_, event)) = stream.next_event() {
        if event["type"] == "stdout" {
            let text = event["text"].as_str().unwrap();
            lines += u64::from(text.ends_with('\n'));
            bytes += text.len() as u64;
        }
    }
    assert_eq!((lines, bytes), (300_000, 1_988_895 + 30_000_000));
    assert!(daemon.resident_kib() < 64 << 10, "{} KiB", daemon.resident_kib());
}

#[test]
fn a_client_that_does_not_read_slows_the_program_down() {
    let daemon = Daemon::start();
    let mut stream = daemon.stream(json!({ "command": "yes" }));
    let id = stream.id();
    std::thread::sleep(Duration::from_millis(500));
    assert!(daemon.resident_kib() < 64 << 10, "{} KiB", daemon.resident_kib());
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
    assert_eq!(stream.rest().last().unwrap()["type"], "error");
}

#[test]
fn the_id_can_be_used_as_soon_as_it_is_known() {
    let daemon = Daemon::start();
    for _ in 0..20 {
        let mut stream = daemon.stream(json!({ "command": "sleep 60" }));
        let id = stream.id();
        assert_eq!(daemon.status(&id)["running"], true);
        assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
        let last = stream.rest().pop().unwrap();
        assert_eq!(last["error"]["evalue"], "143");
        assert_eq!(last["error"]["traceback"], json!(["signal: terminated"]));
        let status = daemon.status(&id);
        assert_eq!((&status["running"], &status["exit_code"]), (&json!(false), &json!(143)));
    }
}

#[test]
fn a_death_by_signal_is_a_number() {
    let daemon = Daemon::start();
    for (command, code, words) in [
        ("kill -9 $$", 137, "signal: killed"),
        ("kill -SEGV $$", 139, "signal: segmentation fault"),
        ("exec sh -c 'kill -TERM $$'", 143, "signal: terminated"),
        ("exit 255", 255, "exit status 255"),
    ] {
        let run = daemon.run(command);
        assert_eq!(run.check().exit_code(), code, "{command}");
        assert_eq!(run.last()["error"]["traceback"], json!([words]), "{command}");
    }
}

#[test]
fn a_start_that_fails_says_why_in_an_array() {
    let daemon = Daemon::start();
    let run = daemon.post(json!({ "argv": ["/no/such/program"] }));
    run.check();
    let error = &run.last()["error"];
    assert_eq!(error["ename"], "CommandExecError");
    assert!(error["traceback"][0].as_str().unwrap().contains("/no/such/program"));
    assert_eq!(error["traceback"][0], error["evalue"]);
    let status = daemon.status(run.id());
    assert_eq!((&status["running"], &status["exit_code"]), (&json!(false), &json!(255)));
    assert!(status["error"].as_str().unwrap().contains("/no/such/program"));
}

#[test]
fn what_is_refused_gets_json_and_no_stream() {
    let daemon = Daemon::start();
    for body in [
        json!({ "command": "true", "cwd": "/no/such/dir" }),
        json!({ "command": "true", "cwd": "/etc/passwd" }),
        json!({ "command": "true", "cwd": "$UNDEFINED_THING" }),
        json!({ "command": "  " }),
        json!({ "command": "true", "timeout": -1 }),
        json!({ "command": "true", "gid": 5 }),
        json!({ "command": 7 }),
        json!([]),
    ] {
        let answer = daemon.call("POST", "/command", Some(body.clone()));
        assert_eq!(answer.head.status, 400, "{body}");
        assert_eq!(answer.json()["code"], "INVALID_REQUEST_BODY", "{body}");
        assert!(answer.head.header("content-type").unwrap().starts_with("application/json"));
    }
    assert_eq!(daemon.call("POST", "/command", None).head.status, 400);
}

#[test]
fn standard_input_is_empty() {
    let daemon = Daemon::start();
    for (command, output, code) in [
        ("cat", "", 0),
        ("grep foo", "", 1),
        ("read x", "", 1),
        ("printf a | cat", "a", 0),
        ("cat <<E\nheredoc\nE", "heredoc\n", 0),
        ("readlink /proc/self/fd/0", "/dev/null\n", 0),
    ] {
        let run = daemon.run(command);
        assert_eq!((run.stdout().as_str(), run.exit_code()), (output, code), "{command}");
    }
}

#[test]
fn a_run_ends_with_its_process_not_with_its_pipes() {
    let daemon = Daemon::start();
    for command in [
        "sleep 31 &",
        "(sleep 31 &) ; true",
        "(sleep 31 &) >/dev/null 2>&1",
        "sleep 31 >/dev/null & echo x",
        "setsid sh -c 'exec sleep 31' & echo x",
        "nohup sh -c 'sleep 31 &'",
        "sleep 31 & disown",
    ] {
        let began = Instant::now();
        let run = daemon.run(command);
        assert_eq!(run.check().exit_code(), 0, "{command}");
        assert!(began.elapsed() < Duration::from_secs(20), "{command}: {:?}", began.elapsed());
        eventually(command, || is_alive("sleep 31"));
        let next = daemon.run("echo next; pkill -f '^sleep 31'");
        assert_eq!(next.stdout(), "next\n", "{command}");
    }
}

#[test]
fn a_survivor_neither_dies_of_its_pipe_nor_blocks_on_it() {
    let daemon = Daemon::start();
    let marker = daemon.dir.path().join("marker");
    // More than any pipe holds, written after the run has ended.
    let command =
        format!("(sleep 0.4; head -c 3000000 /dev/zero; echo alive > {}) & echo first", marker.display());
    assert_eq!(daemon.run(&command).stdout(), "first\n");
    eventually("the survivor's file", || {
        std::fs::read_to_string(&marker).is_ok_and(|text| text == "alive\n")
    });
}

#[test]
fn output_that_trails_the_end_shortly_is_delivered() {
    let daemon = Daemon::start();
    // How long is waited for such output is a matter of taste, and a busy machine may be late.
    let late = (0..20).any(|_| {
        let run = daemon.run("(sleep 0.02; echo late) & echo early");
        assert!(["early\n", "early\nlate\n"].contains(&run.check().stdout().as_str()), "{run:?}");
        run.stdout() == "early\nlate\n"
    });
    assert!(late, "nothing that came later was delivered");
    let endless = daemon.run("yes & echo first");
    assert_eq!(endless.check().exit_code(), 0);
    daemon.run("pkill -f '^yes$'");
}

#[test]
fn a_time_limit_kills_the_whole_tree_and_delivers_what_there_was() {
    let daemon = Daemon::start();
    let command = "echo start; sleep 41 & setsid sleep 42 & (setsid sleep 43 &); sleep 44 | cat; echo never";
    let began = Instant::now();
    let run = daemon.post(json!({ "command": command, "timeout": 1000 }));
    assert!((1000..20_000).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    assert_eq!(run.check().stdout(), "start\n");
    assert_eq!(run.exit_code(), 137);
    let traceback = run.last()["error"]["traceback"].to_string();
    assert!(traceback.contains("signal: killed") && traceback.contains("1000 ms"), "{traceback}");
    for seconds in 41..45 {
        assert!(!is_alive(&format!("sleep {seconds}")), "{seconds}");
    }
    assert_eq!(daemon.status(run.id())["exit_code"], 137);
}

#[test]
fn partial_output_survives_a_time_limit() {
    let daemon = Daemon::start();
    let command = "for i in $(seq 100); do echo $i; echo $i >>said; sleep .1; done";
    let run = daemon.post(json!({ "command": command, "timeout": 1050 }));
    let said = std::fs::read_to_string(daemon.dir.path().join("said")).unwrap();
    let said = said.lines().count();
    let lines = run.texts("stdout").len();
    // The end may have come between the two.
    assert!((1..=11).contains(&lines) && (said..=said + 1).contains(&lines), "{lines} of {said}");
    assert_eq!(run.exit_code(), 137);
}

#[test]
fn an_interrupt_lets_a_command_end_by_itself() {
    let daemon = Daemon::start();
    let mut stream = daemon.stream(json!({
        "command": "trap 'echo bye; exit 7' TERM; echo ready; sleep 51 & wait; sleep 52"
    }));
    let id = stream.id();
    stream.until("stdout");
    let began = Instant::now();
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
    assert!(began.elapsed() < Duration::from_secs(3), "nobody had to be killed");
    let rest = stream.rest();
    assert!(rest.iter().any(|event| event["text"] == "bye\n"), "{rest:?}");
    assert_eq!(rest.last().unwrap()["error"]["evalue"], "7");
    assert!(!is_alive("sleep 51"));
}

#[test]
fn an_interrupt_ends_what_ignores_it() {
    let daemon = Daemon::start();
    let mut stream = daemon.stream(json!({
        "command": "trap '' TERM; setsid sh -c 'echo ready; exec sleep 53' & while :; do sleep 54; done"
    }));
    let id = stream.id();
    stream.until("stdout");
    let began = Instant::now();
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
    assert!((2900..30_000).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    assert_eq!(stream.rest().last().unwrap()["error"]["evalue"], "137");
    assert!(!is_alive("sleep 53") && !is_alive("sleep 54"));
}

#[test]
fn an_interrupt_reaches_a_stopped_process() {
    let daemon = Daemon::start();
    let mut stopped = daemon.stream(json!({ "command": "echo ready; kill -STOP $$; echo on" }));
    let id = stopped.id();
    stopped.until("stdout");
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
    assert_eq!(stopped.rest().last().unwrap()["error"]["evalue"], "143");
}

#[test]
fn interrupting_what_has_ended_is_fine_and_what_never_was_is_not() {
    let daemon = Daemon::start();
    let run = daemon.run("true");
    for _ in 0..2 {
        let answer = daemon.call("DELETE", &format!("/command?id={}", run.id()), None);
        assert_eq!((answer.head.status, answer.body.len()), (200, 0));
    }
    assert_eq!(daemon.call("DELETE", "/command?id=ffff", None).head.status, 404);
    let missing = daemon.call("DELETE", "/command", None);
    assert_eq!((missing.head.status, &missing.json()["code"]), (400, &json!("MISSING_QUERY")));
}

#[test]
fn a_command_runs_on_when_its_client_leaves() {
    let daemon = Daemon::start();
    let mut stream = daemon.stream(json!({ "command": "sleep 0.3; seq 100000; echo end > done; exit 5" }));
    let id = stream.id();
    drop(stream);
    assert_eq!(daemon.wait_ended(&id)["exit_code"], 5);
    assert!(daemon.dir.path().join("done").exists());
}

#[test]
fn streams_of_clients_that_left_cost_nothing() {
    let daemon = Daemon::start();
    daemon.run("true");
    let mut ids = Vec::new();
    let streams: Vec<_> = (0..100)
        .map(|_| {
            let mut stream = daemon.stream(json!({ "command": "exec sleep 61" }));
            ids.push(stream.id());
            stream
        })
        .collect();
    let busy = daemon.descriptors();
    drop(streams);
    eventually("the connections' end", || daemon.descriptors() <= busy - 100);
    for id in ids {
        assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
    }
    eventually("all descriptors' end", || daemon.descriptors() < 24);
}

#[test]
fn starts_that_fail_leave_nothing_behind() {
    let daemon = Daemon::start();
    daemon.run("true");
    let before = daemon.descriptors();
    let mut client = daemon.connect();
    for at in 0..10_000 {
        let body =
            if at % 2 == 0 { r#"{"argv":["/no/such"]}"# } else { r#"{"command":"x","cwd":"/no/such"}"# };
        let head = client.request("POST", "/command", &[], body.as_bytes());
        assert_eq!(head.status, if at % 2 == 0 { 200 } else { 400 });
        client.body(&head);
    }
    drop(client);
    eventually("constant descriptors", || daemon.descriptors() <= before);
    let pid = daemon.child.id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    assert_eq!(children, "", "no zombies");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
    assert!(tasks < 10, "{tasks}");
}

#[test]
fn every_exit_code_is_its_own() {
    let daemon = Daemon::start();
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let daemon = &daemon;
            scope.spawn(move || {
                for at in 0..40 {
                    let code = (worker * 40 + at) % 250;
                    assert_eq!(daemon.run(&format!("exit {code}")).check().exit_code(), code);
                }
            });
        }
    });
}

#[test]
fn pings_come_first_and_every_three_seconds() {
    let daemon = Daemon::start();
    let run = daemon.run("sleep 4");
    let pings: Vec<usize> = (0..run.events.len()).filter(|&at| run.events[at]["type"] == "ping").collect();
    assert_eq!(pings, [1, 2]);
    assert_eq!(run.events[1]["text"], "pong");
    let sent = |at: usize| run.events[at]["timestamp"].as_i64().unwrap();
    let pause = sent(2) - sent(1);
    assert!((2500..4500).contains(&pause), "{pause}");
    assert!(run.last()["execution_time"].as_u64().unwrap() >= 4000);
}

#[test]
fn the_environment_has_its_order() {
    let daemon = Daemon::with(
        &["--access-token", ""],
        &[
            ("A", "daemon"),
            ("B", "daemon"),
            ("C", "daemon"),
            ("JUPYTER_TOKEN", "s3cret"),
            ("EXECD_RUNTIME_INIT", "1"),
        ],
    );
    let file = daemon.dir.path().join("env");
    drop(daemon);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    let daemon = Daemon::with(
        &[],
        &[
            ("A", "daemon"),
            ("B", "daemon"),
            ("C", "daemon"),
            ("JUPYTER_TOKEN", "s3cret"),
            ("EXECD_ENVS", file.to_str().unwrap()),
        ],
    );
    std::fs::write(&file, "B='file'\nC=\"file\"\nD=$A\n").unwrap();
    let run = daemon.post(json!({
        "command": "echo $A $B $C $D; echo \"[$JUPYTER_TOKEN]\"; echo $PWD; test -n \"$EXECD_ENVS\" && echo visible",
        "envs": { "C": "request $A" },
        "cwd": "/usr",
    }));
    assert_eq!(run.stdout(), "daemon file request $A daemon\n[]\n/usr\nvisible\n");
    // Read afresh for the next run.
    let append =
        "mkdir -p \"$(dirname \"$EXECD_ENVS\")\" && printf '%s\\n' \"E='it works'\" >> \"$EXECD_ENVS\"";
    assert_eq!(daemon.run(append).exit_code(), 0);
    assert_eq!(daemon.run("echo $E").stdout(), "it works\n");
    // What no program could be started with must not lock everybody out.
    let fill = "(printf BIG=; head -c 200000 /dev/zero | tr '\\0' x; echo; printf SMALL=1) > \"$EXECD_ENVS\"";
    assert_eq!(daemon.run(fill).exit_code(), 0);
    assert_eq!(daemon.run("echo ${#BIG} $SMALL").stdout(), "0 1\n");
    let fill = "x=$(head -c 100000 /dev/zero | tr '\\0' x); for i in $(seq 19); do echo V$i=$x; done > \"$EXECD_ENVS\"";
    assert_eq!(daemon.run(fill).exit_code(), 0);
    assert_eq!(daemon.run("echo ${#V1} ${#V19}").stdout(), "0 100000\n");
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn directories_are_expanded_with_the_commands_environment() {
    let daemon = Daemon::start();
    let run = daemon.post(json!({ "command": "pwd", "cwd": "$WHERE", "envs": { "WHERE": "/usr/bin" } }));
    assert_eq!(run.stdout(), "/usr/bin\n");
    let run = daemon.post(json!({ "command": "pwd", "cwd": "~", "envs": { "HOME": "/usr" } }));
    assert_eq!(run.stdout(), "/usr\n");
    let run = daemon.run("pwd");
    assert_eq!(run.stdout().trim(), daemon.dir.path().to_str().unwrap());
}

#[test]
fn arguments_are_not_read_by_a_shell() {
    let daemon = Daemon::start();
    let run = daemon.post(json!({ "argv": ["printf", "%s|", "a b", "$HOME", "`x`", "'"] }));
    assert_eq!(run.stdout(), "a b|$HOME|`x`|'|");
    assert_eq!(daemon.status(run.id())["content"], r#"["printf","%s|","a b","$HOME","`x`","'"]"#);
    std::fs::create_dir(daemon.dir.path().join("d")).unwrap();
    let script = daemon.dir.path().join("d/script");
    std::fs::write(&script, "#!/bin/sh\necho script $1\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let cwd = daemon.dir.path().join("d");
    let run = daemon.post(json!({ "argv": ["./script", "x"], "cwd": cwd }));
    assert_eq!(run.stdout(), "script x\n");
}

#[test]
fn an_image_without_bash_has_sh() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/bin/sh", dir.path().join("sh")).unwrap();
    std::os::unix::fs::symlink("/bin/echo", dir.path().join("echo")).unwrap();
    let daemon = Daemon::with(&[], &[("PATH", dir.path().to_str().unwrap())]);
    assert_eq!(daemon.run("echo $0; [ 1 = 1 ] && echo y").stdout(), "sh\ny\n");
    assert_eq!(Daemon::start().run("echo $0").stdout(), "bash\n");
}

#[test]
fn a_command_runs_as_the_user_asked_for() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let daemon = Daemon::start();
    let cwd = "/";
    let run = daemon.post(json!({ "command": "id -u; id -g; id -G", "uid": 0, "cwd": cwd }));
    assert_eq!(run.stdout(), "0\n0\n0\n");
    let run = daemon.post(
        json!({ "command": "id -u; id -g; id -G; cat /etc/shadow", "uid": 12345, "gid": 54, "cwd": cwd }),
    );
    assert!(run.stdout().starts_with("12345\n54\n54\n"), "{run:?}");
    assert_eq!(run.exit_code(), 1);
    let run = daemon.post(json!({ "command": "id -un; id -gn", "uid": 65534, "cwd": cwd }));
    assert_eq!(run.stdout(), "nobody\nnogroup\n");
}

#[test]
fn an_unprivileged_daemon_says_what_it_lacks() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: needs root");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let copy = dir.path().join("execd");
    std::fs::copy(env!("CARGO_BIN_EXE_execd"), &copy).unwrap();
    std::fs::set_permissions(&copy, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = std::process::Command::new(&copy);
    std::os::unix::process::CommandExt::uid(&mut command, 65534);
    std::os::unix::process::CommandExt::gid(&mut command, 65534);
    let socket = dir.path().join("socket");
    let child = command
        .arg("--socket")
        .arg(&socket)
        .env("EXECD_LOG_FILE", dir.path().join("log"))
        .current_dir("/")
        .spawn()
        .unwrap();
    let daemon = Daemon { child, dir };
    eventually("the socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    assert_eq!(daemon.run("id -u").stdout(), "65534\n");
    assert_eq!(daemon.post(json!({ "command": "id -u", "uid": 65534, "gid": 65534 })).exit_code(), 0);
    let run = daemon.post(json!({ "command": "true", "uid": 0 }));
    let text = run.last()["error"]["traceback"][0].as_str().unwrap().to_owned();
    assert!(text.contains("CAP_SETUID") && text.contains("uid 0"), "{text}");
}

#[test]
fn status_tells_the_whole_story() {
    let daemon = Daemon::start();
    let run = daemon.run("echo x; exit 4");
    let status = daemon.status(run.id());
    assert_eq!(status["id"], run.id());
    assert_eq!(status["content"], "echo x; exit 4");
    assert_eq!((&status["running"], &status["exit_code"]), (&json!(false), &json!(4)));
    assert_eq!(status["error"], "exit status 4");
    for key in ["started_at", "finished_at"] {
        assert!(status[key].as_str().unwrap().parse::<jiff::Timestamp>().is_ok());
    }
    let unknown = daemon.call("GET", "/command/status/ffff", None);
    assert_eq!((unknown.head.status, &unknown.json()["code"]), (404, &json!("INVALID_REQUEST_BODY")));
}

#[test]
fn the_log_holds_no_secrets() {
    let daemon = Daemon::with(&["--log-level", "9", "--access-token", "s3cr3t-token"], &[]);
    let mut client = daemon.connect();
    let token = ("x-execd-access-token", "s3cr3t-token");
    let mut send = |method: &str, path: &str, body: Value| {
        let more = [token, ("authorization", "Bearer s3cr3t"), ("cookie", "s3cr3t")];
        let head = client.request(method, path, &more, body.to_string().as_bytes());
        client.body(&head)
    };
    let command =
        "export TOKEN=s3cr3t; echo -H 'Authorization: Bearer s3cr3t' http://user:s3cr3t@h/ --api-key s3cr3t";
    send("POST", "/command", json!({ "command": command, "envs": { "A": "s3cr3t" } }));
    send("POST", "/command", json!({ "argv": ["echo", "--password", "s3cr3t x", "SECRET=s3cr3t x"] }));
    send("POST", "/command", json!({ "argv": ["/no/such/http://u:s3cr3t@h"] }));
    send("POST", "/command", Value::from("s3cr3t"));
    send("GET", "/files/info?path=/no/such&token=s3cr3t", Value::Null);
    send("GET", "/proxy/1/x?access_token=s3cr3t&a=Bearer+s3cr3t", Value::Null);
    send("GET", "/proxy/1/http://x:s3cr3t@h", Value::Null);
    send("POST", "/session", Value::Null);
    let mut wrong = daemon.connect();
    let head = wrong.request("GET", "/metrics", &[("x-execd-access-token", "s3cr3t-token!")], b"");
    assert_eq!(head.status, 401);
    wrong.body(&head);
    let log = || std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    common::eventually("the last request is noted", || log().contains("\"/metrics\""));
    assert!(!log().contains("s3cr3t"), "{}", log());
    let lines: Vec<Value> = log().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        for name in ["level", "ts", "logger", "msg"] {
            assert!(line[name].is_string(), "{line}");
        }
    }
    let requests: Vec<_> = lines.iter().filter(|line| line["msg"] == "request").collect();
    assert_eq!(requests.len(), 9, "one line per request: {requests:#?}");
    assert!(requests.iter().any(|line| {
        line["method"] == "GET"
            && line["url"] == "/files/info?path=/no/such&token=****"
            && line["status"] == 404
    }));
    let shown: Vec<_> = lines.iter().filter_map(|line| line["command"].as_str()).collect();
    assert!(
        shown[0].starts_with("export TOKEN=**** echo") && shown[1].contains(r#""--password","****""#),
        "{shown:?}"
    );
}

#[test]
fn an_end_tells_what_was_used() {
    let daemon = Daemon::start();
    let usage = |command: &str| {
        let run = daemon.run(command);
        daemon.status(run.id())["usage"].clone()
    };
    let number = |usage: &serde_json::Value, name: &str| usage[name].as_u64().unwrap();
    let small = usage("true");
    assert!(number(&small, "peak_memory_bytes") < 24 << 20, "{small}");
    assert!(number(&small, "cpu_user_us") + number(&small, "cpu_system_us") < 2_000_000, "{small}");
    // A grandchild that was waited for counts.
    let large = usage("sh -c 'head -c 60000000 /dev/zero | tail -c 50000000 | wc -c'; true");
    assert!(number(&large, "peak_memory_bytes") > 48 << 20, "{large}");
    let busy = usage("sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; true");
    assert!(number(&busy, "cpu_user_us") > 20_000, "{busy}");
    // The daemon's own memory does not show as that of what it starts.
    daemon.run("head -c 30000000 /dev/zero | tr '\\0' x");
    let again = usage("true");
    assert!(number(&again, "peak_memory_bytes") < 24 << 20, "{again}");
    let failed = daemon.post(json!({ "argv": ["/no/such"] }));
    assert!(daemon.status(failed.id()).get("usage").is_none());
    let mut stream = daemon.stream(json!({ "command": "sleep 74" }));
    let id = stream.next_event().unwrap().1["text"].as_str().unwrap().to_owned();
    assert!(daemon.status(&id).get("usage").is_none());
    assert_eq!(daemon.call("DELETE", &format!("/command?id={id}"), None).head.status, 200);
}
