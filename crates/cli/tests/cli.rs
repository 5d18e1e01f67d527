//! Command lines and what becomes of them, against a server of the test's own making.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs, dead_code)]

#[path = "../../client/tests/support/mod.rs"]
mod support;

mod harness;

use std::path::Path;

use clap::Parser as _;
use harness::{How, Osb, osb, osb_how};
use serde_json::{Value, json};
use support::{Body, Fake, Seen, endpoint, json, pieces, reply};

fn sandbox(id: &str) -> Value {
    json!({
        "id": id, "image": {"uri": "host"}, "status": {"state": "Running", "reason": "R"},
        "metadata": {"team": "x"}, "entrypoint": ["tail", "-f", "/dev/null"],
        "createdAt": "2026-11-30T17:49:18.189968Z", "expiresAt": "2026-11-30T17:59:18Z",
    })
}

/// A server with one sandbox in which every command sends `events`.
async fn with_command(events: Vec<Value>, breaks: bool) -> Fake {
    Fake::start(move |_, seen| {
        let answer = answer(&seen, &events, breaks);
        async move { answer }
    })
    .await
}

fn answer(seen: &Seen, events: &[Value], breaks: bool) -> hyper::Response<Body> {
    match seen.method.as_str() {
        _ if seen.target.contains("/endpoints/") => endpoint(seen),
        "POST" if seen.target == "/v1/sandboxes" => json(202, sandbox("s1")),
        "POST" if seen.target.ends_with("/command") => {
            let lines = events.iter().map(|event| format!("{event}\n\n").into()).collect();
            pieces(lines, breaks)
        }
        "DELETE" => reply(204, ""),
        _ => reply(200, ""),
    }
}

fn init() -> Value {
    json!({"type": "init", "text": "c1", "timestamp": 1})
}

fn failed(evalue: &str) -> Value {
    json!({"type": "error", "timestamp": 1,
        "error": {"ename": "CommandExecError", "evalue": evalue, "traceback": [format!("why: {evalue}")]}})
}

fn body_of(fake: &Fake, call: &str) -> Value {
    let seen = fake.seen().into_iter().find(|seen| seen.call() == call);
    serde_json::from_slice(&seen.unwrap_or_else(|| panic!("no {call}: {:?}", fake.calls())).body).unwrap()
}

const COMMAND: &str = "POST /v1/sandboxes/s1/proxy/44772/command";

#[tokio::test]
async fn run_passes_arguments_output_and_exit_code_on() {
    let fake = with_command(
        vec![
            init(),
            json!({"type": "stdout", "text": "out\n", "timestamp": 1}),
            json!({"type": "stderr", "text": "err\n", "timestamp": 1}),
            json!({"type": "stdout", "text": "tail", "timestamp": 1}),
            failed("42"),
        ],
        false,
    )
    .await;
    let done = osb(
        &fake,
        &[
            "run",
            "host",
            "-e",
            "A=1",
            "--resource",
            "cpu=2",
            "-m",
            "k=v",
            "--timeout",
            "1m",
            "-u",
            "7:8",
            "-w",
            "/w",
            "--",
            "sh",
            "-c",
            "echo \"test\"; exit 42",
            "",
            "-x",
            "--",
            "a b",
        ],
    )
    .await;
    assert_eq!((done.code, done.out.as_str(), done.err.as_str()), (42, "out\ntail", "err\n"));
    assert_eq!(
        body_of(&fake, COMMAND),
        json!({
            "argv": ["sh", "-c", "echo \"test\"; exit 42", "", "-x", "--", "a b"],
            "cwd": "/w", "timeout": 60000, "uid": 7, "gid": 8,
        })
    );
    let create = body_of(&fake, "POST /v1/sandboxes");
    assert_eq!(create["env"], json!({"A": "1"}));
    assert_eq!(create["resourceLimits"], json!({"cpu": "2", "memory": "2Gi"}));
    assert_eq!(create["metadata"], json!({"k": "v"}));
    assert_eq!(create["entrypoint"], json!(["tail", "-f", "/dev/null"]));
    assert_eq!(fake.calls().last().unwrap(), "DELETE /v1/sandboxes/s1");
}

#[tokio::test]
async fn one_word_with_blanks_is_shell_text_unless_told_otherwise() {
    let script = "cat <<EOF\n$HOME 'x'\nEOF\nsetsid nohup sleep 99 & disown";
    for (args, body) in [
        (&["run", "host", "--", script][..], json!({"command": script})),
        (&["run", "host", "--argv", "--", "a b"], json!({"argv": ["a b"]})),
        (&["run", "host", "--", "true"], json!({"argv": ["true"]})),
        (&["command", "run", "s1", "--", script], json!({"command": script})),
        (&["command", "run", "s1", "cd", "/a b", "-x"], json!({"command": "cd '/a b' -x"})),
        (&["command", "run", "s1", "--argv", "--", "$HOME", ""], json!({"argv": ["$HOME", ""]})),
    ] {
        let fake =
            with_command(vec![init(), json!({"type": "execution_complete", "timestamp": 1})], false).await;
        assert_eq!(osb(&fake, args).await.code, 0);
        assert_eq!(body_of(&fake, COMMAND), body);
    }
}

