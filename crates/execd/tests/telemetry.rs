//! Metrics to a collector that decodes what it gets.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{Daemon, eventually};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{Metric, number_data_point};
use prost::Message as _;
use serde_json::json;

/// A request that a collector got.
struct Export {
    head: String,
    message: ExportMetricsServiceRequest,
}

/// Listens, and has `answer` write what each connection gets.
fn collector(mut answer: impl FnMut(usize, &mut TcpStream) + Send + 'static) -> (String, Receiver<Export>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let Some(export) = receive(&stream) else { continue };
            if sender.send(export).is_err() {
                return;
            }
            answer(number, &mut stream);
        }
    });
    (address, receiver)
}

fn receive(stream: &TcpStream) -> Option<Export> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let length = head
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length?];
    reader.read_exact(&mut body).ok()?;
    Some(Export { head, message: ExportMetricsServiceRequest::decode(&body[..]).unwrap() })
}

fn ok(_: usize, stream: &mut TcpStream) {
    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
}

fn daemon(endpoint: &str, more: &[(&str, &str)]) -> Daemon {
    let mut env = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        ("OTEL_METRIC_EXPORT_INTERVAL", "150"),
        ("OPENSANDBOX_ID", "sbx-1"),
    ];
    env.extend(more);
    Daemon::with(&[], &env)
}

impl Export {
    fn metrics(&self) -> impl Iterator<Item = &Metric> {
        self.message.resource_metrics.iter().flat_map(|all| &all.scope_metrics).flat_map(|all| &all.metrics)
    }

    /// Attributes and counts of a histogram's points.
    fn histogram(&self, name: &str) -> Vec<(BTreeMap<String, String>, u64)> {
        let mut all = Vec::new();
        for metric in self.metrics().filter(|metric| metric.name == name) {
            let Some(Data::Histogram(histogram)) = &metric.data else { panic!("{metric:?}") };
            assert_eq!(metric.unit, "ms");
            for point in &histogram.data_points {
                assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count);
                assert!(point.start_time_unix_nano > 0 && point.start_time_unix_nano <= point.time_unix_nano);
                all.push((texts(&point.attributes), point.count));
            }
        }
        all
    }
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let names: std::collections::BTreeSet<_> = attributes.iter().map(|attribute| &attribute.key).collect();
    assert_eq!(names.len(), attributes.len(), "no name twice");
    let text = |attribute: &KeyValue| match attribute.value.clone().unwrap().value.unwrap() {
        Value::StringValue(text) => text,
        Value::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    };
    attributes.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}

/// Takes exports until `enough` of the sums of a histogram's counts, by their attributes.
fn sums(
    exports: &Receiver<Export>,
    name: &str,
    enough: impl Fn(&BTreeMap<BTreeMap<String, String>, u64>) -> bool,
) -> BTreeMap<BTreeMap<String, String>, u64> {
    let mut sums = BTreeMap::new();
    let end = Instant::now() + Duration::from_secs(20);
    while !enough(&sums) {
        let left = end.saturating_duration_since(Instant::now());
        let export = exports.recv_timeout(left).unwrap_or_else(|_| panic!("not enough of {name}: {sums:?}"));
        for (attributes, count) in export.histogram(name) {
            *sums.entry(attributes).or_default() += count;
        }
    }
    sums
}

