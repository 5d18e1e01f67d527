//! Wire types of the lifecycle API.
