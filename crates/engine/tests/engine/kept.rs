//! Files that one sandbox has left as they were, and another gets.

use osb_protocol::ids::SandboxId;

use crate::Test;
use crate::reuse::{stays, upper_of, uppers};
use crate::support::{params, until, with_engine};

pub(crate) const TESTS: &[Test] = &[
    ("kept_files_are_none_where_times_do_not_tell", kept_files_are_none_where_times_do_not_tell),
    ("kept_files_pass_to_the_next_under_its_name", kept_files_pass_to_the_next_under_its_name),
    ("kept_files_are_none_that_were_touched", kept_files_are_none_that_were_touched),
    ("kept_files_go_with_their_image", kept_files_go_with_their_image),
];

/// Before Linux 6.13 two changes may get the same time, so that nobody can say whether there was one.
fn times_tell() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(13))
}

fn skip() {
    println!("skipped: this kernel does not give every change a time of its own");
}

fn kept_files_are_none_where_times_do_not_tell() {
    if times_tell() {
        println!("skipped: this kernel gives every change a time of its own");
        return;
    }
    with_engine(
        |_| {},
        async |bed| {
            assert!(!stays(&bed, "true").await.0);
            bed
        },
    );
}

fn kept_files_pass_to_the_next_under_its_name() {
    if !times_tell() {
        return skip();
    }
    with_engine(
        |config| config.ready_slots = 1,
        async |mut bed| {
            assert!(stays(&bed, "cat /etc/hosts > /dev/null; ls / > /dev/null; echo x > /dev/shm/x").await.0);
            let mut seen = uppers(&bed);
            let image = bed.engine.images().resolve("host").unwrap().expect("the host's own image");
            let mut again = 0;
            for round in 0..8 {
                let script = "cat /etc/hostname; hostname; grep 127.0.1.1 /etc/hosts; ls /dev/shm";
                let mut request = params(&image, &["sh", "-c", script]);
                // Now and then by a name of the caller's.
                request.id = (round % 3 == 0).then(SandboxId::random);
                let created = bed.engine.create(request).await.unwrap();
                again += usize::from(seen.contains(&upper_of(&bed, created.id)));
                let (_, log) = bed.end_of(created.id).await;
                let name = created.id.short();
                assert_eq!(log, format!("{name}\n{name}\n127.0.1.1\t{name}\n"));
                bed.engine.delete(created.id);
                // One that ended by itself keeps its log until the delete, so its files do not pass on.
                assert!(stays(&bed, "true").await.0);
                seen = uppers(&bed);
            }
            assert!(again >= 4, "{again} of 8");
            bed
        },
    );
}

fn kept_files_are_none_that_were_touched() {
    if !times_tell() {
        return skip();
    }
    with_engine(
        |_| {},
        async |bed| {
            assert!(stays(&bed, "true").await.0);
            for change in [
                "echo x > /x",
                "echo x > /x; rm /x",
                "mkdir /d; rmdir /d",
                "rm /etc/hostname",
                "echo x >> /etc/hosts",
                "chmod 777 /",
                "chmod 777 /; chmod 755 /",
                "chown 1:1 /etc",
                "touch -d @0 /",
                "touch -d \"$(stat -c %y /etc)\" /etc",
                "echo x > /usr/x",
                "mkdir -p /usr/share/d",
                "rm /usr/bin/env",
                "python3 -c 'import os; os.setxattr(\"/\", \"user.word\", b\"secret\")' || touch /",
                "python3 -c 'import os; os.open(\"/etc\", os.O_TMPFILE | os.O_RDWR)'; touch /etc/x; rm /etc/x",
                "chattr +d / || touch /",
                "ln /etc/hosts /etc/hosts2; rm /etc/hosts2",
            ] {
                assert!(!stays(&bed, change).await.0, "{change}");
            }
            // What was written is gone with them.
            assert!(
                stays(&bed, "test ! -e /x && test -e /usr/bin/env && test ! -e /usr/x || touch /y").await.0
            );
            bed
        },
    );
}

fn kept_files_go_with_their_image() {
    if !times_tell() {
        return skip();
    }
    with_engine(
        |_| {},
        async |bed| {
            assert!(stays(&bed, "true").await.0);
            let image = bed.engine.images().resolve("host").unwrap().expect("the host's own image");
            until("all is prepared", || bed.engine.ready_slots(&image.id) == 4).await;
            bed.engine.forget_image(&image.id);
            assert_eq!(uppers(&bed), []);
            bed
        },
    );
}
