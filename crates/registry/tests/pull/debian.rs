//! Debian's `docker-registry`, filled by `skopeo`. Skipped, and said so, where one of them is not installed.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::response::IntoResponse;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use osb_registry::{Error, Platform, RegistrySettings};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fake::{Contents, Fake, refusal};
use crate::images::Compression::{Gzip, None as Plain, Zstd};
use crate::images::{Image, OCI_INDEX, digest, index, write_layout};
use crate::support::{Bench, blob, certificate_files, credentials};

/// A running `docker-registry`; it ends with its value.
struct Registry {
    child: Child,
    directory: TempDir,
    host: String,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn missing() -> bool {
    let found =
        |program: &str| Command::new("which").arg(program).output().is_ok_and(|out| out.status.success());
    let missing: Vec<_> = ["docker-registry", "skopeo"].into_iter().filter(|name| !found(name)).collect();
    if !missing.is_empty() {
        eprintln!("skipped: {} not installed", missing.join(" and "));
    }
    !missing.is_empty()
}

impl Registry {
    /// Started with `extra` in its configuration, on a port that was free a moment ago.
    async fn start(extra: impl FnOnce(&Path) -> Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = extra(directory.path());
        for _ in 0..5 {
            let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let host = format!("127.0.0.1:{port}");
            config["version"] = json!("0.1");
            config["log"] = json!({"level": "error"});
            config["storage"] = json!({"filesystem": {"rootdirectory": directory.path().join("data")}});
            config["http"]["addr"] = json!(host);
            // JSON is YAML.
            let path = directory.path().join("config.yml");
            std::fs::write(&path, config.to_string()).unwrap();
            let mut child = Command::new("docker-registry")
                .arg("serve")
                .arg(&path)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            for _ in 0..200 {
                if std::net::TcpStream::connect(&host).is_ok() && child.try_wait().unwrap().is_none() {
                    return Self { child, directory, host };
                }
                if child.try_wait().unwrap().is_some() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("docker-registry does not start: {config}");
    }

    async fn open() -> Self {
        Self::start(|_| json!({})).await
    }

    fn name(&self, image: &str) -> String {
        format!("{}/{image}", self.host)
    }

    /// Copies the layout's `it` here.
    fn push(&self, layout: &Path, image: &str, options: &[&str]) {
        let output = Command::new("skopeo")
            .args(["copy", "--quiet", "--dest-tls-verify=false"])
            .args(options)
            .arg(format!("oci:{}:it", layout.display()))
            .arg(format!("docker://{}", self.name(image)))
            .env("XDG_RUNTIME_DIR", self.directory.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn layout(&self, name: &str, image: &Image) -> PathBuf {
        let path = self.directory.path().join(name);
        image.write(&path);
        path
    }
}

#[tokio::test]
async fn images_of_all_kinds() {
    if missing() {
        return;
    }
    let registry = Registry::open().await;
    let image = Image::for_here(&[(300_000, Gzip), (200_000, Zstd), (100_000, Plain)]);
    let layout = registry.layout("image", &image);
    registry.push(&layout, "team/image:v1", &["--preserve-digests"]);
    let bench = Bench::new(&[&registry.host]);
    let pulled = bench.pull(&registry.name("team/image:v1")).await.unwrap();
    bench.check("target", &image);
    assert_eq!(pulled.digest, digest(&image.manifest_bytes()));
    assert_eq!((pulled.manifest, pulled.config), (pulled.digest.clone(), image.config.clone()));
    // By digest, and by both.
    for (number, name) in
        [format!("team/image@{}", pulled.digest), format!("team/image:v1@{}", pulled.digest)]
            .iter()
            .enumerate()
    {
        let target = format!("by-digest-{number}");
        bench.pull_to(&registry.name(name), &target).await.unwrap();
        bench.check(&target, &image);
    }
    let error = bench.pull_to(&registry.name("team/image:v2"), "none").await.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
    assert!(error.to_string().contains("v2"), "{error}");
}

#[tokio::test]
async fn dockers_own_media_types() {
    if missing() {
        return;
    }
    let registry = Registry::open().await;
    let image = Image::for_here(&[(300_000, Gzip)]);
    let layout = registry.layout("image", &image);
    registry.push(&layout, "image", &["--format", "v2s2"]);
    let bench = Bench::new(&[&registry.host]);
    let pulled = bench.pull(&registry.name("image")).await.unwrap();
    let target = bench.target("target");
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(blob(&target, &pulled.manifest)).unwrap()).unwrap();
    assert_eq!(manifest["mediaType"], "application/vnd.docker.distribution.manifest.v2+json");
    let layer = manifest["layers"][0]["digest"].as_str().unwrap();
    assert_eq!(digest(&std::fs::read(blob(&target, layer)).unwrap()), layer);
    // What was written is a layout to others too.
    let output =
        Command::new("skopeo").arg("inspect").arg(format!("oci:{}", target.display())).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn platforms_of_an_index() {
    if missing() {
        return;
    }
    let registry = Registry::open().await;
    let names = ["linux/amd64", "linux/arm/v6", "linux/arm/v7", "linux/arm64/v8", "linux/s390x"];
    let images: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(number, name)| Image::new(name, &[(1000 * (number + 1), Gzip)]))
        .collect();
    let pairs: Vec<_> = names.iter().copied().zip(&images).collect();
    let top = index(&pairs).to_string();
    let layout = registry.directory.path().join("index");
    write_layout(&layout, &images, top.as_bytes(), OCI_INDEX);
    registry.push(&layout, "many:1", &["--all", "--preserve-digests"]);
    let bench = Bench::new(&[&registry.host]);
    for (wanted, expected) in [
        ("linux/amd64", Some(0)),
        ("linux/amd64/v3", Some(0)),
        ("linux/arm/v6", Some(1)),
        ("linux/arm", Some(2)),
        ("linux/arm/v8", Some(2)),
        ("linux/arm/v5", None),
        ("linux/arm64", Some(3)),
        ("linux/s390x", Some(4)),
        ("linux/riscv64", None),
    ] {
        let platform: Platform = wanted.parse().unwrap();
        let target = wanted.replace('/', "-");
        let pulled = bench.pull_as(&registry.name("many:1"), &target, Some(&platform), None).await;
        match expected {
            Some(number) => {
                let pulled = pulled.unwrap();
                assert_eq!(pulled.digest, digest(top.as_bytes()));
                assert_eq!(pulled.config, images[number].config, "{wanted}");
                bench.check(&target, &images[number]);
            }
            None => assert!(matches!(pulled, Err(Error::NoPlatform { .. })), "{wanted}: {pulled:?}"),
        }
    }
}

#[tokio::test]
async fn user_and_password() {
    if missing() {
        return;
    }
    if Command::new("htpasswd").arg("-h").output().is_err() {
        eprintln!("skipped: htpasswd not installed (apache2-utils)");
        return;
    }
    let registry = Registry::start(|directory| {
        let output = Command::new("htpasswd").args(["-Bbn", "me", "hunter2"]).output().unwrap();
        let path = directory.join("htpasswd");
        std::fs::write(&path, output.stdout).unwrap();
        json!({"auth": {"htpasswd": {"realm": "here", "path": path}}})
    })
    .await;
    let image = Image::for_here(&[(1000, Gzip)]);
    let layout = registry.layout("image", &image);
    registry.push(&layout, "image", &["--dest-creds", "me:hunter2", "--preserve-digests"]);
    let bench = Bench::new(&[&registry.host]);
    let name = registry.name("image");
    let error = bench.fail(&name).await;
    assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    let wrong = bench.pull_as(&name, "target", None, Some(credentials("me", "hunter3"))).await;
    assert!(matches!(wrong, Err(Error::Unauthorized { .. })), "{wrong:?}");
    bench.pull_as(&name, "target", None, Some(credentials("me", "hunter2"))).await.unwrap();
    bench.check("target", &image);
}

/// A token service for `docker-registry`: signs what is asked for if the login is right.
async fn token_service(key: rcgen::KeyPair, certificate: String) -> Fake {
    let random = ring::rand::SystemRandom::new();
    let algorithm = &ring::signature::ECDSA_P256_SHA256_FIXED_SIGNING;
    let signer = ring::signature::EcdsaKeyPair::from_pkcs8(algorithm, &key.serialize_der(), &random).unwrap();
    Contents::default()
        .serve(move |seen| {
            let login = format!("Basic {}", STANDARD.encode("me:hunter2"));
            if seen.header("authorization") != Some(&login) {
                return Some(refusal(401, "UNAUTHORIZED", "wrong password"));
            }
            let query: std::collections::HashMap<_, _> =
                form_urlencoded::parse(seen.query.as_bytes()).into_owned().collect();
            let mut scope = query["scope"].split(':');
            let (kind, name, actions) = (scope.next(), scope.next(), scope.next().unwrap());
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
            let header = json!({"typ": "JWT", "alg": "ES256", "x5c": [certificate]});
            let claims = json!({
                "iss": "tests", "sub": "me", "aud": query["service"], "exp": now + 60, "nbf": now - 10,
                "iat": now - 10, "jti": "1",
                "access": [{"type": kind, "name": name, "actions": actions.split(',').collect::<Vec<_>>()}],
            });
            let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
            let text = format!("{}.{}", encode(&header), encode(&claims));
            let signature = signer.sign(&random, text.as_bytes()).unwrap();
            let token = format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature));
            Some(axum::Json(json!({"token": token})).into_response())
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens() {
    if missing() {
        return;
    }
    let (authority, certificate, key) = certificate_files();
    let tokens = token_service(key, STANDARD.encode(certificate.der())).await;
    let registry = Registry::start(|_| {
        json!({"auth": {"token": {
            "realm": format!("http://{}/token", tokens.host()), "service": "reg", "issuer": "tests",
            "rootcertbundle": authority.path(),
        }}})
    })
    .await;
    let image = Image::for_here(&[(1000, Gzip)]);
    let layout = registry.layout("image", &image);
    registry.push(&layout, "team/image", &["--dest-creds", "me:hunter2", "--preserve-digests"]);
    let bench = Bench::new(&[&registry.host]);
    let name = registry.name("team/image");
    let before = tokens.seen().len();
    bench.pull_as(&name, "target", None, Some(credentials("me", "hunter2"))).await.unwrap();
    bench.check("target", &image);
    assert_eq!(tokens.seen().len(), before + 1);
    let error = bench.pull_as(&name, "other", None, Some(credentials("me", "hunter3"))).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
}

#[tokio::test]
async fn tls_with_an_own_authority() {
    if missing() {
        return;
    }
    let (authority, certificate, key) = certificate_files();
    let registry = Registry::start(|directory| {
        let (chain, secret) = (directory.join("chain.pem"), directory.join("key.pem"));
        std::fs::write(&chain, certificate.pem()).unwrap();
        std::fs::write(&secret, key.serialize_pem()).unwrap();
        json!({"http": {"tls": {"certificate": chain, "key": secret}}})
    })
    .await;
    let image = Image::for_here(&[(1000, Gzip)]);
    let layout = registry.layout("image", &image);
    registry.push(&layout, "image", &["--preserve-digests"]);
    let bench = Bench::with(&[], |settings| {
        let entry = RegistrySettings { ca_file: Some(authority.path().into()), ..Default::default() };
        settings.registries.insert(registry.host.clone(), entry);
    });
    bench.pull(&registry.name("image")).await.unwrap();
    bench.check("target", &image);
}

/// A figure, printed and not judged: machines differ. `OSB_SPEED_MIB` sets the size.
#[tokio::test(flavor = "multi_thread")]
async fn speed_of_one_large_layer() {
    if missing() {
        return;
    }
    let mib = std::env::var("OSB_SPEED_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(16_usize);
    let registry = Registry::open().await;
    let image = Image::for_here(&[(mib << 20, Plain)]);
    let layout = registry.layout("image", &image);
    registry.push(&layout, "large", &["--preserve-digests"]);
    let bench = Bench::new(&[&registry.host]);
    let processor = || {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        // User and system time, in hundredths of a second.
        fields[11].parse::<f64>().unwrap() / 100.0 + fields[12].parse::<f64>().unwrap() / 100.0
    };
    let (begin, before) = (Instant::now(), processor());
    bench.pull(&registry.name("large")).await.unwrap();
    let (seconds, used) = (begin.elapsed().as_secs_f64(), processor() - before);
    #[allow(clippy::cast_precision_loss)]
    let bytes = image.layer(0).len() as f64;
    eprintln!("{:.0} MB/s, {used:.2} s of processor time for {mib} MiB", bytes / 1e6 / seconds);
    bench.check("target", &image);
}
