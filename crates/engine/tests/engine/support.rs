//! What all tests use.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use osb_engine::image::{Config, Image, Root};
use osb_engine::net::{Mode, NetConfig};
use osb_engine::{CreateParams, Engine, EngineConfig, Event, ExecdSource};
use osb_protocol::boot::LineEndings;
use osb_protocol::ids::SandboxId;
use tokio::sync::mpsc;

pub(crate) const SELF: &str = "/opt/opensandbox/execd";

/// An engine of its own, taken down at the end.
pub(crate) struct Bed {
    pub(crate) engine: Engine,
    pub(crate) events: mpsc::UnboundedReceiver<Event>,
    pub(crate) dir: tempfile::TempDir,
}

pub(crate) fn config(dir: &Path) -> EngineConfig {
    let mut config = EngineConfig::new(dir.join("data"), ExecdSource::Path("/proc/self/exe".into()));
    config.ready_slots = 4;
    config.network = NetConfig { mode: Mode::None, ..NetConfig::default() };
    config
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Runs a test with an engine, and checks that nothing is left of it afterwards.
pub(crate) fn with_engine<F: Future<Output = Bed>>(
    adjust: impl FnOnce(&mut EngineConfig),
    test: impl FnOnce(Bed) -> F,
) {
    runtime().block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(dir.path());
        adjust(&mut config);
        let engine = Engine::start(config).unwrap();
        let events = engine.events().unwrap();
        assert_eq!(engine.adopt(Vec::new()).await.unwrap(), []);
        let bed = test(Bed { engine, events, dir }).await;
        let instance = bed.engine.instance().to_owned();
        for id in bed.engine.running() {
            bed.engine.delete(id);
        }
        bed.engine.shutdown().await;
        assert_eq!(traces(&instance), Vec::<String>::new());
    });
}

/// Everything on the host that carries an instance's name.
pub(crate) fn traces(instance: &str) -> Vec<String> {
    let name = format!("opensandbox-{instance}");
    let mut found = Vec::new();
    found.extend(groups(&name).iter().map(|dir| dir.display().to_string()));
    let links = std::fs::read_to_string("/proc/net/dev").unwrap();
    found.extend(links.lines().filter(|line| line.contains(instance)).map(str::to_owned));
    found.extend(processes(&name).into_iter().map(|pid| format!("process {pid}")));
    let run_dir = std::path::PathBuf::from(format!("/run/{name}"));
    if run_dir.exists() {
        found.push(run_dir.display().to_string());
    }
    found
}

/// Directories of this name in the host's cgroup hierarchies: each has its own, or one is all there is.
pub(crate) fn groups(name: &str) -> Vec<PathBuf> {
    let top = Path::new("/sys/fs/cgroup");
    let below = std::fs::read_dir(top).unwrap().flatten().map(|entry| entry.path());
    std::iter::once(top.to_owned())
        .chain(below)
        .map(|hierarchy| hierarchy.join(name))
        .filter(|dir| dir.exists())
        .collect()
}

/// Processes in a cgroup of this name.
pub(crate) fn processes(name: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = |file: &str| std::fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        // A dead process shows its group until its parent, the host's init perhaps, has waited for it.
        let dead = read("stat").rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']));
        if !dead && read("cgroup").contains(name) {
            found.push(pid);
        }
    }
    found
}

/// An image with nothing in it: the base layer brings this program.
pub(crate) fn empty_image() -> Arc<Image> {
    image_of("empty", Vec::new())
}

pub(crate) fn image_of(id: &str, lowers: Vec<PathBuf>) -> Arc<Image> {
    Arc::new(Image {
        reference: id.to_owned(),
        id: id.to_owned(),
        config: Config::default(),
        roots: vec![Root { mountpoint: "/".to_owned(), lowers }],
        size_bytes: 0,
        created: None,
    })
}

pub(crate) fn params(image: &Arc<Image>, entrypoint: &[&str]) -> CreateParams {
    CreateParams {
        id: None,
        image: Arc::clone(image),
        entrypoint: entrypoint.iter().map(|word| (*word).to_owned()).collect(),
        env: vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())],
        limits: None,
        line_endings: LineEndings::Keep,
        access_token: None,
        lifecycle: None,
    }
}

/// A sandbox that runs one of [`crate::inside`]'s programs.
pub(crate) fn inside(image: &Arc<Image>, args: &[&str]) -> CreateParams {
    params(image, &[&[SELF, "__inside"], args].concat())
}

impl Bed {
    /// Processes of sandboxes that were asked for.
    pub(crate) fn in_sandboxes(&self) -> Vec<u32> {
        let mut found = processes(&format!("opensandbox-{}", self.engine.instance()));
        let standbys = self.engine.standby_pids();
        found.retain(|pid| !standbys.contains(&pid.cast_signed()));
        found
    }

    /// Waits for a sandbox's end; the exit code and the log.
    pub(crate) async fn end_of(&mut self, id: SandboxId) -> (osb_engine::Ended, String) {
        loop {
            let event = tokio::time::timeout(Duration::from_secs(20), self.events.recv()).await.unwrap();
            let Event::Ended { id: ended_id, ended } = event.unwrap();
            if ended_id == id {
                return (ended, self.log(id));
            }
        }
    }

    pub(crate) fn log(&self, id: SandboxId) -> String {
        String::from_utf8_lossy(&self.engine.log(id, 1 << 20).unwrap()).into_owned()
    }

    /// Runs something to its end.
    pub(crate) async fn run(&mut self, params: CreateParams) -> (osb_engine::Ended, String) {
        let created = self.engine.create(params).await.unwrap();
        let end = self.end_of(created.id).await;
        self.engine.delete(created.id);
        end
    }
}

/// Waits for a state, at most ten seconds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(10), "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
