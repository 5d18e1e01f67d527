//! What clients and programs may do to terminals, and what that may cost.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod terminals;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream as StdStream;
use std::time::{Duration, Instant};

use common::{Daemon, eventually};
use serde_json::json;
use terminals::{Closed, attach, create, running, status, try_attach};
use tokio::time::sleep;
use tokio_tungstenite::tungstenite::Message;

/// A connection that sends whatever bytes the test wants.
fn raw(daemon: &Daemon, id: &str, query: &str) -> StdStream {
    try_raw(daemon, id, query).expect("a connection")
}

fn try_raw(daemon: &Daemon, id: &str, query: &str) -> Option<StdStream> {
    let mut stream = StdStream::connect(daemon.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let head = format!(
        "GET /pty/{id}/ws?{query} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.extend(byte);
    }
    head.starts_with(b"HTTP/1.1 101").then_some(stream)
}

/// Reads frames up to the close and gives its code.
fn close_code(stream: &mut StdStream) -> Option<u16> {
    loop {
        let mut head = [0; 2];
        stream.read_exact(&mut head).ok()?;
        let mut length = usize::from(head[1] & 127);
        if length == 126 {
            let mut more = [0; 2];
            stream.read_exact(&mut more).ok()?;
            length = usize::from(u16::from_be_bytes(more));
        }
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).ok()?;
        if head[0] & 15 == 8 {
            return Some(u16::from_be_bytes(payload[..2].try_into().unwrap()));
        }
    }
}

fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match u16::try_from(payload.len()) {
        Ok(length @ ..126) => frame.push(0x80 | length as u8),
        Ok(length) => {
            frame.push(0x80 | 126);
            frame.extend(length.to_be_bytes());
        }
        Err(_) => {
            frame.push(0x80 | 127);
            frame.extend((payload.len() as u64).to_be_bytes());
        }
    }
    // A mask of zeroes leaves the payload as it is.
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}

#[tokio::test]
async fn broken_frames_are_closed_with_a_code() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let huge = [&[0x82, 0xff][..], &(1u64 << 40).to_be_bytes(), &[0; 4]].concat();
    let cases: [(&str, Vec<u8>, u16); 8] = [
        ("a huge frame that is only announced", huge, 1009),
        (
            "a message of too many parts",
            [frame(0x02, &[0; 600_000]), frame(0x80, &[0; 600_000])].concat(),
            1009,
        ),
        ("an opcode that is reserved", frame(0x83, b"x"), 1002),
        ("reserved bits", frame(0xf2, b"x"), 1002),
        ("no mask", vec![0x82, 1, 0], 1002),
        ("a long ping", frame(0x89, &[0; 200]), 1002),
        ("a continuation of nothing", frame(0x80, b"x"), 1002),
        ("text that is none", frame(0x81, b"\xff\xfe"), 1007),
    ];
    for (what, bytes, code) in cases {
        let mut stream = raw(&daemon, &id, "takeover=1");
        let _ = stream.write_all(&bytes);
        assert_eq!(close_code(&mut stream), Some(code), "{what}");
    }
    // Half a frame and silence, or an end; neither is in the way of others.
    let mut halves = Vec::new();
    for cut in [1, 3, 7, 20] {
        let mut stream = raw(&daemon, &id, "takeover=1");
        stream.write_all(&frame(0x82, &[0; 100])[..cut]).unwrap();
        halves.push(stream);
    }
    let mut socket = attach(&daemon, &id, "takeover=1").await;
    socket.typed("echo a$((40+2))\n").await;
    socket.until("a42").await;
}

