//! A puller with its directories, and what a pull left.

use std::path::{Path, PathBuf};
use std::time::Duration;

use osb_registry::{Credentials, Error, Platform, Progress, Pulled, Puller, RegistrySettings, Settings};
use tempfile::{NamedTempFile, TempDir};
use tokio::sync::watch;

use crate::images::{Image, digest};

/// A puller that loses its patience quickly.
pub(crate) struct Bench {
    pub(crate) directory: TempDir,
    pub(crate) puller: Puller,
    pub(crate) settings: Settings,
}

/// Settings that know these registries as plain HTTP.
pub(crate) fn settings(directory: &Path, plain: &[&str]) -> Settings {
    let mut settings = Settings::new(directory.join("downloads"));
    settings.docker_config = None;
    settings.patience.stall = Duration::from_millis(500);
    settings.patience.first_wait = Duration::from_millis(10);
    settings.patience.longest_wait = Duration::from_secs(2);
    settings.patience.credential_helper = Duration::from_millis(500);
    for host in plain {
        let registry = RegistrySettings { plain_http: true, ..Default::default() };
        settings.registries.insert((*host).to_owned(), registry);
    }
    settings
}

pub(crate) fn credentials(username: &str, password: &str) -> Credentials {
    Credentials { username: username.into(), password: password.into() }
}

impl Bench {
    pub(crate) fn new(plain: &[&str]) -> Self {
        Self::with(plain, |_| {})
    }

    pub(crate) fn with(plain: &[&str], change: impl FnOnce(&mut Settings)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut settings = settings(directory.path(), plain);
        change(&mut settings);
        let puller = Puller::new(settings.clone()).unwrap();
        Self { directory, puller, settings }
    }

    pub(crate) fn target(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) async fn pull(&self, reference: &str) -> Result<Pulled, Error> {
        self.pull_to(reference, "target").await
    }

    pub(crate) async fn pull_to(&self, reference: &str, target: &str) -> Result<Pulled, Error> {
        self.pull_as(reference, target, None, None).await
    }

    pub(crate) async fn pull_as(
        &self,
        reference: &str,
        target: &str,
        platform: Option<&Platform>,
        credentials: Option<Credentials>,
    ) -> Result<Pulled, Error> {
        let (progress, _) = watch::channel(Progress::default());
        let target = self.target(target);
        self.puller.pull(reference, platform, credentials, &target, &|_| false, &progress).await
    }

    /// A pull that must fail, and must have left nothing where the image was to be.
    pub(crate) async fn fail(&self, reference: &str) -> Error {
        let error = self.pull(reference).await.expect_err("the pull succeeded");
        assert!(!self.target("target").exists(), "the target is there after {error}");
        error
    }

    /// Files in the directory of downloads, with their sizes.
    pub(crate) fn downloads(&self) -> Vec<(String, u64)> {
        let mut files = Vec::new();
        for registry in std::fs::read_dir(&self.settings.downloads_dir).unwrap() {
            for file in std::fs::read_dir(registry.unwrap().path()).unwrap() {
                let file = file.unwrap();
                files.push((file.file_name().into_string().unwrap(), file.metadata().unwrap().len()));
            }
        }
        files
    }

    /// Holds a pulled layout against the image it was made of.
    pub(crate) fn check(&self, target: &str, image: &Image) {
        let target = self.target(target);
        for (name, bytes) in &image.blobs {
            let found = std::fs::read(blob(&target, name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(found == *bytes, "{name} differs");
        }
        let index: serde_json::Value =
            serde_json::from_slice(&std::fs::read(target.join("index.json")).unwrap()).unwrap();
        let manifest = index["manifests"][0]["digest"].as_str().unwrap();
        let found = std::fs::read(blob(&target, manifest)).unwrap();
        assert_eq!(digest(&found), manifest);
        assert!(target.join("oci-layout").exists());
    }
}

pub(crate) fn blob(target: &Path, digest: &str) -> PathBuf {
    target.join("blobs/sha256").join(&digest["sha256:".len()..])
}

/// Waits for a state, not for a time.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not come about");
}

/// A new authority in a PEM file, and a server's configuration with a certificate of it for 127.0.0.1.
pub(crate) fn certificate() -> (NamedTempFile, rustls::ServerConfig) {
    let (authority, certificate, key) = certificate_files();
    let chain = vec![certificate.der().clone()];
    let key = rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    (authority, config)
}

pub(crate) fn certificate_files() -> (NamedTempFile, rcgen::Certificate, rcgen::KeyPair) {
    let authority_key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new([]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = params.self_signed(&authority_key).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let issuer = rcgen::Issuer::new(params, authority_key);
    let params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), authority.pem()).unwrap();
    (file, certificate, key)
}
