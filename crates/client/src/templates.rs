//! Templates: images prepared for virtual machines, where the runtime has them.

use std::collections::BTreeMap;

use osb_protocol::lifecycle::{CreateFsbTemplateRequest, FsbTemplate, ListFsbTemplatesResponse};
use reqwest::Method;

use crate::client::Client;
use crate::error::Result;
use crate::items::{Items, PagedFilter, all};
use crate::list::{metadata_query, page_query};

/// Templates of a server; see [`Client::templates`].
#[derive(Debug, Clone, Copy)]
pub struct Templates<'a> {
    client: &'a Client,
}

/// Which templates to list. All conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateFilter {
    /// All of these labels.
    pub metadata: BTreeMap<String, String>,
    /// Page, from 1.
    pub page: Option<u32>,
    /// Items per page, 1 to 200.
    pub page_size: Option<u32>,
}

impl PagedFilter for TemplateFilter {
    fn place(&mut self) -> (&mut Option<u32>, &mut Option<u32>) {
        (&mut self.page, &mut self.page_size)
    }
}

impl Client {
    /// Templates. Runtimes without them answer each call with an error of which
    /// [`Error::is_unsupported`](crate::Error::is_unsupported) is true.
    #[must_use]
    pub fn templates(&self) -> Templates<'_> {
        Templates { client: self }
    }
}

impl Templates<'_> {
    /// Begins to make a template.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// use opensandbox::CreateTemplateRequest;
    ///
    /// let template = CreateTemplateRequest {
    ///     image: "python:3.12".to_owned(),
    ///     publish: "registry.example/templates/python".to_owned(),
    ///     resource_limits: None,
    ///     entrypoint: None,
    ///     env: None,
    ///     metadata: None,
    ///     readiness: None,
    ///     format: Default::default(),
    /// };
    /// println!("{}", client.templates().create(&template).await?.template_id);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the runtime has no templates or the server cannot be reached.
    pub async fn create(&self, template: &CreateFsbTemplateRequest) -> Result<FsbTemplate> {
        let request = self.client.request(Method::POST, &["templates"])?.json(template);
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// One page of the templates that match, newest first.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let page = client.templates().list(&Default::default()).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the runtime has no templates or the server cannot be reached.
    pub async fn list(&self, filter: &TemplateFilter) -> Result<ListFsbTemplatesResponse> {
        let mut query: Vec<_> = metadata_query(&filter.metadata).into_iter().collect();
        query.extend(page_query(filter.page, filter.page_size));
        let request = self.client.request(Method::GET, &["templates"])?.query(&query);
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// All templates that match, newest first, page by page as they are taken.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// for template in client.templates().list_all(Default::default()).collect().await? {
    ///     println!("{} {:?}", template.template_id, template.status.phase);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn list_all(&self, filter: TemplateFilter) -> Items<FsbTemplate> {
        let client = self.client.clone();
        let fetch = move |filter: TemplateFilter| {
            let client = client.clone();
            async move { client.templates().list(&filter).await.map(|answer| (answer.items, answer.pagination)) }
        };
        all(filter, fetch, |template| &template.template_id)
    }

    /// One template.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// println!("{:?}", client.templates().get("t-1").await?.status.phase);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, the runtime has no templates, or the server cannot be reached.
    pub async fn get(&self, id: &str) -> Result<FsbTemplate> {
        let request = self.client.request(Method::GET, &["templates", id])?;
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// Removes a template.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// client.templates().delete("t-1").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Templates::get`].
    pub async fn delete(&self, id: &str) -> Result<()> {
        let request = self.client.request(Method::DELETE, &["templates", id])?;
        self.client.transport().remove(request, self.client.config().request_timeout).await
    }
}
