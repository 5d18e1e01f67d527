//! The standard's messages.

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;

use super::gauges::{Reading, Traffic};
use super::points::{BOUNDS, Batch};
use super::{Settings, Temporality, Timed};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The export of a batch, and of what was read beside it.
pub(super) fn request(
    settings: &Settings,
    batch: &Batch,
    reading: Option<&Reading>,
    temporality: Temporality,
) -> Vec<u8> {
    let common = common(settings, batch);
    let mut metrics = durations(batch, &common, temporality);
    if let Some(reading) = reading {
        metrics.extend(observed(reading, batch, &common, temporality));
    }
    let resource = Resource {
        attributes: vec![attribute("service.name", &format!("opensandbox-execd-{VERSION}"))],
        ..Resource::default()
    };
    let scope = InstrumentationScope {
        name: "opensandbox/execd".to_owned(),
        version: VERSION.to_owned(),
        ..InstrumentationScope::default()
    };
    let scope_metrics = vec![ScopeMetrics { scope: Some(scope), metrics, schema_url: String::new() }];
    let resource_metrics =
        vec![ResourceMetrics { resource: Some(resource), scope_metrics, schema_url: String::new() }];
    ExportMetricsServiceRequest { resource_metrics }.encode_to_vec()
}

/// Attributes of every point.
fn common(settings: &Settings, batch: &Batch) -> Vec<KeyValue> {
    let binding = &batch.binding;
    let mut all: std::collections::BTreeMap<&str, AnyValue> = std::collections::BTreeMap::new();
    let extra = settings.attributes.iter().map(|(name, value)| (name, value));
    for (name, value) in extra.chain(&binding.attributes) {
        all.insert(name, text(value));
    }
    if let Some(id) = &binding.sandbox_id {
        all.insert("sandbox_id", text(id));
    }
    if let Some(generation) = binding.generation {
        let value = Value::IntValue(i64::try_from(generation).unwrap_or(i64::MAX));
        all.insert("generation", AnyValue { value: Some(value) });
    }
    all.into_iter()
        .map(|(key, value)| KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() })
        .collect()
}

/// A point's attributes; its own count when the common ones have the same name.
fn together(common: &[KeyValue], own: Vec<KeyValue>) -> Vec<KeyValue> {
    let is_own = |key: &str| own.iter().any(|attribute| attribute.key == key);
    let mut all: Vec<_> = common.iter().filter(|attribute| !is_own(&attribute.key)).cloned().collect();
    all.extend(own);
    all
}

fn text(value: &str) -> AnyValue {
    AnyValue { value: Some(Value::StringValue(value.to_owned())) }
}

fn attribute(key: &str, value: &str) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(text(value)), ..KeyValue::default() }
}

fn kind(is_delta: bool) -> i32 {
    match is_delta {
        true => AggregationTemporality::Delta.into(),
        false => AggregationTemporality::Cumulative.into(),
    }
}

fn metric(name: &str, unit: &str, data: Data) -> Metric {
    Metric { name: name.to_owned(), unit: unit.to_owned(), data: Some(data), ..Metric::default() }
}

fn durations(batch: &Batch, common: &[KeyValue], temporality: Temporality) -> Vec<Metric> {
    let mut metrics: Vec<(Timed, Histogram)> = Vec::new();
    // Sorted by what was timed.
    for (what, attributes, histogram) in batch.points.histograms() {
        if metrics.last().is_none_or(|(last, _)| *last != what) {
            let aggregation_temporality = kind(temporality.histograms_are_delta());
            metrics.push((what, Histogram { data_points: Vec::new(), aggregation_temporality }));
        }
        let own = attributes.iter().map(|(key, value)| match (*key, value.parse()) {
            ("http_status_code", Ok(status)) => KeyValue {
                key: (*key).to_owned(),
                value: Some(AnyValue { value: Some(Value::IntValue(status)) }),
                ..KeyValue::default()
            },
            _ => attribute(key, value),
        });
        let point = HistogramDataPoint {
            attributes: together(common, own.collect()),
            start_time_unix_nano: batch.since,
            time_unix_nano: batch.until,
            count: histogram.count,
            sum: Some(histogram.sum),
            min: Some(histogram.min),
            max: Some(histogram.max),
            bucket_counts: histogram.buckets.to_vec(),
            explicit_bounds: BOUNDS.to_vec(),
            ..HistogramDataPoint::default()
        };
        if let Some((_, histogram)) = metrics.last_mut() {
            histogram.data_points.push(point);
        }
    }
    let name = |what| match what {
        Timed::Request => "execd.http.request.duration",
        Timed::Execution => "execd.execution.duration",
        Timed::Files => "execd.filesystem.operations.duration",
        Timed::Isolation => "execd.isolation.run.duration",
    };
    metrics
        .into_iter()
        .map(|(what, histogram)| metric(name(what), "ms", Data::Histogram(histogram)))
        .collect()
}

fn observed(reading: &Reading, batch: &Batch, common: &[KeyValue], temporality: Temporality) -> Vec<Metric> {
    let point = |value, more: Option<KeyValue>| NumberDataPoint {
        attributes: together(common, more.into_iter().collect()),
        start_time_unix_nano: batch.since,
        time_unix_nano: batch.until,
        value: Some(value),
        ..NumberDataPoint::default()
    };
    let whole = |value: u64| number_data_point::Value::AsInt(i64::try_from(value).unwrap_or(i64::MAX));
    let gauge = |name, unit, data_points| metric(name, unit, Data::Gauge(Gauge { data_points }));
    let mut metrics = vec![
        gauge(
            "execd.system.cpu.usage",
            "%",
            vec![point(number_data_point::Value::AsDouble(reading.cpu_percent), None)],
        ),
        gauge("execd.system.memory.usage_bytes", "By", vec![point(whole(reading.memory_bytes), None)]),
    ];
    if let Some(processes) = reading.processes {
        metrics.push(gauge("execd.system.process.count", "{process}", vec![point(whole(processes), None)]));
    }
    let connections: Vec<_> = [("tcp", reading.tcp), ("udp", reading.udp)]
        .into_iter()
        .filter_map(|(protocol, count)| Some(point(whole(count?), Some(attribute("protocol", protocol)))))
        .collect();
    if !connections.is_empty() {
        metrics.push(gauge("execd.network.connections.active", "{connection}", connections));
    }
    if let Some(network) = reading.network {
        let is_delta = temporality.observed_are_delta();
        let known = if is_delta { reading.known } else { Traffic::default() };
        let data_points = [
            ("receive", network.received.saturating_sub(known.received)),
            ("transmit", network.sent.saturating_sub(known.sent)),
        ]
        .map(|(direction, bytes)| point(whole(bytes), Some(attribute("direction", direction))))
        .into();
        let sum = Sum { data_points, aggregation_temporality: kind(is_delta), is_monotonic: true };
        metrics.push(metric("execd.network.io.bytes", "By", Data::Sum(sum)));
    }
    if let Some(isolation) = reading.isolation {
        metrics.push(gauge(
            "execd.isolation.session.count",
            "{session}",
            vec![point(whole(isolation.sessions), None)],
        ));
        metrics.push(gauge(
            "execd.isolation.upper.usage_bytes",
            "By",
            vec![point(whole(isolation.upper_bytes), None)],
        ));
    }
    metrics
}
