//! The wire: types, ids, limits and error codes of the OpenSandbox APIs.
//!
//! Nothing here does I/O or knows of a runtime. Shapes follow the published protocol, release 1.1.1; where a
//! shape is odd, the comment says which client rests on it.

pub mod boot;
pub mod error;
pub mod execd;
pub mod ids;
pub mod image;
pub mod labels;
pub mod lifecycle;
pub mod quantity;
pub mod schedule;
pub mod time;
