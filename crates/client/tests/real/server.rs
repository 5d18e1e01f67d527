//! A server of the tests' own, shared by those that run at the same time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::{Duration, Instant};

use opensandbox::{Client, Config, Sandbox};

const KEY: &str = "test-key";

/// A running `osb server` with its data below a directory of its own. Stopped and cleared away when dropped.
pub struct Server {
    child: Child,
    dir: tempfile::TempDir,
    binary: PathBuf,
    port: u16,
}

static RUNNING: Mutex<Weak<Server>> = Mutex::new(Weak::new());

/// The server; `None`, said aloud, where one cannot run.
pub fn server() -> Option<Arc<Server>> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: sandboxes need root");
        return None;
    }
    let mut running = RUNNING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(server) = running.upgrade() {
        return Some(server);
    }
    let server = Arc::new(Server::start(&binary()));
    *running = Arc::downgrade(&server);
    Some(server)
}

/// The program named by `OSB_BIN`, else the one of this source, which is built with its daemon beside it.
fn binary() -> PathBuf {
    static BUILT: LazyLock<PathBuf> = LazyLock::new(|| {
        let build = Command::new(env!("CARGO"))
            .args(["build", "-q", "-p", "osb", "-p", "osb-execd"])
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
            .status();
        assert!(build.unwrap().success(), "osb cannot be built");
        let test = std::env::current_exe().unwrap();
        test.parent().unwrap().with_file_name("osb")
    });
    std::env::var_os("OSB_BIN").map_or_else(|| BUILT.clone(), PathBuf::from)
}

impl Server {
    fn start(binary: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "[server]\nhost = \"127.0.0.1\"\nport = {port}\napi_key = \"{KEY}\"\n\n[runtime]\n\
             type = \"embedded\"\n\n[embedded]\ndata_dir = \"{}\"\n",
            dir.path().join("data").display()
        );
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        let child = Command::new(binary)
            .arg("server")
            .arg("--config")
            .arg(dir.path().join("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", binary.display()));
        let mut server = Self { child, dir, binary: binary.to_path_buf(), port };
        let end = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < end, "no server, {ended:?}: {}", server.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Settings to reach it.
    pub fn config(&self) -> Config {
        let mut config = Config::new(&format!("127.0.0.1:{}", self.port)).unwrap();
        config.api_key = Some(KEY.to_owned());
        config
    }

    /// A client of it.
    pub fn client(&self) -> Client {
        Client::new(self.config()).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let id = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
        let _ = self.child.wait();
        let _ = Command::new(&self.binary)
            .arg("server")
            .arg("--config")
            .arg(self.dir.path().join("config.toml"))
            .arg("--purge")
            .output();
    }
}

/// A sandbox for one test, deleted when the test ends, well or not.
pub struct Guarded {
    pub sandbox: Sandbox,
    server: Arc<Server>,
}

impl Guarded {
    /// Makes one from the host's own file system.
    pub async fn start() -> Option<Self> {
        let server = server()?;
        let sandbox = server.client().create("host").send().await.unwrap();
        Some(Self { sandbox, server })
    }

    pub fn client(&self) -> Client {
        self.server.client()
    }
}

impl std::ops::Deref for Guarded {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.sandbox
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let (client, id) = (self.server.client(), self.sandbox.id().to_owned());
        // The test's runtime may be ending.
        let done = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let _ = runtime.block_on(client.sandbox(id).kill());
        });
        let _ = done.join();
    }
}
