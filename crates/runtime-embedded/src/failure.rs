//! What the failures of a pull mean to whoever asked for the sandbox.

use std::time::Duration;

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
        Error::NoSpace { .. } => full(text),
        Error::Disk { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => full(text),
        _ => fetch(FetchError::Failed(text)),
    }
}

/// Of the image store, with what a registry gave.
pub(crate) fn of_load(reference: &str, error: &osb_engine::image::Error) -> CreateError {
    use osb_engine::image::Error;
    let text = told(error);
    let error = match error {
        Error::NoSpace { .. } => return full(text),
        Error::Platform { .. } => FetchError::Platform(text),
        _ => FetchError::Failed(text),
    };
    CreateError::Fetch { reference: reference.to_owned(), error }
}

fn full(why: String) -> CreateError {
    CreateError::Exhausted {
        what: format!("its image does not fit on the disk: {why}"),
        retry_after: FULL_FOR,
    }
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
        assert!(matches!(of(disk(std::io::ErrorKind::StorageFull)), CreateError::Exhausted { .. }));
        let denied = of(disk(std::io::ErrorKind::PermissionDenied));
        let CreateError::Fetch { error: FetchError::Failed(text), .. } = denied else { panic!() };
        assert_eq!(text, "cannot write /x: permission denied");
        let full = osb_engine::image::Error::NoSpace { path: "/x".into() };
        assert!(matches!(of_load("a", &full), CreateError::Exhausted { .. }));
    }
}
