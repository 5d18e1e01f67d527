//! Asks the credential helpers that Docker's configuration names.

use std::process::Stdio;

use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::time::timeout;

use crate::error::{Error, Result, printable};
use crate::settings::Patience;

/// Most of a helper's output that is read.
const MOST_OUTPUT: u64 = 64 << 10;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    #[serde(default)]
    username: String,
    #[serde(default)]
    secret: String,
}

/// User and secret that `docker-credential-<name>` keeps for a server; `None` when it keeps none.
pub(crate) async fn ask(name: &str, server: &str, patience: &Patience) -> Result<Option<(String, String)>> {
    let helper = format!("docker-credential-{name}");
    let failed =
        |reason: String| Error::CredentialHelper { helper: helper.clone(), registry: server.into(), reason };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || !name.bytes().all(plain) {
        return Err(failed("its name is no file name".into()));
    }
    let mut child = Command::new(&helper)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| failed(format!("it cannot be started: {error}")))?;
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(failed("it has no pipes".into()));
    };
    let run = async {
        // A helper that does not read its question may still answer.
        let _ = stdin.write_all(server.as_bytes()).await;
        drop(stdin);
        let mut output = Vec::new();
        stdout.take(MOST_OUTPUT + 1).read_to_end(&mut output).await?;
        if output.len() as u64 > MOST_OUTPUT {
            // It may be waiting for a reader.
            child.start_kill()?;
        }
        Ok::<_, std::io::Error>((child.wait().await?, output))
    };
    let limit = patience.credential_helper;
    let (status, output) = timeout(limit, run)
        .await
        .map_err(|_| failed(format!("no answer within {limit:?}")))?
        .map_err(|error| failed(error.to_string()))?;
    if output.len() as u64 > MOST_OUTPUT {
        return Err(failed("its answer is too long".into()));
    }
    if !status.success() {
        // Helpers tell what is wrong on standard output, and never the secret there.
        let said = String::from_utf8_lossy(&output);
        if said.contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed(format!("{status}: {}", printable(said.trim(), 200))));
    }
    let answer: Answer = serde_json::from_slice(&output)
        .map_err(|_| failed("its answer is not the JSON it should be".into()))?;
    Ok((!answer.secret.is_empty()).then_some((answer.username, answer.secret)))
}
