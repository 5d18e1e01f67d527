//! Which requests are for the proxy, and what path the backend gets.
//!
//! Only the literal spelling of the prefix counts: nothing is decoded, so what decides where a request goes is
//! also what decides whether it needs a key. Behind the prefix bytes pass untouched; dot segments and `%2F` mean
//! to the backend whatever it wants them to mean, and cannot lead out of the sandbox that the prefix names.

use http::Uri;
use http::uri::{Parts, PathAndQuery};

/// A path of the form `[/v1]/sandboxes/{id}/proxy/{port}[/…]`, as sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matched<'a> {
    /// The id's segment; perhaps no id.
    pub id: &'a str,
    /// The port's segment; perhaps no number.
    pub port: &'a str,
    /// The prefix, without a slash at its end.
    pub prefix: &'a str,
    /// Where in the path the rest begins: at a slash, or at the end of the path.
    pub rest_start: usize,
}

/// Tells whether a raw path is one of the proxy's. Several slashes in front count as one, since some clients join
/// a base address ending in `/` with the path.
#[must_use]
pub fn matches(path: &str) -> Option<Matched<'_>> {
    let trimmed = path.trim_start_matches('/');
    let start = path.len().checked_sub(trimmed.len() + 1)?;
    let tail = trimmed.strip_prefix("v1/").unwrap_or(trimmed).strip_prefix("sandboxes/")?;
    let (id, tail) = tail.split_once('/')?;
    let tail = tail.strip_prefix("proxy/")?;
    let port_length = tail.find('/').unwrap_or(tail.len());
    let (port, rest) = tail.split_at(port_length);
    if id.is_empty() || port.is_empty() {
        return None;
    }
    let rest_start = path.len() - rest.len();
    Some(Matched { id, port, prefix: &path[start..rest_start], rest_start })
}

/// Reads a host of the form `{port}-{id}.{suffix}`, with or without a port of the server's behind it. There the
/// backend owns the whole path.
pub(super) fn matches_host<'a>(host: &'a str, suffix: &str) -> Option<Matched<'a>> {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let label_length = name.len().checked_sub(suffix.len())?;
    let (label, domain) = name.split_at_checked(label_length)?;
    let label = label.strip_suffix('.')?;
    let (port, id) = label.split_once('-')?;
    if !domain.eq_ignore_ascii_case(suffix) || port.is_empty() || id.is_empty() || label.contains('.') {
        return None;
    }
    Some(Matched { id, port, prefix: "", rest_start: 0 })
}

/// Why a segment is no port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PortError {
    /// Not all digits.
    NoNumber,
    /// Zero, or above 65535.
    OutOfRange,
}

pub(super) fn parse_port(text: &str) -> Result<u16, PortError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(PortError::NoNumber);
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(PortError::OutOfRange),
        Ok(port) => Ok(port),
    }
}

