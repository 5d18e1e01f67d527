//! Sandboxes as the server knows them: records, their index, what happens to them over time.

mod index;
mod record;

pub use index::Index;
pub use record::{Changing, Origin, Record, Status};
