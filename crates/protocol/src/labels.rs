//! Rules for metadata, which upstream keeps as Kubernetes labels.

/// Keys under this prefix belong to the server.
pub const RESERVED_PREFIX: &str = "opensandbox.io/";

/// Why a metadata entry is refused. The value is never repeated: it may be a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// The key is empty, too long or has characters that a label may not have.
    #[error(
        "metadata key '{0}' is not valid: use name or prefix/name, name of 1 to 63 letters, digits, '-', '_' or '.' that begins and ends with a letter or digit, prefix a lower-case DNS name of at most 253 characters"
    )]
    Key(String),
    /// The key begins with [`RESERVED_PREFIX`].
    #[error("metadata key '{0}' is reserved: keys that begin with 'opensandbox.io/' belong to the server")]
    Reserved(String),
    /// The value breaks the rules.
    #[error(
        "the value of metadata key '{0}' is not valid: at most 63 letters, digits, '-', '_' or '.', beginning and ending with a letter or digit, or empty"
    )]
    Value(String),
}

/// Checks one entry of metadata.
///
/// # Errors
/// Says which rule is broken.
pub fn check(key: &str, value: &str) -> Result<(), LabelError> {
    if key.starts_with(RESERVED_PREFIX) {
        return Err(LabelError::Reserved(shorten(key)));
    }
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if !is_name(name) || !prefix.is_none_or(is_dns_subdomain) {
        return Err(LabelError::Key(shorten(key)));
    }
    if !value.is_empty() && !is_name(value) {
        return Err(LabelError::Value(shorten(key)));
    }
    Ok(())
}

fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && bytes[0].is_ascii_alphanumeric()
        && bytes[bytes.len() - 1].is_ascii_alphanumeric()
}

fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|label| {
            let bytes = label.as_bytes();
            !bytes.is_empty()
                && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
                && bytes[0] != b'-'
                && bytes[bytes.len() - 1] != b'-'
        })
}

fn shorten(key: &str) -> String {
    key.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_rules() {
        let long = "a".repeat(63);
        let too_long = "a".repeat(64);
        let prefix = format!("{}.{}.{}.{}", "a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(61));
        for (key, value) in [
            ("team", "x"),
            ("a.b_c-D", ""),
            ("example.org/team", "v1.2"),
            (long.as_str(), long.as_str()),
            (&format!("{prefix}/n"), "v"),
        ] {
            assert_eq!(check(key, value), Ok(()), "{key}={value}");
        }
        for (key, value) in [
            ("", "x"),
            ("-a", "x"),
            ("a-", "x"),
            ("a b", "x"),
            ("A.B/c", "x"),
            ("/c", "x"),
            ("a/", "x"),
            ("a/b/c", "x"),
            (too_long.as_str(), "x"),
            (&format!("{prefix}e/n"), "v"),
        ] {
            assert!(matches!(check(key, value), Err(LabelError::Key(_))), "{key}={value}");
        }
        for value in ["a b", "-a", "a-", too_long.as_str(), "ü"] {
            assert!(matches!(check("k", value), Err(LabelError::Value(_))), "{value}");
        }
        assert!(matches!(check("opensandbox.io/id", "x"), Err(LabelError::Reserved(_))));
    }
}
