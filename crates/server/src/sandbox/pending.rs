//! Sandboxes whose image is not on this machine: visible while it is fetched, and undone when nobody wants them.

use std::sync::Arc;

use osb_protocol::ids::SandboxId;
use osb_protocol::time::WireTime;
use osb_runtime::{Fetch, SandboxSpec};
use tokio::sync::oneshot;

use super::create::{Delivery, Order, is_held_up};
use super::record::{Changing, Record, Status};
use crate::error::ApiError;
use crate::state::AppState;

impl AppState {
    /// Fetches the image, then makes the sandbox. Meanwhile it is there as `Pending`, in memory alone: a server that
    /// dies leaves no row behind.
    ///
    /// The fetch ends with the last sandbox that waits for it and is deleted. When only the client leaves, it goes
    /// on, so that the client's next attempt finds the image.
    pub(super) async fn make_later<T>(
        &self,
        order: Order,
        client: &mut oneshot::Sender<T>,
    ) -> Result<Delivery, ApiError> {
        // Before the download, which may be large: a full server gets none for nothing.
        self.runtime().room()?;
        let Order { mut spec, image, kept } = order;
        let (id, name) = (SandboxId::random(), image.name.clone());
        let fetch = self.runtime().fetch_image(image);
        let (origin, changing) = kept.split(id, name, Status::pulling(WireTime::now()));
        spec.id = Some(id);
        let record = Record::pending(origin, changing, fetch.progress.clone());
        self.index().insert(Arc::clone(&record));
        self.schedule(&record);
        tracing::info!(sandbox = %record.id(), image = record.origin.image, "pulling the image");
        let result = self.fetch_and_start(&record, spec, fetch, client).await;
        if result.is_err() && !record.now().gone {
            self.withdraw(&record);
        }
        result
    }

    async fn fetch_and_start<T>(
        &self,
        record: &Arc<Record>,
        spec: SandboxSpec,
        mut fetch: Fetch,
        client: &mut oneshot::Sender<T>,
    ) -> Result<Delivery, ApiError> {
        let image = tokio::select! {
            biased;
            () = record.given_up() => return Err(ApiError::DeletedMeanwhile),
            () = self.stopping() => return Err(ApiError::Stopping),
            () = client.closed() => {
                tracing::info!(sandbox = %record.id(), "client left while its image was pulled: the pull goes on");
                let state = self.clone();
                self.tasks().spawn(async move {
                    tokio::select! {
                        _ = fetch.done => {}
                        () = state.stopping() => {}
                    }
                });
                return Err(ApiError::DeletedMeanwhile);
            }
            image = &mut fetch.done => image?,
        };
        let arrival = self.arrivals().begin();
        let hooked = is_held_up(&spec);
        let created = self.runtime().create(spec, image).await?;
        let stages = {
            let _turn = record.turn.lock().await;
            if record.now().gone {
                if created.started.await.is_ok() {
                    self.discard(created.id).await;
                }
                return Err(ApiError::DeletedMeanwhile);
            }
            let next = Changing { status: Status::running(WireTime::now()), ..record.now().clone() };
            let unwanted = async {
                if !hooked {
                    return std::future::pending().await;
                }
                tokio::select! {
                    () = record.given_up() => ApiError::DeletedMeanwhile,
                    () = client.closed() => ApiError::DeletedMeanwhile,
                    () = self.stopping() => ApiError::Stopping,
                }
            };
            let stages = self.store_new(&record.origin, created, &next, unwanted).await?;
            *record.now() = next;
            stages
        };
        self.settle(record).await;
        drop(arrival);
        Ok(self.delivery(record, stages))
    }
}
