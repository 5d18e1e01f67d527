//! `osb image build` of Dockerfiles, by the programs that execute them. Nothing comes from the network.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::{refused, skipped, text};

const BUSYBOX: &str = "/bin/busybox";

fn context() -> Option<tempfile::TempDir> {
    if !Path::new(BUSYBOX).exists() {
        eprintln!("skipped: busybox-static is not installed");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("context")).unwrap();
    std::fs::copy(BUSYBOX, dir.path().join("context/busybox")).unwrap();
    Some(dir)
}

fn osb(dir: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_osb"))
        .current_dir(dir)
        .arg("image")
        .args(arguments)
        .args(["--data-dir", "data"])
        .envs(environment.iter().copied())
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn inspect(dir: &Path, name: &str) -> Value {
    serde_json::from_str(&text(&osb(dir, &["inspect", name, "-o", "json"], &[]))).unwrap()
}

/// Content of a file in any stored layer.
fn file(dir: &Path, name: &str) -> Option<String> {
    let layers = std::fs::read_dir(dir.join("data/images/layers")).unwrap();
    layers.map(|layer| layer.unwrap().path().join(name)).find_map(|path| std::fs::read_to_string(path).ok())
}

#[test]
fn buildah_executes_a_dockerfile() {
    if skipped(&["buildah"]) {
        return;
    }
    let Some(dir) = context() else { return };
    let dir = dir.path();
    let storage = format!(
        "[storage]\ndriver = \"vfs\"\ngraphroot = {:?}\nrunroot = {:?}\n",
        dir.join("graph"),
        dir.join("run")
    );
    std::fs::write(dir.join("storage.conf"), storage).unwrap();
    let storage = dir.join("storage.conf");
    let environment = [
        ("CONTAINERS_STORAGE_CONF", storage.to_str().unwrap()),
        // Runs within containers too.
        ("BUILDAH_ISOLATION", "chroot"),
    ];
    std::fs::write(
        dir.join("context/Dockerfile"),
        "FROM scratch AS base\nCOPY busybox /bin/busybox\nCOPY busybox /bin/sh\nENV A=1\n\
         FROM base AS made\nARG V=0\nRUN echo made-$V > /made\nWORKDIR /srv\nCMD [\"/bin/sh\"]\n\
         FROM base AS other\nRUN exit 3\n",
    )
    .unwrap();
    let build = |arguments: &[&str]| {
        osb(dir, &[&["build", "context", "-o", "raw"], arguments].concat(), &environment)
    };
    let built = build(&["-t", "app:1", "--target", "made", "--build-arg", "V=7", "-e", "B=2"]);
    assert_eq!(text(&built), "docker.io/library/app:1\n", "the builder's messages are no answer");
    assert_eq!(file(dir, "made").as_deref(), Some("made-7\n"));
    let config = inspect(dir, "app:1")["config"].clone();
    assert_eq!(
        config["env"].as_array().unwrap()[config["env"].as_array().unwrap().len() - 2..],
        [json!(["A", "1"]), json!(["B", "2"])]
    );
    assert_eq!((&config["workdir"], &config["cmd"]), (&json!("/srv"), &json!(["/bin/sh"])));
    // A step that fails, and the one after the target that was not executed.
    let message = refused(&build(&["-t", "app:2"]), 1);
    assert!(message.contains("buildah failed") && message.contains("exit status"), "{message}");
    refused(&osb(dir, &["inspect", "app:2"], &[]), 1);
    assert_eq!(std::fs::read_dir(dir.join("data/images/tmp")).unwrap().count(), 0);
    // Under the builder's own name nothing is left.
    let images = Command::new("buildah").arg("images").envs(environment).output().unwrap();
    assert!(!String::from_utf8_lossy(&images.stdout).contains("osb-build"), "{images:?}");
    // buildah's own way of unmounting; vfs has no mounts, but its lock directory has.
    let _ = Command::new("buildah").args(["rmi", "--all", "--force"]).envs(environment).output();
}

/// A daemon of our own; it ends with its value.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.0.wait();
    }
}

fn dockerd(dir: &Path) -> Option<(Daemon, String)> {
    let socket = dir.join("docker.sock");
    let host = format!("unix://{}", socket.display());
    let log = std::fs::File::create(dir.join("dockerd.log")).unwrap();
    let mut daemon = Command::new("dockerd")
        .args(["--host", &host, "--storage-driver", "vfs", "--bridge", "none"])
        .args(["--iptables=false", "--ip6tables=false"])
        .args(["--data-root".as_ref(), dir.join("docker").as_os_str()])
        .args(["--exec-root".as_ref(), dir.join("exec").as_os_str()])
        .args(["--pidfile".as_ref(), dir.join("pid").as_os_str()])
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    for _ in 0..300 {
        if daemon.try_wait().unwrap().is_some() {
            break;
        }
        let answers = Command::new("docker").args(["--host", &host, "info"]).output().unwrap();
        if answers.status.success() {
            return Some((Daemon(daemon), host));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let log = std::fs::read_to_string(dir.join("dockerd.log")).unwrap();
    eprintln!("skipped: dockerd does not run here: {}", log.lines().last().unwrap_or_default());
    drop(Daemon(daemon));
    None
}

#[test]
fn docker_executes_a_dockerfile() {
    if skipped(&["docker", "dockerd"]) {
        return;
    }
    let Some(dir) = context() else { return };
    let dir = dir.path();
    let Some((_daemon, host)) = dockerd(dir) else { return };
    // buildah would be taken before it.
    let docker = std::env::split_paths(&std::env::var_os("PATH").unwrap())
        .map(|path| path.join("docker"))
        .find(|path| path.exists())
        .unwrap();
    std::fs::create_dir(dir.join("path")).unwrap();
    std::os::unix::fs::symlink(docker, dir.join("path/docker")).unwrap();
    let path = dir.join("path");
    let environment = [("DOCKER_HOST", host.as_str()), ("PATH", path.to_str().unwrap())];
    let recipe =
        "FROM scratch\nARG V=0\nCOPY busybox /bin/busybox\nENV A=$V\nLABEL k=v\nCMD [\"/bin/busybox\"]\n";
    std::fs::write(dir.join("recipe"), recipe).unwrap();
    let build = |name: &str| {
        let arguments = ["build", "context", "-f", "recipe", "-t", name, "--build-arg", "V=7", "-o", "raw"];
        osb(dir, &arguments, &environment)
    };
    assert_eq!(text(&build("app:1")), "docker.io/library/app:1\n");
    let config = inspect(dir, "app:1")["config"].clone();
    assert!(config["env"].as_array().unwrap().contains(&json!(["A", "7"])), "{config}");
    assert_eq!((&config["labels"]["k"], &config["cmd"]), (&json!("v"), &json!(["/bin/busybox"])));
    std::fs::write(dir.join("recipe"), "FROM scratch\nCOPY absent /x\n").unwrap();
    let message = refused(&build("app:2"), 1);
    assert!(message.contains("docker failed"), "{message}");
    let images = Command::new("docker").args(["--host", &host, "images"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&images.stdout).contains("osb-build"), "{images:?}");
}
