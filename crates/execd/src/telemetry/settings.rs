//! Where metrics go and how, by the standard's variables.

use std::ffi::OsString;
use std::net::IpAddr;
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Uri};

/// Port of collectors.
const PORT: u16 = 4318;
/// Path of metrics below a collector's address.
const PATH: &str = "/v1/metrics";
const INTERVAL: Duration = Duration::from_secs(60);
/// Nobody needs more; a collector of many sandboxes less.
const SHORTEST: Duration = Duration::from_millis(100);
const TIMEOUT: Duration = Duration::from_secs(10);
/// Attributes that may be added to each point.
const MOST_ATTRIBUTES: usize = 64;

/// What a collector is told: sums since the start, or differences since the last export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Temporality {
    /// Differences.
    #[default]
    Delta,
    /// Differences of what is recorded here, sums of what is read from the kernel.
    LowMemory,
    /// Sums.
    Cumulative,
}

impl Temporality {
    /// Whether durations are told as differences.
    #[must_use]
    pub fn histograms_are_delta(self) -> bool {
        self != Self::Cumulative
    }

    /// Whether counters of the kernel are told as differences.
    #[must_use]
    pub fn observed_are_delta(self) -> bool {
        self == Self::Delta
    }
}

/// Where metrics go and how.
#[derive(Clone, PartialEq)]
pub struct Settings {
    /// Complete address, without TLS.
    pub endpoint: Uri,
    /// Sent with each export.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Between two exports.
    pub interval: Duration,
    /// An export takes no longer.
    pub timeout: Duration,
    /// How sums are told.
    pub temporality: Temporality,
    /// Added to each point.
    pub attributes: Vec<(String, String)>,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Headers hold keys.
        f.debug_struct("Settings").field("endpoint", &self.endpoint.authority()).finish_non_exhaustive()
    }
}

impl Settings {
    #[cfg(test)]
    pub(super) fn to(endpoint: &str) -> Self {
        Self {
            endpoint: endpoint.parse().unwrap(),
            headers: Vec::new(),
            interval: INTERVAL,
            timeout: TIMEOUT,
            temporality: Temporality::default(),
            attributes: Vec::new(),
        }
    }
}

/// Reads the settings; `None` is off. `hostinfo` is the text of `/etc/hostinfo`.
///
/// # Errors
/// A collector is named that cannot be used; for people.
pub(super) fn read(
    var: impl Fn(&str) -> Option<OsString>,
    hostinfo: impl FnOnce() -> Option<String>,
) -> Result<Option<Settings>, String> {
    let text = |name: &str| {
        let value = var(name)?.into_string().ok()?;
        Some(value.trim().to_owned()).filter(|value| !value.is_empty())
    };
    let is = |name: &str, word: &str| text(name).is_some_and(|value| value.eq_ignore_ascii_case(word));
    if is("OTEL_SDK_DISABLED", "true") || is("OTEL_METRICS_EXPORTER", "none") {
        return Ok(None);
    }
    let endpoint = if let Some(url) = text("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") {
        endpoint("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", &url, "")?
    } else if let Some(url) = text("OTEL_EXPORTER_OTLP_ENDPOINT") {
        endpoint("OTEL_EXPORTER_OTLP_ENDPOINT", &url, PATH)?
    } else if let Some(host) = text("HOST_IP") {
        // The variable is of others too, who may mean something else by it.
        let Ok(address) = host.parse() else { return Ok(None) };
        of_address(address)?
    } else {
        let address = hostinfo().and_then(|text| text.lines().find_map(|line| line.trim().parse().ok()));
        let Some(address) = address else { return Ok(None) };
        of_address(address)?
    };
    let millis = |names: [&str; 2], default| {
        let value = names.into_iter().find_map(text).and_then(|value| value.parse().ok());
        value.filter(|millis| *millis > 0).map_or(default, Duration::from_millis)
    };
    let headers = text("OTEL_EXPORTER_OTLP_METRICS_HEADERS").or_else(|| text("OTEL_EXPORTER_OTLP_HEADERS"));
    let temporality = text("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE").unwrap_or_default();
    Ok(Some(Settings {
        endpoint,
        headers: pairs(&headers.unwrap_or_default())
            .filter_map(|(name, value)| Some((name.parse().ok()?, sensitive(&value)?)))
            .collect(),
        interval: millis(["OTEL_METRIC_EXPORT_INTERVAL"; 2], INTERVAL).max(SHORTEST),
        timeout: millis(["OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"], TIMEOUT),
        temporality: match temporality.to_ascii_lowercase().as_str() {
            "cumulative" => Temporality::Cumulative,
            "lowmemory" => Temporality::LowMemory,
            _ => Temporality::Delta,
        },
        attributes: pairs(&text("OPENSANDBOX_EXECD_METRICS_EXTRA_ATTRS").unwrap_or_default())
            .take(MOST_ATTRIBUTES)
            .collect(),
    }))
}

fn sensitive(value: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(value).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn of_address(address: IpAddr) -> Result<Uri, String> {
    let host = match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    };
    endpoint("HOST_IP", &format!("http://{host}:{PORT}"), PATH)
}

