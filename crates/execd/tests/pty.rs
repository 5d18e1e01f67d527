//! Terminals as their users see them, with the real daemon and real programs.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod terminals;

use std::time::{Duration, Instant};

use common::{Daemon, eventually, is_alive};
use serde_json::json;
use terminals::{Closed, attach, create, running, status, try_attach};
use tokio::time::sleep;

#[tokio::test]
async fn a_shell_on_a_terminal_of_its_own() {
    let daemon = Daemon::with(&[], &[("TERM", "")]);
    let id = create(&daemon, json!({"cwd": "/usr"}));
    assert!(id.len() == 36 && id.as_bytes()[14] == b'4', "{id}");
    let fresh = json!({"session_id": id, "running": false, "output_offset": 0, "launch_attempted": false,
        "launch_failed": false});
    assert_eq!(status(&daemon, &id), fresh);

    let mut socket = attach(&daemon, &id, "").await;
    let connected = json!({"type": "connected", "session_id": id, "mode": "pty", "role": "holder"});
    assert_eq!(socket.text("connected").await, connected);
    assert!(socket.output.is_empty(), "nothing comes before");
    socket.typed("pwd; tty; stty size; tput cols; echo \"<$TERM>\"; echo t$((40+2))\n").await;
    socket.until("t42").await;
    let shown = socket.shown();
    for part in ["/usr\r\n/dev/pts/", "\r\n24 80\r\n80\r\n<xterm-256color>\r\n"] {
        assert!(shown.contains(part), "{shown}");
    }
    // Leader of its session, whose controlling terminal this is.
    socket.typed("ps -o pid=,sid=,tty= -p $$ | tr -s ' '; echo $$ >/dev/tty; echo u$((40+2))\n").await;
    socket.until("u42").await;
    let shown = socket.shown();
    let line = shown.lines().find(|line| line.contains(" pts/")).unwrap();
    let words: Vec<&str> = line.rsplit('\r').next().unwrap().split_whitespace().collect();
    assert!(words[0] == words[1] && shown.contains(&format!("\r\n{}\r\n", words[0])), "{shown}");
    let now = status(&daemon, &id);
    assert!(now["running"] == true && now["launch_attempted"] == true, "{now}");
    // The next prompt may come before or after the answer.
    let told = now["output_offset"].as_u64().unwrap();
    while socket.offset < told {
        assert!(socket.step().await, "the end came before byte {told}");
    }

    socket.typed("exit 3\n").await;
    assert_eq!(socket.exit().await, 3);
    let now = status(&daemon, &id);
    assert_eq!((&now["running"], &now["output_offset"]), (&json!(false), &json!(socket.offset)));
    // A new client starts it again.
    let mut again = attach(&daemon, &id, "since=0").await;
    again.typed("echo v$((40+2))\n").await;
    again.until("v42").await;
    assert!(again.has("u42") && again.replayed > 0, "what was before is kept");
    assert_eq!(daemon.call("DELETE", &format!("/pty/{id}"), None).head.status, 200);
    assert_eq!(again.rest().await, Some(Closed { code: 1001, reason: "SESSION_GONE".to_owned() }));
    assert_eq!(again.texts.last().unwrap()["code"], "SESSION_GONE");
    for (method, path) in [("GET", ""), ("DELETE", ""), ("GET", "/ws")] {
        let answer = daemon.call(method, &format!("/pty/{id}{path}"), None);
        assert_eq!((answer.head.status, &answer.json()["code"]), (404, &json!("CONTEXT_NOT_FOUND")));
    }
}

