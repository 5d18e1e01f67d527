//! What the failures of a pull mean to whoever asked for the sandbox.

use std::time::Duration;

use osb_engine::image::size;
use osb_runtime::{CreateError, FetchError};

use crate::told;

/// When to try again at a registry that is busy and does not say.
const BUSY_FOR: Duration = Duration::from_secs(60);
/// When to try again on a disk that was full.
const FULL_FOR: Duration = Duration::from_secs(30);

/// Of a registry, or on the way to it.
pub(crate) fn of_pull(reference: &str, error: osb_registry::Error) -> CreateError {
    use osb_registry::Error;
    let fetch = |error| CreateError::Fetch { reference: reference.to_owned(), error };
    let text = told(&error);
    match error {
        Error::InvalidReference { .. } => CreateError::InvalidParameter(format!("image.uri: {text}")),
        Error::NoPlatform { .. } => fetch(FetchError::Platform(text)),
        Error::RateLimited { retry_after, .. } => {
            fetch(FetchError::Busy { reason: text, retry_after: retry_after.unwrap_or(BUSY_FOR) })
        }
        Error::Unavailable { .. } => fetch(FetchError::Failed(format!(
            "{text}; without that registry, load the image from a file with `osb image load`"
        ))),
        Error::NoSpace { .. } => fetch(disk_full(reference, &text)),
        Error::Disk { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            fetch(disk_full(reference, &text))
        }
        _ => fetch(FetchError::Failed(text)),
    }
}

/// Of the image store, with what a registry gave.
pub(crate) fn of_load(reference: &str, error: &osb_engine::image::Error) -> CreateError {
    use osb_engine::image::Error;
    let text = told(error);
    let error = match error {
        Error::NoSpace { .. } => disk_full(reference, &text),
        Error::StoreFull { limit, holders, .. } => store_full(reference, &text, *limit, holders.is_empty()),
        Error::Platform { .. } => FetchError::Platform(text),
        _ => FetchError::Failed(text),
    };
    CreateError::Fetch { reference: reference.to_owned(), error }
}

/// Paths and names on the server are for its log.
fn disk_full(reference: &str, why: &str) -> FetchError {
    tracing::warn!(image = reference, why, "an image does not fit on the disk");
    let reason = "the server's disk is full; free some space there".to_owned();
    FetchError::NoRoom { reason, retry_after: FULL_FOR }
}

fn store_full(reference: &str, why: &str, limit: u64, is_too_large: bool) -> FetchError {
    tracing::warn!(image = reference, why, "there is no room for an image");
    let limit = size(limit);
    if is_too_large {
        return FetchError::Failed(format!("it is larger than the {limit} that images may take here"));
    }
    let reason = format!("images of running sandboxes take the {limit} that images may take here; end some");
    FetchError::NoRoom { reason, retry_after: FULL_FOR }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_can_do_something_is_told_so() {
        use osb_registry::Error;
        let registry = || "r.example".to_owned();
        let of = |error| of_pull("r.example/a", error);
        let limited =
            |retry_after| Error::RateLimited { registry: registry(), retry_after, message: String::new() };
        let told_busy = |error| match of(error) {
            CreateError::Fetch { error: FetchError::Busy { retry_after, .. }, .. } => retry_after,
            other => panic!("{other:?}"),
        };
        assert_eq!(told_busy(limited(None)), BUSY_FOR);
        assert_eq!(told_busy(limited(Some(Duration::from_secs(7)))), Duration::from_secs(7));
        let denied = Error::Denied { registry: registry(), repository: "a".into(), message: String::new() };
        assert!(matches!(of(denied), CreateError::Fetch { error: FetchError::Failed(_), .. }));
        let away = Error::Unavailable { registry: registry(), reason: "connection refused".into() };
        let CreateError::Fetch { error: FetchError::Failed(text), .. } = of(away) else { panic!() };
        assert!(text.contains("connection refused") && text.contains("osb image load"), "{text}");
        let disk = |kind: std::io::ErrorKind| Error::Disk {
            action: "write",
            path: "/x".into(),
            source: std::sync::Arc::new(kind.into()),
        };
        let no_room = |error: CreateError| {
            let text = error.to_string();
            assert!(matches!(error, CreateError::Fetch { error: FetchError::NoRoom { .. }, .. }), "{text}");
            text
        };
        let text = no_room(of(disk(std::io::ErrorKind::StorageFull)));
        let told = |name: &str| {
            format!("image '{name}' could not be pulled: the server's disk is full; free some space there")
        };
        assert_eq!(text, told("r.example/a"));
        let full = Error::NoSpace { path: "/x".into(), needed: 2, available: 1 };
        assert_eq!(no_room(of(full)), told("r.example/a"));
        let denied = of(disk(std::io::ErrorKind::PermissionDenied));
        let CreateError::Fetch { error: FetchError::Failed(text), .. } = denied else { panic!() };
        assert_eq!(text, "cannot write /x: permission denied");
        let full = osb_engine::image::Error::NoSpace { path: "/x".into() };
        assert_eq!(no_room(of_load("a", &full)), told("a"));
        let holder = osb_engine::image::Holder { name: "private".into(), disk_bytes: 1, sandboxes: 1 };
        let full = |holders| osb_engine::image::Error::StoreFull {
            what: "/x".into(),
            limit: 3 << 30,
            kept: 0,
            holders,
        };
        let text = no_room(of_load("a", &full(vec![holder])));
        assert!(text.ends_with("take the 3.0 GiB that images may take here; end some"), "{text}");
        let CreateError::Fetch { error: FetchError::Failed(text), .. } = of_load("a", &full(Vec::new()))
        else {
            panic!()
        };
        assert_eq!(text, "it is larger than the 3.0 GiB that images may take here");
    }
}
