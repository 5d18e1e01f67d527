//! Sandboxes that wait for their order.

use osb_engine::Limits;
use osb_engine::image::Image;
use osb_protocol::ids::SandboxId;

use crate::Test;
use crate::support::{Bed, empty_image, inside, params, until, with_engine};

pub(crate) const TESTS: &[Test] = &[
    ("standby_is_used_and_replaced", standby_is_used_and_replaced),
    ("standby_that_died_is_passed_over", standby_that_died_is_passed_over),
    ("standby_ends_with_its_image", standby_ends_with_its_image),
    ("standby_takes_the_limits_of_the_request", standby_takes_the_limits_of_the_request),
    ("standby_is_not_used_for_another_name", standby_is_not_used_for_another_name),
];

async fn filled(bed: &Bed, image: &std::sync::Arc<Image>) -> Vec<i32> {
    bed.engine.expect_image(image);
    until("the pool is full", || bed.engine.standby_pids().len() == 4).await;
    bed.engine.standby_pids()
}

fn alive(pid: i32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}/ns/pid")).exists()
}

fn standby_is_used_and_replaced() {
    with_engine(
        |_| {},
        async |mut bed| {
            let image = empty_image();
            let before = filled(&bed, &image).await;
            let created = bed.engine.create(inside(&image, &["describe"])).await.unwrap();
            assert_eq!(created.record.pid(), before[0], "the oldest is taken");
            assert!(created.stages.iter().all(|(name, _)| *name != "clone"), "{:?}", created.stages);
            let (ended, log) = bed.end_of(created.id).await;
            assert_eq!(ended.exit_code, Some(7), "{log}");
            assert!(log.contains(&format!("hostname {}", created.id.short())), "{log}");
            let after = filled(&bed, &image).await;
            assert!(!after.contains(&before[0]), "{before:?} {after:?}");
            bed
        },
    );
}

fn standby_that_died_is_passed_over() {
    with_engine(
        |_| {},
        async |bed| {
            let image = empty_image();
            let before = filled(&bed, &image).await;
            for pid in &before {
                let pid = rustix::process::Pid::from_raw(*pid).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            }
            until("all are dead", || before.iter().all(|pid| !alive(*pid))).await;
            let created = bed.engine.create(inside(&image, &["sleep"])).await.unwrap();
            assert!(!before.contains(&created.record.pid()));
            bed.engine.delete(created.id);
            bed.engine.settled().await;
            let after = filled(&bed, &image).await;
            assert!(after.iter().all(|pid| alive(*pid) && !before.contains(pid)), "{before:?} {after:?}");
            bed
        },
    );
}

fn standby_ends_with_its_image() {
    with_engine(
        |_| {},
        async |bed| {
            let image = empty_image();
            let before = filled(&bed, &image).await;
            bed.engine.forget_image(&image.id);
            assert_eq!(bed.engine.standby_pids(), Vec::<i32>::new());
            assert!(before.iter().all(|pid| !alive(*pid)), "nothing holds its layers any more");
            bed
        },
    );
}

fn standby_takes_the_limits_of_the_request() {
    with_engine(
        |_| {},
        async |mut bed| {
            let image = bed.engine.images().resolve("host").unwrap().expect("the host's own image");
            let waiting = filled(&bed, &image).await;
            let mut request = params(&image, &["sh", "-c", "df -k --output=size /dev/shm | tail -1"]);
            request.limits = Some(Limits { memory_bytes: 256 << 20, ..Limits::default() });
            let created = bed.engine.create(request).await.unwrap();
            assert!(waiting.contains(&created.record.pid()));
            let (_, log) = bed.end_of(created.id).await;
            assert_eq!(log.trim(), (128 << 10).to_string());
            let mut eater = inside(&image, &["eat", "400"]);
            eater.limits = Some(Limits { memory_bytes: 128 << 20, ..Limits::default() });
            let created = bed.engine.create(eater).await.unwrap();
            assert!(waiting.contains(&created.record.pid()));
            let (ended, log) = bed.end_of(created.id).await;
            assert!(ended.oom_kills > 0, "{ended:?} {log}");
            bed
        },
    );
}

fn standby_is_not_used_for_another_name() {
    with_engine(
        |_| {},
        async |mut bed| {
            let image = empty_image();
            let waiting = filled(&bed, &image).await;
            let id = SandboxId::random();
            let mut request = inside(&image, &["describe"]);
            request.id = Some(id);
            let created = bed.engine.create(request).await.unwrap();
            assert!(!waiting.contains(&created.record.pid()));
            let (_, log) = bed.end_of(id).await;
            assert!(log.contains(&format!("hostname {}\n", id.short())), "{log}");
            bed
        },
    );
}