#[tokio::test]
async fn creation_and_connection_are_checked() {
    let daemon = Daemon::with(&["--access-token", "secret"], &[]);
    let answer = daemon.call("POST", "/pty", None);
    assert_eq!(answer.head.status, 401);
    assert_eq!(try_attach(&daemon, "x", "").await.err().unwrap().0, 401);

    let daemon = Daemon::start();
    assert_eq!(daemon.call("POST", "/pty", None).head.status, 201);
    for bad in
        [r#"{"cwd":"/nope"}"#, r#"{"cwd":"/etc/passwd"}"#, r#"{"cwd":3}"#, r#"{"command":"a\u0000"}"#, "{"]
    {
        let mut client = daemon.connect();
        let head = client.request("POST", "/pty", &[], bad.as_bytes());
        assert_eq!(head.status, 400, "{bad}");
        let body: serde_json::Value = serde_json::from_slice(&client.body(&head)).unwrap();
        assert_eq!(body["code"], "INVALID_REQUEST_BODY");
    }
    assert_eq!(try_attach(&daemon, "nope", "").await.err().unwrap().0, 404);
    let id = create(&daemon, json!({}));
    for bad in ["since=-1", "since=x", "cols=0", "rows=70000"] {
        assert_eq!(try_attach(&daemon, &id, bad).await.err().unwrap().0, 400, "{bad}");
    }
    let answer = daemon.call("GET", &format!("/pty/{id}/ws"), None);
    assert_eq!((answer.head.status, &answer.json()["code"]), (400, &json!("INVALID_REQUEST_BODY")));
    let headers = [
        ("connection", "keep-alive, Upgrade"),
        ("upgrade", "WebSocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-protocol", "tty.v1, other"),
        ("origin", "https://elsewhere.example"),
    ];
    let head = daemon.connect().request("GET", &format!("/pty/{id}/ws"), &headers, b"");
    assert_eq!(head.status, 101);
    assert_eq!(head.header("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    assert_eq!(head.header("sec-websocket-protocol"), Some("tty.v1"));
}

#[tokio::test]
async fn the_size_is_seen_and_its_change_is_signalled() {
    let daemon = Daemon::start();
    let id = running(
        &daemon,
        "trap 'echo told; stty size' WINCH; stty size; echo ready; while :; do sleep 0.05; stty size; done",
    );
    let mut socket = attach(&daemon, &id, "cols=100&rows=30").await;
    socket.past("30 100\r\nready").await;
    socket.json(json!({"type": "resize", "cols": 132, "rows": 50})).await;
    socket.past("told\r\n50 132").await;
    // A shell forgets signals that come while it runs the trap, so only the size is looked at from here on.
    for number in 0..3000 {
        socket.json(json!({"type": "resize", "cols": 1 + number % 500, "rows": 7})).await;
    }
    socket.json(json!({"type": "resize", "cols": 65535, "rows": 65535})).await;
    socket.past("65535 65535").await;
}

#[tokio::test]
async fn interrupts_reach_the_foreground_only() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let mut socket = attach(&daemon, &id, "").await;
    socket.typed("sleep 611 & trap 'echo caught' INT; echo r$((40+2)); sleep 612; echo s$((40+2))\n").await;
    socket.past("r42").await;
    eventually("the job", || is_alive("sleep 612"));
    socket.typed("\u{3}").await;
    eventually("its end", || !is_alive("sleep 612"));
    assert!(is_alive("sleep 611"));
    socket.typed("\necho t$((40+2)); sleep 613\n").await;
    socket.past("t42").await;
    eventually("the next job", || is_alive("sleep 613"));
    // The frame does what the key does.
    socket.json(json!({"type": "signal", "signal": "SIGINT"})).await;
    eventually("its end", || !is_alive("sleep 613"));
    assert!(is_alive("sleep 611"));
    socket.json(json!({"type": "signal", "signal": "SIGUSR1"})).await;
    socket.typed("\necho u$((40+2))\n").await;
    socket.past("u42").await;
    socket.json(json!({"type": "signal", "signal": "SIGKILL"})).await;
    assert_eq!(socket.exit().await, 137);
    daemon.call("DELETE", &format!("/pty/{id}"), None);
    assert!(!is_alive("sleep 611"), "what a shell has left behind ends with its terminal");
}

#[tokio::test]
async fn a_command_of_ones_own() {
    let daemon = Daemon::with(&[], &[("TERM", "dumb")]);
    let id = running(&daemon, "echo \"$TERM $(tty | cut -c-9)\"; read line; echo \"<$line>\"; exit 7");
    let mut socket = attach(&daemon, &id, "").await;
    socket.past("dumb /dev/pts/").await;
    socket.json(json!({"type": "stdin", "data": "häh\n"})).await;
    socket.until("<häh>").await;
    assert_eq!(socket.exit().await, 7);

    let long = format!("x='{}'; echo ${{#x}}", "y".repeat(300_000));
    let mut socket = attach(&daemon, &running(&daemon, &long), "").await;
    socket.until("300000").await;
    assert_eq!(socket.exit().await, 0);
}

#[tokio::test]
async fn every_byte_passes_both_ways() {
    let daemon = Daemon::start();
    let file = daemon.dir.path().join("typed");
    let command = format!(
        "stty raw -echo; echo ready; head -c 256 >{}; head -c 300000 /dev/urandom >{1}; cat {1}; \
        echo 'ä€😀'",
        file.display(),
        daemon.dir.path().join("random").display()
    );
    let mut socket = attach(&daemon, &running(&daemon, &command), "").await;
    socket.past("ready\n").await;
    let all: Vec<u8> = (0..=255).collect();
    // In pieces, through the middle of what could be characters.
    for piece in all.chunks(7) {
        socket.typed(piece).await;
    }
    assert_eq!(socket.exit().await, 0);
    assert_eq!(std::fs::read(&file).unwrap(), all);
    let mut expected = std::fs::read(daemon.dir.path().join("random")).unwrap();
    expected.extend("ä€😀\n".as_bytes());
    assert!(socket.output == expected, "{} of {} bytes", socket.output.len(), expected.len());
    assert!(socket.largest <= (32 << 10) + 1);
}

#[tokio::test]
async fn large_pastes_arrive_whole() {
    let daemon = Daemon::start();
    let file = daemon.dir.path().join("pasted");
    let text: String = (0..6000).map(|number| format!("line {number} of what is pasted äöü\n")).collect();
    for (mode, paste) in
        [("-echo", text.clone()), ("-echo raw", text.replace('\n', "\r")), ("echo", text.clone())]
    {
        let command = format!("stty {mode}; echo ready; head -c {} >{}", paste.len(), file.display());
        let mut socket = attach(&daemon, &running(&daemon, &command), "").await;
        socket.past("ready").await;
        // As one message, far beyond what a terminal takes at once.
        assert!(paste.len() > 200_000);
        socket.typed(&paste).await;
        assert_eq!(socket.exit().await, 0);
        assert!(std::fs::read_to_string(&file).unwrap() == paste, "{mode}");
    }
    // A line that is too long for line mode is cut by the kernel; the terminal lives on.
    let mut socket = attach(&daemon, &create(&daemon, json!({"command": "cat | wc -c"})), "").await;
    socket.typed("x".repeat(100_000)).await;
    socket.typed("\n\u{4}").await;
    socket.until("4096").await;
    assert_eq!(socket.exit().await, 0);
}

#[tokio::test]
async fn replay_goes_on_where_the_last_connection_ended() {
    let daemon = Daemon::start();
    let id = running(
        &daemon,
        "stty raw -echo; echo ready; for i in $(seq 60); do read go; seq $((i*2000-1999)) $((i*2000)); done; \
        exec sleep 600",
    );
    let mut socket = attach(&daemon, &id, "").await;
    socket.until("ready\n").await;
    let mut all = Vec::new();
    let mut round = 0;
    let end = loop {
        // The program goes on no quicker than its output is read.
        socket.typed("\n").await;
        socket.step().await;
        round += 1;
        // Now and then the connection breaks off without a word.
        if round % 3 == 0 {
            all.append(&mut socket.output);
            let since = socket.offset;
            drop(socket);
            socket = attach(&daemon, &id, &format!("since={since}&takeover=1")).await;
            assert_eq!(socket.lost, 0);
        }
        if all.ends_with(b"\n120000\n") || socket.output.ends_with(b"\n120000\n") {
            all.append(&mut socket.output);
            break socket.offset;
        }
    };
    let expected: String = (1..=120_000).map(|number| format!("{number}\n")).collect();
    let shown = String::from_utf8(all.clone()).unwrap();
    assert!(shown == format!("ready\n{expected}"), "{round} rounds, {} bytes", all.len());
    assert_eq!(all.len() as u64, end);
    drop(socket);
    // Any offset of what is kept, also beyond both ends.
    for since in [0, 1, 4095, end - 1, end, end + 10] {
        let mut socket = attach(&daemon, &id, &format!("since={since}&takeover=1")).await;
        socket.offset = since.min(end);
        socket.text("connected").await;
        let from = usize::try_from(since.min(end)).unwrap();
        assert!(socket.output == all[from..], "since {since}");
    }
    let mut socket = attach(&daemon, &id, "takeover=1").await;
    socket.text("connected").await;
    assert!(socket.output.is_empty(), "without an offset nothing is replayed");
}

#[tokio::test]
async fn the_oldest_output_is_lost_first() {
    let daemon = Daemon::start();
    let id = running(&daemon, "stty -opost; read go; yes 0123456 | head -c 3000000; echo done; read go");
    let mut socket = attach(&daemon, &id, "").await;
    socket.typed("\n").await;
    socket.until("done\n").await;
    let end = socket.offset;
    assert!(socket.output.len() > 3_000_000 && socket.lost == 0, "the holder loses nothing");
    drop(socket);
    let mut socket = attach(&daemon, &id, "since=5&takeover=1").await;
    socket.text("connected").await;
    assert_eq!((socket.output.len(), socket.offset), (1 << 20, end));
    assert_eq!(socket.lost, end - (1 << 20) - 5);
    assert!(socket.largest < 1 << 20, "clients take no larger messages unless told");
}

#[tokio::test]
async fn one_holds_and_others_watch() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let (status, body) = try_attach(&daemon, &id, "mode=viewer").await.err().unwrap();
    assert_eq!((status, &body["code"]), (409, &json!("VIEWER_REQUIRES_RUNNING_SESSION")));
    let mut holder = attach(&daemon, &id, "").await;
    holder.text("connected").await;
    let (status, body) = try_attach(&daemon, &id, "").await.err().unwrap();
    assert_eq!((status, &body["code"]), (409, &json!("ALREADY_CONNECTED")));

    let mut viewer = attach(&daemon, &id, "mode=viewer&since=0").await;
    let connected = json!({"type": "connected", "session_id": id, "mode": "pty", "role": "viewer"});
    viewer.text("connected").await;
    assert_eq!(viewer.texts[0], connected);
    holder.typed("echo a$((40+2))\n").await;
    holder.until("a42").await;
    viewer.until("a42").await;
    assert_eq!(viewer.replayed, viewer.output.len(), "viewers get all with offsets");
    viewer.json(json!({"type": "ping"})).await;
    viewer.text("pong").await;

    let mut second = attach(&daemon, &id, "takeover=1&since=0").await;
    second.until("a42").await;
    assert_eq!(holder.rest().await, Some(Closed { code: 4001, reason: "TAKEN_OVER".to_owned() }));
    assert_eq!(holder.texts.last().unwrap()["code"], "TAKEN_OVER");
    second.typed("echo b$((40+2))\n").await;
    second.until("b42").await;
    viewer.until("b42").await;

    for _ in 0..4 {
        viewer.typed("x").await;
    }
    viewer.json(json!({"type": "resize", "cols": 10, "rows": 10})).await;
    assert_eq!(viewer.rest().await, Some(Closed { code: 1008, reason: "READ_ONLY".to_owned() }));
    assert_eq!(viewer.texts.iter().filter(|text| text["code"] == "READ_ONLY").count(), 5);

    let mut viewer = attach(&daemon, &id, "mode=viewer").await;
    second.typed("exit 4\n").await;
    assert_eq!((viewer.exit().await, second.exit().await), (4, 4));
}

#[tokio::test]
async fn a_half_dead_holder_is_taken_over_at_once() {
    let daemon = Daemon::start();
    let id = running(&daemon, "read go; echo begun; yes");
    let mut holder = attach(&daemon, &id, "").await;
    holder.typed("\n").await;
    holder.past("begun").await;
    // From here on the holder neither reads nor says anything, and the program waits for it.
    sleep(Duration::from_millis(300)).await;
    let stuck = status(&daemon, &id)["output_offset"].as_u64().unwrap();
    assert!(stuck < 8 << 20, "{stuck}");
    let began = Instant::now();
    let mut next = attach(&daemon, &id, "takeover=1").await;
    next.until("y\r\ny").await;
    assert!(began.elapsed() < Duration::from_secs(20));
    next.typed("\u{3}").await;
    assert_eq!(next.exit().await, 130);
}

#[tokio::test]
async fn pipes_keep_the_outputs_apart() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let mut socket = attach(&daemon, &id, "pty=0").await;
    assert_eq!(socket.text("connected").await["mode"], "pipe");
    socket
        .typed(
            "tty; echo out; echo err >&2; echo \"[$-]\"; for i in 1 2 3; do echo o$i; echo e$i >&2; done\n",
        )
        .await;
    socket.json(json!({"type": "resize", "cols": 10, "rows": 10})).await;
    socket.until("o3\n").await;
    while !socket.stderr.ends_with(b"e3\n") {
        socket.step().await;
    }
    assert!(socket.shown().starts_with("not a tty\nout\n["), "{socket:?}");
    assert_eq!(String::from_utf8_lossy(&socket.stderr), "err\ne1\ne2\ne3\n");
    let since = socket.offset;
    socket.typed("sleep 0.3; echo late; echo later >&2; exit 5\n").await;
    drop(socket);
    eventually("the end", || status(&daemon, &id)["running"] == false);
    let mut socket = attach(&daemon, &id, &format!("since={since}")).await;
    assert_eq!(socket.exit().await, 5);
    // Two pipes have no order between them.
    let shown = socket.shown();
    assert!(shown == "late\nlater\n" || shown == "later\nlate\n", "{shown:?}");

    let mut socket = attach(&daemon, &running(&daemon, "exec <&-; echo closed; sleep 300"), "pty=0").await;
    socket.until("closed\n").await;
    for _ in 0..3 {
        socket.typed("x").await;
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(socket.text("error").await["code"], "STDIN_WRITE_FAILED");
}

#[tokio::test]
async fn an_end_that_nobody_saw_is_told_to_who_comes_back() {
    let daemon = Daemon::start();
    let gate = daemon.gate("gate");
    let id = running(&daemon, &format!("echo run; {}; echo over; exit 9", gate.wait()));
    let mut socket = attach(&daemon, &id, "").await;
    socket.until("run\r\n").await;
    let since = socket.offset;
    drop(socket);
    gate.open();
    eventually("the end", || status(&daemon, &id)["running"] == false);
    for _ in 0..2 {
        let mut socket = attach(&daemon, &id, &format!("since={since}")).await;
        socket.text("exit").await;
        assert_eq!(socket.shown(), "over\r\n");
        // This one does not confirm.
    }
    let mut socket = attach(&daemon, &id, &format!("since={since}")).await;
    assert_eq!(socket.exit().await, 9);
    assert_eq!(socket.shown(), "over\r\n");
    let end = socket.offset;
    drop(socket);
    // It is known now: whoever comes next starts another run.
    let mut socket = attach(&daemon, &id, &format!("since={end}")).await;
    socket.until("run\r\nover").await;
    assert_eq!(socket.exit().await, 9);
}

#[tokio::test]
async fn a_start_that_fails_says_why_and_is_remembered() {
    let daemon = Daemon::start();
    let dir = daemon.dir.path().join("soon gone");
    std::fs::create_dir(&dir).unwrap();
    let id = create(&daemon, json!({"cwd": dir}));
    std::fs::remove_dir(&dir).unwrap();
    for query in ["", "since=0"] {
        let mut socket = attach(&daemon, &id, query).await;
        assert_eq!(socket.rest().await, Some(Closed { code: 1011, reason: "START_FAILED".to_owned() }));
        let error = &socket.texts[0];
        assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!("START_FAILED")));
        assert!(error["error"].as_str().unwrap().contains("working directory"), "{error}");
    }
    let now = status(&daemon, &id);
    assert!(
        now["launch_failed"] == true && now["launch_attempted"] == true && now["running"] == false,
        "{now}"
    );
    std::fs::create_dir(&dir).unwrap();
    let mut socket = attach(&daemon, &id, "").await;
    socket.typed("exit 2\n").await;
    assert_eq!(socket.exit().await, 2);
    assert_eq!(status(&daemon, &id)["launch_failed"], false);
}

