//! A daemon with a directory to work in, and forms to upload.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use axum::body::Body;
use http::{Method, header};
use osb_execd::app::Shared;
use osb_execd::binding::{Binding, Current};
use serde_json::{Value, json};

use super::{Answer, Daemon, encode};

pub struct Files {
    pub daemon: Daemon,
    pub dir: tempfile::TempDir,
}

pub async fn start() -> Files {
    start_in(std::env::temp_dir()).await
}

/// As [`start`], in a directory of the caller's choice.
pub async fn start_in(parent: impl AsRef<Path>) -> Files {
    let dir = tempfile::tempdir_in(parent).unwrap();
    let home = dir.path().join("home");
    std::fs::create_dir(&home).unwrap();
    let env = vec![("HOME".into(), home.into()), ("SPACE".into(), dir.path().into())];
    let daemon = Daemon::start(Shared {
        binding: Current::new(Binding { env, ..Binding::default() }),
        cwd: dir.path().into(),
        ..Shared::default()
    })
    .await;
    Files { daemon, dir }
}

impl Files {
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Percent-encoded, for a query.
    pub fn query(&self, name: &str) -> String {
        encode(self.path(name))
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    pub fn mode(&self, name: &str) -> u32 {
        self.path(name).symlink_metadata().unwrap().mode() & 0o7777
    }

    pub async fn upload(&self, parts: &[Part<'_>]) -> Answer {
        self.upload_as(form(parts)).await
    }

    pub async fn upload_as(&self, body: impl Into<Body>) -> Answer {
        let request = self
            .daemon
            .request(Method::POST, "/files/upload")
            .header(header::CONTENT_TYPE, "multipart/form-data; boundary=xYz");
        self.daemon.send(request, body).await
    }

    pub async fn download(&self, name: &str) -> Answer {
        self.daemon.get(&format!("/files/download?path={}", self.query(name))).await
    }

    pub async fn names(&self, path_and_query: &str) -> Vec<String> {
        let answer = self.daemon.get(path_and_query).await.ok();
        let root = format!("{}/", self.dir.path().display());
        let path = |entry: &Value| entry["path"].as_str().unwrap().trim_start_matches(&root).to_owned();
        answer.json().as_array().unwrap().iter().map(path).collect()
    }

    pub fn entries(&self) -> usize {
        std::fs::read_dir(self.dir.path()).unwrap().count()
    }
}

pub enum Part<'a> {
    Metadata(Value),
    PlainMetadata(Value),
    File(&'a [u8]),
}

pub fn form(parts: &[Part<'_>]) -> Vec<u8> {
    let mut body = Vec::new();
    for part in parts {
        let (head, content) = match part {
            Part::Metadata(value) => (
                "name=\"metadata\"; filename=\"metadata\"\r\nContent-Type: application/json",
                value.to_string().into_bytes(),
            ),
            Part::PlainMetadata(value) => ("name=\"metadata\"", value.to_string().into_bytes()),
            Part::File(content) => (
                "name=\"file\"; filename=\"a\"b;\u{fc}.txt\"\r\nContent-Type: application/octet-stream",
                content.to_vec(),
            ),
        };
        body.extend_from_slice(format!("--xYz\r\nContent-Disposition: form-data; {head}\r\n\r\n").as_bytes());
        body.extend_from_slice(&content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--xYz--\r\n");
    body
}

pub fn metadata(path: impl AsRef<Path>) -> Part<'static> {
    Part::Metadata(
        json!({ "path": path.as_ref().to_str().unwrap(), "owner": null, "group": null, "mode": 644 }),
    )
}
