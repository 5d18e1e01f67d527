//! Hooks of a sandbox's life: one command before the entrypoint, others by a schedule.

mod document;
pub(crate) mod periodic;
mod plan;
mod run;
mod source;
mod zone;

pub(crate) use document::parse;
pub use plan::{Hook, Periodic, Plan};
pub(crate) use run::run;
pub use source::{CONFIG_FILE, TRANSPORT, load};
