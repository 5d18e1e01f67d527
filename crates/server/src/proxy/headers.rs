//! Which headers cross the proxy, in either direction.

use std::net::IpAddr;

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, LOCATION, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, SERVER, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};

/// "No renewal for this request."
pub(super) const ACCESS_RENEW: HeaderName = HeaderName::from_static("opensandbox-access-renew");

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Headers between two neighbours only.
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Credentials for this server, and what only the edge may say. `Expect` is answered here: the server sends its
/// `100 Continue` when the backend's connection asks for the body.
const NOT_FOR_BACKENDS: [HeaderName; 11] = [
    AUTHORIZATION,
    COOKIE,
    EXPECT,
    FORWARDED,
    HeaderName::from_static("open-sandbox-api-key"),
    HeaderName::from_static("opensandbox-secure-access"),
    ACCESS_RENEW,
    FORWARDED_FOR,
    FORWARDED_HOST,
    FORWARDED_PORT,
    HeaderName::from_static("x-real-ip"),
];

/// How a message's body is delimited, as its head said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// By its length, or there is none.
    Plain,
    /// In chunks.
    Chunked,
    /// By a coding that the proxy does not know.
    Unknown,
}

/// What the proxy tells a backend about the request's way.
#[derive(Debug)]
pub(super) struct Origin<'a> {
    /// Who sent the request; `None` on a socket without addresses.
    pub(super) peer: Option<IpAddr>,
    /// Path under which the client sees the backend's root.
    pub(super) prefix: &'a str,
    /// The backend's own address.
    pub(super) host: HeaderValue,
    /// Believe what the peer says of address and scheme.
    pub(super) trusted: bool,
}

/// How the body is delimited, by `Transfer-Encoding`.
pub(super) fn framing(headers: &HeaderMap) -> Framing {
    let mut values = headers.get_all(TRANSFER_ENCODING).iter();
    match (values.next(), values.next()) {
        (None, _) => Framing::Plain,
        (Some(value), None) if value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") => {
            Framing::Chunked
        }
        _ => Framing::Unknown,
    }
}

/// Turns a client's headers into those for the backend.
pub(super) fn prepare_request(headers: &mut HeaderMap, origin: &Origin<'_>) {
    let forwarded_for = if origin.trusted { headers.get(FORWARDED_FOR).cloned() } else { None };
    let forwarded_proto = if origin.trusted { headers.get(FORWARDED_PROTO).cloned() } else { None };
    let host = headers.get(HOST).cloned();
    let chunked = framing(headers) == Framing::Chunked;

    remove_hop_by_hop(headers);
    for name in &NOT_FOR_BACKENDS {
        headers.remove(name);
    }
    if chunked {
        // Said here because hyper takes a body of unknown length on GET for none.
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }

    let peer =
        || origin.peer.and_then(|address| HeaderValue::try_from(address.to_canonical().to_string()).ok());
    if let Some(value) = forwarded_for.or_else(peer) {
        headers.insert(FORWARDED_FOR, value);
    }
    let proto = forwarded_proto.unwrap_or(HeaderValue::from_static("http"));
    headers.insert(FORWARDED_PORT, port_of(host.as_ref(), &proto));
    headers.insert(FORWARDED_PROTO, proto);
    if let Some(host) = host {
        headers.insert(FORWARDED_HOST, host);
    }
    let prefix = if origin.prefix.is_empty() { "/" } else { origin.prefix };
    match HeaderValue::from_str(prefix) {
        Ok(value) => headers.insert(FORWARDED_PREFIX, value),
        Err(_) => headers.remove(FORWARDED_PREFIX),
    };
    headers.insert(HOST, origin.host.clone());
}

/// Turns a backend's headers into those for the client.
pub(super) fn prepare_response(headers: &mut HeaderMap, prefix: &str, wants_trailers: bool) {
    let chunked = headers.contains_key(TRANSFER_ENCODING);
    let trailer = if wants_trailers { headers.get(TRAILER).cloned() } else { None };
    remove_hop_by_hop(headers);
    headers.remove(SERVER);
    if chunked {
        // A length beside chunks is a lie, or was one on the way here.
        headers.remove(CONTENT_LENGTH);
    } else {
        single_length(headers);
    }
    if let Some(trailer) = trailer {
        headers.insert(TRAILER, trailer);
    }
    let moved = headers.get(LOCATION).and_then(|value| under_prefix(value, prefix));
    if let Some(moved) = moved {
        headers.insert(LOCATION, moved);
    }
}

