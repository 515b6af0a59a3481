//! The report of a run: JSON for scripts, with a `schema` number.
//!
//! A field may be added under the same number; renaming or removing one, or changing its meaning or
//! unit, increments it.

mod coherence;
mod details;
mod losses;
mod several;

pub use coherence::{
    Coherence, HOTTEST_MAX, HotPage, HotPageNode, NodeState, Peer, PeerTransport, Transfers,
};
pub use details::{
    Distribution, Distributions, DrainState, DrainUsed, Exec, FaultCounts, RateLimited,
    RebalanceState, RebalanceUsed, ReplicasUsed, TIMELINE_SAMPLES_MAX, Timeline,
};
pub use losses::{Extent, Extents, LostUsed, NodeLost, listed};
pub use several::{NodeClock, PolicyKind, PolicyUsed, StayReason, VcpuStays};

use serde::{Deserialize, Serialize};

/// The version of the report's fields.
pub const SCHEMA: u32 = 1;

/// The `outcome` of a run that has not ended, in reports requested while it runs.
pub const RUNNING: &str = "running";

/// All results of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The host that ran the vCPUs.
    pub host: Host,
    /// The guest.
    pub guest: Guest,
    /// Memory of the compute node that the guest used, at the end.
    pub memory: MemoryUsed,
    /// How long the start took.
    pub boot: Boot,
    /// How pages travelled.
    pub transport: TransportUsed,
    /// Every node of the run.
    pub nodes: Vec<Node>,
    /// The served faults.
    pub faults: Faults,
    /// Pages dropped locally to free memory.
    pub evictions: u64,
    /// Of these, pages that counted as dirty and were equal to their home's copy.
    #[serde(default)]
    pub evictions_unchanged: u64,
    /// Pages that the guest did not use.
    pub free_pages: FreePages,
    /// Pages fetched before they were touched.
    pub prefetch: Prefetch,
    /// The memory that nodes share; present if vCPUs are on several nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coherence: Option<Coherence>,
    /// What moves vCPUs between nodes; present if they are on several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu_policy: Option<PolicyUsed>,
    /// How many faults took how long; present if the guest ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distributions: Option<Distributions>,
    /// Faults over time; present if the guest ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
    /// Devices with limits of their rate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rate_limits: Vec<RateLimited>,
    /// The command of `--exec`, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec: Option<Exec>,
    /// Errors in order of time, one line each.
    pub errors: Vec<String>,
    /// How the run ended: a name from `docs/exit-codes.md`; [`RUNNING`] while it has not.
    pub outcome: String,
    /// The exit code of the process.
    pub exit_code: u8,
}

impl Report {
    /// Creates a report with only its schema and the host.
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
/// Times from emulated hosts are not representative; only their ratios are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Virtualization {
    /// The processor, through its virtualization extension.
    Hardware,
    /// Software, on this host or on the host's own host.
    #[default]
    Emulated,
}

/// The host that ran the vCPUs.
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
    /// Its number of vCPUs.
    pub cpus: u32,
    /// The host CPU of each vCPU, in order; `null` without pinning.
    #[serde(default)]
    pub cpu_pinning: Option<Vec<u32>>,
    /// Whether halted vCPUs keep these host CPUs.
    #[serde(default)]
    pub dedicated_cpus: bool,
    /// Where its interrupt controllers are: `kernel` or `user`.
    #[serde(default = "kernel")]
    pub irqchip: String,
    /// The file of its kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
}

/// Where the interrupt controllers of older releases are.
fn kernel() -> String {
    "kernel".to_owned()
}

