//! `osb image` as a process: what is printed, what is refused, and how it ends.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod build;
mod pull;

use std::path::Path;
use std::process::{Command, Output, Stdio};

fn osb(data: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_osb"));
    command.arg("image").args(arguments).args(["--data-dir".as_ref(), data.as_os_str()]);
    command.env("NO_COLOR", "1").stdin(Stdio::null()).output().unwrap()
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output, code: i32) -> String {
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{message}");
    message
}

/// Whether the test cannot run here, and says so.
fn skipped(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |program: &str| std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    let missing: Vec<_> = programs.iter().copied().filter(|program| !found(program)).collect();
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return true;
    }
    if !missing.is_empty() {
        eprintln!("skipped: {} not installed", missing.join(" and "));
    }
    !missing.is_empty()
}

#[test]
fn the_life_of_an_image() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("etc")).unwrap();
    std::fs::write(root.join("etc/name"), "hello").unwrap();
    let path = root.to_str().unwrap();
    let build = ["build", path, "-t", "base:1", "-e", "A=1", "-w", "/srv", "--cmd", r#"["sh", "-c", "a b"]"#];
    let options = ["--expose", "80", "--volume", "/data", "-l", "k=v", "--stop-signal", "INT", "-u", "1000"];
    assert_eq!(
        text(&osb(&data, &[&build[..], &options, &["-o", "raw"]].concat())),
        "docker.io/library/base:1\n"
    );
    let json: serde_json::Value =
        serde_json::from_str(&text(&osb(&data, &["inspect", "base:1", "-o", "json"]))).unwrap();
    assert_eq!(
        json["config"],
        serde_json::json!({
            "env": [["A", "1"]], "workdir": "/srv", "user": "1000", "entrypoint": [], "cmd": ["sh", "-c", "a b"],
            "labels": {"k": "v"}, "exposed_ports": ["80/tcp"], "volumes": ["/data"], "stop_signal": "SIGINT",
            "os": "linux", "architecture": json["config"]["architecture"],
        })
    );
    let table = text(&osb(&data, &["list"]));
    assert!(table.starts_with("NAME ") && table.contains("docker.io/library/base:1"), "{table}");
    assert!(text(&osb(&data, &["list", "-o", "yaml"])).contains("name: docker.io/library/base:1"));
    assert!(refused(&osb(&data, &["inspect", "bsae:1"]), 1).contains("did you mean base:1?"));
    assert!(refused(&osb(&data, &["rm", "host"]), 1).contains("built-in"));

    text(&osb(&data, &["alias", "code", "base:1"]));
    assert!(text(&osb(&data, &["inspect", "code"])).contains("docker.io/library/code:latest"));
    assert!(refused(&osb(&data, &["rm", "code"]), 1).contains("alias --rm"));
    text(&osb(&data, &["alias", "--rm", "code"]));
    refused(&osb(&data, &["alias", "code"]), 2);

    let pretended = text(&osb(&data, &["prune", "--all", "--dry-run"]));
    assert!(pretended.contains("would remove docker.io/library/base:1"), "{pretended}");
    assert!(text(&osb(&data, &["prune", "--until", "1h"])).contains("freed 0 B"));
    assert!(refused(&osb(&data, &["prune", "--until", "soon"]), 2).contains("7d"));
    let removed: serde_json::Value =
        serde_json::from_str(&text(&osb(&data, &["rm", "base:1", "-o", "json"]))).unwrap();
    assert_eq!((removed["layers"].as_u64(), removed["bytes"].as_u64()), (Some(1), Some(5)));
    assert_eq!(text(&osb(&data, &["list", "-o", "raw"])), "host\n");

    // Through a pipe.
    let mut tar =
        Command::new("tar").args(["-C", path, "-cf", "-", "."]).stdout(Stdio::piped()).spawn().unwrap();
    let loaded = Command::new(env!("CARGO_BIN_EXE_osb"))
        .args(["image", "load", "-", "--name", "piped", "-o", "raw", "--data-dir"])
        .arg(&data)
        .stdin(tar.stdout.take().unwrap())
        .output()
        .unwrap();
    assert_eq!(text(&loaded), "docker.io/library/piped:latest\n");
    assert!(tar.wait().unwrap().success());
}

#[test]
fn a_dockerfile_needs_somebody_to_execute_it() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("Dockerfile"), "FROM scratch\n").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_osb"))
        .args(["image", "build", "-t", "a", "--data-dir"])
        .args([&dir.path().join("data"), dir.path()])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    let message = refused(&output, 1);
    assert!(message.contains("buildah") && message.contains("docker"), "{message}");
    let output = osb(&dir.path().join("data"), &["build", "-t", "a", "--target", "x", "/tmp"]);
    assert!(refused(&output, 1).contains("--file"));
}
