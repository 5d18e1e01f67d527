//! What keeps its state from call to call: shell sessions, terminals, and files as somebody else.

use opensandbox::{Attach, TerminalEvent};

use crate::need;
use crate::server::Guarded;

#[tokio::test]
async fn a_session_keeps_its_state() {
    let sandbox = need!(Guarded::start().await);
    let session = sandbox.create_session(Some("/tmp")).await.unwrap();
    let first = session.shell("name=value; cd /; false").output().await.unwrap();
    assert!(!first.success());
    let second = session.shell("echo $name $PWD").output().await.unwrap();
    assert_eq!((second.success(), second.stdout.as_str()), (true, "value /\n"));
    session.delete().await.unwrap();
    assert!(session.shell("true").output().await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn a_terminal_is_left_and_entered_again() {
    let sandbox = need!(Guarded::start().await);
    let terminal = sandbox.create_terminal(None, Some("bash --norc")).await.unwrap();
    let mut connection =
        terminal.attach(&Attach { size: Some((100, 30)), ..Attach::default() }).await.unwrap();
    connection.send("stty size; echo $((6*7))-first\n").await.unwrap();
    let mut seen = String::new();
    read_until(&mut connection, &mut seen, "42-first").await;
    assert!(seen.contains("30 100"), "{seen}");
    drop(connection);
    let again = Attach { since: Some(0), takeover: true, ..Attach::default() };
    let mut connection = terminal.attach(&again).await.unwrap();
    let mut replayed = String::new();
    read_until(&mut connection, &mut replayed, "42-first").await;
    connection.send("exit 3\n").await.unwrap();
    loop {
        match connection.recv().await.unwrap() {
            Some(TerminalEvent::Exit { code }) => {
                assert_eq!(code, 3);
                break;
            }
            Some(_) => {}
            None => panic!("no word of the end"),
        }
    }
}

async fn read_until(connection: &mut opensandbox::TerminalConnection, seen: &mut String, text: &str) {
    while !seen.contains(text) {
        let event = connection.recv().await.unwrap();
        match event.expect("more to come") {
            TerminalEvent::Output(bytes) | TerminalEvent::Replay { bytes, .. } => {
                seen.push_str(&String::from_utf8_lossy(&bytes));
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn files_belong_to_whom_they_are_made_as() {
    let sandbox = need!(Guarded::start().await);
    sandbox.files_as(1234, 1234).write("/tmp/theirs", "text").await.unwrap();
    let owner = sandbox.shell("stat -c %u:%g /tmp/theirs").output().await.unwrap();
    assert_eq!(owner.stdout, "1234:1234\n");
    assert!(sandbox.files_as(1234, 1234).write("/root/no", "text").await.is_err());
}
