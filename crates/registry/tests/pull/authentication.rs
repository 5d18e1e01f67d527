//! Who gets which credentials, and from where they come.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use axum::response::IntoResponse;
use osb_registry::{Error, RegistrySettings, Settings};
use serde_json::json;

use crate::fake::{Contents, Fake, challenge, redirect, refusal};
use crate::images::Compression::Gzip;
use crate::images::Image;
use crate::support::{Bench, certificate, credentials};

const TOKEN: &str = "Bearer t0ken";
/// `me:hunter2`.
const BASIC: &str = "Basic bWU6aHVudGVyMg==";

fn image() -> Image {
    Image::for_here(&[(10_000, Gzip)])
}

/// A registry that wants `authorization` and else answers with `challenge`.
async fn guarded(image: &Image, authorization: &'static str, challenged: String) -> Fake {
    Contents::of(image)
        .serve(move |seen| {
            (seen.header("authorization") != Some(authorization)).then(|| challenge(&challenged))
        })
        .await
}

/// A token service that wants `authorization`.
async fn tokens(authorization: Option<&'static str>) -> Fake {
    Contents::default()
        .serve(move |seen| {
            Some(if seen.header("authorization") == authorization {
                axum::Json(json!({"access_token": "t0ken", "expires_in": 60})).into_response()
            } else {
                refusal(401, "UNAUTHORIZED", "incorrect username or password")
            })
        })
        .await
}