#[tokio::test]
async fn run_deletes_the_sandbox_whatever_happens() {
    for (events, breaks, code, words) in [
        (vec![init(), failed("no such file")], false, 127, "could not be executed: why: no such file"),
        (vec![init(), failed("137")], false, 137, ""),
        (vec![init(), failed("256")], false, 1, ""),
        (vec![init()], false, 125, "ended before the command did"),
        (vec![init()], true, 125, "connection lost"),
        (
            vec![init(), json!({"type": "stdout", "text": "x\n", "timestamp": 1})],
            true,
            125,
            "connection lost",
        ),
        (vec![json!("nonsense")], false, 125, "not an event"),
    ] {
        let fake = with_command(events, breaks).await;
        let done = osb(&fake, &["run", "host", "--", "x"]).await;
        assert_eq!(done.code, code, "{done:?}");
        assert!(done.err.contains(words) && done.err.lines().count() <= 1, "{done:?}");
        assert_eq!(fake.calls().last().unwrap(), "DELETE /v1/sandboxes/s1");
    }
}

#[tokio::test]
async fn why_a_command_was_ended_is_told() {
    let mut event = failed("137");
    event["error"]["traceback"] = json!(["signal: killed", "the time limit of 1000 ms has passed"]);
    let fake = with_command(vec![init(), event], false).await;
    let done = osb(&fake, &["command", "run", "s1", "-t", "1s", "--", "sleep", "9"]).await;
    assert_eq!((done.code, done.err.as_str()), (137, "osb: the time limit of 1000 ms has passed\n"));
}

#[tokio::test]
async fn a_daemon_without_sessions_is_told_of() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.method.as_str() {
            _ if seen.target.contains("/endpoints/") => endpoint(&seen),
            _ => json(404, json!({"code": "NOT_FOUND", "message": "404 page not found"})),
        };
        async { answer }
    })
    .await;
    let done = osb(&fake, &["command", "session", "create", "s1"]).await;
    assert!(done.code == 1 && done.err.contains("comes later") && !done.err.contains("404"), "{done:?}");
}

#[tokio::test]
async fn run_ends_quietly_when_nobody_reads() {
    let output = json!({"type": "stdout", "text": "x\n", "timestamp": 1});
    let fake = with_command(vec![init(), output.clone(), output], false).await;
    let how = How { broken: true, ..How::default() };
    let done = osb_how(&fake, &["run", "host", "--", "yes"], how).await;
    assert_eq!((done.code, done.err.as_str()), (141, ""));
    assert_eq!(fake.calls().last().unwrap(), "DELETE /v1/sandboxes/s1");

    let done = osb_how(&fake, &["command", "run", "s1", "--", "yes"], how).await;
    assert_eq!((done.code, done.err.as_str()), (141, ""));
    assert_eq!(fake.calls().last().unwrap(), "DELETE /v1/sandboxes/s1/proxy/44772/command?id=c1");
}

#[tokio::test]
async fn run_says_what_the_server_refused() {
    let fake = Fake::start(|_, _| async {
        json(
            400,
            json!({"code": "SANDBOX::INVALID_PARAMETER", "message": "image 'x' is not\u{1b}[2J stored"}),
        )
    })
    .await;
    let done = osb(&fake, &["run", "x", "--", "true"]).await;
    assert_eq!(done.code, 125);
    assert_eq!(done.err, "error: image 'x' is not\\u{1b}[2J stored (SANDBOX::INVALID_PARAMETER, HTTP 400)\n");
    assert_eq!(fake.calls(), ["POST /v1/sandboxes"]);
}

#[tokio::test]
async fn output_is_verbatim_with_and_without_line_ends() {
    let piece = |text: &str| json!({"type": "stdout", "text": text, "timestamp": 1});
    let end = json!({"type": "execution_complete", "timestamp": 1});
    let fake = with_command(vec![init(), piece("a"), piece("\n"), piece("b"), end.clone()], false).await;
    assert_eq!(osb(&fake, &["command", "run", "s1", "--", "x"]).await.out, "a\nb");
    let fake = with_command(vec![init(), piece("\x1b[1mé\r"), piece("b\n"), end], false).await;
    assert_eq!(osb(&fake, &["command", "run", "s1", "--", "x"]).await.out, "\x1b[1mé\rb\n");
}

#[tokio::test]
async fn lists_as_table_and_json() {
    let page = |next: bool| {
        json!({"items": [sandbox("s1")], "pagination":
            {"page": 1, "pageSize": 1, "totalItems": 2, "totalPages": 2, "hasNextPage": next}})
    };
    let fake = Fake::start(move |_, _| async move { json(200, page(true)) }).await;
    let done = osb(&fake, &["sandbox", "list", "-s", "running", "-m", "team=x", "--page-size", "1"]).await;
    assert_eq!(
        done.out,
        "ID  STATUS   IMAGE  CREATED_AT                   EXPIRES_AT\n\
         s1  Running  host   2026-11-30T17:49:18.189968Z  2026-11-30T17:59:18Z\n"
    );
    assert_eq!(done.err, "osb: page 1 of 2; more with --page 2\n");
    assert_eq!(fake.calls(), ["GET /v1/sandboxes?state=Running&metadata=team%3Dx&pageSize=1"]);

    let done = osb(&fake, &["sandbox", "list", "-o", "json"]).await;
    let value: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(value["items"][0]["created_at"], "2026-11-30T17:49:18.189968Z");
    assert_eq!(value["items"][0]["status"]["state"], "Running");
    assert_eq!(value["items"][0]["image"]["image"], "host");
    assert_eq!(value["pagination"]["total_items"], 2);
    assert_eq!(done.err, "");

    let how = How { terminal: true, ..How::default() };
    let colored = osb_how(&fake, &["sandbox", "list"], how).await;
    assert!(colored.out.starts_with("\x1b[1mID\x1b[0m"));
    for (args, env) in
        [(&["--no-color", "sandbox", "list"][..], &[][..]), (&["sandbox", "list"], &[("NO_COLOR", "1")])]
    {
        let plain = osb_how(&fake, args, How { env, ..how }).await;
        assert!(!plain.out.contains('\x1b'), "{}", plain.out);
    }
}

