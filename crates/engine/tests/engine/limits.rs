//! Limits hold, for the work and not for init; a full machine is told before it is full.

use osb_engine::{CreateError, Limits};

use crate::Test;
use crate::support::{empty_image, inside, processes, with_engine};

pub(crate) const TESTS: &[Test] = &[
    ("limits_memory_kills_the_work_not_init", limits_memory_kills_the_work_not_init),
    ("limits_fork_bomb_is_bounded", limits_fork_bomb_is_bounded),
    ("limits_fork_storm_dies_when_deleted", limits_fork_storm_dies_when_deleted),
    ("limits_cpu_is_shared_out", limits_cpu_is_shared_out),
    ("limits_full_disk_is_an_error_and_leaves_nothing", limits_full_disk_is_an_error_and_leaves_nothing),
    ("limits_floors_refuse_creates", limits_floors_refuse_creates),
];

fn limits_memory_kills_the_work_not_init() {
    with_engine(
        |_| {},
        async |mut bed| {
            let image = empty_image();
            let limits = Limits { memory_bytes: 64 << 20, ..Limits::default() };
            let mut request = inside(&image, &["eat", "200"]);
            request.limits = Some(limits);
            let (ended, log) = bed.run(request).await;
            // Init lived to tell.
            assert_eq!((ended.exit_code, ended.signal), (Some(137), Some(9)), "{log}");
            assert!(ended.oom_kills >= 1);
            // A slot in which that has happened does not show it to the next sandbox.
            for _ in 0..8 {
                let mut request = inside(&image, &["eat-child", "200"]);
                request.limits = Some(limits);
                let (ended, log) = bed.run(request).await;
                assert_eq!((ended.exit_code, ended.oom_kills), (Some(0), 1), "{log}");
                let mut request = inside(&image, &["eat", "20"]);
                request.limits = Some(limits);
                let (ended, log) = bed.run(request).await;
                assert_eq!((ended.exit_code, ended.oom_kills), (Some(0), 0), "{log}");
            }
            let (ended, _) = bed.run(inside(&image, &["eat", "200"])).await;
            assert_eq!(ended.exit_code, Some(0));
            bed
        },
    );
}

fn limits_fork_bomb_is_bounded() {
    with_engine(
        |_| {},
        async |mut bed| {
            let mut request = inside(&empty_image(), &["bomb"]);
            request.limits = Some(Limits { pids: 50, ..Limits::default() });
            let (ended, log) = bed.run(request).await;
            assert_eq!(ended.exit_code, Some(0), "{log}");
            let count: u32 = log.trim().rsplit(' ').next().unwrap().parse().unwrap();
            assert!((40..=49).contains(&count), "{log}");
            bed
        },
    );
}

fn limits_fork_storm_dies_when_deleted() {
    use std::time::{Duration, Instant};
    const MOST: usize = 4096;
    with_engine(
        |_| {},
        async |mut bed| {
            let mut request = inside(&empty_image(), &["storm"]);
            request.limits = Some(Limits { pids: MOST as u32, ..Limits::default() });
            let id = bed.engine.create(request).await.unwrap().id;
            let group = format!("opensandbox-{}", bed.engine.instance());
            let began = Instant::now();
            while processes(&group).len() < MOST && began.elapsed() < Duration::from_secs(20) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let began = Instant::now();
            bed.engine.delete(id);
            tokio::time::timeout(Duration::from_secs(15), bed.engine.settled()).await.unwrap();
            // Its slot serves others afterwards.
            for _ in 0..12 {
                let (ended, log) = bed.run(inside(&empty_image(), &["spin", "1"])).await;
                assert_eq!(ended.exit_code, Some(0), "{log}");
            }
            println!("a storm of {MOST} was over after {:?}", began.elapsed());
            bed
        },
    );
}

fn limits_cpu_is_shared_out() {
    with_engine(
        |_| {},
        async |mut bed| {
            let mut request = inside(&empty_image(), &["spin", "400"]);
            request.limits = Some(Limits { cpu_nanos: 250_000_000, ..Limits::default() });
            let (ended, log) = bed.run(request).await;
            assert_eq!(ended.exit_code, Some(0), "{log}");
            let used: u64 = log.trim().parse().unwrap();
            // A quarter of a processor for 400 ms, give or take a period.
            assert!(used < 230, "{used} ms of CPU time in 400 ms");
            bed
        },
    );
}

fn limits_full_disk_is_an_error_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("small");
    std::fs::create_dir(&place).unwrap();
    let options = c"size=48m,mode=700";
    rustix::mount::mount("tmpfs", &place, "tmpfs", rustix::mount::MountFlags::empty(), options).unwrap();
    with_engine(
        |config| {
            config.data_dir = place.join("data");
            config.disk_floor_bytes = 0;
            config.ready_slots = 2;
        },
        async |bed| {
            let image = empty_image();
            let created = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
            bed.engine.delete(created.id);
            bed.engine.settled().await;
            bed.engine.forget_image("empty");
            let filler = place.join("filler");
            let mut file = std::fs::File::create(&filler).unwrap();
            while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
            let error = bed.engine.create(inside(&image, &["sleep"])).await.unwrap_err();
            println!("  full disk: {error}");
            assert_eq!(bed.engine.running(), []);
            drop(file);
            std::fs::remove_file(&filler).unwrap();
            let created = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
            bed.engine.delete(created.id);
            bed
        },
    );
    rustix::mount::unmount(&place, rustix::mount::UnmountFlags::DETACH).unwrap();
}

fn limits_floors_refuse_creates() {
    with_engine(
        |config| config.memory_floor_bytes = u64::MAX,
        async |bed| {
            let refused = bed.engine.create(inside(&empty_image(), &["sleep"])).await;
            assert!(matches!(refused, Err(CreateError::Exhausted { .. })), "{refused:?}");
            bed
        },
    );
}