fn bearer(tokens: &Fake) -> String {
    format!(r#"Bearer realm="http://{}/token?x=1",service="reg",scope="repository:evil:push""#, tokens.host())
}

#[tokio::test]
async fn an_anonymous_token_is_fetched_once() {
    let image = image();
    let tokens = tokens(None).await;
    let fake = guarded(&image, TOKEN, bearer(&tokens)).await;
    let bench = Bench::new(&[&fake.host()]);
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
    let asked = tokens.seen();
    assert_eq!(asked.len(), 1);
    // Only what is needed, whatever the registry named.
    assert_eq!(asked[0].query, "x=1&service=reg&scope=repository%3Ateam%2Fimage%3Apull");
}

#[tokio::test]
async fn the_password_goes_to_the_token_service_and_not_to_the_registry() {
    let image = image();
    let tokens = tokens(Some(BASIC)).await;
    let fake = guarded(&image, TOKEN, bearer(&tokens)).await;
    let bench = Bench::new(&[&fake.host()]);
    let login = Some(credentials("me", "hunter2"));
    bench.pull_as(&fake.image(), "target", None, login).await.unwrap();
    assert!(fake.seen().iter().all(|seen| seen.header("authorization") != Some(BASIC)));
    // A wrong one is told, with the service's words and without the password.
    let login = Some(credentials("me", "hunter3"));
    let error = bench.pull_as(&fake.image(), "other", None, login).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    let text = format!("{error} {error:?}");
    assert!(text.contains("incorrect username") && text.contains("credentials of the request"), "{text}");
    assert!(!text.contains("hunter3"), "{text}");
}

#[tokio::test]
async fn a_token_that_expires_is_renewed() {
    let image = image();
    let tokens = tokens(None).await;
    let challenged = bearer(&tokens);
    let layer = image.layers[0].clone();
    let fake = Contents::of(&image)
        .serve(move |seen| {
            let fresh = seen.header("authorization") == Some(TOKEN);
            let expired = seen.path.ends_with(&layer) && seen.earlier == 0;
            (!fresh || expired).then(|| challenge(&challenged))
        })
        .await;
    let bench = Bench::new(&[&fake.host()]);
    bench.pull(&fake.image()).await.unwrap();
    assert_eq!(tokens.seen().len(), 2);
}

#[tokio::test]
async fn a_registry_that_refuses_each_token_is_given_up() {
    let tokens = tokens(None).await;
    let challenged = bearer(&tokens);
    let fake = Contents::of(&image()).serve(move |_| Some(challenge(&challenged))).await;
    let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await;
    assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    assert_eq!((fake.seen().len(), tokens.seen().len()), (2, 1));
}

#[tokio::test]
async fn token_services_that_misbehave() {
    for (answer, words) in [
        ("x".repeat(2 << 20), "more than 1048576 bytes"),
        ("[]".into(), "nonsense"),
        ("{}".into(), "no token"),
        (r#"{"token": "a\r\nb"}"#.into(), "characters"),
    ] {
        let tokens = Contents::default().serve(move |_| Some(answer.clone().into_response())).await;
        let fake = guarded(&image(), TOKEN, bearer(&tokens)).await;
        let error = Bench::new(&[&fake.host()]).fail(&fake.image()).await.to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn a_token_service_is_no_way_to_elsewhere() {
    // It may not send the password on.
    let elsewhere = Contents::default().serve(|_| None).await;
    let target = format!("http://{}/token", elsewhere.host());
    let tokens = Contents::default().serve(move |_| Some(redirect(&target))).await;
    let fake = guarded(&image(), TOKEN, bearer(&tokens)).await;
    let bench = Bench::new(&[&fake.host()]);
    let login = Some(credentials("me", "hunter2"));
    bench.pull_as(&fake.image(), "target", None, login).await.unwrap_err();
    assert!(elsewhere.seen().is_empty());
}

#[tokio::test]
async fn nothing_leaves_a_registry_with_tls_for_one_without() {
    let image = image();
    let plain = Contents::of(&image).serve(|_| None).await;
    let (authority, config) = certificate();
    for kind in ["realm", "redirect"] {
        let target = format!("http://{}/token", plain.host());
        let fake = Contents::of(&image)
            .serve_tls(config.clone(), move |_| {
                Some(match kind {
                    "realm" => challenge(&format!(r#"Bearer realm="{target}",service="reg""#)),
                    _ => redirect(&target),
                })
            })
            .await;
        let bench = Bench::with(&[], |settings| trust(settings, &fake.host(), authority.path()));
        let login = Some(credentials("me", "hunter2"));
        let error = bench.pull_as(&fake.image(), "target", None, login).await.unwrap_err();
        assert!(matches!(error, Error::PlainHttp { .. }), "{kind}: {error:?}");
    }
    assert!(plain.seen().is_empty());
}

fn trust(settings: &mut Settings, host: &str, authority: &std::path::Path) {
    let registry = RegistrySettings { ca_file: Some(authority.into()), ..Default::default() };
    settings.registries.insert(host.into(), registry);
}

#[tokio::test]
async fn tls_is_the_rule_and_its_authority_is_proven() {
    let image = image();
    let (authority, config) = certificate();
    let fake = Contents::of(&image).serve_tls(config, |_| None).await;
    let bench = Bench::with(&[], |settings| trust(settings, &fake.host(), authority.path()));
    bench.pull(&fake.image()).await.unwrap();
    bench.check("target", &image);
    let error = Bench::new(&[]).fail(&fake.image()).await;
    assert!(error.to_string().contains("ca_file"), "{error}");
    assert_eq!(fake.seen().len(), 3);
    // Loopback or not: no TLS, no pull.
    let plain = Contents::of(&image).serve(|_| None).await;
    let error = Bench::new(&[]).fail(&plain.image()).await;
    assert!(matches!(error, Error::PlainHttp { .. }), "{error:?}");
    assert!(error.to_string().contains("plain_http"), "{error}");
    assert!(plain.seen().is_empty());
}

#[tokio::test]
async fn credentials_come_from_the_configuration_and_from_docker() {
    let image = image();
    let fake = guarded(&image, BASIC, "Basic realm=\"r\"".into()).await;
    let configured = Bench::with(&[&fake.host()], |settings| {
        let registry = settings.registries.get_mut(&fake.host()).unwrap();
        registry.credentials = Some(credentials("me", "hunter2"));
    });
    configured.pull(&fake.image()).await.unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let docker = Bench::with(&[&fake.host()], |settings| settings.docker_config = Some(file.path().into()));
    let config = json!({"auths": {fake.host(): {"auth": &BASIC["Basic ".len()..]}}});
    std::fs::write(file.path(), config.to_string()).unwrap();
    docker.pull(&fake.image()).await.unwrap();
    // It is read anew: a log-out counts.
    std::fs::write(file.path(), "{}").unwrap();
    assert!(matches!(docker.pull_to(&fake.image(), "other").await, Err(Error::Unauthorized { .. })));
    // What a request brings goes first.
    let wrong = Some(credentials("me", "wrong"));
    let error = configured.pull_as(&fake.image(), "third", None, wrong).await.unwrap_err();
    assert!(error.to_string().contains("credentials of the request"), "{error}");
}

#[tokio::test]
async fn an_identity_token_is_exchanged() {
    let image = image();
    let tokens = Contents::default()
        .serve(|seen| {
            assert_eq!(seen.method, axum::http::Method::POST);
            Some(axum::Json(json!({"access_token": "t0ken"})).into_response())
        })
        .await;
    let fake = guarded(&image, TOKEN, bearer(&tokens)).await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let config = json!({"auths": {fake.host(): {"identitytoken": "refresh me"}}});
    std::fs::write(file.path(), config.to_string()).unwrap();
    let bench = Bench::with(&[&fake.host()], |settings| settings.docker_config = Some(file.path().into()));
    bench.pull(&fake.image()).await.unwrap();
    let form = &tokens.seen()[0].body;
    assert!(form.contains("grant_type=refresh_token&refresh_token=refresh+me"), "{form}");
    assert!(form.contains("scope=repository%3Ateam%2Fimage%3Apull&service=reg"), "{form}");
}

/// A credential helper beside the test program, found by `PATH` in a child.
#[tokio::test]
async fn pull_with_a_helper_in_a_child() {
    let Ok(name) = std::env::var("OSB_TEST_HELPER") else { return };
    let host = std::env::var("OSB_TEST_HOST").unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    for (config, works) in [
        (json!({"credHelpers": {&host: name}}), name == "good"),
        (json!({"credsStore": name}), name == "good"),
    ] {
        std::fs::write(file.path(), config.to_string()).unwrap();
        let bench = Bench::with(&[&host], |settings| settings.docker_config = Some(file.path().into()));
        let begin = Instant::now();
        let result = bench.pull(&format!("{host}/team/image:it")).await;
        assert!(begin.elapsed() < Duration::from_secs(5));
        match result {
            Ok(_) => assert!(works, "{name}"),
            Err(Error::Unauthorized { .. }) => assert_eq!(name, "empty"),
            Err(error @ Error::CredentialHelper { .. }) => {
                assert!(!works && name != "empty", "{error}");
                assert!(error.to_string().contains(&format!("docker-credential-{name}")), "{error}");
                assert!(!error.to_string().contains("hunter2"), "{error}");
            }
            Err(error) => panic!("{name}: {error:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn credential_helpers() {
    let image = image();
    let fake = guarded(&image, BASIC, "Basic realm=\"r\"".into()).await;
    let bin = tempfile::tempdir().unwrap();
    let host = fake.host();
    let good = format!(
        r#"read server; [ "$1 $server" = "get {host}" ] && echo '{{"Username":"me","Secret":"hunter2"}}'"#
    );
    for (name, script) in [
        ("good", good.as_str()),
        ("empty", "echo 'credentials not found in native keychain'; exit 1"),
        ("failing", "echo 'the keychain is locked'; exit 1"),
        ("hanging", "exec sleep 60"),
        ("talking", "exec yes hunter2"),
        ("mumbling", "echo hunter2"),
    ] {
        let path = bin.path().join(format!("docker-credential-{name}"));
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    for name in ["good", "empty", "failing", "hanging", "talking", "mumbling", "missing", "../good"] {
        let child = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "authentication::pull_with_a_helper_in_a_child"])
            .env("OSB_TEST_HELPER", name)
            .env("OSB_TEST_HOST", &host)
            .env("PATH", &path)
            .output();
        let output = child.await.unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stdout));
    }
}
