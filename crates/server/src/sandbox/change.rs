//! Patches of metadata and renewals.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::HeaderMap;
use osb_protocol::lifecycle::SandboxState;
use osb_protocol::time::WireTime;

use super::record::Record;
use crate::error::ApiError;
use crate::state::AppState;

/// Extension that opts a sandbox in to renewal on access: seconds as text.
pub(crate) const RENEW_EXTENSION: &str = "access.renew.extend.seconds";
/// Request header of the proxy: exactly `skip` keeps a request from renewing.
const RENEW_HEADER: &str = "opensandbox-access-renew";

impl AppState {
    /// Applies a merge patch to the labels. Patches of one sandbox come one after the other.
    ///
    /// # Errors
    /// 404 when the sandbox has gone meanwhile.
    pub(crate) async fn patch_metadata(
        &self,
        record: &Arc<Record>,
        patch: BTreeMap<String, Option<String>>,
    ) -> Result<(), ApiError> {
        self.change(record, |record| {
            let mut next = record.now().clone();
            for (key, value) in patch {
                match value {
                    Some(value) => next.metadata.insert(key, value),
                    None => next.metadata.remove(&key),
                };
            }
            Ok(next)
        })
        .await
    }

    /// Sets the expiry. Renewal and expiry exclude each other: one that is answered with success has won.
    ///
    /// # Errors
    /// 404 when the sandbox has gone, 409 when it never expires, 400 for a time that is not in the future.
    pub(crate) async fn renew(&self, record: &Arc<Record>, expires_at: WireTime) -> Result<(), ApiError> {
        self.change(record, |record| {
            let mut next = record.now().clone();
            if next.expires_at.is_none() {
                return Err(ApiError::NoExpiration);
            }
            if expires_at <= WireTime::now() {
                return Err(ApiError::ExpirationPast);
            }
            next.expires_at = Some(expires_at);
            Ok(next)
        })
        .await?;
        self.schedule(record);
        Ok(())
    }

    /// Works out, stores and shows the next state of a sandbox while nobody else changes it.
    async fn change(
        &self,
        record: &Arc<Record>,
        next: impl FnOnce(&Record) -> Result<super::Changing, ApiError>,
    ) -> Result<(), ApiError> {
        let _turn = record.turn.lock().await;
        if record.now().gone {
            return Err(ApiError::SandboxNotFound);
        }
        let next = next(record)?;
        // A pending sandbox is stored once it runs, with what it has become by then.
        if next.status.state != SandboxState::Pending {
            self.store().update(record.id(), &next).await.map_err(ApiError::from)?;
        }
        *record.now() = next;
        Ok(())
    }

    /// Tells that a request for a sandbox was accepted by the proxy, before it is forwarded.
    pub fn accessed(&self, record: &Arc<Record>, headers: &HeaderMap) {
        let renewal = &self.config().renew_intent;
        if !renewal.enabled || headers.get(RENEW_HEADER).is_some_and(|value| value == "skip") {
            return;
        }
        let Some(extend) =
            record.origin.extensions.get(RENEW_EXTENSION).and_then(|text| text.trim().parse().ok())
        else {
            return;
        };
        let now = WireTime::now();
        let current = {
            let shown = record.now();
            match shown.expires_at {
                Some(at) if !shown.gone && shown.status.state == SandboxState::Running => at,
                _ => return,
            }
        };
        let quiet = i64::try_from(renewal.min_interval.as_micros()).unwrap_or(i64::MAX);
        let last = record.renewed_at.load(Ordering::Relaxed);
        if now.as_micros().saturating_sub(last) < quiet
            || record
                .renewed_at
                .compare_exchange(last, now.as_micros(), Ordering::Relaxed, Ordering::Relaxed)
                .is_err()
        {
            return;
        }
        let Some(wanted) = now.plus_seconds(extend).filter(|wanted| *wanted > current) else { return };
        let (state, record) = (self.clone(), Arc::clone(record));
        self.tasks().spawn(async move {
            if let Err(error) = state.renew(&record, wanted).await {
                record.renewed_at.store(last, Ordering::Relaxed);
                tracing::warn!(sandbox = %record.id(), %error, "renewal on access failed");
            }
        });
    }
}
