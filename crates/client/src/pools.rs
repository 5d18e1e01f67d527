//! Pools of prepared sandboxes, where the runtime has them.

use osb_protocol::lifecycle::{
    CreatePoolRequest, ListPoolsResponse, PoolCapacitySpec, PoolResponse, UpdatePoolRequest,
};
use reqwest::Method;

use crate::client::Client;
use crate::error::Result;

/// Pools of a server; see [`Client::pools`].
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a> {
    client: &'a Client,
}

impl Client {
    /// Pools of prepared sandboxes. Runtimes without them answer each call with an error of which
    /// [`Error::is_unsupported`](crate::Error::is_unsupported) is true.
    #[must_use]
    pub fn pools(&self) -> Pools<'_> {
        Pools { client: self }
    }
}

impl Pools<'_> {
    /// Makes a pool.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// use opensandbox::{CreatePoolRequest, PoolCapacitySpec};
    ///
    /// let capacity = PoolCapacitySpec { buffer_min: 2, buffer_max: 5, pool_min: 2, pool_max: 20 };
    /// let template = Default::default();
    /// let pool = CreatePoolRequest { name: "small".to_owned(), template, capacity_spec: capacity };
    /// client.pools().create(&pool).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the runtime has no pools, the name is taken, or the server cannot be reached.
    pub async fn create(&self, pool: &CreatePoolRequest) -> Result<PoolResponse> {
        let request = self.client.request(Method::POST, &["pools"])?.json(pool);
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// All pools.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// for pool in client.pools().list().await? {
    ///     println!("{} {:?}", pool.name, pool.status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When the runtime has no pools or the server cannot be reached.
    pub async fn list(&self) -> Result<Vec<PoolResponse>> {
        let request = self.client.request(Method::GET, &["pools"])?;
        let answer: ListPoolsResponse =
            self.client.transport().json(request, self.client.config().request_timeout).await?;
        Ok(answer.items)
    }

    /// One pool.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// println!("{:?}", client.pools().get("small").await?.status);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When it does not exist, the runtime has no pools, or the server cannot be reached.
    pub async fn get(&self, name: &str) -> Result<PoolResponse> {
        let request = self.client.request(Method::GET, &["pools", name])?;
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// Changes a pool's size.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// use opensandbox::PoolCapacitySpec;
    ///
    /// let capacity = PoolCapacitySpec { buffer_min: 0, buffer_max: 2, pool_min: 0, pool_max: 5 };
    /// client.pools().resize("small", capacity).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Pools::get`].
    pub async fn resize(&self, name: &str, capacity: PoolCapacitySpec) -> Result<PoolResponse> {
        let body = UpdatePoolRequest { capacity_spec: capacity };
        let request = self.client.request(Method::PUT, &["pools", name])?.json(&body);
        self.client.transport().json(request, self.client.config().request_timeout).await
    }

    /// Removes a pool.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// client.pools().delete("small").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Pools::get`].
    pub async fn delete(&self, name: &str) -> Result<()> {
        let request = self.client.request(Method::DELETE, &["pools", name])?;
        self.client.transport().remove(request, self.client.config().request_timeout).await
    }
}
