//! Loading an image: compressed bytes of layers per second of one core (user and system time), and per second on the
//! clock. Each program does the same work on the same archive, one after the other in turns: skopeo and umoci check
//! the digests and unpack, `docker load` does both.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::count;
use crate::stats::Samples;

/// What one run took, in seconds.
#[derive(Clone, Copy)]
struct Took {
    cpu: f64,
    wall: f64,
}

#[derive(Default)]
struct Rates {
    core: Samples,
    wall: Samples,
}

impl Rates {
    fn push(&mut self, megabytes: f64, took: Took) {
        self.core.push(megabytes / took.cpu);
        self.wall.push(megabytes / took.wall);
    }
}

/// The image to load, made when it is not there.
pub(super) fn archive() -> Result<PathBuf> {
    let image = std::env::var_os("BENCH_IMAGE")
        .map_or_else(|| PathBuf::from("/var/tmp/osb-bench-peers/unpack.tar"), PathBuf::from);
    if !image.exists() {
        let parent = image.parent().context("BENCH_IMAGE")?;
        std::fs::create_dir_all(parent)?;
        let made = Command::new("bench/unpack-image.sh").arg(&image).stdout(Stdio::null()).status()?;
        if !made.success() {
            bail!("bench/unpack-image.sh failed");
        }
    }
    Ok(image)
}

pub(crate) fn image_load() -> Result<()> {
    let binary = crate::server::binary()?;
    let image = archive()?;
    // All but a few kilobytes of the archive are its layer.
    #[allow(clippy::cast_precision_loss)]
    let megabytes = std::fs::metadata(&image)?.len() as f64 / 1e6;
    // Beside the archive: a file system in memory would make the disk free of cost.
    let work = image.with_extension(format!("work-{}", std::process::id()));
    let result = measure(&binary, &image, &work, megabytes);
    let _ = std::fs::remove_dir_all(&work);
    result
}

fn measure(binary: &Path, image: &Path, work: &Path, megabytes: f64) -> Result<()> {
    let has = |program: &str, version: &str| {
        Command::new(program)
            .arg(version)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let tools = has("skopeo", "--version") && has("umoci", "--version");
    let docker = docker_daemon().filter(|_| has("docker", "info"));
    let (mut ours, mut theirs, mut dockers) = (Rates::default(), Rates::default(), Rates::default());
    let image = image.to_string_lossy();
    std::fs::create_dir_all(work)?;
    for round in 0..count(5) {
        let place = |name: &str| work.join(format!("{name}-{round}")).to_string_lossy().into_owned();
        sync();
        let program = binary.to_string_lossy();
        let load = [&*program, "image", "load", "--data-dir", &place("data"), &image];
        match timed(&[&load]) {
            Some(took) => ours.push(megabytes, took),
            None => {
                ours.core.fail();
                ours.wall.fail();
            }
        }
        if tools {
            sync();
            let (from, to) = (format!("oci-archive:{image}"), format!("oci:{}:bench", place("layout")));
            let copy = ["skopeo", "--insecure-policy", "copy", "--quiet", &from, &to];
            let layout = format!("{}:bench", place("layout"));
            let unpack = ["umoci", "unpack", "--image", &layout, &place("bundle")];
            if let Some(took) = timed(&[&copy, &unpack]) {
                theirs.push(megabytes, took);
            }
        }
        if let Some(daemon) = docker {
            let _ = timed(&[&["docker", "rmi", "--force", "bench-unpack:latest"]]);
            sync();
            let before = cpu_of(daemon);
            let took = timed(&[&["docker", "load", "--quiet", "--input", &image]]);
            // The daemon does the work; its helpers are in its account once they have ended.
            if let (Some(took), Some(before), Some(after)) = (took, before, cpu_of(daemon)) {
                dockers.push(megabytes, Took { cpu: took.cpu + after - before, ..took });
            }
        }
    }
    for (name, ours, theirs, dockers) in [
        ("unpack_per_core", &ours.core, &theirs.core, &dockers.core),
        ("unpack", &ours.wall, &theirs.wall, &dockers.wall),
    ] {
        ours.print(name, "MB/s", Some(("skopeo copy + umoci unpack", theirs.p50())));
        ours.print(name, "MB/s", Some(("docker load", dockers.p50())));
    }
    Ok(())
}

/// Leaves nothing of the last run to be written during the next. Its files stay to the end of all: for minutes after
/// many were deleted, ext4 spends most of the time of making new ones on passing over their numbers.
pub(super) fn sync() {
    rustix::fs::sync();
}

/// Runs commands one after the other; `None` when one fails. The shell's own clock sees the time of all their
/// processes.
fn timed(commands: &[&[&str]]) -> Option<Took> {
    let quoted = |word: &&str| format!("'{}'", word.replace('\'', r"'\''"));
    let lines: Vec<_> =
        commands.iter().map(|words| words.iter().map(quoted).collect::<Vec<_>>().join(" ")).collect();
    let script = format!("TIMEFORMAT='took %R %U %S'; time {{ {} ; }} >/dev/null 2>&1", lines.join(" && "));
    let output = Command::new("bash").args(["-c", &script]).stdin(Stdio::null()).output().ok()?;
    if !output.status.success() {
        return None;
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().rev().find_map(|line| line.strip_prefix("took "))?;
    let numbers: Vec<f64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [wall, user, system] = numbers.as_slice() else { return None };
    Some(Took { wall: *wall, cpu: user + system })
}

/// Process id of Docker's daemon.
fn docker_daemon() -> Option<u32> {
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        (name.trim() == "dockerd").then_some(pid)
    })
}

/// Seconds of processor time of a process and of those of its children that have ended.
fn cpu_of(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<f64> = rest.split(' ').skip(11).take(4).filter_map(|word| word.parse().ok()).collect();
    #[allow(clippy::cast_precision_loss)]
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    (fields.len() == 4).then(|| fields.iter().sum::<f64>() / ticks)
}
