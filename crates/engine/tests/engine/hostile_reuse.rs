//! What a hostile sandbox tries to leave to the next one of its slot, or to see of those beside it.

use std::path::Path;

use crate::Test;
use crate::reuse::{ran, stays, uppers};
use crate::support::{Bed, params, until, with_engine};

pub(crate) const TESTS: &[Test] = &[
    ("hostile_every_way_to_write_is_noticed", every_way_to_write_is_noticed),
    ("hostile_nothing_in_dev_is_shared", nothing_in_dev_is_shared),
    ("hostile_times_of_reading_stay_behind", times_of_reading_stay_behind),
    ("hostile_cached_files_count_for_nobody_else", cached_files_count_for_nobody_else),
    ("hostile_kept_files_outlive_the_preparer", kept_files_outlive_the_preparer),
];

fn python(code: &str) -> String {
    format!("PYTHONDONTWRITEBYTECODE=1 python3 - <<'END'\n{code}\nEND")
}

fn every_way_to_write_is_noticed() {
    with_engine(
        |_| {},
        async |bed| {
            if !stays(&bed, "true").await.0 {
                println!("skipped: this machine cannot tell that nothing was changed");
                return bed;
            }
            let all_that_shows =
                "cat /etc/hosts | head -2; stat -c '%n %b %s %h %a %u %g' / /etc /etc/hosts; ls -a / /etc";
            let (_, clean) = stays(&bed, all_that_shows).await;
            for (writes, code) in [
                (true, "m = mmap.mmap(f, 0); m[0:4] = b'evil'"),
                (true, "os.pwrite(f, os.read(f, 99), 0)"),
                (true, "os.ftruncate(f, os.fstat(f).st_size)"),
                (true, "libc.fallocate(f, 1, ctypes.c_long(0), ctypes.c_long(1 << 20))"),
                (true, "libc.fallocate(f, 3, ctypes.c_long(0), ctypes.c_long(10))"),
                (true, "os.sendfile(f, os.open('/etc/hostname', 0), 0, 4)"),
                (true, "os.copy_file_range(f, f, 4, 0, 60)"),
                (true, "os.fchmod(f, 0o644)"),
                (true, "os.fchown(f, 0, 0)"),
                (true, "s = os.fstat(f); os.utime(f, ns=(s.st_atime_ns, s.st_mtime_ns))"),
                (true, "os.utime('/', ns=(5, 5))"),
                (
                    true,
                    "os.setxattr(f, 'user.overlay.opaque', b'y'); os.removexattr(f, 'user.overlay.opaque')",
                ),
                (true, "os.open('/usr/bin/env', os.O_RDWR)"),
                (true, "os.rename('/etc/hosts', '/etc/h'); os.rename('/etc/h', '/etc/hosts')"),
                (false, "mmap.mmap(f, 0)[0:4]"),
                (false, "fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)"),
                (false, "g = os.open('/etc', os.O_TMPFILE | os.O_RDWR); os.write(g, b'x' * 10_000_000)"),
                (false, "refused(lambda: os.setxattr(f, 'trusted.overlay.opaque', b'y'))"),
                (false, "refused(lambda: os.rename('/etc', '/usr/bin'))"),
                (false, "refused(lambda: os.link('/etc/hosts', '/etc/hostname'))"),
                (false, "refused(lambda: os.mkdir('/etc'))"),
                (false, "[None for _ in os.walk('/usr/share')]; os.fsync(f); os.sync()"),
            ] {
                let begin = "import ctypes, fcntl, mmap, os\nlibc = ctypes.CDLL(None)\ndef refused(action):\n    try: action()\n    except OSError: return\n    raise SystemExit('allowed')\nf = os.open('/etc/hosts', os.O_RDWR)";
                let (stayed, output) = stays(&bed, &python(&format!("{begin}\n{code}"))).await;
                assert_eq!(output, "done\n", "{code}");
                assert_eq!(stayed, !writes, "{code}");
                let (_, next) = stays(&bed, all_that_shows).await;
                assert_eq!(next, clean, "after {code}");
            }
            bed
        },
    );
}

