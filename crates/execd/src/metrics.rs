//! Routes of their own module.

use crate::app::App;

/// The module's routes.
#[must_use]
pub fn router() -> axum::Router<App> {
    axum::Router::new()
}