#[tokio::test]
async fn a_delete_ends_all_processes() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let mut socket = attach(&daemon, &id, "").await;
    let line =
        "sleep 621 & (setsid sleep 622 &); nohup setsid sh -c 'trap \"\" TERM HUP; sleep 623' & sleep 624\n";
    socket.typed(line).await;
    for number in 621..=624 {
        eventually("the jobs", || is_alive(&format!("sleep {number}")));
    }
    assert_eq!(daemon.call("DELETE", &format!("/pty/{id}"), None).head.status, 200);
    for number in 621..=624 {
        assert!(!is_alive(&format!("sleep {number}")), "{number}");
    }
}

#[tokio::test]
async fn what_holds_the_terminal_does_not_hold_the_session() {
    let daemon = Daemon::start();
    for background in ["sleep 631", "yes", "sh -c 'trap \"\" HUP; while :; do echo noise; sleep 0.01; done'"]
    {
        let id = running(&daemon, &format!("{background} & echo last words; exit 3"));
        let mut socket = attach(&daemon, &id, "").await;
        let began = Instant::now();
        assert_eq!(socket.exit().await, 3);
        assert!(socket.has("last words") && began.elapsed() < Duration::from_secs(20), "{background}");
        daemon.call("DELETE", &format!("/pty/{id}"), None);
    }
    // Thousands of lines right before the end, and nothing of them is missing.
    for _ in 0..5 {
        let mut socket = attach(&daemon, &running(&daemon, "seq 1 5000"), "").await;
        assert_eq!(socket.exit().await, 0);
        assert!(socket.shown().ends_with("\r\n4999\r\n5000\r\n"));
    }
    assert!(!is_alive("sleep 631"));
}