/// The address `url` of the variable `name`, with `path` behind it.
fn endpoint(name: &str, url: &str, path: &str) -> Result<Uri, String> {
    let wrong = |what: &str| format!("{name}: {what}; metrics are off");
    let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: Uri = url.parse().map_err(|_| wrong("is no address such as http://collector:4318"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            return Err(wrong(
                "https is not supported; name a collector in the sandbox's network by http://",
            ));
        }
        _ => return Err(wrong("must begin with http://")),
    }
    let authority = uri.authority().map_or("", Authority::as_str);
    // What stands before the `@` is a password: not for the host header.
    let host = authority.rsplit('@').next().unwrap_or_default();
    let base = uri.path_and_query().map_or("/", PathAndQuery::as_str).trim_end_matches('/');
    let path = format!("{base}{path}");
    Uri::builder()
        .scheme(Scheme::HTTP)
        .authority(host)
        .path_and_query(if path.is_empty() { "/" } else { &path })
        .build()
        .map_err(|_| wrong("is no address such as http://collector:4318"))
}

/// `a=b,c=d`, percent-encoded as the standard has it; the last of a name counts.
fn pairs(list: &str) -> impl Iterator<Item = (String, String)> {
    let mut pairs = std::collections::BTreeMap::new();
    for pair in list.split(',') {
        if let Some((name, value)) = pair.split_once('=')
            && !name.trim().is_empty()
        {
            // A form's decoder takes a plus sign for a blank.
            let value = value.trim().replace('+', "%2B");
            let value = form_urlencoded::parse(format!("v={}", value.replace('&', "%26")).as_bytes())
                .next()
                .map(|(_, value)| value.into_owned());
            pairs.insert(name.trim().to_owned(), value.unwrap_or_default());
        }
    }
    pairs.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &'static [(&str, &str)]) -> Result<Option<Settings>, String> {
        let var = |name: &str| list.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        read(var, || Some("# host\n10.0.0.7\n10.0.0.8\n".to_owned()))
    }

    fn endpoint_of(list: &'static [(&str, &str)]) -> String {
        of(list).unwrap().map(|settings| settings.endpoint.to_string()).unwrap_or_default()
    }

    const METRICS: &str = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT";
    const ALL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

    #[test]
    fn the_collector_is_chosen_in_order() {
        for (list, endpoint) in [
            (
                &[(METRICS, "http://m:1/own"), (ALL, "http://a:2"), ("HOST_IP", "1.2.3.4")][..],
                "http://m:1/own",
            ),
            (&[(METRICS, "http://m:1")], "http://m:1/"),
            (&[(METRICS, " "), (ALL, "http://a:2"), ("HOST_IP", "1.2.3.4")], "http://a:2/v1/metrics"),
            (&[(ALL, "http://a:2/base/")], "http://a:2/base/v1/metrics"),
            (&[(ALL, "collector:4318")], "http://collector:4318/v1/metrics"),
            (&[(ALL, "http://u:p@a")], "http://a/v1/metrics"),
            (&[("HOST_IP", "1.2.3.4")], "http://1.2.3.4:4318/v1/metrics"),
            (&[("HOST_IP", "fd00::1")], "http://[fd00::1]:4318/v1/metrics"),
            (&[("HOST_IP", "not an address")], ""),
            (&[], "http://10.0.0.7:4318/v1/metrics"),
            (&[("OTEL_SDK_DISABLED", "True"), (ALL, "http://a:2")], ""),
            (&[("OTEL_METRICS_EXPORTER", "none"), (ALL, "http://a:2")], ""),
        ] {
            assert_eq!(endpoint_of(list), endpoint, "{list:?}");
        }
        assert_eq!(read(|_| None, || None), Ok(None));
        assert_eq!(read(|_| None, || Some("garbage".to_owned())), Ok(None));
    }

    #[test]
    fn what_cannot_be_used_is_told_without_secrets() {
        for (url, word) in [
            ("https://user:s3cr3t@c", "https is not supported"),
            ("ftp://c", "http://"),
            ("http://", "no address"),
            ("http://a b", "no address"),
        ] {
            let list: &'static _ = Box::leak(Box::new([(ALL, url)]));
            let error = of(list).unwrap_err();
            assert!(error.contains(word) && error.contains(ALL) && !error.contains("s3cr3t"), "{error}");
        }
    }

    #[test]
    fn the_rest_has_defaults() {
        let settings = of(&[]).unwrap().unwrap();
        assert_eq!((settings.interval, settings.timeout), (INTERVAL, TIMEOUT));
        assert_eq!((settings.temporality, settings.attributes.len()), (Temporality::Delta, 0));
        let settings = of(&[
            ("OTEL_METRIC_EXPORT_INTERVAL", "1"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "250"),
            ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "LowMemory"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b+c&d, bad name=x, =y"),
            ("OPENSANDBOX_EXECD_METRICS_EXTRA_ATTRS", "k=v,k2=v=2,,x, =y"),
        ]);
        let settings = settings.unwrap().unwrap();
        assert_eq!((settings.interval, settings.timeout), (SHORTEST, Duration::from_millis(250)));
        assert_eq!(settings.temporality, Temporality::LowMemory);
        assert_eq!(settings.headers, [("api-key".parse().unwrap(), HeaderValue::from_static("a b+c&d"))]);
        let expected = [("k", "v"), ("k2", "v=2")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(settings.attributes, expected);
        assert!(!format!("{settings:?}").contains("a b+c"));
    }
}
