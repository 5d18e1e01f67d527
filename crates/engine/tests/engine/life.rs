//! Making, ending, connecting; what is left afterwards.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use osb_engine::net::{Mode, NetConfig};
use osb_engine::{CheckResult, ConnectError, CreateError, Engine, Limits, StartError};
use osb_protocol::ids::SandboxId;

use crate::Test;
use crate::support::{
    SELF, config, empty_image, groups, image_of, inside, params, runtime, traces, until, with_engine,
};

pub(crate) const TESTS: &[Test] = &[
    ("life_output_exit_code_and_environment", life_output_exit_code_and_environment),
    ("life_entrypoint_that_cannot_run_leaves_nothing", life_entrypoint_that_cannot_run_leaves_nothing),
    ("life_given_id_is_used_once", life_given_id_is_used_once),
    ("life_host_image_runs_its_programs", life_host_image_runs_its_programs),
    ("life_nothing_grows_over_200_sandboxes", life_nothing_grows_over_200_sandboxes),
    ("life_delete_is_quick_and_complete", life_delete_is_quick_and_complete),
    ("life_ports_and_daemon_are_reached", life_ports_and_daemon_are_reached),
    ("life_second_engine_is_refused", life_second_engine_is_refused),
    ("life_failed_start_leaves_nothing", life_failed_start_leaves_nothing),
    ("life_many_at_once", life_many_at_once),
    ("life_check_finds_this_machine_fit", life_check_finds_this_machine_fit),
    ("life_with_network", life_with_network),
    ("life_without_user_namespace", life_without_user_namespace),
];

fn life_output_exit_code_and_environment() {
    with_engine(
        |_| {},
        async |mut bed| {
            let image = empty_image();
            let mut request = inside(&image, &["describe"]);
            request.env.push(("GREETING".into(), "two words".into()));
            let created = bed.engine.create(request).await.unwrap();
            assert!(created.stages.iter().any(|(name, _)| *name == "seccomp"), "{:?}", created.stages);
            let (ended, log) = bed.end_of(created.id).await;
            assert_eq!((ended.exit_code, ended.signal, ended.oom_kills), (Some(7), None, 0), "{log}");
            let short = created.id.short();
            // Without the right to raise its own limit an engine passes on what it has.
            let hard =
                rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
            let nofile = format!("nofile {} {}", hard.min(65_536), hard.min(1_048_576));
            for line in [
                format!("hostname {short}"),
                format!("file /etc/hostname {short}"),
                "env GREETING two words".to_owned(),
                format!("env OPENSANDBOX_ID {}", created.id),
                "uid 0 gid 0 groups []".to_owned(),
                "pid1 1".to_owned(),
                "tmp 1777".to_owned(),
                "umask 0022".to_owned(),
                nofile.clone(),
                "core 0".to_owned(),
                "signals default".to_owned(),
                "fds 0 1 2".to_owned(),
                "pty ok".to_owned(),
                "shm ok".to_owned(),
                "cgroup /work".to_owned(),
            ] {
                assert!(log.lines().any(|have| have == line), "no line '{line}' in\n{log}");
            }
            // Its files stay until the delete, then go.
            bed.engine.delete(created.id);
            bed.engine.settled().await;
            assert!(bed.engine.log(created.id, 10).is_err());
            bed
        },
    );
}

fn life_entrypoint_that_cannot_run_leaves_nothing() {
    with_engine(
        |_| {},
        async |bed| {
            let image = empty_image();
            for _ in 0..3 {
                let error = bed.engine.create(params(&image, &["/no/such/program", "x"])).await.unwrap_err();
                let CreateError::Entrypoint { program, reason } = error else { panic!("{error}") };
                assert_eq!(program, "/no/such/program");
                assert!(reason.contains("No such file"), "{reason}");
            }
            for bad in [&[][..], &[""], &["a\0b"]] {
                assert!(matches!(bed.engine.create(params(&image, bad)).await, Err(CreateError::Invalid(_))));
            }
            bed.engine.settled().await;
            assert_eq!(bed.engine.running(), []);
            until("only prepared sandboxes are left", || {
                let dirs = std::fs::read_dir(bed.dir.path().join("data/sandboxes")).unwrap().count();
                dirs == bed.engine.ready_slots("empty") && dirs == 4
            })
            .await;
            bed
        },
    );
}

