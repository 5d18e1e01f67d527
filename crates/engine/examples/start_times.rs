//! Measures the engine's part of a sandbox's life: `start_times EXECD [IMAGE-NAME]`, as root.
//!
//! Prints medians and tails of create (to the entrypoint's exec) with a prepared pool, where the time goes, how long
//! 100 creates at once take, and how many create + delete pairs a second go.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use osb_engine::image::Image;
use osb_engine::net::{Mode, NetConfig};
use osb_engine::{CreateParams, Engine, EngineConfig, ExecdSource};
use osb_protocol::boot::LineEndings;

const ROUNDS: usize = 1000;
const AT_ONCE: usize = 100;
const READY: usize = 128;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let Some(code) = args.get(1).and_then(|role| osb_engine::helper_main(role)) {
        return code;
    }
    let Some(execd) = args.get(1) else {
        eprint("usage: start_times EXECD [IMAGE]");
        return ExitCode::FAILURE;
    };
    let image = args.get(2).map_or("host", String::as_str);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(measure(execd, image)),
        Err(error) => Err(error.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprint(&error);
            ExitCode::FAILURE
        }
    }
}

#[allow(clippy::print_stderr)]
fn eprint(text: &str) {
    eprintln!("{text}");
}

#[allow(clippy::print_stdout)]
fn print(text: &str) {
    println!("{text}");
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

async fn measure(execd: &str, name: &str) -> Result<(), String> {
    let dir = std::env::temp_dir().join(format!("osb-start-times-{}", std::process::id()));
    let mut config = EngineConfig::new(&dir, ExecdSource::Path(execd.into()));
    config.ready_slots = READY;
    let mode = if std::env::var_os("NO_NETWORK").is_some() { Mode::None } else { Mode::Internet };
    config.network = NetConfig { mode, ..NetConfig::default() };
    let begin = Instant::now();
    let engine = Engine::start(config).map_err(text)?;
    engine.adopt(Vec::new()).await.map_err(text)?;
    print(&format!("start {} ms", begin.elapsed().as_millis()));
    let result = run(&engine, name).await;
    for id in engine.running() {
        engine.delete(id);
    }
    engine.shutdown().await;
    std::fs::remove_dir_all(&dir).map_err(text)?;
    result
}

async fn run(engine: &Engine, name: &str) -> Result<(), String> {
    let image = engine.images().inspect(name).map_err(text)?;
    engine.expect_image(&image);
    let begin = Instant::now();
    full(engine, &image).await;
    print(&format!("{READY} prepared in {} ms", begin.elapsed().as_millis()));

    // One at a time, with nothing else to do; then one after the other, while the pool is being filled.
    for (title, pace) in [("paced", 1), ("in turn", READY / 2)] {
        let mut totals = Vec::new();
        let mut stages: Vec<(&'static str, Vec<u32>)> = Vec::new();
        let rounds = if pace == 1 { ROUNDS / 3 } else { ROUNDS };
        while totals.len() < rounds {
            for _ in 0..pace {
                let begin = Instant::now();
                let created = engine.create(request(&image)).await.map_err(text)?;
                totals.push(u32::try_from(begin.elapsed().as_micros()).unwrap_or(u32::MAX));
                for (i, (stage, micros)) in created.stages.into_iter().enumerate() {
                    if stages.len() <= i {
                        stages.push((stage, Vec::new()));
                    }
                    stages[i].1.push(micros);
                }
                engine.delete(created.id);
            }
            engine.settled().await;
            full(engine, &image).await;
        }
        table(title, stages, totals);
    }

    for _ in 0..3 {
        full(engine, &image).await;
        let begin = Instant::now();
        let creates: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                let (engine, request) = (engine.clone(), request(&image));
                tokio::spawn(async move { engine.create(request).await })
            })
            .collect();
        let mut ids = Vec::new();
        for create in creates {
            ids.push(create.await.map_err(text)?.map_err(text)?.id);
        }
        let made = begin.elapsed();
        let begin = Instant::now();
        for id in ids {
            engine.delete(id);
        }
        let called = begin.elapsed();
        engine.settled().await;
        print(&format!(
            "{AT_ONCE} at once: made {:.1} ms, deletes called {:.1} ms, all gone {:.1} ms",
            made.as_secs_f64() * 1e3,
            called.as_secs_f64() * 1e3,
            begin.elapsed().as_secs_f64() * 1e3
        ));
    }

    let begin = Instant::now();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let (engine, image) = (engine.clone(), Arc::clone(&image));
            tokio::spawn(async move {
                for _ in 0..ROUNDS / 4 {
                    let created = engine.create(request(&image)).await.map_err(text)?;
                    engine.delete(created.id);
                }
                Ok::<_, String>(())
            })
        })
        .collect();
    for worker in workers {
        worker.await.map_err(text)??;
    }
    engine.settled().await;
    print(&format!("create + delete by 4: {:.0} per second", ROUNDS as f64 / begin.elapsed().as_secs_f64()));
    Ok(())
}

fn table(title: &str, mut stages: Vec<(&'static str, Vec<u32>)>, totals: Vec<u32>) {
    print(&format!("{title:<10}{:>8}{:>8}{:>8}   µs", "p50", "p90", "p99"));
    stages.push(("call", totals));
    for (stage, mut values) in stages {
        values.sort_unstable();
        let at = |share: usize| values[(values.len() * share / 100).min(values.len() - 1)];
        print(&format!("{stage:<10}{:>8}{:>8}{:>8}", at(50), at(90), at(99)));
    }
}

async fn full(engine: &Engine, image: &Image) {
    while engine.ready_slots(&image.id) < READY {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

fn request(image: &Arc<Image>) -> CreateParams {
    CreateParams {
        id: None,
        image: Arc::clone(image),
        entrypoint: vec!["sleep".to_owned(), "3600".to_owned()],
        env: vec![("PATH".to_owned(), "/usr/bin:/bin".to_owned())],
        limits: None,
        line_endings: LineEndings::Keep,
        access_token: None,
        lifecycle: None,
    }
}
