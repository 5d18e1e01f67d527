//! The command line as a person meets it, and the first sandbox of an image that has to be fetched.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::count;
use super::create::{docker_run, median_of};
use crate::server::{Options, Server, binary};
use crate::stats::Samples;

/// Starts of `osb` that need no server, and a whole `osb run host -- true`.
pub(crate) async fn starts() -> Result<()> {
    let osb = binary()?;
    for (name, args) in [("cli_version", &["--version"][..]), ("cli_help", &["sandbox", "create", "--help"])]
    {
        let mut samples = Samples::default();
        for _ in 0..count(100) {
            samples.push_or_fail(timed(Command::new(&osb).args(args)));
        }
        let bare = median_of(count(100), || Command::new("/bin/true"));
        samples.print(name, "ms", Some(("/bin/true", bare)));
    }
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut samples = Samples::default();
    for _ in 0..count(100) {
        let mut command = Command::new(&osb);
        command.env("OPEN_SANDBOX_DOMAIN", server.host()).env("OPEN_SANDBOX_API_KEY", crate::server::KEY);
        samples.push_or_fail(timed(command.args(["run", "host", "--", "true"])));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    samples.print("cli_run_host", "ms", Some(("docker run --rm", docker_run())));
    Ok(())
}

/// Create to running of an image in a registry on loopback, against fetching the bytes and loading them apart.
pub(crate) async fn first_of_image() -> Result<()> {
    let image = super::unpack::archive()?;
    let work = image.with_extension(format!("pull-{}", std::process::id()));
    std::fs::create_dir_all(&work)?;
    let result = pulled(&image, &work).await;
    let _ = std::fs::remove_dir_all(&work);
    result
}

async fn pulled(image: &Path, work: &Path) -> Result<()> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let _registry = Registry::start(port, work)?;
    let address = format!("127.0.0.1:{port}");
    let target = format!("docker://{address}/bench:latest");
    let pushed = Command::new("skopeo")
        .args(["--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"])
        .arg(format!("oci-archive:{}", image.display()))
        .arg(&target)
        .status();
    if !pushed.context("skopeo, which pushes the image, does not run")?.success() {
        bail!("skopeo could not push the image");
    }
    let (mut whole, mut apart) = (Samples::default(), Samples::default());
    for round in 0..count(3) {
        // Files stay to the end of all, see `unpack::sync`.
        super::unpack::sync();
        let fetched = work.join(format!("fetched-{round}"));
        let copy = timed(
            Command::new("skopeo")
                .args(["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false", &target])
                .arg(format!("oci:{}:bench", fetched.display())),
        );
        let load = timed(
            Command::new(binary()?)
                .args(["image", "load", "--name", "bench", "--data-dir"])
                .arg(work.join(format!("data-{round}")))
                .arg(&fetched),
        );
        apart.push_or_fail(copy.and_then(|copy| Ok(copy + load?)));
        let options = Options {
            plain_registry: Some(address.clone()),
            data_dir: Some(work.join(format!("pulled-{round}"))),
        };
        let server = Server::start(options).await?;
        server.settle().await;
        let mut conn = server.conn().await?;
        super::unpack::sync();
        let began = Instant::now();
        let made = async {
            let id = conn.create(&format!("{address}/bench:latest")).await?;
            conn.exec_true(&id).await
        };
        match made.await {
            Ok(()) => whole.push_ms(began.elapsed()),
            Err(_) => whole.fail(),
        }
    }
    whole.print("first_of_image", "ms", Some(("skopeo copy, then osb image load", apart.p50())));
    Ok(())
}

fn timed(command: &mut Command) -> Result<Duration> {
    let began = Instant::now();
    let status =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().context("start")?;
    if status.success() { Ok(began.elapsed()) } else { bail!("{status}") }
}

/// Debian's registry, gone when this is dropped.
struct Registry(Child);

impl Registry {
    fn start(port: u16, work: &Path) -> Result<Self> {
        let config = work.join("registry.yml");
        std::fs::write(
            &config,
            format!(
                "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: \"127.0.0.1:{port}\"}}\n",
                work.join("registry").display()
            ),
        )?;
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("docker-registry (Debian's package of that name) does not start")?;
        let registry = Self(child);
        for _ in 0..100 {
            if std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Ok(registry);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("docker-registry does not answer")
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