/// Memory of the compute node that the guest uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MemoryUsed {
    /// Memory of the guest with its home here.
    pub home_here_bytes: u64,
    /// How much of the rest may be local at once.
    pub cache_bytes: u64,
    /// How much of the rest is local or in transit.
    pub cached_bytes: u64,
    /// Memory of the host that the guest's memory uses.
    pub resident_bytes: u64,
    /// How much of that is mapped by huge pages; `null` when unknown.
    pub huge_bytes: Option<u64>,
    /// Memory added to the guest; `null` without `--hotplug-memory`.
    #[serde(default)]
    pub hotplug: Option<HotplugUsed>,
    /// Memory on donors with two copies; `null` without `--replicas 2`.
    #[serde(default)]
    pub replicas: Option<ReplicasUsed>,
    /// Pages that donors could neither read nor change; `null` without such donors.
    #[serde(default)]
    pub sealing: Option<SealingUsed>,
    /// The last donor that was drained; `null` when none was.
    #[serde(default)]
    pub drain: Option<DrainUsed>,
    /// The last rebalancing of memory between donors; `null` when there was none.
    #[serde(default)]
    pub rebalance: Option<RebalanceUsed>,
    /// Memory that has moved between donors because of its heat.
    #[serde(default)]
    pub moved_by_heat_bytes: u64,
    /// Pages that were lost with donors; `null` when no donor was lost.
    #[serde(default)]
    pub lost: Option<LostUsed>,
}

/// Sealed pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SealingUsed {
    /// How many were sealed, to be written back.
    pub pages_sealed: u64,
    /// How many were fetched and opened.
    pub pages_opened: u64,
    /// How many did not open, each time: a donor or the network had changed them.
    pub pages_rejected: u64,
}

/// Memory that is plugged while the guest runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HotplugUsed {
    /// The limit.
    pub max_bytes: u64,
    /// Bytes that the guest was asked to use.
    pub requested_bytes: u64,
    /// Bytes that are plugged.
    pub plugged_bytes: u64,
}

/// How long the guest's start took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Boot {
    /// From the start of the process until the guest's init ran, in milliseconds; `null` when that
    /// was not reported. After a restart, from the restart.
    pub to_init_ms: Option<f64>,
    /// How often the guest rebooted and was booted again.
    #[serde(default)]
    pub restarts: u64,
}

/// How pages travelled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TransportUsed {
    /// `rdma`, `tcp`, `udp`, `mixed` (not the same from all donors), `loopback`, or `none` when all
    /// memory was local.
    pub kind: String,
    /// The tier of the slowest link: `rdma`, `fast-tcp`, `slow`; `none` for `loopback` and `none`.
    pub tier: String,
    /// How prefetched pages travelled, with the values of `kind`.
    #[serde(default)]
    pub bulk: String,
}

/// The role of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It runs vCPUs.
    #[default]
    Compute,
    /// It lends memory.
    Donor,
}

/// A node of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Node {
    /// Its number; 0 is the host of the VM's process.
    pub id: u32,
    /// Its role.
    pub role: Role,
    /// Its address; `null` for the compute node and for `loopback`.
    pub address: Option<String>,
    /// Guest memory that it holds: for the compute node its local budget, for a donor the pages
    /// with their home there.
    pub memory_bytes: u64,
    /// Pages fetched from it.
    pub pages_fetched: u64,
    /// Pages written back to it.
    pub pages_written_back: u64,
    /// Whether it gets sealed pages only.
    #[serde(default)]
    pub sealed: bool,
    /// The vCPUs that run on it.
    #[serde(default)]
    pub cpus: Vec<u32>,
    /// Whether it takes part; `null` for a donor, and where all vCPUs are on one node.
    #[serde(default)]
    pub state: Option<NodeState>,
    /// What was lost with it; `null` unless its state is `lost`, and where node 0 does not know.
    #[serde(default)]
    pub lost: Option<NodeLost>,
    /// Its round trip to node 0, the best of the last second, in microseconds; `null` for node 0
    /// and donors.
    #[serde(default)]
    pub round_trip_us: Option<f64>,
    /// How the time of its vCPUs follows that of node 0; `null` for node 0 and donors, and before
    /// their clocks were compared.
    #[serde(default)]
    pub clock: Option<NodeClock>,
    /// How the memory that nodes share travels to each other node; empty for a donor, and where all
    /// vCPUs are on one node.
    #[serde(default)]
    pub peers: Vec<Peer>,
    /// The age of its `transfers`, in seconds; `null` for node 0 and donors.
    #[serde(default)]
    pub counted_s_ago: Option<f64>,
    /// What it did with the memory that nodes share; `null` for a donor, and where all vCPUs are on
    /// one node.
    #[serde(default)]
    pub transfers: Option<Transfers>,
    /// The remote faults that it served; `null` for a compute node.
    pub faults: Option<FaultKind>,
    /// Network traffic of pages by TCP or UDP; `null` for the compute node and for `loopback`.
    pub traffic: Option<Traffic>,
    /// Counters of RDMA; `null` where there was none from the start.
    pub rdma: Option<RdmaUsed>,
    /// The speed of the path to it; `null` for the compute node and for `loopback`.
    #[serde(default)]
    pub path: Option<PathUsed>,
}

