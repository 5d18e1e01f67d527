//! Names of images in the form that Docker made common.

use std::fmt;

const DEFAULT_HOST: &str = "docker.io";
const DEFAULT_TAG: &str = "latest";

/// A text that no registry would accept as an image's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid image name {name:?}: {reason}")]
pub struct InvalidName {
    /// The text, shortened.
    pub name: String,
    /// What is wrong.
    pub reason: &'static str,
}

/// A complete image name: registry host, repository, and a tag or a digest.
///
/// `python`, `python:latest`, `library/python` and `docker.io/library/python:latest` are one reference.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    host: String,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

impl Reference {
    /// Reads and completes a name.
    ///
    /// # Errors
    /// When no registry would accept it.
    pub fn parse(name: &str) -> Result<Self, InvalidName> {
        let invalid = |reason| InvalidName { name: name.chars().take(300).collect(), reason };
        let (rest, digest) = match name.split_once('@') {
            Some((rest, digest)) => {
                if !is_digest(digest) {
                    return Err(invalid("its digest is not sha256: and 64 hexadecimal digits"));
                }
                (rest, Some(digest.to_owned()))
            }
            None => (name, None),
        };
        // A colon after the last slash parts the tag; one before it belongs to the host's port.
        let path_start = rest.rfind('/').map_or(0, |slash| slash + 1);
        let (path, tag) = match rest[path_start..].find(':') {
            Some(colon) => (&rest[..path_start + colon], Some(&rest[path_start + colon + 1..])),
            None => (rest, None),
        };
        if let Some(tag) = tag
            && !is_tag(tag)
        {
            return Err(invalid("a tag is up to 128 letters, digits, `_`, `.`, `-`"));
        }
        let (host, repository) = match path.split_once('/') {
            Some((first, rest)) if is_host(first) => (first, rest),
            _ => (DEFAULT_HOST, path),
        };
        if repository.len() + host.len() > 255 {
            return Err(invalid("it is longer than 255 bytes"));
        }
        if !repository.split('/').all(is_component) {
            return Err(invalid(
                "its parts are lower-case letters and digits, with single `.`, one or two `_`, or `-` between them",
            ));
        }
        let host = if host == "index.docker.io" { DEFAULT_HOST } else { host };
        if !is_host_name(host) {
            return Err(invalid("its registry is not a host name"));
        }
        let repository = if host == DEFAULT_HOST && !repository.contains('/') {
            format!("library/{repository}")
        } else {
            repository.to_owned()
        };
        let tag = match (tag, &digest) {
            (Some(tag), _) => Some(tag.to_owned()),
            (None, None) => Some(DEFAULT_TAG.to_owned()),
            (None, Some(_)) => None,
        };
        Ok(Self { host: host.to_owned(), repository, tag, digest })
    }

    /// Host and repository, without tag and digest.
    #[must_use]
    pub fn repository(&self) -> String {
        format!("{}/{}", self.host, self.repository)
    }

    /// Registry host, with its port.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Path of the repository on its registry.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.repository
    }

    /// The tag; `latest` when the name had neither tag nor digest.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// `sha256:…` of the manifest.
    #[must_use]
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    /// Every shorter spelling in common use, the full one included.
    #[must_use]
    pub fn spellings(&self) -> Vec<String> {
        let mut paths = vec![self.repository()];
        if self.host == DEFAULT_HOST {
            paths.push(self.repository.clone());
            paths.extend(self.repository.strip_prefix("library/").map(str::to_owned));
        }
        let full_suffix = self.suffix();
        let mut spellings = Vec::with_capacity(paths.len() * 2);
        for path in paths {
            spellings.push(format!("{path}{full_suffix}"));
            if self.digest.is_none() && self.tag.as_deref() == Some(DEFAULT_TAG) {
                spellings.push(path);
            }
        }
        spellings
    }

    fn suffix(&self) -> String {
        let tag = self.tag.as_ref().map(|tag| format!(":{tag}")).unwrap_or_default();
        let digest = self.digest.as_ref().map(|digest| format!("@{digest}")).unwrap_or_default();
        tag + &digest
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}{}", self.host, self.repository, self.suffix())
    }
}

