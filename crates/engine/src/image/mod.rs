//! Image of the engine.
