//! `osb image pull`, from Debian's `docker-registry`.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::{refused, skipped, text};

const PASSWORD: &str = "hunter2-secret";
/// Of that password, as `htpasswd -B` makes it.
const ACCOUNT: &str = "me:$2b$04$PslHzBRVOm/ypRTs7jPx5eE/H39CWiOz8SsjyMWp1ZYLTuSlejMZC\n";

/// A running registry; it ends with its value.
struct Registry {
    child: Child,
    dir: tempfile::TempDir,
    host: String,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    fn start(with_account: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("htpasswd"), ACCOUNT).unwrap();
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let host = format!("127.0.0.1:{port}");
            let mut config = json!({
                "version": "0.1",
                "storage": {"filesystem": {"rootdirectory": dir.path().join("data")}},
                "http": {"addr": host},
            });
            if with_account {
                config["auth"] = json!({"htpasswd": {"realm": "x", "path": dir.path().join("htpasswd")}});
            }
            let path = dir.path().join("config.yml");
            // JSON is YAML.
            std::fs::write(&path, config.to_string()).unwrap();
            let log = std::fs::File::create(dir.path().join("log")).unwrap();
            let mut command = Command::new("docker-registry");
            command.arg("serve").arg(&path).stdout(log.try_clone().unwrap()).stderr(log);
            let mut child = command.spawn().unwrap();
            for _ in 0..200 {
                if child.try_wait().unwrap().is_some() {
                    break;
                }
                if TcpStream::connect(&host).is_ok() {
                    return Self { child, dir, host };
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("docker-registry does not start");
    }

    /// Pushes an image of these layers, each with one file of that content.
    fn push(&self, name: &str, layers: &[&[u8]]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let digests = layout(dir.path(), layers);
        let status = Command::new("skopeo")
            .args(["copy", "-q", "--insecure-policy", "--preserve-digests", "--dest-tls-verify=false"])
            .arg(format!("--dest-creds=me:{PASSWORD}"))
            .arg(format!("oci:{}", dir.path().display()))
            .arg(format!("docker://{}/{name}", self.host))
            .status()
            .unwrap();
        assert!(status.success());
        digests
    }

    /// The file in which the registry keeps a blob.
    fn blob(&self, digest: &str) -> PathBuf {
        let hex = digest.strip_prefix("sha256:").unwrap();
        let blobs = self.dir.path().join("data/docker/registry/v2/blobs/sha256");
        blobs.join(&hex[..2]).join(hex).join("data")
    }

    /// Blobs that were sent so far.
    fn sent(&self) -> usize {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap();
        log.lines().filter(|line| line.contains("\"GET /v2/") && line.contains("/blobs/")).count()
    }
}

/// Writes an OCI layout; answers the digests of its layers.
fn layout(dir: &Path, layers: &[&[u8]]) -> Vec<String> {
    let blobs = dir.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |kind: &str, data: &[u8]| {
        let hex: String = Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect();
        std::fs::write(blobs.join(&hex), data).unwrap();
        json!({
            "mediaType": format!("application/vnd.oci.image.{kind}"),
            "digest": format!("sha256:{hex}"), "size": data.len(),
        })
    };
    let layers: Vec<_> = layers
        .iter()
        .map(|content| {
            let mut builder = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, format!("file-{}", content.len()), *content).unwrap();
            put("layer.v1.tar", &builder.into_inner().unwrap())
        })
        .collect();
    let digests: Vec<_> = layers.iter().map(|layer| layer["digest"].as_str().unwrap().to_owned()).collect();
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = json!({
        "os": "linux", "architecture": architecture, "config": {"Env": ["A=1"]},
        "rootfs": {"type": "layers", "diff_ids": digests},
    });
    let config = put("config.v1+json", config.to_string().as_bytes());
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": layers,
    });
    let manifest = put("manifest.v1+json", manifest.to_string().as_bytes());
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    std::fs::write(dir.join("index.json"), index.to_string()).unwrap();
    std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
    digests
}

/// The machine whose images they are.
struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    fn new(hosts: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = format!("[embedded]\ndata_dir = {:?}\n", dir.path().join("data"));
        for host in hosts {
            config += &format!("[embedded.registries.\"{host}\"]\nplain_http = true\n");
        }
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        Self { dir }
    }

    fn osb(&self, arguments: &[&str], input: &str) -> Output {
        let mut child = Command::new(env!("CARGO_BIN_EXE_osb"))
            .arg("image")
            .args(arguments)
            .arg("--config")
            .arg(self.dir.path().join("config.toml"))
            .env("DOCKER_CONFIG", self.dir.path())
            .env("NO_COLOR", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // One that is refused at once reads nothing.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    fn pull(&self, reference: &str) -> Output {
        self.osb(&["pull", reference, "-o", "raw"], "")
    }

    /// Everything of images that is on the disk, but what has been downloaded.
    fn stored(&self) -> Vec<String> {
        let names = |dir: &str| {
            let dir = self.dir.path().join("data/images").join(dir);
            std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap())
        };
        names("layers").chain(names("tmp")).collect()
    }
}