#[tokio::test]
async fn a_full_screen_program() {
    if std::process::Command::new("vim").arg("--version").output().is_err() {
        return eprintln!("skipped: needs vim");
    }
    let daemon = Daemon::start();
    let file = daemon.dir.path().join("note.txt");
    let id = running(&daemon, &format!("vim -u NONE -i NONE {}", file.display()));
    let mut socket = attach(&daemon, &id, "cols=100&rows=30").await;
    socket.until("\u{1b}[?1049h").await;
    socket.typed("itext äö\u{1b}").await;
    socket.json(json!({"type": "resize", "cols": 60, "rows": 20})).await;
    // It hears of the size when it gets to it.
    let size = daemon.dir.path().join("size");
    let say = format!(":call writefile([&columns . ' ' . &lines], '{}')\r", size.display());
    while std::fs::read_to_string(&size).unwrap_or_default() != "60 20\n" {
        socket.typed(&say).await;
        assert!(socket.step().await, "{socket:?}");
    }
    socket.typed(":exec 'normal ocols ' . &columns . ' lines ' . &lines\r").await;
    socket.typed(":wq\r").await;
    assert_eq!(socket.exit().await, 0);
    assert!(socket.has("\u{1b}[?1049l"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "text äö\ncols 60 lines 20\n");
}

#[tokio::test]
async fn a_key_is_echoed_at_once() {
    let daemon = Daemon::start();
    let id = running(&daemon, "stty -icanon min 1; echo ready; cat >/dev/null");
    let mut socket = attach(&daemon, &id, "").await;
    socket.past("ready\r\n").await;
    let mut times = Vec::new();
    for _ in 0..300 {
        socket.output.clear();
        let began = Instant::now();
        socket.typed("x").await;
        socket.until("x").await;
        times.push(began.elapsed());
    }
    times.sort();
    println!("keystroke to echo: p50 {:?}, p99 {:?}", times[150], times[297]);
    assert!(times[150] < Duration::from_millis(20), "{:?}", times[150]);
}

#[tokio::test]
async fn variables_kept_for_later_are_in_terminals_too() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("env");
    std::fs::write(&file, "KEPT='for later'\n").unwrap();
    let daemon = Daemon::with(&[], &[("EXECD_ENVS", file.to_str().unwrap())]);
    let mut socket = attach(&daemon, &running(&daemon, "echo \"<$KEPT>\""), "").await;
    socket.until("<for later>").await;
    assert_eq!(socket.exit().await, 0);
}