fn life_given_id_is_used_once() {
    with_engine(
        |_| {},
        async |mut bed| {
            let image = empty_image();
            let id = SandboxId::random();
            let mut request = inside(&image, &["describe"]);
            request.id = Some(id);
            let created = bed.engine.create(request.clone()).await.unwrap();
            assert_eq!(created.id, id);
            let again = bed.engine.create(request).await;
            assert!(matches!(again, Err(CreateError::Invalid(_))), "{again:?}");
            let (_, log) = bed.end_of(id).await;
            assert!(log.contains(&format!("file /etc/hostname {}", id.short())), "{log}");
            bed
        },
    );
}

fn life_host_image_runs_its_programs() {
    with_engine(
        |_| {},
        async |mut bed| {
            let image = bed.engine.images().resolve("host").unwrap().expect("the host's own image");
            let script = "set -e; id -u; cat /etc/resolv.conf; mkdir -p /work; echo hi > /work/x; cat /work/x; \
                          chown 33:33 /work/x; stat -c %u:%g /work/x; touch /usr/own; ls /root /home; exit 3";
            let (ended, log) = bed.run(params(&image, &["sh", "-c", script])).await;
            assert_eq!(ended.exit_code, Some(3), "{log}");
            assert!(log.contains("hi\n33:33\n"), "{log}");
            let via = params(&image, &["/opt/opensandbox/bootstrap.sh", "-c", "echo by $0"]);
            let (ended, log) = bed.run(via).await;
            assert_eq!((ended.exit_code, log.starts_with("by ")), (Some(0), true), "{log}");
            bed
        },
    );
}

/// Descriptors and mounts of a process.
fn counts(pid: u32) -> (usize, usize) {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap().lines().count();
    (fds, mounts)
}

fn life_nothing_grows_over_200_sandboxes() {
    with_engine(
        |_| {},
        async |bed| {
            let image = empty_image();
            let round = async |count| {
                for _ in 0..count {
                    let created = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
                    bed.engine.delete(created.id);
                }
                bed.engine.settled().await;
                until("the pool is full", || bed.engine.ready_slots("empty") == 4).await;
            };
            round(20).await;
            let name = format!("opensandbox-{}", bed.engine.instance());
            let helpers = bed.engine.helper_pids();
            let own_mounts = || {
                let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
                mounts.lines().filter(|line| line.contains(bed.dir.path().to_str().unwrap())).count()
            };
            let groups = || {
                let of = |dir: PathBuf| std::fs::read_dir(dir).unwrap().flatten();
                let slots = groups(&name)
                    .into_iter()
                    .map(|dir| of(dir).filter(|entry| entry.file_type().unwrap().is_dir()).count());
                slots.max().unwrap()
            };
            let look = || {
                let helpers: Vec<_> = helpers.iter().map(|pid| counts(*pid)).collect();
                (counts(std::process::id()).0, own_mounts(), groups(), helpers)
            };
            let before = look();
            round(200).await;
            let after = look();
            // Bare slots may come and go, each with some descriptors; the target bounds them.
            assert!(after.0 <= before.0 + 120, "descriptors: {before:?} → {after:?}");
            assert!(after.2 <= 4 + 4 + 8, "groups: {after:?}");
            assert_eq!((before.1, &before.3), (after.1, &after.3));
            assert_eq!(bed.in_sandboxes(), Vec::<u32>::new());
            bed
        },
    );
}

fn life_delete_is_quick_and_complete() {
    with_engine(
        |_| {},
        async |bed| {
            let image = empty_image();
            let created = bed.engine.create(inside(&image, &["forks", "100"])).await.unwrap();
            until("100 processes run", || bed.in_sandboxes().len() >= 100).await;
            let begin = Instant::now();
            bed.engine.delete(created.id);
            let call = begin.elapsed();
            assert!(matches!(bed.engine.connect_execd(created.id).await, Err(ConnectError::NotRunning)));
            bed.engine.settled().await;
            let gone = begin.elapsed();
            assert_eq!(bed.in_sandboxes(), Vec::<u32>::new());
            println!("  delete: call {call:?}, all gone {gone:?}");
            assert!(
                call < Duration::from_millis(20) && gone < Duration::from_millis(500),
                "{call:?} {gone:?}"
            );
            // Unknown ids are no error.
            bed.engine.delete(created.id);
            bed
        },
    );
}

