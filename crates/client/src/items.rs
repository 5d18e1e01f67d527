//! Values that come one after the other: pages of a list, ticks of a watch.

use std::collections::HashSet;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::stream::{BoxStream, Stream, StreamExt, TryStreamExt, try_unfold};
use osb_protocol::lifecycle::{MAX_PAGE_SIZE, PaginationInfo};

use crate::error::Result;

/// Values that come one after the other. It is a [`Stream`], and has [`Items::next`] for loops without one.
///
/// ```no_run
/// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
/// let mut sandboxes = client.list_all(Default::default());
/// while let Some(sandbox) = sandboxes.next().await? {
///     println!("{} {}", sandbox.id, sandbox.status.state);
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is asked for until `next` is called"]
pub struct Items<T> {
    stream: Option<BoxStream<'static, Result<T>>>,
}

impl<T> fmt::Debug for Items<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items").field("ended", &self.stream.is_none()).finish()
    }
}

impl<T: Send + 'static> Items<T> {
    pub(crate) fn new(stream: impl Stream<Item = Result<T>> + Send + 'static) -> Self {
        Self { stream: Some(stream.boxed()) }
    }

    /// The next value, `None` after the last. Cancel safe. Nothing follows an error.
    ///
    /// # Errors
    /// When the server refuses, cannot be reached, or the connection breaks.
    pub async fn next(&mut self) -> Result<Option<T>> {
        StreamExt::next(self).await.transpose()
    }

    /// All that is left.
    ///
    /// ```no_run
    /// # async fn example(client: opensandbox::Client) -> opensandbox::Result<()> {
    /// let all = client.list_all(Default::default()).collect().await?;
    /// println!("{} sandboxes", all.len());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Items::next`].
    pub async fn collect(self) -> Result<Vec<T>> {
        self.try_collect().await
    }
}

impl<T> Stream for Items<T> {
    type Item = Result<T>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(None) };
        let next = std::task::ready!(stream.as_mut().poll_next(context));
        if !matches!(next, Some(Ok(_))) {
            self.stream = None;
        }
        Poll::Ready(next)
    }
}

/// One page and where it lies.
pub(crate) type Page<T> = (Vec<T>, PaginationInfo);

/// What a list is asked for that comes in pages.
pub(crate) trait PagedFilter: Clone + Send + Sync + 'static {
    /// Page and items per page.
    fn place(&mut self) -> (&mut Option<u32>, &mut Option<u32>);
}

/// All items that `filter` lets pass, from its page on, in the largest pages unless it says otherwise.
pub(crate) fn all<T, P, F, R>(mut filter: P, fetch: F, id: impl Fn(&T) -> &str + Send + 'static) -> Items<T>
where
    T: Send + 'static,
    P: PagedFilter,
    F: Fn(P) -> R + Send + 'static,
    R: Future<Output = Result<Page<T>>> + Send + 'static,
{
    let (page, size) = filter.place();
    size.get_or_insert(MAX_PAGE_SIZE);
    let first = page.unwrap_or(1);
    let fetch = move |page| {
        let mut filter = filter.clone();
        *filter.place().0 = Some(page);
        fetch(filter)
    };
    paged(first, fetch, id)
}

/// All items of a paged list, each once. What is made meanwhile pushes older items onto the next page; these are
/// not repeated. What is deleted meanwhile may hide as many others.
fn paged<T, F, R>(first: u32, fetch: F, id: impl Fn(&T) -> &str + Send + 'static) -> Items<T>
where
    T: Send + 'static,
    F: Fn(u32) -> R + Send + 'static,
    R: Future<Output = Result<Page<T>>> + Send + 'static,
{
    let pages = try_unfold(Some(first), move |page| {
        let fetched = page.map(&fetch);
        async move {
            let (Some(page), Some(fetched)) = (page, fetched) else { return Ok(None) };
            let (items, pagination) = fetched.await?;
            // A server that promises more and sends nothing would be asked for ever.
            let more = pagination.has_next_page && !items.is_empty();
            Ok(Some((items, more.then(|| page.saturating_add(1)))))
        }
    });
    let mut seen = HashSet::new();
    Items::new(
        pages
            .map_ok(|items| futures_util::stream::iter(items.into_iter().map(Ok)))
            .try_flatten()
            .try_filter(move |item| std::future::ready(seen.insert(id(item).to_owned()))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn page(numbers: &[u32], page: u32, more: bool) -> Page<String> {
        let pagination =
            PaginationInfo { page, page_size: 2, total_items: 0, total_pages: 0, has_next_page: more };
        (numbers.iter().map(ToString::to_string).collect(), pagination)
    }

    #[tokio::test]
    async fn pages_follow_each_other_and_shifted_items_come_once() {
        let fetch = |number| {
            std::future::ready(Ok(match number {
                1 => page(&[1, 2], 1, true),
                2 => page(&[2, 3], 2, true),
                _ => page(&[4], 3, false),
            }))
        };
        let all = paged(1, fetch, String::as_str).collect().await.unwrap();
        assert_eq!(all, ["1", "2", "3", "4"]);
        assert_eq!(paged(3, fetch, String::as_str).collect().await.unwrap(), ["4"]);
    }

    #[tokio::test]
    async fn a_list_ends_with_an_error_and_with_an_empty_page() {
        let mut broken = paged(1, |_| std::future::ready(Err(Error::StreamCut)), String::as_str);
        assert!(broken.next().await.is_err());
        assert!(broken.next().await.unwrap().is_none());
        let mut endless = paged(1, |number| std::future::ready(Ok(page(&[], number, true))), String::as_str);
        assert!(endless.next().await.unwrap().is_none());
    }
}
