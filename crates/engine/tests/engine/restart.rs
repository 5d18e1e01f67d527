//! Helpers and the engine itself are killed; sandboxes live on, and nothing is left behind.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use osb_engine::{Adopted, Engine, Record};
use osb_protocol::ids::SandboxId;

use crate::Test;
use crate::support::{config, empty_image, inside, runtime, traces, until, with_engine};

pub(crate) const TESTS: &[Test] = &[
    ("restart_helpers_are_replaced", restart_helpers_are_replaced),
    (
        "restart_killed_engine_leaves_sandboxes_to_the_next",
        restart_killed_engine_leaves_sandboxes_to_the_next,
    ),
    ("restart_orderly_end_leaves_sandboxes_too", restart_orderly_end_leaves_sandboxes_too),
];

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

fn restart_helpers_are_replaced() {
    with_engine(
        |config| config.ready_slots = 2,
        async |bed| {
            let image = empty_image();
            let survivor = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
            for round in 0..6 {
                // Creates are under way when helpers die.
                let creates: Vec<_> = (0..8)
                    .map(|_| {
                        let (engine, request) = (bed.engine.clone(), inside(&image, &["sleep"]));
                        tokio::spawn(async move { engine.create(request).await })
                    })
                    .collect();
                tokio::time::sleep(Duration::from_micros(300 * (round + 1))).await;
                for pid in bed.engine.helper_pids() {
                    kill(pid);
                }
                for create in creates {
                    // Either made after all, or refused in order.
                    if let Ok(created) = create.await.unwrap() {
                        bed.engine.delete(created.id);
                    }
                }
                let created = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
                bed.engine.delete(created.id);
                bed.engine.settled().await;
                assert_eq!(bed.engine.running(), [survivor.id]);
            }
            until("only the survivor's processes are left", || bed.in_sandboxes().len() == 2).await;
            bed
        },
    );
}

/// A server that makes three sandboxes, prints them and waits to be killed.
pub(crate) fn server(dir: &str) -> ExitCode {
    runtime().block_on(async {
        let engine = Engine::start(config(dir.as_ref())).unwrap();
        engine.adopt(Vec::new()).await.unwrap();
        let image = empty_image();
        let mut known: Vec<(SandboxId, Record)> = Vec::new();
        for args in [&["greet", "127.0.0.1:80"][..], &["sleep"], &["eat", "1"]] {
            let created = engine.create(inside(&image, args)).await.unwrap();
            known.push((created.id, created.record));
        }
        // One that no record will name.
        engine.create(inside(&image, &["sleep"])).await.unwrap();
        println!("{} {}", engine.instance(), serde_json::to_string(&known).unwrap());
        std::io::stdout().flush().unwrap();
        let mut end = String::new();
        std::io::stdin().read_to_string(&mut end).unwrap();
        engine.shutdown().await;
    });
    ExitCode::SUCCESS
}

fn start(dir: &std::path::Path) -> (Child, String, Vec<(SandboxId, Record)>) {
    let mut server = Command::new("/proc/self/exe")
        .args(["__server".as_ref(), dir.as_os_str()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let (instance, known) = line.trim().split_once(' ').expect("the server's line");
    (server, instance.to_owned(), serde_json::from_str(known).unwrap())
}

fn restart_killed_engine_leaves_sandboxes_to_the_next() {
    taken_over(|mut server| {
        server.kill().unwrap();
        server.wait().unwrap();
    });
}

fn restart_orderly_end_leaves_sandboxes_too() {
    taken_over(|mut server| {
        drop(server.stdin.take());
        assert!(server.wait().unwrap().success());
    });
}

fn taken_over(end: impl FnOnce(Child)) {
    let dir = tempfile::tempdir().unwrap();
    let (server, instance, known) = start(dir.path());
    end(server);
    runtime().block_on(async {
        let name = format!("opensandbox-{instance}");
        assert!(crate::support::processes(&name).len() >= 5, "sandboxes died with their engine");
        let engine = Engine::start(config(dir.path())).unwrap();
        assert_eq!(engine.instance(), instance);
        let stranger = SandboxId::random();
        let mut asked = known.clone();
        asked.push((stranger, known[0].1.clone()));
        let found = engine.adopt(asked).await.unwrap();
        let [
            (a, Adopted::Running),
            (b, Adopted::Running),
            (c, Adopted::Ended(ended)),
            (d, Adopted::Ended(_)),
        ] = &found[..]
        else {
            panic!("{found:?}")
        };
        assert_eq!((*a, *b, *c, *d), (known[0].0, known[1].0, known[2].0, stranger));
        assert_eq!((ended.exit_code, ended.host_restarted), (Some(0), false));
        // What no record names is gone; the two that run can be used.
        until("the nameless one is gone", || crate::support::processes(&name).len() == 4).await;
        let mut stream = engine.connect_port(*a, 80).await.unwrap();
        let mut text = String::new();
        tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut text).await.unwrap();
        assert_eq!(text, "hello");
        engine.connect_execd(*b).await.unwrap();
        let mut events = engine.events().unwrap();
        let created = engine.create(inside(&empty_image(), &["sleep"])).await.unwrap();
        assert!(created.record.pid() > 0);
        // The end of an adopted one is seen.
        kill(known[1].1.pid().cast_unsigned());
        let osb_engine::Event::Ended { id, ended } = events.recv().await.unwrap();
        assert_eq!((id, ended.exit_code), (*b, None));
        for id in [*a, *b, *c, *d, created.id] {
            engine.delete(id);
        }
        engine.settled().await;
        until("only prepared files are left", || {
            std::fs::read_dir(dir.path().join("data/sandboxes")).unwrap().count()
                == engine.ready_slots("empty")
        })
        .await;
        engine.shutdown().await;
        assert_eq!(traces(&instance), Vec::<String>::new());
    });
}