/// Whether the client reads trailers.
pub(super) fn wants_trailers(headers: &HeaderMap) -> bool {
    has_token(headers, &TE, "trailers")
}

/// Whether one of the comma-separated words of a header is `word`, in any case.
pub(super) fn has_token(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    headers.get_all(name).iter().any(|value| tokens(value).any(|token| token.eq_ignore_ascii_case(word)))
}

/// The comma-separated words of a header.
pub(super) fn tokens(value: &HeaderValue) -> impl Iterator<Item = &str> {
    value.to_str().unwrap_or_default().split(',').map(str::trim).filter(|token| !token.is_empty())
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let mut named: Vec<HeaderName> = Vec::new();
    for value in headers.get_all(CONNECTION) {
        let usual =
            |token: &&str| !matches!(*token, "close" | "keep-alive" | "Keep-Alive" | "upgrade" | "Upgrade");
        named.extend(tokens(value).filter(usual).filter_map(|token| token.parse().ok()));
    }
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Where a redirect to the backend's root leads on the client's side. Other forms need no change.
fn under_prefix(location: &HeaderValue, prefix: &str) -> Option<HeaderValue> {
    let bytes = location.as_bytes();
    if prefix.is_empty() || bytes.first() != Some(&b'/') || bytes.get(1) == Some(&b'/') {
        return None;
    }
    HeaderValue::from_bytes(&[prefix.as_bytes(), bytes].concat()).ok()
}

/// Keeps one of several equal lengths; hyper has refused unequal ones.
fn single_length(headers: &mut HeaderMap) {
    let mut values = headers.get_all(CONTENT_LENGTH).iter();
    let Some(first) = values.next() else { return };
    if values.next().is_none() && !first.as_bytes().contains(&b',') {
        return;
    }
    let length = tokens(first).next().and_then(|token| HeaderValue::from_str(token).ok());
    match length {
        Some(length) => headers.insert(CONTENT_LENGTH, length),
        None => headers.remove(CONTENT_LENGTH),
    };
}

/// The port of the address the client used.
fn port_of(host: Option<&HeaderValue>, proto: &HeaderValue) -> HeaderValue {
    let text = host.and_then(|value| value.to_str().ok()).unwrap_or_default();
    // The last colon of `[::1]` is inside the brackets and followed by no number.
    let port = text.rsplit_once(':').map_or("", |(_, port)| port);
    let standard = HeaderValue::from_static(if proto == "https" { "443" } else { "80" });
    if port.parse::<u16>().is_ok() { HeaderValue::from_str(port).unwrap_or(standard) } else { standard }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        headers
    }

    fn origin() -> Origin<'static> {
        Origin {
            peer: Some([192, 0, 2, 7].into()),
            prefix: "/v1/sandboxes/a/proxy/80",
            host: HeaderValue::from_static("127.0.0.1:80"),
            trusted: false,
        }
    }

    #[test]
    fn hop_by_hop_and_named_headers_stay_here() {
        let mut headers = map(&[
            ("connection", "close, X-Secret"),
            ("connection", "x-other"),
            ("x-secret", "1"),
            ("x-other", "1"),
            ("trailer", "T"),
            ("te", "trailers"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "x"),
            ("proxy-authenticate", "x"),
            ("upgrade", "h2c"),
            ("accept", "a"),
            ("accept", "b"),
        ]);
        prepare_request(&mut headers, &origin());
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        let added = ["x-forwarded-for", "x-forwarded-port", "x-forwarded-prefix", "x-forwarded-proto"];
        assert_eq!(names, [&["accept", "host"][..], &added[..]].concat());
        assert_eq!(headers.get_all("accept").iter().count(), 2);
    }

    #[test]
    fn credentials_and_edge_headers_stay_here() {
        let mut headers = map(&[
            ("host", "server:8080"),
            ("authorization", "Bearer x"),
            ("cookie", "a=b"),
            ("open-sandbox-api-key", "k"),
            ("opensandbox-secure-access", "s"),
            ("opensandbox-access-renew", "skip"),
            ("forwarded", "for=1.1.1.1"),
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-host", "evil"),
            ("x-forwarded-port", "1"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-prefix", "/evil"),
            ("x-real-ip", "1.1.1.1"),
            ("expect", "100-continue"),
            ("x-execd-access-token", "t"),
            ("opensandbox-egress-auth", "e"),
            ("x-request-id", "r"),
        ]);
        prepare_request(&mut headers, &origin());
        let expected = map(&[
            ("host", "127.0.0.1:80"),
            ("x-execd-access-token", "t"),
            ("opensandbox-egress-auth", "e"),
            ("x-request-id", "r"),
            ("x-forwarded-for", "192.0.2.7"),
            ("x-forwarded-host", "server:8080"),
            ("x-forwarded-port", "8080"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-prefix", "/v1/sandboxes/a/proxy/80"),
        ]);
        assert_eq!(headers, expected);
    }

    #[test]
    fn a_trusted_peer_speaks_for_its_client() {
        let mut headers =
            map(&[("x-forwarded-for", "1.1.1.1"), ("x-forwarded-proto", "https"), ("host", "h")]);
        prepare_request(&mut headers, &Origin { trusted: true, ..origin() });
        assert_eq!(headers["x-forwarded-for"], "1.1.1.1");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["x-forwarded-port"], "443");
    }

    #[test]
    fn ports_of_hosts() {
        let http = HeaderValue::from_static("http");
        for (host, port) in [("a", "80"), ("a:81", "81"), ("[::1]", "80"), ("[::1]:82", "82"), ("a:x", "80")]
        {
            assert_eq!(port_of(Some(&HeaderValue::from_static(host)), &http), port, "{host}");
        }
        assert_eq!(port_of(None, &http), "80");
    }

    #[test]
    fn a_mapped_peer_is_shown_as_ipv4() {
        let mut headers = HeaderMap::new();
        let peer = "::ffff:192.0.2.1".parse().unwrap();
        prepare_request(&mut headers, &Origin { peer: Some(peer), ..origin() });
        assert_eq!(headers["x-forwarded-for"], "192.0.2.1");
    }

    #[test]
    fn framings() {
        assert_eq!(framing(&map(&[])), Framing::Plain);
        assert_eq!(framing(&map(&[("transfer-encoding", " Chunked ")])), Framing::Chunked);
        assert_eq!(framing(&map(&[("transfer-encoding", "gzip, chunked")])), Framing::Unknown);
        let twice = map(&[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")]);
        assert_eq!(framing(&twice), Framing::Unknown);
    }

    #[test]
    fn redirects_to_the_root_get_the_prefix() {
        for (sent, received) in [
            ("/login?x=/y", "/v1/p/login?x=/y"),
            ("/", "/v1/p/"),
            ("//other/x", "//other/x"),
            ("http://other/x", "http://other/x"),
            ("next", "next"),
            ("?q", "?q"),
        ] {
            let mut headers = map(&[("location", sent)]);
            prepare_response(&mut headers, "/v1/p", false);
            assert_eq!(headers["location"], received, "{sent}");
        }
    }

    #[test]
    fn response_headers_of_the_hop_stay_here() {
        let mut headers = map(&[
            ("server", "nginx"),
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("trailer", "x-sum"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("date", "d"),
        ]);
        let mut with_trailers = headers.clone();
        prepare_response(&mut headers, "/p", false);
        assert_eq!(headers, map(&[("set-cookie", "a=1"), ("set-cookie", "b=2"), ("date", "d")]));
        prepare_response(&mut with_trailers, "/p", true);
        assert_eq!(with_trailers["trailer"], "x-sum");
    }

    #[test]
    fn equal_lengths_become_one() {
        for pairs in
            [&[("content-length", "5"), ("content-length", "5")][..], &[("content-length", "5, 5")][..]]
        {
            let mut headers = map(pairs);
            prepare_response(&mut headers, "/p", false);
            assert_eq!(headers.get_all("content-length").iter().collect::<Vec<_>>(), ["5"]);
        }
    }
}