/// Whether `text` is `sha256:` and 64 lower-case hexadecimal digits.
#[must_use]
pub fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(is_hex_digest)
}

/// Whether `text` is 64 lower-case hexadecimal digits, and so safe as a file name.
#[must_use]
pub fn is_hex_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_host(first: &str) -> bool {
    first == "localhost" || first.contains(['.', ':']) || first.bytes().any(|byte| byte.is_ascii_uppercase())
}

/// A name or address, with a port behind a colon; IPv6 addresses in brackets.
fn is_host_name(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    let is_port = |port: &str| port.parse::<u16>().is_ok() && port.bytes().all(|byte| byte.is_ascii_digit());
    let is_label = |label: &str| {
        label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let is_name = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => name.split('.').all(is_label),
    };
    is_name && port.is_none_or(is_port)
}

fn is_tag(tag: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    tag.len() <= 128
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|byte| word(byte) || byte == b'.' || byte == b'-')
}

/// Runs of lower-case letters and digits, parted by one `.`, one or two `_`, or any number of `-`.
fn is_component(component: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = component.as_bytes();
    if !bytes.first().copied().is_some_and(alphanumeric) || !bytes.last().copied().is_some_and(alphanumeric) {
        return false;
    }
    component.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()).all(|separator| {
        matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|byte| byte == b'-')
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_completed_as_docker_does() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (given, full) in [
            ("python", "docker.io/library/python:latest"),
            ("python:3.11", "docker.io/library/python:3.11"),
            ("library/python:3.11", "docker.io/library/python:3.11"),
            ("index.docker.io/library/python", "docker.io/library/python:latest"),
            ("docker.io/python", "docker.io/library/python:latest"),
            ("opensandbox/code-interpreter:v1.0.2", "docker.io/opensandbox/code-interpreter:v1.0.2"),
            ("localhost/a", "localhost/a:latest"),
            ("localhost:5000/a/b__c:x", "localhost:5000/a/b__c:x"),
            ("registry.example.com/team/x.y-z", "registry.example.com/team/x.y-z:latest"),
            ("[::1]:5000/a", "[::1]:5000/a:latest"),
        ] {
            assert_eq!(Reference::parse(given).unwrap().to_string(), full, "{given}");
        }
        let by_digest = Reference::parse(&format!("python@{digest}")).unwrap();
        assert_eq!(by_digest.to_string(), format!("docker.io/library/python@{digest}"));
        assert_eq!((by_digest.tag(), by_digest.digest()), (None, Some(digest.as_str())));
    }

    #[test]
    fn bad_names_are_refused() {
        for name in [
            "",
            ":",
            "a:",
            "a:b:c",
            "A",
            "a/B",
            "a..b",
            "a___b",
            "-a",
            "a-",
            "a/",
            "/a",
            "a//b",
            "a b",
            "../a",
            "a@b",
            "a:..",
            "a@sha256:zz",
            "docker.io/",
            "a\nb",
            "ex ample.com/a",
            "käse",
            "-a.b/c",
            "a.b:x/c",
            "a:/b",
            "[::x]/a",
            "..../a",
        ] {
            assert!(Reference::parse(name).is_err(), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn full_names_stay(name in "[a-zA-Z0-9./:@_-]{0,40}") {
            if let Ok(reference) = Reference::parse(&name) {
                let full = reference.to_string();
                prop_assert_eq!(&Reference::parse(&full).unwrap(), &reference);
                for spelling in reference.spellings() {
                    prop_assert_eq!(Reference::parse(&spelling).unwrap().to_string(), full.clone());
                }
            }
        }

        #[test]
        fn any_text_is_answered(name in ".*") {
            let _ = Reference::parse(&name);
        }
    }
}
