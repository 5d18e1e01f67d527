//! Net of the engine.