#[test]
fn a_pull_stores_the_image_and_is_quiet_where_nobody_looks() {
    if skipped(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = Registry::start(false);
    let machine = Machine::new(&[&registry.host]);
    let reference = format!("{}/team/app:1", registry.host);
    registry.push("team/app:1", &[b"base", &[7; 3 << 20]]);
    let pulled = machine.pull(&reference);
    assert_eq!(text(&pulled), format!("{reference}\n"));
    assert_eq!(String::from_utf8_lossy(&pulled.stderr), "", "no progress off a terminal");
    assert_eq!(machine.stored().len(), 2);
    let json = text(&machine.osb(&["inspect", &reference, "-o", "json"], ""));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["config"]["env"], json!([["A", "1"]]));

    // Of another image only what is new travels: one layer and the configuration.
    let before = registry.sent();
    registry.push("team/app:2", &[b"base", b"more"]);
    let pushed = registry.sent();
    text(&machine.pull(&format!("{}/team/app:2", registry.host)));
    assert_eq!((pushed - before, registry.sent() - pushed), (0, 2));
    // A tag that has moved stands for the new image afterwards.
    registry.push("team/app:1", &[b"base", b"moved"]);
    text(&machine.pull(&reference));
    let again = text(&machine.osb(&["inspect", &reference, "-o", "json"], ""));
    assert_ne!(serde_json::from_str::<serde_json::Value>(&again).unwrap()["id"], json["id"]);
}

#[test]
fn a_pull_that_fails_says_why_and_leaves_nothing() {
    if skipped(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = Registry::start(false);
    let host = &registry.host;
    let machine = Machine::new(&[host, "127.0.0.1:1"]);
    let layers = registry.push("app:1", &[b"base", b"spoiled"]);
    let fails = |reference: &str, words: &[&str]| {
        let message = refused(&machine.pull(reference), 1);
        assert!(message.starts_with("error: ") && message.lines().count() == 1, "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert_eq!(machine.stored(), [""; 0]);
    };
    fails(&format!("{host}/app:2"), &["was not found", &format!("{host}/app:2"), "check name and tag"]);
    fails(&format!("{host}/nowhere:1"), &["was not found", host]);
    fails("127.0.0.1:1/app:1", &["127.0.0.1:1 is not available"]);
    fails("host", &["host is built in"]);
    fails("host:latest", &["host:latest is built in"]);
    fails("Not/A Name", &["invalid image name"]);

    let blob = registry.blob(&layers[1]);
    let whole = std::fs::read(&blob).unwrap();
    let mut spoiled = whole.clone();
    spoiled[600] ^= 1;
    std::fs::write(&blob, spoiled).unwrap();
    fails(&format!("{host}/app:1"), &["has digest", &layers[1], host]);
    std::fs::write(&blob, &whole[..700]).unwrap();
    fails(&format!("{host}/app:1"), &[&layers[1][..19], host, "700"]);
    std::fs::remove_file(&blob).unwrap();
    fails(&format!("{host}/app:1"), &[&format!("not its part {}", layers[1]), "push the image again"]);
    // What was whole is there for the next attempt.
    std::fs::write(&blob, whole).unwrap();
    text(&machine.pull(&format!("{host}/app:1")));
}

#[test]
fn accounts_are_given_by_name_and_standard_input() {
    if skipped(&["docker-registry", "skopeo"]) {
        return;
    }
    let registry = Registry::start(true);
    let machine = Machine::new(&[&registry.host]);
    registry.push("closed:1", &[b"base"]);
    let reference = format!("{}/closed:1", registry.host);
    let message = refused(&machine.pull(&reference), 1);
    assert!(message.contains("refuses access without credentials"), "{message}");
    let pull = |password: &str| {
        machine.osb(&["pull", &reference, "-u", "me", "--password-stdin", "-o", "raw"], password)
    };
    let message = refused(&pull("wrong-hunter3\n"), 1);
    assert!(message.contains("refuses the credentials of the request"), "{message}");
    assert!(!message.contains("hunter"), "{message}");
    assert!(refused(&pull(""), 1).contains("no password on standard input"));
    assert!(refused(&machine.osb(&["pull", &reference, "-u", "me"], ""), 2).contains("--password-stdin"));
    assert_eq!(machine.stored(), [""; 0]);
    assert_eq!(text(&pull(&format!("{PASSWORD}\n"))), format!("{reference}\n"));
    // It is kept nowhere.
    let found = Command::new("grep").args(["-rl", "hunter2"]).arg(machine.dir.path()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
}