#[tokio::test]
async fn create_get_renew_kill() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.call().as_str() {
            "POST /v1/sandboxes" => json(202, sandbox("s1")),
            "GET /v1/sandboxes/s1" | "PATCH /v1/sandboxes/s1/metadata" => json(200, sandbox("s1")),
            "POST /v1/sandboxes/s1/renew-expiration" => {
                json(200, json!({"expiresAt": "2026-12-01T00:00:00Z"}))
            }
            "DELETE /v1/sandboxes/s1" => reply(204, ""),
            _ => json(404, json!({"code": "DOCKER::SANDBOX_NOT_FOUND", "message": "no such sandbox"})),
        };
        async move { answer }
    })
    .await;
    let done = osb(
        &fake,
        &[
            "sandbox",
            "create",
            "-i",
            "host",
            "-t",
            "none",
            "-e",
            "A=",
            "--entrypoint",
            "sh",
            "--entrypoint",
            "-c",
            "--entrypoint",
            "sleep 9",
            "--extension",
            "x=y",
            "--skip-health-check",
            "-o",
            "json",
        ],
    )
    .await;
    assert_eq!(
        serde_json::from_str::<Value>(&done.out).unwrap(),
        json!({"id": "s1", "status": "created", "timeout": "manual-cleanup", "image": "host"})
    );
    assert_eq!(
        body_of(&fake, "POST /v1/sandboxes"),
        json!({
            "image": {"uri": "host"}, "entrypoint": ["sh", "-c", "sleep 9"], "env": {"A": ""},
            "extensions": {"x": "y"}, "resourceLimits": {"cpu": "1", "memory": "2Gi"}, "secureAccess": false,
        })
    );
    let done = osb(&fake, &["sandbox", "get", "s1"]).await;
    assert!(done.out.contains("status          Running\n") && done.out.contains("metadata        team=x\n"));
    let done = osb(&fake, &["sandbox", "renew", "s1", "-t", "1h"]).await;
    assert!(done.out.contains("expires_at  2026-12-01T00:00:00Z"), "{}", done.out);
    assert_eq!(osb(&fake, &["sandbox", "patch", "s1", "-m", "a=1", "--remove", "b"]).await.code, 0);
    assert_eq!(body_of(&fake, "PATCH /v1/sandboxes/s1/metadata"), json!({"a": "1", "b": null}));

    let done = osb(&fake, &["sandbox", "kill", "gone", "s1"]).await;
    assert_eq!(done.code, 1);
    assert_eq!(done.out, "SANDBOX_ID  STATUS\ngone        failed\ns1          terminated\n");
    assert_eq!(done.err, "error: no such sandbox (DOCKER::SANDBOX_NOT_FOUND, HTTP 404)\n");
    let done = osb(&fake, &["sandbox", "get", "gone"]).await;
    assert_eq!((done.code, done.out.as_str()), (1, ""));
    let done = osb(&fake, &["sandbox", "create"]).await;
    assert!(done.code == 1 && done.err.contains("--image"), "{done:?}");
}

#[tokio::test]
async fn background_commands() {
    let fake = with_command(vec![init(), json!({"type": "execution_complete", "timestamp": 1})], false).await;
    let done =
        osb(&fake, &["command", "run", "s1", "-d", "-o", "json", "-e", "A=1", "--", "sleep", "9"]).await;
    assert_eq!(
        serde_json::from_str::<Value>(&done.out).unwrap(),
        json!({"execution_id": "c1", "sandbox_id": "s1", "mode": "background"})
    );
    assert_eq!(
        body_of(&fake, COMMAND),
        json!({"command": "sleep 9", "background": true, "envs": {"A": "1"}})
    );
    for verb in ["kill", "interrupt"] {
        let done = osb(&fake, &["command", verb, "s1", "c1"]).await;
        assert_eq!((done.code, done.out.as_str()), (0, "OK: command c1 interrupted\n"));
    }
}

