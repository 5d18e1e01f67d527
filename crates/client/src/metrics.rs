//! What a sandbox uses.

use std::collections::VecDeque;

use futures_util::stream::try_unfold;
use osb_protocol::execd::Metrics;
use reqwest::Method;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::items::Items;
use crate::lines::Lines;
use crate::sandbox::Sandbox;
use crate::transport::Answer;

/// Longest line of a watch.
const MAX_LINE: usize = 64 << 10;

/// A line of a watch.
#[derive(Deserialize)]
#[serde(untagged)]
enum Tick {
    Measured(Metrics),
    Failed { error: String },
}

impl Sandbox {
    /// CPU and memory in use.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let now = sandbox.metrics().await?;
    /// println!("{:.0} % of {} cores, {:.0} MiB", now.cpu_used_pct, now.cpu_count, now.mem_used_mib);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox cannot be reached.
    pub async fn metrics(&self) -> Result<Metrics> {
        let request = self.execd(Method::GET, &["metrics"]).await?;
        self.transport().json(request, self.config().request_timeout).await
    }

    /// CPU and memory in use, again every second until the value is dropped or the sandbox ends.
    ///
    /// ```no_run
    /// # async fn example(sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let mut watch = sandbox.watch_metrics().await?;
    /// while let Some(now) = watch.next().await? {
    ///     println!("{:.0} %", now.cpu_used_pct);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox cannot be reached.
    pub async fn watch_metrics(&self) -> Result<Items<Metrics>> {
        let request = self.execd(Method::GET, &["metrics", "watch"]).await?;
        let answer = self.transport().open(request, self.config().request_timeout).await?;
        Ok(Items::new(try_unfold(Watch::new(answer), |mut watch| async move {
            Ok(watch.next().await?.map(|metrics| (metrics, watch)))
        })))
    }
}

struct Watch {
    answer: Answer,
    lines: Lines,
    ready: VecDeque<Metrics>,
}

impl Watch {
    fn new(answer: Answer) -> Self {
        Self { answer, lines: Lines::new(MAX_LINE), ready: VecDeque::new() }
    }

    async fn next(&mut self) -> Result<Option<Metrics>> {
        loop {
            if let Some(metrics) = self.ready.pop_front() {
                return Ok(Some(metrics));
            }
            let Some(piece) = self.answer.chunk().await? else { return Ok(None) };
            self.lines.push(&piece);
            loop {
                match self.lines.next_line() {
                    Ok(Some(line)) => match read(line) {
                        Ok(metrics) => self.ready.extend(metrics),
                        Err(reason) => return Err(self.unexpected(reason)),
                    },
                    Ok(None) => break,
                    Err(error) => return Err(self.unexpected(error.to_string())),
                }
            }
        }
    }

    fn unexpected(&self, reason: String) -> Error {
        Error::Unexpected { call: self.answer.call.clone(), reason }
    }
}

/// A line's measurement. Gateways may frame it as SSE; blank lines and comments hold none.
fn read(line: &[u8]) -> Result<Option<Metrics>, String> {
    let line = line.trim_ascii();
    let json = line.strip_prefix(b"data:").unwrap_or(line).trim_ascii();
    if json.is_empty() || line.starts_with(b":") {
        return Ok(None);
    }
    match serde_json::from_slice(json) {
        Ok(Tick::Measured(metrics)) => Ok(Some(metrics)),
        Ok(Tick::Failed { error }) => Err(error),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_watch() {
        let line = br#"{"cpu_count":2,"cpu_used_pct":1.5,"mem_total_mib":2,"mem_used_mib":1,"timestamp":3}"#;
        assert_eq!(read(line).unwrap().unwrap().cpu_count, 2);
        assert_eq!(read(&[b"data: ", &line[..], b"\r"].concat()).unwrap().unwrap().timestamp, 3);
        let upstream = String::from_utf8_lossy(line).replace(":2,\"cpu_used", ":2.0,\"cpu_used");
        assert_eq!(read(upstream.as_bytes()).unwrap().unwrap().cpu_count, 2);
        assert!(read(b"").unwrap().is_none() && read(b": hi").unwrap().is_none());
        assert_eq!(read(br#"{"error":"no cgroup"}"#).unwrap_err(), "no cgroup");
        assert!(read(b"<html>").is_err());
    }
}
