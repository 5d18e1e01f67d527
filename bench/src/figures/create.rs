//! Creates and deletes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::count;
use crate::server::{Options, Server};
use crate::stats::{Samples, print_rate};

/// Pause between creates that are timed one by one.
const REST: Duration = Duration::from_millis(20);

pub(crate) async fn create_exec() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let mut direct = Samples::default();
    let mut shell = Samples::default();
    for round in 0..2 * count(1000) + 40 {
        let by_shell = round % 2 == 1;
        let began = Instant::now();
        let made = async {
            let id = conn.create(&server.image).await?;
            if by_shell {
                conn.exec(&id, "true").await?;
            } else {
                conn.exec_true(&id).await?;
            }
            anyhow::Ok(id)
        }
        .await;
        let took = began.elapsed();
        let samples = if by_shell { &mut shell } else { &mut direct };
        match made {
            Ok(id) => {
                if round >= 40 {
                    samples.push_ms(took);
                }
                conn.delete(&id).await?;
                // One create at a time, from rest: what the last one left is cleared away by then. How many go through
                // without a pause is the figure `sustained`.
                tokio::time::sleep(REST).await;
            }
            Err(_) => samples.fail(),
        }
    }
    let runc = runc_run("/bin/true")?;
    let docker = docker_run();
    direct.print("create_exec", "ms", Some(("runc run", runc)));
    direct.print("create_exec", "ms", Some(("docker run --rm", docker)));
    shell.print("create_exec_shell", "ms", None);
    Ok(())
}

pub(super) fn median_of(rounds: usize, mut command: impl FnMut() -> Command) -> Option<f64> {
    let mut samples = Samples::default();
    for _ in 0..rounds {
        let began = Instant::now();
        match command().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status() {
            Ok(status) if status.success() => samples.push_ms(began.elapsed()),
            _ => return None,
        }
    }
    samples.p50()
}

fn runc_run(program: &str) -> Result<Option<f64>> {
    let Some(rootfs) = std::env::var_os("BENCH_ROOTFS") else { return Ok(None) };
    if Command::new("runc").arg("--version").stdout(Stdio::null()).status().is_err() {
        return Ok(None);
    }
    let bundle = std::env::temp_dir().join(format!("osb-bench-runc-{}", std::process::id()));
    std::fs::create_dir_all(&bundle)?;
    Command::new("runc").arg("spec").current_dir(&bundle).status().context("runc spec")?;
    let path = bundle.join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    spec["root"] = serde_json::json!({ "path": Path::new(&rootfs), "readonly": true });
    spec["process"]["terminal"] = false.into();
    spec["process"]["args"] = serde_json::json!([program]);
    std::fs::write(&path, spec.to_string())?;
    let mut n = 0;
    let median = median_of(30, || {
        n += 1;
        let mut command = Command::new("runc");
        command.args(["run", &format!("osb-bench-{}-{n}", std::process::id())]).current_dir(&bundle);
        command
    });
    std::fs::remove_dir_all(&bundle)?;
    Ok(median)
}

pub(super) fn docker_run() -> Option<f64> {
    std::env::var_os("BENCH_ROOTFS")?;
    median_of(15, || {
        let mut command = Command::new("docker");
        command.args(["run", "--rm", "bench-rootfs", "/bin/true"]);
        command
    })
}

