//! Paths of archive entries, proven to stay below a root.

use super::error::{Error, Result};
use super::limits::Limits;

/// A relative path of plain names: no empty, `.` or `..` component, no NUL, within the limits.
/// Empty for the root itself. Symbolic links on the way are the applier's matter.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct EntryPath(Vec<u8>);

impl EntryPath {
    /// Reads a path as archives have it. `./a`, `a/`, `a//b` and `/a` are all ordinary there: a leading slash means
    /// the image's root. `..` is refused, wherever it would lead.
    pub(super) fn parse(raw: &[u8], layer: &str, limits: &Limits) -> Result<Self> {
        let refuse = |reason: &str| Error::entry(layer, raw, reason);
        if raw.len() > limits.path_bytes {
            return Err(refuse(&format!("its path is longer than path_bytes = {}", limits.path_bytes)));
        }
        if raw.contains(&0) {
            return Err(refuse("its path holds a NUL byte"));
        }
        let mut path = Vec::with_capacity(raw.len());
        let mut depth = 0;
        for name in raw.split(|byte| *byte == b'/') {
            match name {
                b"" | b"." => {}
                b".." => return Err(refuse("`..` could lead out of the image")),
                _ if name.len() > 255 => return Err(refuse("a name in its path is longer than 255 bytes")),
                _ => {
                    depth += 1;
                    if !path.is_empty() {
                        path.push(b'/');
                    }
                    path.extend_from_slice(name);
                }
            }
        }
        if depth > limits.depth {
            return Err(refuse(&format!("it lies deeper than depth = {}", limits.depth)));
        }
        Ok(Self(path))
    }

    /// The path, without a slash at either end.
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Path for system calls relative to the root: `.` for the root.
    pub(super) fn relative(&self) -> &[u8] {
        if self.0.is_empty() { b"." } else { &self.0 }
    }

    /// Directory and last name; `None` for the root.
    pub(super) fn split(&self) -> Option<(Self, &[u8])> {
        if self.0.is_empty() {
            return None;
        }
        Some(match self.0.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (Self(self.0[..slash].to_vec()), &self.0[slash + 1..]),
            None => (Self::default(), &self.0),
        })
    }

    /// The names from the root down.
    pub(super) fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|byte| *byte == b'/').filter(|name| !name.is_empty())
    }

    /// This path with one more name. `name` must be a plain one.
    pub(super) fn join(&self, name: &[u8]) -> Self {
        let mut path = self.0.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(raw: &[u8]) -> Result<EntryPath> {
        EntryPath::parse(raw, "layer", &Limits::default())
    }

    #[test]
    fn spellings_of_one_path() {
        for raw in ["a/b", "./a/b", "/a/b", "a//b/", "././a/./b/.", "//a/b//"] {
            assert_eq!(parse(raw.as_bytes()).unwrap().as_bytes(), b"a/b", "{raw}");
        }
        for raw in ["", ".", "/", "./", "././/"] {
            assert_eq!(parse(raw.as_bytes()).unwrap().relative(), b".", "{raw}");
        }
    }

    #[test]
    fn dangerous_paths_are_refused() {
        let deep = "a/".repeat(10_000);
        let wide = "x".repeat(256);
        for raw in ["..", "../x", "a/../b", "a/..", "/..", "/../etc", "a\0b", &deep, &wide] {
            assert!(matches!(parse(raw.as_bytes()), Err(Error::UnsafeEntry { .. })), "{raw:?}");
        }
        assert!(parse(b"...").is_ok());
        assert!(parse(b"..a/b..").is_ok());
    }

    proptest! {
        #[test]
        fn parsed_paths_hold_plain_names(raw in proptest::collection::vec(
            prop_oneof![Just(b'/'), Just(b'.'), Just(b'a'), Just(0_u8), any::<u8>()], 0..40)) {
            if let Ok(path) = parse(&raw) {
                for name in path.names() {
                    prop_assert!(!name.is_empty() && name != b"." && name != b"..");
                    prop_assert!(!name.contains(&b'/') && !name.contains(&0));
                }
                prop_assert_eq!(&parse(path.as_bytes()).unwrap(), &path);
                if let Some((parent, name)) = path.split() {
                    prop_assert_eq!(parent.join(name), path.clone());
                }
            }
        }
    }
}