#[tokio::test]
async fn files_in_and_out() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.target.rsplit("/proxy/44772").next().unwrap() {
            _ if seen.target.contains("/endpoints/") => endpoint(&seen),
            target if target.contains("short") => pieces(vec!["half".into()], true),
            target if target.starts_with("/files/download") => reply(200, &b"\xFFcontent"[..]),
            target if target.starts_with("/directories/list") => json(
                200,
                json!([{"path": "/d/\u{1b}[31m", "type": "file", "size": 3, "mode": 644, "owner": "root",
                    "group": "root", "modified_at": "T", "created_at": "T"}]),
            ),
            _ => reply(200, ""),
        };
        async move { answer }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let exists = |name: &str| Path::new(&path(name)).exists();

    assert_eq!(osb(&fake, &["file", "download", "s1", "/x", &path("got")]).await.code, 0);
    assert_eq!(std::fs::read(path("got")).unwrap(), b"\xFFcontent");
    std::fs::write(path("old"), "before").unwrap();
    let done = osb(&fake, &["file", "download", "s1", "/short", &path("old")]).await;
    assert!(done.code == 1 && done.err.contains("old: connection lost"), "{done:?}");
    assert_eq!(std::fs::read(path("old")).unwrap(), b"before");
    assert_eq!(osb(&fake, &["file", "download", "s1", "/short", &path("new")]).await.code, 1);
    assert!(!exists("new"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing half-done is left");

    assert_eq!(osb(&fake, &["file", "upload", "s1", &path("old"), "/r", "--mode", "600"]).await.code, 0);
    let body = String::from_utf8(fake.seen().last().unwrap().body.to_vec()).unwrap();
    assert!(body.contains("before") && body.contains("\"mode\":600"), "{body}");
    let missing = osb(&fake, &["file", "upload", "s1", &path("none"), "/r"]).await;
    assert!(missing.code == 1 && missing.err.contains("none: No such file"), "{missing:?}");

    let how = How { stdin: b"typed", ..How::default() };
    assert_eq!(osb_how(&fake, &["file", "write", "s1", "/w"], how).await.out, "OK: written: /w\n");
    assert!(fake.seen().last().unwrap().body.windows(5).any(|window| window == b"typed"));

    let done = osb(&fake, &["file", "ls", "s1", "/d"]).await;
    assert_eq!(
        done.out,
        "PATH           TYPE  SIZE  MODE  OWNER  GROUP  CREATED_AT  MODIFIED_AT\n\
         /d/\\u{1b}[31m  file  3     644   root   root   T           T\n"
    );
    for (args, call) in [
        (&["file", "rm", "s1", "/a", "/b"][..], "DELETE /files?path=%2Fa&path=%2Fb"),
        (&["file", "rmdir", "s1", "/a"], "DELETE /directories?path=%2Fa"),
        (&["file", "mkdir", "s1", "/a"], "POST /directories"),
        (&["file", "mv", "s1", "/a", "/b"], "POST /files/mv"),
        (&["file", "chmod", "s1", "/a", "--mode", "700"], "POST /files/permissions"),
    ] {
        let done = osb(&fake, args).await;
        assert_eq!(done.code, 0, "{done:?}");
        assert!(fake.calls().last().unwrap().replace("/v1/sandboxes/s1/proxy/44772", "") == call);
    }
}

#[tokio::test]
async fn settings_come_from_flag_environment_and_file_in_this_order() {
    let fake = Fake::start(|_, _| async { json(200, sandbox("s1")) }).await;
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".opensandbox")).unwrap();
    let file = home.path().join(".opensandbox/config.toml");
    std::fs::write(&file, "[connection]\napi_key = \"from-file\"\n[defaults]\nimage = \"host\"\n").unwrap();
    let home = home.path().to_str().unwrap();
    let env = [("HOME", home), ("OPEN_SANDBOX_API_KEY", "from-env")];
    let get = ["sandbox", "get", "s1"];
    for (args, env, key) in [
        (&["--api-key", "from-flag", "sandbox", "get", "s1"][..], &env[..], "from-flag"),
        (&get, &env, "from-env"),
        (&get, &env[..1], "from-file"),
    ] {
        assert_eq!(osb_how(&fake, args, How { env, ..How::default() }).await.code, 0);
        assert_eq!(fake.seen().last().unwrap().header("open-sandbox-api-key"), Some(key));
    }
    std::fs::write(&file, "[connection]\napi_key = \"oops\n").unwrap();
    let done = osb_how(&fake, &get, How { env: &env[..1], ..How::default() }).await;
    assert!(done.code == 1 && done.err.contains("config.toml") && !done.err.contains("oops"), "{done:?}");
    let done = osb(&fake, &["--config", "/nonexistent.toml", "sandbox", "get", "s1"]).await;
    assert!(done.code == 1 && done.err.contains("/nonexistent.toml"), "{done:?}");
}

#[tokio::test]
async fn cat_says_what_helps_and_shows_a_terminal_only_text() {
    let fake = Fake::start(|_, seen| {
        let target = seen.target.rsplit("/proxy/44772").next().unwrap().to_owned();
        let error = |status, code: &str| json(status, json!({"code": code, "message": "m"}));
        let answer = match target.as_str() {
            _ if seen.target.contains("/endpoints/") => endpoint(&seen),
            "/files/download?path=%2Fdir" => error(400, "INVALID_REQUEST_BODY"),
            "/directories/list?path=%2Fdir&depth=1" => json(200, json!([])),
            "/files/download?path=%2Fbinary" => reply(200, "\u{1b}]0;owned\u{7}"),
            "/files/download?path=%2Ftext" => reply(200, "a\n\tb\n"),
            _ => error(404, "FILE_NOT_FOUND"),
        };
        async move { answer }
    })
    .await;
    let terminal = How { terminal: true, ..How::default() };
    for (path, how, code, out, err) in [
        ("/dir", How::default(), 1, "", "error: /dir is a directory: `osb file ls s1 /dir` lists it, "),
        ("/none", How::default(), 1, "", "error: m (FILE_NOT_FOUND, HTTP 404"),
        ("none", How::default(), 1, "", "; paths in a sandbox begin with /"),
        ("/binary", How::default(), 0, "\u{1b}]0;owned\u{7}", ""),
        ("/binary", terminal, 1, "", "/binary is not plain text, and a terminal"),
        ("/text", terminal, 0, "a\n\tb\n", ""),
    ] {
        let done = osb_how(&fake, &["file", "cat", "s1", path], how).await;
        assert!((done.code, &done.out[..]) == (code, out) && done.err.contains(err), "{path}: {done:?}");
    }
}