/// The path to a donor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathUsed {
    /// How pages that vCPUs waited for travelled at the start: `rdma`, `tcp` or `udp`.
    pub faults: String,
    /// How prefetched pages travelled at the start.
    pub bulk: String,
    /// Its current tier: `rdma`, `fast-tcp`, `slow`.
    pub tier: String,
    /// How often the tier changed.
    pub tier_changes: u64,
    /// The current latency of a page, in microseconds.
    pub latency_estimate_us: f64,
    /// The measurement of TCP at the start, if there was one.
    pub tcp: Option<PathMeasured>,
    /// The measurement of UDP at the start, if it replaces TCP.
    pub udp: Option<PathMeasured>,
    /// The measurement of RDMA at the start, if there was one.
    pub rdma: Option<PathMeasured>,
}

/// The measurement of a path at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathMeasured {
    /// Median round trip of 64 bytes, in microseconds.
    pub small_us: f64,
    /// Median round trip of a page, in microseconds.
    pub page_us: f64,
    /// Bytes per second of a stream of page runs.
    pub stream_bytes_per_second: f64,
}

/// Pages between the compute node and a donor, by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Traffic {
    /// Received for waiting vCPUs.
    pub urgent: TrafficClass,
    /// Received by prefetching.
    pub prefetch: TrafficClass,
    /// Sent as write-backs.
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
    /// The size of the pages, 4096 bytes each.
    pub plain_bytes: u64,
    /// Bytes sent for them, without headers.
    pub wire_bytes: u64,
    /// How many were sent as fewer bytes, zero pages included.
    pub pages_compressed: u64,
    /// Whether they are compressed now, or were at the end.
    pub compressing: bool,
}

/// Counters of RDMA with a donor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RdmaUsed {
    /// Pages fetched by READ.
    pub pages_read: u64,
    /// Pages written back by WRITE.
    pub pages_written: u64,
    /// Connections made.
    pub connections: u64,
    /// Of these, failed: pages continued over TCP.
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
    /// The page's bytes were local.
    pub minor: FaultKind,
    /// First writes to pages that were mapped write-protected.
    pub write_protect: FaultKind,
    /// The stages of remote faults: the same as in `remote`.
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
    /// The stages of that time.
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
    /// Half of the values are this or less.
    pub p50: f64,
    /// 90 % are this or less.
    pub p90: f64,
    /// 99 % are this or less.
    pub p99: f64,
    /// 99.9 % are this or less.
    pub p999: f64,
    /// The largest.
    pub max: f64,
}

/// Pages that the guest did not use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FreePages {
    /// How many it reported as free or put into its balloon, each time.
    pub reported: u64,
    /// How many of them had local bytes, which were dropped.
    pub dropped_here: u64,
    /// How many of them a donor has dropped.
    pub dropped_at_home: u64,
}

/// Pages fetched before they were touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Prefetch {
    /// How many were fetched.
    pub issued: u64,
    /// How many of them were touched afterwards, or mapped along with one that was.
    pub used: u64,
    /// How many were evicted untouched.
    pub wasted: u64,
    /// Touches of a page while it was in transit.
    pub late: u64,
    /// Untouched pages that were filled with zeroes, since a replayed working set has them.
    pub replayed: u64,
}

#[cfg(test)]
mod tests;
