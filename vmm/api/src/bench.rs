//! The results of `ssi-hv bench transport --json`.

use serde::{Deserialize, Serialize};

use crate::report::{Distribution, Host, Percentiles};

/// The results of every transport to one donor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransportBench {
    /// [`SCHEMA`](crate::report::SCHEMA).
    pub schema: u32,
    /// The host that measured.
    pub host: Host,
    /// Address of the donor; `null` when it is in this process.
    pub donor: Option<String>,
    /// Size of the lease.
    pub lease_bytes: u64,
    /// The measured transports.
    pub transports: Vec<Transport>,
    /// The others.
    pub skipped: Vec<Skipped>,
    /// `null` without an RDMA device of this host that reaches the donor.
    pub registration: Option<RegistrationCost>,
    /// Bytes that were compared.
    pub verified_bytes: u64,
    /// How many of them were wrong.
    pub corrupt_bytes: u64,
}

/// The results of one transport.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transport {
    /// `tcp`, `udp`, `rdma` or `loopback`.
    pub kind: String,
    /// `null` without connections.
    pub connections: Option<Connections>,
    /// Pages written with 64 outstanding.
    pub write_bytes_per_second: Option<f64>,
    /// Pages written one at a time. By RDMA a page counts as written when a READ behind its WRITE
    /// has completed.
    #[serde(default)]
    pub writes: Option<Trips>,
    /// By size of the requests.
    pub sizes: Vec<OfSize>,
    /// Histogram of a page's round trips.
    pub page_histogram: Vec<Bar>,
    /// The same with all its steps.
    #[serde(default)]
    pub page_distribution: Distribution,
}

/// Connections that were established one after the other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Connections {
    /// How many.
    pub count: usize,
    /// The first one: for RDMA it includes the donor's registration of the lease.
    pub first_ms: f64,
    /// The median of the others.
    pub others_ms: f64,
}

/// Requests that were made one at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trips {
    /// How many.
    pub round_trips: u64,
    /// How long they took, in microseconds.
    pub latency_us: Percentiles,
    /// 95 % took this or less.
    #[serde(default)]
    pub p95_us: f64,
    /// Their mean.
    #[serde(default)]
    pub mean_us: f64,
    /// p99 / p50.
    pub jitter: f64,
}

/// Requests of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OfSize {
    /// The size.
    pub bytes: u32,
    /// One at a time.
    #[serde(flatten)]
    pub trips: Trips,
    /// Outstanding requests in the stream.
    pub in_flight: usize,
    /// Requests per second of the stream.
    pub messages_per_second: f64,
    /// Bytes per second of the stream.
    pub stream_bytes_per_second: f64,
    /// CPU time of this process for 4096 bytes of the stream, in microseconds: of both ends when the
    /// donor is in this process. The measuring thread polls.
    #[serde(default)]
    pub cpu_us_per_page: f64,
}

/// A row of a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bar {
    /// Its end.
    pub up_to_us: f64,
    /// Round trips in it.
    pub count: u64,
}

/// A transport that was not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// As for those that were.
    pub kind: String,
    /// Why not.
    pub reason: String,
}

/// What registering memory with the adapter costs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RegistrationCost {
    /// Of some sizes.
    pub memory: Vec<RegistrationTime>,
    /// Of buffers of connections.
    pub staging: Vec<StagingTime>,
}

/// Times of a registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RegistrationTime {
    /// Size of the memory.
    pub bytes: usize,
    /// Registration of memory that was never accessed.
    pub first_us: f64,
    /// Registration of the same memory when it is allocated.
    pub again_us: f64,
    /// Deregistration.
    pub end_us: f64,
}

/// Time to make a registered buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StagingTime {
    /// Its size.
    pub bytes: usize,
    /// Memory and registration.
    pub made_us: f64,
}
