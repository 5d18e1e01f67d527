//! Sandboxes as the server knows them: records, their index, what happens to them over time.

mod change;
mod create;
mod deadlines;
mod end;
mod index;
mod pending;
mod record;
mod start;

pub(crate) use change::RENEW_EXTENSION;
pub(crate) use create::{Arrivals, Kept, Order};
pub(crate) use deadlines::Deadlines;
pub use index::Index;
pub(crate) use record::SHOWN_EXTENSIONS;
pub use record::{Changing, Origin, Record, Status};
pub use start::StartError;
