//! `POST /v1/metrics/events`: what clients measured.

use http::StatusCode;
use osb_protocol::lifecycle::MetricsEvent;

use super::extract::Json;
use crate::error::{ApiError, Issue};

/// Takes a measurement. It is logged; nothing else is done with it.
pub(super) async fn report(Json(event): Json<MetricsEvent>) -> Result<StatusCode, ApiError> {
    if event.event_type != "sandbox.create" {
        return Err(refuse("eventType", "sandbox.create is expected"));
    }
    if event.create_duration_ms < 0 {
        return Err(refuse("createDurationMs", "a whole number of at least 0 is expected"));
    }
    tracing::debug!(
        milliseconds = event.create_duration_ms,
        success = event.success,
        "client created a sandbox"
    );
    Ok(StatusCode::NO_CONTENT)
}

fn refuse(member: &str, message: &str) -> ApiError {
    ApiError::Validation(vec![Issue::new("value_error", &["body", member], message)])
}
