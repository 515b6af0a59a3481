//! The report of a run: JSON for scripts, with a `schema` number.
//!
//! A field may be added under the same number; renaming one, removing one or changing its
//! meaning or unit takes the next.

mod details;

pub use details::{Distribution, Distributions, Exec, FaultCounts, TIMELINE_SAMPLES_MAX, Timeline};

use serde::{Deserialize, Serialize};

/// The version of the report's fields.
pub const SCHEMA: u32 = 1;

/// The `outcome` of a run that has not ended, for requests meanwhile.
pub const RUNNING: &str = "running";

/// Everything that is known about one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The host that ran the virtual CPUs.
    pub host: Host,
    /// The guest.
    pub guest: Guest,
    /// Memory of the compute node that it took, at the end.
    pub memory: MemoryUsed,
    /// How long its start took.
    pub boot: Boot,
    /// How pages travelled.
    pub transport: TransportUsed,
    /// Every node that took part.
    pub nodes: Vec<Node>,
    /// The faults that were served.
    pub faults: Faults,
    /// Pages dropped here to make room.
    pub evictions: u64,
    /// Pages that the guest did not use.
    pub free_pages: FreePages,
    /// Pages fetched before they were asked for.
    pub prefetch: Prefetch,
    /// How many faults took how long; where the guest ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distributions: Option<Distributions>,
    /// Faults over time; where the guest ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
    /// The command of `--exec`, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec: Option<Exec>,
    /// Errors in the order of their time, one line each.
    pub errors: Vec<String>,
    /// How the run ended: a name from `docs/exit-codes.md`; [`RUNNING`] while it has not.
    pub outcome: String,
    /// The exit code of the process.
    pub exit_code: u8,
}

impl Report {
    /// A report with nothing in it but its schema and the host.
    #[must_use]
    pub fn new(host: Host) -> Self {
        Self {
            schema: SCHEMA,
            host,
            ..Self::default()
        }
    }
}

/// What executes the guest's instructions.
///
/// Times from emulated hosts are not representative; only their ratios mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Virtualization {
    /// The processor, by its virtualization extension.
    Hardware,
    /// Software, here or in the host's own host.
    #[default]
    Emulated,
}

/// The host that ran the virtual CPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Host {
    /// What executes the guest's instructions.
    pub virtualization: Virtualization,
    /// The processor's name.
    pub cpu_model: String,
    /// The kernel's release.
    pub kernel: String,
}

/// The guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Guest {
    /// Its memory.
    pub memory_bytes: u64,
    /// Its virtual CPUs.
    pub cpus: u32,
    /// The CPU of the host on which each of them runs, in order; `null` where the host lets them.
    #[serde(default)]
    pub cpu_pinning: Option<Vec<u32>>,
    /// The file of its kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
}

/// Memory of the compute node that the guest takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MemoryUsed {
    /// Memory of the guest with its home here.
    pub home_here_bytes: u64,
    /// How much of the rest may be here at once.
    pub cache_bytes: u64,
    /// How much of the rest is here, or on its way.
    pub cached_bytes: u64,
    /// What the guest's memory takes of this host's.
    pub resident_bytes: u64,
    /// How much of that is mapped by huge pages; `null` when that is not known.
    pub huge_bytes: Option<u64>,
    /// What was added to the guest's memory; `null` without `--hotplug-memory`.
    #[serde(default)]
    pub hotplug: Option<HotplugUsed>,
}

/// Memory that comes and goes while the guest runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HotplugUsed {
    /// The most that there can be of it.
    pub max_bytes: u64,
    /// What the guest was asked to have.
    pub requested_bytes: u64,
    /// What it has plugged.
    pub plugged_bytes: u64,
}

/// How long the guest's start took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Boot {
    /// From the start of the process until the guest's init ran, in milliseconds; `null` when
    /// it was not seen. After a restart, from there.
    pub to_init_ms: Option<f64>,
    /// How often the guest rebooted and was booted again.
    #[serde(default)]
    pub restarts: u64,
}

/// How pages travelled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransportUsed {
    /// `rdma`, `tcp`, `udp`, `mixed` (not the same from all donors), `loopback`, or `none` when all memory
    /// stayed here.
    pub kind: String,
    /// The class of the slowest link by measured latency: `rdma`, `fast-tcp`, `slow`; `none` as
    /// above.
    pub tier: String,
    /// What pages that are fetched ahead came by: the same words as `kind`.
    #[serde(default)]
    pub bulk: String,
}

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It runs virtual CPUs.
    Compute,
    /// It lends memory.
    Donor,
}

