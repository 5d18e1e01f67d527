//! How far a pull is.

use std::fmt;

use crate::error::Bytes;

/// What a pull does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Finds out what the name stands for.
    #[default]
    Resolving,
    /// Fetches layers.
    Downloading,
    /// The image store unpacks; set by whoever does it.
    Unpacking,
}

/// How far a pull is. Its `Display` is a short text for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes done, those of an earlier, broken pull included.
    pub bytes: u64,
    /// Bytes to do; 0 while unknown.
    pub total_bytes: u64,
    /// Layers done.
    pub layers: usize,
    /// Layers to do.
    pub total_layers: usize,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.phase {
            Phase::Resolving => return f.write_str("looking the image up"),
            Phase::Downloading => "downloading",
            Phase::Unpacking => "unpacking",
        };
        write!(f, "{verb}: {} of {}", Bytes(self.bytes), Bytes(self.total_bytes))?;
        write!(f, ", {} of {} layers", self.layers, self.total_layers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts() {
        assert_eq!(Progress::default().to_string(), "looking the image up");
        let progress = Progress {
            phase: Phase::Downloading,
            bytes: 12_340_000,
            total_bytes: 45_000_000_000,
            layers: 2,
            total_layers: 5,
        };
        assert_eq!(progress.to_string(), "downloading: 12.3 MB of 45.0 GB, 2 of 5 layers");
    }
}