#[test]
fn all_that_is_measured_arrives_with_its_attributes() {
    let (endpoint, exports) = collector(ok);
    let more = [
        ("OPENSANDBOX_EXECD_METRICS_EXTRA_ATTRS", "team=blue,operation=forged"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=s3cr3t"),
    ];
    let daemon = daemon(&endpoint, &more);
    let first = exports.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(first.head.starts_with("POST /v1/metrics HTTP/1.1\r\n"), "{}", first.head);
    for line in ["content-type: application/x-protobuf", "x-key: s3cr3t", "host: 127.0.0.1:"] {
        assert!(first.head.contains(line), "{}", first.head);
    }
    let resource = first.message.resource_metrics[0].resource.as_ref().unwrap();
    assert!(texts(&resource.attributes)["service.name"].starts_with("opensandbox-execd-"));
    let scope = first.message.resource_metrics[0].scope_metrics[0].scope.as_ref().unwrap();
    assert_eq!(scope.name, "opensandbox/execd");
    let mut gauges = BTreeMap::new();
    for metric in first.metrics() {
        let points = match metric.data.as_ref().unwrap() {
            Data::Gauge(gauge) => &gauge.data_points,
            Data::Sum(sum) => {
                assert!(sum.is_monotonic);
                assert_eq!(sum.aggregation_temporality, 1);
                &sum.data_points
            }
            Data::Histogram(_) => continue,
            other => panic!("{other:?}"),
        };
        for point in points {
            let attributes = texts(&point.attributes);
            assert_eq!((&*attributes["sandbox_id"], &*attributes["team"]), ("sbx-1", "blue"));
            let value = match point.value.unwrap() {
                number_data_point::Value::AsInt(value) => value as f64,
                number_data_point::Value::AsDouble(value) => value,
            };
            let own = attributes.get("protocol").or_else(|| attributes.get("direction"));
            gauges.insert(format!("{} {}", metric.name, own.map_or("", String::as_str)), value);
        }
    }
    for name in [
        "execd.system.cpu.usage ",
        "execd.system.memory.usage_bytes ",
        "execd.system.process.count ",
        "execd.network.connections.active tcp",
        "execd.network.connections.active udp",
        "execd.network.io.bytes receive",
        "execd.network.io.bytes transmit",
    ] {
        assert!(gauges.contains_key(name), "{name} in {gauges:?}");
    }
    assert!(gauges["execd.system.memory.usage_bytes "] > 1e6 && gauges["execd.system.process.count "] > 1.0);

    daemon.run("true");
    daemon.run("exit 3");
    daemon.call("GET", "/files/info?path=/no/such", None);
    daemon.call("GET", "/directories/list?path=/", None);
    daemon.call("GET", "/no/such/route", None);
    let session = daemon.call("POST", "/session", None).json()["session_id"].as_str().unwrap().to_owned();
    let run = format!("/session/{session}/run");
    let mut run = common::open_at(daemon.connect(), &run, json!({ "command": "true" }));
    while run.next_event().is_some() {}
    let executions = sums(&exports, "execd.execution.duration", |sums| sums.values().sum::<u64>() >= 3);
    let of = |operation: &str, result: &str| {
        let is = |found: &BTreeMap<String, String>| {
            found["operation"] == operation && found["result"] == result && found["sandbox_id"] == "sbx-1"
        };
        executions.iter().filter(|(found, _)| is(found)).map(|(_, count)| count).sum::<u64>()
    };
    assert_eq!(of("run_command", "success"), 1);
    assert_eq!(of("run_command", "failure"), 1);
    assert_eq!(of("run_in_session", "success"), 1);

    daemon.call("GET", "/files/info?path=/no/such", None);
    daemon.call("GET", "/directories/list?path=/", None);
    let files = sums(&exports, "execd.filesystem.operations.duration", |sums| sums.len() >= 2);
    let words = |found: &BTreeMap<String, String>| (found["operation"].clone(), found["result"].clone());
    let words: Vec<_> = files.keys().map(words).collect();
    assert_eq!(words, [("info".into(), "failure".into()), ("listdir".into(), "success".into())]);

    let id = daemon.run("true").id().to_owned();
    daemon.status(&id);
    daemon.call("BREW", "/no/such/route", None);
    let has = |sums: &BTreeMap<BTreeMap<String, String>, u64>, method: &str, route: &str, status: &str| {
        let wanted = [("http_method", method), ("http_route", route), ("http_status_code", status)];
        sums.keys().any(|found| wanted.iter().all(|(name, value)| found[*name] == *value))
    };
    sums(&exports, "execd.http.request.duration", |sums| {
        has(sums, "POST", "/command", "200")
            && has(sums, "GET", "/command/status/:id", "200")
            && has(sums, "_OTHER", "unknown", "404")
    });
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(!log.contains("s3cr3t"), "{log}");
}

#[test]
fn sums_or_differences_as_asked() {
    for (preference, counts) in [("cumulative", [1, 2]), ("delta", [1, 1])] {
        let (endpoint, exports) = collector(ok);
        let daemon = daemon(&endpoint, &[("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", preference)]);
        for count in counts {
            daemon.run("true");
            let found = loop {
                let export = exports.recv_timeout(Duration::from_secs(20)).unwrap();
                if let Some((_, found)) = export.histogram("execd.execution.duration").first()
                    && (*found == count || preference == "delta")
                {
                    break *found;
                }
            };
            assert_eq!(found, count, "{preference}");
        }
    }
}

#[test]
fn what_a_collector_did_not_take_comes_again() {
    let failing = Arc::new(AtomicBool::new(true));
    let (endpoint, exports) = collector({
        let failing = Arc::clone(&failing);
        move |number, stream| {
            let answers: [&[u8]; 4] = [
                b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno",
                b"HTTP/1.1 429 Slow\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n",
                b"garbage\r\n\r\n",
                b"",
            ];
            match failing.load(Ordering::SeqCst) {
                true => drop(stream.write_all(answers[number % 4])),
                false => ok(number, stream),
            }
        }
    });
    let daemon = daemon(&endpoint, &[]);
    daemon.run("true");
    let count = || {
        let export = exports.recv_timeout(Duration::from_secs(20)).unwrap();
        export.histogram("execd.execution.duration").iter().map(|(_, count)| count).sum::<u64>()
    };
    // At most one is on its way from before the end of the run; then each way of failing is met.
    let failed: Vec<u64> = (0..40).map(|_| count()).skip_while(|count| *count == 0).take(5).collect();
    assert_eq!(failed, [1; 5]);
    failing.store(false, Ordering::SeqCst);
    let log = || std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    eventually("the end of trouble is told", || log().contains("exported again"));
    let rest: Vec<u64> = (0..100).map(|_| count()).take_while(|count| *count > 0).collect();
    assert!(rest.iter().all(|count| *count == 1), "{rest:?}");
    assert_eq!(log().matches("could not be exported").count(), 1, "trouble is told once: {}", log());
}

#[test]
fn a_collector_that_hangs_refuses_or_floods_hurts_nobody() {
    // One that takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_at = format!("http://{}", silent.local_addr().unwrap());
    // One that answers with a body without end.
    let (flood, exports) = collector(|_, stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
        let chunk = [b"10000\r\n".as_slice(), &[b'x'; 0x10000], b"\r\n"].concat();
        while stream.write_all(&chunk).is_ok() {}
    });
    // One with a head without end.
    let (head, _exports) = collector(|_, stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n");
        while stream.write_all(b"x-more: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n").is_ok() {}
    });
    for endpoint in [&*silent_at, "http://127.0.0.1:1", "http://no.such.host.invalid:4318", &flood, &head] {
        let daemon = daemon(endpoint, &[("OTEL_EXPORTER_OTLP_TIMEOUT", "300")]);
        let before = daemon.descriptors();
        for _ in 0..20 {
            daemon.run("true").check();
            std::thread::sleep(Duration::from_millis(50));
        }
        // An export and the last command may be under way at any one moment.
        eventually("no descriptors are left open", || daemon.descriptors() <= before + 6);
        assert!(daemon.resident_kib() < 48 << 10, "{endpoint}");
        let pid = rustix::process::Pid::from_raw(i32::try_from(daemon.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let mut daemon = daemon;
        eventually("it stops in spite of its collector", || daemon.child.try_wait().unwrap().is_some());
    }
    assert!(exports.try_iter().count() > 1, "a flood does not stop the next export");
}

#[test]
fn the_last_numbers_are_sent_before_the_end() {
    let (endpoint, exports) = collector(ok);
    let mut daemon = daemon(&endpoint, &[("OTEL_METRIC_EXPORT_INTERVAL", "3600000")]);
    daemon.run("true");
    let pid = rustix::process::Pid::from_raw(i32::try_from(daemon.child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let export = exports.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!(export.histogram("execd.execution.duration").len(), 1);
    assert!(daemon.child.wait().unwrap().success());
}

#[test]
fn what_cannot_be_is_told_and_everything_else_works() {
    let daemon = daemon("https://u:s3cr3t@collector:4318", &[]);
    daemon.run("true").check();
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(log.contains("https is not supported") && !log.contains("s3cr3t"), "{log}");
}

#[test]
fn isolated_sessions_and_their_runs_are_counted() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    std::fs::create_dir_all("/mnt").unwrap();
    let work = tempfile::tempdir_in("/mnt").unwrap();
    let (endpoint, exports) = collector(ok);
    let daemon = daemon(&endpoint, &[]);
    let body = json!({ "workspace": { "path": work.path(), "mode": "overlay" } });
    let made = daemon.call("POST", "/v1/isolated/session", Some(body));
    assert_eq!(made.head.status, 201);
    let session = format!("/v1/isolated/session/{}", made.json()["session_id"].as_str().unwrap());
    let run = format!("{session}/run");
    for code in ["head -c 3000000 /dev/zero >f; sync f", "(exit 3)"] {
        let mut run = common::open_at(daemon.connect(), &run, json!({ "code": code }));
        while run.next_event().is_some() {}
    }
    let begun = daemon.call("POST", &run, Some(json!({ "code": "true", "background": true })));
    assert_eq!(begun.head.status, 202);
    let runs = sums(&exports, "execd.isolation.run.duration", |sums| sums.values().sum::<u64>() >= 3);
    let of = |result: &str| {
        let is =
            |found: &BTreeMap<String, String>| found["result"] == result && found["sandbox_id"] == "sbx-1";
        runs.iter().filter(|(found, _)| is(found)).map(|(_, count)| count).sum::<u64>()
    };
    assert_eq!((of("success"), of("failure")), (2, 1));
    // Where there is no place on disk, upper layers take none.
    let can = daemon.call("GET", "/v1/isolated/capabilities", None).json();
    let on_disk = !can["message"].as_str().is_some_and(|message| message.contains("in memory"));
    let gauge = |export: &Export, name: &str| {
        let metric = export.metrics().find(|metric| metric.name == name).unwrap();
        let Some(Data::Gauge(gauge)) = &metric.data else { panic!("{metric:?}") };
        match gauge.data_points[0].value.unwrap() {
            number_data_point::Value::AsInt(value) => value,
            number_data_point::Value::AsDouble(value) => panic!("{value}"),
        }
    };
    let wait = |what: &str, holds: &dyn Fn(i64, i64) -> bool| loop {
        let export = exports.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|_| panic!("{what}"));
        let sessions = gauge(&export, "execd.isolation.session.count");
        if holds(sessions, gauge(&export, "execd.isolation.upper.usage_bytes")) {
            return;
        }
    };
    wait("what is there", &|sessions, bytes| sessions == 1 && (bytes >= 3_000_000) == on_disk);
    assert_eq!(daemon.call("DELETE", &session, None).head.status, 200);
    wait("nothing any more", &|sessions, bytes| (sessions, bytes) == (0, 0));
}
