//! Output on its way to the client.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use futures_util::{SinkExt, StreamExt};
use http_body_util::BodyExt;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use super::count;
use crate::server::{Execd, KEY, Options, Server};
use crate::stats::{Samples, print_one, process_mib};

/// Between two lines, so that each finds everybody asleep, as a program's output does.
const PAUSE: &str = "0.003";

/// Each line tells when it was written; the clock is the same on both sides.
pub(crate) async fn line() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    let lines = count(1000);
    let command = format!(
        "for ((i = 0; i < {lines}; i++)); do echo \"$EPOCHREALTIME\"; read -rt {PAUSE} <> <(:); done"
    );
    let mut body = conn.command(&id, &command).await?.into_body();
    let mut samples = Samples::default();
    let mut pending = Vec::new();
    while let Some(frame) = body.frame().await {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        let Ok(data) = frame?.into_data() else { continue };
        pending.extend_from_slice(&data);
        while let Some(end) = pending.windows(2).position(|window| window == b"\n\n") {
            let event: serde_json::Value = serde_json::from_slice(&pending[..end])?;
            pending.drain(..end + 2);
            if event["type"] == "stdout" {
                let written: f64 = event["text"].as_str().unwrap_or_default().trim().parse()?;
                samples.push((now - written) * 1e3);
            }
        }
    }
    ensure!(samples.len() == lines, "{} of {lines} lines came", samples.len());
    conn.delete(&id).await?;
    samples.print("line_to_event", "ms", None);
    Ok(())
}

/// 1 GiB in lines of 100 bytes and of 64 KiB.
pub(crate) async fn one_gib() -> Result<()> {
    const SIZE: u64 = 1 << 30;
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    let execd = Execd::of(&mut conn, &id).await?;
    for (name, length) in [("stdout_1gib_short_lines", 99), ("stdout_1gib_long_lines", 65_535)] {
        let command = format!("yes \"$(printf '%{length}s' | tr ' ' x)\" | head -c {SIZE}");
        let idle = memory(&server, &execd);
        let mut samples = Samples::default();
        for _ in 0..3 {
            let began = Instant::now();
            let mut body = conn.command(&id, &command).await?.into_body();
            let mut text = 0_u64;
            let mut last = Vec::new();
            while let Some(frame) = body.frame().await {
                let Ok(data) = frame?.into_data() else { continue };
                text += data.iter().filter(|&&byte| byte == b'x').count() as u64;
                last = data.to_vec();
            }
            let took = began.elapsed();
            let lines = SIZE.div_ceil(length + 1);
            ensure!(text >= SIZE - lines, "only {text} bytes came");
            ensure!(last.windows(18).any(|window| window == b"execution_complete"), "no end came");
            samples.push(1024.0 * 1.048_576 / took.as_secs_f64());
        }
        samples.print(name, "MB/s", None);
        let grown = memory(&server, &execd) - idle;
        print_one(&format!("{name}_peak_above_idle"), "MiB", grown, None);
    }
    conn.delete(&id).await?;
    Ok(())
}

/// Peak memory of the server and of a sandbox's daemon.
fn memory(server: &Server, execd: &Execd) -> f64 {
    process_mib(server.pid(), "VmHWM:") + process_mib(execd.daemon, "VmHWM:")
}

/// A key, and its echo by the terminal itself: no program has to wake up for it.
pub(crate) async fn pty_echo() -> Result<()> {
    let server = Server::start(Options::default()).await?;
    server.settle().await;
    let mut conn = server.conn().await?;
    let id = conn.create(&server.image).await?;
    let proxy = format!("/v1/sandboxes/{id}/proxy/44772");
    let (status, answer) =
        conn.call("POST", &format!("{proxy}/pty"), r#"{"command":"cat >/dev/null"}"#).await?;
    ensure!(status.is_success(), "the terminal was refused: {status}");
    let answer: serde_json::Value = serde_json::from_slice(&answer)?;
    let terminal = answer["session_id"].as_str().context("a terminal without an id")?.to_owned();
    let mut request = format!("ws://{}{proxy}/pty/{terminal}/ws", server.host()).into_client_request()?;
    request.headers_mut().insert("open-sandbox-api-key", KEY.parse()?);
    let stream = tokio::net::TcpStream::connect(server.host()).await?;
    stream.set_nodelay(true)?;
    let (mut socket, _) = tokio_tungstenite::client_async(request, stream).await?;
    let mut samples = Samples::default();
    tokio::time::sleep(Duration::from_millis(300)).await;
    for round in 0..count(1000) + 20 {
        let began = Instant::now();
        socket.send(Message::Binary(vec![0, b'k'].into())).await?;
        loop {
            match socket.next().await.context("the terminal ended")?? {
                Message::Binary(frame) if frame.contains(&b'k') => break,
                Message::Close(_) => bail!("the terminal was closed"),
                _ => {}
            }
        }
        if round >= 20 {
            samples.push_ms(began.elapsed());
        }
        // A terminal's line is bounded.
        if round % 100 == 99 {
            socket.send(Message::Binary(vec![0, 0x15].into())).await?;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    conn.delete(&id).await?;
    samples.print("pty_echo", "ms", None);
    Ok(())
}
