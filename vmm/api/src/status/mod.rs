//! The status of a running VM or node.
//!
//! The types travel on the control socket and are printed by `ssi-hv status --json`. Fields that
//! the report of a run has too use the report's types.

mod connections;
pub mod heat;
pub mod placement;
pub mod rdma;
pub mod transport;

use serde::{Deserialize, Serialize};

use crate::report::{
    Boot, Coherence, Faults, Guest, MemoryUsed, Node, PolicyUsed, Prefetch, RateLimited,
    TransportUsed,
};
pub use connections::{ConnectionsDropped, MemberUse, NodeConnections};
use heat::HeatStatus;
use placement::PlacementStatus;
use rdma::{NodeRdma, RdmaResources};

/// The version of the output of `ssi-hv status --json`.
pub const SCHEMA: u32 = 1;

/// Limit of errors in the status, the newest ones; the report has all.
pub const ERRORS_MAX: usize = 20;

/// The state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// Its memory exists; its vCPUs do not run yet.
    Starting,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs are paused, by a user or because a donor cannot be reached.
    Paused,
    /// It is ending.
    Ending,
}

/// One running VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VmStatus {
    /// Its name: from `--name`, or `ssi-hv-PID`.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    /// Its state.
    pub state: VmState,
    /// Whether a user has paused it (`ssi-hv pause`).
    #[serde(default)]
    pub paused_by_user: bool,
    /// Seconds since the start of the process.
    pub uptime_s: f64,
    /// What was booted.
    pub guest: Guest,
    /// How long the start took.
    pub boot: Boot,
    /// How pages travel.
    pub transport: TransportUsed,
    /// How much memory it has, and where.
    pub memory: MemoryUsed,
    /// Every node.
    pub nodes: Vec<NodeNow>,
    /// The faults so far.
    pub faults: Faults,
    /// What each vCPU does; empty where all are on one node.
    #[serde(default)]
    pub vcpus: Vec<VcpuNow>,
    /// The memory that nodes share; absent where all vCPUs are on one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coherence: Option<Coherence>,
    /// What moves vCPUs between nodes; absent where all vCPUs are on one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu_policy: Option<PolicyUsed>,
    /// Pages dropped locally to free memory.
    pub evictions: Evictions,
    /// Faults that waited until memory was free.
    pub stalled_for_memory: u64,
    /// Pages fetched before they were touched.
    pub prefetch: Prefetch,
    /// Devices with limits of their rate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rate_limits: Vec<RateLimited>,
    /// What it uses of RDMA devices.
    #[serde(default)]
    pub rdma: RdmaResources,
    /// When its certificate expires, in seconds since 1970; absent without credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_not_after: Option<i64>,
    /// The etcd of `--cluster`; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterNow>,
    /// Number of errors reported since its start.
    #[serde(default)]
    pub errors_total: u64,
    /// The newest errors, one line each.
    pub errors: Vec<String>,
    /// The heat map, if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heat: Option<HeatStatus>,
    /// Where its memory is, if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementStatus>,
}

/// The etcd from which a VM has its donors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ClusterNow {
    /// Whether it answers. The VM does not depend on that.
    pub connected: bool,
    /// For how long that has been so, in seconds.
    pub since_s: f64,
    /// Nodes that are registered, as it answered last.
    pub nodes: u64,
    /// Why it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What a vCPU does or waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum VcpuState {
    /// It runs, or is ready to.
    Running,
    /// It is halted until an interrupt.
    Halted,
    /// The guest has not started it.
    Offline,
    /// It waits for a page.
    Page,
    /// The VM is paused.
    Paused,
    /// Its node does not say.
    Unknown,
}

/// One vCPU now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VcpuNow {
    /// The vCPU.
    pub cpu: u32,
    /// Its node.
    pub node: u32,
    /// What it does.
    pub state: VcpuState,
    /// The guest-physical address of the page that it waits for; `null` unless it does.
    pub page: Option<u64>,
}

/// A node as its VM sees it now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeNow {
    /// Its fields of the report.
    #[serde(flatten)]
    pub node: Node,
    /// Its link; `null` for the compute node and for `loopback`.
    pub link: Option<LinkNow>,
}

/// A link to a donor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LinkNow {
    /// Whether the donor can be reached, as far as is known.
    pub reachable: bool,
    /// The last round trip of a small request, in microseconds; one is sent every 2 s.
    pub round_trip_us: f64,
    /// The shortest round trip.
    pub round_trip_us_min: f64,
    /// How often the donor became unreachable.
    pub outages: u64,
    /// Whether pages are currently read by RDMA.
    pub rdma: bool,
}

/// Pages dropped to free memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Evictions {
    /// The total.
    pub total: u64,
    /// Clean pages.
    pub clean: u64,
    /// Pages of zeroes.
    pub zero: u64,
    /// Pages that counted as dirty and were equal to their home's copy.
    #[serde(default)]
    pub unchanged: u64,
    /// Evictions cancelled by a touch; not part of the total.
    pub cancelled: u64,
}

/// The counters of a node since its start: its report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeCounters {
    /// The version of the report's fields.
    pub schema: u32,
    /// The address on which it listens.
    pub listen: String,
    /// Memory that it can lend.
    pub memory_bytes: u64,
    /// Memory lent now.
    pub lent_bytes: u64,
    /// Current leases.
    pub leases: usize,
    /// Leases granted.
    pub leases_granted: u64,
    /// Leases that were not renewed in time.
    pub leases_expired: u64,
    /// Pages sent to VMs.
    pub pages_read: u64,
    /// Pages stored for VMs.
    pub pages_written: u64,
    /// Pages dropped because guests had freed them.
    pub pages_dropped: u64,
    /// Its connections.
    #[serde(default)]
    pub connections: NodeConnections,
    /// What each member of the cluster uses; empty without rules.
    #[serde(default)]
    pub members: Vec<MemberUse>,
    /// When its certificate expires, in seconds since 1970; absent without credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_not_after: Option<i64>,
    /// Its RDMA resources.
    #[serde(default)]
    pub rdma: NodeRdma,
}

/// One running node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeStatus {
    /// Its process id.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_s: f64,
    /// Its counters.
    #[serde(flatten)]
    pub counters: NodeCounters,
}

/// Everything that runs on this host for this user: the output of `ssi-hv status --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Everything {
    /// [`SCHEMA`].
    pub schema: u32,
    /// VMs by process.
    pub vms: Vec<VmStatus>,
    /// Nodes by process.
    pub nodes: Vec<NodeStatus>,
}

#[cfg(test)]
mod tests;
