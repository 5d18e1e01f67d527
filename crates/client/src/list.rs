//! Listing sandboxes.

use std::collections::BTreeMap;

use osb_protocol::lifecycle::{ListSandboxesResponse, Sandbox as SandboxInfo};
use reqwest::Method;

use crate::client::Client;
use crate::error::Result;
use crate::items::{Items, PagedFilter, all};

/// Which sandboxes to list. All conditions must hold.
///
/// ```
/// use opensandbox::ListFilter;
///
/// let filter = ListFilter::new().state("Running").label("team", "search");
/// assert_eq!(filter.states, ["Running"]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListFilter {
    /// Any of these states; none means all.
    pub states: Vec<String>,
    /// All of these labels.
    pub metadata: BTreeMap<String, String>,
    /// Page, from 1.
    pub page: Option<u32>,
    /// Items per page, 1 to 200; the server's default is 20.
    pub page_size: Option<u32>,
}

impl ListFilter {
    /// All sandboxes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a state that will do.
    #[must_use]
    pub fn state(mut self, state: impl Into<String>) -> Self {
        self.states.push(state.into());
        self
    }

    /// Adds a label that must be there.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    fn query(&self) -> Vec<(&'static str, String)> {
        let mut query: Vec<_> = self.states.iter().map(|state| ("state", state.clone())).collect();
        query.extend(metadata_query(&self.metadata));
        query.extend(page_query(self.page, self.page_size));
        query
    }
}

/// One parameter that holds a whole query string, and so is encoded twice.
pub(crate) fn metadata_query(metadata: &BTreeMap<String, String>) -> Option<(&'static str, String)> {
    if metadata.is_empty() {
        return None;
    }
    let mut inner = url::form_urlencoded::Serializer::new(String::new());
    inner.extend_pairs(metadata);
    Some(("metadata", inner.finish()))
}

/// Page number and size.
pub(crate) fn page_query(page: Option<u32>, size: Option<u32>) -> Vec<(&'static str, String)> {
    let page = page.map(|page| ("page", page.to_string()));
    page.into_iter().chain(size.map(|size| ("pageSize", size.to_string()))).collect()
}

impl PagedFilter for ListFilter {
    fn place(&mut self) -> (&mut Option<u32>, &mut Option<u32>) {
        (&mut self.page, &mut self.page_size)
    }
}

impl Client {
    /// One page of the sandboxes that match, newest first.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let page = client.list(&opensandbox::ListFilter::new().state("Running")).await?;
    /// println!("{} of {}", page.items.len(), page.pagination.total_items);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the server refuses or cannot be reached.
    pub async fn list(&self, filter: &ListFilter) -> Result<ListSandboxesResponse> {
        let request = self.request(Method::GET, &["sandboxes"])?.query(&filter.query());
        self.transport().json(request, self.config().request_timeout).await
    }

    /// All sandboxes that match, newest first, page by page as they are taken. Begins at the filter's page.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let mine = opensandbox::ListFilter::new().label("owner", "me");
    /// for sandbox in client.list_all(mine).collect().await? {
    ///     client.sandbox(sandbox.id).kill().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn list_all(&self, filter: ListFilter) -> Items<SandboxInfo> {
        let client = self.clone();
        let fetch = move |filter: ListFilter| {
            let client = client.clone();
            async move { client.list(&filter).await.map(|answer| (answer.items, answer.pagination)) }
        };
        all(filter, fetch, |sandbox| &sandbox.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_filter_is_a_query_string_of_its_own() {
        let filter = ListFilter {
            states: vec!["Running".to_owned(), "Paused".to_owned()],
            metadata: [("note", "a&b=c d"), ("x", "1")].map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            page: Some(2),
            page_size: Some(5),
        };
        assert_eq!(
            filter.query(),
            [
                ("state", "Running".to_owned()),
                ("state", "Paused".to_owned()),
                ("metadata", "note=a%26b%3Dc+d&x=1".to_owned()),
                ("page", "2".to_owned()),
                ("pageSize", "5".to_owned()),
            ]
        );
        assert!(ListFilter::default().query().is_empty());
    }
}