fn nothing_in_dev_is_shared() {
    with_engine(
        |_| {},
        async |bed| {
            let nodes = "null zero full random urandom tty";
            let lock = "for node in $NODES; do exec {fd}<> /dev/$node || exec {fd}< /dev/$node; flock -n -x $fd && echo $node; done 2> /dev/null";
            let lock =
                format!("NODES='{nodes}'; {lock}\nexec 2> /dev/null; flock -n -x 3 3< /dev && echo dev");
            let (first, _) = ran(&bed, &lock).await;
            let (second, _) = ran(&bed, &lock).await;
            assert!(bed.log(first).starts_with("null\n"), "{}", bed.log(first));
            assert_eq!(bed.log(first), bed.log(second));

            // Being told of what it does itself shows that the watch works.
            let spy = "import ctypes, os, time
libc = ctypes.CDLL(None)
fd = libc.inotify_init1(0x800)
for name in ['/dev', '/dev/null', '/dev/urandom']:
    assert libc.inotify_add_watch(fd, name.encode(), 0xfff) > 0
print('watching', flush=True)
time.sleep(3)
try: print('told of others', os.read(fd, 4096))
except BlockingIOError: print('nothing')
open('/dev/null').close()
print(len(os.read(fd, 4096)) > 0)";
            let image = bed.engine.images().resolve("host").unwrap().expect("the host's own image");
            let spy = format!("{}\necho done; exec sleep 1000", python(spy));
            let spy = bed.engine.create(params(&image, &["bash", "-c", &spy])).await.unwrap();
            until("the spy watches", || bed.log(spy.id) == "watching\n").await;
            ran(&bed, "ls /dev > /dev/null; head -c 9 /dev/urandom > /dev/null").await;
            until("the spy has looked", || bed.log(spy.id).ends_with("done\n")).await;
            assert_eq!(bed.log(spy.id), "watching\nnothing\nTrue\ndone\n");
            bed
        },
    );
}

fn kept_files_outlive_the_preparer() {
    with_engine(
        |config| config.ready_slots = 1,
        async |bed| {
            let image = bed.engine.images().resolve("host").unwrap().expect("the host's own image");
            bed.engine.expect_image(&image);
            for round in 0..4 {
                until("one is ready", || bed.engine.ready_slots(&image.id) == 1).await;
                if round % 2 == 1 {
                    let preparer = *bed.engine.helper_pids().last().unwrap();
                    let pid = rustix::process::Pid::from_raw(preparer.cast_signed()).unwrap();
                    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
                }
                let (id, _) = ran(&bed, "cat /etc/hostname; tail -n 1 /etc/hosts").await;
                let name = id.short();
                assert_eq!(bed.log(id), format!("{name}\n127.0.1.1\t{name}\ndone\n"));
                bed.engine.delete(id);
                bed.engine.settled().await;
            }
            assert!(uppers(&bed).len() <= 3, "{}", uppers(&bed).len());
            bed
        },
    );
}

fn times_of_reading_stay_behind() {
    with_engine(
        |config| config.ready_slots = 1,
        async |bed| {
            let read =
                "date +%s%N; ls / /etc > /dev/null; cat /etc/host* /etc/resolv.conf > /dev/null; date +%s%N";
            // By then all is prepared that will be: what is made meanwhile has the times of that moment, too.
            let (stayed, seconds) = stays(&bed, &format!("sleep 1; {read}; sleep 0.1")).await;
            if !stayed {
                println!("skipped: this machine cannot tell that nothing was changed");
                return bed;
            }
            let of_the_last: Vec<u128> = seconds.lines().filter_map(|line| line.parse().ok()).collect();
            let [begin, end] = of_the_last[..] else { panic!("{seconds}") };
            let before = uppers(&bed);
            let mut passed_on = 0;
            // Those of all slots, so the one that passed on is among them.
            for _ in 0..5 {
                let show = "python3 -c 'import os; [print(s.st_atime_ns, s.st_mtime_ns, sep=chr(10)) for s in map(os.stat, [\"/\", \"/etc\", \"/etc/hosts\", \"/etc/hostname\", \"/etc/resolv.conf\"])]'";
                let (id, files) = ran(&bed, show).await;
                passed_on += usize::from(before.contains(&files));
                let times = bed.log(id);
                for time in times.lines().filter_map(|line| line.parse::<u128>().ok()) {
                    assert!(time < begin || time > end, "{begin} < {time} < {end}");
                }
            }
            // The one that was waiting, and the one with the files that were read.
            assert_eq!(passed_on, 2);
            bed
        },
    );
}

fn cached_files_count_for_nobody_else() {
    with_engine(
        |config| config.ready_slots = 1,
        async |bed| {
            let memory = |bed: &Bed| {
                let name = format!("opensandbox-{}", bed.engine.instance());
                let group = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(|top| Path::new(top).join(&name));
                let group = group.iter().find(|group| group.exists()).unwrap();
                let slots = std::fs::read_dir(group).unwrap().flatten();
                let of = |dir: std::path::PathBuf| {
                    ["memory.current", "memory.usage_in_bytes"].iter().find_map(|name| {
                        std::fs::read_to_string(dir.join("work").join(name)).ok()?.trim().parse::<u64>().ok()
                    })
                };
                slots.filter_map(|slot| of(slot.path())).max().unwrap()
            };
            // Names that do not exist are remembered, at the expense of whoever asked.
            let ask = python("import os\nfor i in range(100_000): os.path.exists('/usr/lib/none%d' % i)");
            let (id, _) = ran(&bed, &ask).await;
            let used = memory(&bed);
            assert!(used > 16 << 20, "{used}");
            bed.engine.delete(id);
            bed.engine.settled().await;
            let left = memory(&bed);
            assert!(left < 8 << 20, "{left} of {used}");
            bed
        },
    );
}
