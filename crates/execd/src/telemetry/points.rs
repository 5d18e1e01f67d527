//! Durations by their attributes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Timed;
use crate::binding::Binding;

/// Upper bounds of the buckets, in milliseconds: those of the standard.
pub(super) const BOUNDS: [f64; 15] =
    [0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0, 10_000.0];
/// Combinations of attributes that are kept apart; the others are counted together.
const MOST_SERIES: usize = 1000;
/// Attribute of those.
const OVERFLOW: &str = "otel.metric.overflow";

type Key = (Timed, Vec<(&'static str, String)>);

/// Points under one binding.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    pub(super) binding: Arc<Binding>,
    pub(super) since: u64,
    pub(super) until: u64,
    pub(super) points: Points,
}

impl Batch {
    pub(super) fn new(binding: Arc<Binding>, since: u64) -> Self {
        Self { binding, since, until: since, points: Points::default() }
    }
}

/// How often durations came.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Histogram {
    pub(super) count: u64,
    pub(super) sum: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) buckets: [u64; BOUNDS.len() + 1],
}

impl Histogram {
    fn merge(&mut self, other: &Self) {
        if self.count == 0 {
            *self = other.clone();
        } else if other.count > 0 {
            self.count += other.count;
            self.sum += other.sum;
            self.min = self.min.min(other.min);
            self.max = self.max.max(other.max);
            self.buckets.iter_mut().zip(other.buckets).for_each(|(all, more)| *all += more);
        }
    }

    fn of(millis: f64) -> Self {
        let mut buckets = [0; BOUNDS.len() + 1];
        // Bounds belong to the bucket below them.
        buckets[BOUNDS.partition_point(|bound| *bound < millis)] = 1;
        Self { count: 1, sum: millis, min: millis, max: millis, buckets }
    }
}

/// All durations of a time.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Points(BTreeMap<Key, Histogram>);

impl Points {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn record(&mut self, what: Timed, attributes: Vec<(&'static str, String)>, millis: f64) {
        self.add((what, attributes), &Histogram::of(millis));
    }

    pub(super) fn merge(&mut self, other: Self) {
        for (key, histogram) in other.0 {
            self.add(key, &histogram);
        }
    }

    fn add(&mut self, key: Key, histogram: &Histogram) {
        let key = match self.0.len() < MOST_SERIES || self.0.contains_key(&key) {
            true => key,
            false => (key.0, vec![(OVERFLOW, "true".to_owned())]),
        };
        self.0.entry(key).or_default().merge(histogram);
    }

    pub(super) fn histograms(&self) -> impl Iterator<Item = (Timed, &[(&'static str, String)], &Histogram)> {
        self.0.iter().map(|((what, attributes), histogram)| (*what, attributes.as_slice(), histogram))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn combinations_are_bounded() {
        let mut points = Points::default();
        for number in 0..3000 {
            points.record(Timed::Request, vec![("http_route", number.to_string())], 1.0);
        }
        assert_eq!(points.0.len(), MOST_SERIES + 1);
        let all: u64 = points.histograms().map(|(_, _, histogram)| histogram.count).sum();
        assert_eq!(all, 3000);
    }

    proptest! {
        #[test]
        fn merging_is_recording_all(values in proptest::collection::vec((0.0..20_000.0_f64, 0..3_usize), 1..40), cut in 0..40_usize) {
            let record = |values: &[(f64, usize)]| {
                let mut points = Points::default();
                for (millis, name) in values {
                    points.record(Timed::Files, vec![("operation", name.to_string())], millis.floor());
                }
                points
            };
            let cut = cut.min(values.len());
            let mut merged = record(&values[..cut]);
            merged.merge(record(&values[cut..]));
            prop_assert_eq!(&merged, &record(&values));
            for (_, _, histogram) in merged.histograms() {
                prop_assert_eq!(histogram.buckets.iter().sum::<u64>(), histogram.count);
                prop_assert!(histogram.min <= histogram.max && histogram.sum >= histogram.max);
            }
        }
    }
}