/// A node that took part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Node {
    /// Its number; 0 is the compute node.
    pub id: u32,
    /// What it did.
    pub role: Role,
    /// Where it was reached; `null` for the compute node and for `loopback`.
    pub address: Option<String>,
    /// Guest memory that it holds: for the compute node its local budget, for a donor the
    /// pages with their home there.
    pub memory_bytes: u64,
    /// Pages that came from there.
    pub pages_fetched: u64,
    /// Pages that went back there.
    pub pages_written_back: u64,
    /// The remote faults that it served; `null` for the compute node.
    pub faults: Option<FaultKind>,
    /// What pages took on the network by TCP or UDP; `null` for the compute node and for `loopback`.
    pub traffic: Option<Traffic>,
    /// What came of RDMA; `null` where there was none from the start.
    pub rdma: Option<RdmaUsed>,
    /// How fast the way there is; `null` for the compute node and for `loopback`.
    #[serde(default)]
    pub path: Option<PathUsed>,
}

/// The way to a donor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathUsed {
    /// What pages that virtual CPUs wait for came by at the start: `rdma`, `tcp` or `udp`.
    pub faults: String,
    /// What pages that are fetched ahead came by at the start.
    pub bulk: String,
    /// Its class now: `rdma`, `fast-tcp`, `slow`.
    pub tier: String,
    /// How often that changed.
    pub tier_changes: u64,
    /// What a page takes now, in microseconds.
    pub latency_estimate_us: f64,
    /// What was measured of TCP at the start, if it was.
    pub tcp: Option<PathMeasured>,
    /// What was measured of UDP at the start, where it is in the place of TCP.
    pub udp: Option<PathMeasured>,
    /// What was measured of RDMA at the start, if it was.
    pub rdma: Option<PathMeasured>,
}

/// What was measured of a way at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathMeasured {
    /// Median round trip of 64 bytes, in microseconds.
    pub small_us: f64,
    /// Median round trip of a page, in microseconds.
    pub page_us: f64,
    /// Of runs of pages.
    pub stream_bytes_per_second: f64,
}

/// Pages between the compute node and a donor, by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Traffic {
    /// Received, because virtual CPUs waited for them.
    pub urgent: TrafficClass,
    /// Received, before they were asked for.
    pub prefetch: TrafficClass,
    /// Sent, to make room.
    pub write_back: TrafficClass,
}

impl Traffic {
    /// All classes.
    #[must_use]
    pub fn classes(&self) -> [&TrafficClass; 3] {
        [&self.urgent, &self.prefetch, &self.write_back]
    }
}

/// Pages of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TrafficClass {
    /// What they have: pages of 4096 bytes.
    pub plain_bytes: u64,
    /// What was sent for them, without headers.
    pub wire_bytes: u64,
    /// How many of them were sent as fewer bytes, be it as zeroes.
    pub pages_compressed: u64,
    /// Whether they are compressed now, or were at the end.
    pub compressing: bool,
}

/// What came of RDMA with a donor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RdmaUsed {
    /// Pages that came by READ.
    pub pages_read: u64,
    /// Pages that went home by WRITE.
    pub pages_written: u64,
    /// Connections made.
    pub connections: u64,
    /// Of these, failed: pages went on by TCP.
    pub failures: u64,
}

/// The faults that were served, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Faults {
    /// The page's bytes were on another node.
    pub remote: FaultKind,
    /// The page was never written, so it was filled with zeroes.
    pub zero: FaultKind,
    /// The page's bytes were still here.
    pub minor: FaultKind,
    /// First writes to pages that were mapped write-protected.
    pub write_protect: FaultKind,
    /// Where the time of remote faults went: the same as in `remote`.
    pub stages: Stages,
}

/// The faults of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FaultKind {
    /// How many there were.
    pub count: u64,
    /// How long each took, in microseconds.
    pub latency_us: Percentiles,
    /// Where that time went.
    pub stages: Stages,
}

/// The stages of a fault, each in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Stages {
    /// From reading the fault until its request was sent, or until it was taken up.
    pub queue: Percentiles,
    /// From the request until its answer; zero for faults that need no other node.
    pub fetch: Percentiles,
    /// From the answer, or from taking it up, until the page was mapped.
    pub install: Percentiles,
}

/// A distribution, in the unit that the field's name says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Percentiles {
    /// Half are at most this.
    pub p50: f64,
    /// 90 % are at most this.
    pub p90: f64,
    /// 99 % are at most this.
    pub p99: f64,
    /// 99.9 % are at most this.
    pub p999: f64,
    /// The largest.
    pub max: f64,
}

/// Pages that the guest did not use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FreePages {
    /// How many it reported to be free or put into its balloon, each time.
    pub reported: u64,
    /// How many of them had bytes here, which were dropped.
    pub dropped_here: u64,
    /// How many of them a donor has dropped.
    pub dropped_at_home: u64,
}

/// Pages fetched before they were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Prefetch {
    /// How many were fetched.
    pub issued: u64,
    /// How many of them were touched afterwards, or mapped along with one that was.
    pub used: u64,
    /// How many were evicted without that.
    pub wasted: u64,
    /// Touches that came while the page was on its way.
    pub late: u64,
}

#[cfg(test)]
mod tests;