fn life_ports_and_daemon_are_reached() {
    with_engine(
        |_| {},
        async |bed| {
            use tokio::io::AsyncReadExt;
            let image = empty_image();
            for (address, port) in [("127.0.0.1", 80), ("[::1]", 8080)] {
                let listen = format!("{address}:{port}");
                let created = bed.engine.create(inside(&image, &["greet", &listen])).await.unwrap();
                until("the port answers", || bed.log(created.id).contains("listening")).await;
                let mut stream = bed.engine.connect_port(created.id, port).await.unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).await.unwrap();
                assert_eq!(text, "hello");
                let refused = bed.engine.connect_port(created.id, 9).await.unwrap_err();
                assert!(
                    matches!(&refused, ConnectError::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused)
                );
                bed.engine.connect_execd(created.id).await.unwrap();
                bed.engine.delete(created.id);
            }
            // This thread is still at home.
            tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            bed
        },
    );
}

fn life_second_engine_is_refused() {
    with_engine(
        |_| {},
        async |bed| {
            let refused = Engine::start(config(bed.dir.path())).unwrap_err();
            assert!(matches!(refused, StartError::InUse(_)), "{refused}");
            bed
        },
    );
}

fn life_failed_start_leaves_nothing() {
    runtime().block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(dir.path());
        config.network = NetConfig {
            mode: Mode::Internet,
            pool: Some("10.77.0.0/31".parse().unwrap()),
            ..NetConfig::default()
        };
        let refused = Engine::start(config).unwrap_err();
        assert!(refused.to_string().contains("too small"), "{refused}");
        let instance = std::fs::read_to_string(dir.path().join("data/instance")).unwrap();
        assert_eq!(traces(instance.trim()), Vec::<String>::new());
    });
}

fn life_many_at_once() {
    with_engine(
        |config| {
            config.ready_slots = 32;
            config.max_sandboxes = 60;
        },
        async |mut bed| {
            let image = empty_image();
            let other = image_of("other", Vec::new());
            let creates: Vec<_> = (0..80)
                .map(|i| {
                    let engine = bed.engine.clone();
                    let request = inside(if i % 3 == 0 { &other } else { &image }, &["sleep"]);
                    tokio::spawn(async move { engine.create(request).await })
                })
                .collect();
            let (mut made, mut refused) = (Vec::new(), 0);
            for create in creates {
                match create.await.unwrap() {
                    Ok(created) => made.push(created.id),
                    Err(CreateError::Exhausted { .. }) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!((made.len(), refused), (60, 20));
            made.sort_unstable();
            made.dedup();
            assert_eq!(made.len(), 60);
            for id in made {
                bed.engine.delete(id);
            }
            bed.engine.settled().await;
            assert!(bed.events.try_recv().is_err());
            bed.run(inside(&image, &["describe"])).await;
            bed
        },
    );
}

fn life_check_finds_this_machine_fit() {
    let dir = tempfile::tempdir().unwrap();
    let items = osb_engine::check(&config(dir.path()));
    for item in &items {
        assert!(item.result != CheckResult::Fail, "{item:?}");
        assert!(!item.message.is_empty());
    }
    assert!(
        items.iter().any(|item| item.name == "user namespaces" && item.result == CheckResult::Ok),
        "{items:?}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

fn life_with_network() {
    with_engine(
        |config| config.network = NetConfig { mode: Mode::Internet, ..NetConfig::default() },
        async |mut bed| {
            let image = bed.engine.images().resolve("host").unwrap().unwrap();
            let script = "cat /etc/resolv.conf; cat /proc/net/route | wc -l";
            let (ended, log) = bed.run(params(&image, &["sh", "-c", script])).await;
            assert_eq!(ended.exit_code, Some(0), "{log}");
            let routes: u32 = log.trim_end().rsplit('\n').next().unwrap().parse().unwrap();
            assert!(log.starts_with("nameserver ") && routes >= 2, "{log}");
            bed.engine.settled().await;
            bed
        },
    );
}

fn life_without_user_namespace() {
    with_engine(
        |config| config.user_namespace = osb_engine::UserNamespace::Off,
        async |mut bed| {
            assert!(!bed.engine.has_user_namespaces());
            let image = empty_image();
            let (ended, log) = bed.run(inside(&image, &["describe"])).await;
            assert_eq!(ended.exit_code, Some(7), "{log}");
            let (ended, log) = bed.run(inside(&image, &["attack", "--root"])).await;
            assert_eq!(ended.exit_code, Some(0), "{log}");
            bed
        },
    );
    runtime().block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::start(config(dir.path())).unwrap();
        engine.adopt(Vec::new()).await.unwrap();
        let mut request = params(&empty_image(), &[SELF]);
        request.limits = Some(Limits { memory_bytes: 1, ..Limits::default() });
        assert!(matches!(engine.create(request).await, Err(CreateError::Invalid(_))));
        engine.shutdown().await;
    });
}
