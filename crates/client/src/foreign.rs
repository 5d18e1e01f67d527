//! Answers, and the lack of them, that mean that something else than an OpenSandbox server is at the address: which
//! address, what came, and what to look at.

use reqwest::header::{CONTENT_TYPE, HeaderMap, LOCATION};
use url::Url;

/// Where the address comes from.
const ADDRESS: &str = "check host, port and protocol (--domain, --protocol; OPEN_SANDBOX_DOMAIN, \
    OPEN_SANDBOX_PROTOCOL) and proxies on the way";
/// What helps a client that talks in clear text to a port that wants TLS.
const WANTS_TLS: &str = "the port wants TLS: use --protocol https (OPEN_SANDBOX_PROTOCOL=https)";
/// Most of a foreign answer's own words that is repeated.
const SHOWN: usize = 300;

/// Whether this is a page for browsers. Neither the server nor the daemon has one, whatever the status.
pub(crate) fn is_page(headers: &HeaderMap) -> bool {
    content_type(headers).is_some_and(|kind| kind == "text/html" || kind == "application/xhtml+xml")
}

/// Says what came where the server's answer should be.
pub(crate) fn page(status: u16, headers: &HeaderMap) -> String {
    let kind = content_type(headers).unwrap_or_else(|| "no content type".to_owned());
    format!("HTTP {status} with {kind}: that is no OpenSandbox server; {ADDRESS}")
}

/// Says what an error answer is that carries no error of the protocol.
pub(crate) fn error(url: &Url, status: u16, headers: &HeaderMap, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text = text.trim();
    let location = headers.get(LOCATION).map(|to| String::from_utf8_lossy(to.as_bytes()).into_owned());
    if let Some(to) = location.filter(|_| (300..400).contains(&status)) {
        let to: String = to.chars().take(SHOWN).collect();
        return format!("{} redirects to {to}, and redirects are not followed; {ADDRESS}", shown(url));
    }
    // nginx and Go say so, each in its own words.
    if status == 400 && url.scheme() == "http" && text.contains("HTTPS") {
        return format!("{} is no place for plain HTTP: {WANTS_TLS}", shown(url));
    }
    if text.is_empty() {
        return format!(
            "{} answered HTTP {status} without a body; is this an OpenSandbox server?",
            shown(url)
        );
    }
    let readable = match content_type(headers).as_deref() {
        None => !text.starts_with('<'),
        Some(kind) => kind == "text/plain" || kind.ends_with("json"),
    };
    if !readable {
        return format!("{} answered {}", shown(url), page(status, headers));
    }
    let mut told: String = text.chars().take(SHOWN).collect();
    if told.len() < text.len() {
        told.push('…');
    }
    told
}

/// What to look at when no connection came about, by what the system said of it.
pub(crate) fn advice(reason: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    if says(&["dns error"]) {
        "check the host's name in --domain (OPEN_SANDBOX_DOMAIN)"
    } else if says(&["InvalidContentType"]) {
        "the port does not speak TLS: use --protocol http (OPEN_SANDBOX_PROTOCOL=http)"
    } else if says(&["certificate"]) {
        "its certificate is not trusted here: SSL_CERT_FILE may name a file with its authority"
    } else if says(&["timed out", "deadline"]) {
        "is the address right (--domain, OPEN_SANDBOX_DOMAIN), and does a firewall let it pass?"
    } else {
        "is the server running, and is OPEN_SANDBOX_DOMAIN right?"
    }
}

/// What else a connection that was reset may mean.
pub(crate) fn reset(url: &str) -> String {
    if url.starts_with("http:") { format!("; perhaps {WANTS_TLS}") } else { String::new() }
}

/// What bytes mean that are no HTTP.
pub(crate) fn no_http(url: &str) -> String {
    let tls = if url.starts_with("http:") { WANTS_TLS } else { ADDRESS };
    format!("what {url} sends is no HTTP; if it should be: {tls}")
}

fn content_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}

/// Queries hold names of files, which are nobody's business.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn pages_are_named_and_never_repeated() {
        let url = Url::parse("http://h:81/v1/sandboxes?secret=1").unwrap();
        for (kind, body) in [
            (Some("text/html; charset=utf-8"), "<html><body>\n\u{1b}[31mHello"),
            (None, "  <!DOCTYPE html>"),
            (Some("application/xml"), "<Error/>"),
            (Some("image/png"), "\u{89}PNG"),
        ] {
            let kind_header: Vec<_> = kind.iter().map(|kind| ("content-type", *kind)).collect();
            let told = error(&url, 502, &headers(&kind_header), body.as_bytes());
            assert!(told.starts_with("http://h:81/v1/sandboxes answered HTTP 502 with "), "{told}");
            assert!(told.contains("no OpenSandbox server") && told.contains("--domain"), "{told}");
            assert!(!told.contains('\n') && !told.contains("Hello") && !told.contains("secret"), "{told}");
        }
    }

    #[test]
    fn short_words_of_daemons_and_gateways_are_kept() {
        let url = Url::parse("http://h/").unwrap();
        let told = |kind, body: &str| error(&url, 500, &headers(&[("content-type", kind)]), body.as_bytes());
        assert_eq!(told("text/plain", "Internal Server Error\n"), "Internal Server Error");
        assert_eq!(told("application/problem+json", "{\"detail\":1}"), "{\"detail\":1}");
        assert_eq!(told("text/plain", &"x".repeat(4000)).chars().count(), SHOWN + 1);
        assert!(error(&url, 502, &HeaderMap::new(), b" ").contains("without a body"));
    }

    #[test]
    fn the_wrong_protocol_is_told() {
        let url = Url::parse("http://h/v1").unwrap();
        let told = error(&url, 400, &HeaderMap::new(), b"Client sent an HTTP request to an HTTPS server.\n");
        assert!(told.contains("--protocol https"), "{told}");
        let moved = headers(&[("location", "https://h/v1"), ("content-type", "text/html")]);
        let told = error(&url, 301, &moved, b"<html>");
        assert!(told.contains("redirects to https://h/v1") && told.contains("--protocol"), "{told}");
        assert!(no_http("http://h:1").contains("--protocol https"));
        assert!(!no_http("https://h:1").contains("--protocol https ("));
    }
}