/// The backend's request target: the rest of the path and the query, byte for byte.
pub(super) fn backend_uri(uri: &Uri, rest_start: usize) -> Result<Uri, http::Error> {
    let whole = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let rest = whole.get(rest_start..).unwrap_or_default();
    let target = if rest.starts_with('/') {
        PathAndQuery::try_from(rest)?
    } else {
        PathAndQuery::try_from(format!("/{rest}"))?
    };
    let mut parts = Parts::default();
    parts.path_and_query = Some(target);
    Ok(Uri::from_parts(parts)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, prop_assert_eq, proptest};

    use super::*;

    const ID: &str = "3f0c8a52-6d4e-4d1b-9a53-0b7c1f2e9d10";

    #[test]
    fn bare_and_versioned_prefixes_match() {
        for (path, prefix) in [
            (format!("/sandboxes/{ID}/proxy/80"), format!("/sandboxes/{ID}/proxy/80")),
            (format!("/v1/sandboxes/{ID}/proxy/80/"), format!("/v1/sandboxes/{ID}/proxy/80")),
            (format!("//v1/sandboxes/{ID}/proxy/80/a//b/"), format!("/v1/sandboxes/{ID}/proxy/80")),
        ] {
            let matched = matches(&path).unwrap();
            assert_eq!((matched.id, matched.port, matched.prefix), (ID, "80", prefix.as_str()));
            assert_eq!(&path[..matched.rest_start], &path[..path.len() - path[matched.rest_start..].len()]);
        }
    }

    #[test]
    fn hosts_name_sandboxes() {
        let expected = Some(Matched { id: ID, port: "80", prefix: "", rest_start: 0 });
        for (host, suffix) in [
            (format!("80-{ID}.localhost"), "localhost"),
            (format!("80-{ID}.localhost:8080"), "localhost"),
            (format!("80-{ID}.Apps.Example.org"), "apps.example.org"),
        ] {
            assert_eq!(matches_host(&host, suffix), expected, "{host}");
        }
        for host in
            ["", "localhost", ".localhost", "80-.localhost", "-x.localhost", "a.80-x.localhost", "80-x.other"]
        {
            assert_eq!(matches_host(host, "localhost"), None, "{host}");
        }
    }

    #[test]
    fn other_paths_do_not_match() {
        for path in [
            "",
            "/",
            "/v1",
            "/sandboxes/x",
            "/sandboxes/x/proxy",
            "/sandboxes/x/proxy/",
            "/sandboxes//proxy/80",
            "/sandboxes/x/../proxy/80",
            "/sandboxes/x/%70roxy/80",
            "/v1/v1/sandboxes/x/proxy/80",
            "/v2/sandboxes/x/proxy/80",
            "sandboxes/x/proxy/80",
            "/x/sandboxes/x/proxy/80",
        ] {
            assert_eq!(matches(path), None, "{path}");
        }
    }

    #[test]
    fn ports() {
        assert_eq!(parse_port("1"), Ok(1));
        assert_eq!(parse_port("65535"), Ok(65535));
        assert_eq!(parse_port("0080"), Ok(80));
        for bad in ["0", "65536", "99999999999999999999"] {
            assert_eq!(parse_port(bad), Err(PortError::OutOfRange), "{bad}");
        }
        for bad in ["", "x", "80x", "-1", "+80", "8 0", "%38"] {
            assert_eq!(parse_port(bad), Err(PortError::NoNumber), "{bad}");
        }
    }

    #[test]
    fn rest_and_query_pass_untouched() {
        let prefix = format!("/v1/sandboxes/{ID}/proxy/8000");
        for (sent, received) in [
            ("", "/"),
            ("/", "/"),
            ("?", "/?"),
            ("?a=1", "/?a=1"),
            ("/x?a=1&b=%2F&c=a+b&c=2", "/x?a=1&b=%2F&c=a+b&c=2"),
            ("/x?", "/x?"),
            ("//a//b", "//a//b"),
            ("/a%2Fb/%2e%2e/../c/.", "/a%2Fb/%2e%2e/../c/."),
            ("/?k&k=&=v&%ff=%FF&a=%20", "/?k&k=&=v&%ff=%FF&a=%20"),
            ("/x?u=http://a/b?c", "/x?u=http://a/b?c"),
        ] {
            let uri: Uri = format!("{prefix}{sent}").parse().unwrap();
            let matched = matches(uri.path()).unwrap();
            assert_eq!(backend_uri(&uri, matched.rest_start).unwrap().to_string(), received, "{sent}");
        }
    }

    #[test]
    fn absolute_form_is_cut_to_its_path() {
        let uri: Uri = format!("http://host:1/sandboxes/{ID}/proxy/80/a?b").parse().unwrap();
        let matched = matches(uri.path()).unwrap();
        assert_eq!(backend_uri(&uri, matched.rest_start).unwrap().to_string(), "/a?b");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_rest_survives(rest in "(/[A-Za-z0-9%./;:@!$&'()*+,=~_-]{0,30}){0,3}", query in "(\\?[A-Za-z0-9%./?=&+-]{0,30})?") {
            let uri: Uri = format!("/sandboxes/{ID}/proxy/80{rest}{query}").parse().unwrap();
            let matched = matches(uri.path()).unwrap();
            let expected = if rest.is_empty() { format!("/{query}") } else { format!("{rest}{query}") };
            prop_assert_eq!(backend_uri(&uri, matched.rest_start).unwrap().to_string(), expected);
        }
    }
}
