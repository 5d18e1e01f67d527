//! Images: what a request names, what a runtime found, and how far a fetch has come.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::watch;

use crate::error::CreateError;

/// An image as a request names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ImageSource {
    /// Name of a stored image, an alias or a registry reference.
    pub name: String,
    /// Platform it must be for; `None` is the runtime's own.
    pub platform: Option<Platform>,
    /// Account at the registry, for one fetch. Never stored, logged or shown.
    pub credentials: Option<Credentials>,
}

/// Operating system and processor, in the words of images: `linux`, `amd64`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Platform {
    /// Operating system.
    pub os: String,
    /// Processor.
    pub arch: String,
}

/// Account at a registry.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Credentials {
    /// Name.
    pub username: String,
    /// Password or token.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(***)")
    }
}

/// An image that a runtime found, in a form only that runtime understands.
#[derive(Clone)]
pub struct Image(Arc<dyn Any + Send + Sync>);

impl Image {
    /// Wraps a runtime's own value.
    pub fn new<T: Any + Send + Sync>(value: Arc<T>) -> Self {
        Self(value)
    }

    /// The runtime's own value; `None` when another runtime made it.
    #[must_use]
    pub fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        Arc::clone(&self.0).downcast().ok()
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Image")
    }
}

/// An image on its way. Dropping it gives up; a fetch that nobody waits for ends.
pub struct Fetch {
    /// How far it is.
    pub progress: watch::Receiver<FetchProgress>,
    /// The image, or why there is none.
    pub done: BoxFuture<'static, Result<Image, CreateError>>,
}

impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetch").field("progress", &*self.progress.borrow()).finish_non_exhaustive()
    }
}

/// What a fetch is doing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FetchPhase {
    /// Nothing yet: others are served first.
    #[default]
    Waiting,
    /// Asking what the name stands for.
    Resolving,
    /// Getting layers.
    Downloading,
    /// Writing them out.
    Unpacking,
}

/// How far a fetch is. Totals are 0 while they are not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FetchProgress {
    /// What is done at the moment; the numbers belong to it.
    pub phase: FetchPhase,
    /// Bytes so far.
    pub bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// Layers so far.
    pub layers: usize,
    /// Layers in all.
    pub total_layers: usize,
}

/// For people: `downloading, 12.3 of 45.6 MB, 2 of 5 layers`.
impl fmt::Display for FetchProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.phase {
            FetchPhase::Waiting => return f.write_str("waiting for other downloads"),
            FetchPhase::Resolving => return f.write_str("asking the registry"),
            FetchPhase::Downloading => "downloading",
            FetchPhase::Unpacking => "unpacking",
        })?;
        if self.total_bytes > 0 {
            write!(f, ", {} of {} MB", Megabytes(self.bytes), Megabytes(self.total_bytes))?;
        } else if self.bytes > 0 {
            write!(f, ", {} MB", Megabytes(self.bytes))?;
        }
        if self.total_layers > 0 {
            write!(f, ", {} of {} layers", self.layers, self.total_layers)?;
        }
        Ok(())
    }
}

/// Bytes as millions with one digit behind the point.
struct Megabytes(u64);

impl fmt::Display for Megabytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1_000_000, self.0 % 1_000_000 / 100_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_told_in_few_words() {
        let mut progress = FetchProgress::default();
        let mut told = |phase, bytes, total_bytes, layers, total_layers| {
            progress = FetchProgress { phase, bytes, total_bytes, layers, total_layers };
            progress.to_string()
        };
        assert_eq!(told(FetchPhase::Waiting, 0, 0, 0, 0), "waiting for other downloads");
        assert_eq!(told(FetchPhase::Resolving, 0, 0, 0, 0), "asking the registry");
        assert_eq!(
            told(FetchPhase::Downloading, 12_340_000, 45_678_900, 2, 5),
            "downloading, 12.3 of 45.6 MB, 2 of 5 layers"
        );
        assert_eq!(told(FetchPhase::Downloading, 99_999, 0, 0, 0), "downloading, 0.0 MB");
        assert_eq!(told(FetchPhase::Unpacking, 0, 0, 0, 1), "unpacking, 0 of 1 layers");
    }

    #[test]
    fn secrets_are_not_shown() {
        let source = ImageSource {
            name: "a/b".to_owned(),
            platform: None,
            credentials: Some(Credentials { username: "user".to_owned(), password: "hunter2".to_owned() }),
        };
        let shown = format!("{source:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("user\""), "{shown}");
    }

    #[test]
    fn an_image_is_its_runtimes_own() {
        let image = Image::new(Arc::new(7_u8));
        assert_eq!((image.get::<u8>().as_deref(), image.get::<u16>()), (Some(&7), None));
    }
}