#[tokio::test]
async fn top_outlives_a_server_that_is_away() {
    let page = json!({"page": 1, "pageSize": 20, "totalItems": 0, "totalPages": 0, "hasNextPage": false});
    let fake = Fake::start(move |number, _| {
        let answer = match number {
            0 => json(200, json!({"items": [], "pagination": page})),
            _ => json(503, json!({"code": "BUSY", "message": "starting"})),
        };
        async move { answer }
    })
    .await;
    let how = How { terminal: true, ..How::default() };
    let limit = std::time::Duration::from_secs(5);
    let ended = tokio::time::timeout(limit, osb_how(&fake, &["top", "-i", "1"], how)).await;
    assert!(ended.is_err(), "{ended:?}");
    assert!(fake.calls().len() > 5, "more than the attempts of one look: {:?}", fake.calls());
}

#[tokio::test]
async fn a_misspelt_key_of_the_settings_file_is_told_once() {
    let fake = with_command(Vec::new(), false).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, "[connection]\napi_kye = \"s3cret\"\n[other-program]\nx = 1\n").unwrap();
    let file = file.to_str().unwrap();
    for args in [&["sandbox", "kill", "s1"][..], &["config", "show"]] {
        let done = osb(&fake, &[&["--config", file], args].concat()).await;
        let told = format!(
            "osb: {file}: not known and without effect: connection.api_kye (did you mean connection.api_key?), \
             other-program\n"
        );
        assert_eq!((done.code, done.err), (0, told), "{args:?}");
    }
}

#[tokio::test]
async fn states_are_taken_in_any_case_and_others_refused_with_a_list() {
    let page = json!({"page": 1, "pageSize": 20, "totalItems": 0, "totalPages": 0, "hasNextPage": false});
    let fake = Fake::start(move |_, _| {
        let answer = json(200, json!({"items": [], "pagination": page}));
        async move { answer }
    })
    .await;
    assert_eq!(osb(&fake, &["sandbox", "list", "-s", "running", "-s", "PAUSED"]).await.code, 0);
    assert_eq!(fake.calls(), ["GET /v1/sandboxes?state=Running&state=Paused"]);
    let error = Osb::try_parse_from(["osb", "sandbox", "list", "-s", "runing"]).err().unwrap();
    let text = error.to_string();
    assert_eq!(error.exit_code(), 2);
    assert!(text.contains("Pending, Running, Pausing") && text.contains("'Running'"), "{text}");
}

#[tokio::test]
async fn output_as_yaml_and_raw() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.target.rsplit("/proxy/44772").next().unwrap() {
            _ if seen.target.contains("/endpoints/") => endpoint(&seen),
            "/metrics" => json(
                200,
                json!({"cpu_count": 2, "cpu_used_pct": 12.34, "mem_total_mib": 512.0, "mem_used_mib": 7.5,
                    "timestamp": 1_764_582_558_000_i64}),
            ),
            target if target.contains("/diagnostics/logs?scope=") => json(
                200,
                json!({"sandboxId": "s1", "kind": "logs", "scope": "all", "delivery": "inline",
                    "contentType": "text/plain", "content": "one\ntwo", "truncated": true, "warnings": ["w"]}),
            ),
            target if target.contains("/diagnostics/inspect") => reply(200, "Status: running\n"),
            _ => json(200, sandbox("s1")),
        };
        async move { answer }
    })
    .await;
    let done = osb(&fake, &["sandbox", "get", "s1", "-o", "yaml"]).await;
    assert!(done.out.contains("\nstatus:\n  last_transition_at: null\n  message: null\n"), "{}", done.out);
    assert!(done.out.contains("\nid: s1\nimage:\n  auth: null\n  image: host\n"), "{}", done.out);
    let done = osb(&fake, &["sandbox", "metrics", "s1", "-o", "raw"]).await;
    assert_eq!(done.out, "[09:49:18] cpu=12.3% cores=2 mem=7.5/512.0MiB\n");
    let done = osb(&fake, &["sandbox", "metrics", "s1", "-o", "json"]).await;
    let value: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(
        (&value["cpu_used_percentage"], &value["memory_total_in_mib"]),
        (&json!(12.34), &json!(512.0))
    );

    let done = osb(&fake, &["diagnostics", "logs", "s1", "-s", "all"]).await;
    assert_eq!(done.out, "one\ntwo\n");
    assert!(done.err.contains("there is more") && done.err.contains("osb: w\n"), "{}", done.err);
    let done = osb(&fake, &["diagnostics", "logs", "s1", "-s", "all", "-o", "json"]).await;
    let value: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(
        (&value["content"], &value["sandbox_id"], &value["expires_at"]),
        (&json!("one\ntwo"), &json!("s1"), &Value::Null)
    );
    assert_eq!(osb(&fake, &["devops", "inspect", "s1", "-o", "raw"]).await.out, "Status: running\n");

    // Forms that do not go with what is asked for.
    for args in [
        &["command", "run", "s1", "-o", "json", "--", "x"][..],
        &["command", "run", "s1", "-d", "-o", "raw", "--", "x"],
        &["command", "logs", "s1", "c1", "-f", "-o", "json"],
    ] {
        let done = osb(&fake, args).await;
        assert!(done.code == 2 && done.out.is_empty() && done.err.starts_with("error: "), "{done:?}");
    }
}

