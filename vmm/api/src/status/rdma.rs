//! What a process uses of RDMA devices, and which connections a node has.

use serde::{Deserialize, Serialize};

/// What this process uses of what there is only so much of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RdmaResources {
    /// Memory that is pinned for adapters.
    pub pinned_bytes: InUse,
    /// Every device that is open.
    pub resources: Vec<DeviceInUse>,
}

/// What is in use of something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct InUse {
    /// By this process.
    pub in_use: u64,
    /// How much there may be, for the whole host where it is the device's; `null` for no limit.
    pub limit: Option<u64>,
}

/// What is in use of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DeviceInUse {
    /// The device.
    pub device: String,
    /// One for each connection.
    pub queue_pairs: InUse,
    /// Where requests complete.
    pub completion_queues: InUse,
    /// Pieces of memory that it may reach.
    pub memory_regions: InUse,
    /// What keeps VMs apart.
    pub protection_domains: InUse,
}

/// What a node has of RDMA.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeRdma {
    /// What it uses.
    #[serde(flatten)]
    pub used: RdmaResources,
    /// Connections of VMs.
    pub connections: InUse,
    /// Each of them.
    pub endpoints: Vec<Endpoints>,
}

/// Both ends of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Endpoints {
    /// The VM.
    pub vm: String,
    /// What it is for: `urgent`, `prefetch` or `bulk`.
    pub class: String,
    /// Where the TCP connection comes from that goes with it.
    pub peer: String,
    /// The device here.
    pub device: String,
    /// This end.
    pub here: Endpoint,
    /// The VM's end.
    pub there: Endpoint,
}

/// One end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Endpoint {
    /// The number of its queue pair.
    pub queue_pair: u32,
    /// The address of its port.
    pub address: String,
    /// The local identifier of its port; 0 on Ethernet.
    pub lid: u16,
}
