//! The status of a running VM or node.
//!
//! The types are what travels on the control socket and what `ssi-hv status --json` prints.
//! Fields that the report of a run has too are the report's own types.

pub mod heat;
pub mod rdma;

use serde::{Deserialize, Serialize};

use crate::report::{Boot, Faults, Guest, MemoryUsed, Node, Prefetch, TransportUsed};
use heat::HeatStatus;
use rdma::{NodeRdma, RdmaResources};

/// The version of what `ssi-hv status --json` prints.
pub const SCHEMA: u32 = 1;

/// Limit on the errors in a status: the newest ones; the report has all.
pub const ERRORS_MAX: usize = 20;

/// What a VM is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    /// Its memory is mapped, its processors do not run yet.
    Starting,
    /// Its processors run.
    Running,
    /// They are paused, by `ssi-hv pause` or because a donor cannot be reached.
    Paused,
    /// It is being ended.
    Ending,
}

/// One running VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VmStatus {
    /// Its name: what `--name` said, or `ssi-hv-PID`.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// What it is doing.
    pub state: VmState,
    /// Whether a user has paused it (`ssi-hv pause`).
    #[serde(default)]
    pub paused_by_user: bool,
    /// Since the start of the process.
    pub uptime_s: f64,
    /// What was booted.
    pub guest: Guest,
    /// How long its start took.
    pub boot: Boot,
    /// How pages travel.
    pub transport: TransportUsed,
    /// How much memory it has, and where.
    pub memory: MemoryUsed,
    /// Every node.
    pub nodes: Vec<NodeNow>,
    /// The faults so far.
    pub faults: Faults,
    /// Pages dropped here to make room.
    pub evictions: Evictions,
    /// Faults that had to wait until memory was free.
    pub stalled_for_memory: u64,
    /// Pages fetched before they were asked for.
    pub prefetch: Prefetch,
    /// What it uses of RDMA devices.
    #[serde(default)]
    pub rdma: RdmaResources,
    /// Errors reported since its start.
    #[serde(default)]
    pub errors_total: u64,
    /// The newest errors, one line each.
    pub errors: Vec<String>,
    /// The heat map, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heat: Option<HeatStatus>,
}

/// A node as its VM sees it now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeNow {
    /// What the report says of it.
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
    /// The last round trip of a small request, in microseconds; one is made every 2 s.
    pub round_trip_us: f64,
    /// The shortest of them.
    pub round_trip_us_min: f64,
    /// How often the donor could not be reached.
    pub outages: u64,
    /// Whether pages are read by RDMA just now.
    pub rdma: bool,
}

/// Pages dropped to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Evictions {
    /// All of them.
    pub total: u64,
    /// Pages that were the same at home.
    pub clean: u64,
    /// Pages of zeroes.
    pub zero: u64,
    /// Evictions that a touch cancelled; not part of the total.
    pub cancelled: u64,
}

/// What a node counted since its start: its report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeCounters {
    /// The version of the report's fields.
    pub schema: u32,
    /// Where it listens.
    pub listen: String,
    /// What there is to lend.
    pub memory_bytes: u64,
    /// What is lent now.
    pub lent_bytes: u64,
    /// Leases now.
    pub leases: usize,
    /// Leases granted.
    pub leases_granted: u64,
    /// Leases that were not renewed in time.
    pub leases_expired: u64,
    /// Pages sent to VMs.
    pub pages_read: u64,
    /// Pages stored for VMs.
    pub pages_written: u64,
    /// Pages whose bytes it dropped because guests had freed them.
    pub pages_dropped: u64,
    /// What it has of RDMA.
    #[serde(default)]
    pub rdma: NodeRdma,
}

/// One running node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeStatus {
    /// Its process.
    pub pid: u32,
    /// Since its start.
    pub uptime_s: f64,
    /// What it counted.
    #[serde(flatten)]
    pub counters: NodeCounters,
}

/// Everything that runs here: what `ssi-hv status --json` prints.
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