#[tokio::test]
async fn ids_that_do_not_exist_are_answered_with_those_that_may_be_meant() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.target.as_str() {
            target if target.starts_with("/v1/sandboxes?") => json(
                200,
                json!({"items": [sandbox("abc-1"), sandbox("def-2")], "pagination": {"page": 1, "pageSize": 200,
                    "totalItems": 2, "totalPages": 1, "hasNextPage": false}}),
            ),
            _ => json(404, json!({"code": "DOCKER::SANDBOX_NOT_FOUND", "message": "no such sandbox"})),
        };
        async move { answer }
    })
    .await;
    for (args, hint) in [
        (&["sandbox", "get", "abc"][..], "hint: did you mean abc-1?"),
        (&["file", "cat", "de", "/x"], "hint: did you mean def-2?"),
        (&["sandbox", "kill", "a"], "hint: did you mean abc-1?"),
        (&["logs", "zzz"], "hint: `osb sandbox list` shows"),
    ] {
        let done = osb(&fake, args).await;
        assert!(done.code == 1 && done.err.contains(hint), "{done:?}");
    }
}

#[tokio::test]
async fn requests_come_from_files_too() {
    let fake = with_command(Vec::new(), false).await;
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let request = file("r.json", r#"{"image": "host", "timeout": null, "env": {"A": "1"}}"#);
    let done = osb(&fake, &["sandbox", "create", "-f", &request, "--skip-health-check", "-o", "json"]).await;
    assert_eq!(
        serde_json::from_str::<Value>(&done.out).unwrap(),
        json!({"id": "s1", "status": "created", "timeout": "manual-cleanup", "image": "host", "request_file": request})
    );
    assert_eq!(body_of(&fake, "POST /v1/sandboxes")["env"], json!({"A": "1"}));

    let policy =
        file("p.json", r#"{"defaultAction": "deny", "egress": [{"action": "allow", "target": "a.org"}]}"#);
    let volumes = file("v.json", r#"[{"name": "v", "mountPath": "/v", "host": {"path": "/srv"}}]"#);
    let fake = with_command(Vec::new(), false).await;
    let args = [
        "sandbox",
        "create",
        "-i",
        "host",
        "--network-policy-file",
        &policy,
        "--credential-proxy",
        "--volumes-file",
        &volumes,
        "--skip-health-check",
    ];
    assert_eq!(osb(&fake, &args).await.code, 0);
    let body = body_of(&fake, "POST /v1/sandboxes");
    assert_eq!(body["networkPolicy"]["egress"][0]["target"], "a.org");
    assert_eq!(body["credentialProxy"], json!({"enabled": true}));
    assert_eq!(body["volumes"][0]["host"]["path"], "/srv");

    let wrong = file("w.json", r#"{"image": "host", "imgae": 1}"#);
    let done = osb(&fake, &["sandbox", "create", "-f", &wrong]).await;
    assert!(done.code == 1 && done.err.contains("w.json: unknown: imgae"), "{done:?}");
}

#[tokio::test]
async fn run_copies_files_in_and_out_and_passes_input_on() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.target.rsplit("/proxy/44772").next().unwrap() {
            _ if seen.target.contains("/endpoints/") => endpoint(&seen),
            "/v1/sandboxes" => json(202, sandbox("s1")),
            "/command" => {
                let lines = [init(), json!({"type": "execution_complete", "timestamp": 1})];
                pieces(lines.iter().map(|event| format!("{event}\n\n").into()).collect(), false)
            }
            target if target.starts_with("/files/info?path=%2Fout") => json(
                200,
                json!({"/out": {"path": "/out", "type": "file", "size": 6, "mode": 750, "owner": "root",
                    "group": "root", "modified_at": "T", "created_at": "T"}}),
            ),
            target if target.starts_with("/files/info") => {
                json(404, json!({"code": "FILE_NOT_FOUND", "message": "no such file"}))
            }
            target if target.starts_with("/files/download") => reply(200, "result"),
            _ => reply(200, ""),
        };
        async move { answer }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let local = dir.path().join("in.txt");
    std::fs::write(&local, "inside").unwrap();
    let copy_in = format!("{}:/work/in.txt", local.display());
    let copy_out = format!("/out:{}", dir.path().join("result").display());
    let how = How { stdin: b"typed", ..How::default() };
    let args = ["run", "-i", "host", "--copy-in", &copy_in, "--copy-out", &copy_out, "--", "sort"];
    let done = osb_how(&fake, &args, how).await;
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(std::fs::read_to_string(dir.path().join("result")).unwrap(), "result");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&dir.path().join("result").metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o750);
    let uploads: Vec<String> = fake
        .seen()
        .iter()
        .filter(|seen| seen.target.ends_with("/files/upload"))
        .map(|seen| String::from_utf8_lossy(&seen.body).into_owned())
        .collect();
    assert!(uploads[0].contains("/work/in.txt") && uploads[0].contains("inside"), "{uploads:?}");
    assert!(uploads[1].contains("typed"), "{uploads:?}");
    let argv = &body_of(&fake, COMMAND)["argv"];
    assert_eq!((&argv[0], &argv[4]), (&json!("sh"), &json!("sort")));
    assert_eq!(fake.calls().last().unwrap(), "DELETE /v1/sandboxes/s1");

    let done = osb(&fake, &["run", "host", "--copy-in", "/nonexistent:/x", "--", "true"]).await;
    assert!(done.code == 125 && done.err.contains("/nonexistent: No such file"), "{done:?}");
}

#[tokio::test]
async fn snapshots_templates_and_sessions() {
    let fake = Fake::start(|_, seen| {
        let snapshot = json!({"id": "n1", "sandboxId": "s1", "name": "x", "status": {"state": "Ready"},
            "createdAt": "2026-11-30T17:49:18Z"});
        let template = json!({"templateId": "t1", "image": "a", "publish": "s3://b", "format": "native",
            "status": {"phase": "Pending"}, "createdAt": "2026-11-30T17:49:18Z", "updatedAt": "2026-11-30T17:49:18Z"});
        let page = json!({"page": 1, "pageSize": 20, "totalItems": 1, "totalPages": 1, "hasNextPage": false});
        let answer = match seen.call().replace("/v1/sandboxes/s1/proxy/44772", "").as_str() {
            _ if seen.target.contains("/endpoints/") => endpoint(&seen),
            "POST /v1/sandboxes/s1/snapshots" => json(202, snapshot),
            "GET /v1/snapshots?sandboxId=s1&state=Ready" => json(200, json!({"items": [snapshot], "pagination": page})),
            "POST /v1/templates" => json(201, template),
            "GET /v1/templates" => json(200, json!({"items": [template], "pagination": page})),
            "POST /session" => json(200, json!({"session_id": "e1"})),
            "POST /session/e1/run" => pieces(
                [init(), json!({"type": "stdout", "text": "a\n", "timestamp": 1}), failed("3")]
                    .iter()
                    .map(|event| format!("{event}\n\n").into())
                    .collect(),
                false,
            ),
            call if call.starts_with("DELETE ") => reply(204, ""),
            call => json(501, json!({"code": "X", "message": format!("unexpected {call}")})),
        };
        async move { answer }
    })
    .await;
    let done = osb(&fake, &["snapshot", "create", "s1", "--name", "x", "-o", "json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&done.out).unwrap()["status"], "Ready", "{done:?}");
    let done = osb(&fake, &["snapshot", "list", "--sandbox-id", "s1", "--state", "Ready"]).await;
    assert!(
        done.out.starts_with("ID  NAME  SANDBOX_ID  STATUS  CREATED_AT\nn1  x     s1          Ready "),
        "{done:?}"
    );
    assert_eq!(osb(&fake, &["snapshot", "delete", "n1"]).await.out, "OK: deleted: n1\n");
    let args =
        ["template", "create", "-i", "a", "-p", "s3://b", "--format", "native", "--warmup-seconds", "3"];
    assert!(osb(&fake, &args).await.out.contains("status       Pending\n"));
    let body = body_of(&fake, "POST /v1/templates");
    assert_eq!((&body["format"], &body["readiness"]), (&json!("native"), &json!({"warmupSeconds": 3})));
    let done = osb(&fake, &["template", "list"]).await;
    assert!(done.out.contains("t1           Pending  a      native"), "{done:?}");
    let done = osb(&fake, &["command", "session", "create", "s1", "-w", "/w", "-o", "json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&done.out).unwrap()["session_id"], "e1", "{done:?}");
    let done =
        osb(&fake, &["command", "session", "run", "s1", "e1", "-t", "5s", "--", "export", "A=b c"]).await;
    assert_eq!((done.code, done.out.as_str()), (3, "a\n"), "{done:?}");
    let body = body_of(&fake, "POST /v1/sandboxes/s1/proxy/44772/session/e1/run");
    assert_eq!((&body["command"], &body["timeout"]), (&json!("export 'A=b c'"), &json!(5000)));
    assert_eq!(osb(&fake, &["command", "session", "delete", "s1", "e1"]).await.code, 0);
}

#[tokio::test]
async fn what_comes_later_says_so() {
    let fake = with_command(Vec::new(), false).await;
    for args in [
        &["egress", "patch", "s1", "--rule", "allow=a.org"][..],
        &["credential-vault", "binding", "get", "s1", "x", "-o", "yaml"],
    ] {
        let done = osb(&fake, args).await;
        assert!(done.code == 1 && done.err.contains("comes later"), "{done:?}");
    }
    assert!(fake.calls().is_empty());
}

#[tokio::test]
async fn profiles_are_chosen_by_option_variable_and_file() {
    let fake = Fake::start(|_, _| async { json(200, sandbox("s1")) }).await;
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join(".opensandbox")).unwrap();
    let file = home.path().join(".opensandbox/config.toml");
    let text = "profile = \"a\"\n[connection]\napi_key = \"shared\"\n[profiles.a.connection]\napi_key = \"key-a\"\n\
        [profiles.b.connection]\napi_key = \"key-b\"\n[profiles.c]\n";
    std::fs::write(&file, text).unwrap();
    let home = home.path().to_str().unwrap();
    let env = [("HOME", home), ("OPEN_SANDBOX_PROFILE", "b"), ("OPEN_SANDBOX_API_KEY", "env")];
    let get = ["sandbox", "get", "s1"];
    for (args, env, key) in [
        (&get[..], &env[..1], "key-a"),
        (&get, &env[..2], "key-b"),
        (&["--profile", "a", "sandbox", "get", "s1"], &env[..2], "key-a"),
        (&["--profile", "c", "sandbox", "get", "s1"], &env[..2], "shared"),
        (&get, &env, "env"),
        (&["--profile", "b", "sandbox", "get", "s1"], &env, "key-b"),
        (&["--profile", "b", "--api-key", "flag", "sandbox", "get", "s1"], &env, "flag"),
    ] {
        assert_eq!(osb_how(&fake, args, How { env, ..How::default() }).await.code, 0);
        assert_eq!(fake.seen().last().unwrap().header("open-sandbox-api-key"), Some(key), "{args:?}");
    }
    let how = How { env: &env[..1], ..How::default() };
    let done = osb_how(&fake, &["--profile", "x", "config", "show"], how).await;
    assert!(
        done.code == 1 && done.err.contains("no profile 'x'") && done.err.contains("a, b, c"),
        "{done:?}"
    );
    let done = osb_how(&fake, &["config", "show", "-o", "json"], how).await;
    let shown: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((&shown["api_key"], &shown["profile"]), (&json!("*****"), &json!("a")));
}

#[tokio::test]
async fn settings_are_written_and_set() {
    let fake = with_command(Vec::new(), false).await;
    let home = tempfile::tempdir().unwrap();
    let env = [("HOME", home.path().to_str().unwrap())];
    let how = How { env: &env, ..How::default() };
    let path = home.path().join(".opensandbox/config.toml");
    assert_eq!(osb_how(&fake, &["config", "init"], how).await.code, 0);
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let again = osb_how(&fake, &["config", "init", "-o", "json"], how).await;
    assert!(again.code == 0 && again.out.contains("\"status\": \"warning\""), "{again:?}");
    assert_eq!(osb_how(&fake, &["config", "set", "connection.request_timeout", "7"], how).await.code, 0);
    let done = osb_how(&fake, &["config", "show", "-o", "yaml"], how).await;
    assert!(done.out.contains("request_timeout: 7\n"), "{}", done.out);
    assert_eq!(osb_how(&fake, &["config", "init", "--force"], how).await.code, 0);
    assert!(!std::fs::read_to_string(&path).unwrap().contains("= 7"));
    let done = osb_how(&fake, &["config", "set", "nonsense", "1"], how).await;
    assert!(done.code == 1 && done.err.contains("there are: connection.api_key"), "{done:?}");
    assert!(fake.calls().is_empty());
}

#[tokio::test]
async fn an_endpoint_is_shown_with_its_headers_and_origin() {
    for (header, cell, value) in [(None, "-", Value::Null), (Some("template"), "template", json!("template"))]
    {
        let fake = Fake::start(move |_, seen| {
            let mut answer = endpoint(&seen);
            if let Some(header) = header {
                answer.headers_mut().insert("open-sandbox-origin", header.parse().unwrap());
            }
            async move { answer }
        })
        .await;
        let done = osb(&fake, &["sandbox", "endpoint", "s1", "-p", "8000"]).await;
        let shown = done.out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        assert!(shown.into_iter().any(|line| line == ["origin", cell]), "{}", done.out);
        let done = osb(&fake, &["sandbox", "endpoint", "s1", "-p", "8000", "-o", "json"]).await;
        let shown: Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!(shown["origin"], value);
        assert_eq!(shown["headers"], json!({"OpenSandbox-Secure-Access": "token"}));
    }
}

#[tokio::test]
async fn top_shows_figures_and_lives_with_sandboxes_that_have_none() {
    let fake = Fake::start(|_, seen| {
        let answer = match seen.target.as_str() {
            target if target.starts_with("/v1/sandboxes?") => {
                let mut pending = sandbox("s0");
                pending["status"]["state"] = json!("Pending");
                json(
                    200,
                    json!({"items": [pending, sandbox("s1"), sandbox("s2")], "pagination": {"page": 1,
                        "pageSize": 200, "totalItems": 3, "totalPages": 1, "hasNextPage": false}}),
                )
            }
            target if target.contains("s1/endpoints/") => endpoint(&seen),
            target if target.ends_with("/metrics") => json(
                200,
                json!({"cpu_count": 2, "cpu_used_pct": 12.34, "mem_total_mib": 512.0, "mem_used_mib": 7.5, "timestamp": 1}),
            ),
            _ => json(404, json!({"code": "DOCKER::SANDBOX_NOT_FOUND", "message": "gone"})),
        };
        async move { answer }
    })
    .await;
    let done = osb(&fake, &["top"]).await;
    let lines: Vec<Vec<&str>> = done.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..5], ["ID", "STATUS", "IMAGE", "CPU", "MEMORY"]);
    assert_eq!(lines[1][..7], ["s1", "Running", "host", "12.3%", "7.5", "MiB", "512"]);
    assert_eq!(lines[2][..5], ["s0", "Pending", "host", "-", "-"]);
    assert_eq!(lines.len(), 4);
    let done = osb(&fake, &["top", "-o", "json"]).await;
    let value: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((&value[0]["metrics"]["cpu_count"], &value[1]["metrics"]), (&json!(2), &Value::Null));
}

#[test]
fn command_lines_that_are_not_right_end_with_2() {
    for args in [
        &["run", "host", "-e", "NOVALUE"][..],
        &["run"],
        &["run", "host", "-e", "NOVALUE", "--", "x"],
        &["sandbox", "kill"],
        &["sandbox", "renew", "s1"],
        &["sandbox", "renew", "s1", "-t", "soon"],
        &["sandbox", "create", "--image", "a", "--snapshot-id", "b"],
        &["sandbox", "create", "--image-auth-username", "a"],
        &["sandbox", "list", "--page", "0"],
        &["sandbox", "endpoint", "s1", "-p", "70000"],
        &["command", "run", "s1"],
        &["command", "run", "s1", "-o", "xml", "--", "x"],
        &["file", "chmod", "s1", "/a", "--mode", "999"],
        &["nonsense"],
    ] {
        let error =
            Osb::try_parse_from([&["osb"], args].concat()).err().unwrap_or_else(|| panic!("{args:?}"));
        assert_eq!(error.exit_code(), 2, "{args:?}");
    }
    <Osb as clap::CommandFactory>::command().debug_assert();
}