#[tokio::test]
async fn frames_that_mean_nothing_are_answered_and_forgiven() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let mut socket = attach(&daemon, &id, "").await;
    socket.text("connected").await;
    let deep = format!("{{\"type\":\"ping\",\"x\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let bad = ["", "{", "[]", "null", r#"{"type":"resize","cols":-1,"rows":2}"#, r#"{"type":"later"}"#];
    for bad in bad {
        socket.send(Message::text(bad)).await;
        socket.texts.clear();
        assert_eq!(socket.text("error").await["code"], "INVALID_FRAME", "{bad:.40}");
    }
    // What nobody knows is skipped, however it is built.
    socket.send(Message::text(deep)).await;
    socket.text("pong").await;
    for bad in [&b""[..], b"\x01x", b"\x03abc", b"\xff"] {
        socket.send(Message::binary(bad.to_vec())).await;
        socket.texts.clear();
        assert_eq!(socket.text("error").await["code"], "INVALID_FRAME");
    }
    socket.typed("echo a$((40+2))\n").await;
    socket.until("a42").await;
}

/// A small generator: the test is the same at every run unless asked otherwise.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

#[tokio::test]
async fn random_frames_never_hurt_the_daemon() {
    let daemon = Daemon::start();
    let seed = std::env::var("OSB_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed);
    let mut random = Random(seed);
    let id = running(&daemon, "while :; do cat >/dev/null; done");
    let descriptors = daemon.descriptors();
    let began = Instant::now();
    let mut rounds = 0;
    while began.elapsed() < Duration::from_secs(4) {
        rounds += 1;
        let viewer = random.next(3) == 0;
        let query = if viewer { "mode=viewer" } else { "takeover=1&since=0" };
        // There may be nothing to watch: the program gets signals.
        let Some(mut stream) = try_raw(&daemon, &id, query) else { continue };
        stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        for _ in 0..random.next(40) {
            let largest = 1 << random.next(15);
            let length = random.next(largest) as usize;
            let mut payload: Vec<u8> = (0..length).map(|_| random.next(256) as u8).collect();
            match random.next(6) {
                0 => payload.insert(0, 0),
                1 => payload = br#"{"type":"resize","cols":9,"rows":9}"#.to_vec(),
                2 => {
                    payload =
                        format!("{{\"type\":\"stdin\",\"data\":{}}}", random.next(1 << 40)).into_bytes();
                }
                3 => payload = br#"{"type":"signal","signal":"SIGQUIT"}"#.to_vec(),
                _ => {}
            }
            let first = match random.next(10) {
                0 => random.next(256) as u8,
                1 => 0x02,
                2 => 0x80,
                3 => 0x89,
                4..=6 => 0x81,
                _ => 0x82,
            };
            let mut bytes = frame(first, &payload);
            if random.next(20) == 0 {
                bytes.truncate(random.next(bytes.len() as u64 + 1) as usize);
            }
            if stream.write_all(&bytes).is_err() {
                break;
            }
        }
    }
    assert!(rounds > 20, "{rounds}");
    let mut socket = attach(&daemon, &id, "takeover=1").await;
    socket.text("connected").await;
    socket.json(json!({"type": "ping"})).await;
    socket.text("pong").await;
    drop(socket);
    assert_eq!(daemon.call("DELETE", &format!("/pty/{id}"), None).head.status, 200);
    eventually("all is given back", || daemon.descriptors() <= descriptors);
    assert!(daemon.resident_kib() < 64 << 10, "{} KiB", daemon.resident_kib());
}

#[tokio::test]
async fn connections_and_terminals_are_bounded() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let mut holder = attach(&daemon, &id, "").await;
    holder.text("connected").await;
    let descriptors = daemon.descriptors();
    for _ in 0..2000 {
        assert_eq!(try_attach(&daemon, &id, "").await.err().unwrap().0, 409);
    }
    let mut viewers = Vec::new();
    let refused = loop {
        match try_attach(&daemon, &id, "mode=viewer").await {
            Ok(viewer) => viewers.push(viewer),
            Err(refused) => break refused,
        }
        assert!(viewers.len() < 100);
    };
    assert_eq!((refused.0, &refused.1["code"]), (503, &json!("SERVICE_UNAVAILABLE")));
    assert_eq!(viewers.len(), 15);
    drop(viewers);
    eventually("the viewers have gone", || daemon.descriptors() <= descriptors);
    for round in 0..200 {
        // Connect, take over, leave without a word.
        let mut socket = attach(&daemon, &id, "takeover=1&since=0").await;
        if round % 2 == 0 {
            socket.text("connected").await;
        }
    }
    drop(holder);
    eventually("all have gone", || daemon.descriptors() < descriptors);

    let mut last = 201;
    let mut made = 1;
    while last == 201 {
        last = daemon.call("POST", "/pty", None).head.status;
        made += 1;
        assert!(made < 1000);
    }
    assert_eq!((last, made), (503, 65));
    // One whose program has ended gives way.
    let mut socket = attach(&daemon, &id, "takeover=1").await;
    socket.typed("\u{3}\nexit\n").await;
    socket.exit().await;
    drop(socket);
    eventually("room", || daemon.call("POST", "/pty", None).head.status == 201);
    assert_eq!(daemon.call("GET", &format!("/pty/{id}"), None).head.status, 404);
    assert!(daemon.resident_kib() < 32 << 10, "{} KiB", daemon.resident_kib());
}

#[tokio::test]
async fn slow_readers_cost_little_and_hold_nobody_up() {
    let daemon = Daemon::start();
    let id = running(&daemon, "read go; yes 'a line of output that is not read by everybody'");
    let mut holder = attach(&daemon, &id, "").await;
    holder.text("connected").await;
    // They watch, but do not read.
    let mut stuck = Vec::new();
    for _ in 0..10 {
        stuck.push(attach(&daemon, &id, "mode=viewer&since=0").await);
    }
    holder.typed("\n").await;
    let began = Instant::now();
    while holder.output.len() < 32 << 20 {
        holder.step().await;
        assert!(began.elapsed() < Duration::from_secs(120), "{}", holder.output.len());
    }
    assert_eq!(holder.lost, 0);
    assert!(daemon.resident_kib() < 48 << 10, "{} KiB", daemon.resident_kib());
    // A viewer who was behind goes on with what is kept, and sees from the offset what is missing.
    let viewer = &mut stuck[0];
    while viewer.lost == 0 {
        viewer.step().await;
    }
    assert!(viewer.lost > 1 << 20, "{}", viewer.lost);
    drop(stuck);

    // Now the holder itself stops reading. The program waits, then goes on without it.
    let offset = || status(&daemon, &id)["output_offset"].as_u64().unwrap();
    let began = Instant::now();
    let (mut last, mut since, mut waited) = (offset(), Instant::now(), Duration::ZERO);
    while waited < Duration::from_secs(5) {
        assert!(began.elapsed() < Duration::from_secs(60), "a short stop is waited for, a long one is not");
        sleep(Duration::from_millis(100)).await;
        let now = offset();
        if now != last {
            waited = since.elapsed();
            (last, since) = (now, Instant::now());
        }
    }
    let mut next = attach(&daemon, &id, "").await;
    next.typed("\u{3}").await;
    assert_eq!(next.exit().await, 130);
}

#[tokio::test]
async fn input_that_nobody_reads_is_bounded_and_blocks_nothing_else() {
    let daemon = Daemon::start();
    let id = running(
        &daemon,
        "stty raw -echo; echo ready; sleep 2; dd bs=64k count=1 status=none | wc -c; sleep 600",
    );
    let mut socket = attach(&daemon, &id, "").await;
    socket.past("ready").await;
    let sent = tokio::time::timeout(Duration::from_millis(1500), async {
        for _ in 0..64 {
            socket.typed(vec![b'x'; 1 << 20]).await;
        }
    });
    assert!(sent.await.is_err(), "the client is made to wait");
    assert!(daemon.resident_kib() < 40 << 10, "{} KiB", daemon.resident_kib());
    let mut viewer = attach(&daemon, &id, "mode=viewer").await;
    viewer.text("connected").await;
    let mut next = attach(&daemon, &id, "takeover=1").await;
    next.text("connected").await;
    next.json(json!({"type": "signal", "signal": "SIGHUP"})).await;
    assert_eq!((next.exit().await, viewer.exit().await), (129, 129));
}

#[tokio::test]
async fn a_stopped_daemon_ends_its_terminals() {
    let mut daemon = Daemon::start();
    let id = running(&daemon, "trap '' TERM HUP; sleep 641");
    let mut socket = attach(&daemon, &id, "").await;
    eventually("the program", || common::is_alive("sleep 641"));
    let pid = rustix::process::Pid::from_child(&daemon.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(socket.rest().await, Some(Closed { code: 1001, reason: "SESSION_GONE".to_owned() }));
    daemon.child.wait().unwrap();
    assert!(!common::is_alive("sleep 641"));
}

#[tokio::test]
async fn an_idle_terminal_costs_no_wake_ups() {
    let daemon = Daemon::start();
    let id = create(&daemon, json!({}));
    let mut socket = attach(&daemon, &id, "").await;
    socket.typed("echo a$((40+2))\n").await;
    socket.until("a42").await;
    let switches = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    // What there is to do after the last output is done at some time.
    for attempt in 1.. {
        let before = switches();
        sleep(Duration::from_secs(3)).await;
        let woken = switches() - before;
        if woken <= 2 {
            break;
        }
        assert!(attempt < 10, "{woken}");
    }
}
