//! Commands in a real sandbox.

use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use opensandbox::{CommandEvent, Error};

use crate::need;
use crate::server::Guarded;

#[tokio::test]
async fn output_and_exit_codes() {
    let sandbox = need!(Guarded::start().await);
    let output = sandbox.shell("echo out; echo err >&2; printf tail; exit 7").output().await.unwrap();
    assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("out\ntail", "err\n"));
    assert_eq!((output.exit.code, output.success()), (Some(7), false));
    assert_eq!(output.id.len(), 32);

    let odd = ["printf", "%s|", "a b", "; $HOME", "", "é\n"];
    let output = sandbox.argv(odd).cwd("/tmp").output().await.unwrap().checked().unwrap();
    assert_eq!(output.stdout, "a b|; $HOME||é\n|");

    let command = sandbox.shell("echo $PWD $A $B; id -u; id -g").cwd("/tmp").env("A", "1").envs([("B", "2")]);
    let output = command.user_and_group(1234, 5678).output().await.unwrap();
    assert_eq!(output.stdout, "/tmp 1 2\n1234\n5678\n");

    let killed = sandbox.shell("kill -9 $$").output().await.unwrap();
    assert!(!killed.success() && killed.exit.code.is_some());
    let absent = sandbox.argv(["/nowhere/nothing"]).output().await.unwrap();
    assert_eq!((absent.exit.code, absent.success()), (None, false));
    assert!(absent.checked().unwrap_err().to_string().contains("could not be run"));
    let refused = sandbox.shell("true").cwd("/nowhere").output().await.unwrap_err();
    assert_eq!(refused.status(), Some(400), "{refused}");
}

#[tokio::test]
async fn events_come_as_they_happen() {
    let sandbox = need!(Guarded::start().await);
    let stream = sandbox.shell("echo a; sleep 0.5; echo b").stream().await.unwrap();
    let began = Instant::now();
    let mut seen = Vec::new();
    let events: Vec<CommandEvent> = stream
        .into_stream()
        .inspect_ok(|event| seen.push((began.elapsed(), event.clone())))
        .try_collect()
        .await
        .unwrap();
    assert!(matches!(&events[0], CommandEvent::Started { id } if id.len() == 32));
    assert_eq!(events[1..3], ["a\n", "b\n"].map(|text| CommandEvent::Stdout(text.to_owned())));
    assert!(matches!(&events[3], CommandEvent::Finished(exit) if exit.success() && exit.time.is_some()));
    let at = |number: usize| seen[number].0;
    assert!(at(2) - at(1) > Duration::from_millis(300), "{seen:?}");

    let mut handled = 0;
    let output = sandbox.shell("seq 3").output_with(|_| handled += 1).await.unwrap();
    assert_eq!((output.stdout.as_str(), handled), ("1\n2\n3\n", 5));
}

#[tokio::test]
async fn large_output_arrives_whole() {
    let sandbox = need!(Guarded::start().await);
    let output = sandbox.shell("seq 200000; head -c 3000000 /dev/zero | tr '\\0' x").output().await.unwrap();
    let expected: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert_eq!(output.stdout.len(), expected.len() + 3_000_000);
    assert!(output.stdout.starts_with(&expected) && output.stdout.ends_with("xxx"));
}

#[tokio::test]
async fn a_time_limit_ends_a_command() {
    let sandbox = need!(Guarded::start().await);
    let began = Instant::now();
    let output = sandbox.shell("sleep 60").timeout(Duration::from_millis(300)).output().await.unwrap();
    assert!(!output.success() && began.elapsed() < Duration::from_secs(20));
}

#[tokio::test]
async fn background_commands_have_status_logs_and_an_end() {
    let sandbox = need!(Guarded::start().await);
    let id = sandbox.shell("echo one; sleep 0.3; echo two; exit 5").start().await.unwrap();
    assert!(sandbox.command_status(&id).await.unwrap().running);
    let end = Instant::now() + Duration::from_secs(15);
    let status = loop {
        let status = sandbox.command_status(&id).await.unwrap();
        if !status.running {
            break status;
        }
        assert!(Instant::now() < end);
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!((status.exit_code, status.finished_at.is_some()), (Some(5), true));
    assert!(status.usage.unwrap().peak_memory_bytes > 100_000);
    let all = sandbox.command_logs(&id, None).await.unwrap();
    assert_eq!((&all.content[..], all.cursor, all.dropped), (&b"one\ntwo\n"[..], Some(8), 0));
    let rest = sandbox.command_logs(&id, Some(4)).await.unwrap();
    assert_eq!((&rest.content[..], rest.cursor), (&b"two\n"[..], Some(8)));

    let sleeper = sandbox.shell("sleep 60").start().await.unwrap();
    sandbox.interrupt(&sleeper).await.unwrap();
    assert!(!sandbox.command_status(&sleeper).await.unwrap().running);
    assert!(sandbox.command_status("0".repeat(32).as_str()).await.unwrap_err().is_not_found());
    let error = sandbox.argv(["/nowhere/nothing"]).start().await.unwrap_err();
    assert!(matches!(error, Error::NotStarted(_)), "{error}");
}

#[tokio::test]
async fn a_dropped_stream_leaves_the_command_and_interrupt_ends_it() {
    let sandbox = need!(Guarded::start().await);
    let mut stream = sandbox.shell("echo on; sleep 60").stream().await.unwrap();
    let Some(CommandEvent::Started { id }) = stream.next().await.unwrap() else { panic!("no start") };
    drop(stream);
    assert!(sandbox.command_status(&id).await.unwrap().running);
    sandbox.interrupt(&id).await.unwrap();
    assert!(!sandbox.command_status(&id).await.unwrap().running);
}

#[tokio::test]
async fn variables_last_for_later_commands() {
    let sandbox = need!(Guarded::start().await);
    for value in ["plain", "two words $HOME \"x\"", "it's\nlines \\ \"too\""] {
        sandbox.set_env("KEPT", value).await.unwrap();
        let output = sandbox.shell("printf %s \"$KEPT\"").output().await.unwrap();
        assert_eq!(output.stdout, value);
    }
}

#[tokio::test]
async fn metrics_are_measured_once_and_again() {
    let sandbox = need!(Guarded::start().await);
    let once = sandbox.metrics().await.unwrap();
    assert!(once.cpu_count >= 1 && once.mem_total_mib > 0.0 && once.timestamp > 0);
    let mut watch = sandbox.watch_metrics().await.unwrap();
    let first = watch.next().await.unwrap().unwrap();
    let second = watch.next().await.unwrap().unwrap();
    assert!(second.timestamp > first.timestamp);
}

#[tokio::test]
async fn an_end_of_the_sandbox_ends_a_stream_with_an_error() {
    let sandbox = need!(Guarded::start().await);
    let mut stream = sandbox.shell("sleep 60").stream().await.unwrap();
    stream.next().await.unwrap();
    sandbox.kill().await.unwrap();
    let end = loop {
        match stream.next().await {
            Ok(Some(CommandEvent::Finished(exit))) => break Err(exit),
            Ok(event) => assert!(event.is_some()),
            Err(error) => break Ok(error),
        }
    };
    match end {
        Ok(error) => assert!(matches!(error, Error::StreamCut | Error::Broken { .. }), "{error}"),
        Err(exit) => assert!(!exit.success()),
    }
}