pub(crate) async fn stages() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let body = format!(
        r#"{{"image":{{"uri":"{}"}},"entrypoint":["tail","-f","/dev/null"],"resourceLimits":{{"cpu":"1","memory":"2Gi"}}}}"#,
        server.image
    );
    let mut order = Vec::new();
    let mut stages: BTreeMap<String, Samples> = BTreeMap::new();
    for _ in 0..count(300) {
        let answer = conn.send("POST", "/v1/sandboxes", &body).await?;
        let timing =
            answer.headers().get("server-timing").context("no Server-Timing header")?.to_str()?.to_owned();
        let json = http_body_util::BodyExt::collect(answer.into_body()).await?.to_bytes();
        let id =
            serde_json::from_slice::<serde_json::Value>(&json)?["id"].as_str().context("no id")?.to_owned();
        for part in timing.split(',') {
            let (name, rest) = part.trim().split_once(";dur=").context("odd Server-Timing")?;
            let ms: f64 = rest.parse()?;
            if !order.iter().any(|seen| seen == name) {
                order.push(name.to_owned());
            }
            stages.entry(name.to_owned()).or_default().push(ms * 1e3);
        }
        let began = Instant::now();
        conn.exec_true(&id).await?;
        stages.entry("first_exec".to_owned()).or_default().push(began.elapsed().as_secs_f64() * 1e6);
        conn.delete(&id).await?;
        tokio::time::sleep(REST).await;
    }
    order.push("first_exec".to_owned());
    for name in order {
        if let Some(samples) = stages.get(&name) {
            samples.print(&format!("stage_{name}"), "us", None);
        }
    }
    Ok(())
}

pub(crate) async fn burst() -> Result<()> {
    const AT_ONCE: usize = 100;
    let server = Server::start(Options::default()).await?;
    let mut total = Samples::default();
    let mut lost = 0;
    for _ in 0..5 {
        server.settle().await;
        let mut conns = Vec::new();
        for _ in 0..AT_ONCE {
            conns.push(server.conn().await?);
        }
        let began = Instant::now();
        let tasks: Vec<_> = conns
            .into_iter()
            .map(|mut conn| {
                let image = server.image.clone();
                tokio::spawn(async move {
                    let id = conn.create(&image).await?;
                    conn.exec_true(&id).await?;
                    anyhow::Ok((conn, id))
                })
            })
            .collect();
        let mut made = Vec::new();
        for task in tasks {
            match task.await? {
                Ok(one) => made.push(one),
                Err(_) => lost += 1,
            }
        }
        total.push_ms(began.elapsed());
        for (mut conn, id) in made {
            conn.delete(&id).await?;
        }
    }
    for _ in 0..lost {
        total.fail();
    }
    total.print("burst_100", "ms", None);
    Ok(())
}

pub(crate) async fn sustained() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    for (workers, writing) in [(4_usize, false), (8, false), (4, true)] {
        let until = Instant::now() + Duration::from_secs(10);
        let began = Instant::now();
        let mut tasks = Vec::new();
        for _ in 0..workers {
            let mut conn = server.conn().await?;
            let image = server.image.clone();
            tasks.push(tokio::spawn(async move {
                let (mut done, mut failed) = (0_u32, 0_u32);
                while Instant::now() < until {
                    let round = async {
                        let id = conn.create(&image).await?;
                        if writing {
                            // A sandbox that has changed its files leaves more to clear away.
                            conn.exec(&id, "echo text > /file").await?;
                        } else {
                            conn.exec_true(&id).await?;
                        }
                        conn.delete(&id).await
                    };
                    match round.await {
                        Ok(()) => done += 1,
                        Err(_) => failed += 1,
                    }
                }
                (done, failed)
            }));
        }
        let what = if writing { "_writing" } else { "" };
        print_rate(&format!("sustained_{workers}_clients{what}"), began, tasks).await?;
    }
    Ok(())
}

pub(crate) async fn delete() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let mut call = Samples::default();
    let mut gone = Samples::default();
    for _ in 0..count(200) {
        let id = conn.create(&server.image).await?;
        conn.exec(&id, "sleep 1000 & sleep 1000 & true").await?;
        let inside = processes_of(&id);
        let began = Instant::now();
        conn.delete(&id).await?;
        call.push_ms(began.elapsed());
        while inside.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
            tokio::task::yield_now().await;
        }
        gone.push_ms(began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    call.print("delete_call", "ms", None);
    gone.print("delete_all_processes_gone", "ms", None);
    Ok(())
}

/// Host pids that carry the sandbox's id in their environment.
fn processes_of(id: &str) -> Vec<u32> {
    let marker = format!("OPENSANDBOX_ID={id}");
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            std::fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|environ| environ.split(|b| *b == 0).any(|var| var == marker.as_bytes()))
        })
        .collect()
}
