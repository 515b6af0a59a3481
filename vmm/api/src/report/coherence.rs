//! Parts of the report of VMs whose vCPUs are on several nodes.

use serde::{Deserialize, Serialize};

use super::Percentiles;

/// Limit of [`Coherence::hottest`].
pub const HOTTEST_MAX: usize = 50;

/// Whether a node takes part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum NodeState {
    /// Nothing has come from it yet.
    #[default]
    Starting,
    /// It reports.
    Up,
    /// Nothing has come from it for 3 s.
    Silent,
    /// The VM has ended, and its part with it.
    Ended,
    /// It was lost, and the VM ended for that.
    Lost,
}

/// What carries memory between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum PeerTransport {
    /// TCP, unencrypted.
    #[serde(rename = "tcp")]
    Tcp,
    /// TCP under TLS.
    #[serde(rename = "tcp+tls")]
    Tls,
    /// RDMA.
    #[serde(rename = "rdma")]
    Rdma,
}

impl PeerTransport {
    /// Its name in the report.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Tls => "tcp+tls",
            Self::Rdma => "rdma",
        }
    }
}

/// How memory travels from a node to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Peer {
    /// The other node.
    pub node: u32,
    /// What the newest connection is made of.
    pub transport: PeerTransport,
    /// Connections made so far: more than one after others broke.
    pub connections: u32,
    /// Pages that the node got from the other one.
    #[serde(default)]
    pub pages_received: u64,
}

/// What a node asked for, got and gave of the memory that nodes share. Counts are of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Transfers {
    /// Faults of its vCPUs and devices, also of those that needed no other node.
    pub faults: u64,
    /// Requests for a read.
    pub reads: u64,
    /// Requests for a write, without a copy.
    pub writes: u64,
    /// Requests for a write to a page of which it had a copy.
    pub upgrades: u64,
    /// Pages that came from another compute node.
    pub pages_received: u64,
    /// Pages that came from their home.
    pub pages_from_home: u64,
    /// Pages of zeroes, for which no bytes travelled.
    pub pages_zero: u64,
    /// Pages sent to another compute node.
    pub pages_sent: u64,
    /// Copies given up because another node writes.
    pub invalidations: u64,
    /// Pages that were held for their vCPU.
    pub holds: u64,
    /// How long, in microseconds.
    pub hold_us: Percentiles,
    /// Pages that a vCPU lost before it progressed.
    pub early_losses: u64,
    /// Pages requested ahead of their fault, together with others that a vCPU lost.
    pub requested_ahead: u64,
    /// Starvation tokens received.
    pub tokens: u64,
    /// Requests that another node took part in.
    pub requests: u64,
    /// How long they took, in microseconds, from the fault, or the request
    /// ahead of one, until the page was mapped.
    pub request_us: Percentiles,
    /// Blocks that were given to the node.
    pub blocks_taken: u64,
    /// Blocks of the node that were split.
    pub blocks_split: u64,
    /// Split blocks in its directory, now or at the end.
    pub split_blocks: u64,
    /// Pages evicted.
    pub evictions: u64,
    /// Of these, pages that were written to their home.
    pub write_backs: u64,
    /// Faults that waited until local memory was free.
    pub stalled_for_memory: u64,
    /// Page tables that it has and other nodes can write as well, now or at the end.
    pub merged_tables: u64,
    /// Changes of these that its vCPUs made and other nodes took over.
    pub table_changes: u64,
    /// Messages that waited until such changes were made everywhere.
    pub held_for_tables: u64,
}

/// How often a node got a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HotPageNode {
    /// The node.
    pub node: u32,
    /// For a read.
    pub reads: u64,
    /// For a write.
    pub writes: u64,
}

/// A page that nodes take from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct HotPage {
    /// Its guest-physical address.
    pub address: u64,
    /// How often nodes got it, at least.
    pub transfers: u64,
    /// How often at most in addition: before the page was among those that are counted.
    pub more_max: u64,
    /// The nodes that got it.
    pub nodes: Vec<HotPageNode>,
}

/// The memory that nodes share: the sums over all nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Coherence {
    /// The sum of each field of [`Transfers`]; times are of all nodes together.
    pub total: Transfers,
    /// The pages that nodes got most often from each other, the most frequent first; at most 50.
    pub hottest: Vec<HotPage>,
}
