//! Snapshots of sandboxes.

use std::time::Duration;

use osb_protocol::lifecycle::{CreateSnapshotRequest, ListSnapshotsResponse, Snapshot};
use reqwest::Method;
use tokio::time::{Instant, sleep_until};

use crate::client::Client;
use crate::error::{Error, Result};
use crate::items::{Items, PagedFilter, all};
use crate::list::page_query;
use crate::sandbox::Sandbox;

/// Time between two questions after a snapshot that is being made.
const POLL: Duration = Duration::from_millis(200);

/// Snapshots of a server; see [`Client::snapshots`].
#[derive(Debug, Clone, Copy)]
pub struct Snapshots<'a> {
    client: &'a Client,
}

/// Which snapshots to list. All conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Made of this sandbox.
    pub sandbox_id: Option<String>,
    /// With this name.
    pub name: Option<String>,
    /// Any of these states; none means all.
    pub states: Vec<String>,
    /// Page, from 1.
    pub page: Option<u32>,
    /// Items per page, 1 to 200.
    pub page_size: Option<u32>,
}

impl SnapshotFilter {
    fn query(&self) -> Vec<(&'static str, String)> {
        let mut query = Vec::new();
        query.extend(self.sandbox_id.clone().map(|id| ("sandboxId", id)));
        query.extend(self.name.clone().map(|name| ("name", name)));
        query.extend(self.states.iter().map(|state| ("state", state.clone())));
        query.extend(page_query(self.page, self.page_size));
        query
    }
}

impl PagedFilter for SnapshotFilter {
    fn place(&mut self) -> (&mut Option<u32>, &mut Option<u32>) {
        (&mut self.page, &mut self.page_size)
    }
}

impl Client {
    /// Snapshots of sandboxes.
    #[must_use]
    pub fn snapshots(&self) -> Snapshots<'_> {
        Snapshots { client: self }
    }
}

impl Sandbox {
    /// Begins a snapshot; see [`Snapshots::wait_ready`].
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client, sandbox: opensandbox::Sandbox) -> opensandbox::Result<()> {
    /// let snapshot = sandbox.create_snapshot(Some("before-upgrade")).await?;
    /// client.snapshots().wait_ready(&snapshot.id, std::time::Duration::from_secs(60)).await?;
    /// let copy = client.create_from_snapshot(&snapshot.id).send().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the sandbox does not exist, the runtime has no snapshots, or the server cannot be reached.
    pub async fn create_snapshot(&self, name: Option<&str>) -> Result<Snapshot> {
        let request = self.client().request(Method::POST, &["sandboxes", self.id(), "snapshots"])?;
        let body = CreateSnapshotRequest { name: name.map(str::to_owned) };
        self.transport().json(request.json(&body), self.config().request_timeout).await
    }
}

impl Snapshots<'_> {
    /// One page of the snapshots that match, newest first.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// use opensandbox::SnapshotFilter;
    ///
    /// let ready = SnapshotFilter { states: vec!["Ready".to_owned()], ..SnapshotFilter::default() };
    /// let page = client.snapshots().list(&ready).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the server refuses or cannot be reached.
    pub async fn list(&self, filter: &SnapshotFilter) -> Result<ListSnapshotsResponse> {
        let request = self.client.request(Method::GET, &["snapshots"])?.query(&filter.query());
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// All snapshots that match, newest first, page by page as they are taken.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// for snapshot in client.snapshots().list_all(Default::default()).collect().await? {
    ///     println!("{} {:?} {}", snapshot.id, snapshot.name, snapshot.status.state);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn list_all(&self, filter: SnapshotFilter) -> Items<Snapshot> {
        let client = self.client.clone();
        let fetch = move |filter: SnapshotFilter| {
            let client = client.clone();
            async move { client.snapshots().list(&filter).await.map(|answer| (answer.items, answer.pagination)) }
        };
        all(filter, fetch, |snapshot| &snapshot.id)
    }

    /// One snapshot.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// println!("{}", client.snapshots().get("5f2c…").await?.status.state);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist or the server cannot be reached.
    pub async fn get(&self, id: &str) -> Result<Snapshot> {
        let request = self.client.request(Method::GET, &["snapshots", id])?;
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// Waits until a snapshot can be used.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let limit = std::time::Duration::from_secs(60);
    /// client.snapshots().wait_ready("5f2c…", limit).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::SnapshotFailed`] when it cannot be made, [`Error::NotReady`] after `limit`, and when it does not
    /// exist or the server cannot be reached.
    pub async fn wait_ready(&self, id: &str, limit: Duration) -> Result<Snapshot> {
        let deadline = Instant::now() + limit;
        loop {
            let snapshot = self.get(id).await?;
            match snapshot.status.state.as_str() {
                "Ready" => return Ok(snapshot),
                "Failed" | "Deleting" => {
                    let status = snapshot.status;
                    let reason = status.message.or(status.reason).unwrap_or(status.state);
                    return Err(Error::SnapshotFailed { id: id.to_owned(), reason });
                }
                _ => {}
            }
            let next = Instant::now() + POLL;
            if next >= deadline {
                return Err(Error::NotReady { id: id.to_owned(), limit });
            }
            sleep_until(next).await;
        }
    }

    /// Removes a snapshot.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// client.snapshots().delete("5f2c…").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, is in use, or the server cannot be reached.
    pub async fn delete(&self, id: &str) -> Result<()> {
        let request = self.client.request(Method::DELETE, &["snapshots", id])?;
        self.client.transport().remove(request, self.client.config().request_timeout).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_queries() {
        let filter = SnapshotFilter {
            sandbox_id: Some("s".to_owned()),
            name: Some("n m".to_owned()),
            states: vec!["Ready".to_owned()],
            page: Some(1),
            page_size: Some(100),
        };
        let query = filter.query();
        let names: Vec<&str> = query.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["sandboxId", "name", "state", "page", "pageSize"]);
    }
}
