//! A list of metric families.

use prometheus::TextEncoder;
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};

use ssi_hv_api::report::Distribution;
use ssi_hv_api::status::rdma::{InUse, RdmaResources};

/// Upper bounds of the buckets of all histograms, in seconds: three per decade, from the time of a
/// local page to that of a lost donor.
pub(super) const BUCKETS_SECONDS: [f64; 22] = [
    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Relative precision of the pager's histograms; see `memory_fabric::stats`.
const RESOLUTION: f64 = 1.0 / 32.0;

/// Names and values of a sample's labels.
pub(super) type Labels = Vec<(&'static str, String)>;

/// All metrics of an answer, in the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct Families(Vec<MetricFamily>);

impl Families {
    /// Creates the metrics that every process has.
    pub(super) fn of_process(uptime_s: f64) -> Self {
        let mut all = Self::default();
        all.gauges(
            "ssi_hv_build_info",
            "The build: always 1, with its version as a label.",
            [(vec![("version", env!("CARGO_PKG_VERSION").to_owned())], 1.0)],
        );
        all.gauge(
            "ssi_hv_uptime_seconds",
            "Time since the process started.",
            uptime_s,
        );
        all
    }

    /// Adds the expiry of the certificate, in seconds since 1970.
    pub(super) fn add_certificate(&mut self, not_after: Option<i64>) {
        // A time before 1970 has passed as well.
        let not_after = not_after.map(|time| float(u64::try_from(time).unwrap_or(0)));
        self.gauges(
            "ssi_hv_certificate_expiry_timestamp_seconds",
            "When the certificate expires, in seconds since 1970; absent without credentials.",
            not_after.map(|time| (Vec::new(), time)),
        );
    }

    /// Adds the RDMA resources in use.
    pub(super) fn add_rdma(&mut self, rdma: &RdmaResources) {
        self.gauge(
            "ssi_hv_rdma_pinned_bytes",
            "Memory that is pinned for RDMA adapters.",
            float(rdma.pinned_bytes.in_use),
        );
        let limit = rdma.pinned_bytes.limit;
        self.gauges(
            "ssi_hv_rdma_pinned_limit_bytes",
            "Limit of locked memory of the process; absent without one.",
            limit.map(|limit| (Vec::new(), float(limit))),
        );
        let resources: Vec<(Labels, InUse)> = rdma
            .resources
            .iter()
            .flat_map(|device| {
                let of = [
                    ("queue_pairs", device.queue_pairs),
                    ("completion_queues", device.completion_queues),
                    ("memory_regions", device.memory_regions),
                    ("protection_domains", device.protection_domains),
                ];
                of.map(|(resource, in_use)| {
                    let labels = vec![
                        ("device", device.device.clone()),
                        ("resource", resource.to_owned()),
                    ];
                    (labels, in_use)
                })
            })
            .collect();
        let in_use = resources.iter().cloned();
        self.gauges(
            "ssi_hv_rdma_resources",
            "Objects of an RDMA device that this process uses.",
            in_use.map(|(labels, in_use)| (labels, float(in_use.in_use))),
        );
        let limits = resources.into_iter();
        self.gauges(
            "ssi_hv_rdma_resources_limit",
            "Limit of the RDMA device, for the whole host; absent if the device reports none.",
            limits.filter_map(|(labels, in_use)| Some((labels, float(in_use.limit?)))),
        );
    }

    /// Adds a value that goes up and down.
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.gauges(name, help, [(Vec::new(), value)]);
    }

    /// Like [`gauge`](Self::gauge), with labels; adds nothing without samples.
    pub(super) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        let metrics = samples.into_iter().map(|(labels, value)| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            let mut metric = Metric::from_label(pairs(labels));
            metric.set_gauge(gauge);
            metric
        });
        self.push(name, help, MetricType::GAUGE, metrics.collect());
    }

    /// Adds a count that only grows until the process or the guest restarts.
    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, [(Vec::new(), value)]);
    }

    /// Like [`counter`](Self::counter), with labels; adds nothing without samples.
    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        let metrics = samples.into_iter().map(|(labels, value)| {
            let mut counter = Counter::default();
            counter.set_value(float(value));
            let mut metric = Metric::from_label(pairs(labels));
            metric.set_counter(counter);
            metric
        });
        self.push(name, help, MetricType::COUNTER, metrics.collect());
    }

    /// Adds histograms in seconds, built from the pager's finer ones.
    pub(super) fn histograms<'a>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, &'a Distribution)>,
    ) {
        let metrics = samples.into_iter().map(|(labels, times)| {
            let mut metric = Metric::from_label(pairs(labels));
            metric.set_histogram(histogram(times));
            metric
        });
        self.push(name, help, MetricType::HISTOGRAM, metrics.collect());
    }

    fn push(&mut self, name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) {
        if metrics.is_empty() {
            return;
        }
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.set_metric(metrics);
        self.0.push(family);
    }

    /// Formats all metrics as text.
    pub(super) fn text(&self) -> String {
        let text = TextEncoder::new().encode_to_string(&self.0);
        // It fails only for families without samples or names, which are never added.
        text.unwrap_or_default()
    }
}

fn pairs(labels: Labels) -> Vec<LabelPair> {
    let pairs = labels.into_iter().map(|(name, value)| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value);
        pair
    });
    pairs.collect()
}

/// Converts a distribution in microseconds to the coarser buckets. A value of a finer bucket that
/// spans a bound counts in the next bucket. The sum uses the midpoints of the finer buckets, which
/// are all that is stored.
fn histogram(times: &Distribution) -> Histogram {
    let seconds = |us: f64| us / 1e6;
    let mut counts = [0_u64; BUCKETS_SECONDS.len()];
    let (mut count, mut sum) = (0, 0.0);
    for &(up_to_us, in_bucket) in times {
        let up_to = seconds(up_to_us);
        count += in_bucket;
        sum += float(in_bucket) * up_to * (1.0 - RESOLUTION / 2.0);
        if let Some(bucket) = BUCKETS_SECONDS.iter().position(|end| up_to <= *end) {
            counts[bucket] += in_bucket;
        }
    }
    let mut so_far = 0;
    let buckets = BUCKETS_SECONDS.iter().zip(counts).map(|(end, in_bucket)| {
        so_far += in_bucket;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(*end);
        bucket.set_cumulative_count(so_far);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(count);
    histogram.set_sample_sum(sum);
    histogram
}

/// Prometheus values are doubles; counts beyond 2^53 lose their last digits.
pub(super) fn float(value: u64) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "as said above")]
    let value = value as f64;
    value
}

/// Converts a boolean.
pub(super) fn flag(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}
